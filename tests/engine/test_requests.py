"""How requests are written, refused, stopped and handed back."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import irminsul_jax as ij
from irminsul_jax.errors import RequestError
from tests.support.engine import (
    CONTEXT,
    EOS,
    VOCAB,
    LoadModel,
    assert_all_released,
    greedy,
    ids,
    new_engine,
    prompt,
    run,
)

TEXT = "the model serves cached rows at new positions"


def test_text_dict_and_ids_are_the_same_request(engine: ij.Engine) -> None:
    encoded = engine.tokenizer.encode(TEXT).tolist()
    outs = engine.generate([TEXT, {"prompt": TEXT}, {"prompt_token_ids": encoded}], greedy())
    single = engine.generate(TEXT, greedy())
    assert [out.prompt_token_ids for out in [*outs, *single]] == [encoded] * 4
    assert len({tuple(out.token_ids) for out in [*outs, *single]}) == 1
    assert outs[0].text == engine.tokenizer.decode(np.array(outs[0].token_ids))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt_token_ids": []}, "empty"),
        ({"prompt_token_ids": [VOCAB]}, f"token id {VOCAB} is outside the model's vocabulary of {VOCAB}"),
        ({"prompt_token_ids": [-1]}, "negative"),
        ({"prompt_token_ids": [[1, 2]]}, "flat list"),
        ({"prompt_token_ids": [0.5]}, "flat list of integers"),
        ({"prompt_token_ids": [5], "cache_sault": "x"}, "unknown prompt keys 'cache_sault'; known: "),
        ({"prompt_token_ids": [5], "prompt": "x"}, 'either "prompt" or "prompt_token_ids"'),
        ({"prompt_token_ids": [5], "cache_salt": 7}, '"cache_salt" must be a text'),
        ({}, 'either "prompt" or "prompt_token_ids"'),
        ({"prompt": 5}, '"prompt" must be a text'),
        ({"prompt_token_ids": [5] * CONTEXT}, f"over the context of {CONTEXT}; shorten the prompt or lower max_tokens"),
    ],
)
def test_malformed_prompts_are_refused_before_anything_runs(engine: ij.Engine, bad: object, message: str) -> None:
    with pytest.raises(RequestError, match=r"^prompt 1 of 2: ") as caught:
        engine.generate([prompt(ids(1, 20)), bad], greedy())
    assert message in str(caught.value)
    assert not engine.has_unfinished
    assert engine.step() == []
    assert engine.cache_stats()["donors"] == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop_token_ids": [2**40]}, "stop_token_ids holds 1099511627776, which is outside"),
        ({"logprobs": VOCAB + 1}, f"logprobs={VOCAB + 1} is more than"),
    ],
)
def test_sampling_that_does_not_fit_the_model_is_refused(engine: ij.Engine, fields: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        engine.submit(prompt(ids(1, 20)), greedy(**fields))


def test_largest_sampling_values_are_served(load_model: LoadModel) -> None:
    wide = ij.SamplingParams(temperature=1.0, top_k=2**40, seed=2**64 - 1, max_tokens=1, logprobs=VOCAB)
    out = new_engine(load_model("one_layer")).generate(prompt(ids(1, 20)), wide)[0]
    assert len(out.logprobs[0].top) == VOCAB
    assert sum(np.exp(p) for _, p in out.logprobs[0].top) == pytest.approx(1, abs=1e-4)


def test_unknown_sampling_argument_is_suggested() -> None:
    with pytest.raises(RequestError, match="use max_tokens"):
        ij.SamplingParams(max_new_tokens=3)


def test_one_sampling_per_prompt_and_a_wrong_number_of_them(engine: ij.Engine) -> None:
    prompts = [prompt(ids(1, 20)), prompt(ids(2, 20))]
    assert [len(out.token_ids) for out in engine.generate(prompts, [greedy(2), greedy(5)])] == [2, 5]
    with pytest.raises(RequestError, match="2 prompts but 3 SamplingParams"):
        engine.generate(prompts, [greedy()] * 3)
    assert engine.generate([], greedy()) == []


def test_checkpoint_without_tokenizer_works_on_ids(load_model: LoadModel) -> None:
    engine = new_engine(load_model("one_layer"))
    out = engine.generate(prompt(ids(1, 20)), greedy(3))[0]
    assert out.text is None
    assert len(out.token_ids) == 3
    with pytest.raises(RequestError, match=r"no tokenizer\.json, so text cannot be encoded"):
        engine.generate("text", greedy())
    with pytest.raises(RequestError, match=r"no tokenizer\.json, so chat is not possible"):
        engine.chat([{"role": "user", "content": "x"}], greedy())
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        engine.submit(prompt(ids(1, 20)), greedy(stop="x"))


def test_chat_uses_the_checkpoints_template_and_tools(engine: ij.Engine) -> None:
    messages = [{"role": "user", "content": TEXT}]
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
    plain = engine.chat(messages, greedy(2))[0]
    with_tools, again = engine.chat([messages, messages], greedy(2), tools=tools)
    decode = engine.tokenizer.decode
    shown = decode(np.array(with_tools.prompt_token_ids), skip_special_tokens=False)
    assert "look_up" in shown
    assert shown.endswith("<|im_assistant|>assistant<|im_middle|>")
    assert TEXT in shown
    assert "look_up" not in decode(np.array(plain.prompt_token_ids), skip_special_tokens=False)
    assert again.prompt_token_ids == with_tools.prompt_token_ids
    assert again.usage.recomputed_tokens == 1
    bos = engine.tokenizer.encode("")[0]
    assert plain.prompt_token_ids.count(bos) <= 1
    assert engine.generate(TEXT, greedy(1))[0].prompt_token_ids.count(bos) == 1


# --- ends -------------------------------------------------------------------------------------------------------------


def continuation(engine: ij.Engine, seed: int, count: int = 12) -> list[int]:
    return engine.generate(prompt(ids(seed, 30)), greedy(count))[0].token_ids


def stop_position(tokens: list[int], after: int) -> int:
    """A position from `after` on whose token did not occur before it."""
    return next(i for i in range(after, len(tokens)) if tokens[i] not in tokens[:i])


def test_stop_tokens_end_a_request_naturally(engine: ij.Engine) -> None:
    full = continuation(engine, 1)
    at = stop_position(full, 3)
    stopped = engine.generate(prompt(ids(1, 30)), greedy(12, stop_token_ids=[full[at]]))[0]
    assert (stopped.token_ids, stopped.finish_reason) == (full[: at + 1], "stop")
    ended = engine.generate(prompt(ids(1, 30)), greedy(at))[0]
    assert (ended.token_ids, ended.finish_reason) == (full[:at], "length")
    longer = engine.generate(prompt(ids(1, 30)), greedy(12, stop_token_ids=[full[at]], min_tokens=at + 1))[0]
    assert longer.token_ids[:at] == full[:at]
    assert longer.token_ids[at] != full[at]  # banned below min_tokens
    assert_all_released(engine)


def test_end_of_sequence_is_honoured_unless_ignored(engine: ij.Engine) -> None:
    full = continuation(engine, 2)
    at = stop_position(full, 2)
    engine.eos_ids = (full[at], EOS)
    natural = engine.generate(prompt(ids(2, 30)), greedy(12, ignore_eos=False))[0]
    assert (natural.token_ids, natural.finish_reason) == (full[: at + 1], "stop")
    assert natural.text == engine.tokenizer.decode(np.array(full[:at]))
    ignoring = engine.generate(prompt(ids(2, 30)), greedy(12))[0]
    assert (ignoring.token_ids, ignoring.finish_reason) == (full, "length")


def test_stop_string_across_token_borders(engine: ij.Engine) -> None:
    full = engine.generate(prompt(ids(3, 30)), greedy(12))[0]
    decode = engine.tokenizer.decode
    ends = [len(decode(np.array(full.token_ids[:n]))) for n in range(13)]
    border = next(e for e in ends[4:9] if full.text.find(full.text[e - 1 : e + 1]) == e - 1)
    stop = full.text[border - 1 : border + 1]  # last character of one token, first of the next
    out = engine.generate(prompt(ids(3, 30)), greedy(12, stop=["never there", stop]))[0]
    assert out.finish_reason == "stop"
    assert out.text == full.text[: border - 1]
    assert len(out.token_ids) < 12
    assert out.token_ids == full.token_ids[: len(out.token_ids)]


def test_defaults_come_from_the_generation_config(engine: ij.Engine) -> None:
    assert engine.eos_ids[0] == EOS
    out = engine.generate(prompt(ids(1, 30)), ij.SamplingParams(max_tokens=4, ignore_eos=True))[0]
    assert out.token_ids == continuation(engine, 1, 4)  # do_sample: false


# --- threads ----------------------------------------------------------------------------------------------------------


def test_submissions_from_other_threads_stay_for_step(engine: ij.Engine) -> None:
    expected = new_engine(engine.checkpoint).generate([prompt(ids(30 + i, 25)) for i in range(6)], greedy(3))
    submitted: dict[int, str] = {}

    def submit(number: int) -> None:
        submitted[number] = engine.submit(prompt(ids(30 + number, 25)), greedy(3))

    threads = [threading.Thread(target=submit, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    own = engine.generate([prompt(ids(60 + i, 25)) for i in range(4)], greedy(8))
    for thread in threads:
        thread.join()
    assert [len(out.token_ids) for out in own] == [8] * 4
    others = run(engine) | {out.request_id: out for out in engine.step()}
    assert set(others) == set(submitted.values())
    assert [others[submitted[i]].token_ids for i in range(6)] == [out.token_ids for out in expected]


def test_generate_keeps_its_outputs_when_another_thread_steps(engine: ij.Engine) -> None:
    stop = threading.Event()
    stolen: list[ij.RequestOutput] = []

    def step() -> None:
        while not stop.is_set():
            stolen.extend(engine.step())

    thread = threading.Thread(target=step)
    thread.start()
    try:
        for i in range(5):
            assert len(engine.generate([prompt(ids(i, 20))] * 2, greedy(2))) == 2
    finally:
        stop.set()
        thread.join()
    assert stolen == []
