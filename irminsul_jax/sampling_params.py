"""How one request wants its tokens drawn, with vLLM's names, and where defaults come from. No jax.

Precedence: what the request sets > the checkpoint's `generation_config.json` > the defaults of `SamplingParams`.
"""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from irminsul_jax.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from irminsul_jax.text.tokenizer import Tokenizer


class SamplingFields(TypedDict, total=False):
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    logprobs: int | None


@dataclass(frozen=True, init=False)
class SamplingParams:
    """All arguments are keywords; a wrong value or an unknown name raises `RequestError` that says what fits."""

    temperature: float = 1.0
    """Logits are divided by it; 0 takes the most likely token (greedy)."""
    top_p: float = 1.0
    """Keep the most likely tokens that together reach this probability, in (0, 1]."""
    top_k: int = 0
    """Keep this many of the most likely tokens; 0 (or -1) keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the most likely one, in [0, 1]."""
    seed: int | None = None
    """Same seed, same tokens, whatever else is in the batch; None draws one."""
    stop: tuple[str, ...] = ()
    """Texts that end the generation; the output text ends before them."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the generation, beside the model's end-of-sequence tokens."""
    max_tokens: int = 16
    """Generate at most this many tokens, the prompt not counted."""
    min_tokens: int = 0
    """Do not end on an end-of-sequence token, stop token or stop string within this many tokens."""
    ignore_eos: bool = False
    """Go on after end-of-sequence tokens (for measurements)."""
    logprobs: int | None = None
    """Return the log probability of each token and of this many most likely ones; None returns none."""

    explicit: frozenset[str] = field(default=frozenset(), init=False, repr=False, compare=False)
    """Names of the fields that were set, rather than left at a default."""

    def __init__(self, **values: Unpack[SamplingFields]) -> None:
        given: Mapping[str, Any] = values
        for name in given:
            if name not in _CHECKS:
                raise RequestError(_unknown(name))
        for name, value in given.items():
            self._set(name, _CHECKS[name](name, value))
        self._set("explicit", frozenset(given))
        self._check_together()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_together(self) -> None:
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; raise max_tokens or lower min_tokens"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def with_defaults(self, defaults: SamplingParams) -> SamplingParams:
        """This request, with `defaults` in the fields that it did not set. `explicit` stays the request's own."""
        merged = SamplingParams.__new__(SamplingParams)
        for name in _CHECKS:
            merged._set(name, getattr(self if name in self.explicit else defaults, name))
        merged._set("explicit", self.explicit)
        merged._check_together()
        return merged

    @classmethod
    def from_generation_config(
        cls, generation_config: Mapping[str, Any], **overrides: Unpack[SamplingFields]
    ) -> SamplingParams:
        """Defaults of a checkpoint from its generation_config.json (`{}` if it has none), under `overrides`.

        `do_sample: false` is temperature 0, `max_new_tokens` is `max_tokens`; keys that do not sample are left alone.
        Raises `ConfigError` for a value that is out of range in the file, `RequestError` for one in `overrides`.
        """
        values: dict[str, Any] = {
            ours: generation_config[theirs]
            for theirs, ours in _GENERATION_CONFIG_KEYS.items()
            if generation_config.get(theirs) is not None
        }
        if generation_config.get("do_sample") is False:
            values["temperature"] = 0.0
        try:
            defaults = cls(**values)
        except RequestError as e:
            raise ConfigError(f"generation_config.json: {e}; correct or remove the entry") from None
        return cls(**overrides).with_defaults(defaults)


def eos_token_ids(
    generation_config: Mapping[str, Any], config_json: Mapping[str, Any], tokenizer: Tokenizer | None
) -> tuple[int, ...]:
    """The model's end-of-sequence tokens: those of generation_config.json, config.json and the tokenizer together, in
    this order (a chat model often ends turns with another token than its base model)."""
    found: list[int] = []
    for file, source in (("generation_config.json", generation_config), ("config.json", config_json)):
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
        for token_id in ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
                raise ConfigError(
                    f"{file}: eos_token_id must be token ids ≥ 0, not {token_id!r:.80}; correct the entry"
                )
        found += ids
    return tuple(dict.fromkeys([*found, *(tokenizer.eos_ids if tokenizer is not None else ())]))


# --- checks: (field name, value) → the value as a plain Python type -----------------------------------------------------

Check = Callable[[str, Any], Any]


def _number(low: float, high: float, allowed: str, *, above_low: bool = False) -> Check:
    def check(name: str, value: Any) -> float:
        plain = _unwrapped(value)
        if isinstance(plain, bool) or not isinstance(plain, numbers.Real):
            raise RequestError(f"{name} must be a number {allowed}, not {value!r:.80}")
        number = float(plain)
        if not math.isfinite(number) or not low <= number <= high or (above_low and number == low):
            raise RequestError(f"{name}={value!s:.80} is out of range: it must be {allowed}")
        return number

    return check


def _integer(low: int, high: int | None, allowed: str) -> Check:
    def check(name: str, value: Any) -> int:
        plain = _unwrapped(value)
        if isinstance(plain, bool) or not isinstance(plain, numbers.Integral):
            raise RequestError(f"{name} must be an integer {allowed}, not {value!r:.80}")
        number = int(plain)
        if number < low or (high is not None and number > high):
            raise RequestError(f"{name}={value!s:.80} is out of range: it must be {allowed}")
        return number

    return check


def _optional(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _top_k(name: str, value: Any) -> int:
    return max(0, _integer(-1, None, "≥ 1, or 0 or -1 to keep all tokens")(name, value))


def _flag(name: str, value: Any) -> bool:
    plain = _unwrapped(value)
    if not isinstance(plain, bool):
        raise RequestError(f"{name} must be True or False, not {value!r:.80}")
    return plain


def _stop(name: str, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else () if value is None else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f"{name} must be a non-empty string or a list of them, not {value!r:.80}")
    return tuple(texts)


def _stop_token_ids(name: str, value: Any) -> tuple[int, ...]:
    ids = () if value is None else _unwrapped(value)
    if not isinstance(ids, Sequence) or isinstance(ids, str):
        raise RequestError(f"{name} must be a list of token ids, not {value!r:.80}")
    check = _integer(0, None, "≥ 0")
    return tuple(check(f"{name}[{i}]", token_id) for i, token_id in enumerate(ids))


def _unwrapped(value: Any) -> Any:
    """Plain Python value of a numpy (or other array) scalar; everything else as it is."""
    return value.tolist() if hasattr(value, "dtype") and hasattr(value, "tolist") else value


_CHECKS: dict[str, Check] = {
    "temperature": _number(0.0, math.inf, "≥ 0 (0 is greedy)"),
    "top_p": _number(0.0, 1.0, "in (0, 1]", above_low=True),
    "top_k": _top_k,
    "min_p": _number(0.0, 1.0, "in [0, 1]"),
    "seed": _optional(_integer(0, 2**64 - 1, "from 0 to 2**64 - 1, or None")),
    "stop": _stop,
    "stop_token_ids": _stop_token_ids,
    "max_tokens": _integer(1, None, "≥ 1"),
    "min_tokens": _integer(0, None, "≥ 0"),
    "ignore_eos": _flag,
    "logprobs": _optional(_integer(0, None, "≥ 0, or None")),
}

_GENERATION_CONFIG_KEYS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
}

# --- unknown names ------------------------------------------------------------------------------------------------------

_SEVERAL = "send the prompt several times, with different seeds"
_NO_PENALTY = "penalties are not supported; leave it out"
_NO_BEAMS = "beam search is not supported; leave it out"
_ADVICE = {
    "max_new_tokens": "use max_tokens",
    "max_completion_tokens": "use max_tokens",
    "max_gen_len": "use max_tokens",
    "max_length": "use max_tokens (which does not count the prompt)",
    "min_new_tokens": "use min_tokens",
    "min_length": "use min_tokens (which does not count the prompt)",
    "do_sample": "use temperature: 0 is greedy, above 0 samples",
    "greedy": "use temperature=0",
    "temp": "use temperature",
    "n": _SEVERAL,
    "best_of": _SEVERAL,
    "num_return_sequences": _SEVERAL,
    "num_beams": _NO_BEAMS,
    "use_beam_search": _NO_BEAMS,
    "repetition_penalty": _NO_PENALTY,
    "presence_penalty": _NO_PENALTY,
    "frequency_penalty": _NO_PENALTY,
    "top_n": "use top_k",
    "top_logprobs": "use logprobs",
    "output_scores": "use logprobs",
    "stop_strings": "use stop",
    "stop_sequences": "use stop",
    "stop_words": "use stop",
    "eos_token_id": "use stop_token_ids",
    "random_seed": "use seed",
    "rng_seed": "use seed",
}


def _unknown(name: str) -> str:
    names = [f.name for f in fields(SamplingParams) if f.init]
    if name in _ADVICE:
        return f"SamplingParams has no {name!r}: {_ADVICE[name]}"
    if close := difflib.get_close_matches(name, names, n=1):
        return f"SamplingParams has no {name!r}: did you mean {close[0]!r}?"
    return f"SamplingParams has no {name!r}; it has {', '.join(names)}"
