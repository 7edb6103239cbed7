"""A request gives the same tokens alone, in a batch, in another order, and whatever happens to others meanwhile."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import irminsul_jax as ij
from irminsul_jax.sampling import SamplerState, sample_rows
from tests.support.engine import LoadModel, assert_all_released, greedy, ids, new_engine, prompt, run


def drawn(**fields: object) -> ij.SamplingParams:
    return ij.SamplingParams(**{"temperature": 1.0, "max_tokens": 6, "ignore_eos": True, **fields})


MIXED = [
    (prompt(ids(1, 40)), greedy()),
    (prompt(ids(2, 90)), drawn(seed=5)),
    (prompt(ids(3, 7)), drawn(seed=6, top_p=0.8)),
    (prompt(ids(4, 130)), drawn(seed=7, top_k=5, temperature=1.7)),
    (prompt(ids(5, 64)), drawn(seed=8, min_p=0.2, temperature=0.6, max_tokens=9)),
    (prompt(ids(6, 65)), greedy(max_tokens=3)),
]


@pytest.fixture(scope="module")
def alone(load_model: LoadModel) -> list[list[int]]:
    """Each of `MIXED` served by an engine of its own."""
    return [new_engine(load_model("text")).generate(one, sampling)[0].token_ids for one, sampling in MIXED]


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [5, 3, 1, 4, 2, 0]])
def test_batch_and_order_do_not_change_tokens(engine: ij.Engine, alone: list[list[int]], order: list[int]) -> None:
    outs = engine.generate([MIXED[i][0] for i in order], [MIXED[i][1] for i in order])
    assert [out.token_ids for out in outs] == [alone[i] for i in order]


def test_cancelled_company_does_not_change_tokens(engine: ij.Engine, alone: list[list[int]]) -> None:
    submitted = [engine.submit(one, sampling) for one, sampling in MIXED[:2]]
    victims = [engine.submit(prompt(ids(2, 90), ids(50 + i, 20)), greedy(40)) for i in range(3)]
    outputs = {out.request_id: out for out in engine.step()}
    for victim in victims:
        assert engine.cancel(victim)
    submitted += [engine.submit(one, sampling) for one, sampling in MIXED[2:]]
    outputs |= run(engine)
    assert [outputs[i].token_ids for i in submitted] == alone
    assert {outputs[victim].finish_reason for victim in victims} == {"cancelled"}
    assert_all_released(engine)


def test_seedless_requests_differ_but_repeat_across_engines(load_model: LoadModel) -> None:
    def serve(seed: int) -> list[list[int]]:
        engine = new_engine(load_model("text"), seed=seed)
        return [out.token_ids for out in engine.generate([prompt(ids(1, 40))] * 3, drawn(max_tokens=8))]

    first = serve(0)
    assert len({tuple(tokens) for tokens in first}) == 3
    assert serve(0) == first
    assert serve(1) != first


def test_any_engine_seed_is_usable(load_model: LoadModel) -> None:
    engine = new_engine(load_model("text"), seed=2**64 - 1)
    outs = engine.generate([prompt(ids(1, 40))] * 2, drawn(max_tokens=2))
    assert [out.finish_reason for out in outs] == ["length", "length"]


# --- sample_rows ------------------------------------------------------------------------------------------------------


_sample = jax.jit(sample_rows, static_argnames=("all_greedy", "num_top"))


def state(count: int, **fields: object) -> SamplerState:
    def column(name: str, default: float, dtype: type) -> np.ndarray:
        return np.broadcast_to(np.asarray(fields.get(name, default), dtype), (count,)).copy()

    seeds = np.stack([np.arange(count, dtype=np.uint32), np.zeros(count, np.uint32)], 1)
    return SamplerState(
        temperature=column("temperature", 1.0, np.float32),
        top_k=column("top_k", 0, np.int32),
        top_p=column("top_p", 1.0, np.float32),
        min_p=column("min_p", 0.0, np.float32),
        seed=seeds,
        stop_ids=np.asarray(fields.get("stop_ids", np.full((count, 8), -1)), np.int32),
        min_tokens=column("min_tokens", 0, np.int32),
        max_tokens=column("max_tokens", 99, np.int32),
    )


def draw_many(logits: np.ndarray, count: int, **fields: object) -> np.ndarray:
    """`count` draws from the same logits with seeds 0, 1, 2, ..."""
    rows = jnp.broadcast_to(logits, (count, len(logits)))
    steps = jnp.zeros(count, jnp.int32)
    return np.asarray(_sample(rows, state(count, **fields), steps, all_greedy=False, num_top=0).tokens)


def support(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Temperature, top-k, top-p, min-p, written down once more in NumPy."""
    order = np.argsort(-logits / temperature)[: top_k or None]
    probs = np.exp((logits / temperature)[order])
    probs /= probs.sum()
    before = np.cumsum(probs) - probs
    return set(order[(before < top_p) & (probs >= min_p * probs[0])].tolist())


LOGITS = np.random.default_rng(0).standard_normal(12).astype(np.float32) * 1.2


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 3, 1.0, 0.0), (1.0, 0, 0.6, 0.0), (1.0, 0, 1.0, 0.3), (2.0, 6, 0.7, 0.1), (0.5, 0, 0.05, 0.0)],
)
def test_draws_stay_in_the_filtered_support_and_reach_it(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    tokens = draw_many(LOGITS, 1500, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert set(tokens.tolist()) == support(LOGITS, temperature, top_k, top_p, min_p)


def test_draws_follow_the_distribution() -> None:
    tokens = draw_many(LOGITS, 1500, temperature=0.8)
    probs = np.exp(LOGITS / 0.8) / np.exp(LOGITS / 0.8).sum()
    frequencies = np.bincount(tokens, minlength=len(LOGITS)) / len(tokens)
    np.testing.assert_allclose(frequencies, probs, atol=5 * 0.5 / np.sqrt(len(tokens)))


def test_greedy_rows_are_not_touched_by_drawing_rows() -> None:
    rows = np.random.default_rng(1).standard_normal((64, 12)).astype(np.float32)
    temperature = np.arange(64) % 2 * 1.5
    steps = jnp.zeros(64, jnp.int32)
    mixed = _sample(jnp.asarray(rows), state(64, temperature=temperature), steps, all_greedy=False, num_top=0)
    tokens = np.asarray(mixed.tokens)
    np.testing.assert_array_equal(tokens[::2], rows.argmax(1)[::2])
    assert (tokens[1::2] != rows.argmax(1)[1::2]).any()


def test_stop_tokens_are_banned_below_min_tokens() -> None:
    rows = jnp.broadcast_to(LOGITS, (2, 12))
    best = int(LOGITS.argmax())
    stops = np.full((2, 8), -1)
    stops[:, 0] = best
    sampled = _sample(
        rows, state(2, temperature=0.0, stop_ids=stops, min_tokens=3), jnp.array([2, 3]), all_greedy=True, num_top=0
    )
    assert np.asarray(sampled.tokens).tolist() == [int(np.argsort(-LOGITS)[1]), best]
