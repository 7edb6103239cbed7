"""The tests' own float64 reference, held to what transformers computed for eight tiny checkpoints."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from irminsul_jax.config import ModelConfig
from tests.support.hf_tiny import FAMILIES, hf_reference, hf_tiny_dir
from tests.support.reference_f64 import Reference, Tensors
from tests.support.synthetic import tensor_shapes, write_hf_checkpoint

LOGIT_BAR = 2e-5  # float32 rounding of transformers itself; a wrong formula is at 0.6 and above


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hf_tiny")


@pytest.mark.parametrize("absorbed", [False, True], ids=["expanded", "absorbed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_greedy_continuation_are_those_of_transformers(family: str, absorbed: bool, tiny: Path) -> None:
    expected = hf_reference(family)
    prompt, continuation = expected["input_ids"][0], expected["generated_ids"][0]
    result = Reference(hf_tiny_dir(family, tiny)).forward([*prompt, *continuation[:-1]], absorbed=absorbed)
    assert np.abs(result.logits[: len(prompt)] - expected["logits"][0]).max() <= LOGIT_BAR
    assert result.logits[len(prompt) - 1 :].argmax(-1).tolist() == continuation.tolist()


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("deepseek_v3_fp8", "deepseek_v3_mtp")])
def test_cache_rows_and_shifted_positions_are_those_of_transformers(family: str, tiny: Path) -> None:
    expected = hf_reference(family)
    reference = Reference(hf_tiny_dir(family, tiny))
    tokens = expected["input_ids"][0]
    result = reference.forward(tokens)
    for layer in range(reference.num_layers):
        rotary = expected[f"cache_{layer}_values"][0, 0]
        if reference.is_v2:  # transformers keeps the pairs interleaved there
            rotary = np.concatenate([rotary[:, 0::2], rotary[:, 1::2]], axis=-1)
        np.testing.assert_allclose(result.c_kv[layer], expected[f"cache_{layer}_keys"][0, 0], atol=1e-5)
        np.testing.assert_allclose(result.k_r[layer], rotary, atol=2e-5)
    moved = reference.forward(tokens, positions=np.arange(len(tokens)) + 1000)
    # transformers holds the angles in float32: near 1024 rad half a unit in the last place is 6e-5.
    assert np.abs(moved.logits - expected["logits_shift1000"][0]).max() <= 1e-4


def test_rotating_cached_keys_equals_computing_them_at_the_new_position(tiny: Path) -> None:
    reference = Reference(hf_tiny_dir("deepseek_v3", tiny))
    tokens = np.random.default_rng(1).integers(3, 256, 300)
    here, there = (reference.forward(tokens, positions=np.arange(300) + start) for start in (0, 5000))
    np.testing.assert_allclose(reference.rotate(here.k_r, 5000), there.k_r, atol=1e-9)
    np.testing.assert_allclose(reference.rotate(there.k_r, np.full(300, -5000)), here.k_r, atol=1e-9)
    np.testing.assert_allclose(here.logits, there.logits, atol=1e-8)


@pytest.mark.parametrize("absorbed", [False, True], ids=["expanded", "absorbed"])
def test_served_rows_replace_computed_ones(absorbed: bool, tmp_path: Path) -> None:
    reference = Reference(write_hf_checkpoint(tmp_path, seed=4, num_hidden_layers=3))
    tokens = np.random.default_rng(2).integers(3, 256, 200)
    whole = reference.forward(tokens)
    served = np.r_[0:40, 77:130, 131:150]
    rows = whole.c_kv[:, served], whole.k_r[:, served]
    again = reference.forward_reused(tokens, served, *rows, absorbed=absorbed)
    computed = np.setdiff1d(np.arange(200), served)
    np.testing.assert_allclose(again.logits[computed], whole.logits[computed], atol=1e-9)
    assert np.isnan(again.logits[served]).all()

    turned_wrongly = reference.forward_reused(tokens, served, rows[0], reference.rotate(rows[1], 9), absorbed=absorbed)
    assert np.abs(turned_wrongly.logits[computed] - whole.logits[computed]).max() > 1e-2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "overrides",
    [
        {"model_type": "deepseek_v2"},
        {"model_type": "deepseek_v2", "q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
        {"hidden_size": 512, "num_hidden_layers": 1},
        {"n_routed_experts": None, "tie_word_embeddings": True},
    ],
    ids=["v2", "v2_full_query", "wide", "dense_tied"],
)
def test_synthetic_checkpoints_are_complete_valid_and_alive(
    overrides: dict, dtype: Literal["float32", "bfloat16"], tmp_path: Path
) -> None:
    path = write_hf_checkpoint(tmp_path, seed=3, dtype=dtype, **overrides)
    reference = Reference(path)
    ModelConfig.from_hf(reference.config)  # raises if a key is missing or unknown
    stored = Tensors(path)
    assert {n: stored[n].shape for n in tensor_shapes(reference.config)} == tensor_shapes(reference.config)
    assert len(list(path.glob("*.safetensors"))) == 3
    result = reference.forward(np.arange(3, 67))
    assert 0.1 < result.logits.std() < 100
    assert len(np.unique(result.logits.argmax(-1))) > 4


def test_same_seed_same_weights_other_seed_other_weights(tmp_path: Path) -> None:
    a, b, c = (Tensors(write_hf_checkpoint(tmp_path / n, seed=s)) for n, s in (("a", 5), ("b", 5), ("c", 6)))
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    assert np.array_equal(a[name], b[name])
    assert not np.array_equal(a[name], c[name])


def test_the_reference_shares_no_code_with_the_library() -> None:
    source = Path(__file__).parent / "support" / "reference_f64.py"
    imports = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ImportFrom):
            imports.add((node.module or ".").partition(".")[0])
        elif isinstance(node, ast.Import):
            imports |= {alias.name.partition(".")[0] for alias in node.names}
    assert "numpy" in imports
    assert imports <= {"__future__", "dataclasses", "json", "math", "ml_dtypes", "numpy", "pathlib", "typing"}
