"""`irminsul convert`: progress, dry-run table and closing JSON line around `checkpoints_convert`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rich.console import Console

from irminsul_jax.errors import ConfigError
from irminsul_jax.replay.progress import Meter


def run_convert(source: Path, out: Path, *, dtype: Any, dry_run: bool, overwrite: bool) -> None:
    """Raises `ConfigError` for an unknown dtype, `ConversionError` for what cannot be converted."""
    if dtype not in (None, "bfloat16", "float32"):
        raise ConfigError(
            f"--dtype {dtype!r} is unknown; choose bfloat16 or float32, or leave it out to keep the source's"
        )
    os.environ["JAX_PLATFORMS"] = "cpu"  # conversion is host work: take no accelerator, need none
    from checkpoints_convert import convert, plan_conversion

    if dry_run:
        _show_plan(plan_conversion(source, dtype=dtype))
        return
    with Meter(Console(stderr=True), "convert", unit="MB", scale=1e6) as meter:
        manifest = convert(source, out, dtype=dtype, overwrite=overwrite, progress=meter.update)
    summary = {
        "format_version": manifest.format_version,
        "path": str(out),
        "model_type": manifest.model.model_type,
        "dtype": manifest.dtype,
        "parameters": manifest.param_count,
        "bytes": manifest.param_bytes,
        "skipped": len(manifest.skipped),
        "tokenizer": manifest.tokenizer,
        "chat_template": manifest.chat_template,
        "notes": list(manifest.notes),
        "fingerprint": manifest.fingerprint,
    }
    print(f"{out}: {manifest.model.model_type}, {manifest.param_count:,} parameters, {_gib(manifest.param_bytes)}")
    for name, reason in manifest.skipped.items():
        print(f"skipped {name}: {reason}")
    for note in manifest.notes:
        print(f"note: {note}")
    print(json.dumps(summary, ensure_ascii=False))


def _show_plan(plan: Any) -> None:
    rows = [
        (
            p.name,
            f"{p.dtype} {list(p.shape)}",
            ", ".join(p.source_names[:2]) + (" …" if len(p.source_names) > 2 else ""),
        )
        for p in plan.parameters
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for name, kind, sources in rows:
        print(f"{name:<{widths[0]}}  {kind:<{widths[1]}}  <-  {sources}")
    for name, reason in plan.skipped.items():
        print(f"skipped {name}: {reason}")
    print(
        f"{plan.param_count:,} parameters as {plan.dtype}: {_gib(plan.bytes_to_write)} to write, "
        f"at most {_gib(plan.peak_host_bytes)} of memory at a time"
    )
    totals = plan.to_json()
    print(json.dumps({key: totals[key] for key in totals if key not in ("parameters", "model")}, ensure_ascii=False))


def _gib(size: int) -> str:
    return f"{size / 2**30:.3f} GiB"
