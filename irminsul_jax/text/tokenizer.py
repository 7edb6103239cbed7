"""The tokenizer of a checkpoint: text and chats ↔ token ids, over `tokenizers`.

A chat is tokenised by message: the rendered prompt is split at the special tokens that the template inserted, and the
texts between them, which are whole messages, are kept in a cache. A growing conversation tokenises only what is new.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import tokenizers

from irminsul_jax.errors import ChatTemplateError, ConfigError, TokenizerError
from irminsul_jax.text.chat_template import MISSING_TEMPLATE, ChatTemplate
from irminsul_jax.text.piece_cache import PieceCache
from irminsul_jax.text.protect import ControlText, Protector, alternation

SpecialTokensInText = Literal["text", "refuse", "parse"]

_MARKUP = re.compile(r"</?\w+>")
# Pre-tokenizers that treat a text the same wherever it stands in the prompt.
_LOCAL_PRE_TOKENIZERS = frozenset(
    {"Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit", "BertPreTokenizer"}
)


class Tokenizer:
    """Token ids are int32 arrays. Build it with `from_directory` or `from_file`."""

    def __init__(
        self, data: bytes, source: Path, config: Mapping[str, Any], template_file: Path | None, vocab_size: int | None
    ) -> None:
        self.source = source
        self.fingerprint = "sha256:" + hashlib.sha256(data).hexdigest()
        """Identity of the tokenizer.json: equal files, equal token ids."""
        self._data = data
        self._tok = _build(data, source)
        self._added = {token.content: i for i, token in self._tok.get_added_tokens_decoder().items() if token.content}
        self._check_fits(vocab_size)
        self._named = {
            name: text
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if (text := _token_text(config, name))
        }
        add_bos = config.get("add_bos_token")
        self._add_bos = self._adds_bos_itself if add_bos is None else bool(add_bos)
        if self._add_bos and self.bos_id is None:
            raise TokenizerError(
                f"{source}: tokenizer_config.json asks for a BOS token, but its bos_token "
                f"{self._named.get('bos_token')!r} is not in the vocabulary; put the right tokenizer_config.json there"
            )
        self.chat_template = ChatTemplate.find(config, template_file, self._named | _other_named_tokens(config))
        self._cache = PieceCache()

    @classmethod
    def from_directory(cls, checkpoint_dir: Path, *, vocab_size: int | None = None) -> Tokenizer:
        """Reads tokenizer.json and, where present, tokenizer_config.json and chat_template.jinja of a checkpoint."""
        config, template = checkpoint_dir / "tokenizer_config.json", checkpoint_dir / "chat_template.jinja"
        return cls.from_file(
            checkpoint_dir / "tokenizer.json",
            config=config if config.is_file() else None,
            chat_template=template if template.is_file() else None,
            vocab_size=vocab_size,
        )

    @classmethod
    def from_file(
        cls,
        tokenizer_json: Path,
        *,
        config: Path | None = None,
        chat_template: Path | None = None,
        vocab_size: int | None = None,
    ) -> Tokenizer:
        """Reads a Hugging Face tokenizer.json. `vocab_size` is the number of embedding rows of the model: a tokenizer
        with a larger id raises `TokenizerError`, as do missing or unreadable files."""
        if not tokenizer_json.is_file():
            raise TokenizerError(
                f"{tokenizer_json}: not there, so this checkpoint has no tokenizer: pass token ids, or put a Hugging Face "
                "tokenizer.json there (families that ship only a tiktoken model, such as Kimi, need it converted first)"
            )
        settings = _parse_json(_read(config), config) if config is not None else {}
        return cls(_read(tokenizer_json), tokenizer_json, settings, chat_template, vocab_size)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included. The model may have more embedding rows (padding)."""
        return self._largest[0] + 1

    @cached_property
    def _largest(self) -> tuple[int, str]:
        return max((i, text) for text, i in self._tok.get_vocab(with_added_tokens=True).items())

    def _check_fits(self, rows: int | None) -> None:
        if rows is None:
            return
        largest, text = self._largest
        if largest >= rows:
            raise TokenizerError(
                f"{self.source}: token {text!r} has id {largest}, but the model has only {rows} embedding rows: this is "
                "the tokenizer of another model; put the tokenizer.json that belongs to the checkpoint there"
            )

    @property
    def bos_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokenizer's own end-of-sequence token; `eos_token_ids` of `sampling_params` adds those of the model."""
        eos = self._named_id("eos_token")
        return () if eos is None else (eos,)

    def _named_id(self, name: str) -> int | None:
        return self._tok.token_to_id(self._named[name]) if name in self._named else None

    @cached_property
    def _adds_bos_itself(self) -> bool:
        """Whether the post-processor of tokenizer.json puts BOS in front, where tokenizer_config.json does not say."""
        return self.bos_id is not None and self._tok.encode("", add_special_tokens=True).ids[:1] == [self.bos_id]

    # --- text ---------------------------------------------------------------------------------------------------------

    def encode(self, text: str, add_bos: bool | None = None) -> np.ndarray:
        """Ids of a finished prompt, `[T]` int32; special-token text is parsed. BOS as the checkpoint says
        (`add_bos=None`) or as told, and never twice: a text that starts with it keeps its own."""
        ids = self._tok.encode(_well_formed(text), add_special_tokens=False).ids
        if self._add_bos if add_bos is None else add_bos:
            if self.bos_id is None:
                raise TokenizerError(f"{self.source}: there is no BOS token to add; pass add_bos=False")
            if ids[:1] != [self.bos_id]:
                ids = [self.bos_id, *ids]
        return np.asarray(ids, np.int32)

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return self._tok.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def encode_pieces(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text by itself, `[T]` int32 and read-only, without BOS; what is not in the cache is tokenised in
        parallel. Special-token text stays text."""
        return self._cache.get(texts, self._encode_batch)

    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        plain = {text for text in texts if self._control_text[0].pattern.search(text)}
        results: dict[str, list[int]] = {}
        groups = (
            (lambda: self._plain, [text for text in texts if text in plain]),
            (lambda: self._tok, [text for text in texts if text not in plain]),
        )
        for encoder, group in groups:
            if group:
                encoded = encoder().encode_batch_fast(list(map(_well_formed, group)), add_special_tokens=False)
                results.update(zip(group, (e.ids for e in encoded), strict=True))
        return [results[text] for text in texts]

    # --- chats --------------------------------------------------------------------------------------------------------

    def encode_chat(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        special_tokens_in_text: SpecialTokensInText | str = "text",
        **template_kwargs: Any,
    ) -> np.ndarray:
        """Ids of the chat as the checkpoint's template renders it, `[T]` int32; BOS is what the template prints.

        Text of a control token (an added token that is marked special or has other than word characters) inside messages, tools and
        documents is kept as plain `"text"`, is an error (`"refuse"`) or is taken for the token (`"parse"`, as Hugging
        Face does). Markup such as `<think>` in assistant messages is always the token: the model wrote it.
        """
        if special_tokens_in_text not in ("text", "refuse", "parse"):
            raise ChatTemplateError(
                f'special_tokens_in_text={special_tokens_in_text!r} is unknown; choose "text", "refuse" or "parse"'
            )
        if self.chat_template is None:
            raise ChatTemplateError(f"{self.source.parent}: {MISSING_TEMPLATE}")
        protector = Protector(*self._control_text)
        if special_tokens_in_text != "parse":
            refuse = special_tokens_in_text == "refuse"
            messages = protector.messages(messages, refuse=refuse)
            tools = protector.tree(tools, "tools", refuse=refuse)
            documents = protector.tree(documents, "documents", refuse=refuse)
        rendered = self.chat_template.render(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            **template_kwargs,
        )
        parts = [part if part.id is not None else _Part(protector.restore(part.text)) for part in self._split(rendered)]
        if not self._is_local:
            return self._encode_whole(parts)
        pieces = iter(self.encode_pieces([part.text for part in parts if part.id is None]))
        ids = [np.array([part.id], np.int32) if part.id is not None else next(pieces) for part in parts]
        return np.concatenate([*ids, np.zeros(0, np.int32)])

    def _encode_whole(self, parts: Sequence[_Part]) -> np.ndarray:
        for part in parts:
            if part.id is None and (match := self._control_text[0].pattern.search(part.text)):
                raise ChatTemplateError(
                    f"the special token text {match.group()!r} stands in a message, and this kind of tokenizer cannot "
                    'keep it apart as text; remove it, or choose special_tokens_in_text="parse"'
                )
        return self.encode("".join(part.text for part in parts), add_bos=False)

    def _split(self, text: str) -> list[_Part]:
        """Cuts a text at its added tokens, in the order in which `tokenizers` looks for them."""
        parts = [_Part(text)]
        for pattern in self._added_patterns:
            parts = [
                cut for part in parts for cut in ([part] if part.id is not None else self._cut(part.text, pattern))
            ]
        return parts

    def _cut(self, text: str, pattern: re.Pattern[str]) -> list[_Part]:
        parts, at = [], 0
        for match in pattern.finditer(text):
            parts += [_Part(text[at : match.start()]), _Part(match.group(), self._added[match.group()])]
            at = match.end()
        return [part for part in (*parts, _Part(text[at:])) if part.text]

    @cached_property
    def _added_patterns(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        tokens = self._tok.get_added_tokens_decoder().values()
        first = [token.content for token in tokens if token.content and not token.normalized]
        then = [token.content for token in tokens if token.content and token.normalized]
        return alternation(first), alternation(then)

    @cached_property
    def _control(self) -> dict[str, int]:
        special = {token.content for token in self._tok.get_added_tokens_decoder().values() if token.special}
        return {t: i for t, i in self._added.items() if t in special or not re.fullmatch(r"[\w\s]+", t)}

    @cached_property
    def _control_text(self) -> tuple[ControlText, ControlText]:
        """Control tokens to be kept as text anywhere, and in assistant messages."""
        control = frozenset(self._control)
        markup = frozenset(t for t in control if _MARKUP.fullmatch(t)) - frozenset(self._named.values())
        return ControlText(control), ControlText(control - markup)

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The same tokenizer without control tokens, for texts that contain the look of one."""
        content = _parse_json(self._data, self.source)
        kept = [token for token in content["added_tokens"] if token["content"] not in self._control]
        plain = {**content, "added_tokens": kept, "post_processor": None}
        return _build(json.dumps(plain).encode(), self.source)

    @cached_property
    def _is_local(self) -> bool:
        """Whether the text between two special tokens gives the same ids wherever it stands."""
        edges = any(t.lstrip or t.rstrip or t.single_word for t in self._tok.get_added_tokens_decoder().values())
        content = _parse_json(self._data, self.source)
        normalizers = _leaves(content.get("normalizer"), "normalizers")
        pre_tokenizers = _leaves(content.get("pre_tokenizer"), "pretokenizers")
        return not edges and not normalizers and bool(pre_tokenizers) and all(map(_is_local, pre_tokenizers))


class _Part(NamedTuple):
    """A text to tokenise, or an added token with its id."""

    text: str
    id: int | None = None


def _leaves(node: Mapping[str, Any] | None, children: str) -> list[Mapping[str, Any]]:
    if node is None:
        return []
    if node.get("type") == "Sequence":
        return [leaf for child in node[children] for leaf in _leaves(child, children)]
    return [node]


def _is_local(pre_tokenizer: Mapping[str, Any]) -> bool:
    kind = pre_tokenizer.get("type")
    return kind in _LOCAL_PRE_TOKENIZERS or (kind == "ByteLevel" and not pre_tokenizer.get("add_prefix_space", True))


def _well_formed(text: str) -> str:
    """JSON can smuggle in single surrogates, which no tokenizer takes: pairs are joined, single ones become U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as e:
        raise TokenizerError(f"{path}: cannot be read ({e.strerror}); check the path and its permissions") from None


def _parse_json(data: bytes, path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(data)
    except ValueError as e:
        raise TokenizerError(f"{path}: not valid JSON ({e}); the file is damaged, copy it again") from None
    if not isinstance(parsed, dict):
        raise TokenizerError(f"{path}: must hold a JSON object, not {type(parsed).__name__}; copy the file again")
    return parsed


def _build(data: bytes, path: Path) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
    except Exception as e:  # the binding raises bare Exception
        raise TokenizerError(f"{path}: not a usable tokenizer.json ({e}); copy the file again") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _token_text(config: Mapping[str, Any], name: str) -> str | None:
    value = config.get(name)
    if isinstance(value, Mapping):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"tokenizer_config.json: {name} must be a string or a token object, not {value!r:.80}")
    return value


def _other_named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    names = [name for name in config if name.endswith("_token") and not name.startswith("add_")]
    return {name: text for name in names if (text := _token_text(config, name)) is not None}
