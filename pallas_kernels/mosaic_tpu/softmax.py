"""What the kernels share: products, the online softmax over the blocks of keys, and turning a row of lanes upright."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32

Ref = Any
"""A reference to memory inside a kernel; Pallas has no public type for it."""

_LOW = -1e30
"""Score of a key that is not seen, below every real one. Finite, so that the difference of two is no NaN."""

ROWS_BY_ROWS = (((1,), (1,)), ((), ()))
"""`x [m, k]` by `y [n, k]` to `[m, n]`."""

ROWS_BY_COLUMNS = (((1,), (0,)), ((), ()))
"""`x [m, k]` by `y [k, n]` to `[m, n]`."""


def dot(x: jax.Array, y: jax.Array, dimensions: Any) -> jax.Array:
    """A product with float32 accumulation; float32 operands are multiplied at full precision."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(x, y, dimensions, precision=precision, preferred_element_type=jnp.float32)


def start(out: Ref, top: Ref, total: Ref) -> None:
    """An empty state: `out [q, W]` not normalised, largest score and sum of weights `[q, 128]`, equal in all lanes."""
    out[...] = jnp.zeros_like(out)
    top[...] = jnp.full_like(top, _LOW)
    total[...] = jnp.zeros_like(total)


def fold(
    scores: Float32[Array, "q S"], seen: Bool[Array, "q S"], values: Float[Array, "S W"], out: Ref, top: Ref, total: Ref
) -> None:
    """Adds a block of keys to the state. Scores that are not seen may be NaN; values must not be."""
    scores = jnp.where(seen, scores, _LOW)
    old = top[...]
    new = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.where(seen, jnp.exp(scores - new[:, :1]), 0.0)
    keep = jnp.exp(old - new)
    top[...] = new
    total[...] = total[...] * keep + jnp.sum(weights, axis=1, keepdims=True)
    out[...] = out[...] * keep[:, :1] + dot(weights.astype(values.dtype), values, ROWS_BY_COLUMNS)


def finish(out: Ref, top: Ref, total: Ref) -> Float32[Array, "1 q"]:
    """Normalises `out` and returns the log-sum-exp as a row of lanes; 0 and −inf where nothing was seen."""
    sum_of_weights = total[:, :1]
    some = sum_of_weights > 0
    divisor = jnp.where(some, sum_of_weights, 1.0)
    out[...] = out[...] / divisor
    return _across(jnp.where(some, top[:, :1] + jnp.log(divisor), -jnp.inf))


def upright(row: Float32[Array, "1 q"]) -> Float32[Array, "q 1"]:
    """A row of lanes as a column. A column in HBM would take 128 times its size."""
    return jnp.sum(jnp.where(_diagonal(row.shape[1]), row, 0.0), axis=1, keepdims=True)


def _across(column: Float32[Array, "q 1"]) -> Float32[Array, "1 q"]:
    return jnp.sum(jnp.where(_diagonal(column.shape[0]), column, 0.0), axis=0, keepdims=True)


def _diagonal(size: int) -> Bool[Array, "q q"]:
    return lax.broadcasted_iota(jnp.int32, (size, size), 0) == lax.broadcasted_iota(jnp.int32, (size, size), 1)
