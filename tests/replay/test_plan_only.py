"""Planning without a model: policies, donors, a bounded cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from irminsul_jax.cache import PAGE_SIZE, POLICIES, TokenClass
from irminsul_jax.replay.plan_only import plan_requests
from irminsul_jax.replay.render import Prompts
from irminsul_jax.replay.tally import PolicyTally, RequestRecord
from irminsul_jax.replay.trace import read_traces
from irminsul_jax.text.tokenizer import Tokenizer
from tests.replay.support import TOKENIZER, agent_trace


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> dict[int, np.ndarray]:
    path = agent_trace(tmp_path_factory.mktemp("trace") / "t.jsonl", sessions=3, turns=4, system_words=300)
    return dict(Prompts(Tokenizer.from_file(TOKENIZER), read_traces([path]).requests, early_variation=True))


def run(policy: str, prompts: dict[int, np.ndarray], **options: Any) -> tuple[PolicyTally, list[RequestRecord]]:
    records: list[RequestRecord] = []
    sessions = [f"session {i}" for i in range(max(prompts) + 1)]
    tally = plan_requests(policy, prompts, sessions, model="test", emit=records.append, **options)
    return tally, records


def test_policies_differ_as_they_should(prompts: dict[int, np.ndarray]) -> None:
    rows = {policy: run(policy, prompts)[0].to_json() for policy in POLICIES}
    assert rows["none"]["recomputed"] == 1
    for policy, row in rows.items():
        assert row["requests"] == len(prompts)
        assert row["exact"] + row["shifted"] + row["recomputed"] == pytest.approx(1, abs=2e-6)
        if policy in ("none", "prefix", "block-prefix"):
            assert row["shifted"] == 0
            assert row["recomputed"] > 0.95
    assert rows["anchor"]["shifted"] > 0.7
    assert rows["anchor"]["shifted"] > rows["cdc"]["shifted"] > 0.1


def test_donors_are_earlier_requests_and_hold_the_same_tokens(prompts: dict[int, np.ndarray]) -> None:
    _, records = run("anchor", prompts)
    runs = 0
    for record in records:
        for run_ in record.to_json("anchor")["runs"]:
            runs += 1
            assert run_["donor_request"] < record.request
            donor = prompts[run_["donor_request"]][run_["donor_start"] :][: run_["length"]]
            np.testing.assert_array_equal(donor, record.plan.tokens[run_["target"] :][: run_["length"]])
            assert run_["delta"] == run_["target"] - run_["donor_start"]
            assert run_["class"] == ("exact" if record.plan.classes[run_["target"]] == TokenClass.EXACT else "shifted")
    assert runs > len(prompts)


def test_request_numbers_are_kept_where_requests_are_left_out(prompts: dict[int, np.ndarray]) -> None:
    some = {index: prompts[index] for index in (2, 3, 7)}
    _, records = run("anchor", some)
    assert [record.request for record in records] == [2, 3, 7]
    assert {run_["donor_request"] for record in records for run_ in record.to_json("")["runs"]} <= {2, 3}


def test_a_bounded_cache_evicts_and_refuses_what_never_fits(prompts: dict[int, np.ndarray]) -> None:
    longest = max(prompts, key=lambda index: len(prompts[index]))
    capacity = (len(prompts[longest]) - 1) // PAGE_SIZE * PAGE_SIZE
    fitting = sum(len(ids) <= capacity for ids in prompts.values())
    novel = {len(prompts): np.arange(capacity, dtype=np.int32), len(prompts) + 1: prompts[0]}
    tally, records = run("anchor", {**prompts, **novel}, cache_tokens=capacity)
    assert longest not in {record.request for record in records}
    assert any(failure.startswith(f"request {longest} (session session {longest}): ") for failure in tally.failed)
    assert tally.requests == fitting + 2
    assert tally.reasons["evicted"] > 0
    assert tally.pool_tokens == capacity


def test_progress_adds_up_to_all_prompt_tokens(prompts: dict[int, np.ndarray]) -> None:
    done: list[int] = []
    tally = plan_requests("prefix", prompts, [""] * len(prompts), model="test", advance=done.append)
    assert sum(done) == tally.prompt_tokens == sum(map(len, prompts.values()))
    assert tally.wall_s > 0


def test_what_was_not_measured_is_null_not_zero(prompts: dict[int, np.ndarray]) -> None:
    row = run("none", prompts)[0].to_json()
    assert row["mean_run_length"] is None
    for key in ("ttft_ms_mean", "ttft_ms_p50", "ttft_ms_p95", "generated_tokens", "pool_tokens"):
        assert row[key] is None
    assert PolicyTally().to_json()["exact"] is None
