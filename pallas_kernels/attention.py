"""The public attention ops, one per job. `implementation=None` takes the first one that fits the platform.

All ops read keys through a `FragmentTable` and turn them by the fragment's shift as they load; all return the
log-sum-exp, so that partial results can be merged. `scale` is the softmax scale. A query without keys gives output 0 and
lse −inf; rows outside the table never contribute, whatever they hold.
"""

from __future__ import annotations

from typing import Literal, get_args

from jaxtyping import Array, Float, Float32, Int

from pallas_kernels import xla
from pallas_kernels.fragments import FragmentTable
from pallas_kernels.pool import LatentPool

Implementation = Literal["xla"]


def _check(implementation: str | None) -> None:
    if implementation is not None and implementation not in get_args(Implementation):
        raise ValueError(f"unknown implementation {implementation!r}; known: {', '.join(get_args(Implementation))}")


def mla_decode(
    q_latent: Float[Array, "B H R"],
    q_rope: Float[Array, "B H D"],
    pool: LatentPool,
    layer: int,
    table: FragmentTable,
    *,
    scale: float,
    implementation: Implementation | None = None,
) -> tuple[Float32[Array, "B H R"], Float32[Array, "B H"]]:
    """One query token per sequence over all rows of its table, absorbed form: scores against the latent itself."""
    _check(implementation)
    return xla.decode(q_latent, q_rope, pool, layer, table, scale=scale)


def mla_extend(
    q_latent: Float[Array, "T H R"],
    q_rope: Float[Array, "T H D"],
    q_position: Int[Array, "T"],
    q_sequence: Int[Array, "T"],
    pool: LatentPool,
    layer: int,
    table: FragmentTable,
    *,
    scale: float,
    implementation: Implementation | None = None,
) -> tuple[Float32[Array, "T H R"], Float32[Array, "T H"]]:
    """Many query tokens at any positions of their sequences, causal by position, absorbed form. Position −1 is padding."""
    _check(implementation)
    return xla.extend(q_latent, q_rope, q_position, q_sequence, pool, layer, table, scale=scale)


def mla_extend_expanded(
    q_nope: Float[Array, "T H N"],
    q_rope: Float[Array, "T H D"],
    q_position: Int[Array, "T"],
    q_sequence: Int[Array, "T"],
    key_up: Float[Array, "H N R"],
    value_up: Float[Array, "H R W"],
    pool: LatentPool,
    layer: int,
    table: FragmentTable,
    *,
    scale: float,
    implementation: Implementation | None = None,
) -> tuple[Float32[Array, "T H W"], Float32[Array, "T H"]]:
    """As `mla_extend`, but keys and values are expanded from the latent block by block (3.4 times fewer operations per
    query and key, against 262,144 once per key and head at DeepSeek's sizes): for many new tokens."""
    _check(implementation)
    return xla.extend_expanded(
        q_nope, q_rope, q_position, q_sequence, key_up, value_up, pool, layer, table, scale=scale
    )
