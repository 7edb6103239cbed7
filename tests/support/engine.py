"""Engines of the serving tests: tiny checkpoints made once, and one set of shapes, so that programs compile once."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import irminsul_jax as ij
from checkpoints_convert import convert
from irminsul_jax.checkpoint import Checkpoint, load_checkpoint
from irminsul_jax.engine.options import EngineConfig
from tests.support.synthetic import write_hf_checkpoint

TEXT_DATA = Path(__file__).parent.parent / "data" / "text"
VOCAB, EOS, CONTEXT = 1536, 1, 1024
CAPACITY_PAGES = 24
OPTIONS = EngineConfig(max_num_seqs=3, decode_block=4, prefill_chunk=256)

MODELS: dict[str, dict[str, Any]] = {
    "text": {"vocab_size": VOCAB},
    "one_layer": {"vocab_size": VOCAB, "num_hidden_layers": 1, "n_routed_experts": None},
    "undeclared": {"vocab_size": VOCAB, "num_hidden_layers": 1, "n_routed_experts": None},
}
UNDECLARED = ("rope_theta", "rope_scaling")
"""Keys that config.json of "undeclared" lacks."""

LoadModel = Callable[[str], Checkpoint]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="session")
def load_model(model_folder: Path) -> LoadModel:
    """Key of `MODELS` → the converted checkpoint. "text" alone has a tokenizer and a chat template."""

    def load(name: str) -> Checkpoint:
        source = write_hf_checkpoint(
            model_folder / "hf" / name, seed=11, max_position_embeddings=CONTEXT, eos_token_id=EOS, **MODELS[name]
        )
        if name == "undeclared":
            config = json.loads((source / "config.json").read_text())
            (source / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in UNDECLARED}))
        (source / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS, "do_sample": False}))
        if name == "text":
            shutil.copy(TEXT_DATA / "tokenizer.json", source)
            shutil.copy(TEXT_DATA / "tokenizer_config.json", source)
            shutil.copy(TEXT_DATA / "turns.jinja", source / "chat_template.jinja")
        convert(source, model_folder / "converted" / name)
        return load_checkpoint(model_folder / "converted" / name)

    return functools.cache(load)


@pytest.fixture
def engine(load_model: LoadModel) -> ij.Engine:
    """A new engine with an empty cache on the two-layer checkpoint with a tokenizer."""
    return new_engine(load_model("text"))


def new_engine(checkpoint: Checkpoint, *, pages: int = CAPACITY_PAGES, cache: Any = None, **options: Any) -> ij.Engine:
    config = ij.CacheConfig(capacity_tokens=pages * 64, **(cache or {}))
    return ij.Engine(checkpoint, cache=config, options=replace(OPTIONS, **options))


def ids(seed: int, count: int) -> np.ndarray:
    """Random token ids, none of them special in the tests' tokenizer or the model."""
    return np.random.default_rng(seed).integers(20, VOCAB - 20, count).astype(np.int32)


def prompt(*pieces: np.ndarray, salt: str | None = None) -> dict[str, Any]:
    value: dict[str, Any] = {"prompt_token_ids": np.concatenate(pieces)}
    return value if salt is None else {**value, "cache_salt": salt}


def greedy(max_tokens: int = 6, **fields: Any) -> ij.SamplingParams:
    return ij.SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **fields})


def poison(engine: ij.Engine) -> None:
    """Fills every row of the pool, the scratch page apart, with NaN."""
    pool = engine._runner.pool
    engine._runner.pool = pool.replace(arrays=tuple(a.at[:, 1:].set(jnp.nan) for a in pool.arrays))


def stored(engine: ij.Engine) -> np.ndarray:
    """The pool's latents `[L, rows, R]` as they are on the device, without the scratch page."""
    latents = np.asarray(engine._runner.pool["c_kv"])[:, 1:]
    return latents.reshape(latents.shape[0], -1, latents.shape[-1])


def run(engine: ij.Engine) -> dict[str, ij.RequestOutput]:
    """Steps until nothing is left."""
    outputs: dict[str, ij.RequestOutput] = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


def assert_all_released(engine: ij.Engine) -> None:
    stats = engine.cache_stats()
    assert stats["held_pages"] == 0
    assert stats["reservations"] == 0
    assert stats["free_pages"] + stats["evictable_pages"] == stats["total_pages"]
