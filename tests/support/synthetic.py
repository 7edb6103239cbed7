"""Random-weight Hugging Face directories of the DeepSeek-V2 and -V3 kinds, of any size, with real tensor names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

_SMALL: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_act": "silu",
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "intermediate_size": 128,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_ROUTING: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "topk_method": "group_limited_greedy",
        "scoring_func": "softmax",
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    "deepseek_v3": {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
}


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint with this config.json has."""
    c = config
    H, A = c["hidden_size"], c["num_attention_heads"]
    head = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], H)}

    def feed_forward(prefix: str, width: int) -> None:
        shapes[f"{prefix}.gate_proj.weight"] = shapes[f"{prefix}.up_proj.weight"] = (width, H)
        shapes[f"{prefix}.down_proj.weight"] = (H, width)

    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        attention = f"{layer}.self_attn"
        shapes[f"{layer}.input_layernorm.weight"] = shapes[f"{layer}.post_attention_layernorm.weight"] = (H,)
        if rank := c["q_lora_rank"]:
            shapes[f"{attention}.q_a_proj.weight"] = (rank, H)
            shapes[f"{attention}.q_a_layernorm.weight"] = (rank,)
            shapes[f"{attention}.q_b_proj.weight"] = (A * head, rank)
        else:
            shapes[f"{attention}.q_proj.weight"] = (A * head, H)
        shapes[f"{attention}.kv_a_proj_with_mqa.weight"] = (c["kv_lora_rank"] + c["qk_rope_head_dim"], H)
        shapes[f"{attention}.kv_a_layernorm.weight"] = (c["kv_lora_rank"],)
        shapes[f"{attention}.kv_b_proj.weight"] = (A * (c["qk_nope_head_dim"] + c["v_head_dim"]), c["kv_lora_rank"])
        shapes[f"{attention}.o_proj.weight"] = (H, A * c["v_head_dim"])
        if c.get("n_routed_experts") and i >= c["first_k_dense_replace"]:
            shapes[f"{layer}.mlp.gate.weight"] = (c["n_routed_experts"], H)
            if c["scoring_func"] == "sigmoid":
                shapes[f"{layer}.mlp.gate.e_score_correction_bias"] = (c["n_routed_experts"],)
            for e in range(c["n_routed_experts"]):
                feed_forward(f"{layer}.mlp.experts.{e}", c["moe_intermediate_size"])
            if c["n_shared_experts"]:
                feed_forward(f"{layer}.mlp.shared_experts", c["n_shared_experts"] * c["moe_intermediate_size"])
        else:
            feed_forward(f"{layer}.mlp", c["intermediate_size"])
    shapes["model.norm.weight"] = (H,)
    if not c.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (c["vocab_size"], H)
    return shapes


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Large enough to be alive in every layer: matrices N(0, 1/fan_in), norms 1 + 0.1 N, router bias 0.1 N."""
    values = rng.standard_normal(shape, np.float32)
    if name.endswith("e_score_correction_bias"):
        return np.float32(0.1) * values
    if len(shape) == 1:
        return 1 + np.float32(0.1) * values
    return values if name.startswith("model.embed_tokens") else values * np.float32(shape[1] ** -0.5)


def write_hf_checkpoint(
    path: str | Path,
    *,
    seed: int = 0,
    shards: int = 3,
    dtype: Literal["float32", "bfloat16"] = "float32",
    **config_overrides: Any,
) -> Path:
    """Writes config.json, `shards` safetensors files and their index to `path` (created) and returns it.

    `config_overrides` are keys of config.json; `model_type="deepseek_v2"` also switches the router's defaults,
    `q_lora_rank=None` makes the query projection full, `n_routed_experts=None` makes every layer dense. The router's
    correction bias stays float32 in every dtype, as in the releases.
    """
    out = Path(path)
    out.mkdir(parents=True, exist_ok=True)
    kind = config_overrides.get("model_type", _SMALL["model_type"])
    config = {**_SMALL, **_ROUTING.get(kind, _ROUTING["deepseek_v3"]), "torch_dtype": dtype, **config_overrides}
    if not config["n_routed_experts"]:
        del config["first_k_dense_replace"]
    (out / "config.json").write_text(json.dumps(config, indent=1))

    rng = np.random.default_rng(seed)
    shapes = tensor_shapes(config)
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    weight_map = {name: files[i * shards // len(shapes)] for i, name in enumerate(shapes)}
    contents: dict[str, dict[str, np.ndarray]] = {file: {} for file in files}
    for name, shape in shapes.items():
        tensor = _random(rng, name, shape)
        if dtype == "bfloat16" and not name.endswith("e_score_correction_bias"):
            tensor = tensor.astype(ml_dtypes.bfloat16)
        contents[weight_map[name]][name] = tensor
    for file, tensors in contents.items():
        save_file(tensors, out / file, metadata={"format": "pt"})
    size = sum(t.nbytes for tensors in contents.values() for t in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return out
