"""Content index: where a piece of a prompt was computed before, at whatever position. Hints only, no planning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from jaxtyping import Int32

from irminsul_jax.cache.hashing import (
    ANCHOR_STRIDE,
    Fingerprint,
    Windows,
    anchors,
    fixed_windows,
    gear_chunks,
)

_MAX_DONORS = 8
_SPARSITY = 16


@dataclass(slots=True, eq=False)
class Donor:
    """One published sequence and the row that stands at each of its positions."""

    id: int
    tokens: np.ndarray
    handles: np.ndarray
    own: np.ndarray
    """Positions whose row this sequence computed itself; pieces without any are registered by their origin."""
    live_pages: int = 0
    keys: dict[ContentIndex, set[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """A way to cut sequences into pieces that can be found again."""

    register: Callable[[Int32[np.ndarray, "T"]], Windows]
    probe: Callable[[Int32[np.ndarray, "T"]], Windows]
    grows: bool
    """Whether a hit is extended token by token beyond its piece."""


def _blocks(cut: Callable[[Int32[np.ndarray, "T"]], Windows]) -> Family:
    return Family(cut, cut, grows=False)


_CDC = _blocks(gear_chunks)
FAMILIES: dict[str, tuple[Family, ...]] = {
    "none": (),
    "prefix": (),
    "block-prefix": (),
    "cdc": (_CDC,),
    "cdc+s1": (_CDC, _blocks(partial(fixed_windows, width=128))),
    "window256": (_blocks(partial(fixed_windows, width=256)),),
    "anchor": (Family(partial(anchors, stride=ANCHOR_STRIDE), partial(anchors, stride=1), grows=True),),
}
"""Matchers of each policy, in the order in which they may claim tokens."""


class ContentIndex:
    """Hash of a piece → (donor, position). A bitmap in front answers most probes of new text without a look-up."""

    def __init__(self, family: Family, fingerprint: Fingerprint | None = None):
        self.family = family
        self._fingerprint = fingerprint
        self._places: dict[int, list[tuple[Donor, int]]] = {}
        self._reset_filter()

    def _reset_filter(self) -> None:
        size = 1 << max(12, (2 * _SPARSITY * len(self._places)).bit_length())
        self._filter = np.zeros(size, bool)
        self._filter_adds = len(self._places)
        if self._places:
            keys = np.fromiter(self._places, np.uint64, len(self._places))
            self._filter[keys & np.uint64(size - 1)] = True

    def _with_keys(self, windows: Windows) -> Windows:
        if self._fingerprint is None:
            return windows
        return Windows(windows.starts, windows.lengths, self._fingerprint(windows.keys))

    def add(self, donor: Donor, known: int) -> None:
        """Register the pieces of `donor` that end behind position `known` and contain a row of its own."""
        first_own = int(donor.own.argmax()) if donor.own.any() else len(donor.own)
        windows = self._with_keys(self.family.register(donor.tokens))
        ends = windows.starts + windows.lengths
        own = np.concatenate([np.zeros(1, np.int64), np.cumsum(donor.own)])
        fresh = windows.select((ends > max(known, first_own)) & (own[ends] > own[windows.starts]))
        keys = donor.keys.setdefault(self, set())
        for key, start in zip(fresh.keys.tolist(), fresh.starts.tolist(), strict=True):
            places = self._places.setdefault(key, [])
            if len(places) == _MAX_DONORS:
                del places[0]
            places.append((donor, start))
            keys.add(key)
        self._filter_adds += len(fresh.keys)
        if self._filter_adds * _SPARSITY > len(self._filter):
            self._reset_filter()
        else:
            self._filter[fresh.keys & np.uint64(len(self._filter) - 1)] = True

    def discard(self, donor: Donor) -> None:
        for key in donor.keys.pop(self, ()):
            left = [place for place in self._places.get(key, ()) if place[0] is not donor]
            if left:
                self._places[key] = left
            else:
                self._places.pop(key, None)

    def probe(self, tokens: Int32[np.ndarray, "T"]) -> Windows:
        """The pieces of a prompt that may be known."""
        if not self._places:
            return Windows(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.uint64))
        windows = self._with_keys(self.family.probe(tokens))
        return windows.select(self._filter[windows.keys & np.uint64(len(self._filter) - 1)])

    def places(self, key: int) -> list[tuple[Donor, int]]:
        return self._places.get(key, [])

    def __len__(self) -> int:
        return sum(map(len, self._places.values()))
