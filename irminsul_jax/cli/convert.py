"""`irminsul convert`: progress bar, dry-run table and closing JSON line around `checkpoints_convert`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TimeRemainingColumn, TransferSpeedColumn

from irminsul_jax.errors import ConfigError


def run_convert(source: Path, out: Path, *, dtype: Any, dry_run: bool, overwrite: bool) -> None:
    """Raises `ConfigError` for an unknown dtype, `ConversionError` for what cannot be converted."""
    if dtype not in (None, "bfloat16", "float32"):
        raise ConfigError(
            f"--dtype {dtype!r} is unknown; choose bfloat16 or float32, or leave it out to keep the source's"
        )
    from checkpoints_convert import convert, plan_conversion

    if dry_run:
        plan = plan_conversion(source, dtype=dtype)
        for parameter in plan.parameters:
            sources = ", ".join(parameter.source_names[:2]) + (" …" if len(parameter.source_names) > 2 else "")
            print(f"{parameter.name}  {list(parameter.shape)} {parameter.dtype}  <-  {sources}")
        print(
            json.dumps(
                {
                    "bytes_to_write": plan.bytes_to_write,
                    "peak_host_bytes": plan.peak_host_bytes,
                    "param_count": plan.param_count,
                    "skipped": plan.skipped,
                }
            )
        )
        return
    console = Console(stderr=True)
    columns = (*Progress.get_default_columns()[:3], TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("convert", total=None)
        convert(
            source,
            out,
            dtype=dtype,
            overwrite=overwrite,
            progress=lambda done, total, label: bar.update(task, completed=done, total=total, description=label),
        )
    print(json.dumps({"checkpoint": str(out)}))
