"""Reading `config.json`: the released sizes, both dialects, aliases, and refusals that name the key."""

import json
from typing import Any

import pytest

from irminsul_jax.config import ModelConfig
from irminsul_jax.errors import ConfigError, UnsupportedModelError

V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61,
    "num_attention_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "intermediate_size": 18432, "first_k_dense_replace": 3, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1, "n_group": 8, "topk_group": 4,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
                     "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
K2 = V3 | {
    "model_type": "kimi_k2", "num_attention_heads": 64, "n_routed_experts": 384, "n_group": 1, "topk_group": 1,
    "rope_theta": 50000.0, "rope_scaling": V3["rope_scaling"] | {"factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0},
}  # fmt: skip
V2_LITE = V3 | {
    "model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16,
    "q_lora_rank": None, "first_k_dense_replace": 1, "n_routed_experts": 64, "num_experts_per_tok": 6, "n_group": 1,
    "topk_group": 1, "scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False,
    "rope_scaling": V3["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "family", "router", "scale"),
    [
        (V3, "deepseek_v3", "sigmoid_bias_grouped", 0.135234),
        (K2, "deepseek_v3", "sigmoid_bias_grouped", 192**-0.5 * 1.34657**2),
        (V2_LITE, "deepseek_v2", "softmax_greedy", 192**-0.5 * 1.26080**2),
    ],
    ids=["v3", "k2", "v2-lite"],
)
def test_released_sizes(config, family, router, scale):
    model = ModelConfig.from_hf(config)
    assert (model.family, model.moe and model.moe.router) == (family, router)
    assert model.softmax_scale == pytest.approx(scale, rel=1e-5)
    assert model.rope.cos_sin_factor == 1.0
    assert model.shift_refusal is None
    assert [model.is_moe_layer(i) for i in range(4)] == [i >= config["first_k_dense_replace"] for i in range(4)]
    assert ModelConfig.from_json(json.loads(json.dumps(model.to_json()))) == model


def test_both_dialects_are_the_same_model():
    scaling = dict(V3["rope_scaling"])
    scaling["rope_type"] = scaling.pop("type")
    newer = {k: v for k, v in V3.items() if k not in ("rope_scaling", "rope_theta")}
    newer["rope_parameters"] = scaling | {"rope_theta": V3["rope_theta"]}
    assert ModelConfig.from_hf(newer) == ModelConfig.from_hf(V3)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"model_type": "llama"}, UnsupportedModelError, "'llama' is not supported; supported: deepseek_v2"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act='gelu'"),
        ({"attention_bias": True}, UnsupportedModelError, "attention_bias=True"),
        ({"rope_interleave": False}, UnsupportedModelError, "rope_interleave=False"),
        ({"scoring_func": "softmax"}, UnsupportedModelError, "scoring_func='softmax'"),
        ({"n_group": 7}, ConfigError, "n_group=7"),
        ({"llama_4_scaling_beta": 0.1, "index_topk": 2048}, ConfigError, "index_topk, llama_4_scaling_beta"),
        ({"rope_scaling": {"type": "longrope"}}, UnsupportedModelError, "'longrope'"),
        ({"rope_scaling": {"type": "yarn", "factor": 40}}, ConfigError, "original_max_position_embeddings"),
        ({"rope_scaling": V3["rope_scaling"] | {"truncate": 3}}, ConfigError, "truncate"),
    ],
)
def test_what_would_change_the_architecture_is_refused_by_name(change, error, says):
    with pytest.raises(error, match=says):
        ModelConfig.from_hf(V3 | change)


@pytest.mark.parametrize("key", ["kv_lora_rank", "vocab_size", "num_experts_per_tok", "rms_norm_eps"])
def test_missing_keys_are_named(key):
    with pytest.raises(ConfigError, match=key):
        ModelConfig.from_hf({k: v for k, v in V3.items() if k != key})


def test_keys_without_effect_do_not_matter():
    assert ModelConfig.from_hf(V3 | {"some_future_flag": False, "use_cache": True}) == ModelConfig.from_hf(V3)


def test_undeclared_rotary_embedding_is_run_but_never_turned():
    model = ModelConfig.from_hf({k: v for k, v in V3.items() if not k.startswith("rope_")})
    assert model.rope.theta == 10000.0
    assert "no rotary embedding" in (model.shift_refusal or "")


def test_a_dense_model_may_keep_its_routing_keys():
    model = ModelConfig.from_hf(V3 | {"n_routed_experts": None})
    assert model.moe is None
    assert model.num_dense_layers == model.num_layers
