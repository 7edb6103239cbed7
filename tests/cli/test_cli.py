"""The command line as its users meet it: results on stdout, one line for an error, exit statuses."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import irminsul_jax
import irminsul_jax.replay.demo as demo
import irminsul_jax.replay.run as run_module
from irminsul_jax.cli import main
from tests.replay.support import TOKENIZER, agent_trace, make_checkpoint, write_trace
from tests.support.synthetic import write_hf_checkpoint

ROOT = Path(__file__).parent.parent.parent
PLAN = ("--plan-only", "--tokenizer", str(TOKENIZER))


class Done(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The last line of stdout."""
        return json.loads(self.out.splitlines()[-1])


Cli = Callable[..., Done]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs the console entry in this process."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["irminsul", *map(str, arguments)])
        try:
            main()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1 if end.code else 0
        out, err = capsys.readouterr()
        return Done(status, str(out), str(err))

    return run


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("served"))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return agent_trace(tmp_path / "t.jsonl")


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["replay"], "no trace given"),
        (["replay", "TRACE"], "serving needs --model DIR"),
        (["replay", "TRACE", "--plan-only"], "--plan-only needs --tokenizer FILE"),
        (["replay", "TRACE", "--demo"], "--demo brings its own trace"),
        (["replay", "--demo", "--plan-only"], "--demo brings its own trace"),
        (["replay", "TRACE", *PLAN, "--policy", "anchr"], "did you mean 'anchor'"),
        (["replay", "TRACE", *PLAN, "--policy", ","], "--policy is empty"),
        (["replay", "TRACE", *PLAN, "--policy", "cdc,cdc"], "one policy twice"),
        (["replay", "TRACE", *PLAN, "--limit", "0"], "--limit 0"),
        (["replay", "TRACE", *PLAN, "--cache-tokens", "-1"], "--cache-tokens -1"),
        (["replay", "TRACE", "--model", "nowhere", "--max-tokens", "0"], "--max-tokens 0"),
        (["replay", "nowhere.jsonl", *PLAN], "nowhere.jsonl: no such trace file"),
        (["replay", "TRACE", "--plan-only", "--tokenizer", "nowhere.json"], "nowhere.json"),
        (["replay", "TRACE", "--model", "deepseek-ai/DeepSeek-V2-Lite"], "hf download deepseek-ai/DeepSeek-V2-Lite"),
        (["replay", "TRACE", "--model", "HF"], "irminsul convert"),
        (["replay", "BROKEN", *PLAN], "no request in"),
        (["generate"], "exactly one of -p TEXT, --messages FILE and -"),
        (["generate", "-p", "x", "--messages", "chat.json"], "exactly one of"),
        (["generate", "hello"], "unexpected argument 'hello'"),
        (["generate", "-m", "nowhere", "-p", "x"], "nowhere: no such directory"),
        (["generate", "-m", "CHECKPOINT", "--messages", "nowhere.json"], "nowhere.json: cannot be read"),
        (["generate", "-m", "CHECKPOINT", "--messages", "BROKEN"], "not JSON"),
        (["generate", "-m", "CHECKPOINT", "-p", "word " * 600, "--max-tokens", "1"], "512"),
        (["generate", "-p", "x", "--temperature", "-1"], "temperature"),
        (["convert", "nowhere", "out"], "nowhere"),
        (["convert", "HF", "out", "--dtype", "int8"], "--dtype 'int8' is unknown"),
        (["inspect", "nowhere"], "nowhere: no such directory"),
        (["inspect", "HF"], "not converted yet"),
    ],
    ids=lambda value: " ".join(map(str, value))[:50] if isinstance(value, list) else "",
)
def test_an_error_is_one_line_and_status_2(
    cli: Cli, arguments: list[str], reason: str, checkpoint: Path, trace: Path, tmp_path: Path
) -> None:
    write_trace(tmp_path / "broken.jsonl", ["{", "["])
    places = {
        "TRACE": trace,
        "CHECKPOINT": checkpoint,
        "HF": checkpoint.parent / "hf",
        "BROKEN": tmp_path / "broken.jsonl",
    }
    done = cli(*(places.get(argument, argument) for argument in arguments))
    assert done.status == 2
    assert done.out == ""
    last = done.err.splitlines()[-1]
    assert last.startswith("error: ")
    assert reason in last
    assert "Traceback" not in done.err


def test_options_are_checked_before_the_demo_checkpoint_is_made(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_build", lambda scratch: pytest.fail("it was built"))
    assert "is unknown" in cli("replay", "--demo", "--policy", "nonsense").err


def test_an_unknown_option_is_answered_with_a_likely_one(cli: Cli) -> None:
    done = cli("replay", "--polcy", "prefix")
    assert done.status == 2
    assert "--policy" in done.err


@pytest.mark.parametrize("debug", [False, True])
def test_a_bug_is_one_line_and_status_1(cli: Cli, trace: Path, monkeypatch: pytest.MonkeyPatch, debug: bool) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setattr(run_module, "plan_requests", broken)
    monkeypatch.setenv("IRMINSUL_DEBUG", "1" if debug else "")
    done = cli("replay", trace, *PLAN)
    assert done.status == 1
    assert done.out == ""
    line = "error: ZeroDivisionError: two lines (this is a bug; run with IRMINSUL_DEBUG=1 for the traceback)"
    assert done.err.splitlines()[-1] == line
    assert ("Traceback" in done.err) == debug


# --- help and version -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "examples"),
    [
        ("replay", ["irminsul replay --demo", "--plan-only --early-variation --policy prefix,cdc,anchor"]),
        ("generate", ["irminsul generate -p 'Hello'", "cat prompt.txt | irminsul generate -m ./checkpoint -"]),
        ("convert", ["irminsul convert ./DeepSeek-V2-Lite ./checkpoint --dry-run"]),
        ("inspect", ["irminsul inspect ./checkpoint --json"]),
    ],
)
def test_help_teaches_by_examples(cli: Cli, command: str, examples: list[str]) -> None:
    done = cli(command, "--help")
    assert done.status == 0
    lines = [line.strip() for line in done.out.splitlines()]
    for example in examples:
        assert any(example in line for line in lines), example


def test_version(cli: Cli) -> None:
    import jax

    done = cli("--version")
    assert done.status == 0
    assert done.out.startswith(f"irminsul-jax {irminsul_jax.__version__}\njax {jax.__version__}\ndevices: ")
    assert "(cpu)" in done.out


# --- convert, inspect, generate -----------------------------------------------------------------------------------------


def test_convert_and_inspect(cli: Cli, tmp_path: Path) -> None:
    source, out = write_hf_checkpoint(tmp_path / "hf", num_hidden_layers=1), tmp_path / "out"
    plan = cli("convert", source, out, "--dry-run")
    assert plan.status == 0
    assert not out.exists()
    assert "model.embed_tokens.weight" in plan.out
    assert plan.json["peak_host_bytes"] > plan.json["bytes_to_write"] > 0

    made = cli("convert", source, out, "--dtype", "bfloat16")
    assert made.status == 0
    assert made.json["path"] == str(out)
    assert (made.json["model_type"], made.json["dtype"], made.json["tokenizer"]) == ("deepseek_v3", "bfloat16", None)
    assert made.json["parameters"] == plan.json["param_count"]
    assert made.json["bytes"] < plan.json["bytes_to_write"]
    assert "no tokenizer.json" in made.out

    again = cli("convert", source, out)
    assert again.status == 2
    assert "already holds a complete checkpoint" in again.err
    assert cli("convert", source, out, "--overwrite").json["dtype"] == "float32"

    assert "deepseek_v3" in cli("inspect", out).out
    assert cli("inspect", out, "--json").json["params"] == plan.json["param_count"]


def test_convert_needs_no_accelerator(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert cli("convert", write_hf_checkpoint(tmp_path / "hf", num_hidden_layers=1), tmp_path / "out").status == 0


def test_generate(cli: Cli, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("-m", checkpoint, "--max-tokens", 3, "--temperature", 0)
    given = cli("generate", "-p", "Hello there", *options)
    assert given.status == 0
    assert given.json["usage"]["generated_tokens"] == len(given.json["token_ids"]) <= 3
    assert given.out.startswith(given.json["text"])
    assert f"{given.json['usage']['prompt_tokens']} prompt tokens" in given.err

    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello there"))
    assert cli("generate", "-", *options).json["token_ids"] == given.json["token_ids"]

    chat = tmp_path / "chat.json"
    chat.write_text(json.dumps({"messages": [{"role": "user", "content": "Hello there"}]}))
    answered = cli("generate", "--messages", chat, *options)
    assert answered.status == 0
    assert answered.json["usage"]["prompt_tokens"] > given.json["usage"]["prompt_tokens"]


# --- replay -------------------------------------------------------------------------------------------------------------


def test_replay_prints_a_table_and_last_one_json_object(cli: Cli, trace: Path, tmp_path: Path) -> None:
    done = cli("replay", trace, *PLAN, "--early-variation", "--out", tmp_path / "out", "--limit", 3)
    assert done.status == 0
    assert done.json == json.loads((tmp_path / "out" / "summary.json").read_text())
    assert {name: row["requests"] for name, row in done.json["policies"].items()} == {"prefix": 3, "anchor": 3}
    assert "recom-" in done.out


def test_replay_of_a_trace_with_bad_lines_ends_with_status_3(cli: Cli, trace: Path) -> None:
    with trace.open("a") as file:
        file.write("{broken\n")
    done = cli("replay", trace, *PLAN)
    assert done.status == 3
    assert f"{trace}:3: not a JSON line" in done.err
    assert done.json["skipped_lines"] == 1
    assert done.json["policies"]["anchor"]["requests"] == 4


def test_replay_with_requests_that_failed_ends_with_status_3(cli: Cli, trace: Path) -> None:
    done = cli("replay", trace, *PLAN, "--cache-tokens", 64)
    assert done.status == 3
    assert "warning: anchor: request 0 (session s0): " in done.err
    assert done.json["policies"]["anchor"]["failed"] == 4


def test_served_replay(cli: Cli, trace: Path, checkpoint: Path) -> None:
    done = cli("replay", trace, "--model", checkpoint, "--policy", "prefix", "--max-tokens", 2, "--cache-tokens", 4096)
    assert done.status == 0
    assert done.json["policies"]["prefix"]["ttft_ms_mean"] > 0
    assert done.json["model"] == str(checkpoint)
    assert "compiling" in done.err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], {"policies": ("prefix", "anchor"), "max_tokens": 4, "limit": None}),
        (["--policy", "cdc", "--max-tokens", "9", "--limit", "2"], {"policies": ("cdc",), "max_tokens": 9, "limit": 2}),
    ],
)
def test_the_demo_honours_what_is_said(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, options: list[str], expected: dict[str, Any]
) -> None:
    seen = []

    def fake(config: run_module.ReplayConfig, console: object) -> None:
        seen.append(config)
        raise irminsul_jax.IrminsulError("enough")

    monkeypatch.setattr(demo, "demo_checkpoint", lambda console: demo.demo_path())
    monkeypatch.setattr(run_module, "replay", fake)
    assert "enough" in cli("replay", "--demo", *options).err
    assert seen[0].traces == (demo.DEMO_TRACE,)
    assert seen[0].early_variation
    assert {name: getattr(seen[0], name) for name in expected} == expected


def test_planning_and_inspecting_work_where_jax_is_missing(trace: Path, checkpoint: Path) -> None:
    block = """
import runpy, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib", "flax", "orbax"):
            raise ImportError(name + " was imported although it must not be")
sys.meta_path.insert(0, Blocked())
runpy.run_module("irminsul_jax", run_name="__main__", alter_sys=True)
"""
    for arguments in (["replay", str(trace), *PLAN], ["replay", str(trace), "--plan-only", "--model", str(checkpoint)],
                      ["inspect", str(checkpoint), "--json"]):  # fmt: skip
        command = [sys.executable, "-W", "error", "-c", block, *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["format_version"] == 1
