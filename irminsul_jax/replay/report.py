"""What a replay leaves behind: a table, a JSON summary, and with `--out` requests.jsonl and a self-contained HTML page."""

from __future__ import annotations

import contextlib
import html
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich import box
from rich.table import Table

from irminsul_jax.errors import TraceError
from irminsul_jax.replay.tally import RequestRecord

FORMAT_VERSION = 1
_COLOURS = {"exact": "#2a7f62", "shifted": "#e0a030", "recomputed": "#b8bec6"}


class AtomicFile:
    """A text file that appears complete under its name at the end of a `with` block, or not at all.

    Raises `TraceError` where it cannot be written."""

    def __init__(self, path: Path):
        self._path = path

    def __enter__(self) -> AtomicFile:
        with self._explained():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, self._temporary = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.")
        self._stream = os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace")
        return self

    def write(self, text: str) -> None:
        with self._explained():
            self._stream.write(text)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._explained():
            try:
                self._stream.close()
                if kind is None:
                    os.chmod(self._temporary, 0o644)
                    os.replace(self._temporary, self._path)
            finally:
                Path(self._temporary).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise TraceError(
                f"{self._path}: cannot be written ({reason}); free space or choose another --out"
            ) from None


def request_line(policy: str, record: RequestRecord) -> str:
    """One line of requests.jsonl: one policy and request."""
    return json.dumps(record.to_json(policy), ensure_ascii=False) + "\n"


def write_summary(out: Path, summary: Mapping[str, Any]) -> None:
    """summary.json and report.html in `out`."""
    with AtomicFile(out / "summary.json") as file:
        file.write(json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    with AtomicFile(out / "report.html") as file:
        file.write(html_report(summary))


def summary_table(summary: Mapping[str, Any]) -> Table:
    """The figures of each policy for a terminal, at most 100 columns wide; times to first token where measured."""
    rows = summary["policies"]
    served = any(row["ttft_ms_mean"] is not None for row in rows.values())
    table = Table(title="Replay", title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("policy", no_wrap=True)
    headings = ["re-\nquests", "prompt\ntokens", "exact", "shifted", "recom-\nputed", "mean run\ntokens"]
    headings += ["TTFT ms\nmean", "\np50", "\np95"] if served else []
    for heading in (*headings, "wall\ns", "prompt\ntokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, row in rows.items():
        table.add_row(
            name,
            str(row["requests"]),
            f"{row['prompt_tokens']:,}",
            *(_percent(row[key]) for key in ("exact", "shifted", "recomputed")),
            _number(row["mean_run_length"]),
            *(_number(row[key]) for key in ("ttft_ms_mean", "ttft_ms_p50", "ttft_ms_p95") if served),
            _number(row["wall_s"]),
            _number(row["prompt_tokens_per_s"]),
        )
    return table


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.2%}"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def html_report(summary: Mapping[str, Any]) -> str:
    """One page without external resources: shares as stacked bars, time to first token, reasons of recomputation."""
    policies = summary["policies"]
    bars, ttft, reasons = [], [], []
    slowest = max((row["ttft_ms_mean"] or 0 for row in policies.values()), default=0) or 1
    for line, (name, row) in enumerate(policies.items()):
        y, x, label = 34 * line, 110.0, html.escape(name)
        bars.append(f'<text x="0" y="{y + 19}">{label}</text>')
        for key, colour in _COLOURS.items():
            share = row[key] or 0
            tip = f"<title>{label}: {share:.2%} {key}</title>"
            bars.append(f'<rect x="{x:.1f}" y="{y}" width="{600 * share:.1f}" height="26" fill="{colour}">{tip}</rect>')
            x += 600 * share
        if row["ttft_ms_mean"] is not None:
            width = 600 * row["ttft_ms_mean"] / slowest
            text = f"{row['ttft_ms_mean']:,.0f} ms (p95 {row['ttft_ms_p95']:,.0f})"
            ttft.append(
                f'<text x="0" y="{y + 19}">{label}</text><rect x="110" y="{y}" width="{width:.1f}" height="26" '
                f'fill="#4a6fa5"/><text x="{115 + width:.1f}" y="{y + 19}">{text}</text>'
            )
        counts = "".join(
            f"<tr><td>{html.escape(reason)}</td><td>{count:,}</td></tr>"
            for reason, count in row["recomputed_by_reason"].items()
        )
        reasons.append(f"<table><caption>{label}</caption>{counts}</table>")
    height = 34 * len(policies)
    legend = " ".join(f'<span style="color:{colour}">■</span> {key}' for key, colour in _COLOURS.items())
    timing = (
        f"<h2>Time to first token, mean</h2>{_svg(height, ttft)}"
        if ttft
        else "<p>Time to first token: not measured.</p>"
    )
    traces = html.escape(", ".join(summary["traces"]))
    return f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>Irminsul replay</title>
<style>body{{font:15px system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}}
table{{display:inline-table;margin:0 2rem 1rem 0}}caption{{font-weight:600;text-align:left}}td{{padding:0 .8rem 0 0}}
td+td{{text-align:right}}svg{{max-width:100%}}</style>
<h1>Irminsul replay</h1><p>{traces}; early variation {"on" if summary["early_variation"] else "off"};
tokenizer {html.escape(summary["tokenizer"])}; {"planned only" if summary["plan_only"] else "served"}</p>
<h2>Where prompt tokens came from</h2><p>{legend}</p>{_svg(height, bars)}{timing}
<h2>Why tokens were recomputed</h2>{"".join(reasons)}</html>
"""


def _svg(height: int, parts: list[str]) -> str:
    return f'<svg viewBox="0 0 900 {height}" width="900" height="{height}" font-size="14">{"".join(parts)}</svg>'
