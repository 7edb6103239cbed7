"""Replay through an engine: a scripted one for the order of things, the real one for the figures."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from irminsul_jax.cache import CacheConfig, LatentCache, Namespace
from irminsul_jax.engine.outputs import RequestOutput, Usage
from irminsul_jax.errors import RequestError
from irminsul_jax.replay.run import ReplayConfig, ReplayResult, replay
from irminsul_jax.replay.serve import serve_requests
from irminsul_jax.replay.tally import RequestRecord
from irminsul_jax.sampling_params import SamplingParams
from tests.replay.support import agent_trace, make_checkpoint, words, write_trace

GREEDY = SamplingParams(max_tokens=2, temperature=0.0)


class ScriptedEngine:
    """Plans for real, ends the newest request first, and numbers its donors from 100 on."""

    def __init__(self, refuse: int = -1, fail: int = -1) -> None:
        self.cache, self.namespace = LatentCache(CacheConfig(), num_pages=None), Namespace(model="scripted")
        self.running: list[RequestOutput] = []
        self.most_running = self.submitted = 0
        self.refuse, self.fail = refuse, fail

    def submit(self, prompt: Any, sampling: SamplingParams | None = None) -> str:
        number, self.submitted = self.submitted, self.submitted + 1
        if number == self.refuse:
            raise RequestError("too long for this engine")
        tokens = np.asarray(prompt["prompt_token_ids"])
        reservation = self.cache.reserve(self.cache.plan(tokens, self.namespace), self.namespace)
        assert reservation is not None
        self.cache.publish(reservation, tokens)
        plan, failed = reservation.plan, number == self.fail
        usage = Usage(prompt_tokens=len(tokens), exact_tokens=plan.num_exact, shifted_tokens=plan.num_shifted,
                      recomputed_tokens=len(plan.recompute_positions), recomputed_by_reason=plan.recomputed_by_reason(),
                      generated_tokens=2, queue_ms=0.5, ttft_ms=10.0 + number, total_ms=20.0)  # fmt: skip
        output = RequestOutput(request_id=f"id {number}", prompt_token_ids=tokens.tolist(), token_ids=[1, 2], text="ab",
                               finish_reason="error" if failed else "length", usage=usage, plan=plan,
                               donor_id=None if failed else reservation.donor_id + 100,
                               error="the device is gone" if failed else None)  # fmt: skip
        self.running.append(output)
        self.most_running = max(self.most_running, len(self.running))
        return output.request_id

    def step(self) -> Iterable[RequestOutput]:
        return [self.running.pop()]


@pytest.fixture
def prompts() -> dict[int, np.ndarray]:
    shared = np.arange(1000, 1200, dtype=np.int32)
    return {i: np.concatenate([np.arange(50 * i, 50 * i + 40, dtype=np.int32), shared]) for i in range(7)}


def test_records_come_in_order_and_at_most_so_many_are_in_flight(prompts: dict[int, np.ndarray]) -> None:
    engine, records, done = ScriptedEngine(), [], []
    tally = serve_requests(
        engine, prompts, ["s"] * 7, GREEDY, max_in_flight=3, emit=records.append, advance=done.append
    )
    assert [record.request for record in records] == list(range(7))
    assert engine.most_running == 3
    assert sum(done) == tally.prompt_tokens == sum(map(len, prompts.values()))
    assert tally.ttft_ms == [10.0 + i for i in range(7)]
    assert tally.generated_tokens == 14


def test_donors_are_named_by_their_donor_id_not_by_order_of_submission(prompts: dict[int, np.ndarray]) -> None:
    records: list[RequestRecord] = []
    serve_requests(ScriptedEngine(refuse=1), prompts, ["s"] * 7, GREEDY, max_in_flight=3, emit=records.append)
    assert [record.request for record in records] == [0, 2, 3, 4, 5, 6]
    assert records[0].donors == {100: 0, 101: 2, 102: 3, 103: 4, 104: 5, 105: 6}


def test_requests_that_fail_are_counted_and_harm_no_other(prompts: dict[int, np.ndarray]) -> None:
    tally = serve_requests(ScriptedEngine(refuse=0, fail=4), prompts, ["s"] * 7, GREEDY, max_in_flight=2)
    assert tally.requests == 5
    assert tally.failed == [
        "request 0 (session s): too long for this engine",
        "request 4 (session s): the device is gone",
    ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("served"))


def served(trace: Path, checkpoint: Path, **options: Any) -> ReplayResult:
    config = ReplayConfig(traces=(trace,), model=checkpoint, max_tokens=2, cache_tokens=4096, **options)
    return replay(config, Console(file=io.StringIO()))


def test_served_and_planned_replays_agree(tmp_path: Path, checkpoint: Path) -> None:
    trace = agent_trace(tmp_path / "t.jsonl")
    result = served(trace, checkpoint, early_variation=True, out=tmp_path / "out")
    planned = served(trace, checkpoint, early_variation=True, plan_only=True).summary["policies"]
    for policy, row in result.summary["policies"].items():
        assert row["requests"] == 4
        assert row["failed"] == 0
        for key in ("prompt_tokens", "exact", "shifted", "recomputed", "recomputed_by_reason", "mean_run_length"):
            assert row[key] == planned[policy][key], (policy, key)
        assert 0 < row["ttft_ms_p50"] <= row["ttft_ms_p95"]
        assert row["generated_tokens"] <= 8
        assert row["pool_tokens"] == 4096
    policies = result.summary["policies"]
    assert policies["anchor"]["recomputed"] < 0.75 < policies["prefix"]["recomputed"]
    assert result.complete


def test_identical_requests_in_one_batch_are_computed_once(tmp_path: Path, checkpoint: Path) -> None:
    line = {"segments": [{"kind": "user", "text": words(1, 60)}]}
    row = served(write_trace(tmp_path / "t.jsonl", [line] * 4), checkpoint, policies=("prefix",)).summary["policies"][
        "prefix"
    ]
    length = row["prompt_tokens"] // 4
    assert row["recomputed"] == pytest.approx((length + 3) / (4 * length), abs=1e-6)  # 3 × the last token alone


def test_a_prompt_over_the_context_fails_alone(tmp_path: Path, checkpoint: Path) -> None:
    lines = [{"segments": [{"kind": "user", "text": words(1, count)}]} for count in (60, 900, 60)]
    result = served(write_trace(tmp_path / "t.jsonl", lines), checkpoint, policies=("prefix",))
    row = result.summary["policies"]["prefix"]
    assert (row["requests"], row["failed"]) == (2, 1)
    assert not result.complete
