"""Incremental text and stop strings: independent of how the tokens come, and never shown too early."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irminsul_jax.text.detokenize import Detokenizer, StopMatcher
from irminsul_jax.text.tokenizer import Tokenizer

from .conftest import MakeTokenizer


def first_stop(text: str, stop: list[str]) -> tuple[str, str | None]:
    """The definition, character by character."""
    for end in range(1, len(text) + 1):
        done = [s for s in stop if text[:end].endswith(s)]
        if done:
            longest = max(done, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("ab\n", max_size=4), max_size=12),
    stop=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
)
def test_stop_matcher(pieces: list[str], stop: list[str]) -> None:
    matcher = StopMatcher(stop)
    shown = ""
    whole, matched = first_stop("".join(pieces), stop)
    for piece in pieces:
        shown += matcher.push(piece)
        assert whole.startswith(shown)
    assert matcher.matched == matched
    assert shown + matcher.finish() == whole


def test_possible_stop_is_held_back_and_released() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.push("text\n") == "text"
    assert matcher.push("\nUse") == ""
    assert matcher.push("ful") == "\n\nUseful"
    assert matcher.matched is None


def every_byte(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids that spell the text byte by byte, so that characters span several tokens."""
    single = {tokenizer.decode([i], skip_special_tokens=False): i for i in range(tokenizer.vocab_size)}
    ids = []
    for char in text:
        ids += [single[char]] if char in single else tokenizer.encode(char, add_bos=False).tolist()
    return ids


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60), bytewise=st.booleans())
def test_pieces_add_up_and_are_never_taken_back(tokenizer: Tokenizer, text: str, bytewise: bool) -> None:
    ids = every_byte(tokenizer, text) if bytewise else tokenizer.encode(text, add_bos=False).tolist()
    detokenizer = Detokenizer(tokenizer)
    expected = tokenizer.decode(ids)
    for token in ids:
        detokenizer.push([token])
        assert expected.startswith(detokenizer.text)
    detokenizer.finish()
    assert detokenizer.text == expected


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_tokens_even_invalid_utf8(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=120))
    detokenizer = Detokenizer(tokenizer)
    shown = "".join(detokenizer.push(ids[i : i + 3]) for i in range(0, len(ids), 3))
    assert shown + detokenizer.finish() == tokenizer.decode(ids)


def test_characters_of_several_tokens_appear_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🦊", add_bos=False).tolist()
    assert len(ids) > 1
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([i]) for i in ids] == [""] * (len(ids) - 1) + ["🦊"]


def test_unfinished_character_shows_at_the_end(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(tokenizer.encode("a🦊", add_bos=False)[:-1]) == "a"
    assert detokenizer.finish() == "\ufffd"


def test_stop_across_tokens_counts_valid_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The answer is 7.\n\nUser: next", add_bos=False).tolist()
    stop = ".\n\nUs"
    detokenizer = Detokenizer(tokenizer, [stop])
    detokenizer.push(ids)
    valid = detokenizer.num_valid_tokens
    assert detokenizer.text == "The answer is 7"
    assert detokenizer.stopped == stop
    assert stop in tokenizer.decode(ids[:valid])
    assert stop not in tokenizer.decode(ids[: valid - 1])
    assert valid < len(ids)
    assert detokenizer.push(ids) == "" == detokenizer.finish()
    assert detokenizer.num_valid_tokens == valid


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_stop_does_not_depend_on_how_tokens_come(tokenizer: Tokenizer, size: int) -> None:
    ids = tokenizer.encode("one two three four STOP five six " * 3, add_bos=False).tolist()
    detokenizer = Detokenizer(tokenizer, ["r STOP f"])
    shown = "".join(detokenizer.push(ids[i : i + size]) for i in range(0, len(ids), size))
    assert shown == "one two three fou"
    assert tokenizer.decode(ids[: detokenizer.num_valid_tokens]).count("STOP") == 1


def test_special_tokens_are_not_text(tokenizer: Tokenizer) -> None:
    assert Detokenizer(tokenizer).push([0, *tokenizer.encode("hi", add_bos=False).tolist(), 1]) == "hi"


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a STOP b STOP c", add_bos=False).tolist()
    first = Detokenizer(tokenizer, ["STOP"])
    first.push(ids)
    later = Detokenizer(tokenizer, ["STOP"], min_tokens=first.num_valid_tokens)
    assert (first.text, later.push(ids)) == ("a ", "a STOP b ")


def test_decoders_that_treat_the_first_token_differently(make_tokenizer: MakeTokenizer) -> None:
    def metaspace(content: dict) -> None:
        content["decoder"] = {"type": "Metaspace", "replacement": "Ġ", "prepend_scheme": "always", "split": True}

    tokenizer = make_tokenizer(change=metaspace)
    ids = tokenizer.encode(" one two three" * 40, add_bos=False).tolist()
    expected = tokenizer.decode(ids)
    assert not expected.startswith(" ")
    assert expected.count(" ") > 100
    detokenizer = Detokenizer(tokenizer)
    assert "".join(detokenizer.push([i]) for i in ids) + detokenizer.finish() == expected
