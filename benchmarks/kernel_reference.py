"""Attention in float64 NumPy, and how far a kernel may lie from it. Knows nothing of `pallas_kernels`.

What a result may be off by, element by element: rounding errors are taken as independent (Higham and Mary, SIAM J. Sci.
Comput. 41, 2019), so their variances add. With weights p, values v and `u` the rounding of the dtype of queries and keys,

    score s:   σ_s = scale · |q| |k_s| / √width is the size of a score; e_s² = σ_s² (2u² + n u32²) + (4 u32)² (1 + score²)
               (queries and turned keys are rounded once each, float32 sums over n products, four steps up to the weight)
    output:    Σ_s p_s² (v_s² (e_s² + r u²) + mean(v_s²) (n + S) u32²), r = 1 for the weights, 2 if values are rounded too
    lse:       Σ_s p_s² (e_s² + u²) + (S + lse²) u32²

and the tolerance is `SIGMAS` times the root. Errors average out over many keys, and so the tolerance falls with them: at
4,096 keys in bfloat16 it is still below what one lost key of average weight changes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

U32 = 2.0**-24
"""Largest relative error of one rounding to float32."""

U_BF16 = 2.0**-9
"""Largest relative error of one rounding to bfloat16."""

SIGMAS = 6.0
"""A normal variable leaves ±6σ once in 5e8."""

ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class Expected:
    """`out [T, H, W]` and `lse [T, H]`, and the tolerance of each element."""

    out: np.ndarray
    lse: np.ndarray
    out_tolerance: np.ndarray
    lse_tolerance: np.ndarray


def turned(k_r: np.ndarray, shift: np.ndarray, inv_freq: np.ndarray) -> np.ndarray:
    """Half-split rotation of `[S, D]` by `shift · frequency`."""
    angle = shift.astype(np.float64)[:, None] * inv_freq
    first, second = np.split(k_r, 2, axis=-1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def attention(
    q: np.ndarray,
    visible: np.ndarray,
    keys: np.ndarray,
    latent: np.ndarray,
    *,
    scale: float,
    unit: float,
    score_width: int,
    expansion: np.ndarray | None = None,
) -> Expected:
    """Queries `[T, H, R + D]` of one sequence, in absorbed form; query t sees the first `visible[t]` of `keys [S, R + D]`,
    the values are `latent [S, R]`. `expansion [H, R, W]` turns values into the expanded form's, whose scores are sums of
    `score_width` products."""
    T, H, _ = q.shape
    R = latent.shape[1]
    widened = (score_width - keys.shape[1] + R) / R  # of an expanded key, against the latent's square norm
    key_norm = np.sqrt(np.square(keys[:, :R]).sum(-1) * widened + np.square(keys[:, R:]).sum(-1))
    common = dict(key_norm=key_norm, scale=scale, unit=unit, score_width=score_width)
    if expansion is None:
        rows = q.reshape(T * H, -1), np.repeat(visible, H)
        parts = _attention_of_rows(*rows, keys, latent, roundings=1, sum_length=score_width, **common)
        return Expected(*(x.reshape(T, H, *x.shape[1:]) for x in parts))
    heads = [
        _attention_of_rows(
            q[:, h], visible, keys, latent @ expansion[h], roundings=2, sum_length=score_width + R, **common
        )
        for h in range(H)
    ]
    return Expected(*(np.stack(parts, axis=1) for parts in zip(*heads, strict=True)))


def _attention_of_rows(
    rows: np.ndarray,
    sees: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    *,
    key_norm: np.ndarray,
    scale: float,
    unit: float,
    score_width: int,
    sum_length: int,
    roundings: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The fields of `Expected` for rows `[N, R + D]` over `values [S, W]`."""
    N, n = len(rows), sum_length
    out, lse = np.zeros((N, values.shape[1])), np.full(N, -np.inf)
    out_variance, lse_variance = np.zeros_like(out), np.zeros(N)
    squares = np.square(values.astype(np.float32))  # variances need no more
    mean_square = squares.mean(-1)
    row_norm = np.linalg.norm(rows, axis=-1) * scale
    order = np.argsort(sees, kind="stable")
    order = order[np.searchsorted(sees[order], 1) :]  # queries that see nothing are done
    for begin in range(0, len(order), ROWS_AT_ONCE):
        part = order[begin : begin + ROWS_AT_ONCE]
        S = int(sees[part].max())
        scores = (rows[part] @ keys[:S].T) * scale
        scores[np.arange(S) >= sees[part, None]] = -np.inf
        top = scores.max(-1, keepdims=True)
        p = np.exp(scores - top)
        total = p.sum(-1, keepdims=True)
        p /= total
        lse[part] = (top + np.log(total))[:, 0]
        out[part] = p @ values[:S]
        p, scores = p.astype(np.float32), np.where(p > 0, scores, 0).astype(np.float32)
        p *= p
        sizes = np.outer(row_norm[part], key_norm[:S]).astype(np.float32)
        noise = (2 * unit**2 + n * U32**2) / score_width * sizes**2
        noise += (4 * U32) ** 2 * (1 + scores**2)
        summing = (n + S) * U32**2 * (p @ mean_square[:S])
        out_variance[part] = (p * (noise + roundings * unit**2)) @ squares[:S] + summing[:, None]
        lse_variance[part] = (p * (noise + unit**2)).sum(-1) + U32**2 * (S + lse[part] ** 2)
    return out, lse, SIGMAS * np.sqrt(out_variance), SIGMAS * np.sqrt(lse_variance)


@dataclass(frozen=True)
class Deviation:
    """The largest |Δ| measured in tolerances, with that |Δ| and its tolerance. `inf` in tolerances: wrong whatever the
    tolerance (NaN, or something where nothing was to be seen)."""

    ratio: float
    error: float
    tolerance: float
    what: str


def deviation(out: np.ndarray, lse: np.ndarray, expected: Expected) -> Deviation:
    """Compares output and log-sum-exp; where there are no keys, exactly."""
    if out.shape != expected.out.shape or lse.shape != expected.lse.shape:
        return Deviation(math.inf, math.nan, 0.0, f"shapes {out.shape} and {lse.shape}")
    if out.dtype != np.float32 or lse.dtype != np.float32:
        return Deviation(math.inf, math.nan, 0.0, f"dtypes {out.dtype} and {lse.dtype}")
    empty = np.isneginf(expected.lse)
    if (out[empty] != 0).any() or not np.isneginf(lse[empty]).all():
        return Deviation(math.inf, math.nan, 0.0, "a query without keys did not give output 0 and lse -inf")
    if not np.isfinite(out).all() or not np.isfinite(lse[~empty]).all():
        return Deviation(math.inf, math.nan, 0.0, "NaN or infinity in the result")
    worst = Deviation(0.0, 0.0, 0.0, "nothing to compare")
    if empty.all():
        return worst
    output_error = np.abs(out[~empty].astype(np.float64) - expected.out[~empty])
    lse_error = np.abs(lse[~empty].astype(np.float64) - expected.lse[~empty])
    for what, error, tolerance in (
        ("output", output_error, expected.out_tolerance[~empty]),
        ("lse", lse_error, expected.lse_tolerance[~empty]),
    ):
        ratios = error / np.maximum(tolerance, np.finfo(np.float64).tiny)
        at = np.unravel_index(ratios.argmax(), ratios.shape)
        ratio = float(ratios[at])
        if ratio >= worst.ratio:
            worst = Deviation(ratio, float(error[at]), float(tolerance[at]), what)
    return worst
