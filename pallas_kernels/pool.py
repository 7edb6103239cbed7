"""The paged latent pool: what one row holds and how rows are written. Which row belongs to whom is the host's business."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

PAGE_SIZE = 64
"""Consecutive rows of one page; one row holds one token."""

SCRATCH_PAGE = 0
"""Takes the writes of padded tokens; never read, never handed out."""


@dataclass(frozen=True, kw_only=True)
class StreamSpec:
    """One named part of a row. `rotary` is the slice that is rotated to the row's base position, or None."""

    name: str
    width: int
    dtype: jnp.dtype
    rotary: tuple[int, int] | None = None


@no_type_check  # tree transformations put anything into the leaves
@struct.dataclass
class LatentPool:
    """Named streams over the same pages, each `[L, P, PAGE_SIZE, width]`.

    Rows are stored once, rotated to their base position, and never rewritten while anyone can read them. All functions
    that take a pool and return one are meant to be jitted with the pool donated; then nothing is copied.
    """

    arrays: tuple[jax.Array, ...]
    specs: tuple[StreamSpec, ...] = struct.field(pytree_node=False)

    @classmethod
    def create(cls, specs: tuple[StreamSpec, ...], *, num_layers: int, num_pages: int) -> LatentPool:
        """A pool of zeros. `num_pages` includes the scratch page."""
        shape = (num_layers, num_pages, PAGE_SIZE)
        return cls(arrays=tuple(jnp.zeros((*shape, s.width), s.dtype) for s in specs), specs=specs)

    @property
    def num_layers(self) -> int:
        return self.arrays[0].shape[0]

    @property
    def num_pages(self) -> int:
        return self.arrays[0].shape[1]

    def __getitem__(self, name: str) -> jax.Array:
        """The stream called `name`, `[L, P, PAGE_SIZE, width]`."""
        return self.arrays[self._index(name)]

    def _index(self, name: str) -> int:
        return next(i for i, s in enumerate(self.specs) if s.name == name)

    def read(self, name: str, layer: int, page: Int[Array, "*n"], slot: Int[Array, "*n"]) -> jax.Array:
        """Rows of one stream, `[*n, width]`. Indexes the whole stream: slicing the layer out first would copy it."""
        return self[name].at[layer, page, slot].get(mode="promise_in_bounds")

    def write(self, layer: int, page: Int[Array, "T"], slot: Int[Array, "T"], **rows: jax.Array) -> LatentPool:
        """Stores one row `[T, width]` per token in each named stream, rounding to the stream's dtype."""
        arrays = list(self.arrays)
        for name, values in rows.items():
            i = self._index(name)
            arrays[i] = arrays[i].at[layer, page, slot].set(values.astype(arrays[i].dtype), mode="promise_in_bounds")
        return dataclasses.replace(self, arrays=tuple(arrays))
