"""Mapping table of DeepSeek-V2 (V2, V2-Lite, Coder-V2, V2.5): names as in its modeling code on the hub."""

from __future__ import annotations

import numpy as np

from checkpoints_convert.mapping import (
    Piece,
    Rules,
    copied,
    half_split,
    head_rows,
    stacked_transposed,
    transposed,
)
from irminsul_jax.config import ModelConfig


def layer_rules(config: ModelConfig, layer: int) -> Rules:
    base = f"model.layers.{layer}."
    hidden = config.hidden_dim
    return {
        "attention_norm": copied(base + "input_layernorm.weight", hidden),
        **_attention_rules(config, base + "self_attn."),
        "mlp_norm": copied(base + "post_attention_layernorm.weight", hidden),
        **(_moe_rules(config, base + "mlp.") if config.is_moe_layer(layer) else _mlp_rules(config, base + "mlp.")),
    }


def _attention_rules(c: ModelConfig, base: str) -> Rules:
    H, A, R = c.hidden_dim, c.num_heads, c.kv_lora_rank
    N, D, W = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
    rules: Rules = {}
    if c.q_lora_rank:
        rules["attention/q_a"] = transposed(base + "q_a_proj.weight", c.q_lora_rank, H)
        rules["attention/q_a_norm"] = copied(base + "q_a_layernorm.weight", c.q_lora_rank)
        query, width = base + "q_b_proj.weight", c.q_lora_rank
    else:
        query, width = base + "q_proj.weight", H

    def queries(within: np.ndarray) -> tuple[Piece, ...]:  # [A·(N+D), X] → [X, A, within]
        rows = head_rows(A, N + D, within)
        return (Piece(source=query, source_shape=(A * (N + D), width), axes=(1, 2, 0), row_axes=2, rows=rows),)

    def latent(rows: np.ndarray) -> tuple[Piece, ...]:  # [R+D, H] → [H, rows]
        source = base + "kv_a_proj_with_mqa.weight"
        return (Piece(source=source, source_shape=(R + D, H), axes=(1, 0), rows=rows),)

    def expansion(within: np.ndarray, axes: tuple[int, ...]) -> tuple[Piece, ...]:  # [A·(N+W), R] → per head
        rows, source = head_rows(A, N + W, within), base + "kv_b_proj.weight"
        return (Piece(source=source, source_shape=(A * (N + W), R), axes=axes, row_axes=2, rows=rows),)

    return rules | {
        "attention/q_nope": queries(np.arange(N)),
        "attention/q_rope": queries(N + half_split(D)),
        "attention/kv_latent": latent(np.arange(R)),
        "attention/kv_rope": latent(R + half_split(D)),
        "attention/kv_norm": copied(base + "kv_a_layernorm.weight", R),
        "attention/key_up": expansion(np.arange(N), (0, 1, 2)),
        "attention/value_up": expansion(N + np.arange(W), (0, 2, 1)),
        "attention/out": (Piece(source=base + "o_proj.weight", source_shape=(H, A * W), axes=(2, 0, 1)),),
    }


def _gated(prefix: str, base: str, hidden: int, width: int) -> Rules:
    return {
        f"{prefix}/gate": transposed(base + "gate_proj.weight", width, hidden),
        f"{prefix}/up": transposed(base + "up_proj.weight", width, hidden),
        f"{prefix}/down": transposed(base + "down_proj.weight", hidden, width),
    }


def _mlp_rules(c: ModelConfig, base: str) -> Rules:
    return _gated("mlp", base, c.hidden_dim, c.mlp_dim)


def _moe_rules(c: ModelConfig, base: str) -> Rules:
    if c.moe is None:
        return {}
    E, I, H = c.moe.num_experts, c.moe.expert_dim, c.hidden_dim
    expert = base + "experts.{expert}."
    rules: Rules = {
        "mlp/router": transposed(base + "gate.weight", E, H),
        "mlp/gate": stacked_transposed(expert + "gate_proj.weight", E, I, H),
        "mlp/up": stacked_transposed(expert + "up_proj.weight", E, I, H),
        "mlp/down": stacked_transposed(expert + "down_proj.weight", E, H, I),
    }
    if c.moe.num_shared_experts:
        rules |= _gated("mlp/shared", base + "shared_experts.", H, c.moe.num_shared_experts * I)
    return rules
