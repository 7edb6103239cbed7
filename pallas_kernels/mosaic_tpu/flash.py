"""Dense attention over expanded keys and values, causal by position, in blocks."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.mosaic_tpu.softmax import ROWS_BY_ROWS, Ref, dot, finish, fold, start, upright
from pallas_kernels.pool import LANES

QUERY_BLOCK = 128
KEY_BLOCK = 512

_ROW_GRAIN = 16  # rows of the smallest bfloat16 tile


def flash(
    q_nope: Float[Array, "H T N"],
    q_rope: Float[Array, "H T D"],
    keys: Float[Array, "H S N"],
    k_rope: Float[Array, "S D"],
    values: Float[Array, "H S W"],
    q_limit: Int[Array, "T"],
    num_keys: int | Int[Array, ""],
    first_position: int | Int[Array, ""],
    *,
    scale: float,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Float32[Array, "H T W"], Float32[Array, "H T"]]:
    """Output and log-sum-exp. Key s stands at `first_position + s`; query t sees it if `s < num_keys` and its position is
    at most `q_limit[t]`. Rows behind the last key must be finite. Blocks of keys behind the last one that a block of
    queries sees are neither fetched nor computed."""
    H, T, N = q_nope.shape
    S, W = keys.shape[1], values.shape[2]
    rows = min(QUERY_BLOCK, _up(T, _ROW_GRAIN))
    block = min(KEY_BLOCK, _up(S, LANES))
    D = _up(q_rope.shape[2], LANES)
    q_nope = _padded(q_nope, 1, rows)
    q_rope = _padded(_padded(q_rope, 1, rows), 2, LANES)
    keys, values = _padded(keys, 1, block), _padded(values, 1, block)
    k_rope = _padded(_padded(k_rope, 0, block), 1, LANES)
    # Keys that each query sees are the first ones: how many is all the kernel has to know.
    seen = jnp.clip(jnp.asarray(q_limit, jnp.int32) - first_position + 1, 0, jnp.minimum(num_keys, S))
    seen = _padded(seen.astype(jnp.int32), 0, rows).reshape(-1, 1, rows)
    num_blocks = (jnp.max(seen, axis=(1, 2)) + block - 1) // block

    def of_queries(h: jax.Array, i: jax.Array, j: jax.Array, num_blocks: Ref) -> tuple[jax.Array, jax.Array, int]:
        return h, i, 0

    def seen_block(i: jax.Array, j: jax.Array, num_blocks: Ref) -> jax.Array:
        return jnp.minimum(j, jnp.maximum(num_blocks[i] - 1, 0))  # an index that does not change copies nothing

    def of_keys(h: jax.Array, i: jax.Array, j: jax.Array, num_blocks: Ref) -> tuple[jax.Array, jax.Array, int]:
        return h, seen_block(i, j, num_blocks), 0

    out, lse = pl.pallas_call(
        functools.partial(_kernel, scale=scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(H, seen.shape[0], keys.shape[1] // block),
            in_specs=[
                pl.BlockSpec((None, rows, N), of_queries),
                pl.BlockSpec((None, rows, D), of_queries),
                pl.BlockSpec((None, 1, rows), lambda h, i, j, num_blocks: (i, 0, 0)),
                pl.BlockSpec((None, block, N), of_keys),
                pl.BlockSpec((block, D), lambda h, i, j, num_blocks: (seen_block(i, j, num_blocks), 0)),
                pl.BlockSpec((None, block, W), of_keys),
            ],
            out_specs=[
                pl.BlockSpec((None, rows, W), of_queries),
                pl.BlockSpec((None, None, 1, rows), lambda h, i, j, num_blocks: (h, i, 0, 0)),
            ],
            scratch_shapes=[
                pltpu.VMEM((rows, LANES), jnp.float32),
                pltpu.VMEM((rows, LANES), jnp.float32),
                pltpu.VMEM((rows, LANES), jnp.int32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((H, q_nope.shape[1], W), jnp.float32),
            jax.ShapeDtypeStruct((H, seen.shape[0], 1, rows), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        name="mla_flash",
        interpret=interpret,
    )(num_blocks, q_nope, q_rope, seen, keys, k_rope, values)
    return out[:, :T], lse.reshape(H, -1)[:, :T]


def _up(size: int, grain: int) -> int:
    return -(-size // grain) * grain


def _padded(x: jax.Array, axis: int, grain: int) -> jax.Array:
    """Zeros behind, up to a multiple of `grain`; nothing is copied where there are none."""
    missing = -x.shape[axis] % grain
    return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)]) if missing else x


def _kernel(
    num_blocks: Ref,
    q_nope: Ref,
    q_rope: Ref,
    num_seen: Ref,
    keys: Ref,
    k_rope: Ref,
    values: Ref,
    out: Ref,
    lse: Ref,
    top: Ref,
    total: Ref,
    limit: Ref,
    *,
    scale: float,
) -> None:
    i, j = pl.program_id(1), pl.program_id(2)

    @pl.when(j == 0)
    def _():
        start(out, top, total)
        limit[...] = jnp.broadcast_to(upright(num_seen[...].astype(jnp.float32)).astype(jnp.int32), limit.shape)

    @pl.when(j < num_blocks[i])
    def _():
        scores = dot(q_nope[...], keys[...], ROWS_BY_ROWS) + dot(q_rope[...], k_rope[...], ROWS_BY_ROWS)
        index = j * keys.shape[0] + jax.lax.broadcasted_iota(jnp.int32, (1, keys.shape[0]), 1)
        fold(scores * scale, index < limit[:, :1], values[...], out, top, total)

    @pl.when(j + 1 == pl.num_programs(2))
    def _():
        lse[...] = finish(out, top, total)
