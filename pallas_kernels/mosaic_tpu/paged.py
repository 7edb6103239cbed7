"""Attention of blocks of query rows over the paged pool, absorbed form.

One grid step is one item: the rows of a block that belong to one sequence, over its first fragments. The pool stays in
HBM; pages come a few at a time through two buffers, and the first step of an item is fetched while the last
one of the item before is computed, so the copies do not pause between items. The state of the softmax lives as long as
the block of queries does. The fragment table lies in scalar memory: that is what limits its size.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int, Int32

from pallas_kernels.fragments import FragmentTable
from pallas_kernels.mosaic_tpu.softmax import ROWS_BY_ROWS, Ref, dot, finish, fold, start, upright
from pallas_kernels.pool import LANES, PAGE_SIZE, LatentPool, to_stored
from pallas_kernels.schedule import Items

PAGES_PER_STEP = 8
"""Fragments whose keys are scored in one product."""

SMEM_BYTES = 960 * 1024
"""Scalar memory for tables and items, of 1 MiB in all."""

VMEM_BYTES = 48 * 1024 * 1024
"""Vector memory that the kernel may take (v5e and v6e have 128 MiB, v7x 64)."""

_MAX_TURNS = 1 << 16
"""The index of a turn shares a word with the bounds of its fragment."""

ROW_GRAIN = 16
"""Rows of the smallest bfloat16 tile."""

_LAST = 2**30
"""Limit of a row that sees all keys: behind every position (scalar memory holds fewer than 2^17 fragments)."""
_NOWHERE = 2**31 - 1
"""Position of a slot without key."""
_ANY_SEQUENCE = -1


def misfit(pool: LatentPool, table: FragmentTable, *, block_rows: int, num_items: int) -> str | None:
    """What keeps `attend` from serving this pool and table, in words; None if nothing does."""
    c_kv, k_r = pool["c_kv"], pool["k_r"]
    rank, dtype = c_kv.shape[-1], c_kv.dtype
    if pool.layout != "lanes":
        return f"it reads pools of layout 'lanes', this one has {pool.layout!r}"
    if dtype not in (jnp.bfloat16, jnp.float32) or k_r.dtype != dtype:
        return f"latents are {dtype} and rotary keys {k_r.dtype}; it takes bfloat16 or float32, both alike"
    if rank != pool.spec("c_kv").width:
        return f"latents are {pool.spec('c_kv').width} wide, not a multiple of {LANES}"
    if k_r.shape[-1] != LANES:
        return f"rotary keys are {pool.spec('k_r').width} wide, more than {LANES}"
    if block_rows % ROW_GRAIN:
        return f"blocks of {block_rows} rows are not a multiple of {ROW_GRAIN}"
    if table.cos.shape[0] > _MAX_TURNS:
        return f"{table.cos.shape[0]} distinct shifts are more than {_MAX_TURNS}"
    smem = _smem_bytes(table, num_items)
    if smem > SMEM_BYTES:
        size = "x".join(map(str, table.page.shape))
        return f"a table of {size} fragments with {num_items} items takes {smem} bytes of scalar memory, at most {SMEM_BYTES} fit"
    vmem = _vmem_bytes(block_rows, rank, dtype.itemsize)
    if vmem > VMEM_BYTES:
        return f"blocks of {block_rows} rows take about {vmem} bytes of vector memory, at most {VMEM_BYTES} fit"
    return None


def _smem_bytes(table: FragmentTable, num_items: int) -> int:
    return 4 * (3 * table.page.size + 4 * num_items + 1)


def _vmem_bytes(block_rows: int, rank: int, itemsize: int) -> int:
    """Double buffers of queries, output and pages, the state, and the values between products (an estimate)."""
    keys = PAGES_PER_STEP * PAGE_SIZE
    buffers = 2 * (block_rows * (rank + LANES) * itemsize + block_rows * rank * 4 + keys * (rank + LANES) * itemsize)
    state = 3 * block_rows * LANES * 4
    values = block_rows * 4 * (4 * keys + 2 * block_rows + 2 * rank) + keys * (rank + 2 * LANES) * itemsize
    parts = 8 * (block_rows + keys) * rank if itemsize == 4 else 0  # float32 is multiplied in parts of bfloat16
    return buffers + state + values + parts


def attend(
    q_latent: Float[Array, "N R"],
    q_rope: Float[Array, "N D"],
    row_position: Int[Array, "N"] | None,
    row_sequence: Int[Array, "N"] | None,
    pool: LatentPool,
    layer: int | Int[Array, ""],
    table: FragmentTable,
    items: Items,
    *,
    scale: float,
    block_rows: int,
    pages_per_step: int = PAGES_PER_STEP,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Float32[Array, "N R"], Float32[Array, "N"]]:
    """Output and log-sum-exp of query rows (one token and head each) in blocks of `block_rows`. `q_rope` is plain, or laid
    out already as the pool's rotary keys are (`to_stored`); queries are rounded to the pool's dtype. A row sees the keys
    of its own sequence up to its position (−1: none); without positions, all keys of its block's items."""
    N, R = q_latent.shape
    num_items = items.block.shape[0]
    if N % block_rows:
        raise ValueError(f"{N} rows are not a multiple of blocks of {block_rows}")
    if (row_position is None) != (row_sequence is None):
        raise ValueError("rows need both position and sequence, or neither")
    if reason := misfit(pool, table, block_rows=block_rows, num_items=num_items):
        raise ValueError(f"the TPU kernel cannot serve this: {reason}")
    c_kv, k_r = pool["c_kv"], pool["k_r"]
    if q_rope.shape[1] != LANES:
        q_rope = to_stored(q_rope, pool.spec("k_r"), pool.layout)
    if row_position is None or row_sequence is None:
        row_position, row_sequence = jnp.full(N, _LAST), jnp.full(N, _ANY_SEQUENCE)
    rows = jnp.stack([row_position.reshape(-1, block_rows), row_sequence.reshape(-1, block_rows)], axis=1)
    steps = pl.cdiv(items.count, pages_per_step)
    keys = pages_per_step * PAGE_SIZE
    scalars = (
        items.block,
        items.sequence,
        items.count,
        (jnp.cumsum(steps) - steps) % 2,
        jnp.asarray(layer).reshape(1),
        *_packed(table),
    )

    def of_block(i: jax.Array, block: Ref, *_: Ref) -> tuple[jax.Array, int]:
        return block[i], 0

    def of_block_across(i: jax.Array, block: Ref, *_: Ref) -> tuple[jax.Array, int, int]:
        return block[i], 0, 0

    in_place = pl.BlockSpec(memory_space=pl.ANY)
    out, lse = pl.pallas_call(
        functools.partial(
            _kernel,
            scale=scale,
            num_fragments=table.page.shape[1],
            pages_per_step=pages_per_step,
            turning=table.cos.shape[0] > 1,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(num_items,),
            in_specs=[
                pl.BlockSpec((block_rows, R), of_block),
                pl.BlockSpec((block_rows, LANES), of_block),
                pl.BlockSpec((None, 2, block_rows), of_block_across),
                *(in_place,) * 3,
            ],
            out_specs=[
                pl.BlockSpec((block_rows, R), of_block),
                pl.BlockSpec((None, 1, block_rows), of_block_across),
            ],
            scratch_shapes=[
                pltpu.VMEM((2, keys, R), c_kv.dtype),
                pltpu.VMEM((2, keys, LANES), k_r.dtype),
                pltpu.VMEM((2, pages_per_step, 1, LANES), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.VMEM((block_rows, LANES), jnp.float32),
                pltpu.VMEM((block_rows, LANES), jnp.float32),
                pltpu.VMEM((block_rows, LANES), jnp.int32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((N, R), jnp.float32),
            jax.ShapeDtypeStruct((N // block_rows, 1, block_rows), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES),
        name="mla_paged",
        interpret=interpret,
    )(
        *(s.astype(jnp.int32) for s in scalars),
        q_latent.astype(c_kv.dtype),
        q_rope.astype(c_kv.dtype),
        rows.astype(jnp.int32),
        _turn_rows(table),
        c_kv,
        k_r,
    )
    return out, lse.reshape(N)


def _packed(table: FragmentTable) -> tuple[Int32[Array, "BF"], Int32[Array, "BF"], Int32[Array, "BF"]]:
    """`page`, `start` and one word `lo | hi << 8 | turn << 16` for each fragment. Flat, since scalar memory pads rows."""
    page, lo, hi, start, turn = (
        jnp.asarray(field).reshape(-1) for field in (table.page, table.lo, table.hi, table.start, table.turn)
    )
    return page, start, lo | hi << 8 | turn << 16


def _turn_rows(table: FragmentTable) -> Float32[Array, "T 1 128"]:
    """Cosines in the first half of the lanes, sines in the second: one row of 512 bytes a turn."""
    halves = (jnp.asarray(x, jnp.float32) for x in (table.cos, table.sin))
    row = [jnp.pad(x, ((0, 0), (0, LANES // 2 - x.shape[1]))) for x in halves]
    return jnp.concatenate(row, axis=1)[:, None]


class _Fragment(NamedTuple):
    """Scalars of one fragment; `lo == hi == 0` where there is none."""

    page: jax.Array
    lo: jax.Array
    hi: jax.Array
    start: jax.Array
    turn: jax.Array


def _kernel(
    block: Ref,
    sequence: Ref,
    count: Ref,
    first_buffer: Ref,
    layer: Ref,
    page: Ref,
    begin: Ref,
    word: Ref,
    q_latent: Ref,
    q_rope: Ref,
    rows: Ref,
    turns: Ref,
    c_kv: Ref,
    k_r: Ref,
    out: Ref,
    lse: Ref,
    c_buffer: Ref,
    k_buffer: Ref,
    turn_buffer: Ref,
    arrived: Ref,
    top: Ref,
    total: Ref,
    limit: Ref,
    *,
    scale: float,
    num_fragments: int,
    pages_per_step: int,
    turning: bool,
) -> None:
    item, num_items = pl.program_id(0), pl.num_programs(0)
    before, behind = jnp.maximum(item - 1, 0), jnp.minimum(item + 1, num_items - 1)
    num_steps = pl.cdiv(count[item], pages_per_step)

    def fragment(item: jax.Array, step: jax.Array, j: int) -> _Fragment:
        index = step * pages_per_step + j
        at = sequence[item] * num_fragments + jnp.minimum(index, num_fragments - 1)
        packed = word[at]
        lo, hi = packed & 255, (packed >> 8) & 255
        exists = (index < count[item]) & (lo < hi)
        lo, hi = jnp.where(exists, lo, 0), jnp.where(exists, hi, 0)
        return _Fragment(page[at], lo, hi, begin[at], lax.shift_right_logical(packed, 16))

    def copies(f: _Fragment, j: int, buffer: jax.Array) -> list:
        own = pl.ds(j * PAGE_SIZE, PAGE_SIZE)
        pairs = [
            (c_kv.at[layer[0], f.page], c_buffer.at[buffer, own]),
            (k_r.at[layer[0], f.page], k_buffer.at[buffer, own]),
        ]
        if turning:
            pairs.append((turns.at[f.turn], turn_buffer.at[buffer, j]))
        return [pltpu.make_async_copy(source, target, arrived.at[buffer]) for source, target in pairs]

    def fetch(item: jax.Array, step: jax.Array, buffer: jax.Array) -> None:
        for j in range(pages_per_step):
            f = fragment(item, step, j)

            @pl.when(f.lo < f.hi)
            def _(f=f, j=j):
                for copy in copies(f, j, buffer):
                    copy.start()

    def wait(fragments: list[_Fragment], buffer: jax.Array) -> None:
        for j, f in enumerate(fragments):

            @pl.when(f.lo < f.hi)
            def _(f=f, j=j):
                for copy in copies(f, j, buffer):
                    copy.wait()

    @pl.when((item == 0) | (block[item] != block[before]))
    def _():
        start(out, top, total)

    @pl.when((num_steps > 0) & ((item == 0) | (count[before] == 0)))
    def _():
        fetch(item, jnp.int32(0), first_buffer[item])

    own = (rows[1:2] == sequence[item]) | (rows[1:2] == _ANY_SEQUENCE)
    own_limit = upright(jnp.where(own, rows[0:1], -1).astype(jnp.float32))
    limit[...] = jnp.broadcast_to(own_limit.astype(jnp.int32), limit.shape)

    def body(step: jax.Array, _: None) -> None:
        buffer = lax.rem(first_buffer[item] + step, 2)
        last = step + 1 == num_steps

        @pl.when(~last)
        def _():
            fetch(item, step + 1, 1 - buffer)

        @pl.when(last & (item + 1 < num_items) & (count[behind] > 0))
        def _():
            fetch(behind, jnp.int32(0), 1 - buffer)

        fragments = [fragment(item, step, j) for j in range(pages_per_step)]
        wait(fragments, buffer)
        _clear_unused(c_buffer.at[buffer], fragments)
        latent = c_buffer[buffer]
        rope = _turned(k_buffer[buffer], turn_buffer.at[buffer]) if turning else k_buffer[buffer]
        scores = dot(q_latent[...], latent, ROWS_BY_ROWS) + dot(q_rope[...], rope, ROWS_BY_ROWS)
        seen = _positions(fragments) <= limit[:, :1]
        fold(scores * scale, seen, latent, out, top, total)

    lax.fori_loop(0, num_steps, body, None)

    @pl.when((item + 1 == num_items) | (block[item] != block[behind]))
    def _():
        lse[...] = finish(out, top, total)


def _clear_unused(latent: Ref, fragments: list[_Fragment]) -> None:
    """Zeros where a page is not used: a weight of 0 does not silence NaN. Whole pages are left as they are."""
    for j, f in enumerate(fragments):

        @pl.when(f.hi - f.lo < PAGE_SIZE)
        def _(f=f, j=j):
            own = pl.ds(j * PAGE_SIZE, PAGE_SIZE)
            rows = latent[own].astype(jnp.float32)
            slot = lax.broadcasted_iota(jnp.int32, rows.shape, 0)
            latent[own] = jnp.where((slot >= f.lo) & (slot < f.hi), rows, 0.0).astype(latent.dtype)


def _turned(keys: Float[Array, "S 128"], turns: Ref) -> Float[Array, "S 128"]:
    """Keys turned in float32, page by page, and rounded once. The halves of a row lie 64 lanes apart."""
    turned = []
    first = lax.broadcasted_iota(jnp.int32, (1, LANES), 1) < LANES // 2
    for j in range(keys.shape[0] // PAGE_SIZE):
        turn = turns[j]  # [1, 128]: cosines, then sines
        other = pltpu.roll(turn, LANES // 2, 1)
        cos, sin = jnp.where(first, turn, other), jnp.where(first, -other, turn)
        page = keys[j * PAGE_SIZE : (j + 1) * PAGE_SIZE].astype(jnp.float32)
        turned.append((page * cos + pltpu.roll(page, LANES // 2, 1) * sin).astype(keys.dtype))
    return jnp.concatenate(turned)


def _positions(fragments: list[_Fragment]) -> Int32[Array, "1 S"]:
    """Target position of each key of a step; `_NOWHERE` for slots that are not used."""
    shape = (1, len(fragments) * PAGE_SIZE)
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    slot, page = lane % PAGE_SIZE, lane // PAGE_SIZE
    position = jnp.full(shape, _NOWHERE, jnp.int32)
    for j, f in enumerate(fragments):
        position = jnp.where((page == j) & (slot >= f.lo) & (slot < f.hi), f.start + slot, position)
    return position
