"""Which block sizes and launch parameters are best on this GPU, for the Triton kernels.

Sweeps the parameters of absorbed decode and of dense attention over expanded keys, each variant in a program of many calls
on different layers (see `mla_kernels.py`), and prints for each size the best few. The last line is a JSON object whose
`tuned` entry is what `pallas_kernels/tuned/<device kind>.json` holds for the sizes that were swept.

A variant that does not compile (too much shared memory, say) is left out.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _common import machine, print_result
from _mla_cases import Case, workload
from _mla_measure import SEED, Times, interleaved, make_inputs
from rich.table import Table

from pallas_kernels import absorbed
from pallas_kernels.target import current_target
from pallas_kernels.tuning import AbsorbedParameters

SIZES = ((16, 1, 32768), (16, 8, 32768), (16, 32, 32768), (16, 128, 4096), (32, 32, 4096), (128, 32, 4096))
"""Heads, batch, keys."""

CALLS, LAYERS = 32, 4


def candidates(heads: int) -> list[AbsorbedParameters]:
    rows = (16,) if heads <= 16 else (32, 64)
    return [
        AbsorbedParameters(block_rows=r, block_keys=k, warps=w, stages=s, programs_per_core=c)
        for r, k, w, s, c in itertools.product(rows, (32, 64), (4, 8), (2, 3, 4, 5), (1, 2))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="timed samples per variant (default 5)")
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        raise SystemExit("parameters are tuned on the GPU that they are for; there is none here")
    table = Table(title="absorbed decode")
    for column in ("heads, batch, keys", "µs", "parameters"):
        table.add_column(column)
    tuned: list[dict[str, Any]] = []
    for heads, batch, keys in SIZES:
        found = _sweep(Case(group="decode", heads=heads, batch=batch, keys=keys), args.repeats)
        for seconds, parameters in found[:3]:
            table.add_row(f"{heads}, {batch}, {keys}", f"{seconds * 1e6:.1f}", str(asdict(parameters)))
        tuned.append(
            {"up_to": {"heads": heads, "sequences": batch}, "keys": keys, "us": round(found[0][0] * 1e6, 2),
             "parameters": asdict(found[0][1])}
        )  # fmt: skip
        print(f"{heads} heads, {batch} x {keys}: {found[0][0] * 1e6:.1f} µs", file=sys.stderr, flush=True)
    print_result(table, {"benchmark": "tune_kernels", "tuned": {"absorbed_decode": tuned}} | machine())


def _sweep(case: Case, repeats: int) -> list[tuple[float, AbsorbedParameters]]:
    """Seconds per call of all variants that run, the best first."""
    work = workload(case)
    variant, target = work.variants["shift"], current_target()
    pool, operands = jax.jit(functools.partial(make_inputs, work=work, calls=CALLS, layers=LAYERS))(SEED)
    queries = list(zip(operands["q_latent"], operands["q_rope"], strict=True))
    table = jax.device_put(variant.table)

    def program(queries: list, pool: Any, table: Any, *, parameters: AbsorbedParameters) -> list:
        call = functools.partial(
            absorbed.decode, implementation="triton", scale=variant.scale, target=target, parameters=parameters
        )
        return [call(*q, pool, jnp.int32(np.int32(i % LAYERS)), table) for i, q in enumerate(queries)]

    def compiled(parameters: AbsorbedParameters) -> Any:
        try:
            return jax.jit(functools.partial(program, parameters=parameters)).lower(queries, pool, table).compile()
        except Exception:  # asks for more than the device has
            return None

    choices = candidates(case.heads)
    with ThreadPoolExecutor() as threads:
        programs = list(threads.map(compiled, choices))
    launches = {
        str(i): functools.partial(run, queries, pool, table) for i, run in enumerate(programs) if run is not None
    }
    samples = interleaved(launches, repeats)
    return sorted(
        ((Times.of(seconds, CALLS).median, choices[int(i)]) for i, seconds in samples.items()), key=lambda x: x[0]
    )


if __name__ == "__main__":
    main()
