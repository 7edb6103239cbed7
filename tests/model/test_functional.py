"""The pure functions as users call them: inside their own `jit`, with their own sampler, ragged batches, and errors."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from irminsul_jax.errors import RequestError
from irminsul_jax.functional import (
    QUERY_BUCKETS,
    Batch,
    Sampling,
    decode_step,
    generate,
    init_pool,
    make_batch,
    pick_form,
    prefill,
    query_bucket,
)
from tests.support.models import QUICK, Model

PROMPTS = [np.random.default_rng(n).integers(3, 256, n).tolist() for n in (70, 3, 64)]
"""Below, at and beyond a page."""
STEPS = 8

_generate = jax.jit(generate, static_argnames=("config", "sampling"), donate_argnames="pool", compiler_options=QUICK)
_prefill = jax.jit(prefill, static_argnames=("config", "form"), donate_argnames="pool", compiler_options=QUICK)
_decode_step = jax.jit(decode_step, static_argnames="config", donate_argnames="pool", compiler_options=QUICK)


@pytest.fixture(scope="module")
def model(long_models) -> Model:
    return long_models("one_layer")


def padded(batch: Batch) -> Batch:
    """The batch in the bucket of 128 tokens, so that all prompts here share one program."""
    padding = QUERY_BUCKETS[1] - len(batch.tokens)
    return dataclasses.replace(
        batch,
        tokens=np.pad(batch.tokens, (0, padding)),
        positions=np.pad(batch.positions, (0, padding), constant_values=-1),
        sequence=np.pad(batch.sequence, (0, padding)),
    )


@pytest.fixture(scope="module")
def by_hand(model: Model) -> list[tuple[list[int], list[np.ndarray]]]:
    """Greedy tokens and the logits they were chosen from, each prompt alone, by `prefill` and `decode_step`."""
    results = []
    for prompt in PROMPTS:
        batch = make_batch([prompt], model.config, max_tokens=STEPS)
        pool = model.placed_pool()
        scores, pool = _prefill(model.params, model.config, pool, padded(batch), form="absorbed")
        seen, tokens = [], []
        for step in range(STEPS):
            seen.append(np.asarray(scores[0]))
            tokens.append(int(seen[-1].argmax()))
            place = jnp.array([len(prompt) + step], jnp.int32)
            scores, pool = _decode_step(
                model.params, model.config, pool, jnp.array(tokens[-1:], jnp.int32), place, batch.table
            )
        results.append((tokens, seen))
    return results


def test_rows_of_a_ragged_batch_are_those_of_single_runs_with_their_logprobs(model: Model, by_hand) -> None:
    batch = make_batch(PROMPTS, model.config, max_tokens=STEPS)
    out = _generate(
        model.params, model.config, model.placed_pool(), batch, Sampling(max_tokens=STEPS), jax.random.key(0)
    )
    assert out.lengths.tolist() == [STEPS] * 3
    for row, (tokens, seen) in enumerate(by_hand):
        assert out.tokens[row].tolist() == tokens
        exact = [s[t] - np.log(np.exp(s.astype(np.float64)).sum()) for s, t in zip(seen, tokens, strict=True)]
        np.testing.assert_allclose(out.logprobs[row], exact, rtol=0, atol=2e-5)


def test_stop_tokens_end_a_row_and_leave_the_others_alone(model: Model, by_hand) -> None:
    stop = by_hand[1][0][2]
    expected = [t[: t.index(stop) + 1] if stop in t else t for t, _ in by_hand]
    assert len({len(e) for e in expected}) > 1
    batch = make_batch(PROMPTS, model.config, max_tokens=STEPS)
    sampling = Sampling(max_tokens=STEPS, stop_token_ids=(stop, 1))
    out = _generate(model.params, model.config, model.placed_pool(), batch, sampling, jax.random.key(0))
    for row, tokens in enumerate(expected):
        n = len(tokens)
        assert int(out.lengths[row]) == n
        assert out.tokens[row].tolist() == tokens + [-1] * (STEPS - n)
        assert (np.asarray(out.logprobs[row, n:]) == 0).all()
        assert (np.asarray(out.logprobs[row, :n]) < 0).all()


def test_generate_inside_a_jit_of_the_users_own_with_a_custom_sampler(model: Model, by_hand) -> None:
    """The sampler is any `(logits, key) -> tokens`, and step t has the key `fold_in(key, t)`."""

    def gumbel(logits: jax.Array, key: jax.Array) -> jax.Array:
        return jax.random.categorical(key, logits).astype(jnp.int32)

    @jax.jit
    def mine(params, batch: Batch, key):
        pool = init_pool(model.config, 8, jnp.float32)
        out = generate(params, model.config, pool, batch, Sampling(max_tokens=2, sampler=gumbel), key)
        return out.tokens, out.pool

    seen = by_hand[0][1]
    batch = make_batch(PROMPTS[:1], model.config, max_tokens=2)
    draws = []
    for seed in range(6):
        key = jax.random.key(seed)
        drawn, _ = mine(model.params, batch, key)
        assert int(drawn[0, 0]) == int(gumbel(jnp.asarray(seen[0])[None], jax.random.fold_in(key, 0))[0])
        draws.append(tuple(drawn[0].tolist()))
    assert len(set(draws)) > 1
    again, pool = mine(model.params, batch, jax.random.key(5))
    assert tuple(again[0].tolist()) == draws[-1]
    written = np.asarray(pool["c_kv"])[0, 1:].any(-1).ravel()
    assert written.tolist() == [True] * (len(PROMPTS[0]) + 1) + [False] * (7 * 64 - len(PROMPTS[0]) - 1)


def test_the_donated_pool_is_gone_and_the_returned_one_goes_on(model: Model, by_hand) -> None:
    pool = model.placed_pool()
    given = pool.arrays
    for first_page in (1, 9):  # a second batch in the same pool, elsewhere
        batch = make_batch(PROMPTS, model.config, max_tokens=STEPS, first_page=first_page)
        out = _generate(model.params, model.config, pool, batch, Sampling(max_tokens=STEPS), jax.random.key(0))
        assert [row.tolist() for row in out.tokens] == [tokens for tokens, _ in by_hand]
        pool = out.pool
    assert all(a.is_deleted() for a in given)


def test_make_batch_lays_prompts_into_pages_of_their_own(model: Model) -> None:
    batch = make_batch(PROMPTS, model.config, max_tokens=STEPS, first_page=4)
    total = sum(map(len, PROMPTS))
    assert len(batch.tokens) == query_bucket(total)
    assert (batch.positions[total:] == -1).all()
    assert batch.lengths.tolist() == [70, 3, 64]
    assert [int(batch.tokens[i]) for i in batch.last] == [p[-1] for p in PROMPTS]
    used = [set(row[row > 0].tolist()) for row in batch.table.page]
    assert used == [{4, 5}, {6}, {7, 8}]


@pytest.mark.parametrize(
    ("prompts", "max_tokens", "message"),
    [
        ([[5, 6], []], 4, "prompt is empty"),
        ([[5, 256]], 4, r"token id 256 .* vocabulary of 256"),
        ([[-1]], 4, r"token id -1 .* vocabulary"),
        ([[5] * 10], 163831, r"10 prompt tokens and 163831 to generate are 163841, over the context of 163840"),
    ],
)
def test_make_batch_refuses_what_no_pool_could_serve(prompts, max_tokens: int, message: str, model: Model) -> None:
    with pytest.raises(RequestError, match=message):
        make_batch(prompts, model.config, max_tokens=max_tokens)


def test_a_pool_needs_a_page_beside_the_scratch_page(model: Model) -> None:
    with pytest.raises(RequestError, match="at least 2 pages"):
        init_pool(model.config, 1)


def test_forms_cross_near_170_new_tokens_at_deepseek_sizes(model: Model) -> None:
    """Absorbed costs 2,176 operations per query, key and head, expanded 640 and 262,144 once per key and head:
    262144 / (2176 - 640) = 170.7."""
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    config = dataclasses.replace(model.config, **sizes)
    first = next(n for n in range(1, 1000) if pick_form(config, n) == "expanded")
    assert first == 171
    assert all(pick_form(config, n) == "expanded" for n in range(first, 2000, 37))
    narrow = dataclasses.replace(config, kv_lora_rank=64)  # expanding can never pay
    assert pick_form(narrow, 10**6) == "absorbed"


def num_programs(jitted: Any) -> int:
    return jitted._cache_size()


def test_prompt_lengths_65_to_128_compile_once(model: Model) -> None:
    """Case 38."""

    def counted(params, config, pool, batch):  # a function of its own: jit shares its cache between wrappers of one
        return prefill(params, config, pool, batch, form="absorbed")

    program = jax.jit(counted, static_argnames="config", donate_argnames="pool", compiler_options=QUICK)
    pool = model.placed_pool()  # as the returned one: committed to a device
    for length in range(65, 129):
        batch = make_batch([[7] * length], model.config, max_tokens=4)
        scores, pool = program(model.params, model.config, pool, batch)
    assert num_programs(program) == 1
    assert np.isfinite(np.asarray(scores)).all()
    assert QUERY_BUCKETS == (64, 128, 256, 512)
    assert [query_bucket(n) for n in (1, 64, 65, 512, 513, 1024, 1025)] == [64, 64, 128, 512, 1024, 1024, 1536]


@pytest.mark.parametrize("length", [1, 63, 65, 100, 127])
def test_lengths_that_are_no_multiple_of_a_block_give_the_exact_logits(length: int, model: Model) -> None:
    """Case 40: no NaN from padding, even when everything that is not the prompt's is NaN."""
    prompt = np.random.default_rng(length).integers(3, 256, length)
    batch = make_batch([prompt.tolist()], model.config, max_tokens=4)
    pool = jax.tree.map(lambda a: a * jnp.nan, model.placed_pool())
    scores, _ = _prefill(model.params, model.config, pool, padded(batch), form="absorbed")
    exact = model.reference.forward(prompt).logits[-1]
    assert np.abs(np.asarray(scores[0]) - exact).max() <= 2e-5
