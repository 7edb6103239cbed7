"""Latents in float8: what the pool then holds, how far the results move, and what stays exact."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import irminsul_jax as ij
from irminsul_jax import functional
from irminsul_jax.checkpoint import load_checkpoint
from irminsul_jax.engine import runner
from irminsul_jax.errors import ConfigError
from irminsul_jax.functional import init_pool, make_batch, pool_layout, prefill, stream_specs
from tests.support.engine import LoadModel, greedy, ids, new_engine, prompt

A, B, HEADER = ids(1, 150), ids(2, 100), ids(4, 45)
FLOAT8 = {"cache_dtype": "float8_e4m3"}
U_FLOAT8 = 2.0**-4
"""Largest relative error of one rounding to three bits of mantissa."""


def bar(num_layers: int) -> float:
    """Bound on the relative L2 distance of logits: statistical, not of the worst case. A latent is off by at most
    `U_FLOAT8` of itself (2.7e-2 on average) and enters a layer twice: in the values, which attention averages and later
    products map linearly; and in the scores, whose part from latents deviates by 1.4 in these models, so that a weight
    is off by about 1.4 * 2.7e-2 of itself, again below `U_FLOAT8`. Errors of independent roundings add in squares.
    Embedding and keys are as they were; that what follows attention does not amplify is assumed, as for random weights
    it may be. Measured: a fifth of the bound."""
    return U_FLOAT8 * (2 * num_layers) ** 0.5


def last_logits(checkpoint: Any, **dtypes: Any) -> np.ndarray:
    config, tokens = checkpoint.config, ids(5, 150)
    batch = make_batch([tokens], config, max_tokens=1)
    run = jax.jit(prefill, static_argnames=("config", "form"))
    scores, _ = run(checkpoint.params, config, init_pool(config, 4, **dtypes), batch, form="absorbed")
    return np.asarray(scores, np.float64)[0]


@pytest.mark.parametrize("name", ["text", "one_layer"])
def test_logits_stay_within_the_bound(load_model: LoadModel, name: str) -> None:
    checkpoint = load_model(name)
    exact = last_logits(checkpoint, dtype=jnp.float32)
    rounded = last_logits(checkpoint, dtype=jnp.float32, latent_dtype=jnp.float8_e4m3fn)
    distance = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
    assert 2.0**-8 < distance < bar(checkpoint.config.num_layers)  # from below: bfloat16 latents stay under 2^-9


def test_bfloat16_engine_keeps_latents_in_float8_and_keys_as_they_were(load_model: LoadModel) -> None:
    checkpoint = load_checkpoint(load_model("one_layer").path, dtype="bfloat16")
    engine = new_engine(checkpoint, **FLOAT8)
    pool = engine._runner.pool
    assert (pool["c_kv"].dtype, pool["k_r"].dtype) == (jnp.float8_e4m3fn, jnp.bfloat16)
    assert engine._model_key != new_engine(checkpoint)._model_key
    first, moved = engine.generate([prompt(A), prompt(HEADER, A, B)], greedy(4))
    assert len(first.token_ids) == len(moved.token_ids) == 4
    assert moved.usage.shifted_tokens > 100


def test_prefix_hit_is_bit_equal_to_the_cold_run(load_model: LoadModel) -> None:
    """A cold run too attends to its own rows as the pool holds them."""
    options = {"attention_form": "absorbed", "cache": {"exact_only": True}, **FLOAT8}
    request = prompt(A, HEADER[:20], B[:80])  # new tokens fill more than the smallest bucket, hit or not
    cold = new_engine(load_model("text"), **options).generate(request, greedy(logprobs=4))[0]
    engine = new_engine(load_model("text"), **options)
    engine.generate(prompt(A, B), greedy(1))
    warm = engine.generate(request, greedy(logprobs=4))[0]
    assert warm.usage.exact_tokens == len(A)
    assert warm.token_ids == cold.token_ids
    assert warm.logprobs == cold.logprobs


def test_after_a_failed_call_the_new_pool_is_float8_too(load_model: LoadModel) -> None:
    engine = new_engine(load_model("one_layer"), **FLOAT8)
    engine._runner.reset()
    assert engine._runner.pool["c_kv"].dtype == jnp.float8_e4m3fn


def test_capacity_counts_bytes_as_stored(load_model: LoadModel, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = load_model("one_layer")
    config, params = checkpoint.config, checkpoint.params
    R, D, L = config.kv_lora_rank, config.qk_rope_head_dim, config.num_layers

    def counted(**options: Any) -> int:
        return runner.bytes_per_token(params, config, ij.EngineConfig(**options))

    def allocated(**options: Any) -> float:
        pool = new_engine(checkpoint, **options)._runner.pool
        return sum(leaf.nbytes for leaf in jax.tree.leaves(pool)) / (pool.num_pages * 64)

    assert counted() == allocated() == L * 4 * (R + D)
    assert counted(cache_dtype="bfloat16") == L * 2 * (R + D)
    assert counted(**FLOAT8) == allocated(**FLOAT8) == L * (R + 4 + 4 * D)
    for module in (functional, runner):
        monkeypatch.setattr(module, "pool_layout", lambda *_: "lanes")
    assert counted(**FLOAT8) == allocated(**FLOAT8) == L * (128 + 4 + 4 * 128)


def test_layout_of_the_pool_changes_no_bit(load_model: LoadModel, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [prompt(A), prompt(HEADER, A, B)]
    plain = new_engine(load_model("one_layer"), **FLOAT8).generate(requests, greedy(2, logprobs=2))
    monkeypatch.setattr(functional, "pool_layout", lambda *_: "lanes")
    engine = new_engine(load_model("one_layer"), **FLOAT8)
    assert engine._runner.pool.layout == "lanes"
    padded = engine.generate(requests, greedy(2, logprobs=2))
    assert [out.logprobs for out in padded] == [out.logprobs for out in plain]


@pytest.mark.parametrize(
    ("platform", "rank", "rotary", "layout"),
    [
        ("tpu", 512, 64, "lanes"),
        ("tpu", 128, 128, "lanes"),
        ("tpu", 192, 64, "plain"),
        ("tpu", 512, 256, "plain"),
        ("gpu", 512, 64, "plain"),
        ("cpu", 512, 64, "plain"),
    ],
)
def test_layout_follows_the_device(
    load_model: LoadModel, monkeypatch: pytest.MonkeyPatch, platform: str, rank: int, rotary: int, layout: str
) -> None:
    config = dataclasses.replace(load_model("one_layer").config, kv_lora_rank=rank, qk_rope_head_dim=rotary)
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform=platform)])
    assert pool_layout(config) == layout


def test_layout_is_that_of_the_device_named(load_model: LoadModel) -> None:
    config, device = load_model("one_layer").config, jax.devices()[0]
    assert pool_layout(config, device) == pool_layout(config, jax.sharding.SingleDeviceSharding(device)) == "plain"


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        ({"dtype": jnp.float8_e4m3fn}, "too narrow for rotary keys"),
        ({"dtype": jnp.bfloat16, "latent_dtype": jnp.float8_e5m2}, "choose float8_e4m3fn"),
    ],
)
def test_other_narrow_types_are_refused(load_model: LoadModel, dtypes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stream_specs(load_model("one_layer").config, **dtypes)
