"""What a finished request looks like to its caller. No jax: replay reports and tests read these without a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from irminsul_jax.cache.plan import Plan

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Where the tokens of one request came from and how long it took. `None` means not measured, never zero."""

    prompt_tokens: int
    exact_tokens: int
    """Prompt tokens served from pure rows of an exact prefix (bit-exact reuse)."""
    shifted_tokens: int
    """Prompt tokens served from rows computed elsewhere (approximate from layer 1 upward)."""
    recomputed_tokens: int
    recomputed_by_reason: dict[str, int]
    """Recomputed prompt tokens by reason (`irminsul_jax.cache.plan.Reason`, lower case)."""
    generated_tokens: int
    queue_ms: float | None
    """From submission to the start of planning."""
    ttft_ms: float | None
    """From the start of planning to the first generated token on the host; add `queue_ms` for the caller's view."""
    total_ms: float | None
    """From submission to the last token."""


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Natural-log probabilities at one generated position, before temperature and filters."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The `SamplingParams.logprobs` most likely tokens, best first."""


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    """Generated tokens, the stop token included when it is a token of the model's end-of-sequence set."""
    text: str | None
    """Decoded text up to, not including, a stop string; None for a checkpoint without tokenizer."""
    finish_reason: FinishReason
    usage: Usage
    plan: Plan | None
    """How the prompt was served; None if the request ended before it was planned."""
    donor_id: int | None
    """What later plans call this request in `Run.donor`; None if it published nothing."""
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None

    @property
    def num_cached_tokens(self) -> int:
        return self.usage.exact_tokens + self.usage.shifted_tokens
