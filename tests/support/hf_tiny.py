"""Eight tiny Hugging Face checkpoints with the outputs of transformers for them, rebuilt from `tests/data/hf_tiny`.

The families share most tensors, so the data holds every distinct tensor once: one pool per dtype, split into byte planes
(only the sign/exponent plane of a random float compresses). Tensors of the skipped multi-token-prediction layer are not
kept: they are random numbers of the right shape.
"""

from __future__ import annotations

import functools
import json
import lzma
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parent.parent / "data" / "hf_tiny"

FAMILIES = (
    "deepseek_v2",
    "deepseek_v2_lite",
    "deepseek_v3",
    "deepseek_v3_fp8",
    "deepseek_v3_mtp",
    "kimi_k2",
    "moonlight",
    "joyai_llm_flash",
)

_ITEM_SIZE = {"F32": 4, "BF16": 2, "F8_E4M3": 1}


@functools.cache
def _pool(dtype: str) -> bytes:
    planes = [lzma.decompress((DATA / f"pool_{dtype.lower()}_{i}.xz").read_bytes()) for i in range(_ITEM_SIZE[dtype])]
    return np.stack([np.frombuffer(p, np.uint8) for p in planes], axis=1).tobytes()


@functools.cache
def _table() -> dict[str, list[Any]]:
    return json.loads((DATA / "tensors.json").read_text())


def _tensor_bytes(name: str, dtype: str, shape: list[int], key: str | None) -> bytes:
    if key is None:
        seed = np.frombuffer(name.encode(), np.uint8)
        count = math.prod(shape)
        return np.random.default_rng(seed).standard_normal(count, np.float32).tobytes()
    pool_dtype, offset, size = _table()[key]
    return _pool(pool_dtype)[offset : offset + size]


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    """Writes a safetensors file byte by byte: independent of the library that the converter reads with."""
    header, blobs, offset = {}, [], 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
        blobs.append(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def hf_tiny_dir(name: str, tmp: Path) -> Path:
    """Builds the Hugging Face directory of one family under `tmp` and returns it (built once per `tmp`)."""
    out = Path(tmp) / name
    if (out / "config.json").exists():
        return out
    spec = json.loads((DATA / f"{name}.json").read_text())
    out.mkdir(parents=True)
    weight_map, total = {}, 0
    for shard, tensors in spec["shards"].items():
        blobs = {k: (d, s, _tensor_bytes(k, d, s, key)) for k, (d, s, key) in tensors.items()}
        write_safetensors(out / shard, blobs)
        weight_map |= dict.fromkeys(tensors, shard)
        total += sum(len(b) for _, _, b in blobs.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    if spec["generation_config"] is not None:
        (out / "generation_config.json").write_text(json.dumps(spec["generation_config"], indent=1))
    (out / "config.json").write_text(json.dumps(spec["config"], indent=1))
    return out


def hf_reference(name: str) -> dict[str, np.ndarray]:
    """What transformers computes for this family (float32, eager; for fp8: with the weights dequantised).

    `input_ids [1, 64]`, `logits [1, 64, 256]`, `generated_ids [1, 16]` (greedy continuation); for most families also
    `logits_shift1000` (same tokens at positions + 1000) and per layer i `cache_{i}_keys [1, 1, 64, R]` (normed latent)
    and `cache_{i}_values [1, 1, 64, D]` (rotary key, rotated; half-split for the V3 families as in our cache, interleaved
    pairs for the V2 families).
    """
    prefix = f"{name}/"
    with np.load(DATA / "reference.npz") as arrays:
        return {k.removeprefix(prefix): arrays[k] for k in arrays.files if k.startswith(prefix)}
