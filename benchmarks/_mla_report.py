"""Rows, bars and tables of `mla_kernels.py`. A row is plain data, one per case, as it stands in the JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from _mla_measure import Job, Rates, Times
from rich.table import Table

Row = dict[str, Any]


def row_of(job: Job, rates: Rates, outcome: dict[str, Times | Exception]) -> Row:
    case, work = job.case, job.work
    variants: dict[str, dict[str, Any]] = {}
    for name, variant in work.variants.items():
        times = outcome[name]
        if isinstance(times, Exception):
            variants[name] = {"error": short(times)}
            continue
        bytes_a_second, flops_a_second = variant.bytes / times.median, variant.flops / times.median
        variants[name] = {
            "implementation": job.kernels[name],
            "us": round(1e6 * times.median, 2),
            "us_p10": round(1e6 * times.p10, 2),
            "us_p90": round(1e6 * times.p90, 2),
            "tb_s": round(bytes_a_second / 1e12, 4),
            "read_share": round(bytes_a_second / rates.read, 4),
            "tf_s": round(flops_a_second / 1e12, 3),
            "matmul_share": round(flops_a_second / rates.matmul, 4),
            "pages_visited": variant.visits,
        }
    row: Row = {
        "case": case.name,
        "group": case.group,
        "heads": case.heads,
        "batch": case.batch,
        "keys": case.keys,
        "new": case.new,
        "calls": job.calls,
        "layers": job.layers,
        "launches": job.launches,
        "variants": variants,
    }
    return row | _compared(row)


def _compared(row: Row) -> Row:
    """What two variants say together."""
    variants = {name: v for name, v in row["variants"].items() if "us" in v}
    if row["group"] == "extend":
        return {"best": min(variants, key=lambda name: variants[name]["us"], default=None)}
    if len(variants) < 2:
        return {}
    if row["group"] == "decode":
        return {"shift_cost": round(variants["shift"]["us"] / variants["no shift"]["us"] - 1, 4)}
    whole, runs = (variants[name]["us"] / variants[name]["pages_visited"] for name in ("whole pages", "runs"))
    return {"per_page": round(runs / whole, 4)}


def short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


def line_of(row: Row) -> str:
    """A row as one line of text."""
    parts = [f"{name} {_in_words(variant)}" for name, variant in row["variants"].items()]
    if "shift_cost" in row:
        parts.append(f"shift costs {row['shift_cost']:+.1%}")
    if "per_page" in row:
        parts.append(f"per page visited {row['per_page']:.2f} ×")
    return f"{row['case']}: {'; '.join(parts)}"


def _in_words(variant: dict[str, Any]) -> str:
    if "error" in variant:
        return variant["error"]
    times = f"{variant['us']:,.1f} µs ({variant['us_p10']:,.1f}..{variant['us_p90']:,.1f})"
    return f"{times}, {variant['read_share']:.0%} of read, {variant['tf_s']:.1f} TF/s, {variant['implementation']}"


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A figure of one case that has to be reached (`at_least`) or kept."""

    case: str
    what: str
    value: Callable[[Row], float]
    limit: float
    at_least: bool = False
    form: str = ".2f"

    def judge(self, rows: dict[str, Row]) -> dict[str, Any]:
        """`passed` is None where the figure was not measured."""
        try:
            value = self.value(rows[self.case])
        except KeyError:
            value = None
        passed = None if value is None else value >= self.limit if self.at_least else value <= self.limit
        condition = f"{'≥' if self.at_least else '≤'} {self.limit:{self.form}}"
        return {"case": self.case, "what": self.what, "condition": condition, "value": value, "passed": passed}


def _read_share(row: Row) -> float:
    return row["variants"]["shift"]["read_share"]


def _best_ms(row: Row) -> float:
    """Of both forms: one that failed is not the best."""
    if row["best"] is None:
        raise KeyError("best")
    return row["variants"][row["best"]]["us"] / 1e3


BARS = (
    Bar(case="decode/16h/128x4096", what="share of the read rate", value=_read_share, limit=0.86, at_least=True),
    Bar(case="decode/16h/32x32768", what="share of the read rate", value=_read_share, limit=0.90, at_least=True),
    Bar(case="decode/16h/8x32768", what="share of the read rate", value=_read_share, limit=0.76, at_least=True),
    Bar(case="decode/16h/1x32768", what="µs", value=lambda r: r["variants"]["shift"]["us"], limit=32, form=".1f"),
    Bar(
        case="decode/128h/128x4096",
        what="TF/s",
        value=lambda r: r["variants"]["shift"]["tf_s"],
        limit=520,
        at_least=True,
        form=".0f",
    ),
    Bar(case="runs/16h/32x32768", what="time per page visited", value=lambda r: r["per_page"], limit=1.25),
    Bar(case="extend/16h/512+32768", what="ms, better form", value=_best_ms, limit=0.9),
    Bar(case="decode/16h/128x4096", what="cost of the shift", value=lambda r: r["shift_cost"], limit=0.02, form=".1%"),
    Bar(case="decode/128h/128x4096", what="cost of the shift", value=lambda r: r["shift_cost"], limit=0.04, form=".1%"),
)


def judged(rows: list[Row]) -> list[dict[str, Any]]:
    by_case = {row["case"]: row for row in rows}
    return [bar.judge(by_case) for bar in BARS]


def tables(rows: list[Row]) -> Table:
    """All tables, one below the other."""
    grid = Table.grid()
    for group, columns in _COLUMNS.items():
        own = [row for row in rows if row["group"] == group]
        if own:
            grid.add_row(_group_table(group, columns, own))
    grid.add_row(_bar_table(judged(rows)))
    return grid


_COLUMNS: dict[str, tuple[str, ...]] = {
    "decode": ("no shift", "shift"),
    "runs": ("whole pages", "runs"),
    "extend": ("absorbed", "expanded"),
}


def _group_table(group: str, names: tuple[str, ...], rows: list[Row]) -> Table:
    shown = {"decode": "shift costs", "runs": "per page visited", "extend": "better form"}[group]
    table = Table("case", title=group)
    for name in names:
        detail = "pages" if group == "runs" else "of matmul"
        table.add_column(f"{name}\nµs (p10..p90)", justify="right")
        table.add_column(f"\nof read · TF/s · {detail}", justify="right")
    table.add_column(shown, justify="right")
    for row in rows:
        cells = [cell for name in names for cell in _cells(row["variants"][name], group)]
        table.add_row(row["case"], *cells, _last_cell(row))
    return table


def _cells(variant: dict[str, Any], group: str) -> tuple[str, str]:
    if "error" in variant:
        return "failed", variant["error"].partition(":")[0]
    detail = f"{variant['pages_visited']:,}" if group == "runs" else f"{variant['matmul_share']:.0%}"
    return (
        f"{variant['us']:,.1f} ({variant['us_p10']:,.1f}..{variant['us_p90']:,.1f})",
        f"{variant['read_share']:.0%} · {variant['tf_s']:.1f} · {detail}",
    )


def _last_cell(row: Row) -> str:
    if "shift_cost" in row:
        return f"{row['shift_cost']:+.1%}"
    if "per_page" in row:
        return f"{row['per_page']:.2f} ×"
    return row.get("best") or ""


def _bar_table(bars: list[dict[str, Any]]) -> Table:
    table = Table("case", "what", "bar", "measured", "", title="bars")
    for bar, judgement in zip(BARS, bars, strict=True):
        verdict = {True: "pass", False: "miss", None: "not measured"}[judgement["passed"]]
        measured = "" if judgement["value"] is None else f"{judgement['value']:{bar.form}}"
        table.add_row(bar.case, bar.what, judgement["condition"], measured, verdict)
    return table
