"""Choosing the next token on the device. Rows are independent: the token of a row depends on its logits, its own
parameters, its seed and its step alone, never on the rest of the batch."""

from __future__ import annotations

from typing import no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float32, Int, Int32, UInt32

AnyArray = jax.Array | np.ndarray
"""Parameters are made on the host and passed as they are; inside a jitted function they are device arrays."""


@no_type_check  # tree transformations put anything into the leaves
@struct.dataclass
class SamplerState:
    """Parameters of each row of a batch; the meaning of the fields is that of `SamplingParams`."""

    temperature: Float32[AnyArray, "B"]
    """0 is greedy."""
    top_k: Int32[AnyArray, "B"]
    """0 keeps all."""
    top_p: Float32[AnyArray, "B"]
    min_p: Float32[AnyArray, "B"]
    seed: UInt32[AnyArray, "B 2"]
    """Low and high word of the request's seed."""
    stop_ids: Int32[AnyArray, "B S"]
    """Tokens that end a row; padded with −1."""
    min_tokens: Int32[AnyArray, "B"]
    max_tokens: Int32[AnyArray, "B"]


@no_type_check  # tree transformations put anything into the leaves
@struct.dataclass
class Sampled:
    """One token per row, with log-probabilities (natural, of the raw logits). `top_*` have width 0 if not asked for."""

    tokens: Int32[Array, "B"]
    logprobs: Float32[Array, "B"]
    top_ids: Int32[Array, "B K"]
    top_logprobs: Float32[Array, "B K"]


def greedy(logits: Float32[Array, "B V"], key: jax.Array) -> Int32[Array, "B"]:
    """The most likely token; the key is not used."""
    del key
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def sample_rows(
    logits: Float32[Array, "B V"], state: SamplerState, step: Int[Array, "B"], *, all_greedy: bool, num_top: int
) -> Sampled:
    """Samples each row by its own parameters. `step` is the number of tokens the row has generated. `all_greedy` (static)
    leaves the sorting out when no row needs it."""
    allowed = _without_stops(logits, state, step)
    tokens = jnp.argmax(allowed, axis=-1)
    if not all_greedy:
        tokens = jnp.where(state.temperature > 0, _draw(allowed, state, step), tokens)
    return with_logprobs(logits, tokens, num_top)


def with_logprobs(logits: Float32[Array, "B V"], tokens: Int[Array, "B"], num_top: int) -> Sampled:
    log_total = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0] - log_total
    top, top_ids = jax.lax.top_k(logits, min(num_top, logits.shape[-1]))
    return Sampled(tokens.astype(jnp.int32), chosen, top_ids.astype(jnp.int32), top - log_total[:, None])


def is_stop(tokens: Int[Array, "B"], state: SamplerState) -> Bool[Array, "B"]:
    return jnp.any(tokens[:, None] == state.stop_ids, axis=-1)


def _without_stops(logits: jax.Array, state: SamplerState, step: jax.Array) -> jax.Array:
    """Stop tokens at −inf while a row is below its `min_tokens`."""
    banned = jnp.where((step < state.min_tokens)[:, None] & (state.stop_ids >= 0), state.stop_ids, logits.shape[-1])
    return logits.at[jnp.arange(len(logits))[:, None], banned].set(-jnp.inf, mode="drop")


def _draw(logits: jax.Array, state: SamplerState, step: jax.Array) -> jax.Array:
    """Temperature, then top-k, top-p and min-p on what is left, in that order; then one Gumbel draw with a key of the
    row's own."""

    def keep_threshold(row: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
        ranked = -jnp.sort(-row)
        rank = jnp.arange(len(ranked))
        ranked = jnp.where((top_k == 0) | (rank < top_k), ranked, -jnp.inf)
        probs = jax.nn.softmax(ranked)
        inside = jnp.cumsum(probs) - probs < top_p  # the token that crosses top_p is still inside
        inside &= probs >= min_p * probs[0]
        return jnp.min(jnp.where(inside & jnp.isfinite(ranked), ranked, jnp.inf))

    scaled = logits / jnp.where(state.temperature > 0, state.temperature, 1.0)[:, None]
    threshold = jax.vmap(keep_threshold)(scaled, *map(jnp.asarray, (state.top_k, state.top_p, state.min_p)))
    kept = jnp.where(scaled >= threshold[:, None], scaled, -jnp.inf)
    return jax.vmap(lambda seed, at, row: jax.random.categorical(_step_key(seed, at), row))(state.seed, step, kept)


def _step_key(seed: jax.Array, step: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed[0]), seed[1]), step)
