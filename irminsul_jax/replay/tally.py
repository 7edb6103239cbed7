"""What a replay counts: one `RequestRecord` per request and policy, summed up by `PolicyTally`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from irminsul_jax.cache.plan import Plan


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """One replayed request; `None` means not measured."""

    request: int
    session: str
    plan: Plan
    donors: Mapping[int, int]
    """Donor id, as `Run.donor` has it → number of the request that published it."""
    ttft_ms: float | None = None
    queue_ms: float | None = None
    generated: int | None = None
    finish_reason: str | None = None
    text: str | None = None

    def to_json(self, policy: str) -> dict[str, Any]:
        """One line of requests.jsonl."""
        plan = self.plan
        return {
            "policy": policy,
            "request": self.request,
            "session": self.session,
            "prompt_tokens": len(plan.tokens),
            "exact": plan.num_exact,
            "shifted": plan.num_shifted,
            "runs": [
                {
                    "target": run.target,
                    "length": run.length,
                    "class": run.token_class.name.lower(),
                    "donor_request": self.donors.get(run.donor),
                    "donor_start": run.donor_start,
                    "delta": run.delta,
                }
                for run in plan.runs
            ],
            "recomputed": plan.recomputed_by_reason(),
            "ttft_ms": self.ttft_ms,
            "queue_ms": self.queue_ms,
            "generated": self.generated,
            "finish_reason": self.finish_reason,
            "text": self.text,
        }


@dataclass(kw_only=True)
class PolicyTally:
    """Sums over the requests of one policy."""

    requests: int = 0
    failed: list[str] = field(default_factory=list)
    """Why each request that was not served failed, with its number."""
    prompt_tokens: int = 0
    exact_tokens: int = 0
    shifted_tokens: int = 0
    runs: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    ttft_ms: list[float] = field(default_factory=list)
    generated_tokens: int | None = None
    wall_s: float = 0.0
    pool_tokens: int | None = None
    """Size of the latent pool; None: unbounded."""

    def fail(self, request: int, session: str, reason: str) -> None:
        self.failed.append(f"request {request} (session {session}): {reason}")

    def add(self, record: RequestRecord) -> None:
        plan = record.plan
        self.requests += 1
        self.prompt_tokens += len(plan.tokens)
        self.exact_tokens += plan.num_exact
        self.shifted_tokens += plan.num_shifted
        self.runs += len(plan.runs)
        self.reasons.update(plan.recomputed_by_reason())
        if record.ttft_ms is not None:
            self.ttft_ms.append(record.ttft_ms)
        if record.generated is not None:
            self.generated_tokens = (self.generated_tokens or 0) + record.generated

    def to_json(self) -> dict[str, Any]:
        """Figures of one policy: shares are fractions of prompt tokens, times are null where not measured."""
        total, served = self.prompt_tokens, self.exact_tokens + self.shifted_tokens

        def share(tokens: int) -> float | None:
            return round(tokens / total, 6) if total else None

        def ttft(measure: Any) -> float | None:
            return round(float(measure(np.asarray(self.ttft_ms))), 3) if self.ttft_ms else None

        return {
            "requests": self.requests,
            "failed": len(self.failed),
            "prompt_tokens": total,
            "exact": share(self.exact_tokens),
            "shifted": share(self.shifted_tokens),
            "recomputed": share(total - served),
            "recomputed_by_reason": dict(self.reasons.most_common()),
            "runs": self.runs,
            "mean_run_length": round(served / self.runs, 2) if self.runs else None,
            "ttft_ms_mean": ttft(np.mean),
            "ttft_ms_p50": ttft(np.median),
            "ttft_ms_p95": ttft(lambda values: np.percentile(values, 95)),
            "generated_tokens": self.generated_tokens,
            "pool_tokens": self.pool_tokens,
            "wall_s": round(self.wall_s, 4),
            "prompt_tokens_per_s": round(total / self.wall_s, 1) if self.wall_s else None,
        }
