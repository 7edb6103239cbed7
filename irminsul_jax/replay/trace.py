"""Traces: recorded requests, read from disk in time order. Three line formats (compact sessions, expanded requests,
OpenAI-style message lists) in .jsonl, .xz or .zst. Texts of compact sessions are shared, never copied.
"""

from __future__ import annotations

import io
import json
import lzma
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import zstandard

from irminsul_jax.errors import TraceError

KINDS = ("system", "tools", "document", "user", "assistant", "tool")
"""What a segment of a prompt can be."""

_FOREVER = 1e18


class Segment(NamedTuple):
    """One piece of a prompt; `kind` is one of `KINDS`, or the role of a message."""

    kind: str
    text: str
    original: Any = None
    """Of a message list: the message (content joined to one text), or the list of tools; what a chat template reads."""


@dataclass(frozen=True, kw_only=True)
class TraceRequest:
    """One recorded request. The prompt is `pool[a:b]` for each `(a, b)` of `ranges`, concatenated."""

    session: str
    turn: int
    ts: str | float | None
    pool: Sequence[Segment]
    ranges: tuple[tuple[int, int], ...]
    source: str
    """`file:line`, for messages."""

    @property
    def segments(self) -> list[Segment]:
        return [segment for a, b in self.ranges for segment in self.pool[a:b]]


@dataclass(kw_only=True)
class Trace:
    """Requests in time order, and what could not be read."""

    requests: list[TraceRequest] = field(default_factory=list)
    problems: list[TraceError] = field(default_factory=list)
    """One per skipped line, skipped request or broken file; each names file and line."""
    skipped_lines: int = 0
    skipped_requests: int = 0
    """Single requests of a compact line whose other requests are used."""
    damaged_files: int = 0


def read_traces(paths: Sequence[Path]) -> Trace:
    """Reads all files. Requests are ordered by `ts` over all files if every request has one (a number, or a text: by
    time if all are ISO 8601, without offset taken as UTC, else alphabetically), else they stay in file order.

    What cannot be read is skipped and listed in `problems`: a line, one request of a compact line, or the rest of a
    truncated archive. Raises `TraceError` for a file that is not there or may not be read.
    """
    trace = Trace()
    for path in paths:
        if not path.is_file():
            raise TraceError(f"{path}: no such trace file; give .jsonl, .jsonl.xz or .jsonl.zst files")
        for number, line in _lines(path, trace):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                _parse_line(line, where, trace)
            except TraceError as error:
                trace.problems.append(TraceError(f"{where}: {error}; line skipped"))
                trace.skipped_lines += 1
    _sort_by_time(trace.requests)
    return trace


def _sort_by_time(requests: list[TraceRequest]) -> None:
    if any(request.ts is None for request in requests):
        return
    if any(_seconds(request.ts) is None for request in requests):
        requests.sort(key=lambda request: str(request.ts))
    else:
        requests.sort(key=lambda request: _seconds(request.ts) or 0.0)


def _seconds(ts: str | float | None) -> float | None:
    if not isinstance(ts, str):
        return ts
    try:
        moment = datetime.fromisoformat(ts)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _lines(path: Path, trace: Trace) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        with _open(path) as stream:
            for line in stream:
                number += 1
                yield number, line
    except (lzma.LZMAError, zstandard.ZstdError, EOFError) as error:
        reason = str(error) or "unexpected end"
        trace.damaged_files += 1
        trace.problems.append(
            TraceError(f"{path}: truncated or damaged after line {number} ({reason}); the lines before it are used")
        )
    except OSError as error:
        raise TraceError(
            f"{path}: cannot be read ({error.strerror or error}); check the file and its permissions"
        ) from None


def _open(path: Path) -> io.BufferedReader:
    if path.suffix == ".xz":
        return io.BufferedReader(lzma.open(path, "rb"))  # type: ignore[arg-type]
    if path.suffix == ".zst":
        return io.BufferedReader(_WholeZstd(path))
    return path.open("rb")


class _WholeZstd(io.RawIOBase):
    """A zstd stream that raises `EOFError` where it ends inside a frame; zstandard's own reader stops silently."""

    def __init__(self, path: Path):
        self._file = path.open("rb")
        self._decoder = zstandard.ZstdDecompressor().decompressobj()
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if self._decoder.eof:
                compressed = self._decoder.unused_data or self._file.read(1 << 16)
                if not compressed:
                    return 0
                self._decoder = zstandard.ZstdDecompressor().decompressobj()
            else:
                compressed = self._file.read(1 << 16)
                if not compressed:
                    raise EOFError("the compressed stream ends inside a frame")
            self._ready = self._decoder.decompress(compressed)
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size

    def close(self) -> None:
        self._file.close()
        super().close()


def _parse_line(line: bytes, where: str, trace: Trace) -> None:
    """Appends the requests of one line to `trace`. Raises `TraceError` with the reason alone if the line is useless."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"not a JSON line ({error})") from None
    if not isinstance(record, dict):
        raise TraceError(f"a JSON object is needed, got {type(record).__name__}")
    session = record.get("session_id") or record.get("id") or where
    if not isinstance(session, str | int):
        raise TraceError(f"session_id={session!r} must be a string")
    if "messages" in record:
        pool = [*_tools(record.get("tools")), *_messages(record["messages"])]
    elif "segments" in record:
        pool = _segments(record["segments"])
    else:
        raise TraceError("neither 'segments' nor 'messages' is there")
    if "requests" not in record or "messages" in record:
        trace.requests.append(_request(record, str(session), pool, ((0, len(pool)),), where))
        return
    if not isinstance(record["requests"], list):
        raise TraceError("'requests' must be a list")
    for number, entry in enumerate(record["requests"]):
        try:
            trace.requests.append(_request(entry, str(session), pool, _ranges(entry, len(pool)), where))
        except TraceError as error:
            trace.problems.append(TraceError(f"{where}: requests[{number}]: {error}; request skipped"))
            trace.skipped_requests += 1


def _request(
    record: Mapping[str, Any], session: str, pool: list[Segment], ranges: tuple[tuple[int, int], ...], where: str
) -> TraceRequest:
    if not any(b > a for a, b in ranges):
        raise TraceError("there is no segment in it")
    ts = record.get("ts")
    if isinstance(ts, bool) or not isinstance(ts, str | int | float | None):
        raise TraceError(f"ts={ts!r} must be a string or a number")
    if isinstance(ts, int | float) and not -_FOREVER < ts < _FOREVER:  # false for NaN too
        raise TraceError(f"ts={ts!r} is not a time")
    turn = record.get("turn", 0)
    if type(turn) is not int:
        raise TraceError(f"turn={turn!r} must be an integer")
    ts = None if ts == "" else float(ts) if isinstance(ts, int) else ts
    return TraceRequest(session=session, turn=turn, ts=ts, pool=pool, ranges=ranges, source=where)


def _segments(value: Any) -> list[Segment]:
    if not isinstance(value, list):
        raise TraceError("'segments' must be a list")
    segments = []
    for i, item in enumerate(value):
        kind, text = (item.get("kind"), item.get("text")) if isinstance(item, dict) else (None, None)
        if kind not in KINDS:
            raise TraceError(f"segments[{i}]: kind={kind!r} is unknown; known: {', '.join(KINDS)}")
        if not isinstance(text, str):
            raise TraceError(f"segments[{i}]: 'text' must be a string")
        segments.append(Segment(kind, text))
    return segments


def _ranges(entry: Any, size: int) -> tuple[tuple[int, int], ...]:
    ranges = entry.get("segs") if isinstance(entry, dict) else None
    if not isinstance(ranges, list):
        raise TraceError("'segs', a list of [first, end] pairs, is missing")
    checked = []
    for pair in ranges:
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(x) is int for x in pair)):
            raise TraceError(f"segs entry {pair!r} is not a [first, end] pair")
        if not 0 <= pair[0] <= pair[1] <= size:
            raise TraceError(f"segs entry {pair!r} lies outside the {size} segments")
        checked.append((pair[0], pair[1]))
    return tuple(checked)


def _tools(value: Any) -> list[Segment]:
    if not value:
        return []
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise TraceError("'tools' must be a list of JSON objects")
    return [Segment("tools", json.dumps(value, ensure_ascii=False), value)]


def _messages(value: Any) -> list[Segment]:
    if not isinstance(value, list):
        raise TraceError("'messages' must be a list")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(value)]


def _message(message: Any, where: str) -> Segment:
    """Content may be a string, null, or a list of text parts; the text of tool calls is their JSON, behind the content."""
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or not role:
        raise TraceError(f"{where}: 'role' is missing")
    content = message.get("content")
    if isinstance(content, list):
        parts = [part if isinstance(part, str) else _part_text(part, where) for part in content]
        content = "".join(parts)
    if content is not None and not isinstance(content, str):
        raise TraceError(f"{where}: 'content' must be a string or a list of text parts")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise TraceError(f"{where}: 'tool_calls' must be a list")
    texts = [*([content] if content else []), *(json.dumps(call, ensure_ascii=False) for call in calls)]
    return Segment(role, "\n".join(texts), {**message, "content": content})


def _part_text(part: Any, where: str) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else None
    if not isinstance(text, str):
        raise TraceError(f"{where}: content other than text cannot be served")
    return text
