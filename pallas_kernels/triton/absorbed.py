"""Absorbed attention over fragments: a kernel that computes the pieces of a schedule, and one that merges them.

One fragment is one contiguous load of 64 rows and one shift. Products run on the tensor cores with float32
accumulation; the online softmax works in base 2. Rows outside a fragment are never loaded (masked loads give zeros), so
whatever they hold cannot reach the result.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.fragments import FragmentTable
from pallas_kernels.pool import PAGE_SIZE, LatentPool
from pallas_kernels.schedule import Items, Pieces, by_block, share_out
from pallas_kernels.tuning import AbsorbedParameters

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
MASKED = -1e30
"""Score of a key that a row does not see: finite, so that a row without keys so far needs no special case."""

MIN_DOT = 16
"""Smallest dimension of a product in Triton; keys whose rotary halves are narrower are turned as a whole."""

MERGE_TILE = 128
"""Most partial results that are loaded at once; arrays over pieces are that much longer, so that no load ends outside."""

State = tuple[jax.Array, jax.Array, jax.Array]
"""Output so far (not normalised) `[M, R]`, largest score in base 2 `[M]`, sum of weights `[M]`, all float32."""


def attend(
    q_latent: Float[Array, "N R"],
    q_rope: Float[Array, "N D"],
    row_position: Int[Array, "N"] | None,
    row_sequence: Int[Array, "N"] | None,
    pool: LatentPool,
    layer: jax.Array,
    table: FragmentTable,
    items: Items,
    *,
    scale: float,
    parameters: AbsorbedParameters,
    num_programs: int,
    interpret: bool = False,
) -> tuple[Float32[Array, "N R"], Float32[Array, "N"]]:
    """Query rows in blocks of `parameters.block_rows` against the fragments of `items`. Without positions every row sees
    all rows of its item's sequence; with them, those of its own sequence up to its own position."""
    M = parameters.block_rows
    num_blocks = q_latent.shape[0] // M
    # With blocks in plenty one program each keeps all of them busy, and there is nothing to merge.
    split = num_blocks < 4 * num_programs
    pieces = share_out(items, num_programs) if split else by_block(items)
    rows = None if row_position is None or row_sequence is None else (row_position, row_sequence)
    operands = _Operands.of(q_latent, q_rope, rows, pool, layer, table)
    if not split:
        return _attend_blocks(operands, pieces, scale, parameters, interpret)
    partial = _attend_pieces(operands, pieces, scale, parameters, interpret)
    return merge_pieces(*partial, pieces, num_programs, interpret=interpret)


class _Operands(dict[str, jax.Array]):
    """Arrays by name; kernels get them as refs under the same names."""

    @classmethod
    def of(cls, q_latent, q_rope, rows, pool: LatentPool, layer, table: FragmentTable) -> _Operands:
        self = cls(
            q_latent=q_latent,
            q_rope=q_rope,
            c_kv=pool["c_kv"],
            k_r=pool["k_r"],
            layer=jnp.asarray(layer, jnp.int32).reshape(1),
            **{name: jnp.asarray(getattr(table, name)) for name in ("page", "lo", "hi", "start")},
        )
        if table.cos.shape[0] > 1:  # else no key is turned
            self["turn"] = jnp.asarray(table.turn)
            cos, sin = jnp.asarray(table.cos), jnp.asarray(table.sin)
            if cos.shape[1] < MIN_DOT:  # for keys turned as a whole: one factor per column, the sine with its sign
                cos, sin = jnp.concatenate([cos, cos], -1), jnp.concatenate([-sin, sin], -1)
            self["cos"], self["sin"] = cos, sin
        if rows is not None:
            self["row_position"], self["row_sequence"] = rows
        if (factor := pool.scale("c_kv")) is not None:
            self["factor"] = factor
        return self


def _call(kernel, operands: dict[str, jax.Array], out_shape: Any, grid: tuple[int, ...], *, warps: int, stages: int,
          interpret: bool, name: str, **options: Any) -> Any:  # fmt: skip
    """`pallas_call` whose kernel gets its operands as a dict of refs, then its outputs."""
    names = tuple(operands)

    def body(*refs: Any) -> None:
        kernel(dict(zip(names, refs, strict=False)), *refs[len(names) :])

    return pl.pallas_call(
        body,
        grid=grid,
        out_shape=out_shape,
        # Passed explicitly: without it jax 0.10 would lower to Mosaic GPU.
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name=name,
        **options,
    )(*operands.values())


def _fold_fragments(
    refs: dict[str, Any], block: jax.Array, sequence: jax.Array, first: jax.Array, stop: jax.Array, state: State, *,
    scale: float, parameters: AbsorbedParameters,
) -> State:  # fmt: skip
    """Folds the fragments `[first, stop)` of `sequence` into the state of the block's rows."""
    M, K = parameters.block_rows, parameters.block_keys
    rows = pl.ds(block * M, M)
    q_latent = refs["q_latent"][rows, :]
    precision = lax.Precision.HIGHEST if q_latent.dtype == jnp.float32 else None
    rope_scores = _rope_scores(refs, rows, precision)
    layer = refs["layer"][0]
    slots = jnp.arange(K, dtype=jnp.int32)
    limit = None
    if "row_position" in refs:
        limit = jnp.where(refs["row_sequence"][rows] == sequence, refs["row_position"][rows], -1)
    steps = PAGE_SIZE // K

    def fragment(i: jax.Array) -> tuple[jax.Array, ...]:
        f = jnp.maximum(jnp.minimum(lax.div(i, jnp.int32(steps)), stop - 1), 0)  # an empty item stops at 0
        return tuple(refs[name][sequence, f] for name in ("page", "lo", "hi", "turn") if name in refs)

    def fold(i: jax.Array, carry: tuple[State, Any]) -> tuple[State, Any]:
        """Where the next keys lie is loaded one step ahead: addresses that depend on a load of the same step keep Triton
        from copying more than one tile at a time."""
        (out, top, total), (page, lo, hi, *turn) = carry
        upcoming = fragment(i + 1)
        f = lax.div(i, jnp.int32(steps)) if steps > 1 else i
        slot = lax.rem(i, jnp.int32(steps)) * K if steps > 1 else jnp.int32(0)
        valid = (slots + slot >= lo) & (slots + slot < hi)
        c_kv = plt.load(
            refs["c_kv"].at[layer, page, pl.ds(slot, K), :],
            mask=jnp.broadcast_to(valid[:, None], (K, q_latent.shape[1])),
            other=0.0,
        )
        factor = None
        if "factor" in refs:
            factor = plt.load(refs["factor"].at[layer, page, pl.ds(slot, K)], mask=valid, other=0.0)
            c_kv = c_kv.astype(q_latent.dtype)
        scores = plt.dot(q_latent, c_kv.T, precision=precision)
        if factor is not None:
            scores *= factor[None, :]
        scores += rope_scores(page, pl.ds(slot, K), valid, *turn)
        seen = valid[None, :]
        if limit is not None:
            position = refs["start"][sequence, f] + slot + slots
            seen = seen & (position[None, :] <= limit[:, None])
        scores = jnp.where(seen, scores * (scale * LOG2E), MASKED)
        new_top = jnp.maximum(top, scores.max(axis=1))
        weights = jnp.exp2(scores - new_top[:, None])
        keep = jnp.exp2(top - new_top)
        total = total * keep + weights.sum(axis=1)
        if factor is not None:
            weights *= factor[None, :]
        out = out * keep[:, None] + plt.dot(weights.astype(c_kv.dtype), c_kv, precision=precision)
        return (out, new_top, total), upcoming

    begin = first * steps
    return lax.fori_loop(begin, stop * steps, fold, (state, fragment(begin)))[0]


def _rope_scores(refs: dict[str, Any], rows: Any, precision: Any) -> Callable[..., jax.Array]:
    """`scores(page, slots, valid, turn)`: the rotary part of the scores, with the keys turned by the fragment's
    shift in float32 as they load. Values cannot be sliced or joined here, so both halves are loaded apart."""
    D = refs["k_r"].shape[-1]
    half = D // 2
    layer = refs["layer"][0]

    def load(page: jax.Array, slots: Any, valid: jax.Array, columns: Any, width: int) -> jax.Array:
        mask = jnp.broadcast_to(valid[:, None], (valid.shape[0], width))
        return plt.load(refs["k_r"].at[layer, page, slots, columns], mask=mask, other=0.0)

    def angles(turn: jax.Array) -> tuple[jax.Array, jax.Array]:
        return refs["cos"][turn, :][None, :], refs["sin"][turn, :][None, :]

    if half < MIN_DOT:
        q = refs["q_rope"][rows, :]
        # Column j of the swapped key is column j ± half of the key; a product with a permutation is exact.
        lines, columns = jnp.arange(D)[:, None], jnp.arange(D)[None, :]
        swap = ((lines == columns + half) | (lines + half == columns)).astype(q.dtype)

        def whole(page: jax.Array, slots: Any, valid: jax.Array, *turn: jax.Array) -> jax.Array:
            k = load(page, slots, valid, slice(None), D)
            if turn:
                cos, sin = angles(*turn)
                k = (k.astype(jnp.float32) * cos + plt.dot(k, swap, precision=precision) * sin).astype(k.dtype)
            return plt.dot(q, k.T, precision=precision)

        return whole

    q_first, q_second = refs["q_rope"][rows, pl.ds(0, half)], refs["q_rope"][rows, pl.ds(half, half)]

    def halves(page: jax.Array, slots: Any, valid: jax.Array, *turn: jax.Array) -> jax.Array:
        first, second = (load(page, slots, valid, pl.ds(offset, half), half) for offset in (0, half))
        if turn:
            cos, sin = angles(*turn)
            a, b = first.astype(jnp.float32), second.astype(jnp.float32)
            first, second = (x.astype(first.dtype) for x in (a * cos - b * sin, b * cos + a * sin))
        return plt.dot(q_first, first.T, precision=precision) + plt.dot(q_second, second.T, precision=precision)

    return halves


def _start(M: int, R: int) -> State:
    f32 = jnp.float32
    return jnp.zeros((M, R), f32), jnp.full((M,), MASKED, f32), jnp.zeros((M,), f32)


def _finish(state: State) -> tuple[jax.Array, jax.Array]:
    out, top, total = state
    some = top > MASKED / 2
    total = jnp.where(some, total, 1.0)
    return jnp.where(some[:, None], out / total[:, None], 0.0), jnp.where(some, top * LN2 + jnp.log(total), -jnp.inf)


def _attend_blocks(
    operands: _Operands, pieces: Pieces, scale: float, parameters: AbsorbedParameters, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """One program per block, through all of its items."""
    N, R = operands["q_latent"].shape
    M = parameters.block_rows

    def kernel(refs: dict[str, Any], out_ref: Any, lse_ref: Any) -> None:
        block = pl.program_id(0)
        fold = functools.partial(_fold_fragments, refs, scale=scale, parameters=parameters)
        state = lax.fori_loop(
            refs["program_first"][block],
            refs["program_first"][block + 1],
            lambda p, state: fold(block, refs["sequence"][p], refs["first"][p], refs["stop"][p], state),
            _start(M, R),
        )
        rows = pl.ds(block * M, M)
        out_ref[rows, :], lse_ref[rows] = _finish(state)

    return _call(
        kernel,
        {**operands, **schedule_operands(pieces)},
        (jax.ShapeDtypeStruct((N, R), jnp.float32), jax.ShapeDtypeStruct((N,), jnp.float32)),
        (pieces.num_programs,),
        warps=parameters.warps,
        stages=parameters.stages,
        interpret=interpret,
        name="mla_absorbed_blocks",
    )


def schedule_operands(pieces: Pieces) -> dict[str, jax.Array]:
    return {name: getattr(pieces, name) for name in ("block", "sequence", "first", "stop", "whole", "program_first")}


def _attend_pieces(
    operands: _Operands, pieces: Pieces, scale: float, parameters: AbsorbedParameters, interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`(partial output [P + MERGE_TILE, M, R], its lse, output [N, R], its lse)`. A piece that is all of its block goes
    to the output, the others to the partial results; what nobody writes is undefined."""
    N, R = operands["q_latent"].shape
    M = parameters.block_rows
    P = pieces.first.shape[0]

    def kernel(refs: dict[str, Any], part_ref: Any, part_lse_ref: Any, out_ref: Any, lse_ref: Any) -> None:
        program = pl.program_id(0)

        def attend_piece(p: jax.Array, carry: jax.Array) -> jax.Array:
            first, stop, block = refs["first"][p], refs["stop"][p], refs["block"][p]

            @pl.when(stop > first)
            def _() -> None:
                state = _fold_fragments(
                    refs, block, refs["sequence"][p], first, stop, _start(M, R), scale=scale, parameters=parameters
                )
                out, lse = _finish(state)
                whole = refs["whole"][p] > 0

                @pl.when(whole)
                def _() -> None:
                    rows = pl.ds(block * M, M)
                    out_ref[rows, :], lse_ref[rows] = out, lse

                @pl.when(jnp.logical_not(whole))
                def _() -> None:
                    part_ref[p, :, :], part_lse_ref[p, :] = out, lse

            return carry

        lax.fori_loop(refs["program_first"][program], refs["program_first"][program + 1], attend_piece, jnp.int32(0))

    f32 = jnp.float32
    return _call(
        kernel,
        {**operands, **schedule_operands(pieces)},
        (
            jax.ShapeDtypeStruct((P + MERGE_TILE, M, R), f32),
            jax.ShapeDtypeStruct((P + MERGE_TILE, M), f32),
            jax.ShapeDtypeStruct((N, R), f32),
            jax.ShapeDtypeStruct((N,), f32),
        ),
        (pieces.num_programs,),
        warps=parameters.warps,
        stages=parameters.stages,
        interpret=interpret,
        name="mla_absorbed_pieces",
    )


def merge_pieces(
    partial: jax.Array, partial_lse: jax.Array, out: jax.Array, lse: jax.Array, pieces: Pieces, num_programs: int, *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Merges the partial results of each block by their log-sum-exp, in place: blocks that were attended in one piece
    stay as they are, blocks without any piece become 0 and −inf."""
    _, M, R = partial.shape
    N = out.shape[0]
    num_blocks = N // M
    # A tile of partial rows per step: many pieces of few columns for few blocks, the other way round for many blocks.
    per_block = max(num_programs // num_blocks, 1)
    tile = min(max(pl.next_power_of_2(per_block + 1), 2), MERGE_TILE)
    columns = min(R, max(4096 // tile, 32))
    # Rows of a program: enough programs to fill the device, no more, since most find nothing to do.
    lines = min(M, pl.next_power_of_2(max(N * (R // columns) // (8 * num_programs), 1)))

    def kernel(refs: dict[str, Any], out_ref: Any, lse_ref: Any) -> None:
        block = lax.div(pl.program_id(0), jnp.int32(M // lines))
        first_line = lax.rem(pl.program_id(0), jnp.int32(M // lines)) * lines
        begin, end = refs["block_first"][block], refs["block_stop"][block]
        columns_here = pl.ds(pl.program_id(1) * columns, columns)
        steps = lax.div(end - begin + (tile - 1), jnp.int32(tile))

        def merge_line(line: jax.Array, carry: jax.Array) -> jax.Array:
            def fold(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                merged, top, total = state
                here = pl.ds(begin + i * tile, tile)
                inside = begin + i * tile + jnp.arange(tile, dtype=jnp.int32) < end
                some = inside & (refs["stop"][here] > refs["first"][here])
                part_lse = plt.load(refs["partial_lse"].at[here, line], mask=some, other=-jnp.inf)
                part_lse = jnp.maximum(part_lse * LOG2E, MASKED)
                part = plt.load(
                    refs["partial"].at[here, line, columns_here],
                    mask=jnp.broadcast_to(some[:, None], (tile, columns)),
                    other=0.0,
                )
                new_top = jnp.maximum(top, part_lse.max())
                keep = jnp.exp2(top - new_top)
                weights = jnp.where(part_lse > MASKED / 2, jnp.exp2(part_lse - new_top), 0.0)
                merged = merged * keep + (part * weights[:, None]).sum(axis=0)
                return merged, new_top, total * keep + weights.sum()

            start = (jnp.zeros((columns,), jnp.float32), jnp.float32(MASKED), jnp.float32(0.0))
            merged, top, total = lax.fori_loop(0, steps, fold, start)
            row = block * M + line
            attended = total > 0
            total = jnp.where(attended, total, 1.0)
            out_ref[row, columns_here] = merged / total
            lse_ref[row] = jnp.where(attended, top * LN2 + jnp.log(total), -jnp.inf)
            return carry

        @pl.when(jnp.logical_not(refs["finished"][block]))
        def _() -> None:
            lax.fori_loop(first_line, first_line + lines, merge_line, jnp.int32(0))

    operands = {
        "out": out,
        "lse": lse,
        "partial": partial,
        "partial_lse": partial_lse,
        **{name: jnp.pad(getattr(pieces, name), (0, MERGE_TILE)) for name in ("first", "stop")},
        **{name: getattr(pieces, name) for name in ("block_first", "block_stop", "finished")},
    }
    return _call(
        kernel,
        operands,
        (jax.ShapeDtypeStruct(out.shape, out.dtype), jax.ShapeDtypeStruct(lse.shape, lse.dtype)),
        (N // lines, R // columns),
        warps=4,
        stages=1,
        interpret=interpret,
        name="mla_absorbed_merge",
        input_output_aliases={0: 0, 1: 1},
    )
