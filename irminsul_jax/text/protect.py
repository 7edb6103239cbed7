"""Keeps text that merely looks like a special token apart from the special tokens that a chat template inserts.

Each look-alike inside a message gets its first character replaced by a private-use stand-in before the template runs, so
lengths and structure stay, and `restore` brings it back after the rendered text was split at the real special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from irminsul_jax.errors import ChatTemplateError

_PRIVATE_USE = range(0x100000, 0x10FFFE)
_PRIVATE_USE_CHARACTER = re.compile("[\U00100000-\U0010fffd]")


class ControlText:
    """The token texts to look for, compiled once per tokenizer."""

    def __init__(self, tokens: frozenset[str]) -> None:
        tokens = frozenset(token for token in tokens if not _PRIVATE_USE_CHARACTER.search(token))
        self.pattern = alternation(tokens)
        self.longest = max(map(len, tokens), default=0)
        self.prefixes = frozenset(token[:n] for token in tokens for n in range(1, len(token)))


class Protector:
    """Works on one conversation. `control` is kept as text everywhere, in assistant messages only `control_in_replies`
    (without, say, `<think>`, which the model itself wrote as a token)."""

    def __init__(self, control: ControlText, control_in_replies: ControlText) -> None:
        self._control = control
        self._in_replies = control_in_replies
        self._originals: dict[str, str] = {}
        self._stand_ins: dict[str, str] = {}

    def messages(self, messages: Sequence[Any], *, refuse: bool) -> list[Any]:
        result = []
        for i, message in enumerate(messages):
            from_model = isinstance(message, Mapping) and message.get("role") == "assistant"
            control = self._in_replies if from_model else self._control
            result.append(self._walk(message, control, f"messages[{i}]" if refuse else None))
        return result

    def tree(self, value: Any, name: str, *, refuse: bool) -> Any:
        """The same for tools or documents."""
        return self._walk(value, self._control, name if refuse else None)

    def restore(self, text: str) -> str:
        return _PRIVATE_USE_CHARACTER.sub(lambda m: self._originals.get(m.group(), m.group()), text)

    def _walk(self, value: Any, control: ControlText, refuse_as: str | None) -> Any:
        if isinstance(value, str):
            return self._protect(value, control, refuse_as)
        if isinstance(value, Mapping):
            return {
                self._walk(k, control, refuse_as): self._walk(v, control, refuse_as and f"{refuse_as}.{k!s:.40}")
                for k, v in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._walk(v, control, refuse_as) for v in value]
        return value

    def _protect(self, text: str, control: ControlText, refuse_as: str | None) -> str:
        # A message may use these private characters itself; with a stand-in of their own they survive `restore`.
        text = _PRIVATE_USE_CHARACTER.sub(lambda m: self._stand_in(m.group()), text)
        while match := control.pattern.search(text):
            if refuse_as is not None:
                raise ChatTemplateError(
                    f"{refuse_as} contains the special token text {match.group()!r}; remove it, or choose "
                    'special_tokens_in_text="text" to keep it as plain text'
                )
            text = control.pattern.sub(lambda m: self._stand_in(m.group()[0]) + m.group()[1:], text)
        # Two strings that the template joins must not form a token either.
        for start in range(max(0, len(text) + 1 - control.longest), len(text)):
            if text[start:] in control.prefixes:
                text = text[:start] + self._stand_in(text[start]) + text[start + 1 :]
        return text

    def _stand_in(self, character: str) -> str:
        if character not in self._stand_ins:
            if len(self._stand_ins) == len(_PRIVATE_USE):
                raise ChatTemplateError("the messages use every private-use character of Unicode plane 16; send fewer")
            stand_in = chr(_PRIVATE_USE[len(self._stand_ins)])
            self._stand_ins[character] = stand_in
            self._originals[stand_in] = character
        return self._stand_ins[character]


def alternation(tokens: frozenset[str] | Sequence[str]) -> re.Pattern[str]:
    """Matches any of the tokens, the longest at each place; nothing if there are none."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=lambda t: (-len(t), t)))) or r"(?!)")
