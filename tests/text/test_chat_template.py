"""Rendering: Hugging Face semantics, choice of template, and errors that name the message."""

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from irminsul_jax.errors import ChatTemplateError
from irminsul_jax.text.chat_template import ChatTemplate
from irminsul_jax.text.tokenizer import Tokenizer

from .conftest import DATA, MakeTokenizer

GOLDEN = json.loads((DATA / "golden.json").read_text(encoding="utf-8"))["cases"]
USER = {"role": "user", "content": "hi"}


def render(source: str, messages: Any = (USER,), variables: dict[str, str] | None = None, **kwargs: Any) -> str:
    return ChatTemplate({"default": source}, variables).render(messages, **kwargs)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_text_equals_transformers(templates: dict[str, Tokenizer], case: dict) -> None:
    template = templates[case["template"]].chat_template
    assert template is not None
    assert template.render(case["messages"], **case["kwargs"]) == case["text"]


def test_variables_and_keywords() -> None:
    source = "{{ bos_token }}{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}{{ mood }}"
    assert render(source, variables={"bos_token": "<s>"}, mood="!") == "<s>TrueTrueTrue!"


def test_tojson_keeps_unicode_html_and_key_order() -> None:
    assert render("{{ tools | tojson }}", tools=[{"b": "<ü>", "a": "'"}]) == """[{"b": "<ü>", "a": "'"}]"""


def test_blocks_loop_controls_generation_and_clock() -> None:
    source = """{% for i in range(9) %}
        {% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}
        {% generation %}
{{ i }}
        {% endgeneration %}
    {% endfor %}
{{ strftime_now('%Y') }}"""
    assert render(source) == f"0\n2\n{datetime.datetime.now().year}"


def test_sandbox() -> None:
    for source in ("{{ messages.append(1) }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"):
        with pytest.raises(ChatTemplateError):
            render(source)


def test_named_templates(make_tokenizer: MakeTokenizer) -> None:
    entry = [{"name": n, "template": n} for n in ("default", "tool_use", "rag")]
    template = make_tokenizer(chat_template=entry).chat_template
    assert template is not None
    assert template.render([USER]) == "default"
    assert template.render([USER], tools=[{}]) == "tool_use"
    assert template.render([USER], tools=[{}], chat_template="rag") == "rag"
    with pytest.raises(ChatTemplateError, match=r"named 'x'.*default, rag, tool_use"):
        template.render([USER], chat_template="x")


def test_template_file_wins_and_brings_named_ones(make_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    template = make_tokenizer("turns", chat_template="in the config").chat_template
    assert template is not None
    assert template.render([USER]).startswith("<|im_user|>")
    assert template.render([USER], tools=[{}]) == "with tools"


def test_malformed_template_entry(make_tokenizer: MakeTokenizer) -> None:
    with pytest.raises(ChatTemplateError, match=r"tokenizer_config\.json: chat_template must be"):
        make_tokenizer(chat_template=[{"template": "x"}])


def test_syntax_error_names_the_line() -> None:
    with pytest.raises(ChatTemplateError, match="'default', line 2"):
        render("ok\n{% if %}")


def test_refused_message_is_named(templates: dict[str, Tokenizer]) -> None:
    template = templates["reasoning"].chat_template
    assert template is not None
    with pytest.raises(ChatTemplateError, match=r"messages\[1\]: .*role oracle is unknown"):
        template.render([USER, {"role": "oracle", "content": "?"}, USER])
    with pytest.raises(ChatTemplateError, match=r"messages\[2\]: .*TypeError"):
        template.render([USER, USER, {"role": "user", "content": None}, USER])


@pytest.mark.parametrize("bad", [0, 1, 7, 19])
def test_refused_message_is_found_wherever_it_stands(bad: int) -> None:
    messages = [{"role": "user", "content": "no" if i == bad else "yes"} for i in range(20)]
    source = "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('bad') }}{% endif %}{% endfor %}"
    with pytest.raises(ChatTemplateError, match=rf"^messages\[{bad}\]: .*bad"):
        render(source, messages)


def test_failure_that_is_no_message_names_none() -> None:
    with pytest.raises(ChatTemplateError, match=r"^chat template 'default' refuses"):
        render("{{ raise_exception('never') }}", [USER, USER])


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ("hi", "must be an object"),
        ({"content": "x"}, '"role" must be a string'),
        ({"role": 3, "content": "x"}, '"role" must be a string'),
        ({"role": "user", "content": 7}, '"content" must be a string or a list'),
        ({"role": "user", "content": ["x"]}, '"content" must be a string or a list'),
        ({"role": "user", "content": [{"type": "image_url"}]}, "part of type 'image_url' is not text"),
    ],
)
def test_malformed_message(message: Any, complaint: str) -> None:
    with pytest.raises(ChatTemplateError, match=rf"messages\[1\].*{complaint}"):
        render("", [USER, message])


def test_malformed_tool() -> None:
    with pytest.raises(ChatTemplateError, match=r"tools\[0\] must be a JSON schema"):
        render("", tools=["x"])


def test_text_parts_are_joined_for_templates_that_want_a_string() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}]
    assert render("{{ messages[0].content }}", messages) == "a\nb"
    assert render("{{ messages[0].content[1]['text'] }}", messages) == "b"


def test_none_is_absent_but_content_stays_none() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": None}
    assert render("{{ 'tool_calls' in messages[0] }} {{ messages[0]['content'] is none }}", [message]) == "False True"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_one_name(name: str) -> None:
    message = {"role": "assistant", "content": "", name: "why"}
    assert render("{{ messages[0].reasoning_content }}", [message]) == "why"


def test_continue_final_message_is_refused_rather_than_ignored() -> None:
    with pytest.raises(ChatTemplateError, match="continue_final_message"):
        render("", continue_final_message=True)


def test_no_template_at_all() -> None:
    with pytest.raises(ChatTemplateError, match=r"put a chat_template\.jinja"):
        ChatTemplate({})
