"""Radix tree and page pool by themselves: splits, replacement, pruning, holds, order of eviction, growth."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from irminsul_jax.cache import CacheConfig, LatentCache, Namespace
from irminsul_jax.cache.pool import PagePool
from irminsul_jax.cache.radix import RadixTree, agreeing
from irminsul_jax.errors import CacheError, ConfigError, RequestError
from tests.cache.helpers import NS, admit, check_balance, counts, join, serve, text

NOBODY = np.zeros(0, np.int32)


def take(pool: PagePool, count: int) -> tuple[np.ndarray, np.ndarray]:
    taken = pool.take(count, NOBODY)
    assert taken is not None
    return taken


def everything_lives(handles: np.ndarray) -> np.ndarray:
    return np.ones(len(handles), bool)


def insert(tree: RadixTree, tokens, first_handle: int, contribution: int = 0, alive=everything_lives, owner: int = 0):
    tokens = np.array(tokens, np.int32)
    handles = np.arange(first_handle, first_handle + len(tokens), dtype=np.int64)
    return tree.insert(tokens, handles, np.full(len(tokens), contribution, np.uint8), owner, alive).tolist()


def handles(tree: RadixTree, tokens) -> list[int]:
    return tree.match(np.array(tokens, np.int32)).handles.tolist()


def test_splits_keep_every_path():
    tree = RadixTree()
    insert(tree, [1, 2, 3, 4, 5], 100)
    insert(tree, [1, 2, 3, 9], 200, owner=1)
    insert(tree, [1, 2], 300)
    insert(tree, [1, 7], 400)
    insert(tree, [8], 500)
    assert len(tree) == 5 + 1 + 1 + 1
    assert handles(tree, [1, 2, 3, 4, 5, 6]) == [100, 101, 102, 103, 104]
    assert handles(tree, [1, 2, 3, 9]) == [100, 101, 102, 203]
    assert tree.match(np.array([1, 2, 3, 9], np.int32)).owner == 1
    assert handles(tree, [1, 7, 7]) == [100, 401]
    assert handles(tree, [8]) == [500]
    assert handles(tree, [3]) == []


def test_standing_rows_are_returned_and_replaced_by_purer_or_living_ones():
    tree = RadixTree()
    assert insert(tree, [1, 2, 3, 4], 100, contribution=2) == [100, 101, 102, 103]
    assert insert(tree, [1, 2, 3, 4], 200, contribution=3) == [100, 101, 102, 103]
    assert insert(tree, [1, 2], 300, contribution=0) == [300, 301]
    assert handles(tree, [1, 2, 3, 4]) == [300, 301, 102, 103]
    assert insert(tree, [1, 2, 3, 4], 400, alive=lambda h: h != 301) == [300, 401, 402, 403]


def test_prune_forgets_what_no_match_reaches():
    tree = RadixTree()
    insert(tree, [1, 2, 3], 100)
    insert(tree, [1, 2, 9, 9, 9], 200)
    insert(tree, [5, 6], 300)
    tree.prune(lambda h: (h != 203) & (h != 300))
    assert handles(tree, [1, 2, 3]) == [100, 101, 102]
    assert handles(tree, [1, 2, 9, 9, 9]) == [100, 101, 202]
    assert handles(tree, [5, 6]) == []
    assert len(tree) == 4
    tree.prune(lambda h: h != 101)
    assert len(tree) == 1


@pytest.mark.parametrize(
    ("a", "b", "n"), [([], [1], 0), ([1], [1], 1), ([1, 2], [1, 3], 1), ([5], [6], 0), ([1, 2, 3], [1, 2], 2)]
)
def test_agreeing(a, b, n):
    assert agreeing(np.array(a), np.array(b)) == n


def test_pool_hands_out_consecutive_pages_and_never_page_zero():
    pool = PagePool(6)
    own, evicted = take(pool, 5)
    assert own.tolist() == [1, 2, 3, 4, 5]
    assert evicted.tolist() == []
    assert pool.take(1, NOBODY) is None
    pool.drop(own)
    assert pool.free == pool.total == 5
    with pytest.raises(CacheError, match="more often"):
        pool.drop(own[:1])
    with pytest.raises(CacheError, match="at least 2"):
        PagePool(1)


def test_unbounded_pool_grows_and_keeps_what_it_knows():
    pool = PagePool(None)
    first, _ = take(pool, 3)
    rows = (first[:, None] * 64 + np.arange(64)).reshape(-1)
    pool.describe(rows, np.arange(192), np.full(192, 7, np.uint8))
    named = pool.handles(rows)
    more, evicted = take(pool, 1000)
    assert len(np.unique(join(first, more))) == 1003
    assert not len(evicted)
    assert pool.alive(named).all()
    assert pool.base[rows].tolist() == list(range(192))
    assert pool.free + pool.held + pool.evictable == pool.total


def test_longest_unused_goes_first_and_later_positions_before_earlier():
    cache = LatentCache(CacheConfig(), num_pages=13)
    a, b = text(1, 256), text(2, 256)
    serve(cache, a)
    serve(cache, b)
    reader = admit(cache, join(a, text(3, 10)))  # a is used again, b is now the older one
    cache.release(reader)
    blocker = admit(cache, text(4, 6 * 64))  # four pages are free: two of b must go
    assert counts(cache.plan(a, NS))[0] == 255
    assert counts(cache.plan(b, NS))[0] == 128
    cache.release(blocker)


def test_held_pages_are_never_evicted():
    cache = LatentCache(CacheConfig(), num_pages=9)
    a = text(1, 256)
    serve(cache, a)
    reader = admit(cache, join(a, text(3, 10)))
    assert cache.reserve(cache.plan(text(5, 4 * 64), NS), NS) is None
    assert cache.held_pages == 5
    other = admit(cache, text(5, 3 * 64))
    assert counts(cache.plan(a, NS))[0] == 255
    cache.release(reader)
    cache.release(other)
    check_balance(cache)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize("new", [0, 1, 64])
def test_page_edges(length, new):
    cache = LatentCache(CacheConfig(), num_pages=40)
    reservation = admit(cache, text(1, length), max_new=new)
    assert len(reservation.own_pages) == -(-(length + new) // 64)
    assert len(reservation.rows) == len(reservation.shifts) == length + new
    assert (reservation.rows[:1] % 64 == 0).all()
    cache.publish(reservation, text(1, length))
    cache.release(reservation)
    assert cache.evictable_pages == -(-length // 64)
    again = cache.plan(join(text(1, length), text(2, 3)), NS)
    assert again.num_exact == length


def test_a_repeated_prompt_keeps_no_second_copy():
    cache, prompt = LatentCache(CacheConfig(), num_pages=40), text(1, 300)
    serve(cache, prompt)
    before = cache.stats()
    for _ in range(10):
        serve(cache, prompt)
    assert cache.stats() == before


def test_extended_publication_and_tokens_before_it():
    cache, prompt, reply = LatentCache(CacheConfig(), num_pages=40), text(1, 100), text(2, 50)
    reservation = admit(cache, prompt, max_new=50)
    assert counts(cache.plan(prompt, NS)) == (0, 0, 100)
    cache.publish(reservation, prompt)
    assert counts(cache.plan(prompt, NS)) == (99, 0, 1)
    cache.publish(reservation, join(prompt, reply[:30]))
    cache.publish(reservation, join(prompt, reply))
    assert counts(cache.plan(join(prompt, reply, reply), NS)) == (150, 49, 1)
    with pytest.raises(CacheError, match="do not continue"):
        cache.publish(reservation, join(prompt, reply, reply))
    cache.release(reservation)
    with pytest.raises(CacheError, match="released"):
        cache.publish(reservation, prompt)
    with pytest.raises(CacheError, match="released before"):
        cache.release(reservation)


def test_a_prompt_published_in_chunks_must_stay_itself():
    cache, prompt = LatentCache(CacheConfig(), num_pages=40), text(1, 300)
    reservation = admit(cache, prompt)
    cache.publish(reservation, prompt[:128])
    assert counts(cache.plan(prompt, NS)) == (128, 0, 172)
    with pytest.raises(CacheError, match="do not continue"):
        cache.publish(reservation, join(prompt[:128], text(2, 172)))
    cache.publish(reservation, prompt)
    assert counts(cache.plan(prompt, NS)) == (299, 0, 1)


def test_published_rows_do_not_change_with_the_callers_array():
    cache, prompt = LatentCache(CacheConfig(), num_pages=40), text(1, 100)
    mine = prompt.copy()
    serve(cache, mine)
    mine[:] = 0
    assert counts(cache.plan(prompt, NS)) == (99, 0, 1)


def test_memory_of_evicted_content_is_bounded():
    cache = LatentCache(CacheConfig(), num_pages=17)
    for seed in range(300):
        serve(cache, text(seed, 300))
    stats = cache.stats()
    assert stats["donors"] <= 10
    assert stats["tree_tokens"] <= 3 * 16 * 64
    assert stats["index_entries"] <= 3 * 16 * 64 // 8
    shared = LatentCache(CacheConfig(), num_pages=17)
    for seed in range(300):  # most of every path stays alive, but its head does not
        serve(shared, join(text(1000 + seed, 40), text(1, 400)))
    assert shared.stats()["tree_tokens"] <= 2 * 16 * 440
    for salt in range(50):
        serve(cache, text(salt, 300), Namespace(model="m", salt=str(salt)))
    assert cache.stats()["namespaces"] <= 15


@pytest.mark.parametrize(
    "bad", [np.zeros(0, np.int32), np.zeros((2, 2), np.int32), np.array([-1]), np.array([1 << 40])]
)
def test_malformed_prompts_are_refused(bad):
    # jaxtyping would refuse a matrix before the library does; users run without it
    plan = LatentCache.plan
    while hasattr(plan, "__wrapped__"):
        plan = plan.__wrapped__
    with pytest.raises((RequestError, TypeError)):
        plan(LatentCache(CacheConfig(), num_pages=None), bad, NS)


def test_configuration_is_checked_with_a_suggestion():
    with pytest.raises(ConfigError, match=r"did you mean 'anchor'\?"):
        CacheConfig(policy="ancor")
    bad: dict[str, Any]
    for bad in ({"min_run": 0}, {"seam": -1}, {"max_depth": -1}, {"max_depth": 255}, {"capacity_tokens": 0}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            CacheConfig(**bad)
    assert LatentCache(CacheConfig(capacity_tokens=1000), num_pages=None).total_pages == 16


def test_planning_imports_no_jax():
    code = "import sys; sys.modules['jax'] = None\n"
    code += "from irminsul_jax.cache import *; LatentCache(CacheConfig(), num_pages=2)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(p for p in sys.path if p)})
