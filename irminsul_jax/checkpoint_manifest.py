"""The manifest of a converted checkpoint: what `irminsul.json` holds, and how it is written and read. No jax here."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from irminsul_jax.config import ModelConfig
from irminsul_jax.errors import CheckpointError

FORMAT_VERSION = 1
MANIFEST_NAME = "irminsul.json"
"""Written last, by an atomic rename: a directory without it is not a checkpoint."""
FILES_NAME = "irminsul.files.json"
"""Relative path → size in bytes of every file of the checkpoint. Apart from the manifest, because the storage layer
picks new file names on each conversion while the manifest of one model is always the same."""
STATE_NAME = "irminsul.partial.json"
"""Progress of an unfinished conversion; present only until the manifest is."""
PARAMS_NAME = "params"
ROTARY_LAYOUT = "half-split: all first halves of the rotary pairs, then all second halves"


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    name: str
    size: int
    xxh3: str
    """xxh3-128 of the content, hexadecimal."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    shape: tuple[int, ...]
    dtype: str
    xxh3: str
    """xxh3-128 of the little-endian row-major values, hexadecimal."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Describes one converted checkpoint. Contains no dates, host names or absolute paths."""

    format_version: int = FORMAT_VERSION
    tool_version: str
    model: ModelConfig
    dtype: str
    """Of all parameters but the router and its bias, which are float32."""
    rotary_layout: str = ROTARY_LAYOUT
    parameters: Mapping[str, Parameter]
    """By path in the tree, e.g. `layers/0/attention/q_nope`."""
    sources: tuple[SourceFile, ...]
    skipped: Mapping[str, str]
    """Source tensors that were not converted → why."""
    tokenizer: str | None
    chat_template: str | None
    """File that holds the chat template (`chat_template.jinja` or `tokenizer_config.json`)."""
    notes: tuple[str, ...] = ()

    @property
    def param_count(self) -> int:
        return sum(_size(p.shape) for p in self.parameters.values())

    @property
    def param_bytes(self) -> int:
        return sum(_size(p.shape) * item_size(p.dtype) for p in self.parameters.values())

    @property
    def fingerprint(self) -> str:
        """Stable identity of the weights and of how they are used: equal for two conversions of one model."""
        content = {
            "model": self.model.to_json(),
            "rotary_layout": self.rotary_layout,
            "parameters": {k: dataclasses.asdict(v) for k, v in sorted(self.parameters.items())},
        }
        return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())

    def to_json(self) -> dict[str, Any]:
        derived = {"param_count": self.param_count, "param_bytes": self.param_bytes, "fingerprint": self.fingerprint}
        return {**dataclasses.asdict(self), "model": self.model.to_json(), **derived}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        """Raises `CheckpointError` (newer format, missing field, changed content) or `ConfigError` (model part)."""
        version = data.get("format_version")
        if not isinstance(version, int) or version > FORMAT_VERSION:
            raise CheckpointError(
                f"{MANIFEST_NAME}: format_version {version!r} is newer than this library understands "
                f"({FORMAT_VERSION}); upgrade irminsul-jax or convert the model again"
            )
        try:
            result = cls(
                format_version=version,
                tool_version=data["tool_version"],
                model=ModelConfig.from_json(data["model"]),
                dtype=data["dtype"],
                rotary_layout=data["rotary_layout"],
                parameters={
                    k: Parameter(shape=tuple(v["shape"]), dtype=v["dtype"], xxh3=v["xxh3"])
                    for k, v in data["parameters"].items()
                },
                sources=tuple(SourceFile(**s) for s in data["sources"]),
                skipped=dict(data["skipped"]),
                tokenizer=data["tokenizer"],
                chat_template=data["chat_template"],
                notes=tuple(data["notes"]),
            )
        except (KeyError, TypeError, AttributeError) as e:
            raise CheckpointError(
                f"{MANIFEST_NAME}: field missing or malformed ({e}); convert the model again"
            ) from None
        if result.rotary_layout != ROTARY_LAYOUT:
            raise CheckpointError(f"{MANIFEST_NAME}: rotary_layout {result.rotary_layout!r} is not supported")
        if result.fingerprint != data.get("fingerprint"):
            raise CheckpointError(
                f"{MANIFEST_NAME}: fingerprint does not fit its content (edited by hand?); convert again"
            )
        return result


def item_size(dtype: str) -> int:
    return {"bfloat16": 2, "float32": 4}[dtype]


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def write_json_atomically(path: Path, data: Any) -> None:
    """Writes, flushes to disk and renames, so that `path` is never seen half-written."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as f:
        json.dump(data, f, indent=1, sort_keys=True)
        f.flush()
        os.fsync(f.fileno())
    temporary.replace(path)
