"""Conversion speed, and peak memory against what the conversion plan announced.

Regime: DeepSeek-V3-kind checkpoints of one bfloat16 shard each, made on the spot: `layers` has layers of about 200 MB
(each written in shares), `stack` has one layer whose stacks of experts are too large for one share and are stored in
chunks. The source is a sparse file, all zeros but for one value in each 256 KiB (so that no chunk is empty): reading it
costs no disk, while everything is read, permuted, hashed, and written in full. Each conversion runs in a process of its
own, for its peak resident memory; the time is that of `convert` alone, without imports. For scale: the time that a
plain copy of the same bytes takes on the same disk, before and after. Needs about 2.5 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _common import machine, print_result
from rich.table import Table

from checkpoints_convert import plan_conversion
from irminsul_jax.errors import IrminsulError
from irminsul_jax.replay.demo import tensor_shapes

MB, MIB = 10**6, 2**20
STRIDE = 2**18
COPY_BLOCK = 4 * MIB
ONE = b"\x80\x3f"
"""1.0 in bfloat16, little-endian."""

BASE: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "vocab_size": 4096,
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 4096,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1024,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
CASES = {
    "layers": BASE | {"num_hidden_layers": 5, "n_routed_experts": 32},
    "stack": BASE | {"num_hidden_layers": 2, "n_routed_experts": 144},
}

CHILD = """
import json, re, sys, time
from pathlib import Path
import orbax.checkpoint.experimental.v1
from checkpoints_convert import convert
started = time.perf_counter()
manifest = convert(Path(sys.argv[1]), Path(sys.argv[2]))
seconds = time.perf_counter() - started
# VmHWM is of this program alone; ru_maxrss would carry over from the process that started it.
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
print(json.dumps({"seconds": seconds, "peak": peak}))
"""


def write_sparse(path: Path, config: dict[str, Any]) -> Path:
    """A Hugging Face directory with one shard that takes hardly any disk."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, shape in tensor_shapes(config).items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for offset in range(0, end - 1, STRIDE + 74):  # the 74 bytes move it through the columns
            f.seek(8 + len(text) + offset)
            f.write(ONE)
        f.truncate(8 + len(text) + end)
    return path


def copy_seconds(source: Path, target: Path) -> float:
    """Time to read all bytes of a file and write them to disk."""
    started = time.perf_counter()
    with source.open("rb") as read, target.open("wb") as write:
        while block := read.read(COPY_BLOCK):
            write.write(block)
        write.flush()
        os.fsync(write.fileno())
    seconds = time.perf_counter() - started
    target.unlink()
    return seconds


def measure(name: str, folder: Path) -> dict[str, Any]:
    source = write_sparse(folder / name, CASES[name])
    shard = source / "model.safetensors"
    plan = plan_conversion(source)
    copies = [copy_seconds(shard, folder / "copy")]
    out = folder / f"{name}-out"
    done = subprocess.run([sys.executable, "-c", CHILD, str(source), str(out)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name}: the conversion failed\n{done.stderr}")
    child = json.loads(done.stdout.splitlines()[-1])
    copies.append(copy_seconds(shard, folder / "copy"))
    written = sum(f.stat().st_size for f in (out / "params").rglob("*") if f.is_file())
    if written < plan.bytes_to_write:
        raise SystemExit(f"{name}: only {written} of {plan.bytes_to_write} bytes are on disk")
    size, copied = shard.stat().st_size, statistics.median(copies)
    return {
        "case": name,
        "source_bytes": size,
        "written_bytes": written,
        "largest_part_bytes": max(part.nbytes for part in plan.parts),
        "convert_s": round(child["seconds"], 2),
        "mb_per_s": round(size / MB / child["seconds"], 1),
        "copy_mb_per_s": round(size / MB / copied, 1),
        "convert_over_copy": round(child["seconds"] / copied, 2),
        "peak_bytes": child["peak"],
        "announced_peak_bytes": plan.peak_host_bytes,
        "peak_over_announced": round(child["peak"] / plan.peak_host_bytes, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default=",".join(CASES), help="which checkpoints")
    parser.add_argument("--dir", type=Path, help="where to write (default: the system's temporary folder)")
    args = parser.parse_args()
    table = Table(
        "case", "source (MB)", "MB/s", "plain copy (MB/s)", "time ÷ copy", "largest part (MiB)", "peak (MiB)",
        "announced (MiB)", "peak ÷ announced", title="Hugging Face → checkpoint",
    )  # fmt: skip
    cases = []
    for name in args.case.split(","):
        if name not in CASES:
            raise SystemExit(f"--case {name!r} is unknown; choose of {', '.join(CASES)}")
        with tempfile.TemporaryDirectory(dir=args.dir) as folder:
            try:
                case = measure(name, Path(folder))
            except (IrminsulError, OSError) as e:
                raise SystemExit(f"{name}: {e}") from None
        cases.append(case)
        table.add_row(
            name,
            f"{case['source_bytes'] / MB:,.0f}",
            f"{case['mb_per_s']:.0f}",
            f"{case['copy_mb_per_s']:.0f}",
            f"{case['convert_over_copy']:.2f}",
            *(f"{case[k] / MIB:,.0f}" for k in ("largest_part_bytes", "peak_bytes", "announced_peak_bytes")),
            f"{case['peak_over_announced']:.2f}",
        )
    print_result(table, {"benchmark": "converter", "cases": cases} | machine())


if __name__ == "__main__":
    main()
