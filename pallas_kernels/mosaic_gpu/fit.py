"""What the Hopper kernels can serve, and when they are the faster choice."""

from __future__ import annotations

import jax
from jax import numpy as jnp

from pallas_kernels.call import Call

BLOCK_ROWS = 64
"""Query rows of one program: the least that a warpgroup's product takes."""

MIN_JAX = (0, 11, 2)
"""First version with everything that the kernels use."""


def why_not(call: Call) -> str | None:
    """Why these kernels cannot serve a call, in words; None if they can."""
    if jax.__version_info__ < MIN_JAX:
        return f"it needs jax {'.'.join(map(str, MIN_JAX))} or newer, this is {jax.__version__}"
    if not call.interpret and (call.target.platform != "gpu" or call.target.capability // 10 != 9):
        return f"it needs an NVIDIA Hopper GPU (H100, H200), this is {call.target.kind!r}"
    if call.op == "extend_expanded":
        return "it has absorbed attention only"
    pool = call.pool
    if pool.layout != "plain":
        return f"it reads pools of layout 'plain', this one has {pool.layout!r}"
    latent, rope = pool.spec("c_kv"), pool.spec("k_r")
    if (latent.width, rope.width) != (512, 64):
        return f"latent and rotary key are {latent.width} and {rope.width} wide, it takes 512 and 64"
    if latent.dtype != jnp.bfloat16 or rope.dtype != jnp.bfloat16:
        return f"the pool holds {latent.dtype} and {rope.dtype}, it takes bfloat16"
    if call.query_dtype != jnp.bfloat16:
        return f"queries are {call.query_dtype}, it takes bfloat16"
    return None


def is_faster(call: Call) -> bool:
    """Whether these kernels beat Triton's: with 64 rows of queries or more per key (`benchmarks/mla_kernels.py`)."""
    return call.op == "extend" or call.heads >= 64
