"""Commands and their options: generate, replay, convert, inspect. Results on stdout, progress and errors on stderr."""

from __future__ import annotations

import glob
import io
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from irminsul_jax.errors import ConfigError, IrminsulError, RequestError

EXIT_BUG, EXIT_ERROR, EXIT_INCOMPLETE = 1, 2, 3

app = typer.Typer(
    name="irminsul",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Serve agent prompts of MLA models from a position-independent latent cache.\n\n"
    "Try [bold]irminsul replay --demo[/bold] first: it makes a small model and needs no download.",
    epilog="Exit status: 0 fine, 2 an error that one line explains, 3 finished but some lines or requests of a trace were "
    "skipped, 1 a bug.",
)


def main() -> None:
    """Console entry: errors of this project become one line and exit status 2, anything else one line and status 1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    _hush_unused_tpu_compiler()
    try:
        app()
    except IrminsulError as error:
        _fail(f"error: {error}", EXIT_ERROR)
    except Exception as error:
        if os.environ.get("IRMINSUL_DEBUG"):
            traceback.print_exc()
        reason = " ".join(str(error).split())[:300]
        _fail(
            f"error: {type(error).__name__}: {reason} (this is a bug; run with IRMINSUL_DEBUG=1 for the traceback)",
            EXIT_BUG,
        )


def _hush_unused_tpu_compiler() -> None:
    """libtpu, which the tests compile with, looks for its chips' names when jax starts and complains where there are no
    chips. Given any names it is quiet; where there are chips nothing is set."""
    if not (glob.glob("/dev/accel*") or glob.glob("/dev/vfio/*")):
        names = {
            "SKIP_MDS_QUERY": "1",
            "WORKER_HOSTNAMES": "localhost",
            "WORKER_ID": "0",
            "ACCELERATOR_TYPE": "v5litepod-4",
        }
        for name, value in names.items():
            os.environ.setdefault(f"TPU_{name}", value)


def _fail(line: str, status: int) -> None:
    Console(stderr=True).print(line, style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(status)


def _version(wanted: bool) -> bool:
    if not wanted:
        return wanted
    import jax

    from irminsul_jax import __version__

    try:
        devices = ", ".join(f"{device.device_kind} ({device.platform})" for device in jax.devices())
    except RuntimeError as error:
        devices = f"none can be used ({' '.join(str(error).split())})"
    print(f"irminsul-jax {__version__}\njax {jax.__version__}\ndevices: {devices}")
    raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show versions and devices.")
    ] = False,
) -> None:
    pass


@app.command(
    epilog="Examples:\n\nirminsul replay --demo\n\n"
    "irminsul replay trace.jsonl.xz --tokenizer tokenizer.json --plan-only --early-variation --policy prefix,cdc,anchor\n\n"
    "irminsul replay monday.jsonl.zst tuesday.jsonl --model ./checkpoint --limit 100 --out results"
)
def replay(
    traces: Annotated[list[Path] | None, typer.Argument(metavar="TRACE...", help=".jsonl, .xz or .zst files.")] = None,
    model: Annotated[Path | None, typer.Option(help="Converted checkpoint to serve with.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json to use without chat template; default: the model's own.")
    ] = None,
    policy: Annotated[str, typer.Option(help="Policies to compare, comma-separated.")] = "prefix,anchor",
    early_variation: Annotated[
        bool, typer.Option("--early-variation", help="Put a changing request-id line in front of each request.")
    ] = False,
    plan_only: Annotated[bool, typer.Option("--plan-only", help="Plan reuse without running a model.")] = False,
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens to generate per request.", show_default="16; 4 with --demo")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Replay only the first requests.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for requests.jsonl, summary.json and report.html.")] = None,
    cache_tokens: Annotated[
        int | None, typer.Option(help="Size of the cache in tokens.", show_default="large enough never to evict")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the early-variation lines.")] = 0,
    demo: Annotated[bool, typer.Option("--demo", help="Packaged trace, small random-weight model.")] = False,
) -> None:
    """Replay recorded agent requests and report where their prompt tokens came from."""
    from irminsul_jax.replay.report import summary_table
    from irminsul_jax.replay.run import ReplayConfig
    from irminsul_jax.replay.run import replay as run_replay

    serving: dict[str, Any] = {}
    if demo:
        from irminsul_jax.replay.demo import DEMO_SERVING, DEMO_TRACE, demo_path

        if traces or model or tokenizer or plan_only:
            raise ConfigError(
                "--demo brings its own trace, model and tokenizer; leave TRACE, --model, --tokenizer and --plan-only out"
            )
        traces, model, early_variation = [DEMO_TRACE], demo_path(), True
        serving = DEMO_SERVING
    config = ReplayConfig(
        traces=tuple(traces or ()),
        model=model,
        tokenizer=tokenizer,
        policies=tuple(name.strip() for name in policy.split(",") if name.strip()),
        early_variation=early_variation,
        plan_only=plan_only,
        max_tokens=max_tokens if max_tokens is not None else 4 if demo else 16,
        limit=limit,
        out=out,
        cache_tokens=cache_tokens,
        seed=seed,
        **serving,
    )
    progress = Console(stderr=True)
    if demo:
        from irminsul_jax.replay.demo import demo_checkpoint

        demo_checkpoint(progress)
    result = run_replay(config, progress)
    Console(width=max(Console().width, 100)).print(summary_table(result.summary))
    print(json.dumps(result.summary))
    if not result.complete:
        raise typer.Exit(EXIT_INCOMPLETE)


@app.command(
    epilog="Examples:\n\nirminsul generate -p 'Hello' --max-tokens 32\n\n"
    "irminsul generate -m ./checkpoint --messages chat.json --temperature 0\n\n"
    "cat prompt.txt | irminsul generate -m ./checkpoint -"
)
def generate(
    stdin: Annotated[str | None, typer.Argument(metavar="[-]", help="- reads the prompt from standard input.")] = None,
    model: Annotated[Path | None, typer.Option("-m", "--model", help="Converted checkpoint; default: demo.")] = None,
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", help="Prompt text.")] = None,
    messages: Annotated[
        Path | None, typer.Option(help='JSON file: a list of chat messages, or {"messages": [...], "tools": [...]}.')
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 64,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: the checkpoint's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of sampling.")] = None,
) -> None:
    """Continue one prompt or answer one chat."""
    if stdin not in (None, "-"):
        raise ConfigError(
            f"unexpected argument {stdin!r}: give text with -p, a file with --messages, or - for standard input"
        )
    if sum((stdin is not None, prompt is not None, messages is not None)) != 1:
        raise ConfigError("give exactly one of -p TEXT, --messages FILE and - (standard input)")
    from irminsul_jax.cli.generate import run_generate

    if stdin is not None:
        try:
            prompt = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise RequestError(f"standard input is not UTF-8 text ({error})") from None
    run_generate(model, prompt, messages, max_tokens=max_tokens, temperature=temperature, seed=seed)


@app.command(
    epilog="Examples:\n\nirminsul convert ./DeepSeek-V2-Lite ./checkpoint --dry-run\n\n"
    "irminsul convert ./DeepSeek-V2-Lite ./checkpoint --dtype bfloat16"
)
def convert(
    source: Annotated[Path, typer.Argument(metavar="HF_DIR", help="Hugging Face checkpoint directory.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Where the converted checkpoint goes.")],
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float32; default: the source's.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show mapping, bytes and peak memory only.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a complete checkpoint at OUT.")] = False,
) -> None:
    """Convert a Hugging Face checkpoint; an interrupted run resumes."""
    from irminsul_jax.cli.convert import run_convert

    run_convert(source, out, dtype=dtype, dry_run=dry_run, overwrite=overwrite)


@app.command(epilog="Examples:\n\nirminsul inspect ./checkpoint\n\nirminsul inspect ./checkpoint --json")
def inspect(
    path: Annotated[Path, typer.Argument(metavar="OUT", help="Converted checkpoint.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Say what a converted checkpoint is. Loads no weights."""
    from irminsul_jax.checkpoint import inspect_checkpoint, inspect_table

    info = inspect_checkpoint(path)
    if as_json:
        print(json.dumps(info, ensure_ascii=False))
    else:
        Console().print(inspect_table(info))
