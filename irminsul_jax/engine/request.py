"""One request on its way through the engine: what was asked, what it holds, what it has produced."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from irminsul_jax.cache import Namespace, Plan, Reservation
from irminsul_jax.engine.outputs import FinishReason, RequestOutput, TokenLogprobs, Usage
from irminsul_jax.errors import RequestError
from irminsul_jax.sampling_params import SamplingParams
from irminsul_jax.text.detokenize import Detokenizer
from irminsul_jax.text.tokenizer import Tokenizer

Prompt = str | Mapping[str, Any]
"""Text, or `{"prompt": text}` or `{"prompt_token_ids": ids}`, with an optional `"cache_salt"`."""

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


@dataclass(kw_only=True, eq=False)
class Request:
    """Mutable state of one request; only the engine's owner thread touches it after submission."""

    id: str
    prompt: np.ndarray
    sampling: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    namespace: Namespace
    tokenizer: Tokenizer | None
    submitted_at: float = field(default_factory=time.perf_counter)
    planned_at: float | None = None
    first_token_at: float | None = None
    attempts: int = 0
    cancelled: bool = False
    plan: Plan | None = None
    reservation: Reservation | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    detokenizer: Detokenizer | None = None
    donor_id: int | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None

    def restart(self) -> None:
        """Back to the state of a waiting request. The same seed will give the same tokens again."""
        self.plan = self.reservation = self.donor_id = None
        self.planned_at = self.first_token_at = None
        self.token_ids, self.logprobs = [], []
        stop, min_tokens = self.sampling.stop, self.sampling.min_tokens
        self.detokenizer = Detokenizer(self.tokenizer, stop, min_tokens) if self.tokenizer is not None else None

    def take(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """Appends one generated token and notices whether the request ends with it."""
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        self.token_ids.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        count = len(self.token_ids)
        if token in self.stop_ids and count >= self.sampling.min_tokens:
            self.finish_reason = "stop"
        elif count >= self.sampling.max_tokens:
            self.finish_reason = "length"
        if self.detokenizer is not None and not (self.finish_reason == "stop" and token in self.eos_ids):
            self.detokenizer.push([token])
            if self.detokenizer.stopped is not None:
                self.finish_reason = "stop"

    def output(self) -> RequestOutput:
        """The finished request as its caller sees it."""
        now = time.perf_counter()
        text = None
        if self.detokenizer is not None:
            self.detokenizer.finish()
            text = self.detokenizer.text
        exact = self.plan.num_exact if self.plan else 0
        shifted = self.plan.num_shifted if self.plan else 0
        usage = Usage(
            prompt_tokens=len(self.prompt),
            exact_tokens=exact,
            shifted_tokens=shifted,
            recomputed_tokens=len(self.prompt) - exact - shifted if self.plan else 0,
            recomputed_by_reason=self.plan.recomputed_by_reason() if self.plan else {},
            generated_tokens=len(self.token_ids),
            queue_ms=_ms(self.submitted_at, self.planned_at),
            ttft_ms=_ms(self.planned_at, self.first_token_at),
            total_ms=_ms(self.submitted_at, now),
        )
        return RequestOutput(
            request_id=self.id,
            prompt_token_ids=self.prompt.tolist(),
            token_ids=list(self.token_ids),
            text=text,
            finish_reason=self.finish_reason or "error",
            usage=usage,
            plan=self.plan,
            donor_id=self.donor_id,
            logprobs=self.logprobs if self.sampling.logprobs is not None else None,
            error=self.error,
        )


def _ms(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else (end - start) * 1e3


def parse_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> tuple[np.ndarray, str]:
    """`(token ids int32, cache salt)` of a prompt as users write it. Raises `RequestError` or `TokenizerError`."""
    if isinstance(prompt, str):
        prompt = {"prompt": prompt}
    if not isinstance(prompt, Mapping):
        raise RequestError(
            f"a prompt is a text or a dict with one of {', '.join(_PROMPT_KEYS[:2])}, not {type(prompt).__name__}; "
            'token ids go into {"prompt_token_ids": [...]}'
        )
    if unknown := sorted(set(prompt) - set(_PROMPT_KEYS)):
        raise RequestError(f"unknown prompt keys {', '.join(map(repr, unknown))}; known: {', '.join(_PROMPT_KEYS)}")
    if ("prompt" in prompt) == ("prompt_token_ids" in prompt):
        raise RequestError('a prompt has either "prompt" or "prompt_token_ids"')
    salt = prompt.get("cache_salt") or ""
    if not isinstance(salt, str):
        raise RequestError(f'"cache_salt" must be a text, not {type(salt).__name__}')
    if "prompt_token_ids" in prompt:
        return _as_ids(prompt["prompt_token_ids"]), salt
    if not isinstance(prompt["prompt"], str):
        raise RequestError(f'"prompt" must be a text, not {type(prompt["prompt"]).__name__}')
    if tokenizer is None:
        raise RequestError(
            'this checkpoint has no tokenizer.json, so text cannot be encoded; pass {"prompt_token_ids": [...]}, or put a '
            "tokenizer.json into the Hugging Face directory and convert it again"
        )
    return tokenizer.encode(prompt["prompt"]), salt


def _as_ids(ids: Any) -> np.ndarray:
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise RequestError('"prompt_token_ids" must be a flat list of integers')
    if array.size and (array.max() >= 2**31 or array.min() < 0):
        raise RequestError('"prompt_token_ids" holds ids that are negative or above 2**31')
    return array.astype(np.int32)
