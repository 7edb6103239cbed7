"""Dense attention of new tokens over expanded keys and values, for the expanded form."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.triton.absorbed import LN2, LOG2E, MASKED
from pallas_kernels.tuning import FlashParameters


def flash(
    q_nope: Float[Array, "H T N"],
    q_rope: Float[Array, "H T D"],
    keys: Float[Array, "S H N"],
    k_rope: Float[Array, "S D"],
    values: Float[Array, "S H W"],
    q_limit: Int[Array, "T"],
    num_keys: Int[Array, ""],
    first_position: Int[Array, ""],
    *,
    scale: float,
    parameters: FlashParameters,
    interpret: bool = False,
) -> tuple[Float32[Array, "H T W"], Float32[Array, "H T"]]:
    """Query t sees key s iff `s < num_keys` and `first_position + s <= q_limit[t]`. T and S are multiples of the block
    sizes of `parameters`."""
    H, T, _ = q_nope.shape
    W = values.shape[-1]
    Q, K = parameters.block_queries, parameters.block_keys
    precision = lax.Precision.HIGHEST if q_nope.dtype == jnp.float32 else None

    def kernel(q_nope_ref, q_rope_ref, keys_ref, k_rope_ref, values_ref, limit_ref, bounds_ref, out_ref, lse_ref):
        queries = pl.ds(pl.program_id(0) * Q, Q)
        head = pl.program_id(1)
        q_nope, q_rope, limit = q_nope_ref[head, queries, :], q_rope_ref[head, queries, :], limit_ref[queries]
        num_keys, first_position = bounds_ref[0], bounds_ref[1]
        # Keys from here on are seen by all queries of the block up to `unmasked`, by none from `stop` on.
        last_seen = limit - first_position + 1
        stop = jnp.minimum(last_seen.max(), num_keys)
        unmasked = jnp.maximum(jnp.minimum(last_seen.min(), num_keys), 0)

        def fold(masked: bool, j: jax.Array, state: Any) -> Any:
            out, top, total = state
            block = pl.ds(j * K, K)
            scores = plt.dot(q_nope, keys_ref[block, head, :].T, precision=precision)
            scores += plt.dot(q_rope, k_rope_ref[block, :].T, precision=precision)
            scores *= scale * LOG2E
            if masked:
                s = j * K + jnp.arange(K, dtype=jnp.int32)
                seen = (s[None, :] < num_keys) & (s[None, :] < last_seen[:, None])
                scores = jnp.where(seen, scores, MASKED)
            new_top = jnp.maximum(top, scores.max(axis=1))
            weights = jnp.exp2(scores - new_top[:, None])
            keep = jnp.exp2(top - new_top)
            v = values_ref[block, head, :]
            out = out * keep[:, None] + plt.dot(weights.astype(v.dtype), v, precision=precision)
            return out, new_top, total * keep + weights.sum(axis=1)

        f32 = jnp.float32
        state = jnp.zeros((Q, W), f32), jnp.full((Q,), MASKED, f32), jnp.zeros((Q,), f32)
        whole = lax.div(unmasked, jnp.int32(K))
        state = lax.fori_loop(0, whole, lambda j, s: fold(False, j, s), state)
        state = lax.fori_loop(whole, lax.div(stop + (K - 1), jnp.int32(K)), lambda j, s: fold(True, j, s), state)
        out, top, total = state
        some = top > MASKED / 2
        total = jnp.where(some, total, 1.0)
        out_ref[head, queries, :] = jnp.where(some[:, None], out / total[:, None], 0.0)
        lse_ref[head, queries] = jnp.where(some, top * LN2 + jnp.log(total), -jnp.inf)

    bounds = jnp.stack([num_keys, first_position]).astype(jnp.int32)
    f32 = jnp.float32
    return pl.pallas_call(
        kernel,
        grid=(math.ceil(T / Q), H),
        out_shape=(jax.ShapeDtypeStruct((H, T, W), f32), jax.ShapeDtypeStruct((H, T), f32)),
        compiler_params=plt.CompilerParams(num_warps=parameters.warps, num_stages=parameters.stages),
        interpret=interpret,
        name="mla_flash",
    )(q_nope, q_rope, keys, k_rope, values, q_limit, bounds)
