"""How far float32 results may lie from exact ones: derived once, here, from the format and the sizes.

Statistical rounding model (Higham and Mary, SIAM J. Sci. Comput. 41, 2019): the n roundings of a length-n reduction are
independent and each at most `u`, so the result is off by about `u · sqrt(n)` of its size, and k such steps in a row by
`u · sqrt(n · k)`. `SIGMAS` turns that standard deviation into a bound on the largest of up to 1e7 values: a normal
variable leaves ±6σ once in 5e8. What softmax adds: a weight is off, relative to its size, by the absolute error of its
score.
"""

from __future__ import annotations

import numpy as np

from irminsul_jax.config import ModelConfig

U32 = 2.0**-24
"""Largest relative error of one rounding to float32."""

U_BF16 = 2.0**-9
"""Largest relative error of one rounding to bfloat16."""

SIGMAS = 6.0

STAGES_PER_LAYER = 12
"""Rounded steps in a row in one layer: norm, query down, norm, query up, absorb, score, weight, output of the latent,
value up, output projection; then norm, gate/up, activation and down run beside the residual, so two more count."""


def forward_tolerance(config: ModelConfig, num_keys: int, values: np.ndarray) -> float:
    """Bound on |Δ| of logits (or hidden states, or cache rows) of a float32 forward pass. `values` are the exact ones: the
    error is relative to their root mean square."""
    c = config
    widest = max(c.hidden_dim, c.mlp_dim, c.kv_lora_rank, num_keys)
    steps = STAGES_PER_LAYER * c.num_layers + 2  # final norm and output matrix
    return SIGMAS * U32 * float(np.sqrt(widest * steps)) * rms(values)


def attention_tolerance(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, *, unit: float = U32) -> float:
    """Bound on |Δ| of one attention op, in the output and in the log-sum-exp alike. `q [.., n]` and `k [.., n]` are the
    concatenated parts whose products make a score, `v` the values. `unit` is the rounding of the turned keys and of the
    weights (float32 or bfloat16), each of which happens once; sums are always float32."""
    width = q.shape[-1]
    score = scale * float(np.sqrt(width)) * rms(q) * rms(k)  # standard deviation of a score: a sum of `width` products
    in_scores = (unit + U32 * np.sqrt(width)) * max(score, 1.0)
    in_weights = unit + U32 * np.sqrt(max(len(v), 1))
    return SIGMAS * float(in_scores + in_weights) * max(rms(v), 1.0)


def rms(x: np.ndarray) -> float:
    x = np.asarray(x, np.float64)
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0
