"""What users of prefix caches reported, as behaviour of the planner. Each test covers the kind, not one example."""

import subprocess
import sys

import numpy as np
import pytest

from irminsul_jax.cache import CacheConfig, LatentCache, Namespace, Reason, TokenClass
from irminsul_jax.errors import CacheError, RequestError
from tests.cache.helpers import NS, admit, check_balance, check_tiling, counts, join, serve, text

CONTENT_POLICIES = ("anchor", "cdc", "cdc+s1")


def new_cache(policy: str = "anchor", num_pages: int | None = None, **options) -> LatentCache:
    return LatentCache(CacheConfig(policy=policy, **options), num_pages=num_pages)


@pytest.mark.parametrize("policy", CONTENT_POLICIES)
@pytest.mark.parametrize("header", [17, 45, 64])
def test_changing_header_before_constant_prompt(policy, header):
    cache, body = new_cache(policy), text(1, 3000)
    for turn in range(4):
        plan = serve(cache, join(text(100 + turn, header), body)).plan
        check_tiling(plan)
    assert plan.num_shifted >= (0.95 if policy == "anchor" else 0.85) * len(plan.tokens)
    assert plan.num_exact == 0


def test_prefix_policies_read_everything_again_behind_a_changed_header():
    for policy in ("prefix", "block-prefix"):
        cache, body = new_cache(policy), text(1, 3000)
        serve(cache, join(text(100, 45), body))
        assert counts(cache.plan(join(text(101, 45), body), NS)) == (0, 0, 3045)


def test_timestamp_of_changing_length_at_the_end_of_the_system_prompt():
    cache, system, rest = new_cache(), text(1, 500), text(2, 800)
    serve(cache, join(system, text(3, 9), rest))
    plan = cache.plan(join(system, text(4, 12), rest), NS)
    assert counts(plan) == (500, 799, 13)
    assert plan.runs[1].delta == 3


@pytest.mark.parametrize("edit_at", [40, 100, 333, 700])
def test_one_token_edit_in_the_middle(edit_at):
    cache, prompt = new_cache(), text(1, 1000)
    serve(cache, prompt)
    edited = prompt.copy()
    edited[edit_at] += 1
    plan = cache.plan(edited, NS)
    assert plan.num_exact == edit_at
    assert plan.num_shifted == 1000 - edit_at - 2
    assert [r.delta for r in plan.runs] == [0, 0]
    assert plan.depths[-1] == 1  # in place, yet behind another context: not pure


def test_everything_behind_a_deep_variation_point_is_owed():
    cache, before, behind = new_cache(), text(1, 4000), text(2, 3100)
    serve(cache, join(before, text(3, 50), behind))
    assert counts(cache.plan(join(before, text(4, 61), behind), NS)) == (4000, 3099, 62)


def test_permuted_short_tool_schemas():
    rng = np.random.default_rng(5)
    tools = [text(10 + i, int(n)) for i, n in enumerate(rng.integers(50, 400, 20))]
    cache, head = new_cache(), text(1, 60)
    serve(cache, join(head, *tools, text(2, 40)))
    plan = cache.plan(join(head, *(tools[i] for i in rng.permutation(20)), text(2, 40)), NS)
    assert plan.num_exact + plan.num_shifted >= 0.97 * len(plan.tokens)
    check_tiling(plan)


def test_many_small_deletions_keep_all_survivors():
    cache = new_cache()
    kept, thoughts = [text(10 + i, 150) for i in range(12)], [text(50 + i, 35) for i in range(12)]
    serve(cache, join(*(part for pair in zip(kept, thoughts, strict=True) for part in pair)))
    plan = cache.plan(join(*kept), NS)
    assert counts(plan) == (150, 11 * 150 - 1, 1)
    assert [r.delta for r in plan.runs] == [-35 * i for i in range(12)]


def test_condensed_history_keeps_the_tail():
    cache, tail = new_cache(), text(2, 900)
    serve(cache, join(text(1, 5000), tail))
    plan = cache.plan(join(text(3, 200), tail), NS)
    assert counts(plan) == (0, 899, 201)
    assert plan.runs[0].delta == -4800


def test_resynchronises_behind_retokenised_reply():
    cache, prompt, reply = new_cache(), text(1, 300), text(2, 200)
    serve(cache, prompt, generated=reply)
    retokenised = np.delete(reply, [60, 61])
    retokenised[60] += 1
    plan = cache.plan(join(prompt, retokenised, text(3, 40)), NS)
    assert plan.num_exact == 360
    assert plan.num_shifted == 200 - 60 - 3


def test_deleted_and_swapped_pieces():
    a, b, c = text(1, 200), text(2, 200), text(3, 200)
    cache = new_cache()
    serve(cache, join(a, b, c))
    deleted, swapped = cache.plan(join(a, c), NS), cache.plan(join(c, b, a), NS)
    assert counts(deleted) == (200, 199, 1)
    assert [r.delta for r in swapped.runs] == [-400, 0, 400]
    assert counts(swapped) == (0, 200 + 200 - 32 + 167, 32 + 32 + 1)
    assert swapped.recomputed_by_reason() == {"carve_out": 64, "last_token": 1}


def test_same_document_twice_and_moves_of_both_signs():
    a, b, c, doc = (text(i, 150) for i in range(4))
    cache = new_cache()
    serve(cache, join(text(9, 40), a, doc, b, c))
    plan = cache.plan(join(text(8, 40), c, doc, b, doc, a), NS)
    assert plan.num_shifted == 5 * 150 - 1
    assert {np.sign(r.delta) for r in plan.runs} == {-1, 0, 1}
    twice = [r for r in plan.runs if r.donor_start <= 190 < r.donor_start + r.length]
    assert len(twice) == 2


@pytest.mark.parametrize("policy", ["prefix", "block-prefix", *CONTENT_POLICIES, "window256"])
def test_last_token_is_computed_even_if_all_is_cached(policy):
    cache, a, b = new_cache(policy), text(1, 256), text(2, 256)
    serve(cache, join(a, b))
    for tokens in (join(a, b), join(b, a), join(a, b)[:1]):
        plan = cache.plan(tokens, NS)
        assert plan.rows[-1] < 0
        assert plan.reasons[-1] == Reason.LAST_TOKEN


def test_rows_computed_behind_hits_are_published_with_provenance():
    cache, body, news = new_cache(), text(1, 400), text(2, 100)
    first = serve(cache, join(text(3, 40), body))
    second = serve(cache, join(text(4, 50), body, news))
    third = serve(cache, join(text(5, 60), news, body))
    news_rows = third.rows[60:159]
    assert np.isin(news_rows // 64, second.own_pages).all()
    assert np.isin(third.rows[160:400] // 64, first.own_pages).all()  # the original, not a copy of a copy
    assert third.plan.depths[60] == 2
    assert third.plan.depths[60 + 100 + 30] == 1
    again = cache.plan(join(text(4, 50), body, news, text(6, 40)), NS)
    assert again.num_exact == 50
    assert (again.classes[50:550] == TokenClass.SHIFTED).all()  # its own path, in place, still not pure
    assert (again.rows[:550] == second.rows[:550]).all()


def test_exact_shifted_and_novel_in_one_request():
    cache, head, doc = new_cache(), text(1, 130), text(2, 210)
    first = serve(cache, join(head, text(3, 70), doc))
    reservation = admit(cache, join(head, text(4, 45), doc, text(5, 77)), max_new=20)
    plan = reservation.plan
    assert counts(plan) == (130, 210, 45 + 77)
    assert (plan.rows[:130] == first.rows[:130]).all()
    assert (plan.rows[175:385] == first.rows[200:410]).all()
    assert (plan.shifts[175:385] == -25).all()
    own = reservation.rows[reservation.is_own]
    expected = (reservation.own_pages[:, None] * 64 + np.arange(64)).reshape(-1)[: len(own)]
    assert (own == expected).all()
    assert len(own) == 45 + 77 + 20
    assert (reservation.shifts[reservation.is_own] == 0).all()


def test_repeated_moves_always_start_from_the_base_copy():
    cache, doc = new_cache(), text(1, 300)
    origin = serve(cache, join(text(2, 40), doc))
    for hop, header in enumerate((90, 33, 250, 64, 41, 500)):
        plan = serve(cache, join(text(10 + hop, header), doc, text(30 + hop, 10))).plan
        here = slice(header, header + 300)
        assert (plan.rows[here] == origin.rows[40:]).all()
        assert (plan.shifts[here] == header - 40).all()
        assert plan.depths[here].max() == 1


def test_shared_rows_survive_cancel_and_retry_of_another_request():
    cache, shared = new_cache(num_pages=20), text(1, 300)
    serve(cache, shared)
    reader = admit(cache, join(shared, text(2, 20)), max_new=10)
    for attempt in range(40):
        retry = admit(cache, join(shared, text(3, 100 + attempt)), max_new=200)
        assert not np.intersect1d(retry.own_pages, reader.held_pages).size
        cache.release(retry)
        check_balance(cache)
    assert cache.plan(join(shared, text(4, 10)), NS).num_exact == 300
    cache.release(reader)
    assert cache.held_pages == 0


def test_unused_plan_holds_nothing():
    cache, prompt = new_cache(num_pages=12), text(1, 300)
    serve(cache, prompt)
    before = cache.stats()
    for _ in range(5):
        cache.plan(prompt, NS)
        cache.plan(text(9, 100), Namespace(model="m", salt="never seen"))
    assert cache.stats() == before
    assert admit(cache, text(2, 11 * 64)).own_pages.size == 11  # the planned rows could be evicted


def test_keys_are_stable_across_processes():
    code = (
        "import numpy as np; from irminsul_jax.cache import Namespace; from irminsul_jax.cache import hashing as h\n"
        "t = np.arange(700, dtype=np.int32) * 7\n"
        "print(Namespace(model='m', adapter='a', salt='s').key.hex(), h.window_hash(t)[5], h.gear_hash(t)[99],"
        " h.gear_chunks(t).keys[0])"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(p for p in sys.path if p)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(runs) == 1
    assert runs == {"454871d03715d06a63b452de6fa7eb77 16764321472010760358 1245905311235012811 9939919154704285480\n"}


@pytest.mark.parametrize("policy", [*CONTENT_POLICIES, "window256"])
def test_forced_collisions_serve_nothing(policy):
    everything_collides = LatentCache(
        CacheConfig(policy=policy), num_pages=None, fingerprint=lambda keys: np.zeros_like(keys)
    )
    for seed in range(4):
        plan = serve(everything_collides, text(seed, 600)).plan
        assert counts(plan) == (0, 0, 600)


def test_namespaces_never_cross_and_salts_reveal_nothing():
    cache, prompt = new_cache(), text(1, 500)
    owner = Namespace(model="m", adapter="a", salt="tenant")
    serve(cache, prompt, owner)
    moved = join(text(2, 40), prompt)
    for tokens in (prompt, moved):
        stranger = cache.plan(tokens, Namespace(model="m", adapter="a", salt="other"))
        assert stranger.recomputed_by_reason() == {"novel": len(tokens) - 1, "last_token": 1}
        colleague = cache.plan(tokens, Namespace(model="m", adapter="b", salt="tenant"))
        assert colleague.num_exact == colleague.num_shifted == 0
        assert colleague.recomputed_by_reason()["namespace"] >= 499 - 32


def test_adapter_named_like_a_salt_is_another_namespace():
    a = Namespace(model="m", adapter="tenant-b", salt="")
    b = Namespace(model="m", adapter="", salt="tenant-b")
    assert a.key != b.key
    fields = ("", "a", "b", "ab", "a\0b", "1a")
    keys = {
        Namespace(model=m, adapter=x, policy=p, salt=s).key
        for m in fields
        for x in fields
        for p in fields
        for s in fields
    }
    assert len(keys) == len(fields) ** 4
    cache, prompt = new_cache(), text(1, 300)
    serve(cache, prompt, a)
    assert counts(cache.plan(prompt, b)) == (0, 0, 300)
    with pytest.raises(CacheError, match="another namespace"):
        cache.reserve(cache.plan(prompt, a), b)


def reason_counts(plan) -> dict[str, int]:
    check_tiling(plan)
    return plan.recomputed_by_reason()


def test_every_miss_has_its_reason():
    body = text(1, 400)
    cache = new_cache()
    serve(cache, join(text(2, 40), body))
    moved = join(text(3, 50), body)
    assert reason_counts(cache.plan(moved, NS)) == {"novel": 50, "last_token": 1}
    assert reason_counts(cache.plan(moved, NS, shift_refusal="rotary layout not declared")) == {
        "novel": 50, "gate": 399, "last_token": 1,
    }  # fmt: skip
    assert reason_counts(cache.plan(moved, NS, exact_only=True))["gate"] == 399
    assert reason_counts(cache.plan(moved, NS, max_depth=0)) == {"novel": 50, "depth": 399, "last_token": 1}
    assert reason_counts(cache.plan(body, NS)) == {"carve_out": 32, "last_token": 1}
    assert reason_counts(cache.plan(join(text(4, 60), body[:45], text(5, 60)), NS)) == {
        "novel": 119, "last_token": 1,
    }  # fmt: skip
    longer = new_cache(min_run=46)
    serve(longer, join(text(2, 40), body))
    assert reason_counts(longer.plan(join(text(4, 60), body[:45], text(5, 60)), NS)) == {
        "novel": 119, "too_short": 45, "last_token": 1,
    }  # fmt: skip
    seamed = new_cache(seam=8)
    serve(seamed, join(text(2, 40), body))
    plan = seamed.plan(moved, NS)
    assert reason_counts(plan) == {"novel": 50, "seam": 8, "last_token": 1}
    assert plan.runs[0].target == 58
    nothing = new_cache("none")
    serve(nothing, body)
    assert reason_counts(nothing.plan(body, NS)) == {"novel": 399, "last_token": 1}


@pytest.mark.parametrize("policy", ["prefix", "anchor"])
def test_evicted_content_is_told_apart_from_novel(policy):
    cache, prompt = new_cache(policy, num_pages=9), text(1, 256)
    serve(cache, prompt)
    serve(cache, text(2, 384))
    plan = cache.plan(prompt, NS)
    assert plan.num_exact == 128  # of its four pages, the two later ones had to go
    assert reason_counts(plan) == {"evicted": 127, "last_token": 1}
    if policy == "anchor":
        plan = cache.plan(join(text(3, 64), prompt), NS)
        assert plan.num_shifted == 96
        assert plan.recomputed_by_reason()["evicted"] == 127


def test_sinks_never_turn_up_elsewhere():
    cache, prompt = new_cache(), text(1, 300)
    serve(cache, prompt)
    plan = cache.plan(join(text(2, 100), prompt, text(3, 5)), NS)
    assert (plan.reasons[100:132] == Reason.CARVE_OUT).all()
    assert (plan.classes[132:400] == TokenClass.SHIFTED).all()


def test_block_prefix_serves_whole_pages():
    cache, prompt = new_cache("block-prefix"), text(1, 200)
    serve(cache, prompt)
    plan = cache.plan(join(prompt, text(2, 9)), NS)
    assert counts(plan) == (192, 0, 17)
    assert reason_counts(plan) == {"too_short": 8, "novel": 8, "last_token": 1}


def test_windows_on_the_fixed_grid():
    prompt = text(1, 1024)
    cache = new_cache("window256")
    serve(cache, prompt)
    on_grid = cache.plan(join(text(2, 256), prompt[256:]), NS)
    off_grid = cache.plan(join(text(2, 255), prompt[256:]), NS)
    assert counts(on_grid) == (0, 767, 257)
    assert off_grid.num_shifted == 0


def test_max_depth_bounds_generations():
    pieces = [text(10 + i, 120) for i in range(6)]
    for limit in (1, 2, None):
        cache = new_cache(max_depth=limit)
        deepest = []
        for turn in range(6):
            plan = serve(cache, join(text(100 + turn, 40), *pieces[: turn + 1])).plan
            deepest.append(int(plan.depths.max()))
        assert max(deepest) == (limit or 5)


def test_least_depth_wins_then_longest_left_context():
    doc = text(1, 100)
    deep = new_cache()
    serve(deep, join(text(2, 40), text(3, 200)))
    serve(deep, join(text(4, 50), text(3, 200), doc))  # doc at depth 1
    assert deep.plan(join(text(6, 70), doc, text(7, 9)), NS).depths[70] == 2
    pure = serve(deep, join(text(5, 60), doc), exact_only=True)
    plan = deep.plan(join(text(6, 70), doc, text(7, 9)), NS)
    assert (plan.rows[70:170] == pure.rows[60:]).all()
    left = new_cache()
    serve(left, join(text(2, 64), text(3, 10), doc))
    near = serve(left, join(text(4, 64), text(5, 31), doc), shift_refusal="both copies computed")
    plan = left.plan(join(text(6, 64), text(5, 31), doc, text(7, 9)), NS)
    assert (plan.rows[64:195] == near.rows[64:]).all()


@pytest.mark.parametrize("impure_first", [True, False])
def test_pure_rows_replace_impure_ones_never_the_reverse(impure_first):
    cache, body = new_cache(), text(1, 200)
    serve(cache, join(text(2, 40), body))
    target = join(text(3, 50), body, text(4, 60))
    order = [{}, {"exact_only": True}] if impure_first else [{"exact_only": True}, {}]
    for options in order:
        reservation = admit(cache, target, **options)
        if options:
            pure = reservation
        cache.publish(reservation, target)
        cache.release(reservation)
    plan = cache.plan(join(target, text(5, 3)), NS)
    assert plan.num_exact == 310
    assert (plan.rows[50:310] == pure.rows[50:310]).all() or not impure_first
    assert plan.depths.max() == 0
    part = new_cache()
    serve(part, join(text(2, 40), body))
    serve(part, target)
    serve(part, target[:120], exact_only=True)  # pure for a part of the path only
    plan = part.plan(join(target, text(5, 3)), NS)
    assert (plan.classes[:120] == TokenClass.EXACT).all()
    assert (plan.classes[120:310] == TokenClass.SHIFTED).all()


def test_full_cache_says_so_and_overwrites_nothing():
    cache = new_cache(num_pages=9)
    serve(cache, text(1, 300))
    holder = admit(cache, join(text(1, 300), text(2, 20)))
    rows = holder.rows.copy()
    plan = cache.plan(text(3, 300), NS)
    before = cache.stats()
    assert cache.reserve(plan, NS) is None
    assert cache.stats() == before
    with pytest.raises(RequestError, match=r"needs 9 pages \(513 tokens .* has 8 \(512 tokens\)"):
        cache.reserve(cache.plan(text(4, 500), NS), NS, max_new_tokens=13)
    with pytest.raises(CacheError, match="do not continue"):
        cache.publish(holder, text(9, 320))
    assert (holder.rows == rows).all()
    cache.release(holder)
    assert cache.reserve(plan, NS) is not None


def test_donors_are_given_up_where_they_leave_no_room():
    cache = new_cache(num_pages=9)
    doc = text(1, 448)
    serve(cache, join(text(2, 40), doc)[:500])
    tokens = join(text(3, 45), *(doc[i : i + 40] for i in range(0, 440, 80)))
    plan = cache.plan(tokens, NS)
    assert plan.num_shifted > 0
    reservation = cache.reserve(plan, NS, max_new_tokens=120)
    assert reservation is not None
    assert reservation.plan.num_shifted == 0
    assert reason_counts(reservation.plan)["evicted"] == plan.num_shifted
    assert (reservation.rows >= 64).all()


def test_stale_plan_is_refused():
    cache, prompt = new_cache(num_pages=9), text(1, 300)
    serve(cache, prompt)
    plan = cache.plan(prompt, NS)
    serve(cache, text(2, 500))
    with pytest.raises(CacheError, match="plan again"):
        cache.reserve(plan, NS)
    after_reset = cache.plan(text(2, 500), NS)
    assert after_reset.num_exact > 0
    cache.reset()
    with pytest.raises(CacheError, match="plan again"):
        cache.reserve(after_reset, NS)


def test_reset_forgets_pool_tree_and_index_together():
    cache, prompt = new_cache(num_pages=30), text(1, 300)
    serve(cache, prompt)
    running = admit(cache, join(text(2, 40), prompt))
    cache.reset()
    assert cache.free_pages == cache.total_pages == 29
    assert counts(cache.plan(prompt, NS)) == (0, 0, 300)
    with pytest.raises(CacheError, match="reset"):
        cache.publish(running, running.plan.tokens)
    cache.release(running)
    assert cache.free_pages == 29
