"""Interrupted conversions, destinations and disk space. A half-written directory is never loadable (case 35)."""

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from checkpoints_convert import convert, plan_conversion
from checkpoints_convert.convert import _Job
from irminsul_jax import load_checkpoint
from irminsul_jax.checkpoint import flatten_params
from irminsul_jax.errors import CheckpointError, ConversionError
from tests.support.synthetic import tensor_shapes
from tests.support.synthetic_hf import V3_CONFIG, write_sparse_hf

ROOT = Path(__file__).parents[2]

KILLED = """
import os, signal, sys
from pathlib import Path
from checkpoints_convert import convert, plan_conversion
from checkpoints_convert.convert import _Job
def progress(done, total, label):
    if label.startswith(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
convert(Path(sys.argv[1]), Path(sys.argv[2]), progress=progress)
"""


class Stop(Exception):
    pass


def stop_at(prefix):
    def progress(done, total, label):
        if label.startswith(prefix):
            raise Stop

    return progress


def test_killed_conversion_resumes_and_equals_an_uninterrupted_one(tiny, converted, tmp_path):
    layer = random.choice((1, 2))
    print(f"killed at layer {layer}")
    source, out = tiny("deepseek_v3"), tmp_path / "out"
    command = [sys.executable, "-c", KILLED, str(source), str(out), f"layers/{layer}/"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == -9
    with pytest.raises(CheckpointError, match="did not finish; run the same `irminsul convert` again"):
        load_checkpoint(out)
    kept = json.loads((out / "irminsul.partial.json").read_text())["parts"]
    assert f"layers/{layer - 1}/attention_norm" in kept
    assert f"layers/{layer}/attention_norm" not in kept

    (out / "params.partial_save" / "half-written").mkdir()
    converted_names = set()
    convert(source, out, progress=lambda d, t, label: converted_names.add(label))
    assert f"layers/{layer - 1}/attention/q_nope" not in converted_names, "a finished layer was converted twice"
    whole = load_checkpoint(converted("deepseek_v3"))
    resumed = load_checkpoint(out)
    assert resumed.manifest == whole.manifest
    expected = flatten_params(whole.params)
    for name, value in flatten_params(resumed.params).items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(expected[name]), err_msg=name)
    assert not list(out.glob("*partial*"))


def test_damaged_part_is_written_again(tiny, converted, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(Stop):
        convert(tiny("deepseek_v3"), out, progress=stop_at("layers/2/"))
    part = json.loads((out / "irminsul.partial.json").read_text())["parts"]["layers/0/attention_norm"]
    blob = max((out / "params.partial_save" / part["directory"]).rglob("*"), key=lambda f: f.stat().st_size)
    blob.write_bytes(blob.read_bytes()[:-1])
    convert(tiny("deepseek_v3"), out)
    assert load_checkpoint(out).fingerprint == load_checkpoint(converted("deepseek_v3")).fingerprint
    np.testing.assert_array_equal(
        np.asarray(load_checkpoint(out).params.layers[0].mlp.gate),
        np.asarray(load_checkpoint(converted("deepseek_v3")).params.layers[0].mlp.gate),
    )


def test_stopped_while_hashing_or_merging(tiny, converted, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with pytest.raises(Stop):
        convert(tiny("deepseek_v3"), out, progress=stop_at("hashing"))
    with pytest.raises(CheckpointError, match="did not finish"):
        load_checkpoint(out)
    assert convert(tiny("deepseek_v3"), out) == load_checkpoint(converted("deepseek_v3")).manifest

    from orbax.checkpoint.experimental import v1 as ocp

    out = tmp_path / "merging"
    with monkeypatch.context() as patch:
        patch.setattr(ocp.partial, "finalize", lambda path: (_ for _ in ()).throw(Stop))
        with pytest.raises(Stop):
            convert(tiny("deepseek_v3"), out)
    assert convert(tiny("deepseek_v3"), out) == load_checkpoint(converted("deepseek_v3")).manifest
    assert load_checkpoint(out).params.embedding.shape == (256, 128)


def test_other_options_do_not_resume(tiny, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(Stop):
        convert(tiny("deepseek_v3"), out, progress=stop_at("layers/1/"))
    manifest = convert(tiny("deepseek_v3"), out, dtype="bfloat16")
    assert manifest.dtype == "bfloat16"
    assert load_checkpoint(out).params.embedding.dtype == "bfloat16"


@pytest.fixture
def source(tmp_path):
    return write_sparse_hf(tmp_path / "hf", V3_CONFIG, tensor_shapes(V3_CONFIG))


def test_complete_destination_is_only_replaced_on_request(source, tmp_path):
    out = tmp_path / "out"
    convert(source, out)
    with pytest.raises(ConversionError, match="already holds a complete checkpoint"):
        convert(source, out)
    assert load_checkpoint(out).manifest.dtype == "bfloat16"
    assert convert(source, out, dtype="float32", overwrite=True).dtype == "float32"
    assert load_checkpoint(out).params.norm.dtype == "float32"


def test_foreign_destinations_are_left_alone(source, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(ConversionError, match="not empty and not an unfinished conversion"):
        convert(source, tmp_path / "full", overwrite=True)
    assert (tmp_path / "full" / "thesis.txt").read_text() == "mine"
    with pytest.raises(ConversionError, match="same directory"):
        convert(source, source)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConversionError, match="not a directory"):
        convert(source, tmp_path / "file")


def test_disk_space_is_checked_before_anything_is_written(source, tmp_path):
    out = tmp_path / "a" / "out"
    with pytest.raises(ConversionError, match=r"of free disk are needed, there are 0.00 GiB"):
        convert(source, out, free_bytes=lambda path: 1000)
    assert not out.parent.exists()


def test_full_disk_is_reported_and_resumable(source, tmp_path, monkeypatch):
    def full(self, *args, **kwargs):
        raise OSError(28, "No space left on device")

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(_Job, "finalize_params", full)
        with pytest.raises(ConversionError, match=r"No space left on device.*run it again"):
            convert(source, out)
    assert convert(source, out).param_bytes == plan_conversion(source).bytes_to_write


def test_damaged_weights_are_named(source, tmp_path):
    data = bytearray((source / "model.safetensors").read_bytes())
    data[-2:] = b"\xff\x7f"  # bfloat16 NaN in the last tensor
    (source / "model.safetensors").write_bytes(data)
    with pytest.raises(ConversionError, match=r"lm_head.weight contains NaN"):
        convert(source, tmp_path / "out")


def test_conversion_imports_no_kernels(source, tmp_path):
    """Case 37: works where nothing but a CPU is."""
    script = (
        "import sys\nfrom pathlib import Path\nfrom checkpoints_convert import convert\n"
        "convert(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] == 'pallas_kernels'))"
    )
    command = [sys.executable, "-c", script, str(source), str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
