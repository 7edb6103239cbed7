"""Replay through an engine: requests in time order, a bounded number of them in flight."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from irminsul_jax.engine.outputs import RequestOutput
from irminsul_jax.errors import RequestError
from irminsul_jax.replay.plan_only import Advance, Emit
from irminsul_jax.replay.tally import PolicyTally, RequestRecord
from irminsul_jax.sampling_params import SamplingParams


@runtime_checkable
class Server(Protocol):
    """What a replay needs of `irminsul_jax.Engine`."""

    def submit(self, prompt: Any, sampling: SamplingParams | None = None) -> str: ...

    def step(self) -> Iterable[RequestOutput]: ...


def serve_requests(
    engine: Server,
    prompts: Mapping[int, np.ndarray],
    sessions: Sequence[str],
    sampling: SamplingParams,
    *,
    max_in_flight: int,
    emit: Emit | None = None,
    advance: Advance | None = None,
) -> PolicyTally:
    """Serves `prompts` (request number → `[T]` int32) in their order, at most `max_in_flight` at a time.

    Every figure comes from `RequestOutput`; warm the engine up before, or compiling is part of them. Requests that fail,
    at submission or later, are counted with their reason and do not stop the others. Records are emitted in order of
    request number, whichever request ends first.
    """
    tally, donors = PolicyTally(), {}
    waiting, in_flight = iter(prompts.items()), {}
    ended: dict[int, RequestOutput | str] = {}
    unreported = iter(prompts)
    following, reporting = next(waiting, None), next(unreported, None)
    started = time.perf_counter()
    while following is not None or in_flight:
        while following is not None and len(in_flight) < max_in_flight:
            index, tokens = following
            following = next(waiting, None)
            try:
                in_flight[engine.submit({"prompt_token_ids": tokens}, sampling)] = index
            except RequestError as error:
                ended[index] = str(error)
        for output in engine.step() if in_flight else ():
            index = in_flight.pop(output.request_id)
            ended[index] = output
            if output.donor_id is not None:
                donors[output.donor_id] = index
        while reporting is not None and reporting in ended:
            _report(reporting, ended.pop(reporting), sessions[reporting], donors, tally, emit)
            if advance is not None:
                advance(len(prompts[reporting]))
            reporting = next(unreported, None)
    tally.wall_s = time.perf_counter() - started
    return tally


def _report(
    index: int,
    ended: RequestOutput | str,
    session: str,
    donors: Mapping[int, int],
    tally: PolicyTally,
    emit: Emit | None,
) -> None:
    if isinstance(ended, str):
        tally.fail(index, session, ended)
        return
    if ended.finish_reason == "error" or ended.plan is None:
        tally.fail(index, session, ended.error or "it ended before it was planned")
        return
    record = RequestRecord(
        request=index,
        session=session,
        plan=ended.plan,
        donors=donors,
        ttft_ms=ended.usage.ttft_ms,
        queue_ms=ended.usage.queue_ms,
        generated=ended.usage.generated_tokens,
        finish_reason=ended.finish_reason,
        text=ended.text,
    )
    tally.add(record)
    if emit is not None:
        emit(record)
