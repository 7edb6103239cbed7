"""Rendering: recorded requests → token ids."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from irminsul_jax.replay.render import Prompts, early_variation_line
from irminsul_jax.replay.trace import TraceRequest, read_traces
from irminsul_jax.text.tokenizer import Tokenizer
from tests.replay.support import TEXT_DATA, TOKENIZER, compact_session, expanded, write_trace


class CountingEncoder:
    """One id per character; remembers what it was asked."""

    chat_template = None

    def __init__(self) -> None:
        self.asked: list[str] = []

    def encode_pieces(self, texts: Sequence[str]) -> list[np.ndarray]:
        self.asked += texts
        return [np.array(list(map(ord, text)), np.int32) for text in texts]

    def encode_chat(self, messages: Sequence[Any], *, tools: Sequence[Any] | None = None) -> np.ndarray:
        raise AssertionError("there is no chat template")


def text_of(ids: np.ndarray) -> str:
    return "".join(map(chr, ids))


@pytest.fixture
def requests(tmp_path: Path) -> list[TraceRequest]:
    return read_traces([write_trace(tmp_path / "t.jsonl", [compact_session("s", 3, system="Be brief.")])]).requests


@pytest.fixture(scope="module")
def chat_tokenizer() -> Tokenizer:
    config, template = TEXT_DATA / "tokenizer_config.json", TEXT_DATA / "turns.jinja"
    return Tokenizer.from_file(TOKENIZER, config=config, chat_template=template)


def test_each_segment_stands_behind_its_kind(requests: list[TraceRequest]) -> None:
    prompts = Prompts(CountingEncoder(), requests, early_variation=True, seed=3)
    body = "".join(f"<|{kind}|>\n{text}\n" for kind, text, _ in requests[1].segments)
    assert text_of(prompts[1]) == f"{early_variation_line(3, 1)}\n{body}"
    assert prompts.lengths == {i: len(prompts[i]) for i in prompts}
    assert list(prompts) == [0, 1, 2]


def test_messages_are_rendered_like_segments(tmp_path: Path, requests: list[TraceRequest]) -> None:
    messages = [{"messages": [{"role": s.kind, "content": s.text} for s in request.segments]} for request in requests]
    from_messages = read_traces([write_trace(tmp_path / "m.jsonl", messages)]).requests
    whole = read_traces(
        [write_trace(tmp_path / "e.jsonl", expanded(compact_session("s", 3, system="Be brief.")))]
    ).requests
    encoder = Tokenizer.from_file(TOKENIZER)
    for index, ids in Prompts(encoder, requests).items():
        np.testing.assert_array_equal(Prompts(encoder, from_messages)[index], ids)
        np.testing.assert_array_equal(Prompts(encoder, whole)[index], ids)


def test_every_text_is_tokenised_once(requests: list[TraceRequest]) -> None:
    encoder, done = CountingEncoder(), []
    prompts = Prompts(encoder, requests * 5, advance=done.append)
    assert len(encoder.asked) == len(set(encoder.asked)) == len(requests[-1].segments)
    for index in prompts:
        assert len(prompts[index])
    assert len(encoder.asked) == len(requests[-1].segments)
    assert sum(done) == 15


def test_early_variation_is_seeded_and_differs_from_request_to_request() -> None:
    lines = [early_variation_line(7, index) for index in range(100)]
    assert lines == [early_variation_line(7, index) for index in range(100)]
    assert len(set(lines) | {early_variation_line(8, index) for index in range(100)}) == 200
    for line in lines:
        match = re.fullmatch(r"request-id: (\S{36}) timestamp: (\S+)Z", line)
        assert match
        assert UUID(match[1]).version == 4
        assert datetime.fromisoformat(match[2]).year == 2026


def test_early_variation_is_about_45_tokens() -> None:
    # How the tokenizers of the DeepSeek family cut text before merging: letters, up to three digits, other characters.
    pieces = [len(re.findall(r"[A-Za-z]+|\d{1,3}|[^\w\s]", early_variation_line(0, index))) for index in range(200)]
    assert 38 <= np.mean(pieces) <= 52


def test_chat_template(requests: list[TraceRequest], chat_tokenizer: Tokenizer) -> None:
    prompts = Prompts(chat_tokenizer, requests, use_chat_template=True, early_variation=True, seed=1)
    for index, request in enumerate(requests):
        messages = [{"role": s.kind, "content": s.text} for s in request.segments]
        messages[0]["content"] = f"{early_variation_line(1, index)}\n{messages[0]['content']}"
        np.testing.assert_array_equal(prompts[index], chat_tokenizer.encode_chat(messages))
        assert prompts.lengths[index] == len(prompts[index])


def test_chat_template_reads_tools_and_tool_calls(tmp_path: Path, chat_tokenizer: Tokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    call = {"id": "c1", "function": {"name": "look", "arguments": {"at": 3}}}
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "seen", "tool_call_id": "c1"},
    ]
    path = write_trace(tmp_path / "m.jsonl", [{"messages": messages, "tools": tools}])
    prompts = Prompts(chat_tokenizer, read_traces([path]).requests, use_chat_template=True)
    np.testing.assert_array_equal(prompts[0], chat_tokenizer.encode_chat(messages, tools=tools))


def test_kinds_without_a_role_take_one(tmp_path: Path, chat_tokenizer: Tokenizer) -> None:
    segments = [{"kind": "tools", "text": "[...]"}, {"kind": "document", "text": "Page 1"}]
    path = write_trace(tmp_path / "t.jsonl", [{"segments": segments}])
    prompts = Prompts(chat_tokenizer, read_traces([path]).requests, use_chat_template=True)
    messages = [{"role": "system", "content": "[...]"}, {"role": "user", "content": "Page 1"}]
    np.testing.assert_array_equal(prompts[0], chat_tokenizer.encode_chat(messages))


def test_what_the_template_refuses_fails_alone(tmp_path: Path, chat_tokenizer: Tokenizer) -> None:
    good, bad = {"role": "user", "content": "x"}, {"role": "tool", "content": "no tool_call_id"}
    path = write_trace(tmp_path / "m.jsonl", [{"messages": [good]}, {"messages": [good, bad]}, {"messages": [good]}])
    prompts = Prompts(chat_tokenizer, read_traces([path]).requests, use_chat_template=True)
    assert list(prompts) == [0, 2]
    assert "messages[1]" in prompts.failed[1]
    with pytest.raises(KeyError):
        prompts[1]
