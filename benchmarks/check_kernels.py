"""Proof that every attention kernel is right, on whatever machine this runs: against float64, case by case.

Each case is one call of `mla_decode`, `mla_extend` or `mla_extend_expanded` with one implementation by name. Cases vary
dtype (bfloat16, float32, float8 latents), heads, key widths, and how the keys lie in the pool:

  cut        segments that begin and end anywhere in shuffled pages, each with its own shift of either sign, up to
             160,000
  twice      the same donor rows at two places of one sequence, so under two shifts
  pages      whole shuffled pages, each with its own shift
  reserved   as cut, and the tables go on: 70 rows behind each sequence's last query are reserved, but not written yet
  unshifted  as cut, but nothing is shifted, and the table says so by its shape
  merged     attention to two thirds of the keys and to the rest, merged by log-sum-exp

Every row that no sequence has written is NaN, and so are the other layer and the scratch page. Lengths go from 0 (an
empty member of the batch) over the edges of a page to 4,097; queries of an extend come in mixed order, with gaps and
padding, or are the last 512 positions of one sequence. One more case per op is the compiled program itself: written
to and read in one jitted function, a donated pool must not be copied.

The reference is NumPy in float64 and shares nothing with the kernels but the rows and the table
(`kernel_reference.py`); tolerances are derived there from dtype and sizes, never tuned. Output and log-sum-exp have to
keep within them, and a query without keys has to give 0 and -inf exactly. Kernels whose device is not here run in
their interpreter on the CPU: numbers alone, small shapes. What an implementation refuses is listed as not run.

Exit status: 0 if no case failed, else 1. That this can fail is shown by --break delta-sign.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from _common import machine
from kernel_cases import DEEPSEEK, LAYERS, OPS, SMALL, Case, Inputs, Setting, World, make_inputs, make_world
from kernel_plans import IMPLEMENTATIONS, NATIVE, Plan, make_plan
from kernel_programs import Key, Program, compile_all, copies_in, copying_program
from kernel_reference import Deviation, deviation
from rich.console import Console
from rich.table import Table

from irminsul_jax.replay.progress import Meter
from pallas_kernels import PAGE_SIZE, ImplementationError, LatentPool, PoolLayout, merge_partial

MOST_ROWS = {"cpu": 256, "gpu": 8192, "tpu": 8192}
"""Pairs of token and head compared per case; the reference of more would take too long."""

SECONDS_A_CASE = {"cpu": 300, "gpu": 30, "tpu": 30}
"""Far more than a case takes; behind it a kernel counts as hanging."""

LISTED_FAILURES = 60


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one case. `deviation` is None if the kernel did not get as far as numbers."""

    implementation: str
    interpret: bool
    case: dict[str, Any]
    status: Literal["passed", "failed", "refused"]
    deviation: Deviation | None = None
    message: str = ""

    def to_json(self) -> dict[str, Any]:
        d = self.deviation
        numbers = {} if d is None else {"error": _finite(d.error), "tolerance": d.tolerance, "ratio": _finite(d.ratio)}
        about = {"implementation": self.implementation, "interpret": self.interpret, "status": self.status}
        return about | self.case | numbers | ({"message": self.message} if self.message else {})


def _finite(x: float) -> float | None:
    return float(f"{x:.3e}") if math.isfinite(x) else None


def run(program: Callable[..., Any], inputs: Inputs, pool: LatentPool, broken: str | None) -> tuple[Any, Any]:
    """Output and log-sum-exp over all tables."""
    parts = []
    for table in inputs.tables:
        if broken == "delta-sign":
            table = dataclasses.replace(table, sin=-table.sin)
        parts.append(program(pool=pool, table=table, **inputs.arrays))
    out, lse = parts[0]
    for other in parts[1:]:
        out, lse = merge_partial(out, lse, *other)
    return np.asarray(out), np.asarray(lse)


def judge(key: Key, case: Case, program: Program, attempt: Callable[[Callable[..., Any]], Deviation]) -> Outcome:
    """The outcome of a case, whatever happens."""
    outcome = functools.partial(
        Outcome, implementation=key.implementation, interpret=key.interpret, case=case.describe()
    )
    try:
        if isinstance(program, Exception):
            raise program
        found = attempt(program)
    except ImplementationError as error:
        return outcome(status="refused", message=refusal(error, key.implementation))
    except Exception as error:
        return outcome(status="failed", message=summary(error))
    if found.ratio <= 1:
        return outcome(status="passed", deviation=found)
    return outcome(status="failed", deviation=found, message=found.what)


def refusal(error: ImplementationError, implementation: str) -> str:
    """The line of the text that is about this implementation."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((x.partition(": ")[2] for x in lines if x.startswith(f"{implementation}: ")), str(error))


def summary(error: Exception) -> str:
    """Type and text; of a long one the first and the last line, since some texts hold a whole traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines)
    if len(text) > 400:
        text = f"{lines[0][:200]} … {lines[-1][-200:]}"
    return f"{type(error).__name__}: {text}"


class Watchdog:
    """Gives up when a case takes too long: a kernel that waits for ever cannot be stopped from within its process."""

    def __init__(self, seconds: float, give_up: Callable[[Outcome], None]):
        self._seconds, self._give_up = seconds, give_up
        self._current: tuple[float, Key, Case] | None = None
        threading.Thread(target=self._watch, daemon=True).start()

    @contextlib.contextmanager
    def over(self, key: Key, case: Case) -> Iterator[None]:
        self._current = (time.perf_counter(), key, case)
        try:
            yield
        finally:
            self._current = None

    def _watch(self) -> None:
        while True:
            time.sleep(0.5)
            if (current := self._current) and time.perf_counter() - current[0] > self._seconds:
                _, key, case = current
                message = f"no result after {self._seconds:.0f} s"
                outcome = Outcome(
                    implementation=key.implementation,
                    interpret=key.interpret,
                    case=case.describe(),
                    status="failed",
                    message=message,
                )
                self._give_up(outcome)
                os._exit(1)


def check_numbers(
    plans: Sequence[Plan], broken: str | None, platform: str, console: Console, watchdog: Watchdog
) -> Iterator[Outcome]:
    """Cases in an order that needs each layout and each reference once, whatever the number of implementations."""
    wanted: dict[Case, list[Plan]] = {}
    for plan in plans:
        for case in plan.cases:
            wanted.setdefault(case, []).append(plan)
    cases = sorted(wanted, key=lambda c: (repr(c.setting.sizes), c.setting.dtype, c.lengths, c.layout))
    keys = dict.fromkeys(Key(p.implementation, p.interpret, c.setting) for c in cases for p in wanted[c])
    programs = compile_all(list(keys), console)
    pool_of = _PoolOfWorld()
    with Meter(console, "check", unit="cases", total=sum(map(len, wanted.values()))) as meter:
        for case, world, inputs in prepared(cases, MOST_ROWS[platform]):
            for plan in wanted[case]:
                key = Key(plan.implementation, plan.interpret, case.setting)
                attempt = functools.partial(
                    compare, key=key, world=world, inputs=inputs, pool_of=pool_of, broken=broken
                )
                with watchdog.over(key, case):
                    outcome = judge(key, case, programs[key], attempt)
                yield outcome
                meter.advance(1)


def prepared(cases: Sequence[Case], most_rows: int) -> Iterator[tuple[Case, World, Inputs]]:
    """The cases with their inputs and references, which threads compute some cases ahead."""
    cores = len(os.sched_getaffinity(0))
    waiting: deque[tuple[Case, World, Future[Inputs]]] = deque()
    with ThreadPoolExecutor(cores) as threads:
        for case in cases:
            world = make_world(case)
            waiting.append((case, world, threads.submit(make_inputs, case, world, most_rows)))
            if len(waiting) > cores:
                first, its_world, inputs = waiting.popleft()
                yield first, its_world, inputs.result()
        for first, its_world, inputs in waiting:
            yield first, its_world, inputs.result()


class _PoolOfWorld:
    """The pools of the last world asked for, one per layout."""

    def __init__(self) -> None:
        self._world: World | None = None
        self._pools: dict[PoolLayout, LatentPool] = {}

    def __call__(self, world: World, layout: PoolLayout) -> LatentPool:
        if world is not self._world:
            self._world, self._pools = world, {}
        if layout not in self._pools:
            self._pools[layout] = world.pool(layout)
        return self._pools[layout]


def compare(
    program: Callable[..., Any], *, key: Key, world: World, inputs: Inputs, pool_of: _PoolOfWorld, broken: str | None
) -> Deviation:
    out, lse = run(program, inputs, pool_of(world, key.layout), broken)
    if np.isnan(out).any() or np.isnan(lse).any():
        return Deviation(math.inf, math.nan, 0.0, "NaN in the result")
    return deviation(out[inputs.checked], lse[inputs.checked], inputs.expected)


def check_copies(plans: Sequence[Plan], platform: str, quick: bool) -> Iterator[Outcome]:
    """Of kernels that run here as they are: their compiled programs, at a pool so large that a copy could not hide."""
    on_cpu = platform == "cpu"
    sizes, dtype = (SMALL, "f32") if on_cpu else (DEEPSEEK, "bf16")
    megabytes = 16 if on_cpu else 256 if quick else 1024
    row_bytes = (sizes.latent + sizes.rotary) * (4 if dtype == "f32" else 2)
    pages = (megabytes << 20) // (LAYERS * PAGE_SIZE * row_bytes)
    for plan in plans:
        for op in OPS if plan.cases and not plan.interpret else ():
            tokens = 1 if op == "decode" else 64
            setting = Setting(op, sizes, dtype, 4 if on_cpu else 64, 1, tokens, pages, (8, 8))
            key = Key(plan.implementation, plan.interpret, setting)
            case = Case(setting, "pool copied", ())
            yield judge(key, case, copying_program, lambda build, key=key: copies_in(build(key), key))


def report(outcomes: Sequence[Outcome], not_run: Sequence[str], console: Console) -> None:
    groups: dict[tuple[str, bool, str], list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.status != "refused":
            groups.setdefault((outcome.implementation, outcome.interpret, outcome.case["op"]), []).append(outcome)
    table = Table("implementation", "op", "cases", "failed", "worst error", "its tolerance", "ratio", "in the case")
    for (implementation, interpret, op), members in sorted(groups.items()):
        worst = _worst([o for o in members if o.case["layout"] != "pool copied"])
        cells = ("–", "–", "–", "")
        if worst is not None and (d := worst.deviation) is not None:
            cells = (f"{d.error:.2e}", f"{d.tolerance:.2e}", f"{d.ratio:.2f}", _named(worst.case))
        failed = sum(o.status == "failed" for o in members)
        shown = f"[red]{failed}[/red]" if failed else "0"
        table.add_row(implementation + " (interpreted)" * interpret, op, str(len(members)), shown, *cells)
    console.print(table)
    failures = [o for o in outcomes if o.status == "failed"]
    for o in failures[:LISTED_FAILURES]:
        d = o.deviation
        numbers = "" if d is None or not math.isfinite(d.ratio) else f"error {d.error:.2e} over {d.tolerance:.2e} in "
        text = f"FAILED {o.implementation} {o.case['op']} {_named(o.case)}: {numbers}{o.message}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    if len(failures) > LISTED_FAILURES:
        console.print(f"… and {len(failures) - LISTED_FAILURES} more failed (--out lists all)")
    for line in not_run:
        console.print(f"not run: {line}", markup=False, highlight=False, soft_wrap=True)


def _named(case: dict[str, Any]) -> str:
    lengths = case["lengths"] and f", lengths {case['lengths']}"
    return f"{case['dtype']}, {case['heads']} heads, {case['widths']}, {case['layout']}{lengths}"


def _worst(outcomes: Sequence[Outcome]) -> Outcome | None:
    measured = [o for o in outcomes if o.deviation is not None]
    return max(measured, key=lambda o: o.deviation.ratio if o.deviation else 0.0, default=None)


def refusals(outcomes: Sequence[Outcome]) -> list[str]:
    """One line for each reason, with the number of cases that it stands for."""
    count = Counter((o.implementation, o.case["op"], o.message) for o in outcomes if o.status == "refused")
    return [f"{name} {op}, {n} cases: {reason}" for (name, op, reason), n in sorted(count.items())]


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases: under a minute on two cores")
    parser.add_argument("--json", action="store_true", help="print the line of JSON alone")
    parser.add_argument(
        "--implementation",
        metavar="NAME[,NAME]",
        help=f"only these, of {', '.join(IMPLEMENTATIONS)} (default: all that this machine can run or interpret)",
    )
    parser.add_argument(
        "--break",
        dest="broken",
        choices=["delta-sign"],
        help="the control: hand the kernels the sines of the opposite shifts (the reference keeps the right ones); "
        "shifted cases must then fail, and the exit status be 1",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON there, with every case")
    args = parser.parse_args(argv)
    args.names = IMPLEMENTATIONS if args.implementation is None else tuple(args.implementation.split(","))
    if unknown := [name for name in args.names if name not in IMPLEMENTATIONS]:
        parser.error(f"unknown implementation {unknown[0]!r}; known: {', '.join(IMPLEMENTATIONS)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    started = time.perf_counter()
    progress = Console(stderr=True)
    platform = jax.default_backend()
    if platform not in NATIVE:
        raise SystemExit(f"no kernels for the platform {platform!r}; known: {', '.join(NATIVE)}")
    plans = [make_plan(name, platform, quick=args.quick) for name in args.names]
    outcomes: list[Outcome] = []

    def give_up(hung: Outcome) -> None:
        done = len(outcomes) + 1
        outcomes.append(hung)
        left = sum(len(p.cases) for p in plans) + sum(len(OPS) for p in plans if p.cases and not p.interpret) - done
        conclude(args, plans, outcomes, started, [f"{left} cases after the one that gave no result"])

    watchdog = Watchdog(SECONDS_A_CASE[platform], give_up)
    # Mosaic kernels wait for copies and for each other, so a wrong one may wait for ever: they come last.
    may_hang = [p for p in plans if p.implementation.startswith("mosaic") and not p.interpret and p.cases]
    outcomes.extend(check_copies(plans, platform, args.quick))
    for group in ([p for p in plans if p not in may_hang], *([p] for p in may_hang)):
        for outcome in check_numbers(group, args.broken, platform, progress, watchdog):
            outcomes.append(outcome)
    return conclude(args, plans, outcomes, started, [])


def conclude(
    args: argparse.Namespace, plans: Sequence[Plan], outcomes: Sequence[Outcome], started: float, missing: Sequence[str]
) -> int:
    """Prints and writes everything; returns the exit status."""
    not_run = [f"{p.implementation}: {p.why_not}" for p in plans if p.why_not] + refusals(outcomes) + list(missing)
    ran = [o for o in outcomes if o.status != "refused"]
    failed = sum(o.status == "failed" for o in ran)
    worst = {
        name: None if found is None or found.deviation is None else found.to_json()
        for name in args.names
        if (found := _worst([o for o in ran if o.implementation == name and o.case["layout"] != "pool copied"]))
    }
    about = machine()
    seconds = round(time.perf_counter() - started, 1)
    result = {
        "benchmark": "check_kernels",
        "cases": len(ran),
        "failed": failed,
        "not_run": not_run,
        "worst": worst,
        "quick": args.quick,
        "broken": args.broken,
        "interpreted": [p.implementation for p in plans if p.interpret],
        "seconds": seconds,
    }
    if not args.json:
        terminal = Console()
        report(outcomes, not_run, terminal if terminal.is_terminal else Console(width=200))
    if args.out:
        args.out.write_text(json.dumps(result | about | {"all": [o.to_json() for o in outcomes]}, indent=1) + "\n")
    print(json.dumps(result | about, allow_nan=False), flush=True)
    return 0 if failed == 0 and ran else 1


if __name__ == "__main__":
    raise SystemExit(main())
