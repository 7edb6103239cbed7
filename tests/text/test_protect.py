"""Look-alikes of special tokens: replaced without changing lengths, restored exactly, private characters included."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from irminsul_jax.errors import ChatTemplateError
from irminsul_jax.text.protect import ControlText, Protector

TOKENS = ControlText(frozenset({"<a>", "<a>b", "><", "[X]"}))
NONE = ControlText(frozenset())

texts = st.lists(
    st.sampled_from(["<a>", "<", "a>", "b", "[X", "]", "\U00100000", "\U00100001", "\U0010fffd"]), max_size=12
)


@given(contents=st.lists(texts.map("".join), min_size=1, max_size=4))
def test_hidden_restored_and_not_joined(contents: list[str]) -> None:
    protector = Protector(TOKENS, TOKENS)
    hidden = [
        m["content"] for m in protector.messages([{"role": "user", "content": c} for c in contents], refuse=False)
    ]
    assert TOKENS.pattern.search("".join(hidden)) is None
    assert [len(h) for h in hidden] == [len(c) for c in contents]
    assert protector.restore("".join(hidden)) == "".join(contents)


def test_nested_values_keys_and_scalars() -> None:
    value = {"<a>": [1, None, True, ("x[X]",)], "plain": "<a>b"}
    protector = Protector(TOKENS, NONE)
    hidden = protector.tree(value, "tools", refuse=False)
    assert "<a>" not in str(hidden)
    assert hidden["plain"] != "<a>b"
    assert next(iter(hidden.values()))[:3] == [1, None, True]
    with pytest.raises(ChatTemplateError, match=r"tools contains the special token text '<a>'"):
        protector.tree(value, "tools", refuse=True)
    with pytest.raises(ChatTemplateError, match=r"tools\.plain contains the special token text '<a>b'"):
        protector.tree({"plain": "<a>b"}, "tools", refuse=True)


def test_replies_have_their_own_rule() -> None:
    messages = [{"role": "assistant", "content": "<a>"}, {"role": "user", "content": "<a>"}]
    reply, question = Protector(TOKENS, NONE).messages(messages, refuse=False)
    assert reply["content"] == "<a>"
    assert question["content"] != "<a>"


def test_tokens_of_private_characters_do_not_hang() -> None:
    odd = ControlText(frozenset({"\U00100000x"}))
    protector = Protector(odd, odd)
    assert protector.restore(protector.tree("\U00100000x", "tools", refuse=False)) == "\U00100000x"


def test_private_characters_can_run_out() -> None:
    everything = "".join(map(chr, range(0x100000, 0x10FFFE)))
    with pytest.raises(ChatTemplateError, match="private-use"):
        Protector(TOKENS, TOKENS).tree(everything + "<a>", "tools", refuse=False)
