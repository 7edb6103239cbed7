"""Replay without a model: every request is planned, reserved, published and released in turn. Imports no jax."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from irminsul_jax.cache import CacheConfig, LatentCache, Namespace
from irminsul_jax.errors import RequestError
from irminsul_jax.replay.tally import PolicyTally, RequestRecord

Emit = Callable[[RequestRecord], None]
Advance = Callable[[int], None]


def plan_requests(
    policy: str,
    prompts: Sequence[np.ndarray],
    sessions: Sequence[str],
    *,
    model: str,
    cache_tokens: int | None = None,
    emit: Emit | None = None,
    advance: Advance | None = None,
) -> PolicyTally:
    """Plans `prompts` (each `[T]` int32, in time order) under one policy, so that donors are earlier requests only.

    `cache_tokens` None leaves the pool unbounded. `model` names the namespace. `emit` receives every record, `advance`
    the number of prompt tokens done. A request that can never fit is counted as failed. `wall_s` is planning time alone.
    """
    cache = LatentCache(CacheConfig(policy=policy, capacity_tokens=cache_tokens), num_pages=None)
    namespace = Namespace(model=model)
    tally, donors = PolicyTally(), []
    for index, (tokens, session) in enumerate(zip(prompts, sessions, strict=True)):
        started = time.perf_counter()
        reservation = None
        try:
            reservation = cache.reserve(cache.plan(tokens, namespace), namespace)
        except RequestError as error:
            tally.failed.append(f"request {index} (session {session}): {error}")
        if reservation is not None:
            cache.publish(reservation, tokens)
            cache.release(reservation)
        tally.wall_s += time.perf_counter() - started
        if reservation is not None:
            donors.append(index)
            record = RequestRecord(request=index, session=session, plan=reservation.plan, donors=donors)
            tally.add(record)
            if emit is not None:
                emit(record)
        if advance is not None:
            advance(len(tokens))
    return tally
