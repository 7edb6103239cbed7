"""Turning rotary keys: cosines and sines in float64 on the host, rotation in float32 on the device, half-split layout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Float64, Int


def turn_table(
    shifts: Int[np.ndarray, "N"], inv_freq: Float64[np.ndarray, "D2"]
) -> tuple[Float32[np.ndarray, "N D2"], Float32[np.ndarray, "N D2"]]:
    """cos and sin of `shift * inv_freq`, one row per distinct shift. The product is float64: in float32 the angle of a
    shift of 160,000 is off by 0.01 radian. YaRN's attention factor is left out, since the stored key carries it."""
    angles = shifts.astype(np.float64)[:, None] * inv_freq
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(x: Float[Array, "*n D"], cos: Float[Array, "*#n D2"], sin: Float[Array, "*#n D2"]) -> Float[Array, "*n D"]:
    """Rotates half-split pairs `(x[i], x[i + D/2])` in float32, then rounds once to the dtype of `x`. A row with cos 1
    and sin 0 comes back bit-identical."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def rotate_by_table(
    x: Float[Array, "*n D"], index: Int[Array, "*n"], cos: Float[Array, "N D2"], sin: Float[Array, "N D2"]
) -> jax.Array:
    """`rotate` with one row of a turn table per vector."""
    return rotate(x, cos[index], sin[index])
