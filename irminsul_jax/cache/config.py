"""What a user says about the cache (`CacheConfig`) and whose rows a request may see (`Namespace`)."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

import xxhash

from irminsul_jax.errors import ConfigError

POLICIES = ("none", "prefix", "block-prefix", "cdc", "cdc+s1", "window256", "anchor")
"""Matchers by name. `none` reuses nothing; `prefix` and `block-prefix` reuse exact prefixes (by token, by 64 tokens);
the others add shifted content: `cdc` in Gear chunks, `cdc+s1` with fixed 128-token windows as fallback, `window256` in
fixed 256-token windows, `anchor` wherever 32 tokens agree, extended token by token."""

DEEPEST = 254
"""Largest depth that a row can carry (uint8, one value spared for arithmetic)."""


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """How prompts are matched against earlier ones.

    Raises `ConfigError` for an unknown policy or a value out of range.
    """

    policy: str = "anchor"
    """One of `POLICIES`."""
    capacity_tokens: int | None = None
    """Rows that the pool holds; None: unbounded for planning, the engine's own choice for serving."""
    min_run: int = 32
    """Content runs shorter than this are recomputed (tokens)."""
    max_depth: int | None = None
    """Most generations of shifted context that a served row may stand for; 0 allows exact reuse alone."""
    exact_only: bool = False
    """Reuse pure rows in their own left context alone."""
    seam: int = 0
    """Recompute the first `seam` tokens of every content run."""

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            close = difflib.get_close_matches(self.policy, POLICIES, n=1, cutoff=0.4)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ConfigError(f"policy={self.policy!r} is unknown: {hint}choose one of {', '.join(POLICIES)}")
        for name, least in (("min_run", 1), ("seam", 0), ("max_depth", 0), ("capacity_tokens", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name}={value} must be at least {least}")
        if self.max_depth is not None and self.max_depth > DEEPEST:
            raise ConfigError(f"max_depth={self.max_depth} must be at most {DEEPEST}; None means no limit")


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """Requests share rows only inside one namespace. Namespaces are compared field by field, never by hash."""

    model: str
    """Fingerprint of weights, dtype and rotary parameters."""
    adapter: str = ""
    policy: str = ""
    """Family of the policy where its rows must not mix with those of others."""
    salt: str = ""
    """Tenant. Nothing, not even a reason for a miss, crosses from one salt to another."""

    @property
    def key(self) -> bytes:
        """16 bytes, the same in every process: xxh3_128 over the length-prefixed UTF-8 fields (so that an adapter's
        name that equals another tenant's salt gives another key)."""
        digest = xxhash.xxh3_128()
        for field in (self.model, self.adapter, self.policy, self.salt):
            encoded = field.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "little"))
            digest.update(encoded)
        return digest.digest()
