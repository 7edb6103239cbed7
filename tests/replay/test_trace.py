"""Reading traces: formats, compression, order, and what happens to what cannot be read."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from irminsul_jax.errors import TraceError
from irminsul_jax.replay.trace import Segment, read_traces
from tests.replay.support import compact_session, expanded, write_trace

SESSION = compact_session("s", 3, system="be brief ü\n")
GOOD = {"segments": [{"kind": "user", "text": "good"}]}


def texts(path: Path) -> list[list[Segment]]:
    return [request.segments for request in read_traces([path]).requests]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.xz", ".jsonl.zst"])
def test_compact_and_expanded_form_are_the_same_in_every_compression(tmp_path: Path, suffix: str) -> None:
    compact = write_trace(tmp_path / f"compact{suffix}", [SESSION, "", SESSION])
    whole = write_trace(tmp_path / f"whole{suffix}", [*expanded(SESSION), *expanded(SESSION)])
    assert texts(compact) == texts(whole)
    assert [len(segments) for segments in texts(compact)] == [2, 4, 6] * 2
    request = read_traces([compact]).requests[1]
    assert (request.session, request.turn, request.source) == ("s", 1, f"{compact}:1")


def test_zstd_files_may_have_several_frames(tmp_path: Path) -> None:
    one, two = write_trace(tmp_path / "1.zst", [GOOD]), write_trace(tmp_path / "2.zst", [GOOD, GOOD])
    both = tmp_path / "both.zst"
    both.write_bytes(one.read_bytes() + two.read_bytes())
    assert len(read_traces([both]).requests) == 3


def test_texts_of_a_compact_session_are_shared(tmp_path: Path) -> None:
    first, second, _ = read_traces([write_trace(tmp_path / "t.jsonl", [SESSION])]).requests
    assert first.segments[0].text is second.segments[0].text


def test_messages(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    call = {"id": "1", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "seen", "tool_call_id": "1"},
    ]
    path = write_trace(tmp_path / "m.jsonl", [{"messages": messages, "id": "chat-1", "tools": tools}])
    (request,) = read_traces([path]).requests
    assert request.session == "chat-1"
    assert [(s.kind, s.text) for s in request.segments] == [
        ("tools", json.dumps(tools)),
        ("user", "one two"),
        ("assistant", json.dumps(call)),
        ("tool", "seen"),
    ]
    assert request.segments[2].original["tool_calls"] == [call]


@pytest.mark.parametrize(
    ("stamps", "order"),
    [
        ((3, 1.5, 2), [1, 2, 0]),
        (("2025-01-01T10:00:00Z", "2025-01-01T10:00:00+02:00", "2025-01-01T09:00:00"), [1, 2, 0]),
        (("c", "a", "b"), [1, 2, 0]),
        ((3, None, 2), [0, 1, 2]),
        ((3, "", 2), [0, 1, 2]),
    ],
)
def test_time_order_over_all_files_if_every_request_has_a_time(tmp_path: Path, stamps: tuple, order: list[int]) -> None:
    lines = [{**GOOD, "session_id": str(i), "ts": ts} for i, ts in enumerate(stamps)]
    files = [write_trace(tmp_path / f"{i}.jsonl", [line]) for i, line in enumerate(lines)]
    assert [int(request.session) for request in read_traces(files).requests] == order


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not a JSON line"),
        ("[" * 100_000, "not a JSON line"),
        ("[1]", "a JSON object is needed, got list"),
        ("{}", "neither 'segments' nor 'messages'"),
        ({"segments": [{"kind": "robot", "text": ""}]}, "segments[0]: kind='robot' is unknown"),
        ({"segments": [{"kind": "user", "text": 5}]}, "segments[0]: 'text' must be a string"),
        ({"segments": []}, "no segment"),
        ({**GOOD, "requests": 4}, "'requests' must be a list"),
        ({**GOOD, "ts": [1]}, "ts=[1] must be"),
        ({**GOOD, "ts": float("nan")}, "is not a time"),
        ({**GOOD, "turn": "x"}, "turn='x'"),
        ({"messages": {}}, "'messages' must be a list"),
        ({"messages": [{"content": "x"}]}, "messages[0]: 'role' is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "other than text"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_line_is_named_and_skipped(tmp_path: Path, line: object, reason: str) -> None:
    path = write_trace(tmp_path / "t.jsonl", [GOOD, line, GOOD])
    trace = read_traces([path])
    assert [request.source for request in trace.requests] == [f"{path}:1", f"{path}:3"]
    (problem,) = trace.problems
    assert str(problem).startswith(f"{path}:2: ")
    assert reason in str(problem)
    assert trace.skipped_lines == 1


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"turn": 1}, "'segs'"),
        ({"segs": [[0, 99]]}, "outside the 7 segments"),
        ({"segs": [[2, 1]]}, "outside the 7 segments"),
        ({"segs": [["a", 1]]}, "not a [first, end] pair"),
        ({"segs": [[1, 1]]}, "no segment"),
        (None, "'segs'"),
    ],
)
def test_a_bad_request_of_a_compact_line_is_lost_alone(tmp_path: Path, request_: object, reason: str) -> None:
    requests = [*SESSION["requests"][:1], request_, *SESSION["requests"][1:]]
    path = write_trace(tmp_path / "t.jsonl", [GOOD, {**SESSION, "requests": requests}])
    trace = read_traces([path])
    assert len(trace.requests) == 1 + 3
    (problem,) = trace.problems
    assert str(problem).startswith(f"{path}:2: requests[1]: ")
    assert reason in str(problem)
    assert (trace.skipped_lines, trace.skipped_requests) == (0, 1)


@pytest.mark.parametrize("suffix", [".xz", ".zst"])
def test_of_a_truncated_archive_the_beginning_is_used(tmp_path: Path, suffix: str) -> None:
    noise = [{"segments": [{"kind": "user", "text": random.Random(i).randbytes(2000).hex()}]} for i in range(400)]
    path = write_trace(tmp_path / f"t.jsonl{suffix}", noise)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 3 // 4])
    trace = read_traces([path])
    assert 0 < len(trace.requests) < 400
    assert trace.requests[0].segments[0].text == noise[0]["segments"][0]["text"]
    assert f"after line {len(trace.requests)} " in str(trace.problems[0])
    assert trace.damaged_files == 1


def test_not_an_archive_at_all(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.xz"
    path.write_bytes(b"plain text")
    trace = read_traces([path])
    assert trace.requests == []
    assert "damaged after line 0" in str(trace.problems[0])


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nowhere\.jsonl: no such trace file"):
        read_traces([tmp_path / "nowhere.jsonl"])
