"""All eight tiny families, converted with the real converter, against what transformers computed for them."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from irminsul_jax.functional import Sampling, generate, make_batch
from irminsul_jax.model.attention import Form
from tests.support.hf_tiny import FAMILIES, hf_reference
from tests.support.models import FORMS, QUICK, Model, rows_from
from tests.support.reference_f64 import Reference

LOGIT_BAR = 2e-5
WITH_CACHES = [f for f in FAMILIES if f not in ("deepseek_v3_fp8", "deepseek_v3_mtp")]

_generate = jax.jit(generate, static_argnames=("config", "sampling"), donate_argnames="pool", compiler_options=QUICK)


class Float32Angles(Reference):
    """The float64 reference with one thing as in transformers: angle, cosine and sine in float32."""

    def _place(self, pairs: np.ndarray, positions: np.ndarray) -> np.ndarray:
        exact, self.inv_freq = self.inv_freq, self.inv_freq.astype(np.float32)
        try:
            return super()._place(pairs, positions.astype(np.float32))
        finally:
            self.inv_freq = exact


def prefill_at(
    model: Model, tokens: np.ndarray, form: Form, first: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits and cached rows of a prompt that stands at positions `first..`, in a table that has only those."""
    rows = rows_from(3, len(tokens))
    table = model.table(rows, first=first)
    out, pool = model.compute(model.placed_pool(), tokens, first + np.arange(len(tokens)), table, form)
    return out, *model.cached(pool, rows)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_at_all_64_positions(family: str, form: Form, tiny_models) -> None:
    expected = hf_reference(family)
    out, _, _ = prefill_at(tiny_models(family), expected["input_ids"][0], form)
    assert out.shape == expected["logits"][0].shape == (64, 256)
    assert np.abs(out - expected["logits"][0]).max() <= LOGIT_BAR


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_continuation_is_that_of_transformers(family: str, tiny_models) -> None:
    model, expected = tiny_models(family), hf_reference(family)
    batch = make_batch(expected["input_ids"].tolist(), model.config, max_tokens=16)
    out = _generate(model.params, model.config, model.placed_pool(), batch, Sampling(max_tokens=16), jax.random.key(0))
    assert np.asarray(out.tokens).tolist() == expected["generated_ids"].tolist()
    assert out.lengths.tolist() == [16]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", WITH_CACHES)
def test_cached_latents_and_rotary_keys_are_those_of_transformers(family: str, form: Form, tiny_models) -> None:
    model, expected = tiny_models(family), hf_reference(family)
    _, c_kv, k_r = prefill_at(model, expected["input_ids"][0], form)
    for layer in range(model.config.num_layers):
        rotary = expected[f"cache_{layer}_values"][0, 0]
        if model.config.family == "deepseek_v2":  # transformers keeps the pairs interleaved there
            rotary = np.concatenate([rotary[:, 0::2], rotary[:, 1::2]], axis=-1)
        np.testing.assert_allclose(c_kv[layer], expected[f"cache_{layer}_keys"][0, 0], rtol=0, atol=LOGIT_BAR)
        np.testing.assert_allclose(k_r[layer], rotary, rtol=0, atol=LOGIT_BAR)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", WITH_CACHES)
def test_logits_at_positions_1000_to_1063_are_those_of_transformers(family: str, form: Form, tiny_models) -> None:
    model, expected = tiny_models(family), hf_reference(family)
    tokens = expected["input_ids"][0]
    out, _, _ = prefill_at(model, tokens, form, first=1000)
    positions = np.arange(1000, 1064)
    exact = model.reference.forward(tokens, positions=positions).logits
    assert np.abs(out - exact).max() <= LOGIT_BAR

    # transformers takes position · frequency in float32: near 1063 rad that is off by up to 2^-14 (half a unit in the
    # last place), where our angles are exact to 2^-23. What this does to its logits is computed, not guessed: the
    # reference runs once with exact angles and once with float32 ones. Its other roundings keep the bar from above.
    effect = np.abs(Float32Angles(model.hf_dir).forward(tokens, positions=positions).logits - exact).max()
    assert effect < 1e-4
    assert np.abs(out - expected["logits_shift1000"][0]).max() <= LOGIT_BAR + effect
