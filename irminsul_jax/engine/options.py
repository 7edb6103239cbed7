"""What a user may set about serving. No jax, so that the command line can name the options without loading it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from irminsul_jax.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of an `Engine`. Those marked *compiles* change the compiled programs."""

    max_num_seqs: int = 8
    """Requests that decode together (compiles). Decoding always runs this many rows, idle ones included, so that a
    request's tokens do not depend on its company."""
    max_model_len: int | None = None
    """Longest prompt plus output; None for the model's context."""
    cache_dtype: Literal["float32", "bfloat16", "float8_e4m3"] | None = None
    """Of the latent pool (compiles); None for the parameters' dtype. `float8_e4m3` keeps latents in float8 with one scale
    per token and layer, and rotary keys in the parameters' dtype: little more than half the memory of bfloat16."""
    attention_form: Literal["auto", "absorbed", "expanded"] = "auto"
    """Of prefill (compiles). `auto` takes the cheaper one by number of new tokens; pinning one makes prefix hits
    bit-identical to cold runs in float32 on the CPU (hidden size 128 and above)."""
    prefill_chunk: int = 512
    """Most new tokens computed at once (compiles); bounds the memory of prefill."""
    decode_block: int = 16
    """Decode steps per device call (compiles): stop strings and new requests are looked at in between."""
    seed: int = 0
    """Seeds the requests that bring no seed of their own."""
    special_tokens_in_text: Literal["text", "refuse", "parse"] = "text"
    """What control tokens written inside chat messages are: plain text, an error, or the token."""
    compile_cache: Path | bool = True
    """Persistent compilation cache: True for the default directory, False for none, or a directory. A directory that
    was configured in jax already is left as it is."""

    def __post_init__(self) -> None:
        for name, low, high in (("max_num_seqs", 1, 4096), ("decode_block", 1, 4096), ("prefill_chunk", 64, 65536)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"{name}={value} must lie in [{low}, {high}]")
        if self.prefill_chunk & (self.prefill_chunk - 1):
            raise ConfigError(f"prefill_chunk={self.prefill_chunk} must be a power of two")
        if self.max_model_len is not None and self.max_model_len < 1:
            raise ConfigError(f"max_model_len={self.max_model_len} must be at least 1")
        for name, allowed in (
            ("cache_dtype", (None, "float32", "bfloat16", "float8_e4m3")),
            ("attention_form", ("auto", "absorbed", "expanded")),
            ("special_tokens_in_text", ("text", "refuse", "parse")),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r} is unknown; choose one of {allowed}")


def cache_directory() -> Path:
    """Where made checkpoints and compiled programs are kept: `$IRMINSUL_CACHE`, else `~/.cache/irminsul-jax`."""
    return Path(os.environ.get("IRMINSUL_CACHE") or Path.home() / ".cache" / "irminsul-jax")
