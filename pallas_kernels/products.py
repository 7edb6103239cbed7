"""Matrix products with float32 accumulation on every platform."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def einsum_f32(spec: str, *operands: jax.Array) -> jax.Array:
    """Einsum with float32 result and accumulation. float32 operands are multiplied at full precision (no TF32); on the
    CPU narrower ones are widened first, since XLA has no bfloat16 product with float32 result there."""

    def product(*xs: jax.Array) -> jax.Array:
        full = all(x.dtype == jnp.float32 for x in xs)
        precision = lax.Precision.HIGHEST if full else lax.Precision.DEFAULT
        return jnp.einsum(spec, *xs, preferred_element_type=jnp.float32, precision=precision)

    def widened(*xs: jax.Array) -> jax.Array:
        return product(*(x.astype(jnp.float32) for x in xs))

    if all(x.dtype == jnp.float32 for x in operands):
        return product(*operands)
    return lax.platform_dependent(*operands, cpu=widened, default=product)
