"""Turns one prompt and what is known into a `Plan`. Reads the tree, the index and the pool; changes none of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Bool, Int32

from irminsul_jax.cache.config import DEEPEST, CacheConfig, Namespace
from irminsul_jax.cache.content import ContentIndex, Donor
from irminsul_jax.cache.plan import CARVE_OUT, PAGE_SIZE, Plan, Reason, Run, TokenClass
from irminsul_jax.cache.pool import PagePool, handle_rows
from irminsul_jax.cache.radix import RadixTree, agreeing


@dataclass(frozen=True)
class Partition:
    """What is known in one namespace."""

    tree: RadixTree
    indexes: tuple[ContentIndex, ...]


_NOVEL, _CARVE_OUT, _EVICTED, _DEPTH = int(Reason.NOVEL), int(Reason.CARVE_OUT), int(Reason.EVICTED), int(Reason.DEPTH)
_SHIFTED = int(TokenClass.SHIFTED)


@dataclass(slots=True)
class _Piece:
    """Tokens `start:stop` of the prompt agree with `donor` from `donor_start` on."""

    donor: Donor
    start: int
    stop: int
    donor_start: int
    rows: np.ndarray
    problems: np.ndarray | None
    """Reason why each token cannot be served, 0 where it can; None if all can."""
    shared_left: int


def _stretches(mask: np.ndarray) -> list[tuple[int, int]]:
    """Maximal stretches of true values, as (start, stop)."""
    edges = (np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist()
    if len(mask) and mask[0]:
        edges.insert(0, 0)
    if len(mask) and mask[-1]:
        edges.append(len(mask))
    return list(zip(edges[::2], edges[1::2], strict=True))


class Draft:
    """A plan in the making: arrays over the prompt's tokens."""

    def __init__(self, tokens: Int32[np.ndarray, "T"], pool: PagePool, max_depth: int | None):
        n = len(tokens)
        self.tokens = tokens
        self.pool = pool
        self.limit = DEEPEST if max_depth is None else max_depth
        self.rows = np.full(n, -1, np.int64)
        self.contributions = np.zeros(n, np.uint8)
        self.classes = np.zeros(n, np.uint8)
        self.reasons = np.full(n, Reason.NOVEL, np.uint8)
        self.donors = np.full(n, -1, np.int64)
        self.offsets = np.zeros(n, np.int64)
        """Donor position − prompt position."""
        self.by_content = np.zeros(n, bool)

    def serve_prefix(self, tree: RadixTree, *, allow_shifted: bool, block: int) -> int:
        """Serve along the radix path; returns the position at which that ends."""
        path = tree.match(self.tokens)
        known = len(path.handles)
        if not known:
            return 0
        usable = self.pool.alive(path.handles)
        if not usable.all():  # what stands behind a dead row is out of this matcher's reach
            self.reasons[int(usable.argmin()) : known] = Reason.EVICTED
        if not allow_shifted:
            self.reasons[:known][usable & (path.contributions > 0)] = Reason.GATE
            usable &= path.contributions == 0
        too_deep = usable & (path.contributions > self.limit)
        self.reasons[:known][too_deep] = Reason.DEPTH
        usable &= ~too_deep
        end = known if usable.all() else int(usable.argmin())
        whole = min(end, len(self.tokens) - 1) // block * block
        self.reasons[whole:end] = Reason.TOO_SHORT
        here = slice(0, whole)
        self.rows[here] = handle_rows(path.handles[here])
        self.contributions[here] = path.contributions[here]
        self.classes[here] = np.where(path.contributions[here] == 0, TokenClass.EXACT, TokenClass.SHIFTED)
        self.donors[here] = path.owner
        return whole

    def serve_content(self, index: ContentIndex, min_run: int) -> None:
        """Let `index` claim tokens that nobody serves yet (the last token is not for sale)."""
        stop = len(self.tokens) - 1
        unserved = np.flatnonzero(self.rows[:stop] < 0)
        if not len(unserved):
            return
        windows = index.probe(self.tokens)
        starts, lengths, keys = windows.starts.tolist(), windows.lengths.tolist(), windows.keys.tolist()
        grows, floor, k = index.family.grows, int(unserved[0]), 0
        while k < len(starts):
            start, length = starts[k], lengths[k]
            places = index.places(keys[k])
            if not places or start + length <= floor or start >= stop or (grows and start < floor):
                k += 1
                continue
            piece = self._best(places, start, length, floor, stop, grows, min_run)
            if piece is None:
                k += 1
                continue
            last = k if grows else self._last_of_chain(index, piece, starts, lengths, keys, k)
            covered = starts[last] + lengths[last]
            if last > k:
                piece = self._piece(
                    piece.donor, start, piece.donor_start + start - piece.start, covered - start, floor, stop
                )
            claimed = self._claim(piece, start, covered)
            if grows:
                floor = claimed or floor
                k = bisect_left(starts, claimed or covered, lo=k + 1)
            else:
                k = last + 1

    def _last_of_chain(
        self, index: ContentIndex, piece: _Piece, starts: list[int], lengths: list[int], keys: list[int], first: int
    ) -> int:
        """Windows behind `first` that only this donor has, one behind the other just as here, are one piece with it."""
        donor, offset, start = piece.donor, piece.donor_start - piece.start, starts[first]
        agree = start + agreeing(self.tokens[start:], donor.tokens[start + offset :])
        last, end = first, start + lengths[first]
        while last + 1 < len(starts) and starts[last + 1] == end and end + lengths[last + 1] <= agree:
            if index.places(keys[last + 1]) != [(donor, end + offset)]:
                break
            last += 1
            end += lengths[last]
        return last

    def _best(
        self, places: list[tuple[Donor, int]], start: int, length: int, floor: int, stop: int, grows: bool, min_run: int
    ) -> _Piece | None:
        """The donor to take: one that yields a long enough run first, then least depth, then longest shared left
        context."""
        window = self.tokens[start : start + length]
        verified = [
            (donor, position)
            for donor, position in places
            if np.array_equal(window, donor.tokens[position : position + length])
        ]
        best, best_rank = None, None
        for donor, position in verified:
            piece = self._piece(donor, start, position, length, floor, stop, grows=grows)
            if len(verified) == 1:
                return piece
            yields = piece.stop - piece.start
            if piece.problems is not None:
                usable = piece.problems == 0
                touching = usable[max(start - piece.start, 0) : start + length - piece.start].any()
                yields = int(np.count_nonzero(usable)) if touching else 0
            depth = int(self.pool.depth[handle_rows(donor.handles[position : position + length])].max())
            rank = (min(yields, min_run), -depth, piece.shared_left, piece.stop - piece.start)
            if best_rank is None or rank > best_rank:
                best, best_rank = piece, rank
        return best

    def _piece(
        self, donor: Donor, start: int, position: int, length: int, floor: int, stop: int, *, grows: bool = False
    ) -> _Piece:
        left = min(start, position)
        shared_left = agreeing(self.tokens[start - left : start][::-1], donor.tokens[position - left : position][::-1])
        first, end = max(start, floor), start + length
        if grows:
            first = max(start - shared_left, floor)
            end += agreeing(self.tokens[end:], donor.tokens[position + length :])
        end = min(end, stop)
        donor_start = position + first - start
        handles = donor.handles[donor_start : donor_start + end - first]
        rows = handle_rows(handles)
        alive, shallow, inside = (
            self.pool.alive(handles),
            self.pool.depth[rows] < self.limit,
            self.pool.base[rows] >= CARVE_OUT,
        )
        problems = None
        if first < CARVE_OUT or not (alive.all() and shallow.all() and inside.all()):
            problems = np.zeros(end - first, np.uint8)
            problems[~shallow] = _DEPTH
            problems[~inside] = _CARVE_OUT
            problems[: max(0, CARVE_OUT - first)] = _CARVE_OUT
            problems[~alive] = _EVICTED
        return _Piece(donor, first, end, donor_start, rows, problems, shared_left)

    def _claim(self, piece: _Piece, start: int, stop: int) -> int:
        """Serve the usable stretches of a piece that touch `start:stop`; returns their end, 0 if there is none."""
        wanted = self.rows[piece.start : piece.stop] < 0
        if piece.problems is not None:
            blocked = np.flatnonzero(wanted & (piece.problems != 0))
            self.reasons[blocked + piece.start] = piece.problems[blocked]
            wanted &= piece.problems == 0
        elif wanted.all():
            self._serve(piece, piece.start, piece.stop)
            return piece.stop
        end = 0
        for a, b in _stretches(wanted):
            a, b = a + piece.start, b + piece.start
            if b > start and a < stop:
                self._serve(piece, a, b)
                end = b
        return end

    def _serve(self, piece: _Piece, a: int, b: int) -> None:
        rows = piece.rows[a - piece.start : b - piece.start]
        self.rows[a:b] = rows
        self.contributions[a:b] = self.pool.depth[rows] + 1
        self.classes[a:b] = _SHIFTED
        self.donors[a:b] = piece.donor.id
        self.offsets[a:b] = piece.donor_start - piece.start
        self.by_content[a:b] = True

    def content_runs(self) -> list[tuple[int, int]]:
        return [(a, b) for a, b in self._runs() if self.by_content[a]]

    def _runs(self) -> list[tuple[int, int]]:
        """Stretches of one class, one donor and one offset to its positions."""
        served = self.rows >= 0
        breaks = np.flatnonzero(
            (served[1:] != served[:-1])
            | (self.offsets[1:] != self.offsets[:-1])
            | (self.donors[1:] != self.donors[:-1])
            | (self.classes[1:] != self.classes[:-1])
            | (self.by_content[1:] != self.by_content[:-1])
        )
        edges = [0, *(breaks + 1).tolist(), len(served)]
        return [(a, b) for a, b in pairwise(edges) if served[a]]

    def withdraw(self, which: slice | Bool[np.ndarray, "T"], reason: Reason) -> None:
        """Recompute these tokens after all."""
        self.rows[which] = -1
        self.contributions[which] = 0
        self.classes[which] = TokenClass.RECOMPUTED
        self.donors[which] = -1
        self.by_content[which] = False
        self.offsets[which] = 0
        self.reasons[which] = reason

    def finish(self, namespace: Namespace) -> Plan:
        served = self.rows >= 0
        at = np.where(served, self.rows, 0)
        behind = np.maximum.accumulate(self.contributions)
        context = np.concatenate([np.zeros(1, np.uint8), behind[:-1]])
        reasons = np.where(served, np.uint8(Reason.SERVED), self.reasons)
        if not served[-1]:
            reasons[-1] = Reason.LAST_TOKEN
        positions = np.arange(len(self.tokens), dtype=np.int32)
        return Plan(
            tokens=self.tokens,
            rows=self.rows.astype(np.int32),
            shifts=np.where(served, positions - self.pool.base[at], 0).astype(np.int32),
            classes=self.classes,
            reasons=reasons,
            depths=np.where(served, self.contributions, context),
            runs=tuple(
                Run(
                    target=a,
                    length=b - a,
                    token_class=TokenClass(int(self.classes[a])),
                    donor=int(self.donors[a]),
                    donor_start=a + int(self.offsets[a]),
                )
                for a, b in self._runs()
            ),
            namespace=namespace,
            stamp=self.pool.clock,
        )


def make_plan(
    tokens: Int32[np.ndarray, "T"],
    namespace: Namespace,
    own: Partition | None,
    siblings: Sequence[Partition],
    pool: PagePool,
    config: CacheConfig,
    *,
    exact_only: bool,
    max_depth: int | None,
    shift_refused: bool,
) -> Plan:
    """Plan one prompt against partition `own`; `siblings` (other namespaces of the same salt) only explain misses."""
    draft = Draft(tokens, pool, max_depth)
    if own is not None and config.policy != "none":
        allow_shifted = not (exact_only or shift_refused)
        block = PAGE_SIZE if config.policy == "block-prefix" else 1
        draft.serve_prefix(own.tree, allow_shifted=allow_shifted, block=block)
        for index in own.indexes:
            draft.serve_content(index, config.min_run)
        for a, b in draft.content_runs():
            if b - a < config.min_run:
                draft.withdraw(slice(a, b), Reason.TOO_SHORT)
        if not allow_shifted:
            draft.withdraw(draft.by_content.copy(), Reason.GATE)
        if config.seam:
            for a, b in draft.content_runs():
                draft.withdraw(slice(a, min(b, a + config.seam)), Reason.SEAM)
    _explain_by_siblings(draft, siblings, config)
    return draft.finish(namespace)


def _explain_by_siblings(draft: Draft, siblings: Sequence[Partition], config: CacheConfig) -> None:
    for sibling in siblings:
        if not ((draft.rows < 0) & (draft.reasons == Reason.NOVEL))[:-1].any():
            return
        elsewhere = Draft(draft.tokens, draft.pool, None)
        elsewhere.serve_prefix(sibling.tree, allow_shifted=True, block=1)
        for index in sibling.indexes:
            elsewhere.serve_content(index, config.min_run)
        found = (elsewhere.rows >= 0) & (draft.rows < 0) & (draft.reasons == Reason.NOVEL)
        draft.reasons[found] = Reason.NAMESPACE
