"""Merging attention over disjoint sets of keys."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


def merge_partial(
    out_a: Float[Array, "*q W"], lse_a: Float[Array, "*q"], out_b: Float[Array, "*q W"], lse_b: Float[Array, "*q"]
) -> tuple[Float32[Array, "*q W"], Float32[Array, "*q"]]:
    """The attention over the union of two disjoint sets of keys, from outputs and log-sum-exps over each."""
    top = jnp.maximum(lse_a, lse_b)
    finite_top = jnp.where(jnp.isfinite(top), top, 0.0)
    a, b = jnp.exp(lse_a - finite_top), jnp.exp(lse_b - finite_top)
    total = jnp.where(a + b > 0, a + b, 1.0)
    out = out_a * (a / total)[..., None] + out_b * (b / total)[..., None]
    return out, jnp.where(a + b > 0, finite_top + jnp.log(total), -jnp.inf)
