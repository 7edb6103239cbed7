"""Mapping table of DeepSeek-V3 and its aliases (R1, V3.1, Kimi-K2, Moonlight, JoyAI-Flash): V2's names and a router bias."""

from __future__ import annotations

from checkpoints_convert import deepseek_v2
from checkpoints_convert.mapping import Rules, copied
from irminsul_jax.config import ModelConfig


def layer_rules(config: ModelConfig, layer: int) -> Rules:
    rules = deepseek_v2.layer_rules(config, layer)
    if config.moe is not None and config.is_moe_layer(layer):
        bias = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        rules["mlp/router_bias"] = copied(bias, config.moe.num_experts)
    return rules
