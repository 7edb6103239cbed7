"""Replay without a model: every request is planned, reserved, published and released in turn. Imports no jax."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from irminsul_jax.cache import CacheConfig, LatentCache, Namespace
from irminsul_jax.cache.plan import Plan
from irminsul_jax.errors import CacheError, RequestError
from irminsul_jax.replay.tally import PolicyTally, RequestRecord

Emit = Callable[[RequestRecord], None]
"""Receives the record of every request, in time order."""
Advance = Callable[[int], None]
"""Receives numbers of prompt tokens as they are done."""


def plan_requests(
    policy: str,
    prompts: Mapping[int, np.ndarray],
    sessions: Sequence[str],
    *,
    model: str,
    cache_tokens: int | None = None,
    emit: Emit | None = None,
    advance: Advance | None = None,
) -> PolicyTally:
    """Plans `prompts` (request number → `[T]` int32, in time order) under one policy, so that donors are earlier
    requests only. `sessions[n]` is the session of request number n.

    `cache_tokens` None leaves the pool unbounded. `model` names the namespace. A request that can never fit is counted
    as failed. `wall_s` is planning time alone.
    """
    cache = LatentCache(CacheConfig(policy=policy, capacity_tokens=cache_tokens), num_pages=None)
    namespace = Namespace(model=model)
    tally, donors = PolicyTally(), {}
    tally.pool_tokens = cache_tokens
    for index, tokens in prompts.items():
        started = time.perf_counter()
        try:
            plan = _plan(cache, namespace, tokens, donors, index)
        except RequestError as error:
            tally.fail(index, sessions[index], str(error))
        else:
            tally.wall_s += time.perf_counter() - started
            record = RequestRecord(request=index, session=sessions[index], plan=plan, donors=donors)
            tally.add(record)
            if emit is not None:
                emit(record)
        if advance is not None:
            advance(len(tokens))
    return tally


def _plan(cache: LatentCache, namespace: Namespace, tokens: np.ndarray, donors: dict[int, int], index: int) -> Plan:
    reservation = cache.reserve(cache.plan(tokens, namespace), namespace)
    if reservation is None:
        raise CacheError(f"request {index} found no room although nothing else holds pages")
    cache.publish(reservation, tokens)
    cache.release(reservation)
    if reservation.donor_id >= 0:
        donors[reservation.donor_id] = index
    return reservation.plan
