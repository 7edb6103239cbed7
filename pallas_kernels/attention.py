"""The public attention ops, one per job. `implementation=None` takes the best one that fits device and shapes.

All ops read keys through a `FragmentTable` and turn them by the fragment's shift as they load; all return the
log-sum-exp, so that partial results can be merged (`merge_partial`). `scale` is the softmax scale. A query without keys
gives output 0 and lse −inf; rows outside the table never contribute, whatever they hold. `interpret=True` runs a kernel
in Pallas' interpreter on the CPU: slow, for tests.

Raises `ImplementationError` if the implementation asked for cannot serve the call, with the reasons.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels import absorbed, expanded, xla
from pallas_kernels.call import Call
from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.fragments import FragmentTable
from pallas_kernels.pool import LatentPool, Layer
from pallas_kernels.target import current_target


def mla_decode(
    q_latent: Float[Array, "B H R"],
    q_rope: Float[Array, "B H D"],
    pool: LatentPool,
    layer: Layer,
    table: FragmentTable,
    *,
    scale: float,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> tuple[Float32[Array, "B H R"], Float32[Array, "B H"]]:
    """One query token per sequence over all rows of its table, absorbed form: scores against the latent itself."""
    call = Call(
        op="decode",
        num_tokens=q_latent.shape[0],
        heads=q_latent.shape[1],
        query_dtype=q_latent.dtype,
        pool=pool,
        table=table,
        target=current_target(),
        interpret=interpret,
    )
    name = choose(call, implementation)
    if name == "xla":
        return xla.decode(q_latent, q_rope, pool, layer, table, scale=scale)
    return absorbed.decode(
        q_latent, q_rope, pool, jnp.int32(layer), table,
        implementation=name, scale=scale, target=call.target, interpret=interpret,
    )  # fmt: skip


def mla_extend(
    q_latent: Float[Array, "T H R"],
    q_rope: Float[Array, "T H D"],
    q_position: Int[Array, "T"],
    q_sequence: Int[Array, "T"],
    pool: LatentPool,
    layer: Layer,
    table: FragmentTable,
    *,
    scale: float,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> tuple[Float32[Array, "T H R"], Float32[Array, "T H"]]:
    """Many query tokens at any positions of their sequences, causal by position, absorbed form. Position −1 is padding."""
    call = Call(
        op="extend",
        num_tokens=q_latent.shape[0],
        heads=q_latent.shape[1],
        query_dtype=q_latent.dtype,
        pool=pool,
        table=table,
        target=current_target(),
        interpret=interpret,
    )
    name = choose(call, implementation)
    if name == "xla":
        return xla.extend(q_latent, q_rope, q_position, q_sequence, pool, layer, table, scale=scale)
    return absorbed.extend(
        q_latent, q_rope, q_position, q_sequence, pool, jnp.int32(layer), table,
        implementation=name, scale=scale, target=call.target, interpret=interpret,
    )  # fmt: skip


def mla_extend_expanded(
    q_nope: Float[Array, "T H N"],
    q_rope: Float[Array, "T H D"],
    q_position: Int[Array, "T"],
    q_sequence: Int[Array, "T"],
    key_up: Float[Array, "H N R"],
    value_up: Float[Array, "H R W"],
    pool: LatentPool,
    layer: Layer,
    table: FragmentTable,
    *,
    scale: float,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> tuple[Float32[Array, "T H W"], Float32[Array, "T H"]]:
    """As `mla_extend`, but keys and values are expanded from the latent tile by tile (3.4 times fewer operations per
    query and key, against 262,144 once per key and head at DeepSeek's sizes): for many new tokens."""
    call = Call(
        op="extend_expanded",
        num_tokens=q_nope.shape[0],
        heads=q_nope.shape[1],
        query_dtype=q_nope.dtype,
        pool=pool,
        table=table,
        target=current_target(),
        interpret=interpret,
        nope_width=q_nope.shape[2],
        value_width=value_up.shape[2],
    )
    name = choose(call, implementation)
    if name == "xla":
        return xla.extend_expanded(
            q_nope, q_rope, q_position, q_sequence, key_up, value_up, pool, layer, table, scale=scale
        )
    return expanded.extend_expanded(
        q_nope, q_rope, q_position, q_sequence, key_up, value_up, pool, jnp.int32(layer), table,
        implementation=name, scale=scale, target=call.target, interpret=interpret,
    )  # fmt: skip
