"""Planning: prompt tokens per second, and the share of prompt tokens each policy recovers.

Regime: a recorded trace in time order with a random header line in front of every request, planned by one thread without
a model, as `irminsul replay --plan-only --early-variation` does it: plan, reserve, publish and release each request,
donors are earlier requests only, the pool is unbounded. Tokenising is timed apart and not part of the speed. Without
`--tokenizer` a byte-level BPE of 4,096 entries is trained on the trace itself (its small vocabulary makes
more tokens than a real model's, so the shares differ a little). Speeds are medians over rounds in which the policies
take turns; shares are the same in every round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from _common import machine, print_result
from rich.table import Table

import irminsul_jax
from irminsul_jax.cache.config import POLICIES
from irminsul_jax.errors import IrminsulError
from irminsul_jax.replay.plan_only import plan_requests
from irminsul_jax.replay.render import Prompts
from irminsul_jax.replay.tally import PolicyTally
from irminsul_jax.replay.trace import TraceRequest, read_traces
from irminsul_jax.text.tokenizer import Tokenizer

DEMO_TRACE = Path(irminsul_jax.__file__).parent / "replay" / "demo_data" / "tau_bench_airline_excerpt.jsonl.xz"
VOCABULARY = 4096


class TrainedTokenizer:
    """A byte-level BPE trained on the texts that it is going to encode."""

    chat_template = None

    def __init__(self, texts: Sequence[str]):
        self._bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
        self._bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
        self._bpe.train_from_iterator(texts, trainer)

    def encode_pieces(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.asarray(e.ids, np.int32) for e in self._bpe.encode_batch(list(texts), add_special_tokens=False)]

    def encode_chat(self, messages: Sequence[Any], *, tools: Sequence[Any] | None = None) -> np.ndarray:
        raise ValueError("this tokenizer has no chat template")


def tokenise(requests: Sequence[TraceRequest], tokenizer: Path | None, seed: int) -> dict[int, np.ndarray]:
    if tokenizer is None:
        encoder = TrainedTokenizer(list(dict.fromkeys(s.text for r in requests for s in r.segments)))
    else:
        encoder = Tokenizer.from_file(tokenizer)
    return dict(Prompts(encoder, requests, early_variation=True, seed=seed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="*", type=Path, help="trace files (default: the packaged excerpt)")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json")
    parser.add_argument("--policy", default=",".join(p for p in POLICIES if p != "none"))
    parser.add_argument("--limit", type=int, help="only the first requests")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the header lines")
    args = parser.parse_args()
    policies = args.policy.split(",")
    traces = args.trace or [DEMO_TRACE]
    try:
        trace = read_traces(traces)
        requests = trace.requests[: args.limit]
        if not requests:
            raise SystemExit(f"no request in {', '.join(map(str, traces))}")
        started = time.perf_counter()
        prompts = tokenise(requests, args.tokenizer, args.seed)
        tokenise_s = time.perf_counter() - started
        sessions = [r.session for r in requests]
        tallies: dict[str, list[PolicyTally]] = {policy: [] for policy in policies}
        for _ in range(args.rounds):
            for policy in policies:
                tallies[policy].append(plan_requests(policy, prompts, sessions, model="benchmark"))
    except IrminsulError as e:
        raise SystemExit(str(e)) from None

    table = Table(
        "policy", "tokens per second", "exact", "shifted", "recomputed", "mean run",
        title=f"{len(requests):,} requests, {sum(map(len, prompts.values())):,} prompt tokens, header varied",
    )  # fmt: skip
    results: dict[str, Any] = {}
    for policy, rounds in tallies.items():
        seconds = statistics.median(tally.wall_s for tally in rounds)
        figures = rounds[0].to_json()
        kept = {k: figures[k] for k in ("requests", "prompt_tokens", "exact", "shifted", "recomputed")}
        kept["recovered"] = round(figures["exact"] + figures["shifted"], 6)
        kept |= {k: figures[k] for k in ("recomputed_by_reason", "mean_run_length")}
        kept["plan_s"] = round(seconds, 4)
        kept["prompt_tokens_per_s"] = round(figures["prompt_tokens"] / seconds)
        results[policy] = kept
        shares = (f"{kept[k]:.2%}" for k in ("exact", "shifted", "recomputed"))
        mean_run = "–" if kept["mean_run_length"] is None else f"{kept['mean_run_length']:,.0f}"
        table.add_row(policy, f"{kept['prompt_tokens_per_s']:,}", *shares, mean_run)
    result = {
        "benchmark": "planning",
        "traces": [path.name for path in traces],
        "problems": [str(problem) for problem in trace.problems],
        "tokenizer": args.tokenizer.name if args.tokenizer else f"byte-level BPE of {VOCABULARY}, trained on the trace",
        "tokenise_s": round(tokenise_s, 3),
        "policies": results,
    }
    print_result(table, result | machine())


if __name__ == "__main__":
    main()
