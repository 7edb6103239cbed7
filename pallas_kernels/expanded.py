"""The expanded op on top of a kernel: old rows are gathered, turned and expanded tile by tile, in bounded memory."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels import mosaic_tpu, triton
from pallas_kernels.fragments import FragmentTable
from pallas_kernels.merge import merge_partial
from pallas_kernels.pool import PAGE_SIZE, LatentPool
from pallas_kernels.products import einsum_f32
from pallas_kernels.rotary import rotate_by_table
from pallas_kernels.target import Target
from pallas_kernels.tuning import flash_parameters

TILE_BYTES = 256 << 20
"""Expanded keys and values that are held at a time."""


def _tile_keys(bytes_per_key: int, most: int) -> int:
    """Keys of a tile: a power of two that keeps it within `TILE_BYTES`, at least 512, at most what there can be."""
    fitting = max(TILE_BYTES // bytes_per_key, 512)
    return min(1 << (fitting.bit_length() - 1), 1 << max(most - 1, 511).bit_length())


def _expand(c_kv: Float[Array, "S R"], up: Float[Array, "H N R"]) -> Float[Array, "S H N"]:
    """One plain matrix product, in the layout that it comes in: a transposition would cost as much as the product."""
    H, N, R = up.shape
    flat = up.reshape(H * N, R).astype(c_kv.dtype)
    if c_kv.dtype == jnp.float32:
        return einsum_f32("sr,nr->sn", c_kv, flat).reshape(-1, H, N)
    return jnp.einsum("sr,nr->sn", c_kv, flat).reshape(-1, H, N)  # accumulated in float32, rounded once


@functools.partial(jax.jit, static_argnames=("implementation", "scale", "target", "interpret"))
def extend_expanded(
    q_nope: Float[Array, "T H N"],
    q_rope: Float[Array, "T H D"],
    q_position: Int[Array, "T"],
    q_sequence: Int[Array, "T"],
    key_up: Float[Array, "H N R"],
    value_up: Float[Array, "H R W"],
    pool: LatentPool,
    layer: Int[Array, ""],
    table: FragmentTable,
    *,
    implementation: str,
    scale: float,
    target: Target,
    interpret: bool = False,
) -> tuple[Float32[Array, "T H W"], Float32[Array, "T H"]]:
    T, H, N = q_nope.shape
    W, dtype = value_up.shape[-1], q_nope.dtype
    padding = -T % 128
    q_nope, q_rope = (jnp.pad(x.swapaxes(0, 1), ((0, 0), (0, padding), (0, 0))) for x in (q_nope, q_rope))
    q_position = jnp.pad(q_position, (0, padding), constant_values=-1)
    q_sequence = jnp.pad(q_sequence, (0, padding))
    most = table.page.shape[1] * PAGE_SIZE
    S = _tile_keys(H * (N + W) * dtype.itemsize, most)
    num_tiles = -(-most // S)

    def flash(keys: jax.Array, k_r: jax.Array, values: jax.Array, limit: jax.Array, *bounds: jax.Array):
        rest = (limit, *bounds)
        if implementation == "triton":
            parameters = flash_parameters(target, dtype)
            return triton.flash(
                q_nope, q_rope, keys, k_r, values, *rest, scale=scale, parameters=parameters, interpret=interpret
            )
        keys, values = keys.swapaxes(0, 1), values.swapaxes(0, 1)
        return mosaic_tpu.flash(q_nope, q_rope, keys, k_r, values, *rest, scale=scale, interpret=interpret)

    def each_sequence(b: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        limit = jnp.where(q_sequence == b, q_position, -1)
        length = jnp.max(limit) + 1
        # Located for all tiles at once, outside of the loop: the same for all layers, so computed once per step.
        positions = jnp.arange(num_tiles * S, dtype=jnp.int32)
        page, slot, turn, valid = table.locate(jnp.broadcast_to(b, positions.shape), positions)
        located = page, slot, turn, valid & (positions < length)  # rows behind it may not be written yet

        def each_tile(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            first = i * S
            page, slot, turn, valid = (lax.dynamic_slice_in_dim(x, first, S) for x in located)
            c_kv = jnp.where(valid[:, None], pool.read("c_kv", layer, page, slot), 0).astype(dtype)
            k_r = jnp.where(valid[:, None], pool.read("k_r", layer, page, slot), 0)
            if table.cos.shape[0] > 1:
                k_r = rotate_by_table(k_r, turn, jnp.asarray(table.cos), jnp.asarray(table.sin))
            keys, values = _expand(c_kv, key_up), _expand(c_kv, value_up.swapaxes(1, 2))
            num_keys = jnp.clip(length - first, 0, S)
            return merge_partial(*state, *flash(keys, k_r, values, limit, num_keys, first))

        return lax.fori_loop(0, (length + S - 1) // S, each_tile, state)

    state = jnp.zeros((H, T + padding, W), jnp.float32), jnp.full((H, T + padding), -jnp.inf, jnp.float32)
    if table.num_sequences == 1:
        state = each_sequence(jnp.int32(0), state)
    else:
        state = lax.fori_loop(0, table.num_sequences, each_sequence, state)
    out, lse = state
    return out.swapaxes(0, 1)[:T], lse.swapaxes(0, 1)[:T]
