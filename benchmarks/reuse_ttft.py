"""Time to first token: cold, behind an exact prefix, and behind a header that changes in front of everything.

Random weights of DeepSeek-V2-Lite's layer sizes (hidden 2048, 16 heads, latent 512 + 64; `--small` for a tiny model), a
few layers, one request at a time with warm programs, on whatever device jax has. A prompt of N random tokens is served
three times: never seen (cold), seen at the same place (exact: all but the last token comes from the pool), and behind a
new header of 45 tokens (shifted: everything but header and carve-out comes from the pool, keys turned by δ). Medians over
repetitions; the ratios are what carries over to other machines.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _common import machine, print_result, random_like
from rich.table import Table

import irminsul_jax as ij
from irminsul_jax.config import MoeConfig, RopeConfig
from irminsul_jax.model.params import param_shapes


@dataclass(kw_only=True)
class RandomModel:
    """What `Engine` needs of a checkpoint, with weights N(0, 1/fan-in) made on the device."""

    config: ij.ModelConfig
    dtype: Any
    path: Path = Path()
    tokenizer_path: None = None
    fingerprint: str = "random"
    generation_config: dict[str, Any] = field(default_factory=dict)
    hf_config: dict[str, Any] = field(default_factory=dict)

    @property
    def params(self) -> Any:
        return random_like(param_shapes(self.config, jnp.dtype(self.dtype)))


def model_config(small: bool, layers: int) -> ij.ModelConfig:
    sizes: dict[str, Any] = dict(
        vocab_size=32000, hidden_dim=2048, num_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, mlp_dim=10944,
    )  # fmt: skip
    moe = MoeConfig(num_experts=8, experts_per_token=2, expert_dim=1408, num_shared_experts=2, router="softmax_greedy")
    if small:
        sizes |= dict(
            hidden_dim=256, num_heads=4, kv_lora_rank=128, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32,
            mlp_dim=512,
        )  # fmt: skip
        moe = MoeConfig(
            num_experts=8, experts_per_token=2, expert_dim=128, num_shared_experts=1, router="softmax_greedy"
        )
    return ij.ModelConfig(
        model_type="deepseek_v2", num_layers=layers, q_lora_rank=None, num_dense_layers=1, moe=moe, rope=RopeConfig(),
        max_position=163840, norm_eps=1e-6, **sizes,
    )  # fmt: skip


def measure(engine: ij.Engine, length: int, repetitions: int) -> dict[str, float]:
    """Median milliseconds to the first token by kind of reuse."""
    rng = np.random.default_rng(length)
    vocab = engine.config.vocab_size
    one = ij.SamplingParams(max_tokens=1, temperature=0.0)
    times: dict[str, list[float]] = {"cold": [], "exact": [], "shifted": []}
    for repetition in range(repetitions + 1):
        body, header = rng.integers(vocab, size=length).tolist(), rng.integers(vocab, size=45).tolist()
        for kind, prompt in (("cold", body), ("exact", body), ("shifted", header + body)):
            usage = engine.generate({"prompt_token_ids": prompt}, one)[0].usage
            served = {"cold": 0, "exact": usage.exact_tokens, "shifted": usage.shifted_tokens}[kind]
            if kind != "cold" and served < 0.9 * length - 64:
                raise SystemExit(f"{kind}: only {served} of {length} tokens were served")
            if repetition:  # the first round compiles
                times[kind].append(usage.ttft_ms or float("nan"))
    return {kind: statistics.median(values) for kind, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny model, for machines without an accelerator")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lengths", default="2048,8192")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--dtype", default=None, help="bfloat16 or float32; default: by device")
    args = parser.parse_args()
    dtype = args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    lengths = [int(n) for n in args.lengths.split(",")]
    engine = ij.Engine(
        RandomModel(config=model_config(args.small, args.layers), dtype=dtype),  # pyright: ignore[reportArgumentType]
        cache=ij.CacheConfig(capacity_tokens=max(lengths) * 3 * (args.repetitions + 2)),
        options=ij.EngineConfig(max_num_seqs=1),
    )
    table = Table("prompt tokens", "cold (ms)", "exact (ms)", "shifted (ms)", "cold / exact", "cold / shifted")
    results = {}
    for length in lengths:
        ms = measure(engine, length, args.repetitions)
        results[str(length)] = ms | {f"cold_over_{k}": ms["cold"] / ms[k] for k in ("exact", "shifted")}
        ratios = (f"{ms['cold'] / ms[k]:.1f}" for k in ("exact", "shifted"))
        table.add_row(f"{length:,}", *(f"{ms[k]:.1f}" for k in ("cold", "exact", "shifted")), *ratios)
    print_result(
        table, {"benchmark": "reuse_ttft", "dtype": dtype, "layers": args.layers, "ttft_ms": results} | machine()
    )


if __name__ == "__main__":
    main()
