"""The proof of the kernels has to be able to fail: a wrong shift, and one lost key of many, are found."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script with few small cases: one compilation to run, and three to look for copies."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    check_kernels, kernel_cases, kernel_plans = map(import_module, ("check_kernels", "kernel_cases", "kernel_plans"))
    extent = kernel_cases.Extent(
        sizes=kernel_cases.SMALL,
        dtype="f32",
        heads=(3,),
        lengths=kernel_cases.RAGGED_SHORT,
        ops=("decode",),
        fragments=32,
        merged=True,
    )
    plan = kernel_plans.Plan(implementation="xla", cases=list(extent.cases()))
    monkeypatch.setattr(check_kernels, "make_plan", lambda name, platform, quick: plan)
    return check_kernels


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("kernel_reference")


def test_right_kernels_pass_and_a_flipped_shift_fails(check: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["--json", "--implementation", "xla"]) == 0
    right = json.loads(capsys.readouterr().out)
    assert (right["cases"], right["failed"]) == (8, 0)
    assert 0 < right["worst"]["xla"]["ratio"] <= 1
    assert check.main(["--implementation", "xla", "--break", "delta-sign"]) == 1
    *table, last = capsys.readouterr().out.splitlines()
    broken = json.loads(last)
    assert (broken["cases"], broken["failed"]) == (8, 5)  # all but the three that look for copies
    assert sum(line.startswith("FAILED xla decode f32") for line in table) == 5


def test_the_tolerance_finds_one_lost_key_of_4096_in_bfloat16(reference: ModuleType) -> None:
    rng = np.random.default_rng(0)
    q, keys = rng.standard_normal((1, 2, 80)), rng.standard_normal((4096, 80))
    common = {"scale": 80**-0.5, "unit": reference.U_BF16, "score_width": 80}
    whole = reference.attention(q, np.array([4096]), keys, keys[:, :64], **common)
    some = np.delete(keys, 1234, axis=0)
    lost = reference.attention(q, np.array([4095]), some, some[:, :64], **common)
    assert reference.deviation(whole.out.astype(np.float32), whole.lse.astype(np.float32), whole).ratio < 0.1
    assert reference.deviation(lost.out.astype(np.float32), whole.lse.astype(np.float32), whole).ratio > 1


def test_a_query_without_keys_has_to_give_nothing_exactly(reference: ModuleType) -> None:
    expected = reference.attention(
        np.ones((1, 1, 6)),
        np.array([0]),
        np.ones((3, 6)),
        np.ones((3, 4)),
        scale=1.0,
        unit=reference.U32,
        score_width=6,
    )
    out, lse = np.zeros((1, 1, 4), np.float32), np.full((1, 1), -np.inf, np.float32)
    assert reference.deviation(out, lse, expected).ratio == 0
    assert reference.deviation(out + 1e-30, lse, expected).ratio == np.inf
    assert reference.deviation(out, lse + np.float32(np.nan), expected).ratio == np.inf
