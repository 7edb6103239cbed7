"""What the TPU kernels can serve, and in blocks of how many rows."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.call import Call, OpName
from pallas_kernels.mosaic_tpu import paged

DECODE_ROWS = 128
EXTEND_ROWS = 256
"""Most rows of a block. Each block reads all its pages, so few rows wait for memory: by operation count, reading and
multiplying balance at 128 rows on a v5e and at about 300 on a v6e. Not measured."""


def block_rows(op: OpName, heads: int) -> int:
    """Rows of a block; in decode the heads of one token fill few blocks, as evenly as may be."""
    if op != "decode":
        return EXTEND_ROWS
    blocks = -(-heads // DECODE_ROWS)
    return -(-heads // (blocks * paged.ROW_GRAIN)) * paged.ROW_GRAIN


def why_not(call: Call) -> str | None:
    """Why these kernels cannot serve a call, in words; None if they can."""
    if not call.interpret and call.target.platform != "tpu":
        return f"it needs a TPU, this is {call.target.kind!r}"
    if call.query_dtype not in (jnp.bfloat16, jnp.float32):
        return f"queries are {call.query_dtype}, it takes bfloat16 or float32"
    if call.op == "extend_expanded":
        return None  # rows are gathered and expanded before the kernel, whatever the pool is like
    if call.query_dtype != call.pool["c_kv"].dtype:
        return f"queries are {call.query_dtype} and the pool's latents {call.pool['c_kv'].dtype}"
    rows, members = block_rows(call.op, call.heads), call.table.num_sequences
    if call.op == "decode":
        num_items = members * -(-call.heads // rows)
    else:
        num_items = -(-call.num_tokens * call.heads // rows) + members - 1
    return paged.misfit(call.pool, call.table, block_rows=rows, num_items=num_items)
