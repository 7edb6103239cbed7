"""Multi-head latent attention of one layer: projections around the ops of `pallas_kernels`.

Three forms of the same function. `decode` and `absorbed` fold W_UK into the query and W_UV into the output, so keys and
values are the cached latents themselves; `expanded` rebuilds keys and values from them. Per query, key and head absorbed
costs 2,176 operations and expanded 640, plus 262,144 per key and head for the expansion (DeepSeek sizes): the
break-even is near 170 new tokens.
"""

from __future__ import annotations

from typing import Literal

import jax
from jaxtyping import Array, Float

from irminsul_jax.config import ModelConfig
from irminsul_jax.model.layers import dot, rms_norm
from irminsul_jax.model.params import AttentionParams
from pallas_kernels import FragmentTable, LatentPool, mla_decode, mla_extend, mla_extend_expanded, rotate

Form = Literal["decode", "absorbed", "expanded"]


def latent_rows(
    params: AttentionParams, config: ModelConfig, x: Float[Array, "T H"], cos: jax.Array, sin: jax.Array
) -> dict[str, jax.Array]:
    """What the pool keeps per token: the normed latent `c_kv [T, R]` and the key `k_r [T, D]` rotated to its position."""
    c_kv = rms_norm(dot("th,hr->tr", x, params.kv_latent), params.kv_norm, config.latent_norm_eps)
    return {"c_kv": c_kv, "k_r": rotate(dot("th,hd->td", x, params.kv_rope), cos, sin)}


def attention(
    params: AttentionParams,
    config: ModelConfig,
    x: Float[Array, "T H"],
    cos: jax.Array,
    sin: jax.Array,
    positions: jax.Array,
    sequence: jax.Array,
    pool: LatentPool,
    layer: int,
    table: FragmentTable,
    form: Form,
) -> Float[Array, "T H"]:
    """Attends from the tokens `x` to all rows of their sequences up to their own position (which must be in the pool)."""
    if params.q_a is not None and params.q_a_norm is not None:
        x = rms_norm(dot("th,hq->tq", x, params.q_a), params.q_a_norm, config.latent_norm_eps)
    q_nope = dot("tx,xan->tan", x, params.q_nope)
    q_rope = rotate(dot("tx,xad->tad", x, params.q_rope), cos[:, None], sin[:, None])
    scale = config.softmax_scale
    if form == "expanded":
        out, _ = mla_extend_expanded(
            q_nope, q_rope, positions, sequence, params.key_up, params.value_up, pool, layer, table, scale=scale
        )
        return dot("taw,awh->th", out.astype(x.dtype), params.out)
    q_latent = dot("tan,anr->tar", q_nope, params.key_up)
    if form == "decode":
        latent, _ = mla_decode(q_latent, q_rope, pool, layer, table.until(positions + 1), scale=scale)
    else:
        latent, _ = mla_extend(q_latent, q_rope, positions, sequence, pool, layer, table, scale=scale)
    out = dot("tar,arw->taw", latent.astype(x.dtype), params.value_up)
    return dot("taw,awh->th", out, params.out)
