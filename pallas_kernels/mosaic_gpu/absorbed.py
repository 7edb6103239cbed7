"""Absorbed attention on Hopper: TMA page copies, wgmma, one producer and two consumer warpgroups.

A program has 64 query rows and one piece of work. Both consumer warpgroups score the whole page (64×64) and each
accumulates one half of the output's columns (64×256); scoring twice costs a third of the operations and saves the exchange
of weights through shared memory, for which there is no room beside two pages. The producer copies one page while the other
is computed; the rotary keys come one page earlier, so that it can turn their 64×64 tile in shared memory, once for both
consumers, while nobody waits for it. Rows outside a fragment are cleared before their product, whatever they hold.
"""

# The type checker sees the oldest jax in range, whose Mosaic GPU differs.
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false, reportReturnType=false

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu.fit import BLOCK_ROWS
from pallas_kernels.pool import PAGE_SIZE
from pallas_kernels.schedule import Pieces

HALF = 256
"""Columns of the latent that one consumer accumulates."""

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
MASKED = -1e30
"""Score of a key that a row does not see: finite, so that a row without keys so far needs no special case."""

bf16, f32, i32 = jnp.bfloat16, jnp.float32, jnp.int32

CONSUMER_REGISTERS, PRODUCER_REGISTERS = 216, 72
"""Per thread: three warpgroups start with 168 each, and what the producer gives up the consumers get. More in all than
at the start would wait for ever."""

STAGES, KEY_STAGES = 2, 3
"""Latent pages and rotary key tiles in shared memory; with the queries they fill 224 of its 227 KiB."""


class _Shared:
    """Shared memory and barriers of one program, per stage; pages and queries in halves of the columns."""

    def __init__(self, q, q_rope, pages, keys, q_full, page_full, key_full, turned, used):
        self.q, self.q_rope, self.pages, self.keys = q, q_rope, pages, keys
        self.q_full, self.page_full, self.key_full, self.turned, self.used = q_full, page_full, key_full, turned, used

    @staticmethod
    def allocation() -> list[Any]:
        wide = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        narrow = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(64))  # can be cut between the rotary halves
        smem, barrier = plgpu.SMEM, plgpu.Barrier
        return [
            smem((2, BLOCK_ROWS, HALF), bf16, transforms=wide),
            smem((BLOCK_ROWS, 64), bf16, transforms=narrow),
            smem((STAGES, 2, PAGE_SIZE, HALF), bf16, transforms=wide),
            smem((KEY_STAGES, PAGE_SIZE, 64), bf16, transforms=narrow),
            barrier(num_arrivals=3),  # q_full: three copies have landed
            barrier(num_barriers=(STAGES, 2)),  # page_full
            barrier(num_barriers=KEY_STAGES),  # key_full
            barrier(num_barriers=KEY_STAGES),  # turned
            barrier(num_arrivals=2, num_barriers=STAGES),  # used: both consumers are done with the page
        ]


def _per_column(values: jax.Array, shape: tuple[int, int]) -> jax.Array:
    return lax.broadcast_in_dim(values, shape, (1,))


def _per_row(values: jax.Array, shape: tuple[int, int]) -> jax.Array:
    return lax.broadcast_in_dim(values, shape, (0,))


def _produce(refs: dict[str, Any], shared: _Shared, p: jax.Array, n: jax.Array) -> None:
    """Copies the queries and the n fragments of piece p, and prepares each page for both consumers."""
    tile = plgpu.Layout.WGMMA
    sequence, first = refs["sequence"][p], refs["first"][p]
    layer = refs["layer"][0]

    def turn_keys(turn: jax.Array, stage: jax.Array) -> None:
        cos, sin = (plgpu.load(refs[name].at[turn], layout=tile.reduce(0), optimized=False) for name in ("cos", "sin"))
        halves = [shared.keys.at[stage, :, pl.ds(column, 32)] for column in (0, 32)]
        a, b = (plgpu.load(half, layout=tile).astype(f32) for half in halves)
        cos, sin = _per_column(cos, a.shape), _per_column(sin, a.shape)
        halves[0][...] = (a * cos - b * sin).astype(bf16)
        halves[1][...] = (b * cos + a * sin).astype(bf16)
        plgpu.commit_smem()

    def fragment(i: jax.Array) -> tuple[jax.Array, ...]:
        f = first + jnp.minimum(i, n - 1)
        return tuple(refs[name][sequence, f] for name in ("page", "turn") if name in refs)

    def copy_keys(i: jax.Array, page: jax.Array) -> None:
        stage = lax.rem(i, i32(KEY_STAGES))
        plgpu.copy_gmem_to_smem(refs["k_r"].at[layer, page], shared.keys.at[stage], shared.key_full.at[stage])

    def prepare_keys(i: jax.Array, *turn: jax.Array) -> None:
        stage = lax.rem(i, i32(KEY_STAGES))
        plgpu.barrier_wait(shared.key_full.at[stage])
        if turn:
            pl.when(turn[0] > 0)(lambda: turn_keys(turn[0], stage))
        plgpu.barrier_arrive(shared.turned.at[stage])

    rows = pl.ds(refs["block"][p] * BLOCK_ROWS, BLOCK_ROWS)
    for half in range(2):
        columns = pl.ds(HALF * half, HALF)
        plgpu.copy_gmem_to_smem(refs["q_latent"].at[rows, columns], shared.q.at[half], shared.q_full)
    plgpu.copy_gmem_to_smem(refs["q_rope"].at[rows], shared.q_rope, shared.q_full)

    def each(i: jax.Array, carry: Any) -> Any:
        now, upcoming = carry
        after = fragment(i + 2)  # loaded long before it is needed
        stage = lax.rem(i, i32(STAGES))
        pl.when(i >= STAGES)(lambda: plgpu.barrier_wait(shared.used.at[stage]))
        # The tile of the next keys was last read with the page whose end has just been awaited. They come first, so that
        # they are turned before this page has arrived.
        pl.when(i + 1 < n)(lambda: copy_keys(i + 1, upcoming[0]))
        for half in range(2):
            source = refs["c_kv"].at[layer, now[0], :, pl.ds(HALF * half, HALF)]
            plgpu.copy_gmem_to_smem(source, shared.pages.at[stage, half], shared.page_full.at[stage, half])
        pl.when(i + 1 < n)(lambda: prepare_keys(i + 1, *upcoming[1:]))
        return upcoming, after

    start = fragment(i32(0))
    copy_keys(i32(0), start[0])
    prepare_keys(i32(0), *start[1:])
    lax.fori_loop(0, n, each, (start, fragment(i32(1))))

    @pl.loop(jnp.maximum(n - STAGES, i32(0)), n)
    def _(i: jax.Array) -> None:  # no barrier is left in the middle of a phase
        plgpu.barrier_wait(shared.used.at[lax.rem(i, i32(STAGES))])


def _consume(
    refs: dict[str, Any], outputs: tuple[Any, ...], shared: _Shared, p: jax.Array, n: jax.Array, w: jax.Array, *,
    scale: float, interpret: bool,
) -> None:  # fmt: skip
    """Warpgroup w on the n fragments of piece p: all scores, output columns of half w."""
    tile = plgpu.Layout.WGMMA
    per_row, per_column = tile.reduce(1), tile.reduce(0)
    shape = (BLOCK_ROWS, PAGE_SIZE)
    column = plgpu.broadcasted_iota(i32, (PAGE_SIZE,), 0, layout=per_column)
    sequence, first = refs["sequence"][p], refs["first"][p]
    rows = pl.ds(refs["block"][p] * BLOCK_ROWS, BLOCK_ROWS)
    limit = None
    if "row_position" in refs:
        position, row_sequence = (
            plgpu.load(refs[name].at[rows], layout=per_row, optimized=False)
            for name in ("row_position", "row_sequence")
        )
        limit = jnp.where(row_sequence == sequence, position, -1)

    def filled(value: float, shape: tuple[int, ...], layout: Any) -> jax.Array:
        return plgpu.layout_cast(jnp.full(shape, value, f32), layout)

    def scores_of(i: jax.Array, stage: jax.Array) -> jax.Array:
        key_stage = lax.rem(i, i32(KEY_STAGES))
        # Always 0, but not known to be: addresses of the queries that did not depend on the loop would all be computed in
        # front of it, and kept in registers that are not there.
        zero = lax.shift_right_logical(i, i32(30))

        def products(acc: Any) -> jax.Array:
            for half in range(2):
                plgpu.barrier_wait(shared.page_full.at[stage, half])
                plgpu.wgmma(acc, shared.q.at[half + zero], shared.pages.at[stage, half].transpose((1, 0)))
            plgpu.barrier_wait(shared.turned.at[key_stage])
            plgpu.wgmma(acc, shared.q_rope, shared.keys.at[key_stage].transpose((1, 0)))
            return acc[...]

        return pl.run_scoped(products, plgpu.WGMMAAccumulatorRef(shape, f32)) * (scale * LOG2E)

    def masked(scores: jax.Array, lo: jax.Array, hi: jax.Array, start: jax.Array) -> jax.Array:
        nothing = filled(MASKED, shape, tile)

        def hide_rows(scores: jax.Array) -> jax.Array:
            inside = _per_column(jnp.where((column >= lo) & (column < hi), 1, 0), shape) > 0
            return jnp.where(inside, scores, nothing)

        scores = lax.cond(hi - lo < PAGE_SIZE, hide_rows, lambda s: s, scores)
        if limit is None:
            return scores
        return jnp.where(_per_column(column + start, shape) <= _per_row(limit, shape), scores, nothing)

    def clear_unused(lo: jax.Array, hi: jax.Array, stage: jax.Array) -> None:
        """Zeros in the rows of this warpgroup's half that are not in the fragment. The other one may still score them:
        it masks what it gets."""
        row = plgpu.broadcasted_iota(i32, (PAGE_SIZE,), 0, layout=per_row)
        keep = _per_row(jnp.where((row >= lo) & (row < hi), 1, 0), (PAGE_SIZE, 64)) > 0
        zero = plgpu.layout_cast(jnp.zeros((PAGE_SIZE, 64), bf16), tile)
        for begin in range(0, HALF, 64):
            columns = shared.pages.at[stage, w, :, pl.ds(begin, 64)]
            columns[...] = jnp.where(keep, plgpu.load(columns, layout=tile), zero)
        plgpu.commit_smem()

    def accumulate(acc: jax.Array, weights: jax.Array, stage: jax.Array) -> jax.Array:
        values = shared.pages.at[stage, w]
        if interpret:  # the interpreter has no operands in registers
            return acc + jnp.dot(weights, values[...], preferred_element_type=f32)
        return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, weights, values))(plgpu.WGMMAAccumulatorRef.init(acc))

    def fragment(i: jax.Array) -> tuple[jax.Array, ...]:
        f = first + jnp.minimum(i, n - 1)
        start = refs["start"][sequence, f] if limit is not None else i32(0)
        return refs["lo"][sequence, f], refs["hi"][sequence, f], start

    def each(i: jax.Array, state: Any) -> Any:
        acc, top, total, now = state
        stage = lax.rem(i, i32(STAGES))
        scores = scores_of(i, stage)
        upcoming = fragment(i + 1)  # loaded long before it is needed
        lo, hi, _ = now
        pl.when(hi - lo < PAGE_SIZE)(lambda: clear_unused(lo, hi, stage))
        scores = masked(scores, *now)
        new_top = jnp.maximum(top, scores.max(axis=1))
        keep = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - _per_row(new_top, shape))
        total = total * keep + weights.sum(axis=1)
        acc = accumulate(acc * _per_row(keep, acc.shape), weights.astype(bf16), stage)
        plgpu.barrier_arrive(shared.used.at[stage])
        return acc, new_top, total, upcoming

    start = (
        filled(0.0, (BLOCK_ROWS, HALF), tile),
        filled(MASKED, (BLOCK_ROWS,), per_row),
        filled(0.0, (BLOCK_ROWS,), per_row),
        fragment(i32(0)),
    )
    plgpu.barrier_wait(shared.q_full)
    acc, top, total, _ = lax.fori_loop(0, n, each, start)
    some = jnp.where(top > MASKED / 2, 1.0, 0.0)
    total = jnp.maximum(total, 1e-30)
    acc = acc * _per_row(some / total, acc.shape)
    lse = jnp.where(top > MASKED / 2, top * LN2 + jnp.log2(total) * LN2, -jnp.inf)

    def store(out_ref: Any, lse_ref: Any) -> None:
        out_ref.at[:, pl.ds(w * HALF, HALF)][...] = acc

        @pl.when(w == 0)
        def _() -> None:
            lse_ref[...] = lse

    part_ref, part_lse_ref, out_ref, lse_ref = outputs
    whole = refs["whole"][p] > 0
    pl.when(whole)(lambda: store(out_ref.at[rows], lse_ref.at[rows]))
    pl.when(jnp.logical_not(whole))(lambda: store(part_ref.at[p], part_lse_ref.at[p]))


def attend_pieces(
    operands: dict[str, jax.Array], pieces: Pieces, out_type: Any, *, scale: float, interpret: bool
) -> Any:
    """The partial results and finished blocks of a schedule, as laid out by `out_type`."""
    names = ("block", "sequence", "first", "stop", "whole", "by_size")
    operands = {**operands, **{name: getattr(pieces, name) for name in names}}
    names = tuple(operands)

    def kernel(*all_refs: Any) -> None:
        refs, outputs = dict(zip(names, all_refs, strict=False)), all_refs[len(names) :]

        def body(*scratch: Any) -> None:
            shared = _Shared(*scratch)
            p, warpgroup = refs["by_size"][lax.axis_index("program")], lax.axis_index("warpgroup")
            n = refs["stop"][p] - refs["first"][p]

            @pl.when((n > 0) & (warpgroup == 2))
            def _() -> None:
                plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
                _produce(refs, shared, p, n)

            @pl.when((n > 0) & (warpgroup < 2))
            def _() -> None:
                plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
                _consume(refs, outputs, shared, p, n, warpgroup, scale=scale, interpret=interpret)

        pl.run_scoped(body, *_Shared.allocation(), collective_axes="warpgroup")

    return plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(pieces.first.shape[0],),
        grid_names=("program",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512),
        **({"interpret": plgpu.InterpretGPUParams()} if interpret else {}),
    )(*operands.values())
