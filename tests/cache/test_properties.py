"""Planner and pool against a brute-force model, over random request histories."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from irminsul_jax.cache import CARVE_OUT, POLICIES, CacheConfig, LatentCache, Namespace, TokenClass
from irminsul_jax.errors import CacheError, RequestError
from tests.cache.helpers import check_balance, check_tiling, join, text

NAMESPACES = [Namespace(model="m", adapter=a, salt=s) for a in ("", "x") for s in ("", "x")]


class Model:
    """What is true, kept naively: every computed row with its whole context, every known prefix in a dictionary.

    `pure` is the definition itself: a row is pure if every row that it attended to was pure and stood there in exactly
    its own left context. `depth` is the formula over served (by prefix or by content) and recomputed context.
    """

    def __init__(self, cache: LatentCache):
        self.pool = cache._pool
        self.rows: dict[int, dict] = {}
        self.paths: dict[tuple, tuple[int, int]] = {}

    def alive(self, handle: int) -> bool:
        return bool(self.pool.alive(np.array([handle]))[0])

    def known_prefix(self, tokens, namespace) -> list[tuple[int, int]]:
        found = []
        for i in range(len(tokens) - 1):
            entry = self.paths.get((namespace, tokens[: i + 1].tobytes()))
            if entry is None or not self.alive(entry[0]):
                break
            found.append(entry)
        return found

    def check(self, plan, namespace, config: CacheConfig) -> None:
        prefix = self.known_prefix(plan.tokens, namespace)
        if config.max_depth is not None:
            deep = [i for i, (_, contribution) in enumerate(prefix) if contribution > config.max_depth]
            prefix = prefix[: deep[0]] if deep else prefix
        if config.exact_only:
            impure = [i for i, (_, contribution) in enumerate(prefix) if contribution]
            prefix = prefix[: impure[0]] if impure else prefix
        handles = self.pool.handles(np.maximum(plan.rows, 0))
        deepest = 0
        for i in range(len(plan.tokens)):
            if plan.rows[i] < 0:
                assert plan.depths[i] == deepest
                assert i >= len(prefix) or config.seam
                continue
            row = self.rows[int(handles[i])]
            assert row["token"] == plan.tokens[i]
            assert row["namespace"] == namespace
            assert plan.shifts[i] == i - row["base"]
            pure_here = row["pure"] and row["base"] == i and row["context"] == plan.tokens[:i].tobytes()
            if plan.classes[i] == TokenClass.EXACT:
                assert pure_here
            if i < len(prefix):
                assert int(handles[i]) == prefix[i][0]
                assert (plan.classes[i] == TokenClass.EXACT) == pure_here
                contribution = prefix[i][1]
            else:
                assert plan.classes[i] == TokenClass.SHIFTED
                contribution = row["depth"] + 1
            if plan.classes[i] == TokenClass.SHIFTED:
                assert min(i, row["base"]) >= CARVE_OUT
                assert not config.exact_only
            assert plan.depths[i] == contribution
            assert config.max_depth is None or contribution <= config.max_depth
            deepest = max(deepest, contribution)

    def publish(self, reservation, tokens) -> None:
        namespace, prompt = reservation.namespace, len(reservation.plan.tokens)
        handles = self.pool.handles(reservation.rows[: len(tokens)])
        depth, pure = 0, True
        for i, handle in enumerate(handles.tolist()):
            context = tokens[:i].tobytes()
            if i < prompt and reservation.plan.rows[i] >= 0:
                row = self.rows[handle]
                pure = pure and row["pure"] and row["base"] == i and row["context"] == context
                contribution = int(reservation.plan.depths[i])
                depth = max(depth, contribution)
            else:
                self.rows[handle] = {
                    "token": tokens[i], "base": i, "context": context,
                    "pure": pure, "depth": depth, "namespace": namespace,
                }  # fmt: skip
                assert (depth == 0) == pure
                contribution = depth
            key = (namespace, tokens[: i + 1].tobytes())
            old = self.paths.get(key)
            if old is None or not self.alive(old[0]) or contribution < old[1]:
                self.paths[key] = (handle, contribution)


BLOCKS = [text(1000 + i, n) for i, n in enumerate((20, 33, 40, 64, 65, 90, 130, 200))]

requests = st.fixed_dictionaries(
    {
        "namespace": st.sampled_from([0, 0, 0, 0, 1, 2, 3]),
        "header": st.sampled_from([0, 0, 0, 1, 31, 40, 64]),
        "blocks": st.lists(st.integers(0, len(BLOCKS) - 1), min_size=1, max_size=5),
        "reply": st.sampled_from([0, 0, 1, 40, 70]),
    }
)
configs = st.builds(
    CacheConfig,
    policy=st.sampled_from(["anchor", "anchor", *POLICIES[1:2], "cdc", "cdc+s1"]),
    min_run=st.sampled_from([32, 32, 16, 50]),
    max_depth=st.sampled_from([None, None, 0, 1, 2]),
    exact_only=st.sampled_from([False, False, True]),
    seam=st.sampled_from([0, 0, 5, 40]),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(requests, min_size=2, max_size=9), configs, st.sampled_from([None, None, 18, 30]))
def test_plans_agree_with_brute_force(history, config, num_pages):
    cache = LatentCache(config, num_pages=num_pages)
    model = Model(cache)
    for n, request in enumerate(history):
        namespace = NAMESPACES[request["namespace"]]
        tokens = join(text(n, request["header"]), *(BLOCKS[b] for b in request["blocks"]))
        reply = text(500 + n % 3, request["reply"])
        plan = cache.plan(tokens, namespace)
        check_tiling(plan)
        model.check(plan, namespace, config)
        try:
            reservation = cache.reserve(plan, namespace, max_new_tokens=len(reply))
        except RequestError:
            assert -(-(len(tokens) + len(reply)) // 64) > cache.total_pages
            continue
        assert reservation is not None  # nobody else holds anything
        check_tiling(reservation.plan)
        assert (reservation.rows >= 64).all()
        assert len(set(reservation.rows[reservation.is_own].tolist())) == reservation.is_own.sum()
        for published in (tokens, join(tokens, reply)):
            cache.publish(reservation, published)
            model.publish(reservation, published)
        cache.release(reservation)
        check_balance(cache)
        assert cache.held_pages == 0


@pytest.mark.parametrize("policy", ["anchor", "cdc+s1", "prefix"])
def test_ten_thousand_random_operations_lose_no_page(policy):
    """Plan, reserve, publish, extend, release, cancel, double release, reset, over a pool of 24 pages."""
    rng = np.random.default_rng(7)
    cache = LatentCache(CacheConfig(policy=policy), num_pages=25)
    open_requests: list = []
    refused = 0
    for _ in range(10_000 if policy == "anchor" else 1_000):
        action = rng.random() if open_requests else 0.0
        if action < 0.25:
            parts = [BLOCKS[b] for b in rng.integers(0, len(BLOCKS), rng.integers(1, 4))]
            tokens = join(text(int(rng.integers(50)), int(rng.integers(0, 3)) * 20), *parts)
            namespace = NAMESPACES[int(rng.integers(2))]
            plan = cache.plan(tokens, namespace)
            if rng.random() < 0.2:
                continue  # a plan that nobody uses holds nothing
            before = cache.free_pages, cache.evictable_pages, cache.held_pages, len(open_requests)
            reservation = cache.reserve(plan, namespace, max_new_tokens=int(rng.integers(0, 100)))
            if reservation is None:
                refused += 1
                assert before == (cache.free_pages, cache.evictable_pages, cache.held_pages, len(open_requests))
            else:
                open_requests.append(reservation)
        elif open_requests:
            at = int(rng.integers(len(open_requests)))
            reservation = open_requests[at]
            if action < 0.6:
                known = max(len(reservation.published), len(reservation.plan.tokens))
                length = int(rng.integers(known, len(reservation.rows) + 1))
                seen = reservation.published if len(reservation.published) else reservation.plan.tokens
                cache.publish(reservation, join(seen, text(int(rng.integers(3)), length - len(seen))))
            elif action < 0.999:
                cache.release(reservation)
                del open_requests[at]
                with pytest.raises(CacheError, match="released before"):
                    cache.release(reservation)
            else:
                cache.reset()
                for each in open_requests:
                    cache.release(each)
                open_requests.clear()
                assert cache.free_pages == cache.total_pages
        check_balance(cache)
        pages = [r.own_pages for r in open_requests]
        flat = np.concatenate(pages) if pages else np.zeros(0, np.int32)
        assert len(np.unique(flat)) == len(flat)
        assert 0 not in flat
    assert refused > 0
    assert cache.stats()["evicted_pages"] > 10
    for reservation in open_requests:
        cache.release(reservation)
    assert cache.held_pages == 0
    check_balance(cache)
