"""Lowers for GPUs on a machine that has none, at the shapes of production (shapes take no memory)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

try:
    from jax.sharding import AbstractDevice
except ImportError:  # jax 0.10
    from jax._src.mesh import AbstractDevice

from pallas_kernels import FragmentTable, LatentPool, StreamSpec

LAYERS, PAGES = 27, 2000


def naming(device_kind: str, platform: str = "gpu") -> Any:
    """A context in which computations are traced for that device."""
    device = AbstractDevice(device_kind=device_kind, num_cores=None, platform=platform)
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device))


def lowered_text(function: Callable, *shapes: Any, device_kind: str = "NVIDIA H200") -> str:
    with naming(device_kind):
        return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def shape(*dimensions: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dimensions, dtype)


def pool(latent: Any = jnp.bfloat16, layers: int = LAYERS, pages: int = PAGES) -> LatentPool:
    specs = (
        StreamSpec(name="c_kv", width=512, dtype=jnp.dtype(latent)),
        StreamSpec(name="k_r", width=64, dtype=jnp.dtype(jnp.bfloat16), rotary=(0, 64)),
    )
    return jax.eval_shape(lambda: LatentPool.create(specs, num_layers=layers, num_pages=pages))


def table(sequences: int, fragments: int, turns: int = 512) -> FragmentTable:
    field = shape(sequences, fragments, dtype=jnp.int32)
    angles = shape(turns, 32, dtype=jnp.float32)
    return FragmentTable(page=field, lo=field, hi=field, start=field, turn=field, cos=angles, sin=angles)


def pool_sized(text: str) -> list[str]:
    """Lines of a lowered program whose result is as large as a stream of the pool or one layer of it. Parameters and
    what loops carry along are not made anew."""
    found = []
    for line in map(str.strip, text.splitlines()):
        if line.startswith(("module", "func.func", "return", "stablehlo.return")) or "stablehlo.while" in line:
            continue
        result = line.rsplit("->" if "->" in line else " : ", 1)[-1]
        if re.search(rf"tensor<(\d+x)*{PAGES}x64x", result):
            found.append(line)
    return found


def arguments_of(op: str, latent: Any, heads: int) -> tuple[Any, ...]:
    """Of a public op: 64 sequences for decode, 512 new tokens of two sequences otherwise."""
    at, layer, q_rope = shape(512, dtype=jnp.int32), shape(dtype=jnp.int32), shape(512, heads, 64)
    common = pool(latent), layer
    if op == "decode":
        return shape(64, heads, 512), shape(64, heads, 64), *common, table(64, 512)
    if op == "extend":
        return shape(512, heads, 512), q_rope, at, at, *common, table(2, 2048)
    up = shape(heads, 128, 512), shape(heads, 512, 128)
    return shape(512, heads, 128), q_rope, at, at, *up, *common, table(2, 2048)
