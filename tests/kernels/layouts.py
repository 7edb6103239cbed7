"""Random pools, layouts and the float64 attention that the ops are held to. Shares no code with the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import PAGE_SIZE, FragmentTable, LatentPool, StreamSpec, fragments_of, pack_fragments

R, D, LAYERS, PAGES = 32, 16, 2, 96
LAYER = 1
SCALE = (R + D) ** -0.5
INV_FREQ = 10000.0 ** (-2.0 * np.arange(D // 2) / D)
BUCKET = (128, 128)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Some sequences, each given as pool row and shift of every position."""

    rows: list[np.ndarray]
    shifts: list[np.ndarray]
    pool: LatentPool

    @property
    def table(self) -> FragmentTable:
        return self.table_of(range(len(self.rows)))

    def table_of(self, members: Any) -> FragmentTable:
        return pack_fragments([fragments_of(self.rows[b], self.shifts[b]) for b in members], INV_FREQ, BUCKET)

    def keys(self, b: int) -> tuple[np.ndarray, np.ndarray]:
        """`(c_kv [S, R], k_r [S, D] at its target position)` of one sequence in float64."""
        page, slot = self.rows[b] // PAGE_SIZE, self.rows[b] % PAGE_SIZE
        c_kv, k_r = (np.asarray(self.pool[n]).astype(np.float64)[LAYER, page, slot] for n in ("c_kv", "k_r"))
        return c_kv, turned(k_r, self.shifts[b])


def turned(k_r: np.ndarray, shift: Any, inv_freq: np.ndarray | None = None) -> np.ndarray:
    angle = np.asarray(shift, np.float64)[..., None] * (INV_FREQ if inv_freq is None else inv_freq)
    first, second = np.split(k_r.astype(np.float64), 2, axis=-1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def random_layout(lengths: tuple[int, ...], *, seed: int, dtype: Any = jnp.float32, max_shift: int = 160_000) -> Layout:
    """Sequences cut into segments of 1 to 90 rows that start anywhere in shuffled pages, each with one of few shifts of
    either sign. Every row that no sequence uses is NaN, in all layers; so is the other layer and the scratch page."""
    rng = np.random.default_rng(seed)
    shifts_in_use = np.r_[0, rng.integers(-max_shift, max_shift + 1, 20), -max_shift, max_shift]
    pages = rng.permutation(np.arange(1, PAGES - 1))
    rows, shifts = [], []
    for length in lengths:
        own_rows: list[np.ndarray] = [np.zeros(0, int)]
        own_shifts: list[np.ndarray] = [np.zeros(0, int)]
        left = length
        while left:
            size = min(left, int(rng.integers(1, 91)))
            start = int(rng.choice(pages)) * PAGE_SIZE + int(rng.integers(0, PAGE_SIZE))
            own_rows.append(start + np.arange(size))
            own_shifts.append(np.full(size, rng.choice(shifts_in_use)))
            left -= size
        rows.append(np.minimum(np.concatenate(own_rows), PAGES * PAGE_SIZE - 1).astype(np.int32))
        shifts.append(np.concatenate(own_shifts).astype(np.int32))
    return Layout(rows=rows, shifts=shifts, pool=poisoned_pool(np.concatenate(rows), seed=seed, dtype=dtype))


def poisoned_pool(used: np.ndarray, *, seed: int, dtype: Any = jnp.float32) -> LatentPool:
    """Random numbers in the used rows of one layer, NaN everywhere else."""
    rng = np.random.default_rng(seed + 1000)
    specs = (
        StreamSpec(name="c_kv", width=R, dtype=jnp.dtype(dtype)),
        StreamSpec(name="k_r", width=D, dtype=jnp.dtype(dtype), rotary=(0, D)),
    )
    rows = {}
    for spec in specs:
        values = np.full((LAYERS, PAGES * PAGE_SIZE, spec.width), np.nan, np.float32)
        used = np.unique(used)
        values[LAYER, used] = rng.standard_normal((len(used), spec.width))
        rows[spec.name] = jnp.asarray(values.reshape(LAYERS, PAGES, PAGE_SIZE, spec.width))
    return LatentPool.from_rows(specs, **rows)


def exact_attention(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float = SCALE
) -> tuple[np.ndarray, np.ndarray]:
    """One query `[H, n]` over `keys [S, n]` (or `[H, S, n]`): output `[H, m]` and natural-log sum of weights `[H]`."""
    if not values.shape[-2]:
        return np.zeros((len(q), values.shape[-1])), np.full(len(q), -np.inf)
    scores = (q[:, None].astype(np.float64) * keys).sum(-1) * scale
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    values = np.broadcast_to(values, (len(q), *values.shape[-2:]))
    return ((weights / total)[:, None] @ values)[:, 0], (top + np.log(total))[:, 0]


def double(*arrays: jax.Array) -> np.ndarray:
    """Joined along the last axis in float64."""
    return np.concatenate([np.asarray(a).astype(np.float64) for a in arrays], axis=-1)


def expand(
    c_kv: np.ndarray, k_r: np.ndarray, key_up: np.ndarray, value_up: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Keys `[H, S, N+D]` and values `[H, S, W]` of each head, from latents `[S, R]` and rotary keys `[S, D]`."""
    up = np.einsum("sr,hnr->hsn", c_kv, key_up)
    keys = np.concatenate([up, np.broadcast_to(k_r, (len(up), *k_r.shape))], axis=-1)
    return keys, np.einsum("sr,hrw->hsw", c_kv, value_up)
