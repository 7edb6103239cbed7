"""Texts to ids: BOS, fit to the model, damaged files, the cache of pieces."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from irminsul_jax.errors import ChatTemplateError, TokenizerError
from irminsul_jax.text.piece_cache import PieceCache
from irminsul_jax.text.tokenizer import Tokenizer

from .conftest import BOS, DATA, EOS, MakeTokenizer


def test_round_trip_and_dtype(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer()
    text = "Grüße, 你好 👋🏽\n\tx = 12345"
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=False) == BOS + text


@pytest.mark.parametrize("text", ["hello", BOS + "hello"])
def test_bos_is_added_once(make_tokenizer: MakeTokenizer, text: str) -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer.encode(text).tolist()
    assert ids.count(tokenizer.bos_id) == 1
    assert ids[0] == tokenizer.bos_id


def test_bos_can_be_chosen(make_tokenizer: MakeTokenizer) -> None:
    with_bos, without = make_tokenizer(add_bos_token=True), make_tokenizer(add_bos_token=False)
    assert without.encode("hi").tolist() == with_bos.encode("hi", add_bos=False).tolist()
    assert without.encode("hi", add_bos=True).tolist() == with_bos.encode("hi").tolist()
    assert len(with_bos.encode("hi")) == len(without.encode("hi")) + 1


def test_bos_from_the_post_processor_when_the_config_is_silent(make_tokenizer: MakeTokenizer) -> None:
    def add_bos(content: dict) -> None:
        content["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": BOS, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {BOS: {"id": BOS, "ids": [0], "tokens": [BOS]}},
        }

    assert make_tokenizer(change=add_bos, add_bos_token=None).encode("hi")[0] == 0
    assert make_tokenizer(add_bos_token=None).encode("hi")[0] != 0


def test_bos_that_is_not_in_the_vocabulary(make_tokenizer: MakeTokenizer) -> None:
    with pytest.raises(TokenizerError, match=r"bos_token '<nope>'"):
        make_tokenizer(bos_token="<nope>")
    with pytest.raises(TokenizerError, match="add_bos=False"):
        make_tokenizer(bos_token=None, add_bos_token=False).encode("x", add_bos=True)


def test_named_tokens(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer()
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (0, (1,))
    assert make_tokenizer(eos_token=None).eos_ids == ()


def test_truncation_and_padding_of_the_file_are_off(make_tokenizer: MakeTokenizer) -> None:
    def truncate(content: dict) -> None:
        content["truncation"] = {"max_length": 4, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}

    assert len(make_tokenizer(change=truncate).encode("one two three four five six seven")) > 6


def test_single_surrogates_do_not_break_tokenising(tokenizer: Tokenizer) -> None:
    text, mended = "a\ud83e\udd8ab\ud800c", "a🦊b\ufffdc"
    assert tokenizer.encode(text).tolist() == tokenizer.encode(mended).tolist()
    assert tokenizer.encode_pieces([text])[0].tolist() == tokenizer.encode(mended).tolist()


def test_missing_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: not there.*pass token ids.*Kimi"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("damage", [b"{", b"[]", b"\xff\xfe", b'{"model": {"type": "BPE"}}'])
def test_damaged_tokenizer(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(damage)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: .*copy"):
        Tokenizer.from_directory(tmp_path)


def test_vocabulary_must_fit_the_embedding() -> None:
    rows = Tokenizer.from_file(DATA / "tokenizer.json").vocab_size
    assert Tokenizer.from_file(DATA / "tokenizer.json", vocab_size=rows).vocab_size == rows
    with pytest.raises(TokenizerError, match=rf"\[EOS\]' has id {rows - 1}, .*only {rows - 1} embedding rows"):
        Tokenizer.from_file(DATA / "tokenizer.json", vocab_size=rows - 1)


def test_fingerprint_follows_the_file(make_tokenizer: MakeTokenizer) -> None:
    first = make_tokenizer().fingerprint
    assert make_tokenizer(add_bos_token=False).fingerprint == first
    assert make_tokenizer(change=lambda c: c["added_tokens"].pop()).fingerprint != first


def test_pieces_equal_single_encoding_and_are_cached(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer()
    texts = ["first text", "", "second\n", "first text"]
    pieces = tokenizer.encode_pieces(texts)
    assert [p.tolist() for p in pieces] == [tokenizer.encode(t, add_bos=False).tolist() for t in texts]
    assert all(p.dtype == np.int32 and not p.flags.writeable for p in pieces)
    before = tokenizer._cache.tokenized_characters
    tokenizer.encode_pieces([*texts, "third"])
    assert tokenizer._cache.tokenized_characters - before == len("third")


def test_special_token_text_in_pieces_stays_text(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer()
    (ids,) = tokenizer.encode_pieces([f"a{EOS}b<｜User｜>"])
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"a{EOS}b<｜User｜>"
    assert not set(ids.tolist()) & set(tokenizer._added.values())


def test_piece_cache_drops_the_least_recently_used() -> None:
    calls: list[str] = []

    def encode(texts: list[str]) -> list[list[int]]:
        calls.extend(texts)
        return [[len(t)] for t in texts]

    cache = PieceCache(max_characters=10)
    cache.get(["aaaa", "bbbb"], encode)
    cache.get(["aaaa"], encode)
    cache.get(["cccc"], encode)  # 12 characters: b goes
    assert [a.tolist() for a in cache.get(["aaaa", "cccc", "bbbb"], encode)] == [[4], [4], [4]]
    assert calls == ["aaaa", "bbbb", "cccc", "bbbb"]
    cache.get(["x" * 11], encode)
    cache.get(["x" * 11], encode)
    assert calls.count("x" * 11) == 2


def test_chat_without_template(make_tokenizer: MakeTokenizer) -> None:
    with pytest.raises(ChatTemplateError, match=r"no chat template: put a chat_template\.jinja"):
        make_tokenizer().encode_chat([{"role": "user", "content": "hi"}])


def test_damaged_tokenizer_config(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((DATA / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"a": 1})[:-1])
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: not valid JSON"):
        Tokenizer.from_directory(tmp_path)


def test_text_and_sampling_parameters_need_no_jax() -> None:
    program = (
        "import sys; sys.modules['jax'] = None\n"
        "import irminsul_jax.text.detokenize, irminsul_jax.text.tokenizer, irminsul_jax.sampling_params"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
