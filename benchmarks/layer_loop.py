"""Unrolled layers against `lax.scan` over stacked layers: compile time, run time, temporary memory.

`irminsul_jax.model.forward` unrolls a tuple of layers. The variant here runs the same layer functions in a `lax.scan`
over stacked parameters with the pool as carry (as xs/ys the scan would copy the whole pool). Regime: one dense layer,
then MoE layers of hidden width 512 (8 heads, latent 512 + 64, 8 experts, 2 per token), float32 on the CPU; decode of
8 sequences with 256 tokens behind them, and fresh prefill of 64 and 512 tokens in the form that `pick_form` chooses.
Both variants get the same inputs and have to agree. Run times are medians of interleaved calls of warm programs with the
pool donated; compile times include tracing, and the persistent compilation cache is off.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _common import interleaved_medians, machine, print_result, random_like
from jax import lax
from rich.table import Table

from irminsul_jax.config import ModelConfig, MoeConfig, RopeConfig
from irminsul_jax.functional import init_pool, pick_form
from irminsul_jax.model.attention import Form, attention, latent_rows
from irminsul_jax.model.forward import forward
from irminsul_jax.model.layers import mlp, rms_norm, rope_at
from irminsul_jax.model.moe import moe
from irminsul_jax.model.params import LayerParams, MlpParams, Params, param_shapes
from irminsul_jax.rope import inv_freq
from pallas_kernels import PAGE_SIZE, FragmentTable, LatentPool, fragments_of, pack_fragments

CONTEXT = 256
"""Tokens behind each sequence in decode."""

Inputs = tuple[np.ndarray, np.ndarray, np.ndarray, FragmentTable]
"""Tokens, positions, sequence of each token, fragment table."""


def model_config(layers: int) -> ModelConfig:
    return ModelConfig(
        model_type="deepseek_v2",
        vocab_size=1024,
        hidden_dim=512,
        num_layers=layers,
        num_heads=8,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        mlp_dim=1408,
        num_dense_layers=1,
        moe=MoeConfig(
            num_experts=8, experts_per_token=2, expert_dim=352, num_shared_experts=1, router="softmax_greedy"
        ),
        rope=RopeConfig(),
        max_position=16384,
        norm_eps=1e-6,
    )


def stack_moe_layers(params: Params) -> tuple[Params, LayerParams]:
    """The parameters without their MoE layers, and those stacked, `[L, ...]` per leaf."""
    above = [layer for layer in params.layers if not isinstance(layer.mlp, MlpParams)]
    below = params.layers[: len(params.layers) - len(above)]
    return dataclasses.replace(params, layers=below), jax.tree.map(lambda *leaves: jnp.stack(leaves), *above)


def scanned_forward(
    params: Params,
    stacked: LayerParams,
    config: ModelConfig,
    pool: LatentPool,
    tokens: Any,
    positions: Any,
    sequence: Any,
    table: FragmentTable,
    form: Form,
) -> tuple[jax.Array, LatentPool]:
    """As `forward`, with the MoE layers in one `lax.scan`."""
    tokens, positions, sequence = jnp.asarray(tokens), jnp.asarray(positions), jnp.asarray(sequence)
    page, slot, _, _ = table.locate(sequence, positions)
    cos, sin = rope_at(config, positions)

    def step(h: jax.Array, pool: LatentPool, i: Any, layer: LayerParams) -> tuple[jax.Array, LatentPool]:
        x = rms_norm(h, layer.attention_norm, config.norm_eps)
        pool = pool.write(i, page, slot, **latent_rows(layer.attention, config, x, cos, sin))
        h = h + attention(layer.attention, config, x, cos, sin, positions, sequence, pool, i, table, form)
        x = rms_norm(h, layer.mlp_norm, config.norm_eps)
        return h + (mlp(layer.mlp, x) if isinstance(layer.mlp, MlpParams) else moe(layer.mlp, config, x)), pool

    h = params.embedding[tokens]
    for i, layer in enumerate(params.layers):
        h, pool = step(h, pool, i, layer)

    def body(carry: tuple[jax.Array, LatentPool], xs: tuple[jax.Array, LayerParams]) -> Any:
        return step(*carry, *xs), None

    numbers = jnp.arange(len(params.layers), config.num_layers, dtype=jnp.int32)
    (h, pool), _ = lax.scan(body, (h, pool), (numbers, stacked))
    return h, pool


def make_inputs(config: ModelConfig, sequences: int, behind: int, new: int) -> Inputs:
    """`new` tokens for each of `sequences` sequences that have `behind` rows in the pool, all in consecutive pages."""
    length = behind + new
    pages = -(-length // PAGE_SIZE)
    fragments = [
        fragments_of(
            np.arange(length, dtype=np.int32) + (1 + b * pages) * PAGE_SIZE, np.zeros(length, np.int32)
        )
        for b in range(sequences)
    ]  # fmt: skip
    return (
        np.random.default_rng(0).integers(config.vocab_size, size=sequences * new).astype(np.int32),
        np.tile(np.arange(behind, length, dtype=np.int32), sequences),
        np.repeat(np.arange(sequences, dtype=np.int32), new),
        pack_fragments(fragments, inv_freq(config.rope, config.qk_rope_head_dim)),
    )


class Program:
    """One variant, compiled; every call donates the pool of the one before."""

    def __init__(self, function: Callable, weights: tuple, pool: LatentPool, inputs: Inputs, *, compilations: int):
        self.weights, self.pool, self.inputs = weights, pool, inputs
        seconds = []
        for _ in range(compilations):
            started = time.perf_counter()
            jitted = jax.jit(lambda w, p, *rest: function(*w, p, *rest), donate_argnums=1)
            self.run = jitted.lower(weights, pool, *inputs).compile()
            seconds.append(time.perf_counter() - started)
        self.compile_s = statistics.median(seconds)
        analysis = self.run.memory_analysis()
        self.temp_bytes = int(analysis.temp_size_in_bytes) if analysis else 0

    def __call__(self) -> jax.Array:
        hidden, self.pool = self.run(self.weights, self.pool, *self.inputs)
        return hidden.block_until_ready()


def filled_pool(config: ModelConfig, pages: int) -> LatentPool:
    pool = init_pool(config, pages, jnp.float32)
    generator = np.random.default_rng(1)
    arrays = (generator.standard_normal(a.shape, np.float32) for a in pool.arrays)
    return dataclasses.replace(pool, arrays=tuple(map(jax.device_put, arrays)))


def measure(config: ModelConfig, params: Params, regime: str, rounds: int, compilations: int) -> dict[str, Any]:
    if regime == "decode 8":
        inputs, form = make_inputs(config, 8, CONTEXT, 1), "decode"
    else:
        new = int(regime.split()[1])
        inputs, form = make_inputs(config, 1, 0, new), pick_form(config, new)
    rest, stacked = stack_moe_layers(params)
    pages = 64
    unrolled = Program(
        lambda p, pool, t, n, s, table: forward(p, config, pool, t, n, s, table, form),
        (params,), filled_pool(config, pages), inputs, compilations=compilations,
    )  # fmt: skip
    scanned = Program(
        lambda p, above, pool, t, n, s, table: scanned_forward(p, above, config, pool, t, n, s, table, form),
        (rest, stacked), filled_pool(config, pages), inputs, compilations=compilations,
    )  # fmt: skip
    variants = {"unrolled": unrolled, "scan": scanned}
    difference = float(jnp.max(jnp.abs(unrolled() - scanned())))  # also warms both up
    if not difference < 1e-2:
        raise SystemExit(f"{regime}, {config.num_layers} layers: the two variants differ by {difference}")
    seconds = interleaved_medians(variants, rounds=rounds, warm_up=0)
    return {
        "layers": config.num_layers,
        "regime": regime,
        "form": form,
        "compile_s": {name: round(v.compile_s, 3) for name, v in variants.items()},
        "run_s": {name: round(s, 5) for name, s in seconds.items()},
        "temp_mib": {name: round(v.temp_bytes / 2**20, 2) for name, v in variants.items()},
        "run_scan_over_unrolled": round(seconds["scan"] / seconds["unrolled"], 3),
        "compile_unrolled_over_scan": round(unrolled.compile_s / scanned.compile_s, 2),
        "max_abs_difference": difference,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="4,12,27", help="numbers of layers, one of them dense")
    parser.add_argument("--rounds", type=int, default=3, help="timed calls per variant")
    parser.add_argument("--compilations", type=int, default=1, help="timed compilations per variant")
    args = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    cases = []
    table = Table(
        "layers", "tokens", "form", "compile (s)\nunrolled / scan", "run (ms)\nunrolled / scan", "scan run ÷ unrolled",
        "temporaries (MiB)\nunrolled / scan", title="unrolled layers against lax.scan",
    )  # fmt: skip
    for layers in map(int, args.layers.split(",")):
        config = model_config(layers)
        params = random_like(param_shapes(config, jnp.dtype(jnp.float32)))
        for regime in ("decode 8", "prefill 64", "prefill 512"):
            case = measure(config, params, regime, args.rounds, args.compilations)
            cases.append(case)
            compiled, ran, temp = case["compile_s"], case["run_s"], case["temp_mib"]
            table.add_row(
                str(layers),
                regime,
                case["form"],
                f"{compiled['unrolled']:.2f} / {compiled['scan']:.2f}",
                f"{1e3 * ran['unrolled']:.1f} / {1e3 * ran['scan']:.1f}",
                f"{case['run_scan_over_unrolled']:.2f}",
                f"{temp['unrolled']:.1f} / {temp['scan']:.1f}",
            )
    print_result(table, {"benchmark": "layer_loop", "cases": cases} | machine())


if __name__ == "__main__":
    main()
