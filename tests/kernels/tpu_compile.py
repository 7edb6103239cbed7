"""Compiles for TPUs on a machine that has none: libtpu brings the real compiler. Import before libtpu is loaded."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, SingleDeviceSharding

from pallas_kernels import FragmentTable, LatentPool, StreamSpec

# Read when libtpu is loaded, which is not at import: quiet, offline, side by side with other processes that use it.
for _name, _value in {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
}.items():
    os.environ.setdefault(_name, _value)

TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v7x": "tpu7x:2x2x1"}


@functools.cache
def device(chip: str) -> Any:
    pytest.importorskip("libtpu", reason="libtpu, the TPU compiler, is not installed (extra 'test')")
    return topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices[0]


def compile_for(chip: str, function: Callable, *args: Any) -> Any:
    """The compiled program; `args` are pytrees of anything with shape and dtype."""
    target = device(chip)
    sharding = SingleDeviceSharding(target)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    with jax.sharding.use_abstract_mesh(Mesh(np.array([target]), ("x",)).abstract_mesh):
        return jax.jit(function).trace(*shapes).lower(lowering_platforms=("tpu",)).compile()


def copies_of(compiled: Any, *dimensions: int) -> list[str]:
    """Operations of the program that make an array whose shape has these dimensions in a row."""
    shape = ",".join(map(str, dimensions))
    made = rf"= \(?(\w+\[(?:\d+,)*{shape}[,\]]\S*).* (?:copy|copy-start|transpose|fusion|dynamic-slice|slice)\("
    return re.findall(made, compiled.as_text())


# Shapes of production; they take no memory.


def shape(*dimensions: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dimensions, dtype)


def specs(dtype: Any, rank: int = 512, rope: int = 64) -> tuple[StreamSpec, StreamSpec]:
    return (
        StreamSpec(name="c_kv", width=rank, dtype=jnp.dtype(dtype)),
        StreamSpec(name="k_r", width=rope, dtype=jnp.dtype(dtype), rotary=(0, rope)),
    )


def pool_shapes(dtype: Any = jnp.bfloat16, *, layers: int = 27, pages: int = 32768, rank: int = 512) -> LatentPool:
    return LatentPool(
        arrays=(shape(layers, pages, 64, rank, dtype=dtype), shape(layers, pages, 64, 128, dtype=dtype)),
        scales=(None, None),
        specs=specs(dtype, rank),
        layout="lanes",
    )


def table_shapes(B: int = 64, F: int = 512, turns: int = 128) -> FragmentTable:
    angle = shape(turns, 32, dtype=jnp.float32)
    return FragmentTable(**dict.fromkeys(("page", "lo", "hi", "start", "turn"), shape(B, F)), cos=angle, sin=angle)
