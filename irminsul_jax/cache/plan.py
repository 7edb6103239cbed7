"""What the planner hands to the rest of the system. `Plan` is one of only two things that cross the border between
host-side matching and the model (the other is the fragment table). Pure NumPy: nothing here, or anywhere in
`irminsul_jax.cache`, imports jax.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32, UInt8

from irminsul_jax.cache.config import Namespace

PAGE_SIZE = 64
"""Rows of one page of the latent pool; one row holds one token. (The pool's own constant; a test keeps them equal.)"""

CARVE_OUT = 32
"""Positions below this are never served shifted, neither as target nor as base (attention sink)."""


class TokenClass(enum.IntEnum):
    """The three classes a prompt token can fall in; every report counts all three."""

    RECOMPUTED = 0
    EXACT = 1
    SHIFTED = 2


class Reason(enum.IntEnum):
    """Why a token is recomputed; `SERVED` marks tokens that are not."""

    SERVED = 0
    NOVEL = 1
    CARVE_OUT = 2
    TOO_SHORT = 3
    EVICTED = 4
    DEPTH = 5
    SEAM = 6
    NAMESPACE = 7
    LAST_TOKEN = 8
    GATE = 9


@dataclass(frozen=True, kw_only=True)
class Run:
    """Consecutive prompt tokens served from consecutive positions of one donor sequence, all of one class."""

    target: int
    """First prompt position of the run."""
    length: int
    token_class: TokenClass
    donor: int
    """Id of the donor sequence, in the order of publication."""
    donor_start: int
    """Position of the run's first token in the donor sequence."""

    @property
    def delta(self) -> int:
        """Shift of the run against its donor: target position − donor position. (Rows that the donor itself took from
        elsewhere carry their own shift in `Plan.shifts`.)"""
        return self.target - self.donor_start


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How each token of one prompt is obtained.

    `rows[i]` is the pool row (`page * PAGE_SIZE + slot`) that serves token i, or −1 where the token is recomputed;
    `shifts[i]` is target position − base position of that row (0 where recomputed). `depths[i]` is the number of
    generations of shifted context that token i hands on to whatever is computed behind it: of a recomputed token,
    the depth of the row that prefill will compute; of a served one, the depth of its row, plus one if content led
    there, now or when the path was published. 0 means *pure*, in exactly its own left context.
    """

    tokens: Int32[np.ndarray, "T"]
    rows: Int32[np.ndarray, "T"]
    shifts: Int32[np.ndarray, "T"]
    classes: UInt8[np.ndarray, "T"]
    reasons: UInt8[np.ndarray, "T"]
    depths: UInt8[np.ndarray, "T"]
    runs: tuple[Run, ...]
    namespace: Namespace | None = None
    """Whose rows these are; a reservation in another namespace is refused."""
    stamp: int = 0
    """Time of the cache's clock at planning: rows of pages handed out later are not the ones that were planned."""

    @property
    def num_exact(self) -> int:
        return int(np.count_nonzero(self.classes == TokenClass.EXACT))

    @property
    def num_shifted(self) -> int:
        return int(np.count_nonzero(self.classes == TokenClass.SHIFTED))

    @property
    def recompute_positions(self) -> Int32[np.ndarray, "N"]:
        """Prompt positions that prefill has to compute, ascending; never empty (the last token is always computed)."""
        return np.nonzero(self.rows < 0)[0].astype(np.int32)

    def recomputed_by_reason(self) -> dict[str, int]:
        """Recomputed tokens by the lower-case name of their reason; reasons without tokens are left out."""
        counts = np.bincount(self.reasons, minlength=len(Reason))
        return {r.name.lower(): int(counts[r]) for r in Reason if r is not Reason.SERVED and counts[r]}
