"""Fragments and tables: every position is found where it lies, and nothing else is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from irminsul_jax.cache.plan import PAGE_SIZE as PLANNED_PAGE_SIZE
from pallas_kernels import PAGE_SIZE, SCRATCH_PAGE, TABLE_BUCKETS, Fragments, fragments_of, pack_fragments

INV_FREQ = 10000.0 ** (-np.arange(4) / 4)
BUCKET, ASKED = (64, 64), 700

Sequence = tuple[np.ndarray, np.ndarray]
locate = jax.jit(lambda table, sequence, position: table.locate(sequence, position))
located_until = jax.jit(lambda table, lengths, sequence, position: table.until(lengths).locate(sequence, position))
end_of = jax.jit(lambda table: table.end())


@st.composite
def sequences(draw: st.DrawFn) -> Sequence:
    """Rows and shifts of one sequence of up to 12 segments that start anywhere in a page; neighbours may continue each
    other, with the same shift or another one."""
    rows, shifts = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)]
    for _ in range(draw(st.integers(0, 12))):
        behind = int(rows[-1][-1]) + 1 if len(rows) > 1 else PAGE_SIZE
        start = draw(st.one_of(st.just(behind), st.integers(PAGE_SIZE, 40 * PAGE_SIZE)))
        length = draw(st.integers(1, 50))
        rows.append(np.arange(start, start + length, dtype=np.int32))
        shifts.append(np.full(length, draw(st.integers(-3, 3)) * 1000, np.int32))
    return np.concatenate(rows), np.concatenate(shifts)


def test_a_page_is_the_same_for_kernels_and_planner() -> None:
    assert PAGE_SIZE == PLANNED_PAGE_SIZE == 64


@given(sequences())
def test_fragments_tile_the_sequence_and_are_as_long_as_they_can_be(sequence: Sequence) -> None:
    rows, shifts = sequence
    f = fragments_of(rows, shifts)
    rebuilt, rebuilt_shifts, at = [], [], 0
    for page, lo, hi, start, shift in zip(*f, strict=True):
        assert 0 <= lo < hi <= PAGE_SIZE
        assert start + lo == at
        at += hi - lo
        rebuilt += range(page * PAGE_SIZE + lo, page * PAGE_SIZE + hi)
        rebuilt_shifts += [shift] * (hi - lo)
    assert rebuilt == rows.tolist()
    assert rebuilt_shifts == shifts.tolist()
    for i in range(len(f.page) - 1):  # neighbours that could be one fragment are one
        continues = f.page[i] == f.page[i + 1] and f.hi[i] == f.lo[i + 1] and f.shift[i] == f.shift[i + 1]
        assert not continues


@settings(max_examples=40)
@given(st.tuples(sequences(), sequences(), sequences()))
def test_every_position_is_located_exactly(batch: tuple[Sequence, ...]) -> None:
    table = pack_fragments([fragments_of(*s) for s in batch], INV_FREQ, BUCKET)
    assert end_of(table).tolist() == [len(rows) for rows, _ in batch]
    for b, (rows, shifts) in enumerate(batch):
        asked = np.arange(-5, ASKED - 5, dtype=np.int32)
        page, slot, turn, valid = map(np.asarray, locate(table, np.full(ASKED, b, np.int32), asked))
        inside = (asked >= 0) & (asked < len(rows))
        assert np.array_equal(valid, inside)
        assert np.array_equal((page * PAGE_SIZE + slot)[inside], rows)
        assert (page[~inside] == SCRATCH_PAGE).all()
        assert (turn[~inside] == 0).all()
        angles = shifts[:, None] * INV_FREQ
        assert np.array_equal(table.cos[turn[inside]], np.cos(angles).astype(np.float32))
        assert np.array_equal(table.sin[turn[inside]], np.sin(angles).astype(np.float32))
        assert ((turn[inside] == 0) == (shifts == 0)).all()


@settings(max_examples=40)
@given(st.tuples(sequences(), sequences()), st.integers(0, 650), st.integers(0, 650))
def test_until_hides_exactly_the_rows_from_the_length_on(batch: tuple[Sequence, ...], first: int, second: int) -> None:
    table = pack_fragments([fragments_of(*s) for s in batch], INV_FREQ, BUCKET)
    lengths = np.array([first, second], np.int32)
    asked = np.arange(ASKED, dtype=np.int32)
    for b, (rows, _) in enumerate(batch):
        page, slot, _, valid = map(np.asarray, located_until(table, lengths, np.full(ASKED, b, np.int32), asked))
        count = min(len(rows), int(lengths[b]))
        assert np.array_equal(valid, asked < count)
        assert np.array_equal((page * PAGE_SIZE + slot)[:count], rows[:count])


def some_fragments(count: int, num_shifts: int) -> Fragments:
    index = np.arange(count, dtype=np.int32)
    full = np.full(count, PAGE_SIZE, np.int32)
    return Fragments(1 + index, np.zeros(count, np.int32), full, index * PAGE_SIZE, index % max(num_shifts, 1))


@given(st.integers(0, 2100), st.integers(1, 600), st.integers(1, 3))
@settings(max_examples=60)
def test_tables_take_the_first_bucket_that_fits_both_ways(count: int, num_shifts: int, batch: int) -> None:
    table = pack_fragments([some_fragments(count, num_shifts)] * batch, INV_FREQ)
    shifts = max(min(count, num_shifts), 1)
    expected = next(b for b in TABLE_BUCKETS if count <= b[0] and shifts <= b[1])
    assert table.page.shape == (batch, expected[0])
    assert table.cos.shape == table.sin.shape == (expected[1], len(INV_FREQ))
    assert (table.cos[0] == 1).all()
    assert (table.sin[0] == 0).all()


def test_beyond_the_largest_bucket_the_table_doubles() -> None:
    size, turns = TABLE_BUCKETS[-1]
    assert pack_fragments([some_fragments(size + 1, 1)], INV_FREQ).page.shape == (1, 2 * size)
    table = pack_fragments([some_fragments(size, turns + 1)], INV_FREQ)
    assert table.page.shape == (1, 2 * size)
    assert table.cos.shape[0] == 2 * turns
    asked = np.array([0, 64 * turns, 64 * size - 1, 64 * size], np.int32)
    page, slot, turn, valid = table.locate(jnp.zeros(4, jnp.int32), jnp.asarray(asked))
    assert page.tolist() == [1, 1 + turns, size, SCRATCH_PAGE]
    assert slot.tolist() == [0, 0, 63, 0]
    assert turn.tolist()[:2] == [0, turns]
    assert valid.tolist() == [True, True, True, False]
