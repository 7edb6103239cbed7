"""From recorded requests to token ids, each distinct text tokenised once. No jax."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from irminsul_jax.errors import ChatTemplateError
from irminsul_jax.replay.trace import Segment, TraceRequest

_ROLES = {"tools": "system", "document": "user"}
_BATCH_TEXTS = 512
_BATCH_CHATS = 32


@runtime_checkable
class TextEncoder(Protocol):
    """What rendering needs of `irminsul_jax.text.tokenizer.Tokenizer`."""

    chat_template: Any

    def encode_pieces(self, texts: Sequence[str]) -> list[np.ndarray]: ...

    def encode_chat(self, messages: Sequence[Any], *, tools: Sequence[Any] | None = None) -> np.ndarray: ...


def early_variation_line(seed: int, index: int) -> str:
    """The changing line in front of request number `index`: about 45 tokens, the same for the same seed and index.

    `random.Random(f"{seed}:{index}")` draws 128 bits for a version-4 UUID, then whole seconds below one year, added to
    2026-01-01 UTC, then microseconds: `request-id: <uuid> timestamp: <ISO 8601>`.
    """
    draw = random.Random(f"{seed}:{index}")
    request_id = uuid.UUID(int=draw.getrandbits(128), version=4)
    moment = datetime.fromtimestamp(1_767_225_600 + draw.randrange(31_536_000), UTC)
    stamp = f"{moment:%Y-%m-%dT%H:%M:%S}.{draw.randrange(1_000_000):06d}Z"
    return f"request-id: {request_id} timestamp: {stamp}"


class Prompts(Mapping[int, np.ndarray]):
    """Token ids `[T]` int32 by request number, in time order; requests that cannot be rendered are in `failed` instead.

    With a chat template (`use_chat_template`) through the tokenizer's chat interface: kinds `tools` and `document` take
    the roles system and user, messages stay as they were recorded, and the early-variation line opens the first message.
    Otherwise each segment becomes `<|kind|>\\ntext\\n` (`<|role|>` for messages), behind the early-variation line; every
    piece is tokenised by itself and the ids are concatenated on demand, so that equal texts give equal ids wherever they
    stand, and a long trace is never held as whole prompts.
    """

    def __init__(
        self,
        tokenizer: TextEncoder,
        requests: Sequence[TraceRequest],
        *,
        use_chat_template: bool = False,
        early_variation: bool = False,
        seed: int = 0,
        advance: Callable[[int], None] | None = None,
    ):
        """Tokenises everything, many texts at a time; `advance` receives the number of requests done."""
        self._tokenizer, self._requests = tokenizer, requests
        self._early_variation, self._seed = early_variation, seed
        self._chats: dict[int, np.ndarray] = {}
        self._pieces: dict[tuple[str, str], np.ndarray] = {}
        self._variations: dict[int, np.ndarray] = {}
        self.failed: dict[int, str] = {}
        """Request number → why the chat template refused it."""
        advance = advance or (lambda count: None)
        if use_chat_template and tokenizer.chat_template is not None:
            self._render_chats(advance)
            self.lengths = {index: len(ids) for index, ids in self._chats.items()}
        else:
            self._tokenise_pieces(advance)
            self.lengths = {i: sum(map(len, self._parts(i))) for i in range(len(requests))}

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        return iter(self.lengths)

    def __getitem__(self, index: int) -> Int32[np.ndarray, "T"]:
        if index in self._chats:
            return self._chats[index]
        if index not in self.lengths:
            raise KeyError(index)
        return np.concatenate(self._parts(index))

    def _parts(self, index: int) -> list[np.ndarray]:
        parts = [self._pieces[segment.kind, segment.text] for segment in self._requests[index].segments]
        return [self._variations[index], *parts] if self._early_variation else parts

    def _tokenise_pieces(self, advance: Callable[[int], None]) -> None:
        texts: dict[Any, str] = {}

        def flush() -> None:
            for key, ids in zip(texts, self._tokenizer.encode_pieces(list(texts.values())), strict=True):
                if isinstance(key, int):
                    self._variations[key] = ids
                else:
                    self._pieces[key] = ids
            texts.clear()

        for index, request in enumerate(self._requests):
            if self._early_variation:
                texts[index] = early_variation_line(self._seed, index) + "\n"
            for segment in request.segments:
                key = segment.kind, segment.text
                if key not in self._pieces:
                    texts[key] = f"<|{segment.kind}|>\n{segment.text}\n"
            if len(texts) >= _BATCH_TEXTS:
                flush()
            advance(1)
        flush()

    def _render_chats(self, advance: Callable[[int], None]) -> None:
        def render(index: int) -> np.ndarray | ChatTemplateError:
            messages, tools = self._chat(index)
            try:
                return np.asarray(self._tokenizer.encode_chat(messages, tools=tools), np.int32)
            except ChatTemplateError as error:
                return error

        with ThreadPoolExecutor(max_workers=4) as threads:
            for start in range(0, len(self._requests), _BATCH_CHATS):
                batch = range(start, min(start + _BATCH_CHATS, len(self._requests)))
                for index, ids in zip(batch, threads.map(render, batch), strict=True):
                    if isinstance(ids, ChatTemplateError):
                        self.failed[index] = str(ids)
                    else:
                        self._chats[index] = ids
                    advance(1)

    def _chat(self, index: int) -> tuple[list[dict[str, Any]], list[Any] | None]:
        """Messages and tools of request number `index`."""
        segments = self._requests[index].segments
        tools = next((s.original for s in segments if isinstance(s.original, list)), None)
        messages = [_chat_message(segment) for segment in segments if not isinstance(segment.original, list)]
        if self._early_variation and messages:
            line = early_variation_line(self._seed, index)
            messages[0]["content"] = f"{line}\n{messages[0]['content'] or ''}"
        return messages, tools


def _chat_message(segment: Segment) -> dict[str, Any]:
    if segment.original is not None:
        return dict(segment.original)
    return {"role": _ROLES.get(segment.kind, segment.kind), "content": segment.text}
