"""Prompts of several pages, near 0 and beyond 4,096 (where YaRN's frequencies matter), against the float64 reference; and
reused rows against the reference's own definition of reuse."""

from __future__ import annotations

import numpy as np
import pytest

from irminsul_jax.model.attention import Form
from tests.support.models import FORMS, Model, rows_from, shuffled_rows
from tests.support.tolerance import forward_tolerance

LENGTH, BUCKET = 300, 320
TABLE = (32, 8)
TOKENS = np.random.default_rng(11).integers(3, 256, LENGTH)


def computed(model: Model, tokens, form: Form, rows, *, first: int = 0) -> tuple[np.ndarray, object]:
    table = model.table(rows, first=first, bucket=TABLE)
    return model.compute(model.placed_pool(), tokens, first + np.arange(len(tokens)), table, form, bucket=BUCKET)


@pytest.mark.parametrize("first", [0, 5000], ids=["from_0", "beyond_4096"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["v2", "v3_two_mscales"])
def test_300_tokens_across_pages_equal_the_float64_reference_at_all_positions(
    name: str, form: Form, first: int, long_models
) -> None:
    """Case 15: the V3 config has `mscale` 1.3 and `mscale_all_dim` 0.6, so a factor is on cos and sin too."""
    model = long_models(name)
    if name == "v3_two_mscales":
        assert model.config.rope.cos_sin_factor > 1.1
    rows = shuffled_rows(LENGTH, seed=first)
    out, pool = computed(model, TOKENS, form, rows, first=first)
    exact = model.reference.forward(TOKENS, positions=first + np.arange(LENGTH))
    assert np.abs(out - exact.logits).max() <= forward_tolerance(model.config, LENGTH, exact.logits)
    for ours, theirs in zip(model.cached(pool, rows), (exact.c_kv, exact.k_r), strict=True):
        assert np.abs(ours - theirs).max() <= forward_tolerance(model.config, LENGTH, theirs)


@pytest.mark.parametrize("name", ["v2", "v3_two_mscales"])
def test_the_two_attention_forms_agree_within_the_derived_tolerance(name: str, long_models) -> None:
    model = long_models(name)
    absorbed, expanded = (computed(model, TOKENS, form, rows_from(1, LENGTH))[0] for form in FORMS)
    assert np.abs(absorbed - expanded).max() <= 2 * forward_tolerance(model.config, LENGTH, absorbed)


def served_shifted(
    model: Model, donor: np.ndarray, target: np.ndarray, piece: tuple[int, int, int], form: Form
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Computes `donor`, then `target` with `piece = (from, to, length)` served from the donor's rows. Returns target
    positions that were computed, their logits, and the served rows as stored."""
    source, place, length = piece
    assert np.array_equal(donor[source : source + length], target[place : place + length])
    donor_rows = shuffled_rows(len(donor), seed=5, num_pages=12)
    _, pool = model.compute(
        model.placed_pool(), donor, np.arange(len(donor)), model.table(donor_rows, bucket=TABLE), form, bucket=BUCKET
    )
    rows, shifts = rows_from(14, len(target)), np.zeros(len(target), int)
    rows[place : place + length] = donor_rows[source : source + length]
    shifts[place : place + length] = place - source
    stored = model.cached(pool, donor_rows[source : source + length])
    new = np.setdiff1d(np.arange(len(target)), np.arange(place, place + length))
    table = model.table(rows, shifts, bucket=TABLE)
    out, pool = model.compute(pool, target[new], new, table, form, bucket=BUCKET)
    for before, after in zip(stored, model.cached(pool, donor_rows[source : source + length]), strict=True):
        assert np.array_equal(before, after)  # serving never rewrites the donor
    return new, out, *stored


HEADERS = (1, 45, 131)
HEADER = np.random.default_rng(12).integers(3, 256, max(HEADERS))


@pytest.mark.parametrize("added", [True, False], ids=["header_added", "header_removed"])
@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("form", FORMS)
def test_shifted_hit_on_a_one_layer_model_equals_fresh_computation_to_rounding(
    form: Form, header: int, added: bool, long_models
) -> None:
    """Prompt A, then header + A (δ > 0), or the other way round (δ < 0). Layer-0 rows do not depend on context, so reuse
    is exact but for rounding. A's first 32 tokens and last 20 are computed."""
    model = long_models("one_layer")
    plain, headed = TOKENS[:160], np.concatenate([HEADER[:header], TOKENS[:160]])
    if added:
        donor, target, piece = plain, headed, (32, header + 32, 108)
    else:
        donor, target, piece = headed, plain, (header + 32, 32, 108)
    new, out, *_ = served_shifted(model, donor, target, piece, form)
    fresh, _ = computed(model, target, form, rows_from(1, len(target)))
    tolerance = 2 * forward_tolerance(model.config, len(target), fresh)
    assert np.abs(out - fresh[new]).max() <= tolerance

    exact = model.reference.forward(target)
    assert np.abs(out - exact.logits[new]).max() <= tolerance
    place, length = piece[1:]
    unturned = model.reference.rotate(exact.k_r[:, place : place + length], -(place - piece[0]))
    served = np.arange(place, place + length)
    wrong = model.reference.forward_reused(target, served, exact.c_kv[:, served], unturned)
    assert np.abs(wrong.logits[target.size - 1] - exact.logits[-1]).max() > 10 * tolerance  # so δ matters here


@pytest.mark.parametrize(("source", "place"), [(40, 105), (130, 61)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["v2", "v3_two_mscales"])
def test_shifted_hit_on_more_layers_is_what_the_reference_computes_from_the_same_rows(
    name: str, form: Form, source: int, place: int, long_models
) -> None:
    model, length = long_models(name), 100
    donor, other = TOKENS, np.random.default_rng(13).integers(3, 256, LENGTH)
    target = np.concatenate([other[:place], donor[source : source + length], other[place : place + 40]])
    new, out, c_kv, k_r = served_shifted(model, donor, target, (source, place, length), form)
    turned = model.reference.rotate(k_r, place - source)
    exact = model.reference.forward_reused(target, place + np.arange(length), c_kv, turned).logits[new]
    tolerance = forward_tolerance(model.config, len(target), exact)
    assert np.abs(out - exact).max() <= tolerance
    fresh = model.reference.forward(target).logits[new]
    behind = new >= place
    assert np.abs(exact - fresh)[behind].max() > 10 * tolerance  # reuse is not the same as recomputing
