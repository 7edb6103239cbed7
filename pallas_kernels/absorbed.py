"""The absorbed ops on top of a kernel: queries as blocks of rows, items of work, and back."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels import mosaic_gpu, mosaic_tpu, triton
from pallas_kernels.fragments import FragmentTable
from pallas_kernels.pool import LatentPool
from pallas_kernels.schedule import Items, decode_items, extend_items
from pallas_kernels.target import Target
from pallas_kernels.tuning import AbsorbedParameters, Op, absorbed_parameters

# Jitted, with the layer as an operand: a model of many layers traces and compiles each kernel once.
_static = functools.partial(jax.jit, static_argnames=("implementation", "scale", "target", "interpret", "parameters"))


def _block_rows(implementation: str, op: Op, heads: int, parameters: AbsorbedParameters) -> int:
    if implementation == "triton":
        return parameters.block_rows
    if implementation == "mosaic_gpu":
        return mosaic_gpu.BLOCK_ROWS
    return mosaic_tpu.block_rows(op, heads)


def _attend(
    implementation: str, q_latent, q_rope, position, sequence, pool: LatentPool, layer, table: FragmentTable,
    items: Items, *, scale: float, target: Target, parameters: AbsorbedParameters, block_rows: int, interpret: bool,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """All rows `[N, *]` through one kernel."""
    rows = (q_latent, q_rope, position, sequence, pool, layer, table, items)
    if implementation == "triton":
        programs = target.num_cores * parameters.programs_per_core
        return triton.attend(*rows, scale=scale, parameters=parameters, num_programs=programs, interpret=interpret)
    if implementation == "mosaic_gpu":
        return mosaic_gpu.attend(*rows, scale=scale, num_programs=target.num_cores, interpret=interpret)
    return mosaic_tpu.attend(*rows, scale=scale, block_rows=block_rows, interpret=interpret)


@_static
def decode(
    q_latent: Float[Array, "B H R"],
    q_rope: Float[Array, "B H D"],
    pool: LatentPool,
    layer: Int[Array, ""],
    table: FragmentTable,
    *,
    implementation: str,
    scale: float,
    target: Target,
    interpret: bool = False,
    parameters: AbsorbedParameters | None = None,
) -> tuple[Float32[Array, "B H R"], Float32[Array, "B H"]]:
    """Each sequence's heads, padded, are whole blocks of rows."""
    B, H, R = q_latent.shape
    parameters = parameters or absorbed_parameters(target, "decode", H, B, pool.spec("c_kv"))
    M = _block_rows(implementation, "decode", H, parameters)
    per_sequence = -(-H // M)
    q_latent, q_rope = (_padded_rows(x.swapaxes(0, 1), per_sequence * M).swapaxes(0, 1) for x in (q_latent, q_rope))
    out, lse = _attend(
        implementation,
        q_latent.reshape(-1, R),
        q_rope.reshape(-1, q_rope.shape[-1]),
        None,
        None,
        pool,
        layer,
        table,
        decode_items(table, per_sequence),
        scale=scale,
        target=target,
        parameters=parameters,
        block_rows=M,
        interpret=interpret,
    )
    return out.reshape(B, -1, R)[:, :H], lse.reshape(B, -1)[:, :H]


@_static
def extend(
    q_latent: Float[Array, "T H R"],
    q_rope: Float[Array, "T H D"],
    q_position: Int[Array, "T"],
    q_sequence: Int[Array, "T"],
    pool: LatentPool,
    layer: Int[Array, ""],
    table: FragmentTable,
    *,
    implementation: str,
    scale: float,
    target: Target,
    interpret: bool = False,
    parameters: AbsorbedParameters | None = None,
) -> tuple[Float32[Array, "T H R"], Float32[Array, "T H"]]:
    """Tokens sorted by sequence and position, so that few blocks of rows are of more than one sequence."""
    T, H, R = q_latent.shape
    # Rows behind the last query of a sequence may be reserved and not written yet: they are not to be read.
    ends = jnp.zeros(table.num_sequences, jnp.int32).at[q_sequence].max(q_position.astype(jnp.int32) + 1)
    table = table.until(ends)
    parameters = parameters or absorbed_parameters(target, "extend", H, table.num_sequences, pool.spec("c_kv"))
    M = _block_rows(implementation, "extend", H, parameters)
    order = None
    if table.num_sequences > 1:
        q_sequence = jnp.where(q_position < 0, table.num_sequences - 1, q_sequence)
        q_sequence, q_position, order = lax.sort(
            (q_sequence.astype(jnp.int32), q_position.astype(jnp.int32), jnp.arange(T, dtype=jnp.int32)), num_keys=2
        )
        q_latent, q_rope = q_latent[order], q_rope[order]
    N = -(-T * H // M) * M
    position = _padded_rows(jnp.repeat(q_position, H), N, -1).astype(jnp.int32)
    sequence = jnp.repeat(q_sequence, H).astype(jnp.int32)
    sequence = _padded_rows(sequence, N, table.num_sequences - 1)
    out, lse = _attend(
        implementation,
        _padded_rows(q_latent.reshape(T * H, R), N),
        _padded_rows(q_rope.reshape(T * H, -1), N),
        position,
        sequence,
        pool,
        layer,
        table,
        extend_items(position, sequence, table, M),
        scale=scale,
        target=target,
        parameters=parameters,
        block_rows=M,
        interpret=interpret,
    )
    out, lse = out[: T * H].reshape(T, H, R), lse[: T * H].reshape(T, H)
    if order is None:
        return out, lse
    unsorted = jnp.zeros_like(order).at[order].set(jnp.arange(T, dtype=jnp.int32))
    return out[unsorted], lse[unsorted]


def _padded_rows(x: jax.Array, length: int, value: Any = 0) -> jax.Array:
    missing = length - x.shape[0]
    return jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1), constant_values=value) if missing else x
