"""From recorded requests to token ids, each distinct text tokenised once. No jax."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int32

from irminsul_jax.replay.trace import TraceRequest

_ROLES = {"tools": "system", "document": "user"}
_CHUNK = 512


class TextEncoder(Protocol):
    """What rendering needs of `irminsul_jax.text.tokenizer.Tokenizer`."""

    chat_template: Any

    def encode_pieces(self, texts: Sequence[str]) -> list[np.ndarray]: ...

    def encode_chat(self, messages: Sequence[Any]) -> np.ndarray: ...


def early_variation_line(seed: int, index: int) -> str:
    """The changing line in front of request number `index`: about 45 tokens, the same for the same seed and index.

    `random.Random(f"{seed}:{index}")` draws 128 bits for a version-4 UUID, then a whole number of microseconds below one
    year that is added to 2026-01-01 UTC: `request-id: <uuid> timestamp: <ISO 8601>`.
    """
    draw = random.Random(f"{seed}:{index}")
    request_id = uuid.UUID(int=draw.getrandbits(128), version=4)
    moment = datetime.fromtimestamp(1_767_225_600 + draw.randrange(31_536_000), UTC)
    stamp = f"{moment:%Y-%m-%dT%H:%M:%S}.{draw.randrange(1_000_000):06d}Z"
    return f"request-id: {request_id} timestamp: {stamp}"


class Renderer:
    """Turns requests into token ids.

    With a chat template (`use_chat_template`) through the tokenizer's chat interface: kinds `tools` and `document` take the roles
    system and user, and the early-variation line opens the first message. Otherwise each segment becomes `<|kind|>\\ntext\\n`
    (`<|role|>` for messages), behind the early-variation line; every piece is tokenised by itself and the ids are
    concatenated, so that equal texts give equal ids wherever they stand.
    """

    def __init__(
        self, tokenizer: TextEncoder, *, use_chat_template: bool = False, early_variation: bool = False, seed: int = 0
    ):
        self._tokenizer = tokenizer
        self._chat = use_chat_template and tokenizer.chat_template is not None
        self._early_variation = early_variation
        self._seed = seed
        self._ids: dict[str, np.ndarray] = {}

    def prepare(self, requests: Iterable[tuple[int, TraceRequest]]) -> None:
        """Tokenises every distinct text of these numbered requests, many at a time. Optional: `render` does what is left."""
        if self._chat:
            return
        missing = list(
            dict.fromkeys(
                text for index, request in requests for text in self._pieces(index, request) if text not in self._ids
            )
        )
        for start in range(0, len(missing), _CHUNK):
            texts = missing[start : start + _CHUNK]
            for text, ids in zip(texts, self._tokenizer.encode_pieces(texts), strict=True):
                self._ids[text] = np.asarray(ids, np.int32)

    def render(self, index: int, request: TraceRequest) -> Int32[np.ndarray, "T"]:
        """Token ids of request number `index`."""
        if self._chat:
            return np.asarray(self._tokenizer.encode_chat(self._chat_messages(index, request)), np.int32)
        self.prepare([(index, request)])
        return np.concatenate([self._ids[text] for text in self._pieces(index, request)])

    def _pieces(self, index: int, request: TraceRequest) -> list[str]:
        pieces = [f"<|{kind}|>\n{text}\n" for kind, text in request.segments]
        return [early_variation_line(self._seed, index) + "\n", *pieces] if self._early_variation else pieces

    def _chat_messages(self, index: int, request: TraceRequest) -> list[dict[str, str]]:
        messages = [{"role": _ROLES.get(kind, kind), "content": text} for kind, text in request.segments]
        if self._early_variation:
            messages[0]["content"] = f"{early_variation_line(self._seed, index)}\n{messages[0]['content']}"
        return messages
