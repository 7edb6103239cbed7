"""Model and cache configurations: plain frozen data, read from Hugging Face `config.json`. No jax here.

Two dialects of `config.json` exist: the hub's (`rope_theta` + `rope_scaling`, `torch_dtype`) and that of transformers 5
(`rope_parameters`, `dtype`); both are read. A key that could change the architecture and is not known is an error.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from irminsul_jax.errors import ConfigError, UnsupportedModelError

RouterKind = Literal["softmax_greedy", "softmax_group_limited_greedy", "sigmoid_bias_grouped"]

_V2, _V3 = "deepseek_v2", "deepseek_v3"
FAMILIES: dict[str, str] = {
    _V2: _V2,
    _V3: _V3,
    "kimi_k2": _V3,
    "joyai_llm_flash": _V3,
}
"""`model_type` on the hub → the kind of model that runs it. Moonlight and R1 declare `deepseek_v3` themselves."""

# Keys that say nothing about the forward pass of the language model as we run it.
_IGNORED_KEYS = frozenset(
    "architectures auto_map attention_dropout aux_loss_alpha bos_token_id eos_token_id pad_token_id unk_token_id dtype "
    "torch_dtype ep_size initializer_range max_window_layers num_key_value_heads num_nextn_predict_layers "
    "output_router_logits pretraining_tp qk_head_dim head_dim quantization_config seq_aux transformers_version "
    "use_cache _name_or_path id2label label2id return_dict output_attentions output_hidden_states "
    "router_aux_loss_coef is_decoder chunk_size_feed_forward problem_type num_experts_per_group "
    "tokenizer_class model_max_length".split()
)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: plain, or YaRN (arXiv 2309.00071) as the DeepSeek models use it.

    `declared` is False when the checkpoint says nothing about its rotary embedding and we run on the customary default:
    such a model is served, but its rotary keys are never turned (no shifted reuse).
    """

    theta: float = 10000.0
    kind: Literal["default", "yarn"] = "default"
    factor: float = 1.0
    original_max_position: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    declared: bool = True

    def _mscale(self, m: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * m * math.log(self.factor) + 1.0

    @property
    def cos_sin_factor(self) -> float:
        """Factor on cos and sin of queries and keys (1.0 for every released MLA model)."""
        if self.kind == "default":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    @property
    def softmax_factor(self) -> float:
        """Factor on the softmax scale: mscale_all_dim², DeepSeek's attention temperature under YaRN."""
        if self.kind == "default" or not self.mscale_all_dim:
            return 1.0
        return self._mscale(self.mscale_all_dim) ** 2

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RopeConfig:
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
        theta = scaling.get("rope_theta", config.get("rope_theta"))
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        base = cls(theta=float(theta if theta is not None else 10000.0), declared=theta is not None)
        if kind == "default":
            return base
        if kind != "yarn":
            raise UnsupportedModelError(
                f"config.json: rotary scaling {kind!r} is not supported (known: 'default', 'yarn'); its frequencies "
                "may depend on the prompt length, which cached keys cannot follow"
            )
        known = {"factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor",
                 "original_max_position_embeddings", "rope_theta", "rope_type", "type"}  # fmt: skip
        if unknown := sorted(k for k in scaling.keys() - known if scaling[k]):
            raise ConfigError(f"config.json: unknown rotary scaling keys {', '.join(unknown)}")
        try:
            return dataclasses.replace(
                base,
                kind="yarn",
                factor=float(scaling["factor"]),
                original_max_position=int(scaling["original_max_position_embeddings"]),
                beta_fast=float(scaling.get("beta_fast") or 32.0),
                beta_slow=float(scaling.get("beta_slow") or 1.0),
                mscale=float(scaling.get("mscale") or 0.0),
                mscale_all_dim=float(scaling.get("mscale_all_dim") or 0.0),
                attention_factor=scaling.get("attention_factor"),
            )
        except KeyError as e:
            raise ConfigError(f"config.json: YaRN rotary scaling without {e.args[0]!r}") from None


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Mixture of experts. `router` names the scoring and selection rule; see `irminsul_jax.model.moe`."""

    num_experts: int
    experts_per_token: int
    expert_dim: int
    num_shared_experts: int
    router: RouterKind
    num_groups: int = 1
    groups_per_token: int = 1
    normalize: bool = False
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One MLA language model. Every field is static: a different value is a different compilation."""

    model_type: str
    """As declared by the checkpoint, e.g. `kimi_k2`; `family` is the kind of model that runs it."""
    vocab_size: int
    hidden_dim: int
    num_layers: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    mlp_dim: int
    num_dense_layers: int
    """Layers at the bottom with a dense MLP; all layers above are MoE (all are dense when `moe` is None)."""
    moe: MoeConfig | None
    rope: RopeConfig
    max_position: int
    norm_eps: float
    latent_norm_eps: float = 1e-6
    """Epsilon of the norms inside the latent projections: 1e-6 in the reference code, whatever `rms_norm_eps` says."""
    tie_embeddings: bool = False

    @property
    def family(self) -> str:
        return FAMILIES[self.model_type]

    @property
    def softmax_scale(self) -> float:
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * self.rope.softmax_factor

    @property
    def shift_refusal(self) -> str | None:
        """Why cached rows of this model may not be served at another position, or None if they may."""
        if not self.rope.declared:
            return (
                "config.json declares no rotary embedding (neither rope_theta nor rope_parameters), so cached keys "
                "cannot be turned safely; only exact prefixes are reused"
            )
        return None

    def is_moe_layer(self, layer: int) -> bool:
        return self.moe is not None and layer >= self.num_dense_layers

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Reads a `config.json`; raises `UnsupportedModelError` or `ConfigError` naming the key that does not fit."""
        return _from_hf(cls, config)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelConfig:
        try:
            fields = dict(data)
            moe = fields.pop("moe")
            rope = fields.pop("rope")
            return cls(**fields, rope=RopeConfig(**rope), moe=MoeConfig(**moe) if moe else None)
        except (KeyError, TypeError) as e:
            raise ConfigError(f"model configuration is incomplete or from another version: {e}") from None


def _from_hf(cls: type[ModelConfig], config: Mapping[str, Any]) -> ModelConfig:
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"config.json: model_type {model_type!r} is not supported; supported: {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[model_type]
    used: set[str] = {"model_type", "rope_parameters", "rope_scaling", "rope_theta"}

    def get(key: str, default: Any = ...) -> Any:
        used.add(key)
        value = config.get(key, default)
        if value is ...:
            raise ConfigError(f"config.json: {key!r} is missing")
        return value

    def must_be(key: str, *allowed: Any) -> None:
        value = get(key, allowed[0])
        if value not in allowed:
            raise UnsupportedModelError(f"config.json: {key}={value!r} is not supported (only {allowed[0]!r})")

    must_be("hidden_act", "silu")
    must_be("attention_bias", False, None)
    must_be("mlp_bias", False, None)
    must_be("rope_interleave", True, None)
    must_be("moe_layer_freq", 1, None)

    num_layers = int(get("num_hidden_layers"))
    num_experts = get("n_routed_experts", None)
    dense = int(get("first_k_dense_replace", 0)) if num_experts else num_layers
    moe = _moe_from_hf(family, get, num_experts) if num_experts and dense < num_layers else None
    if moe is None:  # a dense model may still carry the routing keys
        used |= {"first_k_dense_replace", "n_group", "topk_group", "topk_method", "scoring_func", "norm_topk_prob", "routed_scaling_factor",
                 "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size"}  # fmt: skip
    result = cls(
        model_type=model_type,
        vocab_size=int(get("vocab_size")),
        hidden_dim=int(get("hidden_size")),
        num_layers=num_layers,
        num_heads=int(get("num_attention_heads")),
        q_lora_rank=get("q_lora_rank", None),
        kv_lora_rank=int(get("kv_lora_rank")),
        qk_nope_head_dim=int(get("qk_nope_head_dim")),
        qk_rope_head_dim=int(get("qk_rope_head_dim")),
        v_head_dim=int(get("v_head_dim")),
        mlp_dim=int(get("intermediate_size")),
        num_dense_layers=dense,
        moe=moe,
        rope=RopeConfig.from_hf(config),
        max_position=int(get("max_position_embeddings")),
        norm_eps=float(get("rms_norm_eps")),
        tie_embeddings=bool(get("tie_word_embeddings", False)),
    )
    # A key that is absent in effect (None, False, 0, "") cannot change the architecture.
    unknown = sorted(k for k in config.keys() - used - _IGNORED_KEYS if config[k])
    if unknown:
        raise ConfigError(
            f"config.json: unknown keys {', '.join(unknown)}: they may change the architecture; remove them from "
            "config.json if they do not"
        )
    return result


def _moe_from_hf(family: str, get: Any, num_experts: int) -> MoeConfig:
    method = get("topk_method", "noaux_tc" if family == _V3 else "greedy")
    scoring = get("scoring_func", "sigmoid" if family == _V3 else "softmax")
    routers: dict[tuple[str, str], RouterKind] = {
        ("softmax", "greedy"): "softmax_greedy",
        ("softmax", "group_limited_greedy"): "softmax_group_limited_greedy",
        ("sigmoid", "noaux_tc"): "sigmoid_bias_grouped",
    }
    router = routers.get((scoring, method))
    if router is None or (family == _V3) != (router == "sigmoid_bias_grouped"):
        raise UnsupportedModelError(
            f"config.json: router scoring_func={scoring!r} with topk_method={method!r} is not one that {family} has"
        )
    groups, per_token = int(get("n_group", None) or 1), int(get("topk_group", None) or 1)
    if num_experts % groups or not 1 <= per_token <= groups:
        raise ConfigError(f"config.json: n_group={groups}, topk_group={per_token} do not fit {num_experts} experts")
    normalize = bool(get("norm_topk_prob", family == _V3))
    if family == _V2 and normalize:
        # The original code renormalises *instead of* scaling, transformers does neither; no release sets it.
        raise UnsupportedModelError("config.json: norm_topk_prob=true is not defined for deepseek_v2 models")
    return MoeConfig(
        num_experts=int(num_experts),
        experts_per_token=int(get("num_experts_per_tok")),
        expert_dim=int(get("moe_intermediate_size")),
        num_shared_experts=int(get("n_shared_experts", None) or 0),
        router=router,
        num_groups=groups,
        groups_per_token=per_token,
        normalize=normalize,
        scale=float(get("routed_scaling_factor", 1.0)),
    )
