"""Chat templates: messages → prompt text, with the Jinja semantics of Hugging Face's `apply_chat_template`.

Templates come with a checkpoint and are programs of strangers: they run in Jinja's immutable sandbox, and whatever they
raise becomes a `ChatTemplateError`. What the rendered text means in tokens is the business of `tokenizer`.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from irminsul_jax.errors import ChatTemplateError

MISSING_TEMPLATE = (
    "this checkpoint has no chat template: put a chat_template.jinja (or a chat_template entry in tokenizer_config.json) "
    "beside its tokenizer.json, or pass the finished prompt as text or token ids"
)


class _GenerationTag(Extension):
    """`{% generation %}` marks training targets in some templates; it renders as its content."""

    tags = {"generation"}  # noqa: RUF012 - the attribute jinja reads

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(fmt: str) -> str:
    return datetime.datetime.now().strftime(fmt)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Not jinja's own filter, which escapes HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


class ChatTemplate:
    """The templates of one checkpoint by name (usually only `default`), and the special tokens they may print."""

    def __init__(self, templates: Mapping[str, str], variables: Mapping[str, str] | None = None) -> None:
        if not templates:
            raise ChatTemplateError(MISSING_TEMPLATE)
        self.templates = dict(templates)
        self.variables = dict(variables or {})

    @classmethod
    def find(
        cls, tokenizer_config: Mapping[str, Any], template_file: Path | None, variables: Mapping[str, str]
    ) -> ChatTemplate | None:
        """`template_file` (chat_template.jinja) wins over the `chat_template` entry of tokenizer_config.json, which is
        one template or a list of `{"name": ..., "template": ...}`; `additional_chat_templates/NAME.jinja` beside the
        file add named ones. None if there is no template at all."""
        entry = tokenizer_config.get("chat_template")
        templates: dict[str, str] = {}
        if isinstance(entry, str):
            templates["default"] = entry
        elif isinstance(entry, Mapping):
            templates.update({str(name): str(source) for name, source in entry.items()})
        elif isinstance(entry, Sequence):
            try:
                templates.update({named["name"]: named["template"] for named in entry})
            except (KeyError, TypeError):
                raise ChatTemplateError(
                    "tokenizer_config.json: chat_template must be a string or a list of {name, template} objects"
                ) from None
        if template_file is not None:
            named_files = sorted(template_file.parent.glob("additional_chat_templates/*.jinja"))
            for name, path in [("default", template_file), *((p.stem, p) for p in named_files)]:
                try:
                    templates[name] = path.read_text(encoding="utf-8")
                except (OSError, UnicodeDecodeError) as e:
                    raise ChatTemplateError(f"{path}: cannot read the chat template ({e})") from None
        return cls(templates, variables) if templates else None

    @cached_property
    def _env(self) -> ImmutableSandboxedEnvironment:
        return _environment()

    @cached_property
    def _compiled(self) -> dict[str, jinja2.Template]:
        return {}

    def _choose(self, name: str | None, tools: Sequence[Any] | None) -> str:
        if name is None:
            name = "tool_use" if tools is not None and "tool_use" in self.templates else "default"
        if name not in self.templates:
            raise ChatTemplateError(
                f"the checkpoint has no chat template named {name!r}; pass chat_template= one of "
                f"{', '.join(sorted(self.templates))}"
            )
        return name

    def _template(self, name: str) -> jinja2.Template:
        if name not in self._compiled:
            try:
                self._compiled[name] = self._env.from_string(self.templates[name])
            except jinja2.TemplateSyntaxError as e:
                raise ChatTemplateError(f"chat template {name!r}, line {e.lineno}: {e.message}; fix the file") from None
        return self._compiled[name]

    def render(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text. Extra keywords become template variables (`enable_thinking=True`). `chat_template` names one
        of several templates; else `tool_use` if there are tools and such a template, else `default`.

        Raises `ChatTemplateError`, with the index of the message at fault where it can be told."""
        if "continue_final_message" in kwargs:
            raise ChatTemplateError(
                "continue_final_message is not supported: render with add_generation_prompt=True and append the text"
            )
        name = self._choose(chat_template, tools)
        template = self._template(name)
        reads_parts = re.search(r"\btext\b", self.templates[name]) is not None
        messages = [_checked(i, message, reads_parts) for i, message in enumerate(messages)]
        for i, tool in enumerate(tools or ()):
            if not isinstance(tool, Mapping):
                raise ChatTemplateError(f"tools[{i}] must be a JSON schema object, not {type(tool).__name__}")

        def attempt(count: int) -> str | Exception:
            try:
                return template.render(
                    **{
                        **self.variables,
                        "tools": tools,
                        "documents": documents,
                        "add_generation_prompt": add_generation_prompt,
                        **kwargs,
                        "messages": messages[:count],
                    }
                )
            except Exception as e:  # a template can raise anything
                return e

        rendered = attempt(len(messages))
        if isinstance(rendered, str):
            return rendered
        where = _failing_message(len(messages), rendered, attempt)
        raise ChatTemplateError(
            f"{where}chat template {name!r} refuses the messages: {rendered} ({type(rendered).__name__})"
        ) from None


def _failing_message(count: int, error: Exception, attempt: Callable[[int], str | Exception]) -> str:
    """`messages[i]: ` where the template fails in this way with that message and not without, found by bisection; "" if
    it fails without any message."""

    def fails_so(shorter: int) -> bool:
        result = attempt(shorter)
        return not isinstance(result, str) and (type(result), str(result)) == (type(error), str(error))

    good, bad = 0, count
    if count == 0 or fails_so(good):
        return ""
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if fails_so(middle) else (middle, bad)
    return f"messages[{good}]: "


def _checked(index: int, message: Any, template_reads_parts: bool) -> Mapping[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise ChatTemplateError(
            f'{where} must be an object like {{"role": "user", "content": "..."}}, not {message!r:.80}'
        )
    if not isinstance(message.get("role"), str):
        raise ChatTemplateError(f'{where}: "role" must be a string such as "user", not {message.get("role")!r:.80}')
    # As transformers: a key set to None is an absent one, and reasoning has one name. But templates do ask whether the
    # content of a tool call is None.
    message = {key: value for key, value in message.items() if value is not None or key == "content"}
    for older in ("reasoning", "thinking"):
        if older in message:
            message.setdefault("reasoning_content", message[older])
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    if not isinstance(content, Sequence) or not all(isinstance(part, Mapping) for part in content):
        raise ChatTemplateError(
            f'{where}: "content" must be a string or a list of {{"type": "text", "text": ...}} parts, '
            f"not {type(content).__name__}"
        )
    for part in content:
        if part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            raise ChatTemplateError(f"{where}: content part of type {part.get('type')!r} is not text; send text only")
    if template_reads_parts:
        return message
    # The template would print the list itself; join the parts as other servers do.
    return {**message, "content": "\n".join(part["text"] for part in content)}
