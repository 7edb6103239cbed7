"""The paged latent pool: what one row holds and how rows are written. Which row belongs to whom is the host's business."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Float32, Int

PAGE_SIZE = 64
"""Consecutive rows of one page; one row holds one token."""

SCRATCH_PAGE = 0
"""Takes the writes of padded tokens; never read, never handed out."""

LANES = 128
"""Width of a TPU vector register; an array whose last dimension is a multiple is stored there without padding."""

Layer = int | Int[Array, ""]
"""Index of a layer, static or on the device."""

PoolLayout = Literal["plain", "lanes"]
"""How rows lie in memory. `plain`: as they are. `lanes`, for TPUs: the width is padded to a multiple of 128, and the two
halves of a rotary row begin half the stored width apart, so that a rotation is one native roll. (A plain 64-wide stream
would be laid out anew by XLA before each kernel that reads it.)"""


@dataclass(frozen=True, kw_only=True)
class StreamSpec:
    """One named part of a row. `rotary` is the slice that is rotated to the row's base position, or None. A stream of
    `float8_e4m3fn` keeps one scale per row, a power of two, so that reading it as bfloat16 is exact."""

    name: str
    width: int
    dtype: jnp.dtype
    rotary: tuple[int, int] | None = None

    @property
    def scaled(self) -> bool:
        return self.dtype == jnp.float8_e4m3fn


@no_type_check  # tree transformations put anything into the leaves
@struct.dataclass
class LatentPool:
    """Named streams over the same pages, each `[L, P, PAGE_SIZE, width as stored]`, and the scales of those that have
    any, `[L, P, PAGE_SIZE]` in float32.

    Rows are stored once, rotated to their base position, and never rewritten while anyone can read them. All functions
    that take a pool and return one are meant to be jitted with the pool donated; then nothing is copied.
    """

    arrays: tuple[jax.Array, ...]
    scales: tuple[jax.Array | None, ...]
    specs: tuple[StreamSpec, ...] = struct.field(pytree_node=False)
    layout: PoolLayout = struct.field(pytree_node=False, default="plain")

    @classmethod
    def create(
        cls, specs: tuple[StreamSpec, ...], *, num_layers: int, num_pages: int, layout: PoolLayout = "plain"
    ) -> LatentPool:
        """A pool of zeros. `num_pages` includes the scratch page."""
        shape = (num_layers, num_pages, PAGE_SIZE)
        return cls(
            arrays=tuple(jnp.zeros((*shape, stored_width(s, layout)), s.dtype) for s in specs),
            scales=tuple(jnp.ones(shape, jnp.float32) if s.scaled else None for s in specs),
            specs=specs,
            layout=layout,
        )

    @classmethod
    def from_rows(
        cls, specs: tuple[StreamSpec, ...], layout: PoolLayout = "plain", **rows: Float[Array, "L P 64 W"]
    ) -> LatentPool:
        """A pool that holds the given rows, one array per stream in plain layout, rounded as `write` would."""
        arrays, scales = [], []
        for spec in specs:
            stored, factor = _encoded(rows[spec.name], spec, layout)
            arrays.append(stored)
            scales.append(factor)
        return cls(arrays=tuple(arrays), scales=tuple(scales), specs=specs, layout=layout)

    @property
    def num_layers(self) -> int:
        return self.arrays[0].shape[0]

    @property
    def num_pages(self) -> int:
        return self.arrays[0].shape[1]

    def __getitem__(self, name: str) -> jax.Array:
        """The stream called `name` as it is stored, `[L, P, PAGE_SIZE, width as stored]`."""
        return self.arrays[self._index(name)]

    def spec(self, name: str) -> StreamSpec:
        return self.specs[self._index(name)]

    def scale(self, name: str) -> jax.Array | None:
        """The scales of the stream called `name`, `[L, P, PAGE_SIZE]`, or None if it has none."""
        return self.scales[self._index(name)]

    def _index(self, name: str) -> int:
        return next(i for i, s in enumerate(self.specs) if s.name == name)

    def read(self, name: str, layer: Layer, page: Int[Array, "*n"], slot: Int[Array, "*n"]) -> jax.Array:
        """Rows of one stream, `[*n, width]`; scaled ones as bfloat16. Indexes the whole stream: slicing the layer out
        first would copy it."""
        spec, scale = self.spec(name), self.scale(name)
        rows = from_stored(self[name].at[layer, page, slot].get(mode="promise_in_bounds"), spec, self.layout)
        if scale is None:
            return rows
        factor = scale.at[layer, page, slot].get(mode="promise_in_bounds")
        return rows.astype(jnp.bfloat16) * factor[..., None].astype(jnp.bfloat16)

    def write(self, layer: Layer, page: Int[Array, "T"], slot: Int[Array, "T"], **rows: jax.Array) -> LatentPool:
        """Stores one row `[T, width]` per token in each named stream, rounding to the stream's dtype."""
        arrays, scales = list(self.arrays), list(self.scales)
        for name, values in rows.items():
            i = self._index(name)
            stored, factor = _encoded(values, self.specs[i], self.layout)
            arrays[i] = arrays[i].at[layer, page, slot].set(stored, mode="promise_in_bounds")
            if factor is not None and (old := scales[i]) is not None:
                scales[i] = old.at[layer, page, slot].set(factor, mode="promise_in_bounds")
        return dataclasses.replace(self, arrays=tuple(arrays), scales=tuple(scales))


def stored_width(spec: StreamSpec, layout: PoolLayout) -> int:
    """Elements of a row in memory."""
    return spec.width if layout == "plain" else -(-spec.width // LANES) * LANES


def _encoded(rows: jax.Array, spec: StreamSpec, layout: PoolLayout) -> tuple[jax.Array, jax.Array | None]:
    """`(rows as stored, scales)` of rows in plain layout and any float dtype."""
    factor = row_scale(rows) if spec.scaled else None
    if factor is not None:
        rows = rows.astype(jnp.float32) / factor[..., None]
    return to_stored(rows.astype(spec.dtype), spec, layout), factor


def to_stored(rows: Float[Array, "*n W"], spec: StreamSpec, layout: PoolLayout) -> jax.Array:
    """Rows `[*n, width]` as the layout keeps them; padding is zero. Queries that meet stored keys are laid out alike."""
    width = stored_width(spec, layout)
    if width == spec.width:
        return rows
    if spec.rotary is None:
        return _padded(rows, width)
    first, second = jnp.split(rows, 2, axis=-1)
    return jnp.concatenate([_padded(first, width // 2), _padded(second, width // 2)], axis=-1)


def from_stored(stored: jax.Array, spec: StreamSpec, layout: PoolLayout) -> jax.Array:
    """The inverse of `to_stored`."""
    width = stored_width(spec, layout)
    if width == spec.width:
        return stored
    if spec.rotary is None:
        return stored[..., : spec.width]
    half = spec.width // 2
    return jnp.concatenate([stored[..., :half], stored[..., width // 2 : width // 2 + half]], axis=-1)


def _padded(rows: jax.Array, width: int) -> jax.Array:
    return jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, width - rows.shape[-1])])


def row_scale(rows: Float[Array, "*n W"]) -> Float32[Array, "*n"]:
    """The smallest power of two that brings a row into the range of float8_e4m3fn (±448); 1 for a row of zeros."""
    limit = float(jnp.finfo(jnp.float8_e4m3fn).max)
    largest = jnp.max(jnp.abs(rows.astype(jnp.float32)), axis=-1) / limit
    mantissa, exponent = jnp.frexp(largest)  # largest = mantissa * 2^exponent with mantissa in [0.5, 1)
    exponent = jnp.where(mantissa == 0.5, exponent - 1, exponent)
    return jnp.where(largest > 0, jnp.ldexp(jnp.float32(1), jnp.clip(exponent, -120, 120)), jnp.float32(1))
