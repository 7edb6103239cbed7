"""Replay through an engine: requests in time order, a bounded number of them in flight."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from irminsul_jax.engine.outputs import RequestOutput
from irminsul_jax.errors import RequestError
from irminsul_jax.replay.tally import PolicyTally, RequestRecord
from irminsul_jax.sampling_params import SamplingParams


class Server(Protocol):
    """What a replay needs of `irminsul_jax.Engine`."""

    def warmup(self, longest: int | None = None) -> Any: ...

    def submit(self, prompt: Any, sampling: SamplingParams | None = None) -> str: ...

    def step(self) -> Iterable[RequestOutput]: ...


def serve_requests(
    engine: Server,
    prompts: Sequence[np.ndarray],
    sessions: Sequence[str],
    sampling: SamplingParams,
    *,
    max_in_flight: int,
    emit: Callable[[RequestRecord], None] | None = None,
    advance: Callable[[int], None] | None = None,
) -> PolicyTally:
    """Serves `prompts` (each `[T]` int32) in order, at most `max_in_flight` at a time, after a warm-up.

    Every figure comes from `RequestOutput`; compiling is not part of `wall_s`. Requests that fail, at submission or
    later, are counted with their reason and do not stop the others.
    """
    engine.warmup(max((len(prompt) for prompt in prompts), default=1) + sampling.max_tokens)
    tally, donors, in_flight = PolicyTally(), [], {}
    started, following = time.perf_counter(), 0
    while following < len(prompts) or in_flight:
        while following < len(prompts) and len(in_flight) < max_in_flight:
            index, following = following, following + 1
            try:
                request_id = engine.submit({"prompt_token_ids": prompts[index].tolist()}, sampling)
            except RequestError as error:
                tally.failed.append(f"request {index} (session {sessions[index]}): {error}")
                if advance is not None:
                    advance(len(prompts[index]))
                continue
            in_flight[request_id] = index
            donors.append(index)
        for output in engine.step():
            index = in_flight.pop(output.request_id)
            if output.finish_reason == "error" or output.plan is None:
                tally.failed.append(
                    f"request {index} (session {sessions[index]}): {output.error or 'no plan was made'}"
                )
            else:
                record = RequestRecord(
                    request=index,
                    session=sessions[index],
                    plan=output.plan,
                    donors=donors,
                    ttft_ms=output.usage.ttft_ms,
                    queue_ms=output.usage.queue_ms,
                    generated=output.usage.generated_tokens,
                    finish_reason=output.finish_reason,
                    text=output.text,
                )
                tally.add(record)
                if emit is not None:
                    emit(record)
            if advance is not None:
                advance(len(prompts[index]))
    tally.wall_s = time.perf_counter() - started
    return tally
