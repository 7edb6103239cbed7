"""Pages, capacity, cancellation, failed device calls, and how often anything is compiled."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import irminsul_jax as ij
from irminsul_jax.engine.runner import enable_compile_cache
from irminsul_jax.errors import RequestError
from irminsul_jax.functional import QUERY_BUCKETS
from tests.support.engine import (
    CAPACITY_PAGES,
    CONTEXT,
    LoadModel,
    assert_all_released,
    greedy,
    ids,
    new_engine,
    prompt,
    run,
)

SHARED = ids(1, 200)


def tokens_alone(engine: ij.Engine, *requests: tuple[dict[str, Any], ij.SamplingParams]) -> list[list[int]]:
    return [new_engine(engine.checkpoint).generate(one, sampling)[0].token_ids for one, sampling in requests]


def test_pages_balance_after_random_submits_cancels_and_steps(engine: ij.Engine) -> None:
    draw = random.Random(0)
    known: list[str] = []
    outputs: dict[str, ij.RequestOutput] = {}
    for number in range(150):
        action = draw.random()
        if action < 0.45:
            pieces = [ids(draw.randrange(6), 40 + 30 * draw.randrange(4)) for _ in range(draw.randint(1, 3))]
            known.append(engine.submit(prompt(*pieces), greedy(draw.choice([1, 3, 9, 70]))))
        elif action < 0.65 and known:
            engine.cancel(draw.choice(known))
        else:
            outputs |= {out.request_id: out for out in engine.step()}
        stats = engine.cache_stats()
        assert stats["free_pages"] + stats["evictable_pages"] + stats["held_pages"] == CAPACITY_PAGES, number
    outputs |= run(engine)
    assert set(outputs) == set(known)
    assert {out.finish_reason for out in outputs.values()} == {"cancelled", "length"}
    assert engine.cache_stats()["evicted_pages"] > 0
    assert_all_released(engine)


def test_cancel_and_retry_under_a_shared_prefix_leaves_others_alone(engine: ij.Engine) -> None:
    survivors = [(prompt(SHARED, ids(10 + i, 20)), greedy(24)) for i in range(2)]
    expected = tokens_alone(engine, *survivors)
    submitted = [engine.submit(*one) for one in survivors]
    outputs: dict[str, ij.RequestOutput] = {}
    for attempt in range(4):
        victim = engine.submit(prompt(SHARED, ids(20, 30)), greedy(60))
        outputs |= {out.request_id: out for out in engine.step()}
        assert engine.cancel(victim), attempt
    outputs |= run(engine)
    assert [outputs[i].token_ids for i in submitted] == expected
    assert_all_released(engine)


def test_cancel_of_waiting_running_unknown_and_finished(engine: ij.Engine) -> None:
    running = [engine.submit(prompt(ids(i, 30)), greedy(60)) for i in range(3)]
    waiting = engine.submit(prompt(ids(9, 30)), greedy(60))
    assert engine.step() == []
    assert engine.cancel(waiting)
    assert engine.cancel(running[1])
    assert not engine.cancel("request-nobody")
    ended = {out.request_id: out for out in engine.step()}
    assert {i: out.finish_reason for i, out in ended.items()} == {waiting: "cancelled", running[1]: "cancelled"}
    assert ended[waiting].token_ids == []
    assert len(ended[running[1]].token_ids) > 0
    assert not engine.cancel(running[1])
    run(engine)
    assert not engine.cancel(running[0])
    again = engine.generate(prompt(ids(1, 30)), greedy(1))[0]
    assert again.usage.exact_tokens == 29  # what a cancelled request computed stays reusable
    assert_all_released(engine)


def test_request_over_capacity_is_refused_with_numbers(load_model: LoadModel) -> None:
    engine = new_engine(load_model("text"), pages=4)
    with pytest.raises(
        RequestError, match=r"250 prompt tokens and max_tokens=10 need 5 pages.*pool has 4 \(256 tokens\)"
    ):
        engine.submit(prompt(ids(1, 250)), greedy(10))
    assert not engine.has_unfinished


def test_request_that_does_not_fit_now_waits_and_harms_nobody(engine: ij.Engine) -> None:
    large = [(prompt(ids(i, 600)), greedy(100)) for i in range(3)]  # 11 pages each, 24 in the pool
    expected = tokens_alone(engine, *large)
    submitted = [engine.submit(*one) for one in large]
    engine.step()
    assert engine.cache_stats()["reservations"] == 2
    outputs = run(engine)
    assert [outputs[i].token_ids for i in submitted] == expected
    assert engine.cache_stats()["evicted_pages"] > 0
    assert_all_released(engine)


def test_longest_prompt_that_fits_is_served(engine: ij.Engine) -> None:
    out = engine.generate(prompt(ids(1, CONTEXT - 4)), greedy(4))[0]
    assert (out.finish_reason, len(out.token_ids)) == ("length", 4)
    with pytest.raises(RequestError, match="over the context"):
        engine.generate(prompt(ids(1, CONTEXT - 3)), greedy(4))


# --- failed device calls ----------------------------------------------------------------------------------------------


def failing(function: Callable[..., Any], when: list[int]) -> Callable[..., Any]:
    """`function`, but its calls number `when` lose the pool and fail, as a donated call does."""
    count = iter(range(10**6))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(count) in when:
            for array in args[2].arrays:
                array.delete()
            raise jax.errors.JaxRuntimeError("INTERNAL: device lost")
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize(("program", "when"), [("_prefill", [1]), ("_decode", [0]), ("_decode", [2])])
def test_requests_survive_one_failed_call(
    engine: ij.Engine, monkeypatch: pytest.MonkeyPatch, program: str, when: list[int]
) -> None:
    from irminsul_jax.engine import runner

    sampled = ij.SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
    requests = [(prompt(SHARED), greedy(12)), (prompt(SHARED, ids(2, 20)), sampled), (prompt(ids(3, 30)), greedy(2))]
    requests += [(prompt(ids(4, 30)), sampled)]  # waits: three slots
    expected = tokens_alone(engine, *requests)
    monkeypatch.setattr(runner, program, failing(getattr(runner, program), when))
    outs = engine.generate([one for one, _ in requests], [sampling for _, sampling in requests])
    assert [out.token_ids for out in outs] == expected
    assert {out.finish_reason for out in outs} == {"length"}
    assert_all_released(engine)


def test_second_failure_gives_the_request_back_and_the_engine_lives_on(
    engine: ij.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from irminsul_jax.engine import runner

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_decode", failing(runner._decode, [0, 1]))
        out = engine.generate(prompt(SHARED), greedy(12))[0]
    assert out.finish_reason == "error"
    assert "failed 2 times" in out.error
    assert "device lost" in out.error
    assert_all_released(engine)
    healthy = engine.generate(prompt(SHARED), greedy(12))[0]
    assert healthy.error is None
    assert healthy.num_cached_tokens == 0  # nothing of the lost pool is served
    assert [healthy.token_ids] == tokens_alone(engine, (prompt(SHARED), greedy(12)))


def test_interrupt_passes_through_and_leaves_a_usable_engine(
    engine: ij.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from irminsul_jax.engine import runner

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([prompt(SHARED), prompt(ids(2, 20))], greedy(12))
    assert {out.finish_reason for out in run(engine).values()} == {"cancelled"}
    assert [engine.generate(prompt(SHARED), greedy(12))[0].token_ids] == tokens_alone(
        engine, (prompt(SHARED), greedy(12))
    )


# --- compilation ------------------------------------------------------------------------------------------------------


def test_long_replay_compiles_no_more_than_its_buckets(load_model: LoadModel) -> None:
    engine = new_engine(load_model("one_layer"), pages=30, prefill_chunk=128)
    before = engine.num_compilations
    lengths = np.random.default_rng(0).permutation(np.arange(5, 305, 5))
    outs = engine.generate([prompt(ids(i, int(n))) for i, n in enumerate(lengths)], greedy(2))
    assert len(outs) == 60
    query_buckets = sum(bucket <= 128 for bucket in QUERY_BUCKETS)
    tables = 1  # up to 32 fragments: 300 fresh tokens are few
    assert 1 <= engine.num_compilations - before <= tables * (query_buckets + 1) + 1  # and a first sample


def test_after_warmup_serving_compiles_nothing(load_model: LoadModel) -> None:
    engine = new_engine(load_model("one_layer"), pages=20, prefill_chunk=128)
    before = engine.num_compilations
    compiled = engine.warmup(400)
    assert compiled == engine.num_compilations > before
    assert any(Path(jax.config.values["jax_compilation_cache_dir"]).iterdir())
    drawn = ij.SamplingParams(temperature=1.0, max_tokens=4, seed=1)
    engine.generate([prompt(ids(i, n)) for i, n in enumerate((1, 63, 64, 65, 200, 390))], [greedy(4), drawn] * 3)
    engine.generate(prompt(ids(7, 40), ids(4, 200), ids(2, 64)), greedy(4))
    assert engine.num_compilations == compiled
    assert_all_released(engine)


def test_compile_cache_is_on_by_default_and_leaves_the_users_alone(
    load_model: LoadModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IRMINSUL_CACHE", str(tmp_path))
    known = jax.config.values["jax_compilation_cache_dir"]
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        new_engine(load_model("one_layer"), compile_cache=False)
        assert jax.config.values["jax_compilation_cache_dir"] is None
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
        enable_compile_cache(True)
        assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "own")
        jax.config.update("jax_compilation_cache_dir", None)
        new_engine(load_model("one_layer"))
        assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "compiled")
    finally:
        jax.config.update("jax_compilation_cache_dir", known)
