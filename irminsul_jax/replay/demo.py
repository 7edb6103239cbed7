"""The built-in default: a small random-weight checkpoint of the DeepSeek-V3 kind, made once in the cache directory from
the packaged trace, with a real tokenizer and through the real converter."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import xxhash
from rich.console import Console
from safetensors.numpy import save_file

from irminsul_jax import __version__
from irminsul_jax.checkpoint import load_checkpoint
from irminsul_jax.engine.options import cache_directory
from irminsul_jax.errors import CheckpointError
from irminsul_jax.replay.trace import read_traces

DEMO_TRACE = Path(__file__).parent / "demo_data" / "tau_bench_airline_excerpt.jsonl.xz"

DEMO_SERVING: dict[str, Any] = {"max_num_seqs": 1, "prefill_chunk": 128}
"""One request at a time, so that its time to first token is its own prefill; small chunks, as compiling is most of a
first run."""

_SPECIAL = ["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
_VOCAB = 1664
_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "float32",
    "vocab_size": _VOCAB,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "intermediate_size": 256,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.0,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def demo_path() -> Path:
    """Where the demo checkpoint of this version and recipe belongs, whether it is there or not."""
    recipe = json.dumps([_CONFIG, _TEMPLATE, _SPECIAL]).encode() + DEMO_TRACE.read_bytes()
    return cache_directory() / f"demo-{__version__}-{xxhash.xxh3_64_hexdigest(recipe)}"


def demo_checkpoint(progress: Console) -> Path:
    """The converted demo checkpoint; made if it is not there, made again if it is damaged.

    It is built beside its place and moved there when complete, so an interrupted run leaves nothing that could be taken
    for it, and of two first runs at the same time each builds its own and the first one stays. Raises `CheckpointError` if
    the cache directory cannot be written.
    """
    out = demo_path()
    if _is_usable(out):
        return out
    progress.print(
        f"making the demo model in {out}\n(its weights are random: what is reused and how long it takes is real, its text "
        "is noise)",
        highlight=False,
        soft_wrap=True,
    )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
            _build(Path(scratch))
            if not _is_usable(out):
                shutil.rmtree(out, ignore_errors=True)
                with contextlib.suppress(OSError):  # another run was faster
                    (Path(scratch) / "checkpoint").rename(out)
    except OSError as error:
        raise CheckpointError(
            f"{out}: cannot be written ({error.strerror or error}); set IRMINSUL_CACHE to a directory that can be"
        ) from None
    load_checkpoint(out)
    return out


def _is_usable(path: Path) -> bool:
    try:
        load_checkpoint(path)
    except CheckpointError:
        return False
    return True


def _build(scratch: Path) -> None:
    from checkpoints_convert import convert

    source = scratch / "hf"
    source.mkdir()
    _write_tokenizer(source)
    _write_weights(source)
    (source / "config.json").write_text(json.dumps(_CONFIG, indent=1))
    convert(source, scratch / "checkpoint")


def _write_tokenizer(folder: Path) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=_VOCAB,
        special_tokens=_SPECIAL,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = dict.fromkeys(
        segment.text for request in read_traces([DEMO_TRACE]).requests for segment in request.segments
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": _SPECIAL[0],
        "eos_token": _SPECIAL[1],
        "add_bos_token": False,
        "chat_template": _TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def _write_weights(folder: Path) -> None:
    draw = np.random.default_rng(0)
    tensors = {
        name: np.ones(shape, np.float32)
        if "norm" in name
        else (draw.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        for name, shape in tensor_shapes(_CONFIG).items()
    }
    names = sorted(tensors)
    shards = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: file for file, members in shards.items() for name in members},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors that a DeepSeek-V3 checkpoint with this config.json has on the hub."""
    c = config
    hidden, heads, rank, rotary = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"], c["qk_rope_head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (c["vocab_size"], hidden),
    }

    def feed_forward(base: str, width: int) -> None:
        shapes[f"{base}.gate_proj.weight"] = shapes[f"{base}.up_proj.weight"] = (width, hidden)
        shapes[f"{base}.down_proj.weight"] = (hidden, width)

    for layer in range(c["num_hidden_layers"]):
        base = f"model.layers.{layer}"
        shapes |= {
            f"{base}.input_layernorm.weight": (hidden,),
            f"{base}.post_attention_layernorm.weight": (hidden,),
            f"{base}.self_attn.q_a_proj.weight": (c["q_lora_rank"], hidden),
            f"{base}.self_attn.q_a_layernorm.weight": (c["q_lora_rank"],),
            f"{base}.self_attn.q_b_proj.weight": (heads * (c["qk_nope_head_dim"] + rotary), c["q_lora_rank"]),
            f"{base}.self_attn.kv_a_proj_with_mqa.weight": (rank + rotary, hidden),
            f"{base}.self_attn.kv_a_layernorm.weight": (rank,),
            f"{base}.self_attn.kv_b_proj.weight": (heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), rank),
            f"{base}.self_attn.o_proj.weight": (hidden, heads * c["v_head_dim"]),
        }
        if layer < c["first_k_dense_replace"]:
            feed_forward(f"{base}.mlp", c["intermediate_size"])
            continue
        shapes[f"{base}.mlp.gate.weight"] = (c["n_routed_experts"], hidden)
        shapes[f"{base}.mlp.gate.e_score_correction_bias"] = (c["n_routed_experts"],)
        for expert in range(c["n_routed_experts"]):
            feed_forward(f"{base}.mlp.experts.{expert}", c["moe_intermediate_size"])
        feed_forward(f"{base}.mlp.shared_experts", c["n_shared_experts"] * c["moe_intermediate_size"])
    return shapes
