"""What `mla_kernels.py` measures: sizes, fragment tables, operands, and operations counted, at DeepSeek's head sizes.

Nothing here touches a device. A case is a size; its workload has one or two variants that are compared with each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from pallas_kernels import (
    PAGE_SIZE,
    TABLE_BUCKETS,
    Fragments,
    FragmentTable,
    LatentPool,
    fragments_of,
    mla_decode,
    mla_extend,
    mla_extend_expanded,
    pack_fragments,
)

R, D, N, W = 512, 64, 128, 128
"""Widths: latent, rotary, key without position, value."""

ROW_BYTES = 2 * (R + D)
TURNS = 1024
"""Rows of the turn table where keys are shifted: no turn, and as many distinct ones as fit beside it."""

SHIFTS = np.random.default_rng(1).choice(np.r_[-160_000:0, 1:160_001], TURNS - 1, replace=False).astype(np.int32)

INV_FREQ = 10000.0 ** (-2.0 * np.arange(D // 2) / D)
RUN_LENGTHS = (48, 200)
"""Shortest and longest run of tokens that lies at consecutive rows, in the group `runs`."""

Group = Literal["decode", "runs", "extend"]
Outputs = tuple[jax.Array, jax.Array]


@dataclass(frozen=True, kw_only=True)
class Case:
    """`batch` sequences of `keys` cached keys; `new` tokens of each are queries beside, 0 for decode."""

    group: Group
    heads: int
    batch: int
    keys: int
    new: int = 0

    @property
    def name(self) -> str:
        size = f"{self.new}+{self.keys}" if self.new else f"{self.batch}x{self.keys}"
        return f"{self.group}/{self.heads}h/{size}"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to do the work of a case. `op` gets the operands that it `takes`, in that order."""

    op: Callable[..., Outputs]
    takes: tuple[str, ...]
    table: FragmentTable
    scale: float
    flops: float
    bytes: float

    @property
    def visits(self) -> int:
        """Fragments to load, each a part of one page."""
        return int((np.asarray(self.table.hi) > np.asarray(self.table.lo)).sum())


@dataclass(frozen=True, kw_only=True)
class Workload:
    """`operands` are the shapes of what every call gets anew, `at` positions and sequences of the queries of an extend,
    `seen` the number of keys that each query token attends to."""

    num_pages: int
    operands: dict[str, tuple[int, ...]]
    at: tuple[np.ndarray, ...]
    seen: np.ndarray
    variants: dict[str, Variant]

    @property
    def layer_bytes(self) -> int:
        return self.num_pages * PAGE_SIZE * ROW_BYTES


def all_cases(quick: bool) -> list[Case]:
    if quick:
        decode = [Case(group="decode", heads=16, batch=b, keys=s) for b in (1, 2) for s in (128, 256)]
        runs = [Case(group="runs", heads=16, batch=2, keys=512)]
        return [*decode, *runs, Case(group="extend", heads=16, batch=1, keys=128, new=64)]
    batches, lengths = (1, 8, 32, 128), (4096, 32768, 131072)
    extends = ((512, 4096), (512, 32768), (64, 32768), (128, 32768))
    decode = [Case(group="decode", heads=h, batch=b, keys=s) for h in (16, 128) for b in batches for s in lengths]
    runs = [Case(group="runs", heads=16, batch=32, keys=32768)]
    return [
        *decode,
        *runs,
        *(Case(group="extend", heads=h, batch=1, keys=s, new=n) for h in (16, 128) for n, s in extends),
    ]


def workload(case: Case) -> Workload:
    return {"decode": _decode, "runs": _runs, "extend": _extend}[case.group](case, np.random.default_rng(0))


def _decode(case: Case, rng: np.random.Generator) -> Workload:
    pages = _shuffled_pages(rng, case.batch, case.keys)
    shifts = _some_shifts(pages.shape)
    plain = _packed([_whole_pages(p, np.zeros_like(s)) for p, s in zip(pages, shifts, strict=True)], turns=1)
    shifted = _packed([_whole_pages(p, s) for p, s in zip(pages, shifts, strict=True)], turns=TURNS)
    variants = {"no shift": _decode_variant(case, plain), "shift": _decode_variant(case, shifted)}
    return _decode_workload(case, pages.size + 1, variants)


def _runs(case: Case, rng: np.random.Generator) -> Workload:
    """Each run begins at a random slot of a page of its own and goes on in the pages behind it, with one shift. The
    whole pages that it is compared with are some of the same pool."""
    offsets: list[list[tuple[int, int, int]]] = []  # first page, first slot, length
    next_page = 1
    for _ in range(case.batch):
        offsets.append([])
        left = case.keys
        while left:
            length, slot = (
                min(left, int(rng.integers(RUN_LENGTHS[0], RUN_LENGTHS[1] + 1))),
                int(rng.integers(PAGE_SIZE)),
            )
            offsets[-1].append((next_page, slot, length))
            next_page += -(-(slot + length) // PAGE_SIZE)
            left -= length
    sequences = []
    for own in offsets:
        rows = np.concatenate([page * PAGE_SIZE + slot + np.arange(length) for page, slot, length in own])
        shift_of_run = _some_shifts((len(own),))
        shifts = np.repeat(shift_of_run, [length for *_, length in own])
        sequences.append(fragments_of(rows.astype(np.int32), shifts))
    # The pool's pages in another order, so that neighbouring runs do not lie side by side.
    order = np.concatenate([[0], 1 + rng.permutation(next_page - 1)]).astype(np.int32)
    runs = _packed([s._replace(page=order[s.page]) for s in sequences], turns=TURNS)
    chosen = (1 + rng.permutation(next_page - 1))[: case.batch * case.keys // PAGE_SIZE]
    pages = chosen.astype(np.int32).reshape(case.batch, -1)
    whole = _packed([_whole_pages(p, s) for p, s in zip(pages, _some_shifts(pages.shape), strict=True)], turns=TURNS)
    variants = {"whole pages": _decode_variant(case, whole), "runs": _decode_variant(case, runs)}
    return _decode_workload(case, next_page, variants)


def _decode_workload(case: Case, num_pages: int, variants: dict[str, Variant]) -> Workload:
    return Workload(
        num_pages=num_pages,
        operands={"q_latent": (case.batch, case.heads, R), "q_rope": (case.batch, case.heads, D)},
        at=(),
        seen=np.full(case.batch, case.keys),
        variants=variants,
    )


def _decode_variant(case: Case, table: FragmentTable) -> Variant:
    pairs = case.batch * case.heads * case.keys
    return Variant(
        op=_call_decode,
        takes=("q_latent", "q_rope"),
        table=table,
        scale=(R + D) ** -0.5,
        flops=2.0 * pairs * (2 * R + D),
        bytes=float(case.batch * case.keys * ROW_BYTES),
    )


def _extend(case: Case, rng: np.random.Generator) -> Workload:
    """The cached keys are shifted fragment by fragment; the rows of the new tokens follow, as they were written."""
    H, T, total = case.heads, case.new, case.keys + case.new
    pages = _shuffled_pages(rng, 1, total)
    shifts = _some_shifts(pages.shape)
    shifts[:, case.keys // PAGE_SIZE :] = 0
    table = _packed([_whole_pages(pages[0], shifts[0])], turns=TURNS)
    position = np.arange(case.keys, total, dtype=np.int32)
    seen = position + 1
    pairs = float(H * seen.sum())
    read = float(total * ROW_BYTES)
    return Workload(
        num_pages=pages.size + 1,
        operands={
            "q_latent": (T, H, R),
            "q_nope": (T, H, N),
            "q_rope": (T, H, D),
            "key_up": (H, N, R),
            "value_up": (H, R, W),
        },
        at=(position, np.zeros(T, np.int32)),
        seen=seen,
        variants={
            "absorbed": Variant(
                op=_call_absorbed,
                takes=("q_latent", "q_rope"),
                table=table,
                scale=(R + D) ** -0.5,
                flops=2.0 * pairs * (2 * R + D),
                bytes=read,
            ),
            "expanded": Variant(
                op=_call_expanded,
                takes=("q_nope", "q_rope", "key_up", "value_up"),
                table=table,
                scale=(N + D) ** -0.5,
                flops=2.0 * pairs * (N + D + W) + 2.0 * H * total * R * (N + W),
                bytes=read,
            ),
        },
    )


def _shuffled_pages(rng: np.random.Generator, batch: int, keys: int) -> np.ndarray:
    per_sequence = -(-keys // PAGE_SIZE)
    return (1 + rng.permutation(batch * per_sequence)).astype(np.int32).reshape(batch, per_sequence)


def _some_shifts(shape: tuple[int, ...]) -> np.ndarray:
    """Of `SHIFTS`, in turn: neighbours are never equal."""
    return SHIFTS[np.arange(np.prod(shape)) % SHIFTS.size].reshape(shape)


def _whole_pages(pages: np.ndarray, shifts: np.ndarray) -> Fragments:
    zero = np.zeros_like(pages)
    return Fragments(pages, zero, zero + PAGE_SIZE, np.arange(pages.size, dtype=np.int32) * PAGE_SIZE, shifts)


def _packed(sequences: list[Fragments], turns: int) -> FragmentTable:
    """Padded to a bucket, as the engine's tables are; with exactly one row in the turn table no key is turned."""
    longest = max(len(s.page) for s in sequences)
    size = next(fragments for fragments, _ in TABLE_BUCKETS if longest <= fragments)
    return pack_fragments(sequences, INV_FREQ, (size, turns))


def _call_decode(queries: Any, at: Any, pool: LatentPool, layer: Any, table: FragmentTable, **options: Any) -> Outputs:
    q_latent, q_rope = queries
    return mla_decode(q_latent, q_rope, pool, layer, table, **options)


def _call_absorbed(
    queries: Any, at: Any, pool: LatentPool, layer: Any, table: FragmentTable, **options: Any
) -> Outputs:
    (q_latent, q_rope), (position, sequence) = queries, at
    return mla_extend(q_latent, q_rope, position, sequence, pool, layer, table, **options)


def _call_expanded(
    queries: Any, at: Any, pool: LatentPool, layer: Any, table: FragmentTable, **options: Any
) -> Outputs:
    (q_nope, q_rope, key_up, value_up), (position, sequence) = queries, at
    return mla_extend_expanded(q_nope, q_rope, position, sequence, key_up, value_up, pool, layer, table, **options)
