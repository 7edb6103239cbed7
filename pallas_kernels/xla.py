"""Attention in plain XLA: the oracle for every kernel, and the implementation on the CPU.

Keys are gathered in target order, in blocks of a fixed size, and folded in by the online softmax. So the arithmetic of a
query depends on its own position and keys alone: not on how a prompt was cut into chunks, where its rows lie in the
pool, or how much padding follows. That is what makes a prefix hit bit-identical to a cold run in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int

from pallas_kernels.fragments import FragmentTable
from pallas_kernels.pool import LatentPool, Layer
from pallas_kernels.products import einsum_f32
from pallas_kernels.rotary import rotate_by_table

KEY_BLOCK = 512
"""Keys folded in at once; the unit in which work is skipped and memory is bounded."""

LN2 = math.log(2.0)

State = tuple[jax.Array, jax.Array, jax.Array]
"""Online softmax: output so far (not normalised), power of two that it is scaled by, sum of weights."""


def _load_block(
    pool: LatentPool, layer: Layer, table: FragmentTable, sequence: jax.Array, positions: jax.Array, limit: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`(c_kv, k_r turned to its target position, valid)` of the given target positions; zeros where not valid, so that
    whatever unused rows hold (NaN, say) cannot leak through 0 · x."""
    page, slot, turn, valid = table.locate(jnp.broadcast_to(sequence, positions.shape), positions)
    valid &= positions < limit
    c_kv = jnp.where(valid[..., None], pool.read("c_kv", layer, page, slot), 0)
    k_r = jnp.where(valid[..., None], pool.read("k_r", layer, page, slot), 0)
    return c_kv, rotate_by_table(k_r, turn, jnp.asarray(table.cos), jnp.asarray(table.sin)), valid


def _fold(state: State, scores: Float32[Array, "*q S"], mask: Bool[Array, "*#q S"], values: Callable) -> State:
    """One step of the online softmax; `values(p)` is the product of the weights `[*q, S]` with the block's values.

    The running maximum is rounded up to a whole power of two (`top` counts in units of ln 2), so rescaling is exact, and
    it makes no difference whether the compiler contracts the multiplication and the sum that follows into one operation:
    it decides that by the shape of the batch."""
    out, top, total = state
    scores = jnp.where(mask, scores, -jnp.inf)
    new_top = jnp.maximum(top, jnp.ceil(scores.max(-1) / LN2))
    finite_top = jnp.where(jnp.isfinite(new_top), new_top, 0.0)  # no key yet: exp(-inf - 0) = 0, never exp(nan)
    weights = jnp.exp(scores - (finite_top * LN2)[..., None])
    keep = _power_of_two(top - finite_top)
    return out * keep[..., None] + values(weights), new_top, total * keep + weights.sum(-1)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """2^exponent for whole exponents ≤ 0, exactly; 0 below the normal float32 range."""
    biased = jnp.clip(exponent, -127, 0).astype(jnp.int32) + 127
    return lax.bitcast_convert_type(biased << 23, jnp.float32)


def _finish(state: State) -> tuple[jax.Array, jax.Array]:
    out, top, total = state
    some = total > 0
    out = jnp.where(some[..., None], out / jnp.where(some, total, 1.0)[..., None], 0.0)
    return out, jnp.where(some, top * LN2 + jnp.log(jnp.where(some, total, 1.0)), -jnp.inf)


def _start(shape: tuple[int, ...], width: int) -> State:
    f32 = jnp.float32
    return jnp.zeros((*shape, width), f32), jnp.full(shape, -jnp.inf, f32), jnp.zeros(shape, f32)


def _num_blocks(length: jax.Array) -> jax.Array:
    return (length + KEY_BLOCK - 1) // KEY_BLOCK


def _block_positions(i: jax.Array) -> Int[Array, "S"]:
    return i * KEY_BLOCK + jnp.arange(KEY_BLOCK, dtype=jnp.int32)


def decode(
    q_latent: Float[Array, "B H R"],
    q_rope: Float[Array, "B H D"],
    pool: LatentPool,
    layer: Layer,
    table: FragmentTable,
    *,
    scale: float,
) -> tuple[Float32[Array, "B H R"], Float32[Array, "B H"]]:
    B, H, R = q_latent.shape
    ends = table.end()
    sequences = jnp.arange(B, dtype=jnp.int32)[:, None]

    def body(i: jax.Array, state: State) -> State:
        positions = jnp.broadcast_to(_block_positions(i), (B, KEY_BLOCK))
        c_kv, k_r, valid = _load_block(pool, layer, table, sequences, positions, ends[:, None])
        scores = (einsum_f32("bhr,bsr->bhs", q_latent, c_kv) + einsum_f32("bhd,bsd->bhs", q_rope, k_r)) * scale
        return _fold(state, scores, valid[:, None], lambda p: einsum_f32("bhs,bsr->bhr", p.astype(c_kv.dtype), c_kv))

    return _finish(lax.fori_loop(0, _num_blocks(ends.max()), body, _start((B, H), R)))


def _for_each_block(
    q_position: jax.Array,
    q_sequence: jax.Array,
    pool: LatentPool,
    layer: Layer,
    table: FragmentTable,
    state: State,
    fold: Callable[[State, jax.Array, jax.Array, jax.Array], State],
) -> State:
    """Runs `fold(state, c_kv, k_r, mask [T, S])` over all key blocks of all sequences. Keys of other sequences and of
    later positions are masked, so a batch of B sequences costs B times one: callers that care pass one sequence."""

    def each_sequence(b: jax.Array, state: State) -> State:
        own = q_sequence == b
        limit = jnp.max(jnp.where(own, q_position, -1)) + 1

        def each_block(i: jax.Array, state: State) -> State:
            positions = _block_positions(i)
            c_kv, k_r, valid = _load_block(pool, layer, table, b, positions, limit)
            mask = valid & own[:, None] & (positions <= q_position[:, None])
            return fold(state, c_kv, k_r, mask)

        return lax.fori_loop(0, _num_blocks(limit), each_block, state)

    if table.num_sequences == 1:
        return each_sequence(jnp.int32(0), state)
    return lax.fori_loop(0, table.num_sequences, each_sequence, state)


def extend(
    q_latent: Float[Array, "T H R"],
    q_rope: Float[Array, "T H D"],
    q_position: Int[Array, "T"],
    q_sequence: Int[Array, "T"],
    pool: LatentPool,
    layer: Layer,
    table: FragmentTable,
    *,
    scale: float,
) -> tuple[Float32[Array, "T H R"], Float32[Array, "T H"]]:
    T, H, R = q_latent.shape

    def fold(state: State, c_kv: jax.Array, k_r: jax.Array, mask: jax.Array) -> State:
        scores = (einsum_f32("thr,sr->ths", q_latent, c_kv) + einsum_f32("thd,sd->ths", q_rope, k_r)) * scale
        return _fold(state, scores, mask[:, None], lambda p: einsum_f32("ths,sr->thr", p.astype(c_kv.dtype), c_kv))

    return _finish(_for_each_block(q_position, q_sequence, pool, layer, table, _start((T, H), R), fold))


def extend_expanded(
    q_nope: Float[Array, "T H N"],
    q_rope: Float[Array, "T H D"],
    q_position: Int[Array, "T"],
    q_sequence: Int[Array, "T"],
    key_up: Float[Array, "H N R"],
    value_up: Float[Array, "H R W"],
    pool: LatentPool,
    layer: Layer,
    table: FragmentTable,
    *,
    scale: float,
) -> tuple[Float32[Array, "T H W"], Float32[Array, "T H"]]:
    T, H, _ = q_nope.shape
    dtype = q_nope.dtype
    q_nope, q_rope = q_nope.swapaxes(0, 1), q_rope.swapaxes(0, 1)  # heads in front: products without transposition

    def fold(state: State, c_kv: jax.Array, k_r: jax.Array, mask: jax.Array) -> State:
        keys = einsum_f32("sr,hnr->hsn", c_kv, key_up).astype(dtype)
        values = einsum_f32("sr,hrw->hsw", c_kv, value_up).astype(dtype)
        scores = (einsum_f32("htn,hsn->hts", q_nope, keys) + einsum_f32("htd,sd->hts", q_rope, k_r)) * scale
        return _fold(state, scores, mask[None], lambda p: einsum_f32("hts,hsw->htw", p.astype(dtype), values))

    state = _start((H, T), value_up.shape[-1])
    out, lse = _finish(_for_each_block(q_position, q_sequence, pool, layer, table, state, fold))
    return out.swapaxes(0, 1), lse.swapaxes(0, 1)
