"""Host memory of a conversion, measured in a process of its own on shards that are much larger than the bound."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoints_convert import plan_conversion
from tests.support.synthetic import tensor_shapes
from tests.support.synthetic_hf import V3_CONFIG, write_sparse_hf

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
CONFIG = V3_CONFIG | {
    "hidden_size": 1024,
    "num_hidden_layers": 5,
    "n_routed_experts": 32,
    "moe_intermediate_size": 1024,
}

# VmHWM is of this program alone; ru_maxrss would carry over from the process that started it.
SCRIPT = """
import re, sys
from pathlib import Path
from checkpoints_convert import convert
convert(Path(sys.argv[1]), Path(sys.argv[2]))
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024)
"""


@pytest.mark.timeout(120)
def test_peak_host_memory_is_one_layer_and_half_a_gibibyte(tmp_path):
    source = write_sparse_hf(tmp_path / "hf", CONFIG, tensor_shapes(CONFIG))
    plan = plan_conversion(source)
    layer = sum(p.nbytes for p in plan.parameters if p.name.startswith("layers/4/"))
    bound = layer + 512 * MIB
    shard = (source / "model.safetensors").stat().st_size
    assert shard > bound, "a converter that loads the shard has to fail this test"

    command = [sys.executable, "-c", SCRIPT, str(source), str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    peak = int(done.stdout)
    print(f"peak {peak / MIB:.0f} MiB, announced {plan.peak_host_bytes / MIB:.0f}, bound {bound / MIB:.0f}")
    assert peak <= bound
    assert peak <= plan.peak_host_bytes <= bound
    manifest = json.loads((tmp_path / "out" / "irminsul.json").read_text())
    assert manifest["param_bytes"] == plan.bytes_to_write
