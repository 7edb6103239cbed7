"""The small parts every layer is made of: norm, dense MLP, rotary embedding at positions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from irminsul_jax.config import ModelConfig
from irminsul_jax.model.params import MlpParams
from irminsul_jax.rope import POSITION_BLOCK, position_tables
from pallas_kernels import einsum_f32


def dot(spec: str, *operands: jax.Array, out: jnp.dtype | None = None) -> jax.Array:
    """Einsum that accumulates in float32 and rounds once, to `out` or the first operand's dtype."""
    return einsum_f32(spec, *operands).astype(out or operands[0].dtype)


def rms_norm(x: Float[Array, "T H"], weight: Float[Array, "H"], eps: float) -> Float[Array, "T H"]:
    """Root-mean-square norm in float32."""
    f = x.astype(jnp.float32)
    f = f * lax.rsqrt(jnp.mean(jnp.square(f), axis=-1, keepdims=True) + eps)
    return (f * weight.astype(jnp.float32)).astype(x.dtype)


def mlp(params: MlpParams, x: Float[Array, "T H"]) -> Float[Array, "T H"]:
    """SwiGLU."""
    hidden = jax.nn.silu(dot("th,hi->ti", x, params.gate)) * dot("th,hi->ti", x, params.up)
    return dot("ti,ih->th", hidden, params.down)


def rope_at(config: ModelConfig, positions: Int[Array, "T"]) -> tuple[Float32[Array, "T D2"], Float32[Array, "T D2"]]:
    """cos and sin of the rotary angles at `positions`, times YaRN's factor on both. Negative positions (padding) get
    some angle."""
    coarse, fine = position_tables(config.rope, config.qk_rope_head_dim, config.max_position)
    p = jnp.maximum(positions, 0)
    (cos_a, sin_a), (cos_b, sin_b) = (
        jnp.asarray(coarse)[:, p // POSITION_BLOCK],
        jnp.asarray(fine)[:, p % POSITION_BLOCK],
    )
    factor = config.rope.cos_sin_factor
    return (cos_a * cos_b - sin_a * sin_b) * factor, (sin_a * cos_b + cos_a * sin_b) * factor
