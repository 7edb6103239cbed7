"""How fast attention over the paged pool is on a GPU: decode, runs of reused rows, and both forms of extend.

Regime: DeepSeek's head sizes (latent 512, rotary 64, no-position 128, value 128) in bfloat16, pages of 64 in shuffled order.

  decode   one query token per sequence; no key turned, against a shift of its own for every fragment
  runs     decode where keys lie in runs of 48 to 200 rows at random offsets in their pages, against whole pages
  extend   new tokens behind cached, shifted keys of one sequence, in the absorbed and in the expanded form

Everything is reported as a share of what the same process measured first: the rate at which a sum reads memory, and that
of a dense bfloat16 product. Bytes are those of the keys (1152 each), operations those of the form that is timed: two per
multiplication, query and key that it may see. The variants of a case take turns, so their ratio is steadier than either.

One program makes up to 64 calls, each with its own queries on the next layer of a pool of 512 MB or more (or as many
layers as calls), as a model does; the fragment table, and what the op derives from it, is shared by the calls. Several
launches are queued before the clock stops. Times are per call: median, and 10th and 90th percentile of the samples.
Every result is checked for its log-sum-exp. A variant that fails is reported as such, and the exit status is 1.

Measured rows go to stderr, and with --out to a file, as they come. Tables, bars and a line of JSON come last, on stdout.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from _common import machine, print_result
from _mla_cases import Case, all_cases
from _mla_measure import Job, Rates, TooLarge, measure, measure_rates, prepare
from _mla_report import Row, judged, line_of, row_of, short, tables
from rich.console import Console
from rich.progress import Progress

MOST_POOL_BYTES = 60e9
MOST_CALLS = 64
MOST_SLOW_CALLS = 8
"""Calls of the XLA implementation in one program: each is a loop of its own to compile."""

IMPLEMENTATIONS = ("triton", "mosaic_gpu", "mosaic_tpu", "xla")

EPILOG = """\
examples:
  python benchmarks/mla_kernels.py --quick                       does it run here? tiny sizes, any machine
  python benchmarks/mla_kernels.py --out figures.json            everything, on a GPU
  python benchmarks/mla_kernels.py --cases 'decode/16h/*'        one part; names are as in the tables
  python benchmarks/mla_kernels.py --cases '*/128x4096' --implementation triton
"""


def main() -> None:
    args = _arguments()
    if jax.default_backend() == "cpu" and not args.quick:
        raise SystemExit("these sizes need an accelerator; --quick runs anywhere")
    patterns = args.cases.split(",")
    cases = [c for c in all_cases(args.quick) if any(fnmatch.fnmatchcase(c.name, p) for p in patterns)]
    if not cases:
        names = "\n  ".join(c.name for c in all_cases(args.quick))
        raise SystemExit(f"no case is called {args.cases!r}; there are:\n  {names}")
    result: dict[str, Any] = {
        "benchmark": "mla_kernels",
        "quick": args.quick,
        "implementation": args.implementation or "default",
        "rows": [],
        "skipped": [],
    } | machine()
    started = time.perf_counter()
    # Progress only draws where someone watches; elsewhere the rows are progress enough.
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("rates of the machine", total=len(cases))

        def say(text: str) -> None:
            console.print(f"{time.perf_counter() - started:6.1f} s  {text}", soft_wrap=True)

        def keep() -> None:
            result["bars"] = judged(result["rows"])
            result["wall_s"] = round(time.perf_counter() - started, 1)
            if args.out:
                _write(args.out, result)

        rates = measure_rates(args.repeats, args.quick)
        result["rates"] = {"read_tb_s": round(rates.read / 1e12, 4), "matmul_tf_s": round(rates.matmul / 1e12, 3)}
        say(f"a sum reads {rates.read / 1e12:.2f} TB/s; a dense product makes {rates.matmul / 1e12:.1f} TF/s")
        with ThreadPoolExecutor(max(len(os.sched_getaffinity(0)) // 2, 1)) as compilers:
            for (group, heads), chunk in itertools.groupby(cases, key=lambda c: (c.group, c.heads)):
                progress.update(task, description=f"{group}, {heads} heads: compiling")
                jobs = _prepared(list(chunk), rates, compilers, args, result, say)
                for job in jobs:  # nothing compiles while something is timed
                    job.wait()
                say(f"{group}, {heads} heads: compiled {len(jobs)} cases")
                while jobs:
                    job = jobs.pop(0)
                    progress.update(task, description=job.case.name)
                    _measure_into(result, job, rates, args.repeats, say)
                    keep()
                    progress.advance(task)
        keep()
    if args.json:
        print(json.dumps(result, allow_nan=False), flush=True)
    else:
        print_result(tables(result["rows"]), result)
    failed = [v for row in result["rows"] for v in row["variants"].values() if "error" in v]
    sys.exit(1 if failed or any(entry["failed"] for entry in result["skipped"]) else 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes: proves that everything runs, measures nothing"
    )
    parser.add_argument(
        "--cases", metavar="GLOB[,GLOB]", default="*", help="only cases with such a name, e.g. 'decode/*/8x*,runs/*'"
    )
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, help="default: what the ops choose by themselves")
    parser.add_argument(
        "--repeats", type=int, default=9, help="timed samples per variant, after two untimed (default 9)"
    )
    parser.add_argument("--json", action="store_true", help="no tables on stdout, only the line of JSON")
    parser.add_argument("--out", metavar="FILE", type=Path, help="write the JSON here too, anew after every row")
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error("--repeats must be at least 1")
    return args


def _prepared(
    cases: list[Case], rates: Rates, compilers: Executor, args: argparse.Namespace, result: dict[str, Any],
    say: Callable[[str], None],
) -> list[Job]:  # fmt: skip
    jobs = []
    most_calls = 2 if args.quick else MOST_SLOW_CALLS if args.implementation == "xla" else MOST_CALLS
    for case in cases:
        try:
            jobs.append(
                prepare(
                    case, rates, compilers, implementation=args.implementation, most_calls=most_calls,
                    most_bytes=_most_pool_bytes(),
                )
            )  # fmt: skip
        except TooLarge as error:
            result["skipped"].append({"case": case.name, "why": str(error), "failed": False})
            say(f"{case.name}: skipped, {error}")
    return jobs


def _most_pool_bytes() -> float:
    """The pool leaves room for queries and results of all calls."""
    stats = jax.devices()[0].memory_stats() or {}
    return min(MOST_POOL_BYTES, 0.6 * stats.get("bytes_limit", 2 * MOST_POOL_BYTES))


def _measure_into(result: dict[str, Any], job: Job, rates: Rates, repeats: int, say: Callable[[str], None]) -> None:
    try:
        row: Row = row_of(job, rates, measure(job, repeats))
    except Exception as error:  # not one variant, but all of the case: out of memory, say
        result["skipped"].append({"case": job.case.name, "why": short(error), "failed": True})
        say(f"{job.case.name}: failed, {short(error)}")
        return
    result["rows"].append(row)
    say(line_of(row))


def _write(path: Path, result: dict[str, Any]) -> None:
    """Complete or as it was: a killed run leaves a file that can be read."""
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps(result, allow_nan=False, indent=1) + "\n")
    unfinished.replace(path)


if __name__ == "__main__":
    main()
