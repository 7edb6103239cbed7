"""Prefix hits are bit-identical to cold runs: CPU, float32, form pinned, query buckets of 64 and more."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from irminsul_jax.functional import decode_step
from irminsul_jax.model.attention import Form
from irminsul_jax.rope import inv_freq
from pallas_kernels import FragmentTable, fragments_of, pack_fragments
from tests.support.models import FORMS, Model, random_model, rows_from, shuffled_rows
from tests.support.tolerance import forward_tolerance

LENGTH = 560  # more than one block of 512 keys
TOKENS = np.random.default_rng(21).integers(0, 256, LENGTH)
LARGER_TABLE = (128, 32)


@functools.cache
def model_of(hidden: int) -> Model:
    """At 512 one layer is enough: equal hidden states in, equal hidden states out is what 128 shows for two."""
    return random_model(hidden, num_dense_layers=1 if hidden == 128 else 0)


_decode_step = jax.jit(decode_step, static_argnames="config", donate_argnames="pool")


def run(
    model: Model, cuts: list[int], form: Form, rows: np.ndarray, bucket: tuple[int, int] | None = None
) -> np.ndarray:
    """Logits of all positions, computed in chunks that end at `cuts`."""
    pool, table, parts = model.placed_pool(), model.table(rows, bucket=bucket), []
    for start, stop in zip([0, *cuts], cuts, strict=False):
        positions = np.arange(start, stop)
        out, pool = model.compute(pool, TOKENS[start:stop], positions, table, form, optimised=True)
        parts.append(out)
    return np.concatenate(parts)


@functools.cache
def cold(hidden: int, form: Form) -> np.ndarray:
    return run(model_of(hidden), [512, LENGTH], form, rows_from(1, LENGTH))


@pytest.mark.parametrize("hidden", [128, 512])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("cuts", "shuffled"),
    [
        ([500, 560], False),  # the prefix ends inside a page
        ([37, 548, 560], True),  # so does the first chunk, and all pages lie elsewhere
        ([64, 511, 560], True),
        ([48, 112, 559, 560], False),  # a single new token, as after a full hit
    ],
)
def test_prefix_hit_is_bit_identical_to_the_cold_run(hidden: int, form: Form, cuts: list[int], shuffled: bool) -> None:
    """Chunks of 12 to 512 tokens in buckets of 64 and 512; what a chunk finds in the pool is a prefix hit to it."""
    rows = shuffled_rows(LENGTH, seed=3) if shuffled else rows_from(5, LENGTH)
    assert np.array_equal(run(model_of(hidden), cuts, form, rows), cold(hidden, form))


@pytest.mark.parametrize("form", FORMS)
def test_all_query_buckets_give_the_same_bits(form: Form) -> None:
    cuts = [100, 300, 512, 560]  # buckets of 128, 256, 256 and 64; the cold run has 512 and 64
    assert np.array_equal(run(model_of(128), cuts, form, shuffled_rows(LENGTH, seed=6)), cold(128, form))


def test_padding_of_the_table_changes_no_bit() -> None:
    """Neither the length of the table nor what follows the sequence in it counts."""
    again = run(model_of(128), [512], "absorbed", shuffled_rows(LENGTH + 200, seed=4), LARGER_TABLE)
    assert np.array_equal(again, cold(128, "absorbed")[:512])


@pytest.mark.parametrize("hidden", [128, 512])
def test_across_forms_only_rounding_differs(hidden: int) -> None:
    absorbed, expanded = (cold(hidden, form) for form in FORMS)
    assert np.abs(absorbed - expanded).max() <= 2 * forward_tolerance(model_of(hidden).config, LENGTH, absorbed)
    assert not np.array_equal(absorbed, expanded)  # so pinning the form is not an empty promise


BATCH = 4
STARTS = (70, 5, 128, 33)


def batch_table(model: Model, lengths: list[int], first_page: int) -> FragmentTable:
    """One table row per slot, each sequence in three pages of its own; length 0 is an idle slot."""
    sequences = [
        fragments_of(rows_from(first_page + 3 * b, n).astype(np.int32), np.zeros(n, np.int32))
        for b, n in enumerate(lengths)
    ]
    return pack_fragments(sequences, inv_freq(model.config.rope, model.config.qk_rope_head_dim))


def decoded(model: Model, slots: list[int | None], first_page: int) -> list[np.ndarray]:
    """Logits of three decode steps of the given sequences, one per slot; the prompt's rows come from decode steps' own
    pool, filled by prefill."""
    pool = model.placed_pool()
    lengths = [0 if s is None else STARTS[s] + 3 for s in slots]
    for b, s in enumerate(slots):
        if s is not None:
            rows = rows_from(first_page + 3 * b, STARTS[s])
            ids = TOKENS[100 * s : 100 * s + STARTS[s]]
            _, pool = model.compute(
                pool, ids, np.arange(STARTS[s]), model.table(rows), "absorbed", bucket=512, optimised=True
            )
    table, steps = batch_table(model, lengths, first_page), []
    for step in range(3):
        tokens = np.array([0 if s is None else TOKENS[400 + 10 * s + step] for s in slots], np.int32)
        positions = np.array([-1 if s is None else STARTS[s] + step for s in slots], np.int32)
        out, pool = _decode_step(model.params, model.config, pool, jnp.asarray(tokens), jnp.asarray(positions), table)
        steps.append(np.asarray(out))
    return steps


@pytest.mark.parametrize("hidden", [128, 512])
def test_a_row_of_decode_step_does_not_depend_on_its_company_or_its_slot(hidden: int) -> None:
    model = model_of(hidden)
    together = decoded(model, [0, 1, 2, 3], first_page=1)
    moved = decoded(model, [3, 2, 0, 1], first_page=7)
    for step in range(3):
        for slot, s in enumerate([3, 2, 0, 1]):
            assert np.array_equal(moved[step][slot], together[step][s])
    for s in range(BATCH):
        alone = decoded(model, [None, s, None, None], first_page=2)
        for step in range(3):
            assert np.array_equal(alone[step][1], together[step][s])
    assert not np.array_equal(together[0][0], together[1][0])
