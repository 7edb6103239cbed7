"""Reads a Hugging Face directory: where each tensor lies, and rows of it as float32. Nothing here knows a model.

Rows are read with plain file reads, not through a memory map: the pages of a map count as resident memory, and a
conversion has to stay inside one layer's worth of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from irminsul_jax.errors import ConversionError

_DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
SCALE_SUFFIX = "_scale_inv"
FP8_BLOCK = 128
_BLOCK_VALUES = 4 << 20
_MAX_HEADER = 256 << 20


@dataclass(frozen=True, kw_only=True)
class SourceTensor:
    """One tensor of a shard. `dtype` is the safetensors name, e.g. `BF16`."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Of the first byte in the file."""

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return _DTYPES[self.dtype]

    @property
    def readable(self) -> bool:
        return self.dtype in _DTYPES

    def row_blocks(self, scale: SourceTensor | None = None) -> Iterator[tuple[int, np.ndarray]]:
        """Yields (first row, rows as float32) of a vector or matrix, about 4 Mi values at a time; `scale` holds the inverse
        scales of 128×128 blocks, the last ones possibly smaller (DeepSeek-V3 README_WEIGHTS)."""
        columns = self.shape[1:]
        row_bytes = math.prod(columns) * self.numpy_dtype.itemsize
        step = max(1, _BLOCK_VALUES // max(1, math.prod(columns)))
        factors = None if scale is None else next(iter(scale.row_blocks()))[1]
        with self.file.open("rb") as f:
            f.seek(self.offset)
            for first in range(0, self.shape[0], step):
                count = min(step, self.shape[0] - first)
                data = f.read(count * row_bytes)
                rows = np.frombuffer(data, self.numpy_dtype).reshape(count, *columns).astype(np.float32)
                if factors is not None:
                    block_row = np.arange(first, first + count) // FP8_BLOCK
                    rows *= np.repeat(factors, FP8_BLOCK, axis=1)[block_row, : self.shape[1]]
                yield first, rows


@dataclass(frozen=True, kw_only=True)
class SourceCheckpoint:
    path: Path
    config: dict[str, Any]
    tensors: dict[str, SourceTensor]
    outside_index: dict[str, str]
    """Tensors of shards that the index does not mention → file name."""
    files: tuple[Path, ...]
    """Every safetensors file."""

    def scale_of(self, tensor: SourceTensor) -> SourceTensor | None:
        return self.tensors.get(tensor.name + SCALE_SUFFIX) if tensor.dtype == "F8_E4M3" else None


def read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConversionError(f"{path}: file not found") from None
    except (OSError, ValueError) as e:
        raise ConversionError(f"{path}: not readable as JSON: {e}") from None
    if not isinstance(data, dict):
        raise ConversionError(f"{path}: expected a JSON object")
    return data


def open_source(path: Path) -> SourceCheckpoint:
    """Reads config.json, the index (if there is one) and the headers of all shards; no weights."""
    if not path.is_dir():
        raise ConversionError(
            f"{path}: not a directory. Download the model first (`hf download ORG/NAME --local-dir DIR`) and give DIR"
        )
    config = read_json(path / "config.json")
    files = tuple(sorted(path.glob("*.safetensors")))
    if not files:
        raise ConversionError(f"{path}: no *.safetensors file (other weight formats are not read)")
    index_path = path / "model.safetensors.index.json"
    weight_map = read_json(index_path).get("weight_map") if index_path.exists() else None
    if index_path.exists() and not isinstance(weight_map, dict):
        raise ConversionError(f"{index_path}: no 'weight_map'")
    if weight_map and (absent := sorted(set(weight_map.values()) - {f.name for f in files})):
        raise ConversionError(
            f"{path}: shards named by the index are missing: {', '.join(absent)}; download them again"
        )
    tensors: dict[str, SourceTensor] = {}
    outside: dict[str, str] = {}
    for file in files:
        for tensor in _read_header(file):
            if weight_map is not None and weight_map.get(tensor.name) != file.name:
                outside[tensor.name] = file.name
            elif tensor.name in tensors:
                raise ConversionError(
                    f"{path}: tensor {tensor.name} is in {tensors[tensor.name].file.name} and in {file.name}, and no "
                    "model.safetensors.index.json says which one counts; remove the file that does not belong"
                )
            else:
                tensors[tensor.name] = tensor
    if weight_map and (absent := sorted(weight_map.keys() - tensors.keys())):
        raise ConversionError(f"{path}: tensors named by the index are not in their shards: {', '.join(absent)}")
    return SourceCheckpoint(
        path=path,
        config=config,
        tensors=tensors,
        outside_index={k: v for k, v in outside.items() if k not in tensors},
        files=files,
    )


def _read_header(file: Path) -> list[SourceTensor]:
    size = file.stat().st_size
    try:
        with file.open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER, size - 8):
                raise ValueError(f"header of {length} bytes in a file of {size} bytes")
            header = json.loads(f.read(length))
        header.pop("__metadata__", None)
        result = []
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            shape = tuple(int(n) for n in entry["shape"])
            tensor = SourceTensor(name=name, file=file, dtype=entry["dtype"], shape=shape, offset=8 + length + begin)
            if 8 + length + end > size:
                raise ValueError(f"tensor {name} ends at byte {8 + length + end} of {size}")
            if tensor.readable and end - begin != math.prod(shape) * tensor.numpy_dtype.itemsize:
                raise ValueError(f"tensor {name} has {end - begin} bytes for shape {shape} {tensor.dtype}")
            result.append(tensor)
        return result
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise ConversionError(f"{file}: damaged or incomplete safetensors file ({e}); download it again") from None
