"""Loads and inspects converted checkpoints. jax is imported only when parameters are touched."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from irminsul_jax.checkpoint_manifest import (
    FILES_NAME,
    MANIFEST_NAME,
    PARAMS_NAME,
    STATE_NAME,
    Manifest,
)
from irminsul_jax.config import ModelConfig
from irminsul_jax.errors import CheckpointError

if TYPE_CHECKING:
    import jax
    from rich.table import Table

    from irminsul_jax.model.params import Params

ShardingRule: TypeAlias = "jax.sharding.Sharding | Callable[[str, tuple[int, ...]], jax.sharding.Sharding] | None"
"""One sharding for every parameter, a function of parameter name and shape, or None: the default device."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """A converted model on disk. The parameters are read on first use of `params`."""

    path: Path
    manifest: Manifest
    dtype: str | None = None
    """Of the loaded parameters; None for the dtype they are stored in."""
    sharding: Any = None

    @property
    def config(self) -> ModelConfig:
        return self.manifest.model

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def fingerprint(self) -> str:
        """Stable identity of the stored weights (of their values, not of the files that hold them)."""
        return self.manifest.fingerprint

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """`generation_config.json` (end-of-sequence ids, default sampling), or an empty dict."""
        path = self.path / "generation_config.json"
        return _read_json(path) if path.exists() else {}

    @cached_property
    def hf_config(self) -> dict[str, Any]:
        """The original `config.json`, for what is not part of the architecture (end-of-sequence ids, say)."""
        path = self.path / "config.json"
        return _read_json(path) if path.exists() else {}

    @property
    def tokenizer_path(self) -> Path | None:
        return self.path / self.manifest.tokenizer if self.manifest.tokenizer else None

    @cached_property
    def params(self) -> Params:
        return self.load_params(dtype=self.dtype, sharding=self.sharding)

    def load_params(self, dtype: str | None = None, sharding: Any = None) -> Params:
        """Reads the parameters: `dtype` ("bfloat16" or "float32", router always float32) and `sharding`
        (`ShardingRule`) may differ from how they were saved.

        Raises `CheckpointError` if the stored arrays cannot be read.
        """
        import jax
        import jax.numpy as jnp
        from flax.traverse_util import flatten_dict, unflatten_dict
        from orbax.checkpoint.experimental import v1 as ocp

        from irminsul_jax.model.params import param_shapes

        if dtype not in (None, "bfloat16", "float32"):
            raise CheckpointError(f"dtype {dtype!r} is not supported; choose 'bfloat16' or 'float32'")
        shapes = param_shapes(self.config, jnp.dtype(dtype or self.manifest.dtype))
        default = jax.sharding.SingleDeviceSharding(jax.devices()[0])

        def placed(name: str, leaf: Any) -> jax.ShapeDtypeStruct:
            chosen = sharding(name, leaf.shape) if callable(sharding) else sharding
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=chosen or default)

        target = {name: placed(name, leaf) for name, leaf in flatten_params(shapes).items()}
        try:
            loaded = ocp.load(str((self.path / PARAMS_NAME).absolute()), unflatten_dict(target, sep="/"))
        except (OSError, ValueError, KeyError, TypeError) as e:
            reason = str(e).split("[tensorstore_spec")[0][:300]
            raise CheckpointError(
                f"{self.path / PARAMS_NAME}: stored arrays cannot be read ({reason}…); convert the model again"
            ) from None
        return unflatten_params(shapes, flatten_dict(loaded, sep="/"))


def load_checkpoint(path: str | Path, *, dtype: str | None = None, sharding: Any = None) -> Checkpoint:
    """Opens a converted checkpoint and checks that it is complete; parameters are read on first use.

    Raises `CheckpointError` with the next step for a hub name, an unconverted or half-converted directory, a newer
    format, or a file that is missing or has another size than when it was written.
    """
    path = Path(path)
    manifest = read_manifest(path)
    _check_files(path)
    return Checkpoint(path=path, manifest=manifest, dtype=dtype, sharding=sharding)


def read_manifest(path: Path) -> Manifest:
    """Reads `irminsul.json` under `path`; never imports jax. Raises as `load_checkpoint` does."""
    path = Path(path)
    manifest_path = path / MANIFEST_NAME
    if manifest_path.exists():
        return Manifest.from_json(_read_json(manifest_path))
    if not path.is_dir():
        hint = ""
        if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
            hint = (
                f" If it is a model of the Hugging Face hub, download it (`hf download {path} --local-dir DIR`) and "
                "convert it (`irminsul convert DIR OUT`)."
            )
        raise CheckpointError(f"{path}: no such directory.{hint}")
    if (path / STATE_NAME).exists() or (path / (PARAMS_NAME + ".partial_save")).exists():
        raise CheckpointError(
            f"{path}: its conversion did not finish; run the same `irminsul convert` again to resume it"
        )
    if (path / "config.json").exists():
        raise CheckpointError(
            f"{path}: a Hugging Face checkpoint that is not converted yet; run `irminsul convert {path} OUT` and give OUT"
        )
    raise CheckpointError(f"{path}: not a checkpoint ({MANIFEST_NAME} not found)")


def inspect_checkpoint(path: str | Path) -> dict[str, Any]:
    """What `irminsul inspect` shows, as plain data (JSON-serialisable). Never imports jax and reads no weights."""
    path = Path(path)
    manifest = read_manifest(path)
    _check_files(path)
    c = manifest.model
    width = c.kv_lora_rank + c.qk_rope_head_dim
    item = {"bfloat16": 2, "float32": 4}[manifest.dtype]
    return {
        "path": str(path),
        "model_type": c.model_type,
        "family": c.family,
        "layers": c.num_layers,
        "dense_layers": c.num_dense_layers,
        "hidden_dim": c.hidden_dim,
        "heads": c.num_heads,
        "q_lora_rank": c.q_lora_rank,
        "kv_lora_rank": c.kv_lora_rank,
        "head_dims": {"nope": c.qk_nope_head_dim, "rope": c.qk_rope_head_dim, "value": c.v_head_dim},
        "experts": None if c.moe is None else c.to_json()["moe"],
        "vocab_size": c.vocab_size,
        "max_position": c.max_position,
        "params": manifest.param_count,
        "bytes": manifest.param_bytes,
        "dtype": manifest.dtype,
        "cache_bytes_per_token": c.num_layers * width * item,
        "rope": c.to_json()["rope"],
        "rotary_layout": manifest.rotary_layout,
        "shifted_reuse": c.shift_refusal is None,
        "shift_refusal": c.shift_refusal,
        "tokenizer": manifest.tokenizer,
        "chat_template": manifest.chat_template,
        "sources": [{"name": s.name, "size": s.size, "xxh3": s.xxh3} for s in manifest.sources],
        "skipped": dict(manifest.skipped),
        "notes": list(manifest.notes),
        "fingerprint": manifest.fingerprint,
        "format_version": manifest.format_version,
        "tool_version": manifest.tool_version,
    }


def inspect_table(info: Mapping[str, Any]) -> Table:
    """Renders the result of `inspect_checkpoint` as a rich table."""
    from rich.table import Table

    heads, rope, moe = info["head_dims"], info["rope"], info["experts"]
    kind = "plain" if rope["kind"] == "default" else f"YaRN ×{rope['factor']:g} of {rope['original_max_position']:,}"
    rows = {
        "model type": info["model_type"]
        if info["model_type"] == info["family"]
        else f"{info['model_type']} (runs as {info['family']})",
        "layers": f"{info['layers']} ({info['dense_layers']} dense)",
        "hidden / heads": f"{info['hidden_dim']} / {info['heads']}",
        "ranks": f"query {info['q_lora_rank'] or 'full'}, latent {info['kv_lora_rank']}",
        "head dims": f"{heads['nope']} + {heads['rope']} rotary, value {heads['value']}",
        "experts": "none"
        if moe is None
        else f"{moe['num_experts']}, {moe['experts_per_token']} per token, "
        f"{moe['num_shared_experts']} shared, {moe['router']}",
        "vocabulary": f"{info['vocab_size']:,}",
        "parameters": f"{info['params']:,}",
        "size": f"{_binary(info['bytes'])} {info['dtype']}",
        "cache per token": f"{info['cache_bytes_per_token']:,} bytes ({info['dtype']}, all layers)",
        "positions": f"{info['max_position']:,}",
        "rotary": f"θ {rope['theta']:g}, {kind}" + ("" if rope["declared"] else " (assumed, not declared)"),
        "shifted reuse": "allowed" if info["shifted_reuse"] else f"refused: {info['shift_refusal']}",
        "tokenizer": info["tokenizer"] or "none",
        "chat template": info["chat_template"] or "none",
        "sources": f"{len(info['sources'])} files, {_binary(sum(s['size'] for s in info['sources']))}",
        "skipped": _skipped_summary(info["skipped"]),
        "fingerprint": info["fingerprint"],
    }
    table = Table(title=info["path"], show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    for note in info["notes"]:
        table.add_row("note", note)
    return table


def flatten_params(params: Params) -> dict[str, Any]:
    """Leaves by path, e.g. `layers/0/attention/q_nope`; absent (None) parameters are left out."""
    from flax.serialization import to_state_dict
    from flax.traverse_util import flatten_dict

    return {k: v for k, v in flatten_dict(to_state_dict(params), sep="/").items() if v is not None}


def unflatten_params(like: Params, leaves: Mapping[str, Any]) -> Params:
    """Inverse of `flatten_params`, with the structure of `like`."""
    from flax.serialization import from_state_dict, to_state_dict
    from flax.traverse_util import flatten_dict, unflatten_dict

    names = flatten_dict(to_state_dict(like), sep="/")
    tree: Any = from_state_dict(like, unflatten_dict({k: leaves.get(k) for k in names}, sep="/"))
    return tree


def _check_files(path: Path) -> None:
    files_path = path / FILES_NAME
    if not files_path.exists():
        raise CheckpointError(f"{files_path}: file not found; the checkpoint was copied incompletely, copy it again")
    for name, size in _read_json(files_path).items():
        try:
            actual = (path / name).stat().st_size
        except OSError:
            raise CheckpointError(
                f"{path / name}: file not found; copy the checkpoint again or convert again"
            ) from None
        if actual != size:
            raise CheckpointError(
                f"{path / name}: {actual} bytes, but it was written with {size}; copy the checkpoint again or convert again"
            )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{path}: not readable as JSON: {e}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return data


def _binary(size: int) -> str:
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit}"


def _skipped_summary(skipped: Mapping[str, str]) -> str:
    if not skipped:
        return "none"
    reasons: dict[str, list[str]] = {}
    for name, reason in skipped.items():
        reasons.setdefault(reason, []).append(name)
    return "; ".join(f"{len(names)}× {reason} ({names[0]}, …)" for reason, names in reasons.items())
