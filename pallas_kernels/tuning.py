"""Block sizes and launch parameters: measured ones, kept as data per device, and a rule for devices nobody measured.

`tuned/<device kind>.json` holds lists of rows per kernel; the first row whose limits hold is taken. The files are
written from the figures that `benchmarks/tune_kernels.py` prints.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp

from pallas_kernels.pool import StreamSpec
from pallas_kernels.target import Target

Op = Literal["decode", "extend"]


@dataclass(frozen=True, kw_only=True)
class AbsorbedParameters:
    """Of the Triton kernel for absorbed attention."""

    block_rows: int
    """Query rows (token and head) of one program, a power of two ≥ 16."""
    block_keys: int
    """Keys folded in at once: 64 (a whole fragment) or 32."""
    warps: int
    stages: int
    programs_per_core: int
    """Programs that the work is shared out over, per multiprocessor."""


@dataclass(frozen=True, kw_only=True)
class FlashParameters:
    """Of the Triton kernel for dense attention over expanded keys."""

    block_queries: int
    block_keys: int
    warps: int
    stages: int


def absorbed_parameters(target: Target, op: Op, heads: int, sequences: int, latent: StreamSpec) -> AbsorbedParameters:
    """For queries of `heads` heads; `sequences` is the batch size; `latent` the stream that keys and values are."""
    row = None
    if latent.width == 512 and latent.dtype == jnp.bfloat16:
        row = _tuned(target.kind, f"absorbed_{op}", heads=heads, sequences=sequences)
    if row is not None:
        return AbsorbedParameters(**row)
    # A tile of keys, twice, and the queries must fit into shared memory: whole fragments where 64 rows of bfloat16 do,
    # half ones elsewhere. 16 rows of queries are the least that a tensor core takes.
    wide = latent.width > 256 and (target.capability < 90 or latent.dtype != jnp.bfloat16)
    narrow_block = latent.dtype == jnp.float32 and latent.width > 256
    return AbsorbedParameters(
        block_rows=16 if narrow_block or (op == "decode" and heads <= 16) else 32,
        block_keys=32 if wide else 64,
        warps=4,
        stages=2,
        programs_per_core=2 if op == "decode" else 1,
    )


def flash_parameters(target: Target, dtype: jnp.dtype) -> FlashParameters:
    row = _tuned(target.kind, "flash") if dtype == jnp.bfloat16 else None
    if row is not None:
        return FlashParameters(**row)
    return FlashParameters(block_queries=64, block_keys=32 if dtype == jnp.float32 else 64, warps=4, stages=2)


def _tuned(kind: str, kernel: str, **sizes: int) -> dict[str, Any] | None:
    for row in _data(kind).get(kernel, ()):
        if all(sizes[name] <= limit for name, limit in row.get("up_to", {}).items()):
            return row["parameters"]
    return None


@functools.cache
def _data(kind: str) -> dict[str, Any]:
    name = kind.lower().replace(" ", "_") + ".json"
    file = importlib.resources.files("pallas_kernels") / "tuned" / name
    return json.loads(file.read_text()) if file.is_file() else {}
