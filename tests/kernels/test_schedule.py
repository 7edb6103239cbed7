"""The schedule covers every fragment that a block of queries may see exactly once, whatever the lengths."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import FragmentTable, fragments_of, pack_fragments
from pallas_kernels.schedule import WHOLE_ITEM_GAIN, Items, Pieces, by_block, decode_items, extend_items, share_out

BLOCK_ROWS, ROWS = 4, 16
INV_FREQ = np.ones(1)

# Few shapes, so that the many examples share few compilations.
LENGTHS = st.lists(st.integers(0, 1000), min_size=4, max_size=4)
PROGRAMS = st.sampled_from([1, 3, 8])


@functools.partial(jax.jit, static_argnames=("blocks", "programs"))
def decode_schedule(table: FragmentTable, blocks: int, programs: int) -> tuple[Items, Pieces]:
    items = decode_items(table, blocks)
    return items, share_out(items, programs)


@functools.partial(jax.jit, static_argnames="programs")
def extend_schedule(
    position: jax.Array, sequence: jax.Array, table: FragmentTable, programs: int | None
) -> tuple[Items, Pieces]:
    """Without a number of programs, one per block."""
    items = extend_items(position, sequence, table, BLOCK_ROWS)
    return items, by_block(items) if programs is None else share_out(items, programs)


def table_of(lengths: list[int]) -> FragmentTable:
    """Sequences of whole pages, the last one cut."""
    sequences = [
        fragments_of(np.arange(64 * 100 * b, 64 * 100 * b + n, dtype=np.int32), np.zeros(n, np.int32))
        for b, n in enumerate(lengths)
    ]
    return jax.tree.map(jnp.asarray, pack_fragments(sequences, INV_FREQ, (16, 1)))


def covered(pieces: Pieces) -> list[tuple[int, int, int]]:
    """(block, sequence, fragment) of all pieces, in the order of the programs."""
    p = jax.tree.map(np.asarray, pieces)
    edges = p.program_first
    assert (np.diff(edges) >= 0).all()
    assert edges[-1] == p.first.size
    reached = [i for g in range(pieces.num_programs) for i in range(edges[g], edges[g + 1])]
    return [(p.block[i], p.sequence[i], f) for i in reached for f in range(p.first[i], p.stop[i])]


def assert_pieces_belong_to_their_blocks(pieces: Pieces, items: Items) -> None:
    p = jax.tree.map(np.asarray, pieces)
    item_of = {(int(b), int(s)): int(n) for b, s, n in zip(items.block, items.sequence, items.count, strict=True) if n}
    filled = np.nonzero(p.stop > p.first)[0]
    assert all(p.first[i] >= 0 and p.stop[i] <= item_of[p.block[i], p.sequence[i]] for i in filled)
    assert (np.diff(p.block) >= 0).all()
    assert (np.diff(p.block_first) >= 0).all()
    assert (np.diff(p.block_stop) >= 0).all()
    for n in range(p.block_first.size):
        inside = [i for i in filled if p.block_first[n] <= i < p.block_stop[n]]
        assert inside == [i for i in filled if p.block[i] == n]
    assert sorted(p.by_size) == list(range(p.first.size))
    assert set(p.by_size[: filled.size]) == set(filled)


def assert_whole_and_finished_are_right(pieces: Pieces, items: Items) -> None:
    """They are what keeps a block out of the merge: each set only where one piece is everything, and both together."""
    p = jax.tree.map(np.asarray, pieces)
    counts, blocks = np.asarray(items.count), np.asarray(items.block)
    filled = np.nonzero(p.stop > p.first)[0]
    for n in range(p.block_first.size):
        inside = [i for i in filled if p.block[i] == n]
        work = counts[blocks == n].sum()
        alone = len(inside) == 1 and p.stop[inside[0]] - p.first[inside[0]] == work
        assert bool(p.finished[n]) <= alone
        assert all(bool(p.whole[i]) <= alone for i in inside)
        assert bool(p.finished[n]) == any(p.whole[i] for i in inside)


def loads_of(pieces: Pieces) -> np.ndarray:
    """Fragments of each program."""
    size, edges = np.asarray(pieces.stop - pieces.first), np.asarray(pieces.program_first)
    return np.array([size[a:b].sum() for a, b in itertools.pairwise(edges)])


def assert_work_is_shared_evenly(pieces: Pieces, items: Items, programs: int) -> None:
    """No program has more than its share. Or no item is cut, and rounds of whole ones take no longer, but for what a
    merge would cost on top."""
    counts, loads = np.asarray(items.count), loads_of(pieces)
    share = -(-counts.sum() // programs)
    if loads.max() <= share and np.count_nonzero(loads) <= programs:
        return
    rounds = -(-np.count_nonzero(counts) // programs)
    assert np.count_nonzero(pieces.stop > pieces.first) == np.count_nonzero(counts)
    assert rounds * loads.max() <= share + WHOLE_ITEM_GAIN


@settings(max_examples=60)
@given(lengths=LENGTHS, blocks=st.sampled_from([1, 2]), programs=PROGRAMS)
def test_decode_covers_every_fragment_once(lengths: list[int], blocks: int, programs: int) -> None:
    items, pieces = decode_schedule(table_of(lengths), blocks, programs)
    expected = [
        (b * blocks + k, b, f) for b, n in enumerate(lengths) for k in range(blocks) for f in range(-(-n // 64))
    ]
    assert sorted(covered(pieces)) == sorted(expected)
    assert_pieces_belong_to_their_blocks(pieces, items)
    assert_whole_and_finished_are_right(pieces, items)
    assert_work_is_shared_evenly(pieces, items, programs)


@settings(max_examples=60)
@given(data=st.data(), lengths=LENGTHS, programs=st.one_of(st.none(), PROGRAMS))
def test_extend_covers_what_any_row_of_a_block_sees_once(
    data: st.DataObject, lengths: list[int], programs: int | None
) -> None:
    rows = [
        (b, int(p))
        for b, n in enumerate(lengths)
        if n
        for p in sorted(data.draw(st.lists(st.integers(-1, n - 1), max_size=ROWS // 4)))
    ]
    rows += [(len(lengths) - 1, -1)] * (ROWS - len(rows))
    rows.sort(key=lambda row: row[0])
    sequence, position = (jnp.array(x, jnp.int32) for x in zip(*rows, strict=True))
    items, pieces = extend_schedule(position, sequence, table_of(lengths), programs)
    expected = []
    for block in range(ROWS // BLOCK_ROWS):
        own = rows[block * BLOCK_ROWS : (block + 1) * BLOCK_ROWS]
        for b in {b for b, _ in own}:
            last = max(p for s, p in own if s == b)
            expected += [(block, b, f) for f in range(last // 64 + 1 if last >= 0 else 0)]
    assert sorted(covered(pieces)) == sorted(expected)
    assert_pieces_belong_to_their_blocks(pieces, items)
    if programs is not None:
        assert_whole_and_finished_are_right(pieces, items)
        assert_work_is_shared_evenly(pieces, items, programs)


@settings(max_examples=30)
@given(padding=st.integers(0, ROWS), positions=st.lists(st.integers(0, 999), min_size=ROWS, max_size=ROWS))
def test_blocks_of_one_sequence_are_finished_by_their_programs(padding: int, positions: list[int]) -> None:
    """One item a block, so that nothing is left to merge, and blocks of padding alone are left to be cleared."""
    position, sequence = jnp.array([-1] * padding + sorted(positions[padding:]), jnp.int32), jnp.zeros(ROWS, jnp.int32)
    items, pieces = extend_schedule(position, sequence, table_of([1000]), None)
    assert_pieces_belong_to_their_blocks(pieces, items)
    assert_whole_and_finished_are_right(pieces, items)
    seen = np.asarray(position).reshape(-1, BLOCK_ROWS).max(axis=1) >= 0
    assert np.array_equal(pieces.finished, seen)


def test_work_is_shared_evenly_unless_whole_items_do_as_well() -> None:
    _, uneven = decode_schedule(table_of([1000, 64]), 1, 4)
    assert loads_of(uneven).max() == -(-17 // 4)
    _, even = decode_schedule(table_of([1000, 1000]), 1, 2)
    assert np.asarray(even.finished).all()


@pytest.mark.parametrize("first", [1, 2])
def test_queries_may_begin_with_a_later_sequence(first: int) -> None:
    """The first items belong to no sequence; their block must exist all the same."""
    sequence = jnp.full(BLOCK_ROWS, first, jnp.int32)
    items, pieces = extend_schedule(jnp.arange(BLOCK_ROWS), sequence, table_of([0, 64, 64]), 2)
    assert (np.asarray(items.block) == 0).all()
    assert covered(pieces) == [(0, first, 0)]
