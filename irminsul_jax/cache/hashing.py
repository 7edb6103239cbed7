"""Rolling hashes and content-defined cuts of token sequences, vectorised over all positions, equal in every process.

A hash is a hint only: whoever uses one compares tokens afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import xxhash
from jaxtyping import Int, UInt64

ANCHOR = 32
"""Tokens of one anchor."""

ANCHOR_STRIDE = 8
"""Donors register an anchor at every such position; a prompt is probed at every one, so any agreement of
`ANCHOR + ANCHOR_STRIDE - 1` tokens is found."""

CHUNK_MIN, CHUNK_MAX = 32, 512
"""Clamp of Gear chunk lengths (arXiv 2605.05696)."""

_BOUNDARY = np.uint64(1 << 57)
_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1

Fingerprint = Callable[[UInt64[np.ndarray, "N"]], UInt64[np.ndarray, "N"]]


@dataclass(frozen=True)
class Windows:
    """Pieces of one sequence: start position, length and hash of each, ascending by start."""

    starts: Int[np.ndarray, "N"]
    lengths: Int[np.ndarray, "N"]
    keys: UInt64[np.ndarray, "N"]

    def select(self, which: np.ndarray) -> Windows:
        return Windows(self.starts[which], self.lengths[which], self.keys[which])


def gear_values(tokens: Int[np.ndarray, "T"]) -> UInt64[np.ndarray, "T"]:
    """A 64-bit pseudo-random value per token id (splitmix64's finaliser), the G of Gear hashing."""
    z = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(_MULTIPLIER)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def gear_hash(tokens: Int[np.ndarray, "T"]) -> UInt64[np.ndarray, "T"]:
    """h[i] = (h[i−1] << 1) + G[token i] mod 2^64: a window of 64 tokens, since older ones are shifted out.

    Six shift-and-add passes: after pass k, h[i] covers the 2^k tokens that end at i.
    """
    h = gear_values(tokens)
    for k in range(6):
        width = 1 << k
        shifted = h.copy()
        shifted[width:] += h[:-width] << np.uint64(width)
        h = shifted
    return h


def gear_cuts(tokens: Int[np.ndarray, "T"]) -> Int[np.ndarray, "N"]:
    """Ends (exclusive) of the Gear chunks of a sequence, the last one at T. A chunk ends behind a token with h < 2^57
    once it has `CHUNK_MIN` tokens, and at `CHUNK_MAX` in any case."""
    candidates = (np.flatnonzero(gear_hash(tokens) < _BOUNDARY) + 1).tolist()
    ends, start, k, total = [], 0, 0, len(tokens)
    while start < total:
        while k < len(candidates) and candidates[k] < start + CHUNK_MIN:
            k += 1
        natural = candidates[k] if k < len(candidates) else total
        start = min(natural, start + CHUNK_MAX, total)
        ends.append(start)
    return np.array(ends, np.int64)


def window_hash(tokens: Int[np.ndarray, "T"], log2_window: int = 5) -> UInt64[np.ndarray, "N"]:
    """Hash of the 2^log2_window tokens that start at each position: a polynomial mod 2^64, built by doubling."""
    h, power = gear_values(tokens), _MULTIPLIER
    for k in range(log2_window):
        width = 1 << k
        if len(h) <= width:
            return h[:0]
        h = h[:-width] * np.uint64(power) + h[width:]
        power = power * power & _MASK64
    return h ^ (h >> np.uint64(29))  # low bits of a product depend on low bits only


def _hash_pieces(tokens: Int[np.ndarray, "T"], starts: np.ndarray, ends: np.ndarray) -> Windows:
    raw = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    keys = [xxhash.xxh64_intdigest(raw[4 * a : 4 * b]) for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
    return Windows(starts, ends - starts, np.array(keys, np.uint64))


def gear_chunks(tokens: Int[np.ndarray, "T"]) -> Windows:
    """The Gear chunks of a sequence with the xxHash64 of their tokens (little-endian int32)."""
    ends = gear_cuts(tokens)
    return _hash_pieces(tokens, np.concatenate([np.zeros(1, np.int64), ends])[: len(ends)], ends)


def fixed_windows(tokens: Int[np.ndarray, "T"], width: int) -> Windows:
    """Whole windows of `width` tokens from the start of the sequence on, with the xxHash64 of their tokens."""
    starts = np.arange(0, len(tokens) - width + 1, width, dtype=np.int64)
    return _hash_pieces(tokens, starts, starts + width)


def anchors(tokens: Int[np.ndarray, "T"], stride: int) -> Windows:
    """The anchor at each multiple of `stride`."""
    keys = window_hash(tokens)
    starts = np.arange(0, len(keys), stride, dtype=np.int64)
    return Windows(starts, np.full(len(starts), ANCHOR, np.int64), keys[::stride])
