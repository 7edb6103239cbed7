"""One whole replay: read, tokenise, plan or serve under each policy, sum up. The command line is a thin shell around it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from irminsul_jax.cache import PAGE_SIZE, CacheConfig
from irminsul_jax.errors import ConfigError, TraceError
from irminsul_jax.replay.plan_only import Emit, plan_requests
from irminsul_jax.replay.progress import Meter
from irminsul_jax.replay.render import Prompts
from irminsul_jax.replay.report import FORMAT_VERSION, AtomicFile, request_line, write_summary
from irminsul_jax.replay.tally import PolicyTally, RequestRecord
from irminsul_jax.replay.trace import Trace, read_traces
from irminsul_jax.text.tokenizer import Tokenizer

MAX_SIZED_POOL = 256 * 1024
"""Served replays that need no more rows than this get a pool that never evicts."""


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """What to replay and how. Raises `ConfigError` for options that contradict each other."""

    traces: tuple[Path, ...]
    policies: tuple[str, ...] = ("prefix", "anchor")
    model: Path | None = None
    tokenizer: Path | None = None
    """A tokenizer.json; prompts are then rendered without a chat template. None takes the model's own."""
    early_variation: bool = False
    plan_only: bool = False
    max_tokens: int = 16
    """Tokens to generate per request, if served."""
    limit: int | None = None
    """Replay the first `limit` requests in time order."""
    out: Path | None = None
    cache_tokens: int | None = None
    """Size of the latent pool; None: large enough never to evict (a served replay above `MAX_SIZED_POOL`: as large as
    the engine chooses)."""
    seed: int = 0
    max_num_seqs: int = 8
    """Requests in flight together, if served."""
    prefill_chunk: int = 512
    """As in `EngineConfig`: a smaller one is slower, but fewer programs are compiled before the first request."""

    def __post_init__(self) -> None:
        if not self.traces:
            raise ConfigError("no trace given: name trace files, or use --demo")
        if not self.policies:
            raise ConfigError("--policy is empty: name at least one policy, for example --policy prefix,anchor")
        for option, value in (
            ("--limit", self.limit),
            ("--max-tokens", self.max_tokens),
            ("--cache-tokens", self.cache_tokens),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"{option} {value} must be at least 1")
        for policy in self.policies:
            CacheConfig(policy=policy)
        if len(set(self.policies)) < len(self.policies):
            raise ConfigError(f"--policy names one policy twice: {','.join(self.policies)}")
        if self.model is None and not self.plan_only:
            raise ConfigError("serving needs --model DIR; add --plan-only to plan without one, or use --demo")
        if self.model is None and self.tokenizer is None:
            raise ConfigError("--plan-only needs --tokenizer FILE (a tokenizer.json) or --model DIR")


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    summary: dict[str, Any]
    trace: Trace

    @property
    def complete(self) -> bool:
        """Whether every line was read and every request was replayed."""
        return not self.trace.problems and not any(row["failed"] for row in self.summary["policies"].values())


def replay(config: ReplayConfig, console: Console) -> ReplayResult:
    """Runs it; progress and problems go to `console`. With `config.out` the files are written, complete or not at all."""
    started = time.perf_counter()
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(AtomicFile(config.out / "requests.jsonl")) if config.out else None
        trace = read_traces(config.traces)
        for problem in trace.problems:
            _warn(console, str(problem))
        trace = replace(trace, requests=trace.requests[: config.limit])
        if not trace.requests:
            raise TraceError(
                f"no request in {', '.join(map(str, config.traces))}; see the warnings above or check the files"
            )
        checkpoint, tokenizer = _open_model(config)
        tokenising = time.perf_counter()
        with Meter(console, "tokenising", unit="requests", total=len(trace.requests)) as meter:
            prompts = Prompts(
                tokenizer,
                trace.requests,
                use_chat_template=config.tokenizer is None,
                early_variation=config.early_variation,
                seed=config.seed,
                advance=meter.advance,
            )
        tokenise_s = time.perf_counter() - tokenising
        sessions = [request.session for request in trace.requests]
        tallies: dict[str, PolicyTally] = {}
        for policy in config.policies:
            emit = partial(_write_record, file, policy) if file else None
            if config.plan_only:
                with Meter(console, policy, unit="tokens", total=sum(prompts.lengths.values())) as meter:
                    tallies[policy] = plan_requests(
                        policy,
                        prompts,
                        sessions,
                        model=f"plan-only {tokenizer.fingerprint}",
                        cache_tokens=config.cache_tokens,
                        emit=emit,
                        advance=meter.advance,
                    )
            else:
                tallies[policy] = _serve(config, checkpoint, policy, prompts, sessions, emit, console)
            for index, reason in prompts.failed.items():
                tallies[policy].fail(index, sessions[index], reason)
            for failure in tallies[policy].failed:
                _warn(console, f"{policy}: {failure}")
    summary = _summary(config, trace, tokenizer, tallies)
    summary |= {"tokenise_s": round(tokenise_s, 3), "wall_s": round(time.perf_counter() - started, 3)}
    if config.out:
        write_summary(config.out, summary)
    return ReplayResult(summary=summary, trace=trace)


def _write_record(file: AtomicFile, policy: str, record: RequestRecord) -> None:
    file.write(request_line(policy, record))


def _warn(console: Console, text: str) -> None:
    console.print(f"warning: {text}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def _open_model(config: ReplayConfig) -> tuple[Any, Tokenizer]:
    """The checkpoint (None if only planning) and the tokenizer."""
    checkpoint = rows = None
    if config.model is not None:
        from irminsul_jax.checkpoint import load_checkpoint, read_manifest

        rows = read_manifest(config.model).model.vocab_size
        checkpoint = None if config.plan_only else load_checkpoint(config.model)
    if config.tokenizer is not None:
        return checkpoint, Tokenizer.from_file(config.tokenizer, vocab_size=rows)
    if config.model is None:
        raise ConfigError("a tokenizer is needed: give --tokenizer FILE or --model DIR")
    return checkpoint, Tokenizer.from_directory(config.model, vocab_size=rows)


def _serve(
    config: ReplayConfig,
    checkpoint: Any,
    policy: str,
    prompts: Prompts,
    sessions: Sequence[str],
    emit: Emit | None,
    console: Console,
) -> PolicyTally:
    from irminsul_jax.engine.engine import Engine
    from irminsul_jax.engine.options import EngineConfig
    from irminsul_jax.replay.serve import serve_requests
    from irminsul_jax.sampling_params import SamplingParams

    totals = [length + config.max_tokens for length in prompts.lengths.values()]
    longest = max((total for total in totals if total <= checkpoint.config.max_position), default=1)
    engine = Engine(
        checkpoint,
        cache=CacheConfig(policy=policy, capacity_tokens=_pool_tokens(config, totals)),
        options=EngineConfig(
            max_num_seqs=config.max_num_seqs,
            prefill_chunk=config.prefill_chunk,
            decode_block=max(1, min(16, config.max_tokens - 1)),  # the first token comes from prefill
        ),
    )
    console.print(f"{policy}: compiling for prompts up to {longest:,} tokens …", highlight=False)
    engine.warmup(longest)
    with Meter(console, policy, unit="tokens", total=sum(prompts.lengths.values())) as meter:
        sampling = SamplingParams(max_tokens=config.max_tokens, temperature=0.0)
        tally = serve_requests(
            engine, prompts, sessions, sampling, max_in_flight=config.max_num_seqs, emit=emit, advance=meter.advance
        )
    tally.pool_tokens = engine.cache_stats()["total_pages"] * PAGE_SIZE
    return tally


def _pool_tokens(config: ReplayConfig, totals: Sequence[int]) -> int | None:
    if config.cache_tokens is not None:
        return config.cache_tokens
    needed = PAGE_SIZE * sum(-(-total // PAGE_SIZE) for total in totals)
    return max(needed, PAGE_SIZE) if needed <= MAX_SIZED_POOL else None


def _summary(
    config: ReplayConfig, trace: Trace, tokenizer: Tokenizer, tallies: Mapping[str, PolicyTally]
) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "traces": [str(path) for path in config.traces],
        "tokenizer": str(tokenizer.source),
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "model": None if config.model is None else str(config.model),
        "plan_only": config.plan_only,
        "early_variation": config.early_variation,
        "seed": config.seed,
        "max_tokens": None if config.plan_only else config.max_tokens,
        "cache_tokens": config.cache_tokens,
        "policies": {name: tally.to_json() for name, tally in tallies.items()},
        "skipped_lines": trace.skipped_lines,
        "skipped_requests": trace.skipped_requests,
        "damaged_files": trace.damaged_files,
    }
