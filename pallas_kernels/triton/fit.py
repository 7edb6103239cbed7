"""What the Triton kernels can serve."""

from __future__ import annotations

from jax import numpy as jnp

from pallas_kernels.call import Call


def why_not(call: Call) -> str | None:
    """Why these kernels cannot serve a call, in words; None if they can."""
    pool = call.pool
    if not call.interpret and (call.target.platform != "gpu" or call.target.capability < 80):
        return f"it needs an NVIDIA GPU of compute capability 8.0 or newer, this is {call.target.kind!r}"
    if pool.layout != "plain":
        return f"it reads pools of layout 'plain', this one has {pool.layout!r}"
    latent, rope = pool.spec("c_kv"), pool.spec("k_r")
    if latent.width not in (64, 128, 256, 512):
        return f"the latent is {latent.width} wide, it takes 64, 128, 256 or 512"
    if rope.width not in (16, 32, 64):
        return f"the rotary key is {rope.width} wide, it takes 16, 32 or 64"
    if rope.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"the pool's dtype is {rope.dtype}"
    if call.query_dtype != rope.dtype:
        return f"queries are {call.query_dtype} and the pool's keys {rope.dtype}"
    if latent.scaled and pool["c_kv"].size >= 2**31:
        return "the float8 pool has 2^31 or more elements, whose offsets overflow in this lowering"
    if latent.scaled and not call.interpret and call.target.capability < 89:
        return f"float8 needs compute capability 8.9 or newer, this is {call.target.kind!r}"
    if call.op == "extend_expanded":
        for name, width in (("keys", call.nope_width), ("values", call.value_width)):
            if width not in (16, 32, 64, 128, 256):
                return f"expanded {name} are {width} wide per head, it takes a power of two from 16 to 256"
    return None
