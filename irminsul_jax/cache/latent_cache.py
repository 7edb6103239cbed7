"""`LatentCache`: plan, reserve, publish, release. The only part of the package that changes tree, index and pool.

One thread owns a cache. A request goes `plan` → `reserve` → (prefill, decode) → `publish` → `release`; a plan that is
dropped costs nothing, a reservation must be released once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Bool, Int, Int32, Int64, UInt8

from irminsul_jax.cache.config import CacheConfig, Namespace
from irminsul_jax.cache.content import FAMILIES, ContentIndex, Donor
from irminsul_jax.cache.hashing import Fingerprint
from irminsul_jax.cache.plan import PAGE_SIZE, Plan, Reason, TokenClass
from irminsul_jax.cache.planner import Partition, make_plan
from irminsul_jax.cache.pool import PagePool
from irminsul_jax.cache.radix import RadixTree
from irminsul_jax.errors import CacheError, RequestError


@dataclass(kw_only=True, eq=False)
class Reservation:
    """What one admitted request holds. `rows` and `shifts` cover the prompt and all tokens it may generate."""

    plan: Plan
    """The plan that is in force; not the one handed in where donors had to be given up for room."""
    namespace: Namespace
    rows: Int32[np.ndarray, "N"]
    """Pool row of every position, served or own. Own rows follow each other in the own pages, in order of position."""
    shifts: Int32[np.ndarray, "N"]
    own_pages: Int32[np.ndarray, "P"]
    held_pages: Int32[np.ndarray, "Q"] = field(repr=False)
    depths: UInt8[np.ndarray, "N"] = field(repr=False)
    """As in `Plan.depths`, over all positions."""
    is_own: Bool[np.ndarray, "N"] = field(repr=False)
    released: bool = False
    donor_id: int = -1
    published: Int32[np.ndarray, "M"] = field(default_factory=lambda: np.zeros(0, np.int32), repr=False)


class LatentCache:
    """Host side of the latent pool.

    `num_pages` is the size of the device pool, scratch page 0 included; None takes it from `config.capacity_tokens`, or
    grows without bound if that is None too (planning only). `fingerprint` maps the hashes of the content index to those
    used (tests force collisions with it); the default is the identity.
    """

    def __init__(self, config: CacheConfig, *, num_pages: int | None, fingerprint: Fingerprint | None = None):
        if num_pages is None and config.capacity_tokens is not None:
            num_pages = -(-config.capacity_tokens // PAGE_SIZE) + 1
        self.config = config
        self._fingerprint = fingerprint
        self._pool = PagePool(num_pages)
        self._next_donor = 0
        self._evicted_pages = 0
        self._clear()

    def _clear(self) -> None:
        self._partitions: dict[Namespace, Partition] = {}
        self._donors: dict[int, tuple[Namespace, Donor]] = {}
        self._graveyard: deque[int] = deque()
        self._graveyard_tokens = 0
        self._live: set[Reservation] = set()
        self._evicted_since_prune = 0

    def plan(
        self,
        tokens: Int[np.ndarray, "T"],
        namespace: Namespace,
        *,
        exact_only: bool | None = None,
        max_depth: int | None = None,
        shift_refusal: str | None = None,
    ) -> Plan:
        """How each of T ≥ 1 prompt tokens would be obtained now. Takes no locks and changes nothing.

        `exact_only` and `max_depth` override the configuration where given. `shift_refusal` is the reason why this
        model must not be served shifted rows (None: it may be); tokens that content would have served then count as
        `Reason.GATE`, as they do under `exact_only`. Raises `RequestError` for an empty prompt or ids that are no
        int32.
        """
        own = self._partitions.get(namespace)
        siblings = [
            partition
            for other, partition in self._partitions.items()
            if other.salt == namespace.salt and other != namespace
        ]
        if exact_only is None:
            exact_only = self.config.exact_only
        return make_plan(
            _as_tokens(tokens),
            namespace,
            own,
            siblings,
            self._pool,
            self.config,
            exact_only=exact_only,
            max_depth=self.config.max_depth if max_depth is None else max_depth,
            shift_refused=shift_refusal is not None,
        )

    def reserve(self, plan: Plan, namespace: Namespace, *, max_new_tokens: int = 0) -> Reservation | None:
        """Hold the pages that `plan` reads and hand out pages for the tokens to compute, evicting unheld ones.

        None, with nothing changed, if it does not fit now. Where donors and own pages together exceed the whole
        pool, donors are given up (`Reason.EVICTED` in the reservation's own plan). Raises `RequestError` if it can
        never fit, `CacheError` if rows of the plan were evicted since it was made (plan again).
        """
        if max_new_tokens < 0:
            raise RequestError(f"max_new_tokens={max_new_tokens} must not be negative")
        if plan.namespace != namespace:
            raise CacheError("this plan was made in another namespace; plan again in the one to reserve in")
        served = plan.rows >= 0
        if not self._still_valid(plan.rows[served], plan.stamp):
            raise CacheError("rows of this plan were evicted since it was made; plan again before reserving")
        total = len(plan.tokens) + max_new_tokens
        for given_up in ((), (TokenClass.SHIFTED,), (TokenClass.SHIFTED, TokenClass.EXACT)):
            current = _recompute_instead(plan, given_up) if given_up else plan
            reading = _distinct_pages(current.rows)
            num_own = -(-(total - int(np.count_nonzero(current.rows >= 0))) // PAGE_SIZE)
            if not self._pool.bounded or num_own + len(reading) <= self._pool.total:
                return self._hold(current, namespace, reading, num_own, total)
        raise RequestError(
            f"the request needs {num_own} pages ({total} tokens with max_new_tokens={max_new_tokens}) but the whole "
            f"latent pool has {self._pool.total} ({self._pool.total * PAGE_SIZE} tokens); shorten it or enlarge the cache"
        )

    def _still_valid(self, rows: Int32[np.ndarray, "N"], stamp: int) -> bool:
        pages = rows // PAGE_SIZE
        born = self._pool.born[pages]
        return bool(np.all((born > 0) & (born <= stamp)))

    def _hold(
        self, plan: Plan, namespace: Namespace, reading: np.ndarray, num_own: int, total: int
    ) -> Reservation | None:
        taken = self._pool.take(num_own, reading)
        if taken is None:
            return None
        own, owners_of_evicted = taken
        self._forget(owners_of_evicted)
        prompt = len(plan.tokens)
        rows = np.full(total, -1, np.int32)
        rows[:prompt] = plan.rows
        new = rows < 0
        own_rows = (own[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE, dtype=np.int32)).reshape(-1)
        rows[new] = own_rows[: np.count_nonzero(new)]
        shifts = np.zeros(total, np.int32)
        shifts[:prompt] = plan.shifts
        depths = np.full(total, plan.depths.max(), np.uint8)
        depths[:prompt] = plan.depths
        reservation = Reservation(
            plan=plan,
            namespace=namespace,
            rows=rows,
            shifts=shifts,
            own_pages=own,
            held_pages=np.concatenate([reading, own]),
            depths=depths,
            is_own=new,
        )
        self._live.add(reservation)
        return reservation

    def publish(self, reservation: Reservation, tokens: Int[np.ndarray, "T"]) -> None:
        """Make the rows of `tokens` findable: the prompt (or its beginning), or prompt and generated tokens.

        All their rows must be computed. May be called again with a longer sequence. Rows that another request published meanwhile for the same path
        are not published twice. Raises `CacheError` if the tokens are not those of the reservation, or if it is not
        in force.
        """
        if reservation not in self._live:
            raise CacheError("publish: this reservation was released, or the cache was reset; reserve again")
        tokens = _as_tokens(tokens)
        expected = max(reservation.plan.tokens, reservation.published, key=len)
        agree = min(len(tokens), len(expected))
        if not np.array_equal(tokens[:agree], expected[:agree]) or not agree <= len(tokens) <= len(reservation.rows):
            raise CacheError(
                f"publish: {len(tokens)} tokens do not continue the {len(expected)} of this reservation "
                f"(room for {len(reservation.rows)}); nothing was published"
            )
        known = len(reservation.published)
        if len(tokens) <= known or self.config.policy == "none":
            return
        if reservation.donor_id < 0:
            reservation.donor_id = self._next_donor
            self._next_donor += 1
        reservation.published = tokens
        pool, rows = self._pool, reservation.rows[: len(tokens)]
        is_own, depths = reservation.is_own[: len(tokens)], reservation.depths[: len(tokens)]
        new = is_own.copy()
        new[:known] = False
        positions = np.flatnonzero(new)
        pool.describe(rows[positions], positions, depths[positions])
        handles = pool.handles(rows)
        partition = self._partition(reservation.namespace)
        standing = partition.tree.insert(tokens, handles, depths, reservation.donor_id, pool.alive)
        own = is_own & (standing == handles)
        pages = _distinct_pages(rows[own])
        pool.published[pages] = True
        if partition.indexes and len(pages):
            self._register(
                reservation, partition, Donor(reservation.donor_id, tokens, standing, own, len(pages)), known
            )
            pool.owner[pages] = reservation.donor_id

    def _partition(self, namespace: Namespace) -> Partition:
        if namespace not in self._partitions:
            families = FAMILIES[self.config.policy]
            indexes = tuple(ContentIndex(family, self._fingerprint) for family in families)
            self._partitions[namespace] = Partition(RadixTree(), indexes)
        return self._partitions[namespace]

    def _register(self, reservation: Reservation, partition: Partition, donor: Donor, known: int) -> None:
        _, existing = self._donors.setdefault(donor.id, (reservation.namespace, donor))
        existing.tokens, existing.handles, existing.own = donor.tokens, donor.handles, donor.own
        existing.live_pages = donor.live_pages
        for index in partition.indexes:
            index.add(existing, known)

    def release(self, reservation: Reservation) -> None:
        """Give back what `reserve` held; unpublished own pages become free, published ones evictable.

        Raises `CacheError` on a second release, which changes nothing. Reservations from before a `reset` may be
        released too.
        """
        if reservation.released:
            raise CacheError("release: this reservation was released before; nothing was changed")
        if reservation in self._live:
            self._pool.drop(reservation.held_pages)
            self._live.remove(reservation)
        reservation.released = True

    def reset(self) -> None:
        """Forget everything: pool, tree and index together, and all reservations. For use after a donated call that
        failed."""
        self._pool.reset()
        self._clear()

    def _forget(self, owners: Int64[np.ndarray, "P"]) -> None:
        """Note one evicted page of each of these donors (with repetition). A donor without rows stays for a while,
        so that misses can be explained."""
        if not len(owners):
            return
        self._evicted_pages += len(owners)
        for owner in owners.tolist():
            if owner not in self._donors:
                continue
            _, donor = self._donors[owner]
            donor.live_pages -= 1
            if donor.live_pages == 0:
                self._graveyard.append(owner)
                self._graveyard_tokens += len(donor.tokens)
        while self._graveyard_tokens > self._pool.total * PAGE_SIZE:
            namespace, donor = self._donors.pop(self._graveyard.popleft())
            self._graveyard_tokens -= len(donor.tokens)
            for index in self._partitions[namespace].indexes:
                index.discard(donor)
        self._evicted_since_prune += len(owners)
        if self._evicted_since_prune >= self._pool.total:
            self._prune()

    def _prune(self) -> None:
        """Once per turn-over of the pool: drop dead branches and namespaces without content."""
        self._evicted_since_prune = 0
        inhabited = {namespace for namespace, _ in self._donors.values()}
        for namespace, partition in list(self._partitions.items()):
            partition.tree.prune(self._pool.alive)
            if not len(partition.tree) and namespace not in inhabited:
                del self._partitions[namespace]

    @property
    def free_pages(self) -> int:
        return self._pool.free

    @property
    def evictable_pages(self) -> int:
        return self._pool.evictable

    @property
    def held_pages(self) -> int:
        return self._pool.held

    @property
    def total_pages(self) -> int:
        """Pages that can be handed out (without scratch page 0); always held + evictable + free."""
        return self._pool.total

    def stats(self) -> dict[str, int]:
        """Counts for reports and monitoring."""
        return {
            "total_pages": self.total_pages,
            "held_pages": self.held_pages,
            "evictable_pages": self.evictable_pages,
            "free_pages": self.free_pages,
            "evicted_pages": self._evicted_pages,
            "reservations": len(self._live),
            "namespaces": len(self._partitions),
            "donors": len(self._donors),
            "tree_tokens": sum(len(p.tree) for p in self._partitions.values()),
            "index_entries": sum(len(index) for p in self._partitions.values() for index in p.indexes),
        }


def _as_tokens(tokens: Int[np.ndarray, "T"]) -> Int32[np.ndarray, "T"]:
    """A private int32 copy, so that a caller's later writes cannot change what was published."""
    if tokens.ndim != 1 or not len(tokens):
        raise RequestError(f"a prompt must be a non-empty one-dimensional array of token ids, not shape {tokens.shape}")
    if tokens.min() < 0 or tokens.max() > np.iinfo(np.int32).max:
        raise RequestError(f"token ids must lie in [0, 2^31), found {int(tokens.min())} to {int(tokens.max())}")
    return tokens.astype(np.int32)


def _distinct_pages(rows: Int32[np.ndarray, "N"]) -> Int32[np.ndarray, "P"]:
    pages = rows[rows >= 0] // PAGE_SIZE
    changes = np.flatnonzero(np.diff(pages, prepend=np.int32(-1)))
    return np.unique(pages[changes])


def _recompute_instead(plan: Plan, classes: tuple[TokenClass, ...]) -> Plan:
    """The plan without its hits of these classes. At least the shifted ones are among them, so all that is left is
    pure."""
    drop = np.isin(plan.classes, classes)
    return replace(
        plan,
        rows=np.where(drop, np.int32(-1), plan.rows),
        shifts=np.where(drop, np.int32(0), plan.shifts),
        classes=np.where(drop, np.uint8(TokenClass.RECOMPUTED), plan.classes),
        reasons=np.where(drop, np.uint8(Reason.EVICTED), plan.reasons),
        depths=np.zeros_like(plan.depths),
        runs=tuple(run for run in plan.runs if run.token_class not in classes),
    )
