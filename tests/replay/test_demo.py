"""The demo checkpoint: made once, whole or not at all. (The demo itself is run by the gate.)"""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
from rich.console import Console

import irminsul_jax.replay.demo as demo
from irminsul_jax.checkpoint import load_checkpoint
from irminsul_jax.errors import CheckpointError
from irminsul_jax.replay.render import Prompts
from irminsul_jax.replay.trace import read_traces
from irminsul_jax.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory with the demo checkpoint in it."""
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("cache")
        patch.setenv("IRMINSUL_CACHE", str(cache))
        path, said = make()
        assert path.parent == cache
        assert "weights are random" in said
    return cache


@pytest.fixture
def cache(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("IRMINSUL_CACHE", str(made))
    return made


def make() -> tuple[Path, str]:
    stream = io.StringIO()
    return demo.demo_checkpoint(Console(file=stream, width=200)), stream.getvalue()


def test_the_second_run_takes_it_as_it_is(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_build", lambda scratch: pytest.fail("it was built again"))
    path, said = make()
    assert path == demo.demo_path()
    assert said == ""
    assert [entry.name for entry in cache.iterdir()] == [path.name]


def test_a_damaged_one_is_made_again(cache: Path) -> None:
    (demo.demo_path() / "tokenizer.json").unlink()
    path, _ = make()
    assert load_checkpoint(path).tokenizer_path


def test_an_interrupted_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IRMINSUL_CACHE", str(tmp_path))

    def interrupted(folder: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_write_weights", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make()
    assert list(tmp_path.iterdir()) == []


def test_of_two_first_runs_at_once_both_end_well(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished = demo.demo_path()
    monkeypatch.setenv("IRMINSUL_CACHE", str(tmp_path))

    def overtaken(scratch: Path) -> None:
        for place in (demo.demo_path(), scratch / "checkpoint"):
            shutil.copytree(finished, place)

    monkeypatch.setattr(demo, "_build", overtaken)
    path, _ = make()
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_cache_directory_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("IRMINSUL_CACHE", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="set IRMINSUL_CACHE"):
        make()


def test_its_tokenizer_fills_the_vocabulary_and_its_prompts_stay_in_small_tables(cache: Path) -> None:
    checkpoint = load_checkpoint(demo.demo_path())
    tokenizer = Tokenizer.from_directory(checkpoint.path)
    assert tokenizer.vocab_size == checkpoint.vocab_size
    requests = read_traces([demo.DEMO_TRACE]).requests
    assert len(requests) == 24
    prompts = Prompts(tokenizer, requests, use_chat_template=True, early_variation=True)
    assert not prompts.failed
    assert min(prompts.lengths.values()) > 3000
    # Tables of up to 128 fragments: longer prompts would double the programs that a first run compiles.
    assert max(prompts.lengths.values()) + 16 <= 64 * 64


def test_the_packaged_trace_is_small_and_names_its_licence() -> None:
    assert demo.DEMO_TRACE.stat().st_size < 2 << 20
    text = (demo.DEMO_TRACE.parent / "README.md").read_text()
    assert "Permission is hereby granted, free of charge" in text
    assert "Copyright (c) 2024 Sierra" in text
