"""What it costs to store latents in float8 with one scale per row, against bfloat16 and float64; for `rotation.py`.

Regime of the attention cases: `mla_decode` at DeepSeek's widths (512 + 64), 16 heads, sequences of 1,024 normal keys, both
parts of a score alike in size. Every page of a turned sequence has a shift of its own; its keys are stored at the base
position and turned as they load. Scores have the standard deviation 1 (random softmax: the weight is spread over all
keys) or 8 (peaked: few keys have most of it). The float64 result starts from the keys before any rounding; queries are
bfloat16 there too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from irminsul_jax.config import RopeConfig
from irminsul_jax.rope import inv_freq
from pallas_kernels import PAGE_SIZE, LatentPool, StreamSpec, fragments_of, mla_decode, pack_fragments

RANK, ROTARY, HEADS, SEQUENCES, KEYS = 512, 64, 16, 8, 1024
SCORE_DEVIATION = {"random": 1.0, "peaked": 8.0}
OUTLIERS, OUTLIER_SIZE = 4, 100.0
DTYPES = {"bfloat16": jnp.dtype(jnp.bfloat16), "float8_e4m3fn": jnp.dtype(jnp.float8_e4m3fn)}


def latent_cases() -> list[dict[str, Any]]:
    """Relative L2 error of stored latents: normal rows, and rows in which a few channels are a hundred times larger (as a
    whole, and in the channels beside those: whether the shared scale starves them)."""
    generator = np.random.default_rng(0)
    normal = generator.standard_normal((KEYS, RANK))
    outlying = normal.copy()
    outlying[:, :OUTLIERS] *= OUTLIER_SIZE
    rest = np.s_[:, OUTLIERS:]
    cases = []
    for name, dtype in DTYPES.items():
        kept = _stored(outlying, dtype)
        errors = {
            "normal rows": _relative(_stored(normal, dtype), normal),
            f"rows with {OUTLIERS} outliers": _relative(kept, outlying),
            f"channels beside the outliers (×{OUTLIER_SIZE:.0f})": _relative(kept[rest], outlying[rest]),
        }
        cases += [{"rows": rows, "dtype": name, "error": error} for rows, error in errors.items()]
    return cases


def attention_cases(shifts: Sequence[int]) -> list[dict[str, Any]]:
    """Relative L2 error of the output of `mla_decode` for both dtypes, softmaxes, and keys turned or not."""
    generator = np.random.default_rng(1)
    frequencies = inv_freq(RopeConfig(), ROTARY)
    c_kv = generator.standard_normal((SEQUENCES * KEYS, RANK))
    bare = generator.standard_normal((SEQUENCES * KEYS, ROTARY))
    position = np.tile(np.arange(KEYS), SEQUENCES)
    both_signs = np.array([sign * shift for shift in shifts for sign in (1, -1)])
    page_shift = np.resize(both_signs, SEQUENCES * KEYS // PAGE_SIZE)
    targets = _rotated(bare, position, frequencies)
    unit = generator.standard_normal((SEQUENCES, HEADS, RANK)) / RANK**0.5
    unit_rope = generator.standard_normal((SEQUENCES, HEADS, ROTARY)) / ROTARY**0.5
    cases = []
    for softmax, deviation in SCORE_DEVIATION.items():
        q_latent, q_rope = (_bfloat16(q * deviation / 2**0.5) for q in (unit, unit_rope))
        exact, weights = _exact(q_latent, q_rope, c_kv, targets)
        for name, dtype in DTYPES.items():
            for turned in (False, True):
                shift = np.repeat(page_shift, PAGE_SIZE) * turned
                # Base positions may be negative here: a rotation is one all the same.
                keys = _rotated(bare, position - shift, frequencies)
                out = _decode(q_latent, q_rope, _pool(c_kv, keys, dtype), shift, frequencies)
                cases.append(
                    {
                        "softmax": softmax,
                        "largest_weight": float(f"{weights.max(-1).mean():.2g}"),
                        "dtype": name,
                        "turned": turned,
                        "error": _relative(out, exact),
                    }
                )
    return cases


def _specs(latents: jnp.dtype) -> tuple[StreamSpec, ...]:
    return (
        StreamSpec(name="c_kv", width=RANK, dtype=latents),
        StreamSpec(name="k_r", width=ROTARY, dtype=jnp.dtype(jnp.bfloat16), rotary=(0, ROTARY)),
    )


def _pool(c_kv: np.ndarray, k_r: np.ndarray, latents: jnp.dtype) -> LatentPool:
    """A pool with the given rows from page 1 on."""

    def paged(rows: np.ndarray) -> jax.Array:
        pages = rows.reshape(1, -1, PAGE_SIZE, rows.shape[-1])
        return jnp.asarray(np.pad(pages, [(0, 0), (1, 0), (0, 0), (0, 0)]), jnp.float32)

    return LatentPool.from_rows(_specs(latents), c_kv=paged(c_kv), k_r=paged(k_r))


def _stored(c_kv: np.ndarray, dtype: jnp.dtype) -> np.ndarray:
    """The rows as a pool returns them."""
    pool = _pool(c_kv, np.zeros((len(c_kv), ROTARY)), dtype)
    row = np.arange(PAGE_SIZE, PAGE_SIZE + len(c_kv))
    return np.asarray(pool.read("c_kv", 0, jnp.asarray(row // PAGE_SIZE), jnp.asarray(row % PAGE_SIZE)), np.float64)


def _decode(
    q_latent: np.ndarray, q_rope: np.ndarray, pool: LatentPool, shift: np.ndarray, frequencies: np.ndarray
) -> np.ndarray:
    rows = np.arange(PAGE_SIZE, PAGE_SIZE + len(shift), dtype=np.int32).reshape(SEQUENCES, KEYS)
    shifts = shift.astype(np.int32).reshape(SEQUENCES, KEYS)
    table = pack_fragments([fragments_of(*one) for one in zip(rows, shifts, strict=True)], frequencies)
    queries = (jnp.asarray(q.astype(ml_dtypes.bfloat16)) for q in (q_latent, q_rope))
    out, _ = mla_decode(*queries, pool, 0, table, scale=1.0)
    return np.asarray(out, np.float64)


def _exact(
    q_latent: np.ndarray, q_rope: np.ndarray, c_kv: np.ndarray, k_r: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Output and weights in float64."""
    c_kv, k_r = (rows.reshape(SEQUENCES, KEYS, -1) for rows in (c_kv, k_r))
    scores = q_latent @ c_kv.swapaxes(1, 2) + q_rope @ k_r.swapaxes(1, 2)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights @ c_kv, weights


def _rotated(x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    angles = positions.astype(np.float64)[:, None] * frequencies
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _bfloat16(x: np.ndarray) -> np.ndarray:
    """Rounded, as float64."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def _relative(x: np.ndarray, exact: np.ndarray) -> float:
    return float(f"{np.linalg.norm(x - exact) / np.linalg.norm(exact):.2e}")
