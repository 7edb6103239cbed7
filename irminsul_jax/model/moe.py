"""Mixture of experts: the routers of the DeepSeek-V2 and -V3 kinds, and the experts themselves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from irminsul_jax.config import ModelConfig, MoeConfig
from irminsul_jax.errors import ConfigError
from irminsul_jax.model.layers import dot, mlp
from irminsul_jax.model.params import MoeParams


def moe(params: MoeParams, config: ModelConfig, x: Float[Array, "T H"]) -> Float[Array, "T H"]:
    """Routed experts plus the shared ones."""
    if config.moe is None:
        raise ConfigError("this model configuration has no experts, but the parameters of the layer have")
    experts, weights = route(params, config.moe, x)
    out = experts_dense(params, experts, weights, x)
    return out if params.shared is None else out + mlp(params.shared, x)


def route(
    params: MoeParams, config: MoeConfig, x: Float[Array, "T H"]
) -> tuple[Int[Array, "T K"], Float32[Array, "T K"]]:
    """`(experts, weights)` of the K experts per token. All in float32 at full precision.

    DeepSeek-V2 scores by softmax, chooses by score, limits to the groups with the best single expert, and scales without
    renormalising. DeepSeek-V3 scores by sigmoid, chooses by score + bias, limits to the groups with the best sum of two,
    and weights by the bare scores. Masked groups are −inf: a choice may be negative (case of a negative bias)."""
    logits = dot("th,he->te", x.astype(jnp.float32), params.router)
    if config.router == "sigmoid_bias_grouped":
        scores = jax.nn.sigmoid(logits)
        choice = scores if params.router_bias is None else scores + params.router_bias
    else:
        odds = jnp.exp(logits - logits.max(-1, keepdims=True))
        scores = choice = odds / ordered_sum(odds, -1)
    if config.router != "softmax_greedy" and config.num_groups > 1:
        choice = _limit_groups(choice, config)
    _, experts = lax.top_k(choice, config.experts_per_token)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if config.normalize:
        weights = weights / (ordered_sum(weights, -1) + 1e-20)
    return experts, weights * config.scale


def _limit_groups(choice: Float32[Array, "T E"], config: MoeConfig) -> Float32[Array, "T E"]:
    """−inf outside the `groups_per_token` best groups."""
    groups = choice.reshape(len(choice), config.num_groups, -1)
    if config.router == "sigmoid_bias_grouped":
        best = ordered_sum(lax.top_k(groups, min(2, groups.shape[-1]))[0], -1)[..., 0]
    else:
        best = groups.max(-1)
    _, kept = lax.top_k(best, config.groups_per_token)
    keep = jax.nn.one_hot(kept, config.num_groups, dtype=jnp.bool_).any(1)
    return jnp.where(keep[..., None], groups, -jnp.inf).reshape(choice.shape)


def experts_dense(
    params: MoeParams, experts: Int[Array, "T K"], weights: Float32[Array, "T K"], x: Float[Array, "T H"]
) -> Float[Array, "T H"]:
    """Every expert over every token, combined by weight: E/K times the needed operations, no gather, any platform.

    The token block is broadcast over experts so that the batched product takes the weights as they lie (contracting
    `th,ehi` directly makes XLA transpose all of them first)."""
    num_experts = params.gate.shape[0]
    per_expert = jnp.broadcast_to(x, (num_experts, *x.shape))
    hidden = jax.nn.silu(dot("eth,ehi->eti", per_expert, params.gate)) * dot("eth,ehi->eti", per_expert, params.up)
    out = dot("eti,eih->eth", hidden, params.down)
    combine = jnp.sum(jax.nn.one_hot(experts, num_experts, dtype=jnp.float32) * weights[..., None], axis=1)
    return ordered_sum(out.astype(jnp.float32) * combine.T[..., None], 0)[0].astype(x.dtype)


def ordered_sum(x: jax.Array, axis: int) -> jax.Array:
    """Sum over a short axis, kept with length 1, in an order that is part of the program: halves are added to halves. The
    compiler's own reductions over few elements change their order with the number of rows, which would let a token's
    routing weights depend on its batch in the last bit."""
    size = x.shape[axis]
    while size > 1:
        half = (size + 1) // 2
        low, high = (lax.slice_in_dim(x, a, b, axis=axis) for a, b in ((0, size - half), (half, size)))
        x = jnp.concatenate([low + high, lax.slice_in_dim(x, size - half, half, axis=axis)], axis)
        size = half
    return x
