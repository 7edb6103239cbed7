"""Who computes what: query rows in blocks, each over the fragments of its sequences, shared out evenly over programs.

Queries are flattened to rows (one token and head each) and cut into blocks of a fixed size. An *item* is the part of a
block that belongs to one sequence, together with the fragments that it may see; the fragments of all items in a row are
the work. It is cut where items end and, at equal distances, where programs begin, into *pieces*: each lies in one item
and one program and gives one partial result, merged by log-sum-exp. So ragged lengths, few long sequences and many short
ones load the programs alike, whatever the numbers: they are data, not shapes.
"""

from __future__ import annotations

from typing import no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int, Int32

from pallas_kernels.fragments import FragmentTable

WHOLE_ITEM_GAIN = 4
"""Fragments that splitting must save per program before it pays for the partial results and their merge."""


@no_type_check  # tree transformations put anything into the leaves
@struct.dataclass
class Items:
    """`[I]` each; the items of a block are consecutive and the blocks ascend. `count` is the number of fragments, from
    the first of the sequence on; 0 where there is nothing to do. Every block has at least one item. `block_first [N+1]`
    is the index of each block's first item."""

    block: Int32[Array, "I"]
    sequence: Int32[Array, "I"]
    count: Int32[Array, "I"]
    block_first: Int32[Array, "N1"]


@no_type_check  # tree transformations put anything into the leaves
@struct.dataclass
class Pieces:
    """The pieces of all programs, `[P]` each: piece p covers the fragments `[first, stop)` of `sequence` for `block`;
    `whole` says that it is all there is for that block. Program g has the pieces `[program_first[g],
    program_first[g + 1])`; some are empty (`first == stop`). `by_size` lists the pieces with the empty ones last, for
    kernels that run one program per piece.

    Block n, `[N]` each, has its pieces in `[block_first[n], block_stop[n])`; `finished` says that one of them is whole."""

    block: Int32[Array, "P"]
    sequence: Int32[Array, "P"]
    first: Int32[Array, "P"]
    stop: Int32[Array, "P"]
    whole: Int32[Array, "P"]
    by_size: Int32[Array, "P"]
    program_first: Int32[Array, "G1"]
    block_first: Int32[Array, "N"]
    block_stop: Int32[Array, "N"]
    finished: Bool[Array, "N"]

    @property
    def num_programs(self) -> int:
        return self.program_first.shape[0] - 1


def decode_items(table: FragmentTable, blocks_per_sequence: int) -> Items:
    """Items of one query token per sequence: block n holds rows of sequence `n // blocks_per_sequence`."""
    filled = jnp.asarray(table.hi) > jnp.asarray(table.lo)
    count = jnp.max(jnp.where(filled, jnp.arange(1, filled.shape[1] + 1, dtype=jnp.int32), 0), axis=1)
    block = jnp.arange(table.num_sequences * blocks_per_sequence, dtype=jnp.int32)
    sequence = block // blocks_per_sequence
    return Items(
        block=block,
        sequence=sequence,
        count=jnp.repeat(count, blocks_per_sequence),
        block_first=jnp.arange(block.size + 1, dtype=jnp.int32),
    )


def extend_items(
    row_position: Int[Array, "rows"], row_sequence: Int[Array, "rows"], table: FragmentTable, block_rows: int
) -> Items:
    """Items of rows that are sorted by sequence (and, if there are several, by position within it), in blocks of
    `block_rows`. Rows at position −1 see nothing."""
    B = table.num_sequences
    position = row_position.reshape(-1, block_rows)
    sequence = row_sequence.reshape(-1, block_rows)
    num_blocks = position.shape[0]
    # A pair (block, sequence) gets number block + sequence: both ascend, so no two pairs share one.
    number = jnp.arange(num_blocks + B - 1, dtype=jnp.int32)
    first_number = jnp.arange(num_blocks, dtype=jnp.int32) + sequence[:, 0]
    block = jnp.maximum(jnp.sum(first_number[None] <= number[:, None], axis=1, dtype=jnp.int32) - 1, 0)
    of_item = jnp.clip(number - block, sequence[block, 0], sequence[block, -1])
    exists = number - block == of_item
    own = sequence[block] == of_item[:, None]
    limit = jnp.max(jnp.where(own, position[block], -1), axis=1)
    begins = jnp.asarray(table.start) + jnp.asarray(table.lo)
    count = jnp.sum(begins[of_item] <= limit[:, None], axis=1, dtype=jnp.int32)
    return Items(
        block=block,
        sequence=of_item,
        count=jnp.where(exists, count, 0),
        block_first=jnp.concatenate([first_number, jnp.array([num_blocks + B - 1], jnp.int32)]),
    )


def share_out(items: Items, num_programs: int) -> Pieces:
    """Cuts the items into pieces for `num_programs` programs (more, if there are more items). Where whole items load the
    programs about as well as equal shares, none is cut, and no merge is needed."""
    count = items.count
    I = count.size
    G = max(num_programs, I)
    ends = jnp.cumsum(count)
    total, begins = ends[-1], ends - count
    share = jnp.maximum((total + num_programs - 1) // num_programs, 1)
    rounds = (jnp.sum(count > 0) + num_programs - 1) // num_programs
    keep_whole = rounds * jnp.max(count) <= share + WHOLE_ITEM_GAIN
    programs = jnp.arange(G, dtype=jnp.int32)
    whole_begins = jnp.concatenate([begins, jnp.full(G - I, total)])
    program_begins = jnp.where(keep_whole, whole_begins, jnp.minimum(programs * share, total))
    # All cuts in order, an item's before a program's: the cuts before each are counted, not sorted.
    at_item = jnp.arange(I) + jnp.sum(program_begins[None] < begins[:, None], axis=1)
    at_program = programs + jnp.sum(begins[None] <= program_begins[:, None], axis=1)
    cuts = jnp.zeros(I + G, jnp.int32).at[at_item].set(begins).at[at_program].set(program_begins)
    piece_ends = jnp.append(cuts[1:], total)
    item = jnp.sum(begins[None] <= cuts[:, None], axis=1) - 1
    first = cuts - begins[item]
    edges = jnp.append(begins, total)[items.block_first]  # of the blocks
    block_first = jnp.sum(piece_ends[None] <= edges[:-1, None], axis=1, dtype=jnp.int32)
    block_stop = jnp.sum(cuts[None] < edges[1:, None], axis=1, dtype=jnp.int32)
    alone = (items.block_first[1:] - items.block_first[:-1] == 1)[items.block[item]]
    whole = alone & (piece_ends - cuts == count[item]) & (count[item] > 0)
    return Pieces(
        block=items.block[item],
        sequence=items.sequence[item],
        first=first,
        stop=first + piece_ends - cuts,
        whole=whole.astype(jnp.int32),
        by_size=_filled_first(piece_ends - cuts),
        program_first=jnp.append(at_program, I + G).astype(jnp.int32),
        block_first=block_first,
        block_stop=block_stop,
        finished=(block_stop - block_first == 1) & whole[jnp.minimum(block_first, I + G - 1)],
    )


def by_block(items: Items) -> Pieces:
    """One program per block, one piece per item: for blocks in such numbers that every program has enough to do.
    `whole` and `finished` hold for one sequence, where a block has one item; a program that folds all items of its block
    before it stores the rows reads neither."""
    return Pieces(
        block=items.block,
        sequence=items.sequence,
        first=jnp.zeros_like(items.count),
        stop=items.count,
        whole=jnp.ones_like(items.count),
        by_size=_filled_first(items.count),
        program_first=items.block_first,
        block_first=items.block_first[:-1],
        block_stop=items.block_first[1:],
        finished=(items.count > 0)[items.block_first[:-1]],
    )


def _filled_first(size: jax.Array) -> jax.Array:
    """The indices of all pieces in order, those without fragments behind the others."""
    filled = size > 0
    rank = jnp.where(filled, jnp.cumsum(filled) - 1, jnp.sum(filled) + jnp.cumsum(~filled) - 1)
    return jnp.zeros(size.size, jnp.int32).at[rank].set(jnp.arange(size.size, dtype=jnp.int32))
