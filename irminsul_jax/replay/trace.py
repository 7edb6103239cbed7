"""Traces: recorded requests, read from disk in time order. Three line formats (compact sessions, expanded requests,
OpenAI-style message lists) in .jsonl, .xz or .zst. Texts of compact sessions are shared, never copied.
"""

from __future__ import annotations

import io
import json
import lzma
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import zstandard

from irminsul_jax.errors import TraceError

KINDS = ("system", "tools", "document", "user", "assistant", "tool")
"""What a segment of a prompt can be."""


class Segment(NamedTuple):
    """One piece of a prompt; `kind` is one of `KINDS`, or the role of a message."""

    kind: str
    text: str


@dataclass(frozen=True, kw_only=True)
class TraceRequest:
    """One recorded request. The prompt is `pool[a:b]` for each `(a, b)` of `ranges`, concatenated."""

    session: str
    turn: int
    ts: str | float | None
    pool: Sequence[Segment]
    ranges: tuple[tuple[int, int], ...]
    form: Literal["segments", "messages"]
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
    """One per skipped line or broken file; each names file and line."""


def read_traces(paths: Sequence[Path]) -> Trace:
    """Reads all files. Requests are ordered by `ts` over all files if every request has one, else in file order.

    Lines that cannot be read are skipped and listed in `problems`; of a truncated archive everything before the break is
    kept. Raises `TraceError` for a file that is not there.
    """
    trace = Trace()
    for path in paths:
        if not path.is_file():
            raise TraceError(f"{path}: no such trace file; give .jsonl, .jsonl.xz or .jsonl.zst files")
        for number, line in _lines(path, trace.problems):
            if not line.strip():
                continue
            try:
                trace.requests.extend(_parse_line(line, f"{path}:{number}"))
            except TraceError as error:
                trace.problems.append(error)
    if all(request.ts is not None for request in trace.requests):
        numeric = all(not isinstance(request.ts, str) for request in trace.requests)
        trace.requests.sort(key=lambda request: request.ts if numeric else str(request.ts))  # type: ignore[arg-type, return-value]
    return trace


def _lines(path: Path, problems: list[TraceError]) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        with _open(path) as stream:
            for line in stream:
                number += 1
                yield number, line
    except (lzma.LZMAError, zstandard.ZstdError, EOFError) as error:
        reason = str(error) or "unexpected end"
        problems.append(
            TraceError(f"{path}: truncated or damaged after line {number} ({reason}); the lines before it are used")
        )
    except OSError as error:
        raise TraceError(
            f"{path}: cannot be read ({error.strerror or error}); check the file and its permissions"
        ) from None


def _open(path: Path) -> IO[bytes]:
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
        self._begun = False

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


def _parse_line(line: bytes, where: str) -> list[TraceRequest]:
    try:
        record = json.loads(line)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise TraceError(f"{where}: not a JSON line ({error}); line skipped") from None
    if not isinstance(record, dict):
        raise TraceError(f"{where}: a JSON object is needed, got {type(record).__name__}; line skipped")
    if "messages" in record:
        pool = _messages(record["messages"], where)
        session = record.get("session_id") or record.get("id") or where
        return [_request(record, str(session), pool, ((0, len(pool)),), "messages", where)]
    if "segments" not in record:
        raise TraceError(f"{where}: neither 'segments' nor 'messages' is there; line skipped")
    pool = _segments(record["segments"], where)
    session = str(record.get("session_id", where))
    if "requests" not in record:
        return [_request(record, session, pool, ((0, len(pool)),), "segments", where)]
    if not isinstance(record["requests"], list):
        raise TraceError(f"{where}: 'requests' must be a list; line skipped")
    return [
        _request(entry, session, pool, _ranges(entry, len(pool), where), "segments", where)
        for entry in record["requests"]
    ]


def _request(
    record: Mapping[str, Any],
    session: str,
    pool: list[Segment],
    ranges: tuple[tuple[int, int], ...],
    form: Literal["segments", "messages"],
    where: str,
) -> TraceRequest:
    if not any(b > a for a, b in ranges):
        raise TraceError(f"{where}: a request without any segment; line skipped")
    ts = record.get("ts")
    if isinstance(ts, bool) or not isinstance(ts, str | int | float | None):
        raise TraceError(f"{where}: ts={ts!r} must be a string or a number; line skipped")
    turn = record.get("turn", 0)
    if not isinstance(turn, int):
        raise TraceError(f"{where}: turn={turn!r} must be an integer; line skipped")
    ts = None if ts == "" else ts
    return TraceRequest(session=session, turn=turn, ts=ts, pool=pool, ranges=ranges, form=form, source=where)


def _segments(value: Any, where: str) -> list[Segment]:
    if not isinstance(value, list):
        raise TraceError(f"{where}: 'segments' must be a list; line skipped")
    segments = []
    for i, item in enumerate(value):
        kind, text = (item.get("kind"), item.get("text")) if isinstance(item, dict) else (None, None)
        if kind not in KINDS or not isinstance(text, str):
            raise TraceError(
                f"{where}: segments[{i}] needs a 'text' string and a 'kind' of {', '.join(KINDS)}, got kind={kind!r}; "
                "line skipped"
            )
        segments.append(Segment(kind, text))
    return segments


def _ranges(entry: Any, size: int, where: str) -> tuple[tuple[int, int], ...]:
    ranges = entry.get("segs") if isinstance(entry, dict) else None
    if not isinstance(ranges, list):
        raise TraceError(f"{where}: each of 'requests' needs 'segs', a list of [first, end] pairs; line skipped")
    checked = []
    for pair in ranges:
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(x) is int for x in pair)):
            raise TraceError(f"{where}: segs entry {pair!r} is not a [first, end] pair; line skipped")
        if not 0 <= pair[0] <= pair[1] <= size:
            raise TraceError(f"{where}: segs entry {pair!r} lies outside the {size} segments; line skipped")
        checked.append((pair[0], pair[1]))
    return tuple(checked)


def _messages(value: Any, where: str) -> list[Segment]:
    if not isinstance(value, list):
        raise TraceError(f"{where}: 'messages' must be a list; line skipped")
    return [parse_message(message, f"{where}: messages[{i}]") for i, message in enumerate(value)]


def parse_message(message: Any, where: str) -> Segment:
    """One OpenAI-style message as a segment; content may be a string, null, or a list of text parts."""
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or not role:
        raise TraceError(f"{where} needs a 'role'; line skipped")
    content = message.get("content")
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
            for part in content
        ]
        if not all(isinstance(part, str) for part in parts):
            raise TraceError(f"{where} has content other than text, which this library does not serve; line skipped")
        content = "".join(parts)
    if content is None:
        content = ""
    if not isinstance(content, str):
        raise TraceError(f"{where} needs 'content', a string or a list of text parts; line skipped")
    return Segment(role, content)
