"""The Mosaic GPU lowering of Pallas: kernels for NVIDIA Hopper, written against its copy engine and tensor cores."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.fragments import FragmentTable
from pallas_kernels.mosaic_gpu.fit import BLOCK_ROWS, is_faster, why_not
from pallas_kernels.pool import LatentPool
from pallas_kernels.schedule import Items, by_block, share_out
from pallas_kernels.triton import MERGE_TILE, merge_pieces

__all__ = ["BLOCK_ROWS", "attend", "is_faster", "why_not"]


def attend(
    q_latent: Float[Array, "N R"],
    q_rope: Float[Array, "N D"],
    row_position: Int[Array, "N"] | None,
    row_sequence: Int[Array, "N"] | None,
    pool: LatentPool,
    layer: jax.Array,
    table: FragmentTable,
    items: Items,
    *,
    scale: float,
    num_programs: int,
    interpret: bool = False,
) -> tuple[Float32[Array, "N R"], Float32[Array, "N"]]:
    """Query rows in blocks of 64 against the fragments of `items`; see `triton.attend`."""
    # Imported late: jax below 0.11.2 has not got what the kernel is written with.
    from pallas_kernels.mosaic_gpu.absorbed import attend_pieces

    N, R = q_latent.shape
    many = 4 * num_programs <= N // BLOCK_ROWS and table.num_sequences == 1
    pieces = by_block(items) if many else share_out(items, num_programs)
    operands = {
        "q_latent": q_latent,
        "q_rope": q_rope,
        "c_kv": pool["c_kv"],
        "k_r": pool["k_r"],
        "layer": jnp.asarray(layer, jnp.int32).reshape(1),
        **{name: jnp.asarray(getattr(table, name)) for name in ("page", "lo", "hi", "start")},
    }
    if table.cos.shape[0] > 1:  # else no key is turned
        operands |= {name: jnp.asarray(getattr(table, name)) for name in ("turn", "cos", "sin")}
    if row_position is not None and row_sequence is not None:
        operands |= {"row_position": row_position, "row_sequence": row_sequence}
    f32 = jnp.float32
    num_partial = (1 if many else pieces.first.shape[0]) + MERGE_TILE
    out_type = [
        jax.ShapeDtypeStruct((num_partial, BLOCK_ROWS, R), f32),
        jax.ShapeDtypeStruct((num_partial, BLOCK_ROWS), f32),
        jax.ShapeDtypeStruct((N, R), f32),
        jax.ShapeDtypeStruct((N,), f32),
    ]
    part, part_lse, out, lse = attend_pieces(operands, pieces, out_type, scale=scale, interpret=interpret)
    return merge_pieces(part, part_lse, out, lse, pieces, num_programs, interpret=interpret)
