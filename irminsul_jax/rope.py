"""Rotary frequencies and angles of a model, in float64 on the host. No jax: planning and conversion read it too.

Formulas: YaRN (arXiv 2309.00071) with the ramp and rounding of DeepSeek's reference code.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from jaxtyping import Float32, Float64

from irminsul_jax.config import RopeConfig

POSITION_BLOCK = 512
"""Positions of one block of `position_tables`."""


def inv_freq(rope: RopeConfig, dim: int) -> Float64[np.ndarray, "D2"]:
    """Angular frequency of each rotary pair, radians a token. `dim` is the rotary width D."""
    plain = rope.theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if rope.kind == "default":
        return plain

    def pair_with_rotations(rotations: float) -> float:
        """Index of the pair that turns this many times over the original context."""
        turns = math.log(rope.original_max_position / (rotations * 2 * math.pi))
        return dim * turns / (2 * math.log(rope.theta))

    low = max(math.floor(pair_with_rotations(rope.beta_fast)), 0)
    high = min(math.ceil(pair_with_rotations(rope.beta_slow)), dim - 1)
    # Kimi-K2 has equal betas, so low may equal high: a hard step instead of a ramp.
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low if high != low else 0.001), 0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


@functools.lru_cache(maxsize=8)
def position_tables(
    rope: RopeConfig, dim: int, max_position: int
) -> tuple[Float32[np.ndarray, "2 m D2"], Float32[np.ndarray, "2 n D2"]]:
    """`(coarse, fine)`: cos and sin at multiples of `POSITION_BLOCK` (`[2, n, D/2]`) and inside one block
    (`[2, POSITION_BLOCK, D/2]`). The angle of any position is the sum of two rows, so the device gets it to float32
    rounding; the product position · frequency taken in float32 is off by 0.01 radian at 160,000."""
    freq = inv_freq(rope, dim)

    def table(positions: np.ndarray) -> np.ndarray:
        angles = positions[:, None] * freq
        return np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32)

    blocks = max_position // POSITION_BLOCK + 1
    return table(np.arange(blocks, dtype=np.float64) * POSITION_BLOCK), table(
        np.arange(POSITION_BLOCK, dtype=np.float64)
    )
