"""Loading and inspecting: errors with a next step, other device counts, no jax where none is needed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from checkpoints_convert import convert
from irminsul_jax import load_checkpoint
from irminsul_jax.checkpoint import flatten_params, inspect_checkpoint, inspect_table
from irminsul_jax.checkpoint_manifest import Manifest
from irminsul_jax.errors import CheckpointError
from irminsul_jax.model.params import param_shapes
from tests.support.synthetic import tensor_shapes
from tests.support.synthetic_hf import V3_CONFIG, write_sparse_hf

ROOT = Path(__file__).parents[2]


@pytest.fixture
def copied(converted, tmp_path):
    shutil.copytree(converted("deepseek_v3"), tmp_path / "copy")
    return tmp_path / "copy"


def test_params_have_exactly_the_contracted_shapes(converted):
    checkpoint = load_checkpoint(converted("deepseek_v3_fp8"))
    contract = flatten_params(param_shapes(checkpoint.config, np.dtype("bfloat16")))
    loaded = flatten_params(checkpoint.params)
    assert {k: (v.shape, v.dtype) for k, v in loaded.items()} == {k: (v.shape, v.dtype) for k, v in contract.items()}
    assert checkpoint.params is checkpoint.params, "loaded once"


def test_dtype_can_be_chosen_at_load_time(converted):
    narrow = load_checkpoint(converted("deepseek_v3"), dtype="bfloat16").params
    assert narrow.layers[1].mlp.gate.dtype == "bfloat16"
    assert narrow.layers[1].mlp.router.dtype == "float32"
    with pytest.raises(CheckpointError, match="dtype 'int8' is not supported"):
        load_checkpoint(converted("deepseek_v3")).load_params(dtype="int8")


def test_hub_name_is_explained():
    with pytest.raises(CheckpointError, match=r"hf download deepseek-ai/DeepSeek-V2-Lite .*irminsul convert DIR OUT"):
        load_checkpoint("deepseek-ai/DeepSeek-V2-Lite")


def test_unconverted_directory_is_explained(tiny, tmp_path):
    with pytest.raises(CheckpointError, match="not converted yet; run `irminsul convert"):
        load_checkpoint(tiny("deepseek_v3"))
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        load_checkpoint(tmp_path)


def edit_manifest(path, **changes):
    data = json.loads((path / "irminsul.json").read_text()) | changes
    (path / "irminsul.json").write_text(json.dumps(data))


def test_newer_format_and_edited_manifest(copied):
    edit_manifest(copied, format_version=2)
    with pytest.raises(CheckpointError, match=r"format_version 2 is newer.*upgrade"):
        load_checkpoint(copied)
    edit_manifest(copied, format_version=1, rotary_layout="interleaved")
    with pytest.raises(CheckpointError, match="rotary_layout"):
        load_checkpoint(copied)
    data = json.loads((copied / "irminsul.json").read_text())
    data["rotary_layout"] = Manifest.rotary_layout
    data["model"]["norm_eps"] = 0.5
    (copied / "irminsul.json").write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match="fingerprint does not fit"):
        load_checkpoint(copied)
    (copied / "irminsul.json").write_text("{")
    with pytest.raises(CheckpointError, match="not readable as JSON"):
        load_checkpoint(copied)


def test_missing_and_changed_files_are_named(copied):
    blob = max((copied / "params").rglob("*"), key=lambda f: f.stat().st_size)
    content = blob.read_bytes()
    blob.write_bytes(content[:-3])
    with pytest.raises(CheckpointError, match=rf"{blob.name}: {len(content) - 3} bytes, but .* {len(content)}"):
        load_checkpoint(copied)
    blob.unlink()
    with pytest.raises(CheckpointError, match=rf"{blob.name}: file not found"):
        load_checkpoint(copied)
    (copied / "irminsul.files.json").unlink()
    with pytest.raises(CheckpointError, match=r"irminsul.files.json: file not found"):
        load_checkpoint(copied)


def test_unreadable_arrays_are_a_checkpoint_error(copied):
    for manifest in (copied / "params").rglob("manifest.ocdbt"):
        manifest.write_bytes(bytes(manifest.stat().st_size))
    script = (  # in a process of its own: the storage library leaves failed tasks behind
        "import sys\nfrom irminsul_jax import IrminsulError, load_checkpoint\n"
        "try:\n    load_checkpoint(sys.argv[1]).load_params()\nexcept IrminsulError as e:\n    print(e)"
    )
    command = [sys.executable, "-c", script, str(copied)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "params: stored arrays cannot be read" in done.stdout
    assert len(done.stdout) < 600


def test_fingerprint_is_of_the_weights_not_of_the_files(tiny, converted, tmp_path):
    again = convert(tiny("deepseek_v3"), tmp_path / "again")
    first = load_checkpoint(converted("deepseek_v3"))
    assert again == first.manifest
    assert (tmp_path / "again" / "irminsul.json").read_bytes() == (first.path / "irminsul.json").read_bytes()
    others = {load_checkpoint(converted(n)).fingerprint for n in ("deepseek_v2", "moonlight", "kimi_k2")}
    assert len(others | {first.fingerprint}) == 4
    assert convert(tiny("deepseek_v3"), tmp_path / "bf16", dtype="bfloat16").fingerprint != first.fingerprint


SAVE_ON_FOUR = """
import sys
from pathlib import Path
import jax
from checkpoints_convert import convert
assert len(jax.devices()) == 4
convert(Path(sys.argv[1]), Path(sys.argv[2]))
"""

LOAD_ON_FOUR = """
import sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from irminsul_jax import load_checkpoint
mesh = Mesh(np.array(jax.devices()), "x")
def rule(name, shape):
    return NamedSharding(mesh, P("x") if name.endswith("mlp/gate") and len(shape) == 3 else P())
params = load_checkpoint(sys.argv[1], sharding=rule).params
gate = params.layers[1].mlp.gate
print(len(gate.addressable_shards), gate.addressable_shards[0].data.shape, float(abs(gate).sum()))
print(len(load_checkpoint(sys.argv[1]).params.norm.devices()))
"""


def on_four_devices(script, *args):
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", script, *map(str, args)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout


def test_device_count_may_differ_between_saving_and_loading(tiny, converted, tmp_path):
    """Case 36, both ways."""
    on_four_devices(SAVE_ON_FOUR, tiny("deepseek_v3"), tmp_path / "out")
    here = flatten_params(load_checkpoint(converted("deepseek_v3")).params)
    for name, value in flatten_params(load_checkpoint(tmp_path / "out").params).items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(here[name]), err_msg=name)
    sharded, default = on_four_devices(LOAD_ON_FOUR, converted("deepseek_v3")).strip().splitlines()
    shards, *shape, total = sharded.replace("(", "").replace(")", "").replace(",", "").split()
    assert shards == "4"
    assert shape == ["2", "128", "32"]
    assert float(total) == pytest.approx(float(np.abs(np.asarray(here["layers/1/mlp/gate"])).sum()), rel=1e-5)
    assert default == "1"


def full_source(tmp_path, config=V3_CONFIG, **files):
    source = write_sparse_hf(tmp_path / "hf", config, tensor_shapes(config))
    for name, text in files.items():
        (source / name.replace("__", ".")).write_text(text)
    return source


def test_small_files_come_along(tmp_path):
    source = full_source(
        tmp_path,
        tokenizer__json="{}",
        tokenizer_config__json='{"chat_template": "{{ messages }}"}',
        special_tokens_map__json="{}",
        generation_config__json='{"eos_token_id": [1, 2]}',
        README__md="# card",
        **{"LICENSE-MODEL": "terms"},
    )
    convert(source, tmp_path / "out")
    checkpoint = load_checkpoint(tmp_path / "out")
    assert checkpoint.tokenizer_path == tmp_path / "out" / "tokenizer.json"
    assert checkpoint.manifest.chat_template == "tokenizer_config.json"
    assert checkpoint.generation_config == {"eos_token_id": [1, 2]}
    assert (tmp_path / "out" / "MODEL_CARD.md").read_text() == "# card"
    assert (tmp_path / "out" / "LICENSE-MODEL").read_text() == "terms"
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == V3_CONFIG
    assert checkpoint.vocab_size == 512


def test_tiktoken_only_tokenizer_is_noted(tmp_path):
    convert(full_source(tmp_path, tiktoken__model=""), tmp_path / "out")
    checkpoint = load_checkpoint(tmp_path / "out")
    assert checkpoint.tokenizer_path is None
    assert checkpoint.generation_config == {}
    assert "tiktoken.model can only be read by code of the model" in checkpoint.manifest.notes[0]


def render(info):
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115 (closed with the console)
    with console.file:
        console.print(inspect_table(info))
        return console.export_text()


def test_undeclared_rotary_embedding_refuses_shifted_reuse(tmp_path):
    """Case 16: converts, keeps exact reuse, and inspect says so."""
    config = {k: v for k, v in V3_CONFIG.items() if k != "rope_theta"}
    convert(full_source(tmp_path, config), tmp_path / "out")
    info = inspect_checkpoint(tmp_path / "out")
    assert info["shifted_reuse"] is False
    assert "refused: config.json declares no rotary embedding" in render(info)
    assert "assumed, not declared" in render(info)


def test_inspect_says_what_the_model_is(converted):
    info = inspect_checkpoint(converted("deepseek_v3_mtp"))
    json.dumps(info)
    assert info["params"] == 563424
    assert info["bytes"] == 4 * 563424
    assert info["cache_bytes_per_token"] == 3 * (64 + 16) * 4
    assert info["shifted_reuse"] is True
    assert len(info["skipped"]) == 44
    text = render(info)
    for part in ("deepseek_v3", "3 (1 dense)", "YaRN ×40 of 4,096", "44× multi-token-prediction layer", "563,424"):
        assert part in text


def test_inspect_does_not_import_jax(converted):
    script = (
        "import sys\nfrom irminsul_jax import load_checkpoint\n"
        "from irminsul_jax.checkpoint import inspect_checkpoint, inspect_table\n"
        "inspect_table(inspect_checkpoint(sys.argv[1])); load_checkpoint(sys.argv[1]).fingerprint\n"
        "print([m for m in ('jax', 'flax', 'orbax', 'tensorstore') if m in sys.modules])"
    )
    command = [sys.executable, "-c", script, str(converted("deepseek_v3"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
