"""Book-keeping of the paged latent pool: which page is free, held or evictable, and what each physical row holds.

No latent lives here; the arrays on the device have the same page and row numbers. A *handle* names a row for good: the
time at which its page was handed out (upper 32 bits) and the row (lower 32 bits). It is alive as long as that page was
not taken away.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Int, Int32, Int64, UInt8

from irminsul_jax.cache.plan import PAGE_SIZE
from irminsul_jax.errors import CacheError

_ROW_BITS = np.int64(32)
_ROW_MASK = np.int64((1 << 32) - 1)
_FIRST_GROWTH = 64
_LATEST = (1 << 24) - 1


def handle_rows(handles: Int64[np.ndarray, "N"]) -> Int64[np.ndarray, "N"]:
    return handles & _ROW_MASK


class PagePool:
    """Pages by reference count. Page 0 is scratch for padded writes and never handed out or counted.

    A page is *held* while a reservation reads or owns it, *evictable* when nobody holds it but its rows were published,
    *free* otherwise. `num_pages` includes page 0; None lets the pool grow without bound.
    """

    def __init__(self, num_pages: int | None):
        if num_pages is not None and num_pages < 2:
            raise CacheError(f"a pool of {num_pages} pages holds nothing: page 0 is scratch, give at least 2 pages")
        self.bounded = num_pages is not None
        self.clock = 1
        size = num_pages or _FIRST_GROWTH
        self._allocate_arrays(size)

    def _allocate_arrays(self, size: int) -> None:
        self.refs = np.zeros(size, np.int32)
        self.published = np.zeros(size, bool)
        self.born = np.zeros(size, np.int64)
        self.last_use = np.zeros(size, np.int64)
        self.first_position = np.zeros(size, np.int32)
        self.owner = np.full(size, -1, np.int64)
        self.base = np.zeros(size * PAGE_SIZE, np.int32)
        self.depth = np.zeros(size * PAGE_SIZE, np.uint8)
        self._free = list(range(size - 1, 0, -1))

    def reset(self) -> None:
        """Everything is free again; handles and plans from before are dead."""
        self.clock += 1
        self._allocate_arrays(len(self.refs))

    def _grow(self, at_least: int) -> None:
        old = len(self.refs)
        size = old
        while size - old + len(self._free) < at_least:
            size *= 2
        for name in ("refs", "published", "born", "last_use", "first_position", "owner", "base", "depth"):
            array = getattr(self, name)
            grown = np.zeros(size * len(array) // old, array.dtype)
            grown[: len(array)] = array
            setattr(self, name, grown)
        self._free = list(range(size - 1, old - 1, -1)) + self._free

    @property
    def total(self) -> int:
        return len(self.refs) - 1

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def held(self) -> int:
        return int(np.count_nonzero(self.refs))

    @property
    def evictable(self) -> int:
        return int(np.count_nonzero(self.published & (self.refs == 0)))

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def alive(self, handles: Int64[np.ndarray, "N"]) -> Bool[np.ndarray, "N"]:
        return self.born[handle_rows(handles) // PAGE_SIZE] == handles >> _ROW_BITS

    def handles(self, rows: Int[np.ndarray, "N"]) -> Int64[np.ndarray, "N"]:
        rows = rows.astype(np.int64)
        return self.born[rows // PAGE_SIZE] << _ROW_BITS | rows

    def describe(
        self, rows: Int[np.ndarray, "N"], positions: Int[np.ndarray, "N"], depths: UInt8[np.ndarray, "N"]
    ) -> None:
        """Record base position and depth of rows that were just computed (ascending positions)."""
        self.base[rows] = positions
        self.depth[rows] = depths
        firsts = rows % PAGE_SIZE == 0
        self.first_position[rows[firsts] // PAGE_SIZE] = positions[firsts]

    def take(
        self, count: int, reading: Int[np.ndarray, "R"]
    ) -> tuple[Int32[np.ndarray, "C"], Int64[np.ndarray, "E"]] | None:
        """Hold the distinct pages `reading` and hand out `count` pages of one's own, evicting unheld ones where
        needed: longest unused first, within one time of use the later positions first (so that prefixes survive).

        Returns the own pages and the owner of each evicted one, or None, with nothing changed, if it does not fit now.
        """
        missing = count - len(self._free)
        orphaned = np.zeros(0, np.int64)
        if missing > 0 and not self.bounded:
            self._grow(count)
        elif missing > 0:
            candidate = self.published & (self.refs == 0)
            candidate[reading] = False
            pages = np.flatnonzero(candidate)
            if len(pages) < missing:
                return None
            order = self.last_use[pages] << 24 | (_LATEST - np.minimum(self.first_position[pages], _LATEST))
            chosen = np.argpartition(order, missing - 1)[:missing] if missing < len(pages) else slice(None)
            evicted = pages[chosen].astype(np.int32)
            self.published[evicted] = False
            self.born[evicted] = 0
            self._free.extend(evicted.tolist())
            orphaned = self.owner[evicted]
        self.refs[reading] += 1
        own = np.array(self._free[len(self._free) - count :][::-1], np.int32)
        del self._free[len(self._free) - count :]
        now = self.tick()
        self.refs[own] = 1
        self.born[own] = now
        self.owner[own] = -1
        return own, orphaned

    def drop(self, pages: Int[np.ndarray, "N"]) -> None:
        """Undo one hold of each of the distinct `pages`; those that nobody holds and nobody published become free."""
        if np.any(self.refs[pages] <= 0):
            raise CacheError("a page was released more often than it was held; nothing was changed")
        self.refs[pages] -= 1
        self.last_use[pages] = self.tick()
        freed = pages[(self.refs[pages] == 0) & ~self.published[pages]]
        self.born[freed] = 0
        self._free.extend(freed[::-1].tolist())
