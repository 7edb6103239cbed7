"""Where absorbed and expanded attention meet: prefill time of both forms over new tokens and cached keys.

Regime: the whole attention of one layer (query projection to output) at DeepSeek's head sizes (latent 512, rotary 64,
no-position 128, value 128) with 4 heads, float32 in plain XLA, one sequence whose cached rows are read through the
fragment table; the last part of them is shifted, as reuse has it. Medians of interleaved calls. The crossover is where
the two times are equal, log-log interpolated between the measured numbers of new tokens; `pick_form` puts it at
R(N+W)/(2R−N−W) ≈ 171 by counting operations, whatever the number of cached keys.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _common import interleaved_medians, machine, print_result, random_like
from rich.table import Table

from irminsul_jax.config import ModelConfig, RopeConfig
from irminsul_jax.functional import init_pool, pick_form
from irminsul_jax.model.attention import Form, attention
from irminsul_jax.model.layers import rope_at
from irminsul_jax.model.params import AttentionParams, layer_shapes
from irminsul_jax.rope import inv_freq
from pallas_kernels import PAGE_SIZE, FragmentTable, LatentPool, fragments_of, pack_fragments

SHIFT = 45
FORMS: tuple[Form, ...] = ("absorbed", "expanded")

CONFIG = ModelConfig(
    model_type="deepseek_v2",
    vocab_size=64,
    hidden_dim=512,
    num_layers=1,
    num_heads=4,
    q_lora_rank=None,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    mlp_dim=64,
    num_dense_layers=1,
    moe=None,
    rope=RopeConfig(),
    max_position=163840,
    norm_eps=1e-6,
)


@functools.partial(jax.jit, static_argnames="form")
def attend(
    params: AttentionParams, pool: LatentPool, table: FragmentTable, x: jax.Array, positions: jax.Array, form: Form
) -> jax.Array:
    cos, sin = rope_at(CONFIG, positions)
    sequence = jnp.zeros_like(positions)
    return attention(params, CONFIG, x, cos, sin, positions, sequence, pool, 0, table, form)


def make_table(length: int, cached: int) -> FragmentTable:
    """Rows in consecutive pages; the second half of the cached ones is served at another position."""
    shifts = np.zeros(length, np.int32)
    shifts[cached // 2 : cached] = SHIFT
    rows = np.arange(PAGE_SIZE, PAGE_SIZE + length, dtype=np.int32)
    return pack_fragments([fragments_of(rows, shifts)], inv_freq(CONFIG.rope, CONFIG.qk_rope_head_dim))


def counted_crossover() -> int:
    """The first number of new tokens for which `pick_form` chooses expanded attention."""
    return next(n for n in range(1, 1 << 20) if pick_form(CONFIG, n) == "expanded")


def crossover(new: Sequence[int], ratio: Sequence[float]) -> float | None:
    """Where absorbed ÷ expanded time passes 1 for good; None if it does not between the measured points."""
    for i in reversed(range(len(new) - 1)):
        a, b = math.log(ratio[i]), math.log(ratio[i + 1])
        if a < 0 <= b:
            return new[i] * (new[i + 1] / new[i]) ** (-a / (b - a))
    return None


def described(crossing: float | None, new: Sequence[int], ratio: Sequence[float]) -> str:
    if crossing is not None:
        return f"{crossing:.0f}"
    return f"below {new[0]}" if ratio[-1] >= 1 else f"above {new[-1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new", default="64,128,256,512", help="numbers of new tokens")
    parser.add_argument("--cached", default="0,2048,8192", help="numbers of cached keys")
    parser.add_argument("--rounds", type=int, default=7, help="timed calls per form")
    args = parser.parse_args()
    new = sorted(int(n) for n in args.new.split(","))
    cached = [int(n) for n in args.cached.split(",")]

    params = random_like(layer_shapes(CONFIG, 0, jnp.dtype(jnp.float32))).attention
    generator = np.random.default_rng(0)
    empty = init_pool(CONFIG, -(-(max(cached) + max(new)) // PAGE_SIZE) + 1, jnp.float32)
    arrays = (generator.standard_normal(a.shape, np.float32) for a in empty.arrays)
    pool = dataclasses.replace(empty, arrays=tuple(map(jax.device_put, arrays)))

    table = Table("cached keys", *(f"{n} new (ms)\nabsorbed / expanded" for n in new), "they meet at")
    rows: list[dict[str, Any]] = []
    for behind in cached:
        cells, ratios = [], []
        for n in new:
            x = jax.device_put(generator.standard_normal((n, CONFIG.hidden_dim), np.float32))
            positions = jnp.arange(behind, behind + n, dtype=jnp.int32)
            fragments = make_table(behind + n, behind)
            calls = {form: functools.partial(attend, params, pool, fragments, x, positions, form) for form in FORMS}
            difference = float(jnp.max(jnp.abs(calls["absorbed"]() - calls["expanded"]())))
            if not difference < 1e-3:
                raise SystemExit(f"{n} new tokens, {behind} cached: the two forms differ by {difference}")
            timed = {form: lambda call=call: call().block_until_ready() for form, call in calls.items()}
            seconds = interleaved_medians(timed, rounds=args.rounds)
            ratios.append(seconds["absorbed"] / seconds["expanded"])
            cells.append(seconds)
        crossing = crossover(new, ratios)
        rows.append(
            {
                "cached": behind,
                "new": new,
                "absorbed_ms": [round(1e3 * c["absorbed"], 3) for c in cells],
                "expanded_ms": [round(1e3 * c["expanded"], 3) for c in cells],
                "absorbed_over_expanded": [round(r, 3) for r in ratios],
                "crossover": None if crossing is None else round(crossing, 1),
            }
        )
        shown = (f"{1e3 * c['absorbed']:.1f} / {1e3 * c['expanded']:.1f}" for c in cells)
        table.add_row(f"{behind:,}", *shown, described(crossing, new, ratios))
    counted = counted_crossover()
    table.caption = f"by operation count (pick_form): {counted} new tokens"
    result = {"benchmark": "attention_forms", "heads": CONFIG.num_heads, "counted_crossover": counted, "cases": rows}
    print_result(table, result | machine())


if __name__ == "__main__":
    main()
