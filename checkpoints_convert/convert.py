"""Carries a conversion out: part by part into the storage layer, then the small files, then the manifest.

State machine of OUT: (empty) → progress file and `params.partial_save` → `params` → manifest. Each step is atomic, and
only the last makes the directory loadable. A conversion that is started again keeps the parts that the progress file
records and redoes the one that was being written.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

import irminsul_jax
from checkpoints_convert.mapping import fill
from checkpoints_convert.plan import CHUNK_BYTES, ConversionPlan, Dtype, Part, numpy_dtype, plan_conversion
from irminsul_jax.checkpoint_manifest import (
    FILES_NAME,
    FORMAT_VERSION,
    MANIFEST_NAME,
    PARAMS_NAME,
    STATE_NAME,
    Manifest,
    Parameter,
    SourceFile,
    write_json_atomically,
)
from irminsul_jax.errors import ConversionError

Progress = Callable[[int, int, str], None]
"""(bytes done, bytes in all, what is being worked on)."""

_PARTIAL_NAME = PARAMS_NAME + ".partial_save"  # where the storage layer collects a partial save
_COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "LICENSE*",
)
_MODEL_CARD = "MODEL_CARD.md"
_HASH_BYTES = 4 << 20
_SPARE_DISK = 64 << 20


def convert(
    source: Path,
    out: Path,
    *,
    dtype: Dtype | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    free_bytes: Callable[[Path], int] | None = None,
) -> Manifest:
    """Converts the Hugging Face directory `source` into a checkpoint at `out` and returns its manifest.

    Host memory stays below `plan_conversion(source).peak_host_bytes`. An interrupted conversion is resumed by the same
    call. `overwrite` allows replacing a complete checkpoint at `out`; the old one is removed first, so that the disk
    never has to hold both. `free_bytes` tells the free disk space at a path (default: ask the operating system). Code
    in the source directory is never executed.

    Raises `ConversionError` (source, destination or disk), `ConfigError`, `UnsupportedModelError`.
    """
    source, out = Path(source), Path(out)
    plan = plan_conversion(source, dtype=dtype)
    _check_destination(source, out, overwrite)
    job = _Job(plan=plan, out=out, progress=progress or (lambda done, total, label: None))
    try:
        job.prepare(free_bytes or (lambda path: shutil.disk_usage(path).free))
        job.write_params()
        job.finalize_params()
        return job.finish()
    except OSError as e:
        raise ConversionError(f"{out}: writing failed ({e}); free space or fix permissions, then run it again") from e


def _check_destination(source: Path, out: Path, overwrite: bool) -> None:
    if out.resolve() == source.resolve():
        raise ConversionError(f"{out}: source and destination are the same directory")
    if not out.exists():
        return
    if not out.is_dir():
        raise ConversionError(f"{out}: exists and is not a directory")
    if (out / MANIFEST_NAME).exists():
        if not overwrite:
            raise ConversionError(
                f"{out}: already holds a complete checkpoint; choose another directory or overwrite it"
            )
        (out / MANIFEST_NAME).unlink()
        _discard(out)
    elif not (out / STATE_NAME).exists() and any(out.iterdir()):
        raise ConversionError(f"{out}: not empty and not an unfinished conversion; choose another directory")


def _discard(out: Path) -> None:
    for directory in (PARAMS_NAME, _PARTIAL_NAME):
        shutil.rmtree(out / directory, ignore_errors=True)
    for leftover in out.glob(f"{PARAMS_NAME}*orbax-checkpoint-tmp*"):
        shutil.rmtree(leftover)
    (out / STATE_NAME).unlink(missing_ok=True)


@dataclasses.dataclass
class _Job:
    """One conversion under way. `state` is what the progress file holds."""

    plan: ConversionPlan
    out: Path
    progress: Progress
    state: dict[str, Any] = dataclasses.field(default_factory=dict)
    done_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.plan.bytes_to_write + sum(f.stat().st_size for f in self.plan.source.files)

    @property
    def partial(self) -> Path:
        return self.out / _PARTIAL_NAME

    def advance(self, count: int, label: str) -> None:
        self.done_bytes += count
        self.progress(self.done_bytes, self.total_bytes, label)

    def prepare(self, free_bytes: Callable[[Path], int]) -> None:
        """Takes up an earlier conversion if it was the same one, else starts afresh; then checks the disk."""
        identity = self._identity()
        self.state = self._earlier_state()
        interrupted_merge = self.state.get("finalizing") and not (self.out / PARAMS_NAME).exists()
        if self.state.get("identity") != identity or interrupted_merge:
            _discard(self.out)
            self.state = {"identity": identity, "parts": {}, "hashes": {}, "finalizing": False}
        else:
            self._keep_recorded_parts()
        existing = next(p for p in (self.out, *self.out.absolute().parents) if p.exists())
        missing = sum(p.nbytes for p in self.plan.parts if p.name not in self.state["parts"])
        needed = missing + missing // 50 + _SPARE_DISK
        if (free := free_bytes(existing)) < needed:
            raise ConversionError(
                f"{existing}: {needed / 2**30:.2f} GiB of free disk are needed, there are {free / 2**30:.2f} GiB; free "
                "some or choose another directory"
            )
        self.out.mkdir(parents=True, exist_ok=True)
        self._save_state()

    def write_params(self) -> None:
        for part in self.plan.parts:
            if part.name in self.state["parts"]:
                self.advance(part.nbytes, part.name)
                continue
            before = self._pending()
            recorded = self._write_part(part)
            (directory,) = self._pending() - before
            size = _tree_size(self.partial / directory)
            self.state["parts"][part.name] = {"directory": directory, "size": size, "parameters": recorded}
            self._save_state()

    def finalize_params(self) -> None:
        from orbax.checkpoint.experimental import v1 as ocp

        if (self.out / PARAMS_NAME).exists():
            return
        self.state["finalizing"] = True
        self._save_state()
        ocp.partial.finalize(str((self.out / PARAMS_NAME).absolute()))

    def finish(self) -> Manifest:
        sources = tuple(self._hashed(f) for f in self.plan.source.files)
        copied = self._copy_small_files()
        manifest = Manifest(
            tool_version=irminsul_jax.__version__,
            model=self.plan.config,
            dtype=self.plan.dtype,
            parameters={
                name: Parameter(shape=tuple(p["shape"]), dtype=p["dtype"], xxh3=p["xxh3"])
                for part in self.plan.parts
                for name, p in self.state["parts"][part.name]["parameters"].items()
            },
            sources=sources,
            skipped=self.plan.skipped,
            tokenizer="tokenizer.json" if "tokenizer.json" in copied else None,
            chat_template=_chat_template(self.out, copied),
            notes=_notes(self.plan, copied),
        )
        weights = [str(f.relative_to(self.out)) for f in (self.out / PARAMS_NAME).rglob("*") if f.is_file()]
        write_json_atomically(self.out / FILES_NAME, {n: (self.out / n).stat().st_size for n in [*copied, *weights]})
        write_json_atomically(self.out / MANIFEST_NAME, manifest.to_json())
        (self.out / STATE_NAME).unlink()
        return manifest

    def _identity(self) -> str:
        """Changes when resuming would mix two conversions: other source files, configuration, dtype or format."""
        files = [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in self.plan.source.files]
        parts = [[p.name, p.nbytes] for p in self.plan.parts]
        content = [FORMAT_VERSION, irminsul_jax.__version__, files, self.plan.config.to_json(), self.plan.dtype, parts]
        return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())

    def _earlier_state(self) -> dict[str, Any]:
        try:
            state = json.loads((self.out / STATE_NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return state if isinstance(state, dict) else {}

    def _keep_recorded_parts(self) -> None:
        if (self.out / PARAMS_NAME).exists():
            return
        parts = self.state["parts"]
        for name, part in list(parts.items()):
            if _tree_size(self.partial / part["directory"]) != part["size"]:
                del parts[name]
        recorded = {part["directory"] for part in parts.values()}
        if self.partial.exists():
            for entry in self.partial.iterdir():
                if entry.name not in recorded:
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def _pending(self) -> set[str]:
        return {p.name for p in self.partial.iterdir()} if self.partial.exists() else set()

    def _save_state(self) -> None:
        write_json_atomically(self.out / STATE_NAME, self.state)

    def _write_part(self, part: Part) -> dict[str, Any]:
        from flax.traverse_util import unflatten_dict
        from orbax.checkpoint.experimental import v1 as ocp

        arrays: dict[str, np.ndarray] = {}
        recorded = {}
        for p in part.parameters:
            array = np.empty(p.shape, numpy_dtype(p.dtype))
            for count in fill(array, p.pieces, self.plan.source):
                self.advance(count, p.name)
            arrays[p.name] = array
            digest = xxhash.xxh3_128_hexdigest(array.reshape(-1).view(np.uint8).data)
            recorded[p.name] = {"shape": list(p.shape), "dtype": p.dtype, "xxh3": digest}
        context = ocp.Context()
        # Stored plain: random mantissas do not compress, and what a dry run announces is what is written.
        context.array.saving.use_compression = False
        context.array.saving.storage_options.chunk_byte_size = CHUNK_BYTES if part.chunked else None
        with context:
            ocp.partial.save(str((self.out / PARAMS_NAME).absolute()), unflatten_dict(arrays, sep="/"))
        del arrays, array
        gc.collect()  # the storage layer leaves its copies in reference cycles
        return recorded

    def _hashed(self, file: Path) -> SourceFile:
        known = self.state["hashes"]
        if file.name not in known:
            digest = xxhash.xxh3_128()
            with file.open("rb") as f:
                while block := f.read(_HASH_BYTES):
                    digest.update(block)
                    self.advance(len(block), f"hashing {file.name}")
            known[file.name] = digest.hexdigest()
            self._save_state()
        else:
            self.advance(file.stat().st_size, f"hashing {file.name}")
        return SourceFile(name=file.name, size=file.stat().st_size, xxh3=known[file.name])

    def _copy_small_files(self) -> list[str]:
        copied = []
        for pattern in _COPIED:
            for file in sorted(self.plan.source.path.glob(pattern)):
                if file.is_file():
                    shutil.copyfile(file, self.out / file.name)
                    copied.append(file.name)
        card = self.plan.source.path / "README.md"
        if card.is_file():
            shutil.copyfile(card, self.out / _MODEL_CARD)
            copied.append(_MODEL_CARD)
        return copied


def _tree_size(directory: Path) -> int:
    return sum(f.stat().st_size for f in directory.rglob("*") if f.is_file())


def _chat_template(out: Path, copied: list[str]) -> str | None:
    if "chat_template.jinja" in copied:
        return "chat_template.jinja"
    if "tokenizer_config.json" in copied:
        try:
            settings = json.loads((out / "tokenizer_config.json").read_text(encoding="utf-8"))
        except ValueError:
            return None
        if isinstance(settings, dict) and settings.get("chat_template"):
            return "tokenizer_config.json"
    return None


def _notes(plan: ConversionPlan, copied: list[str]) -> tuple[str, ...]:
    notes = []
    if "tokenizer.json" not in copied:
        tiktoken = next((f.name for f in sorted(plan.source.path.glob("*tiktoken*"))), None)
        reason = f" ({tiktoken} can only be read by code of the model, which is never run)" if tiktoken else ""
        notes.append(f"no tokenizer.json in the source{reason}: prompts have to be given as token ids")
    if plan.config.shift_refusal:
        notes.append(plan.config.shift_refusal)
    return tuple(notes)
