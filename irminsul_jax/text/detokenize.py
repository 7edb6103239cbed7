"""From generated token ids to text, step by step: nothing is shown that a later token could still change or take back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from irminsul_jax.text.tokenizer import Tokenizer

_REPLACEMENT = "�"


class StopMatcher:
    """Finds stop strings in a text that comes in pieces of any size; how it is cut does not matter.

    The stop string that is completed first wins; among those completed by the same character, the longest.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found; nothing more is returned after it."""

    def push(self, text: str) -> str:
        """Takes new text, returns what is safe to show: no stop string, and no beginning of a possible one."""
        if self.matched is not None:
            return ""
        text = self._held + text
        ends = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if ends:
            _, at, self.matched = min(ends)
            self._held = ""
            return text[:at]
        hold = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def finish(self) -> str:
        """What was held back, once it is known that no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that ends `text`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class Detokenizer:
    """Text of one generated sequence, with stop strings. Characters of several tokens appear when they are complete.

    Stop strings are looked for in the text that comes after the first `min_tokens` tokens.
    """

    # Decoding a window gives the text of a longer one as long as both start at the same token; a new window starts with
    # a few tokens of context, for decoders that treat the first token differently.
    _WINDOW, _CONTEXT = 32, 4

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._tokenizer = tokenizer
        self._min_tokens = min_tokens
        self._matcher = StopMatcher(stop)
        self._ids: list[int] = []
        self._taken = 0
        self._shown: list[str] = []
        self.num_valid_tokens = 0
        """Tokens taken so far; after a stop string, those up to and including the one that completed it."""

    @property
    def text(self) -> str:
        """All text that was returned so far."""
        return "".join(self._shown)

    @property
    def stopped(self) -> str | None:
        """The stop string that was found, or None. Tokens pushed after it are ignored."""
        return self._matcher.matched

    def push(self, token_ids: Iterable[Any]) -> str:
        """Takes the next tokens, returns the new text that is safe to show."""
        start = len(self._shown)
        for token_id in token_ids:
            if self.stopped is not None:
                break
            self.num_valid_tokens += 1
            self._ids.append(int(token_id))
            new = self._complete_text()
            self._shown.append(new if self.num_valid_tokens <= self._min_tokens else self._matcher.push(new))
        return "".join(self._shown[start:])

    def finish(self) -> str:
        """The rest of the text when the sequence has ended for another reason than a stop string."""
        if self.stopped is not None:
            return ""
        start = len(self._shown)
        self._shown.append(self._matcher.push(self._tokenizer.decode(self._ids)[self._taken :]))
        self._ids, self._taken = [], 0
        self._shown.append(self._matcher.finish())
        return "".join(self._shown[start:])

    def _complete_text(self) -> str:
        text = self._tokenizer.decode(self._ids)
        # An unfinished character decodes to replacement characters, which the next token may change.
        complete = text.rstrip(_REPLACEMENT)
        new, self._taken = complete[self._taken :], max(self._taken, len(complete))
        if len(self._ids) > self._WINDOW and complete == text:
            self._ids = self._ids[-self._CONTEXT :]
            self._taken = len(self._tokenizer.decode(self._ids))
        return new
