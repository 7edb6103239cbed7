"""What a DeepSeek-V2/V3 checkpoint computes, in float64 NumPy: the second opinion of the tests.

It reads a Hugging Face directory (config.json and safetensors) byte by byte and shares no code with the library, so an
error in the library's configuration, conversion, rotary embedding, routing or cache cannot hide in it. Everything is
one dense pass over whole prompts: no cache, no pages, no padding.

Rotary dimensions are brought into half-split layout (all first halves of the pairs, then all second halves) right after
the projections, so `Result.k_r` can be compared with the library's cache rows.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray

_STORED = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn}
_FP8_BLOCK = 128
_LATENT_EPS = 1e-6  # fixed in the reference code, whatever rms_norm_eps says


@dataclass(frozen=True, kw_only=True)
class Result:
    """T tokens, L layers. Rows of tokens that were served instead of computed are NaN in `logits` and `hidden`."""

    logits: Array
    """[T, V]"""
    c_kv: Array
    """[L, T, R], after the latent norm"""
    k_r: Array
    """[L, T, D], half-split, rotated to the token's position"""
    hidden: Array
    """[L + 1, T, H]: embeddings, then each layer's output; the last one after the final norm"""


class Tensors:
    """All tensors of a directory by name, read as float64 when asked for; block-scaled FP8 is dequantised."""

    def __init__(self, directory: Path) -> None:
        self._where: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for file in sorted(directory.glob("*.safetensors")):
            with file.open("rb") as f:
                size = int.from_bytes(f.read(8), "little")
                header = json.loads(f.read(size))
            for name, entry in header.items():
                if name != "__metadata__":
                    self._where[name] = (file, 8 + size, entry)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def __getitem__(self, name: str) -> Array:
        file, base, entry = self._where[name]
        begin, end = entry["data_offsets"]
        with file.open("rb") as f:
            f.seek(base + begin)
            raw = f.read(end - begin)
        values = np.frombuffer(raw, _STORED[entry["dtype"]]).reshape(entry["shape"]).astype(np.float64)
        if name + "_scale_inv" in self:
            # One factor per 128×128 block; blocks at the lower and right edge may be cut off.
            scale = self[name + "_scale_inv"]
            row, column = (np.arange(n) // _FP8_BLOCK for n in values.shape)
            values *= scale[np.ix_(row, column)]
        return values


class Reference:
    """One checkpoint, ready to run. `theta` and YaRN come from either dialect of config.json."""

    def __init__(self, hf_dir: str | Path) -> None:
        directory = Path(hf_dir)
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        c = self.config
        self.num_layers: int = c["num_hidden_layers"]
        self.num_heads: int = c["num_attention_heads"]
        self.rank: int = c["kv_lora_rank"]
        self.nope: int = c["qk_nope_head_dim"]
        self.rope: int = c["qk_rope_head_dim"]
        self.is_v2: bool = c["model_type"] == "deepseek_v2"
        self.inv_freq, self.trig_factor, temperature = _rotary(c, self.rope)
        self.scale = temperature * (self.nope + self.rope) ** -0.5
        tensors = Tensors(directory)
        self.embedding = tensors["model.embed_tokens.weight"]
        self.final_norm = tensors["model.norm.weight"]
        self.unembedding = self.embedding if c.get("tie_word_embeddings") else tensors["lm_head.weight"]
        self.layers = [self._load_layer(tensors, i) for i in range(self.num_layers)]

    def _load_layer(self, tensors: Tensors, index: int) -> dict[str, Any]:
        prefix = f"model.layers.{index}."

        def get(name: str) -> Array:
            return tensors[f"{prefix}{name}.weight"]

        def feed_forward(name: str) -> tuple[Array, Array, Array]:
            return get(f"{name}.gate_proj"), get(f"{name}.up_proj"), get(f"{name}.down_proj")

        layer: dict[str, Any] = {
            "before_attention": get("input_layernorm"),
            "before_mlp": get("post_attention_layernorm"),
            "kv_a": get("self_attn.kv_a_proj_with_mqa"),
            "kv_norm": get("self_attn.kv_a_layernorm"),
            "kv_b": get("self_attn.kv_b_proj").reshape(self.num_heads, -1, self.rank),
            "out": get("self_attn.o_proj"),
        }
        if self.config.get("q_lora_rank"):
            layer["query"] = (get("self_attn.q_a_proj"), get("self_attn.q_a_layernorm"), get("self_attn.q_b_proj"))
        else:
            layer["query"] = (get("self_attn.q_proj"),)
        experts = self.config.get("n_routed_experts")
        if experts and index >= self.config.get("first_k_dense_replace", 0):
            layer["router"] = get("mlp.gate")
            layer["experts"] = [feed_forward(f"mlp.experts.{e}") for e in range(experts)]
            if self.config.get("n_shared_experts"):
                layer["shared"] = feed_forward("mlp.shared_experts")
            if not self.is_v2:
                layer["bias"] = tensors[f"{prefix}mlp.gate.e_score_correction_bias"]
        else:
            layer["mlp"] = feed_forward("mlp")
        return layer

    def forward(self, token_ids: Any, positions: Any = None, *, absorbed: bool = False) -> Result:
        """Computes every token. `positions` [T] defaults to 0, 1, ...; attention is causal in the order given."""
        nothing = np.empty(0, int)
        return self.forward_reused(token_ids, nothing, nothing, nothing, positions=positions, absorbed=absorbed)

    def forward_reused(
        self,
        token_ids: Any,
        served: Any,
        c_kv: Array,
        k_r: Array,
        *,
        positions: Any = None,
        absorbed: bool = False,
    ) -> Result:
        """As `forward`, but the tokens at the indices `served` [N] are not computed: in layer l the others attend to the
        given rows `c_kv[l, n]` and `k_r[l, n]` for them (rotated to their position in this prompt, half-split)."""
        tokens = np.asarray(token_ids, int).reshape(-1)
        count = len(tokens)
        place = np.arange(count) if positions is None else np.asarray(positions, int)
        served = np.asarray(served, int)
        fresh = np.setdiff1d(np.arange(count), served)
        eps = self.config["rms_norm_eps"]

        x = self.embedding[tokens[fresh]]
        latents = np.full((self.num_layers, count, self.rank), np.nan)
        rotary = np.full((self.num_layers, count, self.rope), np.nan)
        hidden = np.full((self.num_layers + 1, count, x.shape[1]), np.nan)
        hidden[0, fresh] = x
        for i, layer in enumerate(self.layers):
            if len(served):
                latents[i, served], rotary[i, served] = c_kv[i], k_r[i]
            normed = _rms(x, layer["before_attention"], eps)
            projected = normed @ layer["kv_a"].T
            latents[i, fresh] = _rms(projected[:, : self.rank], layer["kv_norm"], _LATENT_EPS)
            rotary[i, fresh] = self._place(projected[:, self.rank :], place[fresh])
            x = x + self._attend(layer, normed, fresh, place[fresh], latents[i], rotary[i], absorbed)
            x = x + self._mlp(layer, _rms(x, layer["before_mlp"], eps))
            hidden[i + 1, fresh] = x
        hidden[-1, fresh] = _rms(x, self.final_norm, eps)
        return Result(logits=hidden[-1] @ self.unembedding.T, c_kv=latents, k_r=rotary, hidden=hidden)

    def rotate(self, k_r: Array, delta: Any) -> Array:
        """Turns half-split rotary keys [..., D] by `delta` positions (a number, or an array of shape [...])."""
        return _turn(np.asarray(k_r, np.float64), np.asarray(delta, np.float64)[..., None] * self.inv_freq)

    def _place(self, pairs: Array, positions: Array) -> Array:
        """Interleaved pairs [..., T, D] as projected → half-split, rotated to `positions` [T]."""
        halves = np.concatenate([pairs[..., 0::2], pairs[..., 1::2]], axis=-1)
        return _turn(halves, positions[:, None] * self.inv_freq) * self.trig_factor

    def _attend(
        self, layer: dict[str, Any], x: Array, fresh: Array, place: Array, c_kv: Array, k_r: Array, absorbed: bool
    ) -> Array:
        query = x
        if len(layer["query"]) == 3:
            down, norm, _ = layer["query"]
            query = _rms(x @ down.T, norm, _LATENT_EPS)
        query = (query @ layer["query"][-1].T).reshape(len(x), self.num_heads, -1).swapaxes(0, 1)
        q_nope, q_rope = query[..., : self.nope], self._place(query[..., self.nope :], place)
        key_up, value_up = layer["kv_b"][:, : self.nope], layer["kv_b"][:, self.nope :]
        if absorbed:
            q_nope, keys, values = q_nope @ key_up, c_kv, c_kv
        else:
            keys, values = c_kv @ key_up.swapaxes(1, 2), c_kv @ value_up.swapaxes(1, 2)
        scores = (q_nope @ keys.swapaxes(-1, -2) + q_rope @ k_r.T) * self.scale
        scores[:, np.arange(len(c_kv)) > fresh[:, None]] = -np.inf
        out = _softmax(scores) @ values
        if absorbed:
            out = out @ value_up.swapaxes(1, 2)
        return out.swapaxes(0, 1).reshape(len(x), -1) @ layer["out"].T

    def _mlp(self, layer: dict[str, Any], x: Array) -> Array:
        if "mlp" in layer:
            return _swiglu(x, layer["mlp"])
        chosen, weights = self._route(layer, x)
        out = _swiglu(x, layer["shared"]) if "shared" in layer else np.zeros_like(x)
        for expert, matrices in enumerate(layer["experts"]):
            token, slot = np.nonzero(chosen == expert)
            out[token] += weights[token, slot, None] * _swiglu(x[token], matrices)
        return out

    def _route(self, layer: dict[str, Any], x: Array) -> tuple[Array, Array]:
        """Experts [T, k] of each token and their weights."""
        c = self.config
        raw = x @ layer["router"].T
        scores = _softmax(raw) if self.is_v2 else 1 / (1 + np.exp(-raw))
        preference = scores if self.is_v2 else scores + layer["bias"]
        groups = c.get("n_group") or 1
        if groups > 1 and c.get("topk_method") != "greedy":
            grouped = preference.reshape(len(x), groups, -1)
            best = np.sort(grouped, axis=-1)
            merit = best[..., -1] if self.is_v2 else best[..., -2:].sum(-1)
            allowed = np.zeros(merit.shape, bool)
            np.put_along_axis(allowed, _top(merit, c["topk_group"]), True, axis=-1)
            barred = 0.0 if self.is_v2 else -np.inf
            preference = np.where(allowed[..., None], grouped, barred).reshape(len(x), -1)
        chosen = _top(preference, c["num_experts_per_tok"])
        weights = np.take_along_axis(scores, chosen, axis=-1)
        if not self.is_v2 and c.get("norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdims=True)
        return chosen, weights * c.get("routed_scaling_factor", 1.0)


def _rotary(config: dict[str, Any], width: int) -> tuple[Array, float, float]:
    """Inverse frequencies [D / 2], the factor on cos and sin, the factor on the softmax scale. YaRN: arXiv 2309.00071."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = scaling.get("rope_theta") or config.get("rope_theta") or 10000.0
    pair = np.arange(width // 2)
    plain = theta ** (-2.0 * pair / width)
    if scaling.get("rope_type", scaling.get("type", "default")) != "yarn":
        return plain, 1.0, 1.0
    factor, trained = scaling["factor"], scaling["original_max_position_embeddings"]

    def pair_turning(times: float) -> float:
        """The (fractional) pair that turns `times` times over the context the model was trained on."""
        return width * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_turning(scaling.get("beta_fast") or 32)), 0)
    high = min(math.ceil(pair_turning(scaling.get("beta_slow") or 1)), width - 1)
    slowed = np.clip((pair - low) / max(high - low, 1e-3), 0.0, 1.0)
    inv_freq = plain * (1 - slowed) + plain / factor * slowed

    def magnitude(m: float) -> float:
        return 1.0 + 0.1 * m * math.log(factor) if factor > 1 else 1.0

    m, m_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    trig = scaling.get("attention_factor")
    if trig is None:
        trig = magnitude(m) / magnitude(m_all) if m and m_all else magnitude(1.0)
    return inv_freq, trig, magnitude(m_all) ** 2 if m_all else 1.0


def _turn(halves: Array, angle: Array) -> Array:
    first, second = np.split(halves, 2, axis=-1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _rms(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def _softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def _swiglu(x: Array, matrices: tuple[Array, Array, Array]) -> Array:
    gate, up, down = matrices
    g = x @ gate.T
    return (g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T


def _top(x: Array, k: int) -> Array:
    return np.argsort(-x, axis=-1, kind="stable")[..., :k]
