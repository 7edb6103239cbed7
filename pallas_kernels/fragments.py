"""Where the keys of a sequence lie: fragments of pages, in target order, each with one shift.

A fragment is the part of one page that one segment uses, so every fragment is one contiguous block of memory. Fragments
of the rows that a request still has to write are part of its table from the start: which of them count is a question of
the query's position, not of the table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float64, Int, Int32

from pallas_kernels.pool import PAGE_SIZE, SCRATCH_PAGE
from pallas_kernels.rotary import turn_table

TABLE_BUCKETS = ((32, 8), (128, 32), (512, 128), (2048, 512), (8192, 2048), (32768, 8192))
"""Padded table sizes (fragments a sequence, distinct shifts a batch): one compilation each."""

_NEVER = 2**30
"""Target position of a padded fragment: behind every real one."""


AnyArray = jax.Array | np.ndarray
"""Tables are made on the host and passed as they are; inside a jitted function they are device arrays."""


class Fragments(NamedTuple):
    """The fragments of one sequence on the host, `[F]` each, ascending by target position."""

    page: Int32[np.ndarray, "F"]
    lo: Int32[np.ndarray, "F"]
    hi: Int32[np.ndarray, "F"]
    start: Int32[np.ndarray, "F"]
    """Target position of row 0 of the page (may be negative, if the fragment starts inside the page)."""
    shift: Int32[np.ndarray, "F"]
    """Target position − base position of the rows."""


@no_type_check  # tree transformations put anything into the leaves
@struct.dataclass
class FragmentTable:
    """Fragments of a batch of sequences, padded, `[B, F]`; row `position - start` of `page` holds the key of `position`
    if it lies in `[lo, hi)`. `turn` picks the row of `cos`/`sin` (`[N, D/2]`) that the keys are turned by; row 0 is no
    turn."""

    page: Int32[AnyArray, "B F"]
    lo: Int32[AnyArray, "B F"]
    hi: Int32[AnyArray, "B F"]
    start: Int32[AnyArray, "B F"]
    turn: Int32[AnyArray, "B F"]
    cos: AnyArray
    sin: AnyArray

    @property
    def num_sequences(self) -> int:
        return self.page.shape[0]

    def until(self, lengths: Int[Array, "B"]) -> FragmentTable:
        """The table without the rows at target positions `>= length`: those are reserved, but not written yet."""
        return dataclasses.replace(self, hi=jnp.clip(lengths[:, None] - self.start, self.lo, self.hi))

    def end(self) -> Int32[Array, "B"]:
        """One past the last target position of each sequence; 0 where it has no rows."""
        return jnp.max(jnp.where(self.hi > self.lo, self.start + self.hi, 0), axis=1)

    def locate(
        self, sequence: Int[Array, "*n"], position: Int[Array, "*n"]
    ) -> tuple[Int32[Array, "*n"], Int32[Array, "*n"], Int32[Array, "*n"], jax.Array]:
        """`(page, slot, turn, valid)` of each target position; the scratch page where there is none."""

        f = self._last_fragment_at(sequence, position)
        page, lo, hi, start, turn = (
            jnp.asarray(field)[sequence, f] for field in (self.page, self.lo, self.hi, self.start, self.turn)
        )
        slot = position - start
        valid = (position >= 0) & (slot >= lo) & (slot < hi)
        return jnp.where(valid, page, SCRATCH_PAGE), jnp.where(valid, slot, 0), jnp.where(valid, turn, 0), valid

    def _last_fragment_at(self, sequence: jax.Array, position: jax.Array) -> jax.Array:
        """Index of the last fragment that begins at or before `position` (0 if none does). A binary search of single
        gathers: `searchsorted` under vmap would copy the whole row of the table for each position."""
        first = jnp.asarray(self.start) + jnp.asarray(self.lo)
        size = first.shape[1]
        found = jnp.zeros(jnp.broadcast_shapes(jnp.shape(sequence), jnp.shape(position)), jnp.int32)
        step = 1 << max(size - 1, 0).bit_length()
        while step := step >> 1:
            probe = jnp.minimum(found + step, size - 1)
            found = jnp.where(first[sequence, probe] <= position, probe, found)
        return found


def fragments_of(rows: Int32[np.ndarray, "S"], shifts: Int32[np.ndarray, "S"]) -> Fragments:
    """Cuts a sequence, given as one pool row (`page * PAGE_SIZE + slot`) and one shift per position, into fragments."""
    if not len(rows):
        empty = np.zeros(0, np.int32)
        return Fragments(empty, empty, empty, empty, empty)
    pages = rows // PAGE_SIZE
    cut = (np.diff(rows) != 1) | (np.diff(pages) != 0) | (np.diff(shifts) != 0)
    first = np.concatenate([[0], np.nonzero(cut)[0] + 1]).astype(np.int32)
    length = np.diff(np.append(first, len(rows))).astype(np.int32)
    lo = rows[first] % PAGE_SIZE
    return Fragments(pages[first], lo, lo + length, first - lo, shifts[first])


def pack_fragments(
    sequences: Sequence[Fragments], inv_freq: Float64[np.ndarray, "D2"], bucket: tuple[int, int] | None = None
) -> FragmentTable:
    """A padded table of NumPy arrays, ready to be passed to a jitted function. The size is `bucket`, or the first of
    `TABLE_BUCKETS` that fits, so that few different programs are compiled; beyond the largest it doubles."""
    distinct = np.unique(np.concatenate([[0], *(s.shift for s in sequences)]))
    shifts = np.concatenate([[0], distinct[distinct != 0]]).astype(np.int64)
    longest = max((len(s.page) for s in sequences), default=0)
    size, turns = bucket or _bucket_for(longest, len(shifts))
    table = {name: np.zeros((len(sequences), size), np.int32) for name in ("page", "lo", "hi", "turn")}
    table["page"][:] = SCRATCH_PAGE
    table["start"] = np.full((len(sequences), size), _NEVER, np.int32)
    order = np.argsort(shifts)
    for b, s in enumerate(sequences):
        n = len(s.page)
        for name, values in (("page", s.page), ("lo", s.lo), ("hi", s.hi), ("start", s.start)):
            table[name][b, :n] = values
        table["turn"][b, :n] = order[np.searchsorted(shifts, s.shift, sorter=order)]
    cos, sin = turn_table(np.pad(shifts, (0, turns - len(shifts))), inv_freq)
    return FragmentTable(**table, cos=cos, sin=sin)


def _bucket_for(num_fragments: int, num_shifts: int) -> tuple[int, int]:
    size, turns = TABLE_BUCKETS[-1]
    for bucket in TABLE_BUCKETS:
        if num_fragments <= bucket[0] and num_shifts <= bucket[1]:
            return bucket
    while num_fragments > size or num_shifts > turns:
        size, turns = 2 * size, 2 * turns
    return size, turns
