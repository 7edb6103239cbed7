"""The epsilons of the norms: 1e-6 inside the latent projections, `rms_norm_eps` of config.json everywhere else."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from irminsul_jax.config import ModelConfig
from irminsul_jax.model.attention import latent_rows
from irminsul_jax.model.layers import rms_norm, rope_at
from tests.support import reference_f64
from tests.support.hf_tiny import DATA
from tests.support.models import Model, rows_from
from tests.support.tolerance import forward_tolerance

TOKENS = np.arange(3, 67)


def first_layer_rows(model: Model, config: ModelConfig) -> dict[str, np.ndarray]:
    layer = model.params.layers[0]
    x = rms_norm(model.params.embedding[TOKENS], layer.attention_norm, config.norm_eps)
    cos, sin = rope_at(config, jnp.arange(len(TOKENS), dtype=jnp.int32))
    return {k: np.asarray(v, np.float64) for k, v in latent_rows(layer.attention, config, x, cos, sin).items()}


def excess(values: np.ndarray, exact: np.ndarray) -> float:
    """By how much the values are systematically too large (least squares): rounding averages out over 1000s of them."""
    return float((values * exact).sum() / (exact * exact).sum() - 1)


@pytest.mark.parametrize("family", ["deepseek_v3", "moonlight"])
def test_latent_norm_uses_1e_6_and_the_layer_norm_uses_rms_norm_eps(family: str, tiny_models) -> None:
    model = tiny_models(family)
    declared = json.loads((DATA / f"{family}.json").read_text())["config"]["rms_norm_eps"]
    assert declared == {"deepseek_v3": 1e-6, "moonlight": 1e-5}[family]
    assert (model.config.norm_eps, model.config.latent_norm_eps) == (declared, 1e-6)

    exact = model.reference.forward(TOKENS)
    right = first_layer_rows(model, model.config)
    # A norm of a vector of variance 1 shrinks by half the epsilon; float32 rounding, averaged, by less than 1e-7.
    assert abs(excess(right["c_kv"], exact.c_kv[0])) < 2e-7
    assert abs(excess(right["k_r"], exact.k_r[0])) < 2e-7

    wrong = first_layer_rows(model, dataclasses.replace(model.config, latent_norm_eps=1e-5))
    assert excess(wrong["c_kv"], exact.c_kv[0]) < -1e-6
    other = 1e-5 if declared == 1e-6 else 1e-6
    wrong = first_layer_rows(model, dataclasses.replace(model.config, norm_eps=other))
    assert abs(excess(wrong["k_r"], exact.k_r[0])) > 1e-6
    assert np.sign(excess(wrong["k_r"], exact.k_r[0])) == np.sign(declared - other)


def test_query_and_key_latents_share_that_epsilon_and_nothing_else_does(long_models, monkeypatch) -> None:
    """With an epsilon large enough to see, the whole model equals the reference with the same constant."""
    model = long_models("one_layer")
    changed = dataclasses.replace(model, config=dataclasses.replace(model.config, latent_norm_eps=0.3))
    rows = rows_from(1, len(TOKENS))
    out, _ = changed.compute(model.placed_pool(), TOKENS, np.arange(len(TOKENS)), model.table(rows), "absorbed")
    before = model.reference.forward(TOKENS).logits
    monkeypatch.setattr(reference_f64, "_LATENT_EPS", 0.3)
    exact = model.reference.forward(TOKENS).logits
    tolerance = forward_tolerance(model.config, len(TOKENS), exact)
    assert np.abs(out - exact).max() <= tolerance
    assert np.abs(out - before).max() > 100 * tolerance
