"""How exactly a cached key is turned: δ-rotation in bfloat16 against float64, over shifts up to 160,000 tokens.

Regime: keys of 64 values as the model makes them (bfloat16, rotated to a random base position), stored in a bfloat16
pool and read back by `mla_decode` through a fragment with shift δ, plain and YaRN (factor 40, as in DeepSeek-V3). With
one key per sequence the op returns what it loaded: its log-sum-exp is the score itself, so 64 heads with the unit vectors
as queries read off the turned key, and a head with a zero query (weight exactly 1) puts out the content row, which has
to be bit-identical. So the figures hold for whatever implementation the platform picks.

Relative L2 error against float64: of the turn alone (from the stored key: one rounding), of the turned key against a
fresh one (two roundings: stored, turned), of a fresh key in bfloat16 (one), and of 16 chained turns that add up to the
same δ and are stored in between, which the pool never does.

The second table sets the turn beside what storing latents in float8 costs, on its own and behind attention
(`_latent_rounding.py`).
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from _common import machine, print_result
from _latent_rounding import attention_cases, latent_cases
from rich.table import Table

from irminsul_jax.config import ModelConfig, RopeConfig
from irminsul_jax.functional import init_pool
from irminsul_jax.model.layers import rope_at
from irminsul_jax.rope import inv_freq
from pallas_kernels import (
    PAGE_SIZE,
    Fragments,
    FragmentTable,
    LatentPool,
    mla_decode,
    pack_fragments,
    rotate,
    turn_table,
)

SHIFTS = (1, 45, 1000, 4097, 16384, 65537, 131071, 160000)
CHAIN = 16
BAR = 2.5e-3
LATENT, ROTARY, MAX_POSITION = 64, 64, 163840
BF16 = np.dtype(ml_dtypes.bfloat16)
ROPES = {
    "plain": RopeConfig(),
    "yarn": RopeConfig(
        kind="yarn", factor=40.0, original_max_position=4096, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0
    ),
}


def model_config(rope: RopeConfig) -> ModelConfig:
    return ModelConfig(
        model_type="deepseek_v3",
        vocab_size=64,
        hidden_dim=64,
        num_layers=1,
        num_heads=ROTARY,
        q_lora_rank=None,
        kv_lora_rank=LATENT,
        qk_nope_head_dim=64,
        qk_rope_head_dim=ROTARY,
        v_head_dim=64,
        mlp_dim=64,
        num_dense_layers=1,
        moe=None,
        rope=rope,
        max_position=MAX_POSITION,
        norm_eps=1e-6,
    )


def rotate_f64(x: np.ndarray, positions: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Half-split rotation of `[n, D]` by `positions · frequency`, in float64 throughout."""
    angles = positions.astype(np.float64)[:, None] * inv_freq(rope, ROTARY)
    first, second = np.split(x.astype(np.float64), 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def relative(x: np.ndarray, reference: np.ndarray) -> float:
    """Relative L2 error, three digits."""
    return float(f"{np.linalg.norm(x.astype(np.float64) - reference) / np.linalg.norm(reference):.2e}")


@jax.jit
def load(pool: LatentPool, table: FragmentTable) -> tuple[jax.Array, jax.Array]:
    """`(c_kv [n, R], turned k_r [n, D])` of sequences with one key each, as the attention op sees them."""
    keys = table.num_sequences
    q_rope = jnp.broadcast_to(jnp.eye(ROTARY + 1, ROTARY, dtype=jnp.bfloat16), (keys, ROTARY + 1, ROTARY))
    q_latent = jnp.zeros((keys, ROTARY + 1, LATENT), jnp.bfloat16)
    content, score = mla_decode(q_latent, q_rope, pool, 0, table, scale=1.0)
    return content[:, ROTARY], score[:, :ROTARY]


def one_key_each(keys: int, shift: int, rope: RopeConfig) -> FragmentTable:
    """Sequence b has row b of the pool as its only key, at position 0. (The turn depends on the shift alone.)"""

    def row(b: int) -> Fragments:
        page, slot = divmod(b + PAGE_SIZE, PAGE_SIZE)
        return Fragments(*(np.array([v], np.int32) for v in (page, slot, slot + 1, -slot, shift)))

    return pack_fragments([row(b) for b in range(keys)], inv_freq(rope, ROTARY), bucket=(1, 2))


def chained(stored: np.ndarray, shift: int, rope: RopeConfig) -> np.ndarray:
    """`CHAIN` turns that add up to `shift`, rounded to bfloat16 after each."""
    steps = np.diff(np.linspace(0, shift, CHAIN + 1).astype(np.int64))
    x = jnp.asarray(stored)
    for cos, sin in zip(*turn_table(steps, inv_freq(rope, ROTARY)), strict=True):
        x = rotate(x, jnp.asarray(cos), jnp.asarray(sin))
    return np.asarray(x)


def measure(name: str, shift: int, keys: int) -> dict[str, Any]:
    rope = ROPES[name]
    config = model_config(rope)
    generator = np.random.default_rng(abs(shift))
    bare = generator.standard_normal((keys, ROTARY)).astype(BF16)
    low, high = max(0, -shift), MAX_POSITION - max(0, shift)
    base = generator.integers(low, high, size=keys)

    def fresh(positions: np.ndarray) -> jax.Array:
        return rotate(jnp.asarray(bare), *rope_at(config, jnp.asarray(positions, jnp.int32)))

    c_kv = generator.standard_normal((keys, LATENT)).astype(BF16)
    rows = np.arange(PAGE_SIZE, PAGE_SIZE + keys)
    pool = init_pool(config, 1 + -(-keys // PAGE_SIZE), jnp.bfloat16)
    page, slot = jnp.asarray(rows // PAGE_SIZE), jnp.asarray(rows % PAGE_SIZE)
    pool = pool.write(0, page, slot, c_kv=jnp.asarray(c_kv), k_r=fresh(base))
    stored = np.asarray(pool.read("k_r", 0, page, slot))
    content, turned = map(np.asarray, load(pool, one_key_each(keys, shift, rope)))
    target = rotate_f64(bare, base + shift, rope)
    return {
        "rope": name,
        "delta": shift,
        "turn": relative(turned, rotate_f64(stored, np.full(keys, shift), rope)),
        "turned_vs_fresh_f64": relative(turned, target),
        "fresh_bf16": relative(np.asarray(fresh(base + shift)), target),
        "chained_16": relative(chained(stored, shift, rope), target),
        "content_identical": bool(np.array_equal(content, c_kv.astype(np.float32))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=128, help="keys per shift")
    args = parser.parse_args()
    columns = ("turn", "turned_vs_fresh_f64", "fresh_bf16", "chained_16")
    table = Table(
        "rope", "δ", "turn alone", "turned, against\nfresh float64", "fresh bfloat16", f"{CHAIN} chained turns",
        "content\nbit-identical", title="relative L2 error against float64",
    )  # fmt: skip
    shifts = sorted(sign * s for s in SHIFTS for sign in (-1, 1))
    cases = [measure(name, shift, args.keys) for name in ROPES for shift in shifts]
    for case in cases:
        errors = (f"{case[c]:.2e}" for c in columns)
        table.add_row(case["rope"], f"{case['delta']:+,}", *errors, "yes" if case["content_identical"] else "NO")
    worst = {column: max(case[column] for case in cases) for column in columns}
    table.caption = "largest: " + ", ".join(f"{name} {value:.2e}" for name, value in worst.items())
    identical = all(case["content_identical"] for case in cases)
    latents, attention = latent_cases(), attention_cases(SHIFTS)
    beside = Table("what", "stored as", "relative L2", title="a turned key beside a latent in float8")
    beside.add_row("key, turned, largest over δ", "bfloat16", f"{worst['turned_vs_fresh_f64']:.2e}")
    for case in latents:
        beside.add_row(f"latent, {case['rows']}", case["dtype"], f"{case['error']:.2e}")
    for case in attention:
        where = "turned" if case["turned"] else "not turned"
        what = f"decode output, {case['softmax']} softmax (largest weight {case['largest_weight']:.2g}), keys {where}"
        beside.add_row(what, f"latents {case['dtype']}", f"{case['error']:.2e}")
    both = Table.grid()
    both.add_row(table)
    both.add_row(beside)
    result = {
        "benchmark": "rotation",
        "bar": BAR,
        "within_bar": worst["turned_vs_fresh_f64"] <= BAR,
        "content_identical": identical,
        "largest": worst,
        "cases": cases,
        "latents": latents,
        "attention": attention,
    }
    print_result(both, result | machine())


if __name__ == "__main__":
    main()
