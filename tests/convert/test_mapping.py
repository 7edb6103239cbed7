"""Every parameter of every family, bit for bit, against the source tensors taken apart by hand."""

import json
import math

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from checkpoints_convert import convert, plan_conversion
from irminsul_jax import load_checkpoint
from irminsul_jax.checkpoint import flatten_params
from tests.support.hf_tiny import FAMILIES, write_safetensors
from tests.support.synthetic import tensor_shapes
from tests.support.synthetic_hf import V3_CONFIG


def source_tensors(path):
    tensors = {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="np") as f:
            tensors |= {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118 (not a dict)
    return tensors


def expected_layer(t, base, c, moe):
    """The layer's parameters by index arithmetic per head, independent of the converter's tables."""
    A, N, D, W = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    R = c["kv_lora_rank"]
    attention = {}
    q = t.get(base + "self_attn.q_proj.weight")
    if q is None:
        attention["q_a"] = t[base + "self_attn.q_a_proj.weight"].T
        attention["q_a_norm"] = t[base + "self_attn.q_a_layernorm.weight"]
        q = t[base + "self_attn.q_b_proj.weight"]
    kv_a, kv_b = t[base + "self_attn.kv_a_proj_with_mqa.weight"], t[base + "self_attn.kv_b_proj.weight"]
    heads = [q[a * (N + D) : (a + 1) * (N + D)] for a in range(A)]
    attention["q_nope"] = np.stack([h[:N].T for h in heads], axis=1)
    attention["q_rope"] = np.stack([np.concatenate([h[N::2], h[N + 1 :: 2]]).T for h in heads], axis=1)
    attention["kv_latent"] = kv_a[:R].T
    attention["kv_rope"] = np.concatenate([kv_a[R::2], kv_a[R + 1 :: 2]]).T
    attention["kv_norm"] = t[base + "self_attn.kv_a_layernorm.weight"]
    up = [kv_b[a * (N + W) : (a + 1) * (N + W)] for a in range(A)]
    attention["key_up"] = np.stack([u[:N] for u in up])
    attention["value_up"] = np.stack([u[N:].T for u in up])
    o = t[base + "self_attn.o_proj.weight"]
    attention["out"] = np.stack([o[:, a * W : (a + 1) * W].T for a in range(A)])
    result = {f"attention/{k}": v for k, v in attention.items()}
    result["attention_norm"] = t[base + "input_layernorm.weight"]
    result["mlp_norm"] = t[base + "post_attention_layernorm.weight"]
    names = ("gate", "up", "down")
    if not moe:
        return result | {f"mlp/{n}": t[f"{base}mlp.{n}_proj.weight"].T for n in names}
    for n in names:
        stack = [t[f"{base}mlp.experts.{e}.{n}_proj.weight"].T for e in range(c["n_routed_experts"])]
        result[f"mlp/{n}"] = np.stack(stack)
        result[f"mlp/shared/{n}"] = t[f"{base}mlp.shared_experts.{n}_proj.weight"].T
    result["mlp/router"] = t[base + "mlp.gate.weight"].T
    if base + "mlp.gate.e_score_correction_bias" in t:
        result["mlp/router_bias"] = t[base + "mlp.gate.e_score_correction_bias"]
    return result


@pytest.mark.parametrize("name", [f for f in FAMILIES if f != "deepseek_v3_fp8"])
def test_every_parameter_is_bit_exact(name, tiny, converted):
    config = json.loads((tiny(name) / "config.json").read_text())
    t = source_tensors(tiny(name))
    expected = {
        "embedding": t["model.embed_tokens.weight"],
        "norm": t["model.norm.weight"],
        "lm_head": t["lm_head.weight"].T,
    }
    for i in range(config["num_hidden_layers"]):
        layer = expected_layer(t, f"model.layers.{i}.", config, moe=i >= config["first_k_dense_replace"])
        expected |= {f"layers/{i}/{k}": v for k, v in layer.items()}
    actual = flatten_params(load_checkpoint(converted(name)).params)
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(np.asarray(actual[key]), value, err_msg=key)


def test_rotated_scores_survive_the_permutation(tiny, converted):
    """Interleaved rotation of the source and half-split rotation of ours give the same products, at positions > 0."""
    c = json.loads((tiny("deepseek_v3") / "config.json").read_text())
    t = source_tensors(tiny("deepseek_v3"))
    N, D, R = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["kv_lora_rank"]
    rng = np.random.default_rng(0)
    x, latent = rng.standard_normal(c["hidden_size"]), rng.standard_normal(c["q_lora_rank"])
    angles = 10000.0 ** (-np.arange(0, D, 2) / D)

    def turn(first, second, position):
        cos, sin = np.cos(position * angles), np.sin(position * angles)
        return first * cos - second * sin, second * cos + first * sin

    q = t["model.layers.0.self_attn.q_b_proj.weight"][N : N + D] @ latent
    k = t["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"][R:] @ x
    want = sum(float(a @ b) for a, b in zip(turn(q[::2], q[1::2], 777), turn(k[::2], k[1::2], 4321), strict=True))
    attention = load_checkpoint(converted("deepseek_v3")).params.layers[0].attention
    q, k = latent @ np.asarray(attention.q_rope)[:, 0], x @ np.asarray(attention.kv_rope)
    h = D // 2
    got = sum(float(a @ b) for a, b in zip(turn(q[:h], q[h:], 777), turn(k[:h], k[h:], 4321), strict=True))
    assert got == pytest.approx(want, rel=1e-5)


def test_fp8_blocks_with_576_rows(tmp_path):
    """Case 33: 576 rows have five block scales, the last for 64 rows; all else stays bf16 and float32."""
    config = V3_CONFIG | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "hidden_size": 192, "num_hidden_layers": 1}
    rng = np.random.default_rng(1)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        values = rng.standard_normal(shape).astype(np.float32)
        if name.endswith("_proj.weight") or "kv_a_proj" in name:
            tensors[name] = values.astype(ml_dtypes.float8_e4m3fn)
            blocks = [math.ceil(n / 128) for n in shape]
            tensors[name + "_scale_inv"] = rng.uniform(0.5, 2, blocks).astype(np.float32)
        else:
            tensors[name] = values.astype(ml_dtypes.bfloat16)
    source = tmp_path / "hf"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    dtypes = {"float8_e4m3fn": "F8_E4M3", "bfloat16": "BF16", "float32": "F32"}
    blobs = {k: (dtypes[v.dtype.name], list(v.shape), v.tobytes()) for k, v in tensors.items()}
    write_safetensors(source / "model.safetensors", blobs)

    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    scale = tensors[name + "_scale_inv"]
    assert scale.shape == (5, 2)
    weight = tensors[name].astype(np.float32)
    for i in range(5):
        for j in range(2):
            weight[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] *= scale[i, j]
    convert(source, tmp_path / "f32", dtype="float32")
    loaded = load_checkpoint(tmp_path / "f32").params.layers[0].attention
    np.testing.assert_array_equal(np.asarray(loaded.kv_latent), weight[:512].T)
    rope = np.concatenate([weight[512::2], weight[513::2]])
    np.testing.assert_array_equal(np.asarray(loaded.kv_rope), rope.T)

    assert plan_conversion(source).dtype == "bfloat16"
    convert(source, tmp_path / "bf16")
    narrow = np.asarray(load_checkpoint(tmp_path / "bf16").params.layers[0].attention.kv_latent)
    np.testing.assert_array_equal(narrow, weight[:512].T.astype(ml_dtypes.bfloat16))


def test_router_and_bias_stay_float32_in_a_bfloat16_conversion(tiny, tmp_path):
    """Case 30: 238 distinct bias values must not become 8."""
    convert(tiny("deepseek_v3"), tmp_path / "out", dtype="bfloat16")
    params = load_checkpoint(tmp_path / "out").params
    source = source_tensors(tiny("deepseek_v3"))
    moe = params.layers[1].mlp
    bias = source["model.layers.1.mlp.gate.e_score_correction_bias"]
    np.testing.assert_array_equal(np.asarray(moe.router_bias), bias)
    np.testing.assert_array_equal(np.asarray(moe.router), source["model.layers.1.mlp.gate.weight"].T)
    embedding = source["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(params.embedding), embedding)


def test_float16_sources_lose_nothing(tmp_path):
    source = tmp_path / "hf"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(V3_CONFIG))
    rng = np.random.default_rng(2)
    values = {k: rng.standard_normal(s).astype(np.float16) for k, s in tensor_shapes(V3_CONFIG).items()}
    write_safetensors(source / "m.safetensors", {k: ("F16", list(v.shape), v.tobytes()) for k, v in values.items()})
    convert(source, tmp_path / "out")
    params = load_checkpoint(tmp_path / "out").params
    np.testing.assert_array_equal(np.asarray(params.embedding), values["model.embed_tokens.weight"].astype(np.float32))
