"""Small traces and a small served checkpoint for the tests of replay and of the command line."""

from __future__ import annotations

import json
import lzma
import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import zstandard

from checkpoints_convert import convert
from tests.support.synthetic import write_hf_checkpoint

TEXT_DATA = Path(__file__).parent.parent / "data" / "text"
TOKENIZER = TEXT_DATA / "tokenizer.json"
_WORDS = ("the model serves cached rows at new positions and every token is counted once when a page of the pool "
          "moves under another request so that planner and engine agree").split()  # fmt: skip


def words(seed: int, count: int) -> str:
    """`count` random words, the same for the same seed."""
    draw = random.Random(seed)
    return " ".join(draw.choice(_WORDS) for _ in range(count))


def compact_session(session: str, turns: int, *, system: str, ts: Iterable[Any] | None = None) -> dict[str, Any]:
    """A session whose turn t has the system text and 2t + 1 segments of conversation."""
    seed = sum(map(ord, session))
    segments = [{"kind": "system", "text": system}]
    for turn in range(turns):
        segments.append({"kind": "user", "text": f"{session} {turn}: {words(seed + turn, 12)}"})
        segments.append({"kind": "assistant", "text": f"{words(seed - turn, 10)} {turn}"})
    stamps = list(ts) if ts is not None else [None] * turns
    requests = [{"turn": t, "segs": [[0, 1], [1, 2 + 2 * t]], "ts": stamps[t]} for t in range(turns)]
    return {"trace_id": "test", "session_id": session, "segments": segments, "requests": requests}


def expanded(session: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "session_id": session["session_id"],
            "turn": request["turn"],
            "ts": request["ts"],
            "segments": [segment for a, b in request["segs"] for segment in session["segments"][a:b]],
        }
        for request in session["requests"]
    ]


def write_trace(path: Path, lines: Iterable[Any]) -> Path:
    """Writes records (or ready lines) as the suffix of `path` says."""
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines).encode()
    match path.suffix:
        case ".xz":
            path.write_bytes(lzma.compress(text))
        case ".zst":
            path.write_bytes(zstandard.ZstdCompressor().compress(text))
        case _:
            path.write_bytes(text)
    return path


def agent_trace(path: Path, *, sessions: int = 2, turns: int = 2, system_words: int = 60) -> Path:
    """Sessions that share a system text: with early variation, all a prefix cache finds is nothing."""
    system = words(0, system_words)
    return write_trace(path, [compact_session(f"s{i}", turns, system=system) for i in range(sessions)])


def make_checkpoint(folder: Path) -> Path:
    """A converted random-weight checkpoint with the tests' tokenizer and a chat template."""
    source = write_hf_checkpoint(  # one dense layer compiles fast
        folder / "hf", num_hidden_layers=1, n_routed_experts=None, vocab_size=1536, max_position_embeddings=512
    )
    shutil.copy(TOKENIZER, source)
    shutil.copy(TEXT_DATA / "tokenizer_config.json", source)
    shutil.copy(TEXT_DATA / "turns.jinja", source / "chat_template.jinja")
    convert(source, folder / "checkpoint")
    return folder / "checkpoint"
