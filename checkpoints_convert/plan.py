"""What a conversion would do, worked out from the headers alone: the mapping table, its checks, bytes and memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import ml_dtypes
import numpy as np

from checkpoints_convert import deepseek_v2, deepseek_v3
from checkpoints_convert.mapping import Piece, Rules, top_rules
from checkpoints_convert.source import FP8_BLOCK, SCALE_SUFFIX, SourceCheckpoint, open_source
from irminsul_jax.checkpoint import flatten_params
from irminsul_jax.checkpoint_manifest import item_size
from irminsul_jax.config import ModelConfig
from irminsul_jax.errors import ConfigError, ConversionError
from irminsul_jax.model.params import param_shapes

Dtype = Literal["bfloat16", "float32"]

_FAMILY_TABLES: dict[str, ModuleType] = {"deepseek_v2": deepseek_v2, "deepseek_v3": deepseek_v3}

PART_BYTES = 128 << 20
"""Parameters of one layer are written together up to this size; a larger one is written alone."""
CHUNK_BYTES = 64 << 20
_CHUNKED_ABOVE = 256 << 20
_PROCESS_BYTES = 320 << 20
"""Interpreter, libraries and read buffers (measured: tests/convert/test_memory.py holds the sum to it)."""
_MAX_NAMED = 40


@dataclass(frozen=True, kw_only=True)
class PlannedParameter:
    name: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * item_size(self.dtype)

    @property
    def source_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(p.source for p in self.pieces))


@dataclass(frozen=True, kw_only=True)
class Part:
    """Parameters that are held in memory and written together: a layer, or a share of a large one; named by its first."""

    name: str
    parameters: tuple[PlannedParameter, ...]

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.parameters)

    @property
    def chunked(self) -> bool:
        """Whether it is stored in chunks of `CHUNK_BYTES`: large stacks of experts, which are loaded in shards."""
        return self.nbytes > _CHUNKED_ABOVE and self.parameters[0].pieces[0].expert is not None

    @property
    def peak_bytes(self) -> int:
        """Host memory while it is written: the storage layer copies it once; in chunks it was seen to hold up to two
        more copies in flight (`benchmarks/converter.py`)."""
        return self.nbytes * (4 if self.chunked else 2)


@dataclass(frozen=True, kw_only=True)
class ConversionPlan:
    """Everything a dry run can say. `bytes_to_write` are the bytes of the parameters, which are stored uncompressed."""

    source: SourceCheckpoint
    config: ModelConfig
    dtype: Dtype
    parts: tuple[Part, ...]
    skipped: dict[str, str]
    """Source tensors that are left out → why."""

    @property
    def parameters(self) -> tuple[PlannedParameter, ...]:
        return tuple(p for part in self.parts for p in part.parameters)

    @property
    def bytes_to_write(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def param_count(self) -> int:
        return sum(math.prod(p.shape) for p in self.parameters)

    @property
    def peak_host_bytes(self) -> int:
        """Upper estimate: the process and the most demanding part."""
        return _PROCESS_BYTES + max(part.peak_bytes for part in self.parts)

    def to_json(self) -> dict[str, Any]:
        """The mapping table and the totals as plain data, one entry per parameter."""
        return {
            "source": str(self.source.path),
            "model": self.config.to_json(),
            "dtype": self.dtype,
            "parameters": [
                {
                    "name": p.name,
                    "shape": list(p.shape),
                    "dtype": p.dtype,
                    "bytes": p.nbytes,
                    "sources": list(p.source_names),
                    "source_shape": list(p.pieces[0].source_shape),
                }
                for p in self.parameters
            ],
            "skipped": self.skipped,
            "param_count": self.param_count,
            "bytes_to_write": self.bytes_to_write,
            "peak_host_bytes": self.peak_host_bytes,
            "shift_refusal": self.config.shift_refusal,
        }


def plan_conversion(source: Path, *, dtype: Dtype | None = None) -> ConversionPlan:
    """Reads config.json and the shard headers under `source`; writes nothing and reads no weights.

    `dtype` None keeps the source's: bfloat16 stays (and stands for fp8), float16 becomes float32, which loses nothing.
    Raises `ConversionError` naming every tensor that is unknown, missing or misshapen; `ConfigError` and
    `UnsupportedModelError` for a config.json that does not describe a model we run.
    """
    source = Path(source)
    if dtype not in (None, "bfloat16", "float32"):
        raise ConversionError(f"dtype {dtype!r} is not supported; choose 'bfloat16' or 'float32', or leave it out")
    checkpoint = open_source(source)
    try:
        config = ModelConfig.from_hf(checkpoint.config)
    except ConfigError as e:
        raise type(e)(f"{source}: {e}") from None
    rules = _rules(config)
    skipped = _skipped(checkpoint, config)
    _check(checkpoint, rules, skipped)
    resolved: Dtype = dtype or _source_dtype(checkpoint)
    return ConversionPlan(
        source=checkpoint,
        config=config,
        dtype=resolved,
        parts=_parts(config, rules, resolved),
        skipped=dict(sorted(skipped.items())),
    )


def _rules(config: ModelConfig) -> Rules:
    table = _FAMILY_TABLES[config.family]
    layers = {
        f"layers/{i}/{name}": pieces
        for i in range(config.num_layers)
        for name, pieces in table.layer_rules(config, i).items()
    }
    return {**top_rules(config), **layers}


def _skipped(checkpoint: SourceCheckpoint, config: ModelConfig) -> dict[str, str]:
    skipped: dict[str, str] = {}
    for name in [*checkpoint.tensors, *checkpoint.outside_index]:
        parts = name.split(".")
        layer = int(parts[2]) if parts[:2] == ["model", "layers"] and len(parts) > 2 and parts[2].isdecimal() else -1
        if layer >= config.num_layers or "mtp" in parts:
            skipped[name] = "multi-token-prediction layer"
        elif name.endswith("rotary_emb.inv_freq"):
            skipped[name] = "rotary frequencies are computed from config.json"
        elif name == "lm_head.weight" and config.tie_embeddings:
            skipped[name] = "tied to the embedding"
        elif name in checkpoint.outside_index:
            skipped[name] = f"in {checkpoint.outside_index[name]}, which the index does not mention"
    return skipped


def _check(checkpoint: SourceCheckpoint, rules: Rules, skipped: dict[str, str]) -> None:
    expected = {p.source: p.source_shape for pieces in rules.values() for p in pieces}
    tensors = checkpoint.tensors
    problems = [f"missing: {name} {list(shape)}" for name, shape in expected.items() if name not in tensors]
    scales = set()
    for name, shape in expected.items():
        tensor = tensors.get(name)
        if tensor is None:
            continue
        if tensor.shape != shape:
            problems.append(f"misshapen: {name} is {list(tensor.shape)}, config.json implies {list(shape)}")
        if not tensor.readable:
            problems.append(f"unreadable: {name} has dtype {tensor.dtype}")
        if tensor.dtype == "F8_E4M3":
            scale = tensors.get(name + SCALE_SUFFIX)
            blocks = tuple(math.ceil(n / FP8_BLOCK) for n in shape)
            if len(shape) != 2 or scale is None:
                problems.append(f"missing: {name + SCALE_SUFFIX} {list(blocks)} (block scales of an fp8 tensor)")
            elif scale.shape != blocks or not scale.readable:
                problems.append(
                    f"misshapen: {scale.name} is {list(scale.shape)} {scale.dtype}, expected {list(blocks)} for "
                    f"{FP8_BLOCK}×{FP8_BLOCK} blocks"
                )
            scales.add(name + SCALE_SUFFIX)
    problems += [f"unknown: {name}" for name in tensors if name not in expected.keys() | scales | skipped.keys()]
    if problems:
        listed = "\n  ".join(problems)
        raise ConversionError(
            f"{checkpoint.path}: {len(problems)} tensors do not fit config.json:\n  {listed}\n"
            "Check that config.json and the weight files belong to the same model and are complete."
        )


def _source_dtype(checkpoint: SourceCheckpoint) -> Dtype:
    narrow = checkpoint.tensors["model.embed_tokens.weight"].dtype in ("BF16", "F8_E4M3")
    return "bfloat16" if narrow else "float32"


def _parts(config: ModelConfig, rules: Rules, dtype: Dtype) -> tuple[Part, ...]:
    shapes = flatten_params(param_shapes(config, numpy_dtype(dtype)))
    if rules.keys() != shapes.keys():
        difference = ", ".join(sorted(rules.keys() ^ shapes.keys())[:_MAX_NAMED])
        raise ConversionError(f"mapping table of {config.family} and parameter tree differ in: {difference}")
    parts: list[Part] = []
    group: list[PlannedParameter] = []
    unit = ""

    def close() -> None:
        if group:
            parts.append(Part(name=group[0].name, parameters=tuple(group)))
            group.clear()

    for name, pieces in rules.items():
        shape = shapes[name]
        parameter = PlannedParameter(name=name, shape=tuple(shape.shape), dtype=str(shape.dtype), pieces=pieces)
        this_unit = "/".join(name.split("/")[:2]) if name.startswith("layers/") else "outside the layers"
        if this_unit != unit or sum(p.nbytes for p in group) + parameter.nbytes > PART_BYTES:
            close()
        group.append(parameter)
        unit = this_unit
    close()
    return tuple(parts)


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    return np.dtype({"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}[dtype])
