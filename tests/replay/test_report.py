"""What a replay leaves behind: files that are complete or absent, a table, a JSON summary, one HTML page."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import irminsul_jax.replay.progress as progress
import irminsul_jax.replay.run as run_module
from irminsul_jax.errors import TraceError
from irminsul_jax.replay.report import AtomicFile, html_report, summary_table
from irminsul_jax.replay.run import ReplayConfig, replay
from tests.replay.support import TOKENIZER, agent_trace


def planned(tmp_path: Path, **options: Any) -> dict[str, Any]:
    trace = agent_trace(tmp_path / "t.jsonl", sessions=2, turns=3)
    config = ReplayConfig(traces=(trace,), tokenizer=TOKENIZER, plan_only=True, early_variation=True, **options)
    return replay(config, Console(file=io.StringIO())).summary


def test_summary_has_every_key_with_its_type(tmp_path: Path) -> None:
    summary = json.loads(json.dumps(planned(tmp_path, policies=("prefix", "anchor", "none"))))
    assert summary["format_version"] == 1
    assert summary["tokenizer"] == str(TOKENIZER)
    assert summary["traces"] == [str(tmp_path / "t.jsonl")]
    assert summary["early_variation"] is True
    assert summary["skipped_lines"] == 0
    assert list(summary["policies"]) == ["prefix", "anchor", "none"]
    row = summary["policies"]["anchor"]
    kinds = {"requests": int, "failed": int, "prompt_tokens": int, "exact": float, "shifted": float, "recomputed": float,
             "recomputed_by_reason": dict, "runs": int, "mean_run_length": float, "wall_s": float,
             "prompt_tokens_per_s": float, "ttft_ms_mean": None, "ttft_ms_p50": None, "ttft_ms_p95": None,
             "generated_tokens": None, "pool_tokens": None}  # fmt: skip
    assert {key: None if row[key] is None else type(row[key]) for key in row} == kinds
    assert sum(row["recomputed_by_reason"].values()) == pytest.approx(row["recomputed"] * row["prompt_tokens"], abs=1)


def test_out_holds_every_request_of_every_policy(tmp_path: Path) -> None:
    summary = planned(tmp_path, out=tmp_path / "deep" / "out")
    out = tmp_path / "deep" / "out"
    assert sorted(file.name for file in out.iterdir()) == ["report.html", "requests.jsonl", "summary.json"]
    assert json.loads((out / "summary.json").read_text()) == summary
    lines = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    assert [(line["policy"], line["request"]) for line in lines] == [
        (p, i) for p in ("prefix", "anchor") for i in range(6)
    ]
    for line in lines:
        assert sum(run["length"] for run in line["runs"]) + sum(line["recomputed"].values()) == line["prompt_tokens"]
        assert line["session"] in ("s0", "s1")
    assert any(run["class"] == "shifted" and run["delta"] for line in lines for run in line["runs"])


@pytest.mark.parametrize("error", [RuntimeError("in the middle"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_replay_that_breaks_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    write: Callable[..., str] = run_module.request_line
    calls = []

    def breaking(policy: str, record: Any) -> str:
        calls.append(policy)
        if len(calls) == 8:
            raise error
        return write(policy, record)

    monkeypatch.setattr(run_module, "request_line", breaking)
    with pytest.raises(type(error)):
        planned(tmp_path, out=tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_killed_process_leaves_nothing_under_the_name(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from irminsul_jax.replay.report import AtomicFile
with AtomicFile(Path({str(tmp_path / "requests.jsonl")!r})) as file:
    file.write("half a line")
    file._stream.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert not (tmp_path / "requests.jsonl").exists()


def test_an_earlier_file_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("old")
    with AtomicFile(path) as file:
        file.write("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"


def test_out_that_cannot_be_written_is_noticed_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TraceError, match="cannot be written"):
        planned(tmp_path, out=tmp_path / "file")


class _Resources(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str | None]] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.found += [(name, value) for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]


def test_html_report_is_self_contained(tmp_path: Path) -> None:
    summary = planned(tmp_path)
    summary["traces"] = ["<script>alert(1)</script>"]
    page = html_report(summary)
    parser = _Resources()
    parser.feed(page)
    assert parser.found == []
    assert "script" not in parser.tags
    assert not re.search(r"https?://|@import|url\(", page)
    assert parser.tags.count("rect") == 6
    assert "not measured" in page
    for reason in summary["policies"]["anchor"]["recomputed_by_reason"]:
        assert f"<td>{reason}</td>" in page


def test_html_report_shows_times_to_first_token_where_measured(tmp_path: Path) -> None:
    summary = planned(tmp_path)
    for row, mean in zip(summary["policies"].values(), (2000.0, 100.0), strict=True):
        row |= {"ttft_ms_mean": mean, "ttft_ms_p50": mean, "ttft_ms_p95": 2 * mean}
    page = html_report(summary)
    assert "2,000 ms (p95 4,000)" in page
    assert 'width="30.0"' in page  # 600 px × 100 / 2000


@pytest.mark.parametrize("served", [False, True])
def test_table_fits_100_columns_and_cuts_nothing(tmp_path: Path, served: bool) -> None:
    summary = planned(tmp_path, policies=("prefix", "block-prefix"))
    for row in summary["policies"].values():
        row |= {"prompt_tokens": 13_305_627, "recomputed": 0.99147, "wall_s": 104.9, "prompt_tokens_per_s": 4390298.8}
        row |= {"mean_run_length": 1803.4}
        if served:
            row |= {"ttft_ms_mean": 12802.2, "ttft_ms_p50": 12468.6, "ttft_ms_p95": 14501.9}
    stream = io.StringIO()
    Console(file=stream, width=100).print(summary_table(summary))
    shown = stream.getvalue()
    assert max(map(len, shown.splitlines())) <= 100
    assert "…" not in shown
    for text in (
        "block-prefix",
        "13,305,627",
        "99.15%",
        "104.9",
        "4,390,299",
        "1,803",
        *(["12,802", "14,502"] * served),
    ):
        assert text in shown
    assert ("TTFT" in shown) == served


def test_progress_elsewhere_than_on_a_terminal_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, clock = io.StringIO(), iter(range(0, 100, 6))
    monkeypatch.setattr(progress.time, "perf_counter", lambda: float(next(clock)))
    with progress.Meter(Console(file=stream), "anchor", unit="tokens", total=4000) as meter:
        for _ in range(4):
            meter.advance(1000)
    assert stream.getvalue().splitlines() == [
        "anchor: 50%, 167 tokens/s, 12 s left",
        "anchor: 100%, 167 tokens/s, 0 s left",
    ]


def test_progress_on_a_terminal_is_a_bar_that_goes_away() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100)
    with progress.Meter(console, "convert", unit="MB", scale=1e6) as meter:
        meter.update(30_000_000, 60_000_000, "layers/[0]")
    assert "layers/[0]" in stream.getvalue()
    assert "MB/s" in stream.getvalue()
