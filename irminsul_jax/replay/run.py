"""One whole replay: read, tokenise, plan or serve under each policy, sum up. The command line is a thin shell around it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from irminsul_jax.cache import CacheConfig
from irminsul_jax.errors import ConfigError, TraceError
from irminsul_jax.replay.plan_only import plan_requests
from irminsul_jax.replay.render import Renderer
from irminsul_jax.replay.report import FORMAT_VERSION, RequestsFile, write_summary
from irminsul_jax.replay.tally import PolicyTally, RequestRecord
from irminsul_jax.replay.trace import Trace, read_traces
from irminsul_jax.text.tokenizer import Tokenizer

_QUIET_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """What to replay and how. Raises `ConfigError` for options that contradict each other."""

    traces: tuple[Path, ...]
    policies: tuple[str, ...] = ("prefix", "anchor")
    model: Path | None = None
    tokenizer: Path | None = None
    """A tokenizer.json; None takes the model's."""
    early_variation: bool = False
    plan_only: bool = False
    max_tokens: int = 16
    limit: int | None = None
    """Replay the first `limit` requests in time order."""
    out: Path | None = None
    cache_tokens: int | None = None
    seed: int = 0
    max_num_seqs: int = 8

    def __post_init__(self) -> None:
        if not self.traces:
            raise ConfigError("no trace given: name trace files, or use --demo")
        if not self.policies:
            raise ConfigError("--policy is empty: name at least one policy, for example --policy prefix,anchor")
        for policy in self.policies:
            CacheConfig(policy=policy, capacity_tokens=self.cache_tokens)
        if len(set(self.policies)) < len(self.policies):
            raise ConfigError(f"--policy names one policy twice: {','.join(self.policies)}")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"--limit {self.limit} must be at least 1")
        if self.max_tokens < 1:
            raise ConfigError(f"--max-tokens {self.max_tokens} must be at least 1")
        if self.model is None and not self.plan_only:
            raise ConfigError("serving needs --model DIR; add --plan-only to plan without one, or use --demo")
        if self.model is None and self.tokenizer is None:
            raise ConfigError("--plan-only needs --tokenizer FILE (a tokenizer.json) or --model DIR")


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    summary: dict[str, Any]
    trace: Trace


def replay(config: ReplayConfig, console: Console) -> ReplayResult:
    """Runs it; progress and problems go to `console`. With `config.out` the files are written, complete or not at all."""
    started = time.perf_counter()
    trace = read_traces(config.traces)
    for problem in trace.problems:
        console.print(f"warning: {problem}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    requests = trace.requests[: config.limit]
    if not requests:
        raise TraceError(
            f"no request in {', '.join(map(str, config.traces))}; see the warnings above or check the files"
        )
    checkpoint, tokenizer, use_template = _tokenizer(config)
    renderer = Renderer(
        tokenizer, use_chat_template=use_template, early_variation=config.early_variation, seed=config.seed
    )
    tokenising = time.perf_counter()
    renderer.prepare(enumerate(requests))
    prompts = [renderer.render(index, request) for index, request in enumerate(requests)]
    tokenise_s = time.perf_counter() - tokenising
    sessions = [request.session for request in requests]
    total = sum(map(len, prompts))
    tallies: dict[str, PolicyTally] = {}
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(RequestsFile(config.out / "requests.jsonl")) if config.out else None
        for policy in config.policies:
            emit = (lambda record, policy=policy: file.add(policy, record)) if file else None
            with _progress(console, policy, total) as advance:
                if config.plan_only:
                    tallies[policy] = plan_requests(
                        policy,
                        prompts,
                        sessions,
                        model=f"plan-only {tokenizer.fingerprint}",
                        cache_tokens=config.cache_tokens,
                        emit=emit,
                        advance=advance,
                    )
                else:
                    tallies[policy] = _serve(config, checkpoint, policy, prompts, sessions, emit, advance)
            for failure in tallies[policy].failed:
                console.print(
                    f"warning: {policy}: {failure}", style="yellow", markup=False, highlight=False, soft_wrap=True
                )
    summary = {
        "format_version": FORMAT_VERSION,
        "traces": [str(path) for path in config.traces],
        "tokenizer": str(tokenizer.source),
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "model": None if config.model is None else str(config.model),
        "plan_only": config.plan_only,
        "early_variation": config.early_variation,
        "seed": config.seed,
        "cache_tokens": config.cache_tokens,
        "policies": {name: tally.to_json() for name, tally in tallies.items()},
        "skipped_lines": len(trace.problems),
        "tokenise_s": round(tokenise_s, 3),
        "wall_s": round(time.perf_counter() - started, 3),
    }
    if config.out:
        write_summary(config.out, summary)
    return ReplayResult(summary=summary, trace=trace)


def _tokenizer(config: ReplayConfig) -> tuple[Any, Tokenizer, bool]:
    """The checkpoint (None if only planning), the tokenizer, and whether prompts go through its chat template."""
    checkpoint, rows = None, None
    if config.model is not None:
        from irminsul_jax.checkpoint import load_checkpoint, read_manifest

        if config.plan_only:
            read_manifest(config.model)
        else:
            checkpoint = load_checkpoint(config.model)
            rows = checkpoint.vocab_size
    if config.tokenizer is not None or config.model is None:
        return checkpoint, Tokenizer.from_file(config.tokenizer or Path("tokenizer.json"), vocab_size=rows), False
    return checkpoint, Tokenizer.from_directory(config.model, vocab_size=rows), True


def _serve(
    config: ReplayConfig,
    checkpoint: Any,
    policy: str,
    prompts: Sequence[np.ndarray],
    sessions: Sequence[str],
    emit: Callable[[RequestRecord], None] | None,
    advance: Callable[[int], None],
) -> PolicyTally:
    from irminsul_jax.engine.engine import Engine
    from irminsul_jax.engine.options import EngineConfig
    from irminsul_jax.replay.serve import serve_requests
    from irminsul_jax.sampling_params import SamplingParams

    longest = max(map(len, prompts)) + config.max_tokens
    engine = Engine(
        checkpoint,
        cache=CacheConfig(policy=policy, capacity_tokens=config.cache_tokens),
        options=EngineConfig(
            max_num_seqs=config.max_num_seqs, max_model_len=min(longest, checkpoint.config.max_position)
        ),
    )
    sampling = SamplingParams(max_tokens=config.max_tokens, temperature=0.0)
    return serve_requests(
        engine, prompts, sessions, sampling, max_in_flight=config.max_num_seqs, emit=emit, advance=advance
    )


@contextlib.contextmanager
def _progress(console: Console, label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar with rate and remaining time on a terminal, a line every ten seconds elsewhere."""
    started = reported = time.perf_counter()
    done = 0
    if console.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(show_speed=True),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(label, total=total)
            yield lambda tokens: bar.advance(task, tokens)
        return

    def advance(tokens: int) -> None:
        nonlocal done, reported
        done += tokens
        now = time.perf_counter()
        if now - reported >= _QUIET_SECONDS:
            reported = now
            rate = done / (now - started)
            console.print(f"{label}: {done / total:.0%}, {rate:,.0f} tokens/s, {(total - done) / rate:.0f} s left")

    yield advance
