"""What the benchmark scripts share: timing, random parameters, and the result (a table, then one line of JSON)."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def machine() -> dict[str, Any]:
    """Where and when a figure was measured. Names the jax device only if the script runs jax."""
    about: dict[str, Any] = {"cpu": _cpu_model(), "cores": len(os.sched_getaffinity(0))}
    if jax := sys.modules.get("jax"):
        about["device"] = jax.devices()[0].device_kind
    return {
        "machine": about,
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("jax", "numpy")},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def print_result(table: Table, result: Mapping[str, Any]) -> None:
    """The table, never cut to the width of a pipe, and the JSON object as the last line of stdout."""
    terminal = sys.stdout.isatty()
    Console(width=None if terminal else 160).print(table)
    print(json.dumps(result, allow_nan=False), flush=True)


def interleaved_medians(
    candidates: Mapping[str, Callable[[], Any]], *, rounds: int, warm_up: int = 1
) -> dict[str, float]:
    """Median seconds of each candidate. They take turns, in alternating order, so that whatever else the machine does
    falls on all alike. A candidate has to wait for its own result."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for i in range(warm_up + rounds):
        names = list(candidates)
        for name in names if i % 2 else names[::-1]:
            started = time.perf_counter()
            candidates[name]()
            if i >= warm_up:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in times.items()}


def random_like(shapes: Any, seed: int = 0) -> Any:
    """Arrays for a tree of `jax.ShapeDtypeStruct`: N(0, 1/fan-in) matrices, vectors of ones (norms)."""
    import jax
    import numpy as np

    generator = np.random.default_rng(seed)

    def draw(leaf: Any) -> Any:
        if len(leaf.shape) == 1:
            return jax.device_put(np.ones(leaf.shape, leaf.dtype))
        values = generator.standard_normal(leaf.shape, np.float32) * leaf.shape[-2] ** -0.5
        return jax.device_put(values.astype(leaf.dtype))

    return jax.tree.map(draw, shapes)
