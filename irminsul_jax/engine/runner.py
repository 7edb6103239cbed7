"""The device side of the engine: parameters, the pool, and the few compiled programs that touch them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from irminsul_jax.config import ModelConfig
from irminsul_jax.engine.options import EngineConfig, cache_directory
from irminsul_jax.engine.outputs import TokenLogprobs
from irminsul_jax.engine.request import Request
from irminsul_jax.functional import (
    QUERY_BUCKETS,
    Batch,
    DecodeState,
    decode_loop,
    init_pool,
    pool_layout,
    prefill,
    query_bucket,
    stream_specs,
    token_bytes,
)
from irminsul_jax.model.params import Params
from irminsul_jax.rope import inv_freq
from irminsul_jax.sampling import Sampled, SamplerState, is_stop, sample_rows
from pallas_kernels import PAGE_SIZE, TABLE_BUCKETS, Fragments, FragmentTable, LatentPool, fragments_of, pack_fragments

_MIN_STOP_IDS = 8
"""Width that the table of stop tokens is padded to, then powers of two."""


@dataclass(kw_only=True, eq=False)
class Slot:
    """One row of the decode batch."""

    request: Request
    fragments: Fragments
    position: int
    """Of the newest token, whose row is not in the pool yet."""


class Runner:
    """Owns the pool. After a failed call the pool is gone (it was donated): call `reset`."""

    def __init__(self, params: Params, config: ModelConfig, options: EngineConfig, num_pages: int):
        self.params, self.config, self.options, self.num_pages = params, config, options, num_pages
        self._inv_freq = inv_freq(config.rope, config.qk_rope_head_dim)
        self.reset()

    def reset(self) -> None:
        """A new, empty pool, on the device of the parameters."""
        dtypes = _cache_dtypes(self.options, self.params)
        self.pool: LatentPool = init_pool(self.config, self.num_pages, device=_device(self.params), **dtypes)

    def prefill(self, request: Request, rows: np.ndarray, shifts: np.ndarray, new: np.ndarray) -> Slot:
        """Computes the tokens at the positions `new` of the request's prompt, in chunks, and samples its first token."""
        fragments = fragments_of(rows, shifts)
        table = pack_fragments([fragments], self._inv_freq)
        for start in range(0, len(new), self.options.prefill_chunk):
            positions = new[start : start + self.options.prefill_chunk]
            scores = self._prefill_chunk(request.prompt[positions], positions, table)
        sampled = jax.device_get(_sample_first(scores, sampler_state([request]), **_statics([request])))
        _take(request, sampled, (0,))
        return Slot(request=request, fragments=fragments, position=len(request.prompt))

    def decode(self, slots: Sequence[Slot | None]) -> None:
        """Up to `decode_block` tokens for each slot; requests notice themselves that they are finished."""
        table = pack_fragments([s.fragments if s is not None else _NO_FRAGMENTS for s in slots], self._inv_freq)
        state = DecodeState(
            tokens=np.array([s.request.token_ids[-1] if s is not None else 0 for s in slots], np.int32),
            positions=np.array([s.position if s is not None else -1 for s in slots], np.int32),
            steps=np.array([len(s.request.token_ids) if s is not None else 0 for s in slots], np.int32),
            active=np.array([s is not None for s in slots]),
        )
        sampler = sampler_state([s.request if s is not None else None for s in slots])
        sampled = self._decode_block(state, table, sampler, **_statics([s.request for s in slots if s is not None]))
        for b, slot in enumerate(slots):
            if slot is None:
                continue
            for step in range(self.options.decode_block):
                if sampled.tokens[step, b] < 0 or slot.request.finish_reason is not None:
                    break
                _take(slot.request, sampled, (step, b))
                slot.position += 1

    def warm_up(self, longest: int) -> None:
        """Compiles what sequences up to `longest` tokens need, on idle rows that write to the scratch page alone."""
        pages = -(-longest // PAGE_SIZE)
        buckets = TABLE_BUCKETS[: 1 + next((i for i, (size, _) in enumerate(TABLE_BUCKETS) if size >= 2 * pages), 99)]
        chunks = sorted({query_bucket(n) for n in (*QUERY_BUCKETS, self.options.prefill_chunk)})
        rows = self.options.max_num_seqs
        idle = np.zeros(rows, np.int32)
        state = DecodeState(tokens=idle, positions=idle - 1, steps=idle, active=idle > 0)
        for bucket in buckets:
            table = pack_fragments([_NO_FRAGMENTS], self._inv_freq, bucket)
            for size in chunks:
                if size > self.options.prefill_chunk:
                    break
                scores = self._prefill_chunk(np.zeros(size, np.int32), np.full(size, -1, np.int32), table)
                if size >= longest:
                    break
            for all_greedy in (True, False):
                _sample_first(scores, sampler_state([None]), all_greedy=all_greedy, num_top=0)
                table = pack_fragments([_NO_FRAGMENTS] * rows, self._inv_freq, bucket)
                self._decode_block(state, table, sampler_state([None] * rows), all_greedy=all_greedy, num_top=0)
        jax.block_until_ready(self.pool.arrays)

    def _prefill_chunk(self, tokens: np.ndarray, positions: np.ndarray, table: FragmentTable) -> jax.Array:
        """Logits `[1, V]` after the last of the given tokens, whose rows are then in the pool."""
        padding = query_bucket(len(tokens)) - len(tokens)
        batch = Batch(
            tokens=np.pad(tokens, (0, padding)),
            positions=np.pad(positions, (0, padding), constant_values=-1),
            sequence=np.zeros(len(tokens) + padding, np.int32),
            last=np.array([len(tokens) - 1], np.int32),
            lengths=positions[-1:] + 1,
            table=table,
        )
        scores, self.pool = _prefill(self.params, self.config, self.pool, batch, form=self.options.attention_form)
        return scores

    def _decode_block(
        self, state: DecodeState, table: FragmentTable, sampler: SamplerState, *, all_greedy: bool, num_top: int
    ) -> Sampled:
        sampled, self.pool = _decode(
            self.params,
            self.config,
            self.pool,
            state,
            table,
            sampler,
            num_steps=self.options.decode_block,
            all_greedy=all_greedy,
            num_top=num_top,
        )
        return jax.device_get(sampled)


def bytes_per_token(params: Params, config: ModelConfig, options: EngineConfig) -> int:
    """Memory that one token takes in the pool of a `Runner` with these arguments."""
    specs = stream_specs(config, **_cache_dtypes(options, params))
    return token_bytes(config, specs, pool_layout(config, _device(params)))


def _cache_dtypes(options: EngineConfig, params: Params) -> dict[str, Any]:
    """`dtype` and `latent_dtype` of the pool. Rotary keys beside float8 latents keep the parameters' dtype, so that they
    are as exact as without: the saving is in the latents, the shift in the keys."""
    if options.cache_dtype == "float8_e4m3":
        return {"dtype": params.embedding.dtype, "latent_dtype": jnp.float8_e4m3fn}
    return {"dtype": jnp.dtype(options.cache_dtype or params.embedding.dtype), "latent_dtype": None}


def _device(params: Params) -> jax.Device:
    return next(iter(params.embedding.sharding.device_set))


_NO_FRAGMENTS = fragments_of(np.zeros(0, np.int32), np.zeros(0, np.int32))


# Compiled programs are shared by all engines of a process.
_prefill = jax.jit(prefill, static_argnames=("config", "form"), donate_argnames="pool")


@partial(jax.jit, static_argnames=("all_greedy", "num_top"))
def _sample_first(scores: jax.Array, sampler: SamplerState, *, all_greedy: bool, num_top: int) -> Sampled:
    return sample_rows(scores, sampler, jnp.zeros(len(scores), jnp.int32), all_greedy=all_greedy, num_top=num_top)


@partial(jax.jit, static_argnames=("config", "num_steps", "all_greedy", "num_top"), donate_argnames="pool")
def _decode(
    params: Params,
    config: ModelConfig,
    pool: LatentPool,
    state: DecodeState,
    table: FragmentTable,
    sampler: SamplerState,
    *,
    num_steps: int,
    all_greedy: bool,
    num_top: int,
) -> tuple[Sampled, LatentPool]:
    def finished(tokens: jax.Array, steps: jax.Array) -> jax.Array:
        stopped = is_stop(tokens, sampler) & (steps >= sampler.min_tokens)
        return stopped | (steps >= sampler.max_tokens)

    sampled, _, pool = decode_loop(
        params,
        config,
        pool,
        state,
        table,
        num_steps=num_steps,
        sample=lambda scores, steps: sample_rows(scores, sampler, steps, all_greedy=all_greedy, num_top=num_top),
        finished=finished,
    )
    return sampled, pool


def num_compilations() -> int:
    """Programs that this process compiled, or took from the persistent cache, for its engines."""
    programs: tuple[Any, ...] = (_prefill, _sample_first, _decode)
    return sum(program._cache_size() for program in programs)


def sampler_state(requests: Sequence[Request | None]) -> SamplerState:
    """Sampling parameters of a batch as arrays; a row without request is greedy and never stops by itself."""
    width = max([_MIN_STOP_IDS, *(len(r.stop_ids) for r in requests if r is not None)])
    stop_ids = np.full((len(requests), 1 << (width - 1).bit_length()), -1, np.int32)
    for b, r in enumerate(requests):
        if r is not None:
            stop_ids[b, : len(r.stop_ids)] = r.stop_ids

    def column(value: Callable[[Request], float | int], idle: float | int, dtype: type) -> np.ndarray:
        return np.array([idle if r is None else value(r) for r in requests], dtype)

    return SamplerState(
        temperature=column(lambda r: r.sampling.temperature, 0, np.float32),
        top_k=column(lambda r: min(r.sampling.top_k, 2**30), 0, np.int32),
        top_p=column(lambda r: r.sampling.top_p, 1, np.float32),
        min_p=column(lambda r: r.sampling.min_p, 0, np.float32),
        seed=np.stack(
            [column(lambda r: r.seed & 0xFFFFFFFF, 0, np.uint32), column(lambda r: r.seed >> 32, 0, np.uint32)], 1
        ),
        stop_ids=stop_ids,
        min_tokens=column(lambda r: r.sampling.min_tokens, 0, np.int32),
        max_tokens=column(lambda r: r.sampling.max_tokens, 2**30, np.int32),
    )


def _statics(requests: Sequence[Request]) -> dict[str, Any]:
    """The parts of sampling that are compiled in: whether anyone draws, and how many top log-probabilities anyone wants
    (rounded up to a power of two)."""
    wanted = max((r.sampling.logprobs or 0 for r in requests), default=0)
    return {
        "all_greedy": all(r.sampling.greedy for r in requests),
        "num_top": 1 << (wanted - 1).bit_length() if wanted else 0,
    }


def _take(request: Request, sampled: Sampled, index: tuple[int, ...]) -> None:
    token, wanted = int(sampled.tokens[index]), request.sampling.logprobs
    if wanted is None:
        request.take(token, None)
        return
    top = zip(sampled.top_ids[index][:wanted].tolist(), sampled.top_logprobs[index][:wanted].tolist(), strict=True)
    request.take(token, TokenLogprobs(token_id=token, logprob=float(sampled.logprobs[index]), top=tuple(top)))


def enable_compile_cache(setting: Path | bool) -> None:
    """Turns on jax's persistent compilation cache, unless the user configured one already."""
    if setting is False or jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    directory = cache_directory() / "compiled" if setting is True else setting
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
