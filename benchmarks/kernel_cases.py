"""What `check_kernels.py` runs: settings (one compiled program each), layouts of the pool, and the lists of cases."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from kernel_reference import U32, U_BF16, Expected, attention, turned

from pallas_kernels import PAGE_SIZE, FragmentTable, LatentPool, PoolLayout, StreamSpec, fragments_of, pack_fragments

LAYERS, LAYER = 2, 1
MAX_SHIFT = 160_000
RESERVED = 70
"""Rows behind the end of each sequence of the layout `reserved` that are in its table, but not written yet."""

OpName = Literal["decode", "extend", "extend_expanded"]
LayoutName = Literal["cut", "twice", "pages", "reserved", "unshifted", "pool copied"]
DTYPES: dict[str, tuple[Any, Any, float]] = {
    "bf16": (ml_dtypes.bfloat16, ml_dtypes.bfloat16, U_BF16),
    "f32": (np.float32, np.float32, U32),
    "fp8": (ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16, U_BF16),
}
"""Of the latents, of rotary keys and queries, and the rounding of the latter."""


@dataclass(frozen=True)
class Sizes:
    latent: int
    rotary: int
    nope: int
    value: int

    @property
    def inv_freq(self) -> np.ndarray:
        return 10000.0 ** (-2.0 * np.arange(self.rotary // 2) / self.rotary)


DEEPSEEK = Sizes(512, 64, 128, 128)
MIDDLE = Sizes(256, 32, 64, 64)
SMALL = Sizes(64, 16, 32, 32)
LANES = Sizes(128, 64, 128, 128)
"""The smallest that fills TPU registers."""


@dataclass(frozen=True)
class Setting:
    """All that decides on a compiled program, apart from the implementation."""

    op: OpName
    sizes: Sizes
    dtype: str
    heads: int
    batch: int
    tokens: int
    pages: int
    bucket: tuple[int, int]

    @property
    def scale(self) -> float:
        z = self.sizes
        return ((z.nope if self.op == "extend_expanded" else z.latent) + z.rotary) ** -0.5


@dataclass(frozen=True)
class Case:
    setting: Setting
    layout: LayoutName
    lengths: tuple[int, ...]
    new: int = 0
    """Extend only: the last `new` positions of each sequence are the queries; 0: some of all sequences, mixed."""
    merged: bool = False
    """Attend to two thirds and to the rest of each sequence, and merge."""

    def describe(self) -> dict[str, Any]:
        s = self.setting
        z = s.sizes
        return {
            "op": s.op,
            "dtype": s.dtype,
            "heads": s.heads,
            "widths": f"{z.latent}+{z.rotary}",
            "layout": self.layout + (" merged" if self.merged else "") + (f" {self.new} new" if self.new else ""),
            "lengths": ",".join(map(str, self.lengths)),
        }


@dataclass(frozen=True, kw_only=True)
class World:
    """A pool's rows in plain layout, exactly as stored, and where the sequences lie. Every row that no sequence has
    written is NaN, and so are the other layer and the scratch page."""

    sizes: Sizes
    dtype: str
    lengths: tuple[int, ...]
    c_kv: np.ndarray
    k_r: np.ndarray
    rows: list[np.ndarray]
    shifts: list[np.ndarray]

    def table(self, bucket: tuple[int, int]) -> FragmentTable:
        return pack_fragments(
            [fragments_of(r, s) for r, s in zip(self.rows, self.shifts, strict=True)], self.sizes.inv_freq, bucket
        )

    def pool(self, layout: PoolLayout) -> LatentPool:
        specs = stream_specs(self.sizes, self.dtype)
        return _stored(specs, layout, **{n: _with_layers(x) for n, x in (("c_kv", self.c_kv), ("k_r", self.k_r))})

    def keys(self, b: int) -> tuple[np.ndarray, np.ndarray]:
        """`(c_kv, k_r at its target position)` of the written rows of one sequence in float64."""
        rows, shifts = (x[: self.lengths[b]] for x in (self.rows[b], self.shifts[b]))
        c_kv, k_r = (x[rows].astype(np.float64) for x in (self.c_kv, self.k_r))
        return c_kv, turned(k_r, shifts, self.sizes.inv_freq)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _stored(specs: tuple[StreamSpec, ...], layout: PoolLayout, **rows: jax.Array) -> LatentPool:
    return LatentPool.from_rows(specs, layout, **rows)


def _with_layers(rows: np.ndarray) -> np.ndarray:
    layers = np.full((LAYERS, *rows.shape), np.nan, np.float32)
    layers[LAYER] = rows
    return layers.reshape(LAYERS, -1, PAGE_SIZE, rows.shape[-1])


def stream_specs(sizes: Sizes, dtype: str) -> tuple[StreamSpec, ...]:
    latent, rest, _ = DTYPES[dtype]
    return (
        StreamSpec(name="c_kv", width=sizes.latent, dtype=jnp.dtype(latent)),
        StreamSpec(name="k_r", width=sizes.rotary, dtype=jnp.dtype(rest), rotary=(0, sizes.rotary)),
    )


def _generator(*seed: Any) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(seed).encode()))


def rounded(values: np.ndarray, dtype: Any) -> np.ndarray:
    """Values that `dtype` holds exactly, as float32; rows of float8 with a power of two each, so that they fit."""
    values = values.astype(np.float32)
    if dtype != ml_dtypes.float8_e4m3fn:
        return values.astype(dtype).astype(np.float32)
    factor = 2.0 ** np.ceil(np.log2(np.abs(values).max(-1, keepdims=True) / 448.0))
    return (values / factor).astype(dtype).astype(np.float32) * factor.astype(np.float32)


def make_world(case: Case) -> World:
    """Depends on sizes, dtype, layout and lengths alone, so cases share it."""
    s = case.setting
    return _world(s.sizes, s.dtype, s.pages, case.layout, case.lengths)


@functools.lru_cache(maxsize=1)
def _world(sizes: Sizes, dtype: str, pages: int, layout: LayoutName, lengths: tuple[int, ...]) -> World:
    rng = _generator(sizes, dtype, layout, lengths)
    reserved = RESERVED if layout == "reserved" else 0
    placed = _Placement(rng, pages)
    pairs = [_sequence(rng, placed, n + reserved, layout) for n in lengths]
    written = np.unique(np.concatenate([rows[:n] for (rows, _), n in zip(pairs, lengths, strict=True)]))
    latent, rest, _ = DTYPES[dtype]
    c_kv, k_r = (np.full((pages * PAGE_SIZE, n), np.nan, np.float32) for n in (sizes.latent, sizes.rotary))
    values = rng.standard_normal((len(written), sizes.latent), np.float32)
    if dtype == "fp8":
        values *= 2.0 ** rng.integers(-1, 2, (len(written), 1))  # rows of different scale
    c_kv[written] = rounded(values, latent)
    k_r[written] = rounded(rng.standard_normal((len(written), sizes.rotary), np.float32), rest)
    rows, shifts = (list(x) for x in zip(*pairs, strict=True))
    return World(sizes=sizes, dtype=dtype, lengths=lengths, c_kv=c_kv, k_r=k_r, rows=rows, shifts=shifts)


class _Placement:
    """Hands out rows, in shuffled pages; the scratch page and the last page stay unused."""

    def __init__(self, rng: np.random.Generator, pages: int):
        self._order, self._next = rng.permutation(np.arange(1, pages - 1)), 0

    def take(self, count: int, gap: int) -> np.ndarray:
        rows = self._next + gap + np.arange(count)
        self._next += gap + count
        if self._next > len(self._order) * PAGE_SIZE:
            raise ValueError("the layout needs more pages")
        return self._order[rows // PAGE_SIZE] * PAGE_SIZE + rows % PAGE_SIZE

    def whole_pages(self, count: int) -> np.ndarray:
        return self.take(count, -self._next % PAGE_SIZE)


def _sequence(
    rng: np.random.Generator, placed: _Placement, length: int, layout: LayoutName
) -> tuple[np.ndarray, np.ndarray]:
    """Pool row and shift of each position. `cut`, `reserved`, `unshifted`: segments of 1 to 199 rows that begin anywhere in a page.
    `pages`: whole pages, one shift each. `twice`: two thirds are one donor at two places, so at two shifts."""
    few = np.r_[0, -MAX_SHIFT, MAX_SHIFT, _generator("shifts").integers(-MAX_SHIFT, MAX_SHIFT, 12)]
    rows, shifts = [np.zeros(0, int)], [np.zeros(0, int)]

    def add(which: np.ndarray, shift: int) -> None:
        rows.append(which)
        shifts.append(np.full(len(which), shift))

    if layout == "twice" and length >= 3:
        donor = placed.take(length // 3, int(rng.integers(1, PAGE_SIZE)))
        between = placed.take(length - 2 * len(donor), int(rng.integers(1, PAGE_SIZE)))
        head = len(between) // 2
        add(between[:head], 0)
        add(donor, -431)
        add(between[head:], 0)
        add(donor, 123_456)
    else:
        left = length
        while left:
            size = PAGE_SIZE if layout == "pages" else int(rng.integers(1, rng.choice([20, 200])))
            size = min(size, left)
            take = placed.whole_pages(size) if layout == "pages" else placed.take(size, int(rng.integers(0, 40)))
            add(take, 0 if layout == "unshifted" else int(rng.choice(few)))
            left -= size
    return np.concatenate(rows).astype(np.int32), np.concatenate(shifts).astype(np.int32)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Arguments of the op by name, apart from pool and table (these by parts: more than one if they are to be merged),
    and what it should return."""

    arrays: dict[str, np.ndarray]
    tables: list[FragmentTable]
    checked: np.ndarray
    """Indices of the tokens that are compared; the others are only looked at for NaN."""
    expected: Expected


def argument_shapes(s: Setting) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of `Inputs.arrays`."""
    z, (_, dtype, _) = s.sizes, DTYPES[s.dtype]
    first, width = ("q_nope", z.nope) if s.op == "extend_expanded" else ("q_latent", z.latent)
    shapes = {first: (s.tokens, s.heads, width), "q_rope": (s.tokens, s.heads, z.rotary)}
    if s.op == "extend_expanded":
        shapes |= {"key_up": (s.heads, z.nope, z.latent), "value_up": (s.heads, z.latent, z.value)}
    result = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    if s.op != "decode":
        result |= {name: jax.ShapeDtypeStruct((s.tokens,), np.int32) for name in ("q_position", "q_sequence")}
    return result


def make_inputs(case: Case, world: World, most_rows: int) -> Inputs:
    """`most_rows`: how many (token, head) pairs are compared at most."""
    s = case.setting
    rng = _generator(case)
    arrays = {}
    for name, shape in argument_shapes(s).items():
        values = rng.standard_normal(shape.shape, np.float32)
        arrays[name] = (values * s.sizes.latent**-0.5 if name.endswith("_up") else values).astype(shape.dtype)
    if s.op == "decode":
        position, sequence = np.array(case.lengths) - 1, np.arange(s.batch)
    else:
        position, sequence = _query_places(rng, case)
        arrays |= {"q_position": position.astype(np.int32), "q_sequence": sequence.astype(np.int32)}
    table = world.table(s.bucket)
    if s.op == "decode":  # sees all rows of its table
        table = part_of(table, np.zeros(s.batch, int), np.array(case.lengths))
    tables = [table]
    if case.merged:
        lengths = np.array(case.lengths)
        middle = lengths * 2 // 3
        tables = [part_of(table, 0 * lengths, middle), part_of(table, middle, lengths)]
    step = max(1, -(-s.tokens * s.heads // most_rows))
    checked = np.arange(s.tokens)[::-1][::step][::-1]  # with the last
    return Inputs(
        arrays=arrays,
        tables=tables,
        checked=checked,
        expected=_expected(case, world, arrays, position, sequence, checked),
    )


def part_of(table: FragmentTable, begin: np.ndarray, end: np.ndarray) -> FragmentTable:
    """The table with the rows at target positions in `[begin, end)` alone; fragments outside become empty."""
    lo = np.clip(begin[:, None] - table.start, table.lo, table.hi)
    hi = np.clip(end[:, None] - table.start, lo, table.hi)
    return replace(table, lo=lo.astype(np.int32), hi=hi.astype(np.int32))


def _query_places(rng: np.random.Generator, case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Position and sequence of each query; the rest is padding. Mixed: few positions of every sequence, in any order,
    the last one always."""
    pairs: list[tuple[int, int]] = []
    for b, n in enumerate(case.lengths):
        if case.new:
            pairs += [(p, b) for p in range(n - case.new, n)]
        else:
            some = {0, 31, 63, 64, n // 3, n // 2, n - 2, n - 1}
            room = (case.setting.tokens - 3) // len(case.lengths)
            if room < 1:
                raise ValueError(f"{case.setting.tokens} tokens are too few for {len(case.lengths)} sequences")
            pairs += [(p, b) for p in sorted((p for p in some if 0 <= p < n), reverse=True)[:room]]
    pairs += [(-1, 0)] * (case.setting.tokens - len(pairs))
    places = np.array(pairs)
    return tuple((places if case.new else places[rng.permutation(len(places))]).T)


def _expected(
    case: Case,
    world: World,
    arrays: dict[str, np.ndarray],
    position: np.ndarray,
    sequence: np.ndarray,
    checked: np.ndarray,
) -> Expected:
    s = case.setting
    z, unit = s.sizes, DTYPES[s.dtype][2]
    wide = {name: a.astype(np.float64) for name, a in arrays.items()}
    expansion, score_width, out_width = None, z.latent + z.rotary, z.latent
    if s.op == "extend_expanded":
        q_latent = np.einsum("thn,hnr->thr", wide["q_nope"][checked], wide["key_up"], optimize=True)
        expansion, score_width, out_width = wide["value_up"], z.nope + z.rotary, z.value
    else:
        q_latent = wide["q_latent"][checked]
    q = np.concatenate([q_latent, wide["q_rope"][checked]], axis=-1)
    shape = (len(checked), s.heads)
    out, lse = np.zeros((*shape, out_width)), np.full(shape, -np.inf)
    total = Expected(out, lse, np.zeros_like(out), np.zeros_like(lse))
    for b in range(s.batch):
        own = np.flatnonzero((sequence[checked] == b) & (position[checked] >= 0))
        if len(own):
            c_kv, k_r = world.keys(b)
            part = attention(
                q[own], position[checked][own] + 1, np.concatenate([c_kv, k_r], axis=-1), c_kv, scale=s.scale,
                unit=unit, score_width=score_width, expansion=expansion,
            )  # fmt: skip
            for whole, piece in zip(
                (total.out, total.lse, total.out_tolerance, total.lse_tolerance),
                (part.out, part.lse, part.out_tolerance, part.lse_tolerance),
                strict=True,
            ):
                whole[own] = piece
    return total


RAGGED = (0, 1, 63, 64, 65, 4095, 4096, 4097)
RAGGED_SHORT = (0, 1, 63, 64, 65, 130)
SHIFTED: tuple[LayoutName, ...] = ("cut", "twice", "pages", "reserved")
OPS: tuple[OpName, ...] = ("decode", "extend", "extend_expanded")


def _pages_for(lengths: tuple[int, ...]) -> int:
    """Enough for all layouts, gaps included."""
    return 16 + sum(n + RESERVED for n in lengths) * 3 // (2 * PAGE_SIZE) + 2 * len(lengths)


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How much of everything a list of cases has, so that it fits the time of a machine."""

    sizes: Sizes
    dtype: str
    heads: tuple[int, ...]
    lengths: tuple[int, ...]
    ops: tuple[OpName, ...] = OPS
    layouts: tuple[LayoutName, ...] = SHIFTED
    tokens: int = 64
    fragments: int = 256
    single: tuple[int, ...] = ()
    """Lengths to decode with a batch of one."""
    unshifted: bool = False
    merged: bool = False
    new: tuple[tuple[int, int], ...] = ()
    """`(new tokens, length)` of one sequence."""

    def cases(self) -> Iterator[Case]:
        for heads in self.heads:
            yield from self._cases(heads)

    def _cases(self, heads: int) -> Iterator[Case]:
        pages = _pages_for(self.lengths)
        for op in self.ops:
            tokens = len(self.lengths) if op == "decode" else self.tokens
            setting = Setting(op, self.sizes, self.dtype, heads, len(self.lengths), tokens, pages, (self.fragments, 32))
            yield from (Case(setting, layout, self.lengths) for layout in self.layouts)
            if op == "decode" and self.merged:
                yield Case(setting, "cut", self.lengths, merged=True)
            if self.unshifted:
                yield Case(replace(setting, bucket=(self.fragments, 1)), "unshifted", self.lengths)
            if op == "decode" and self.single:
                alone = replace(setting, batch=1, tokens=1, pages=_pages_for((max(self.single),)))
                yield from (Case(alone, "cut", (n,)) for n in self.single)
            for new, length in self.new if op != "decode" else ():
                alone = replace(setting, batch=1, tokens=new, pages=_pages_for((max(n for _, n in self.new),)))
                yield Case(alone, "cut", (length,), new=new)
