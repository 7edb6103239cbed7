"""The dry run: mapping, skipped tensors, figures, and errors that name every tensor."""

import json
import shutil

import pytest

from checkpoints_convert import convert, plan_conversion
from checkpoints_convert.plan import _parts, _rules
from irminsul_jax.config import ModelConfig
from irminsul_jax.errors import ConfigError, ConversionError, UnsupportedModelError
from tests.support.hf_tiny import write_safetensors
from tests.support.synthetic import tensor_shapes
from tests.support.synthetic_hf import V3_CONFIG, write_sparse_hf


@pytest.fixture
def source(tmp_path):
    return write_sparse_hf(tmp_path / "hf", V3_CONFIG, tensor_shapes(V3_CONFIG))


def rewrite(source, shapes, config=V3_CONFIG):
    shutil.rmtree(source)
    write_sparse_hf(source, config, shapes)


def test_dry_run_figures_equal_reality(source, tmp_path):
    plan = plan_conversion(source)
    done = []
    manifest = convert(source, tmp_path / "out", progress=lambda d, t, label: done.append((d, t)))
    assert manifest.param_bytes == plan.bytes_to_write
    assert manifest.param_count == plan.param_count
    assert {k: (v.shape, v.dtype) for k, v in manifest.parameters.items()} == {
        p.name: (p.shape, p.dtype) for p in plan.parameters
    }
    stored = sum(f.stat().st_size for f in (tmp_path / "out" / "params").rglob("*") if f.is_file())
    assert plan.bytes_to_write < stored < plan.bytes_to_write + 128 * 1024  # stored uncompressed, plus metadata
    assert done[-1][0] == done[-1][1]
    assert [d for d, _ in done] == sorted(d for d, _ in done)


def test_dry_run_writes_nothing_and_is_plain_data(source):
    before = sorted(p.name for p in source.parent.rglob("*"))
    data = json.loads(json.dumps(plan_conversion(source).to_json()))
    assert sorted(p.name for p in source.parent.rglob("*")) == before
    entry = next(p for p in data["parameters"] if p["name"] == "layers/0/attention/q_rope")
    assert entry["sources"] == ["model.layers.0.self_attn.q_b_proj.weight"]
    assert entry["shape"] == [32, 2, 8]
    assert entry["source_shape"] == [48, 32]


def test_missing_misshapen_and_unknown_tensors_are_all_named(source):
    shapes = tensor_shapes(V3_CONFIG)
    del shapes["model.norm.weight"], shapes["model.layers.1.mlp.experts.3.up_proj.weight"]
    shapes["lm_head.weight"] = (511, 64)
    shapes["model.layers.0.self_attn.extra.weight"] = (3,)
    rewrite(source, shapes)
    with pytest.raises(ConversionError) as error:
        plan_conversion(source)
    for part in (
        "4 tensors",
        "missing: model.norm.weight [64]",
        "missing: model.layers.1.mlp.experts.3.up_proj.weight [32, 64]",
        "misshapen: lm_head.weight is [511, 64], config.json implies [512, 64]",
        "unknown: model.layers.0.self_attn.extra.weight",
    ):
        assert part in str(error.value)


def test_mtp_layer_and_rotary_buffers_are_skipped_by_name(source, tmp_path):
    """Case 34, and the rotary buffers that old checkpoints carry."""
    extra = {
        "model.layers.2.eh_proj.weight": (64, 128),
        "model.layers.2.embed_tokens.weight": (512, 64),
        "model.layers.0.self_attn.rotary_emb.inv_freq": (4,),
    }
    rewrite(source, tensor_shapes(V3_CONFIG) | extra)
    manifest = convert(source, tmp_path / "out")
    assert manifest.skipped.keys() == extra.keys()
    assert manifest.skipped["model.layers.2.eh_proj.weight"] == "multi-token-prediction layer"


def test_shard_outside_the_index_is_skipped_by_name(tiny, tmp_path):
    """JoyAI's multi-token-prediction shard is not in the index."""
    source = tmp_path / "hf"
    shutil.copytree(tiny("joyai_llm_flash"), source)
    config = json.loads((source / "config.json").read_text()) | {
        "model_type": "joyai_llm_flash",
        "auto_map": {"AutoModelForCausalLM": "modeling.Model"},
    }
    (source / "config.json").write_text(json.dumps(config))
    (source / "modeling.py").write_text("raise SystemExit('code of the model directory was executed')")
    data = b"\0" * 16
    write_safetensors(source / "mtp-1-of-1.safetensors", {"model.layers.3.eh_proj.weight": ("F32", [2, 2], data)})
    manifest = convert(source, tmp_path / "out")
    assert manifest.skipped == {"model.layers.3.eh_proj.weight": "multi-token-prediction layer"}
    assert manifest.model.model_type == "joyai_llm_flash"
    assert "mtp-1-of-1.safetensors" in [s.name for s in manifest.sources]
    assert not (tmp_path / "out" / "modeling.py").exists()


def test_tied_embeddings_have_no_head(source, tmp_path):
    rewrite(source, tensor_shapes(V3_CONFIG), V3_CONFIG | {"tie_word_embeddings": True})
    manifest = convert(source, tmp_path / "out")
    assert "lm_head" not in manifest.parameters
    assert manifest.skipped == {"lm_head.weight": "tied to the embedding"}


def test_config_errors_pass_through_with_the_path(source):
    (source / "config.json").write_text(json.dumps(V3_CONFIG | {"model_type": "llama"}))
    with pytest.raises(UnsupportedModelError, match=r"hf: config.json: model_type 'llama'"):
        plan_conversion(source)
    (source / "config.json").write_text(json.dumps(V3_CONFIG | {"index_topk": 2048}))
    with pytest.raises(ConfigError, match="unknown keys index_topk"):
        plan_conversion(source)
    (source / "config.json").write_text("{")
    with pytest.raises(ConversionError, match=r"config.json: not readable as JSON"):
        plan_conversion(source)


def test_source_that_is_no_directory_or_has_no_shards(tmp_path):
    with pytest.raises(ConversionError, match=r"not a directory. Download"):
        plan_conversion(tmp_path / "org" / "name")
    (tmp_path / "config.json").write_text(json.dumps(V3_CONFIG))
    with pytest.raises(ConversionError, match=r"no \*.safetensors"):
        plan_conversion(tmp_path)


def test_truncated_shard_is_named(source):
    shard = source / "model.safetensors"
    with shard.open("rb+") as f:
        f.truncate(shard.stat().st_size - 1)
    with pytest.raises(ConversionError, match=r"model.safetensors: damaged or incomplete"):
        plan_conversion(source)
    shard.write_bytes(b"\xff" * 64)
    with pytest.raises(ConversionError, match=r"model.safetensors: damaged or incomplete"):
        plan_conversion(source)


def test_shard_of_the_index_is_missing(tiny, tmp_path):
    source = tmp_path / "hf"
    shutil.copytree(tiny("deepseek_v3"), source)
    (source / "model-00002-of-00005.safetensors").unlink()
    with pytest.raises(ConversionError, match=r"missing: model-00002-of-00005.safetensors"):
        plan_conversion(source)


def test_fp8_without_scales_is_named(tiny, tmp_path):
    source = tmp_path / "hf"
    source.mkdir()
    shapes = tensor_shapes(V3_CONFIG)
    name = "model.layers.0.self_attn.o_proj.weight"
    blobs = {k: ("BF16", list(s), bytes(2 * _size(s))) for k, s in shapes.items()}
    blobs[name] = ("F8_E4M3", list(shapes[name]), bytes(_size(shapes[name])))
    write_safetensors(source / "model.safetensors", blobs)
    (source / "config.json").write_text(json.dumps(V3_CONFIG))
    with pytest.raises(ConversionError, match=r"missing: .*o_proj.weight_scale_inv \[1, 1\]"):
        plan_conversion(source)


def test_large_stacks_are_parts_of_their_own():
    config = ModelConfig.from_hf(
        V3_CONFIG | {"n_routed_experts": 64, "hidden_size": 2048, "moe_intermediate_size": 1408}
    )
    parts = _parts(config, _rules(config), "bfloat16")
    big = [p for p in parts if p.chunked]
    assert [p.name for p in big] == [f"layers/1/mlp/{n}" for n in ("gate", "up", "down")]
    layer = sum(p.nbytes for p in parts if p.name.startswith("layers/1/"))
    # Four times one of three stacks, where the whole layer in one part would take twice the layer.
    assert max(p.peak_bytes for p in parts) <= 1.5 * layer


def _size(shape):
    size = 1
    for n in shape:
        size *= n
    return size
