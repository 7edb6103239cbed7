"""Pure functions for users who write their own loop: pool, prefill, decode, generate.

Nothing here keeps state. Every function takes the pool and returns it; put it into a `jax.jit` of your own with
`donate_argnames="pool"`, else each call copies the pool. Static: `config`, `sampling`, `form`. A call compiles anew for
each new shape: number of query tokens (padded to `QUERY_BUCKETS`), table size (`pallas_kernels.fragments.TABLE_BUCKETS`),
batch size, pool size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float32, Int, Int32

from irminsul_jax.config import ModelConfig
from irminsul_jax.errors import ConfigError, RequestError
from irminsul_jax.model.forward import forward, logits
from irminsul_jax.model.params import Params
from irminsul_jax.rope import inv_freq
from irminsul_jax.sampling import Sampled, greedy, with_logprobs
from pallas_kernels import (
    PAGE_SIZE,
    AnyArray,
    FragmentTable,
    LatentPool,
    PoolLayout,
    StreamSpec,
    fragments_of,
    pack_fragments,
)
from pallas_kernels.pool import LANES, stored_width

QUERY_BUCKETS = (64, 128, 256, 512)
"""Padded numbers of query tokens; beyond the last, multiples of it. None is below 64: with fewer rows XLA's matrix
products on the CPU round differently, and a prefix hit would not be bit-identical to a cold run. (Tested for hidden sizes
128 and 512; at 64 the smallest bucket still rounds differently from the others.)"""

PrefillForm = Literal["auto", "absorbed", "expanded"]


@no_type_check  # tree transformations put anything into the leaves
@struct.dataclass
class Batch:
    """Prompts to prefill, token by token: `tokens[i]` stands at `positions[i]` of sequence `sequence[i]`; padding has
    position −1. `last[b]` is the index of the token whose logits sequence b wants, `lengths[b]` its prompt length."""

    tokens: Int32[AnyArray, "T"]
    positions: Int32[AnyArray, "T"]
    sequence: Int32[AnyArray, "T"]
    last: Int32[AnyArray, "B"]
    lengths: Int32[AnyArray, "B"]
    table: FragmentTable


@no_type_check  # tree transformations put anything into the leaves
@struct.dataclass
class DecodeState:
    """Where each row of a batch stands between two decode steps."""

    tokens: Int32[AnyArray, "B"]
    """The newest token: generated, but its row is not in the pool yet."""
    positions: Int32[AnyArray, "B"]
    """Its position."""
    steps: Int32[AnyArray, "B"]
    """Tokens generated so far, this one included."""
    active: Bool[AnyArray, "B"]


@no_type_check  # tree transformations put anything into the leaves
@struct.dataclass
class GenerateOutput:
    tokens: Int32[Array, "B N"]
    """Generated tokens; −1 behind the end of a row."""
    lengths: Int32[Array, "B"]
    """Number of generated tokens, the stop token included."""
    logprobs: Float32[Array, "B N"]
    """Natural-log probability of each generated token under the raw logits; 0 behind the end."""
    pool: LatentPool


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How `generate` goes on: `sampler(logits [B, V], key) -> tokens [B]`, a length, and the tokens that end a row.
    Hashable, static: another sampler object or length is another compilation."""

    max_tokens: int
    sampler: Callable[[jax.Array, jax.Array], jax.Array] = greedy
    stop_token_ids: tuple[int, ...] = ()


def stream_specs(
    config: ModelConfig, dtype: DTypeLike, *, latent_dtype: DTypeLike | None = None
) -> tuple[StreamSpec, ...]:
    """The two streams of an MLA pool. `latent_dtype` (default: `dtype`) is that of the latents; `float8_e4m3fn` keeps
    them with one scale per row. Rotary keys are always `dtype`: they are turned when read, and a ninth of a row at
    DeepSeek's sizes.

    Raises `ConfigError` for other types of 8 bits."""
    dtype, D = jnp.dtype(dtype), config.qk_rope_head_dim
    latent = dtype if latent_dtype is None else jnp.dtype(latent_dtype)
    if dtype.itemsize == 1:
        raise ConfigError(f"dtype {dtype} is too narrow for rotary keys; give it as latent_dtype, beside a wider dtype")
    if latent.itemsize == 1 and latent != jnp.float8_e4m3fn:
        raise ConfigError(f"latent_dtype {latent} has no scales in the pool; of the 8-bit types choose float8_e4m3fn")
    return (
        StreamSpec(name="c_kv", width=config.kv_lora_rank, dtype=latent),
        StreamSpec(name="k_r", width=D, dtype=dtype, rotary=(0, D)),
    )


def token_bytes(config: ModelConfig, specs: tuple[StreamSpec, ...], layout: PoolLayout) -> int:
    """Memory that one token takes in all layers of a pool: its rows with their padding, and a float32 for each scale."""
    rows = sum(stored_width(s, layout) * s.dtype.itemsize + 4 * s.scaled for s in specs)
    return config.num_layers * rows


def pool_layout(config: ModelConfig, device: jax.Device | jax.sharding.Sharding | None = None) -> PoolLayout:
    """The layout that the kernels of a device (default: the first) read: on a TPU `lanes`, if the model's widths fit
    whole vector registers, else `plain`."""
    one = next(iter(device.device_set)) if isinstance(device, jax.sharding.Sharding) else device or jax.devices()[0]
    fits = config.kv_lora_rank % LANES == 0 and config.qk_rope_head_dim <= LANES
    return "lanes" if one.platform == "tpu" and fits else "plain"


def init_pool(
    config: ModelConfig,
    num_pages: int,
    dtype: DTypeLike = jnp.bfloat16,
    device: jax.Device | jax.sharding.Sharding | None = None,
    *,
    latent_dtype: DTypeLike | None = None,
) -> LatentPool:
    """An empty pool. `num_pages` pages of 64 tokens, one of which is scratch; `2 * (R + D) * L` bytes a token in bf16,
    `(R + 4 + 2 * D) * L` with `latent_dtype=jnp.float8_e4m3fn` (see `stream_specs`). On a TPU the layout is the one that
    the kernels there read, with keys padded to 128 (see `pool_layout`).

    It is committed to `device` (default: the first), as the pools that jitted functions return are: an uncommitted one
    would make the second call compile again."""
    if num_pages < 2:
        raise RequestError(f"num_pages={num_pages}: a pool needs at least 2 pages, one of them is scratch")
    specs = stream_specs(config, dtype, latent_dtype=latent_dtype)
    layout = pool_layout(config, device)
    pool = LatentPool.create(specs, num_layers=config.num_layers, num_pages=num_pages, layout=layout)
    return jax.device_put(pool, device or jax.devices()[0])


def query_bucket(num_tokens: int) -> int:
    """The padded number of query tokens."""
    top = QUERY_BUCKETS[-1]
    return next((b for b in QUERY_BUCKETS if num_tokens <= b), -(-num_tokens // top) * top)


def make_batch(
    prompts: Sequence[Sequence[int] | np.ndarray], config: ModelConfig, *, max_tokens: int, first_page: int = 1
) -> Batch:
    """A batch of whole prompts, each in fresh consecutive pages from `first_page` on, with room for `max_tokens`.

    Raises `RequestError` for an empty prompt, a token outside the vocabulary, or a length beyond the model's context."""
    tokens, positions, sequence, fragments = [], [], [], []
    page = first_page
    for b, prompt in enumerate(prompts):
        ids, length = np.asarray(prompt, np.int32), len(prompt) + max_tokens
        check_prompt(ids, config.vocab_size, length, config.max_position)
        rows = np.arange(page * PAGE_SIZE, page * PAGE_SIZE + length, dtype=np.int32)
        fragments.append(fragments_of(rows, np.zeros(length, np.int32)))
        page += -(-length // PAGE_SIZE)
        tokens.append(ids)
        positions.append(np.arange(len(ids), dtype=np.int32))
        sequence.append(np.full(len(ids), b, np.int32))
    lengths = np.array([len(t) for t in tokens], np.int32)
    padding = query_bucket(int(lengths.sum())) - int(lengths.sum())

    def joined(parts: list[np.ndarray], fill: int) -> np.ndarray:
        return np.concatenate([*parts, np.full(padding, fill, np.int32)])

    return Batch(
        tokens=joined(tokens, 0),
        positions=joined(positions, -1),
        sequence=joined(sequence, 0),
        last=(np.cumsum(lengths) - 1).astype(np.int32),
        lengths=lengths,
        table=pack_fragments(fragments, inv_freq(config.rope, config.qk_rope_head_dim)),
    )


def check_prompt(ids: np.ndarray, vocab_size: int, length: int, max_position: int) -> None:
    """Raises `RequestError` for a prompt that no pool could serve. `length` counts the tokens to generate too."""
    if not len(ids):
        raise RequestError("the prompt is empty; it needs at least one token")
    if ids.min() < 0 or ids.max() >= vocab_size:
        bad = int(ids[(ids < 0) | (ids >= vocab_size)][0])
        raise RequestError(f"token id {bad} is outside the model's vocabulary of {vocab_size}; check the tokenizer")
    if length > max_position:
        raise RequestError(
            f"{len(ids)} prompt tokens and {length - len(ids)} to generate are {length}, over the context of "
            f"{max_position}; shorten the prompt or lower max_tokens"
        )


def pick_form(config: ModelConfig, num_tokens: int) -> Literal["absorbed", "expanded"]:
    """The cheaper attention form for this many new tokens, by operation count (`benchmarks/attention_forms.py` measures
    where the two meet): expanding costs `2 R (N + W)` per key and head once and saves `2 (2 R − N − W)` per query."""
    R, per_head = config.kv_lora_rank, config.qk_nope_head_dim + config.v_head_dim
    saved = 2 * R - per_head
    return "expanded" if saved > 0 and num_tokens * saved >= R * per_head else "absorbed"


def prefill(
    params: Params, config: ModelConfig, pool: LatentPool, batch: Batch, *, form: PrefillForm = "auto"
) -> tuple[Float32[Array, "B V"], LatentPool]:
    """Computes the batch's tokens, writes their rows, and returns the logits after each prompt's last token."""
    chosen = pick_form(config, batch.tokens.shape[0]) if form == "auto" else form
    hidden, pool = forward(params, config, pool, batch.tokens, batch.positions, batch.sequence, batch.table, chosen)
    return logits(params, config, hidden[batch.last]), pool


def decode_step(
    params: Params,
    config: ModelConfig,
    pool: LatentPool,
    tokens: Int[Array, "B"],
    positions: Int[Array, "B"],
    table: FragmentTable,
) -> tuple[Float32[Array, "B V"], LatentPool]:
    """One token per sequence: writes its row at `positions` and returns the logits after it. Position −1 is an idle row."""
    sequence = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    hidden, pool = forward(params, config, pool, tokens, positions, sequence, table, "decode")
    return logits(params, config, hidden), pool


def decode_loop(
    params: Params,
    config: ModelConfig,
    pool: LatentPool,
    state: DecodeState,
    table: FragmentTable,
    *,
    num_steps: int,
    sample: Callable[[jax.Array, jax.Array], Sampled],
    finished: Callable[[jax.Array, jax.Array], jax.Array],
) -> tuple[Sampled, DecodeState, LatentPool]:
    """Up to `num_steps` (static) decode steps in one device loop, ending early when no row is active.

    `sample(logits, steps)` chooses tokens, `finished(tokens, steps)` says which rows end with them. The returned
    `Sampled` has a step axis in front; tokens are −1 where a row was idle."""
    B, V = state.tokens.shape[0], config.vocab_size
    one = jax.eval_shape(sample, jax.ShapeDtypeStruct((B, V), jnp.float32), state.steps)
    record = jax.tree.map(lambda leaf: jnp.zeros((num_steps, *leaf.shape), leaf.dtype), one)
    record = dataclasses.replace(record, tokens=record.tokens - 1)

    def body(carry):
        i, record, state, pool = carry
        positions = jnp.where(state.active, state.positions, -1)
        scores, pool = decode_step(params, config, pool, state.tokens, positions, table)
        sampled = sample(scores, state.steps)
        sampled = dataclasses.replace(sampled, tokens=jnp.where(state.active, sampled.tokens, -1))
        record = jax.tree.map(lambda all_steps, now: all_steps.at[i].set(now), record, sampled)
        steps = state.steps + state.active
        state = DecodeState(
            tokens=jnp.maximum(sampled.tokens, 0),
            positions=state.positions + state.active,
            steps=steps,
            active=state.active & ~finished(sampled.tokens, steps),
        )
        return i + 1, record, state, pool

    def go_on(carry):
        return (carry[0] < num_steps) & jnp.any(carry[2].active)

    _, record, state, pool = lax.while_loop(go_on, body, (jnp.int32(0), record, state, pool))
    return record, state, pool


def generate(
    params: Params, config: ModelConfig, pool: LatentPool, batch: Batch, sampling: Sampling, key: jax.Array
) -> GenerateOutput:
    """Prefill and decode of a batch, all on the device. Step t samples with `fold_in(key, t)`.

    Usage: `jax.jit(generate, static_argnames=("config", "sampling"), donate_argnames="pool")`; go on with the returned
    pool, the given one is gone. The table of `batch` must have room for `sampling.max_tokens` (see `make_batch`)."""
    stops = jnp.asarray(sampling.stop_token_ids or (-2,), jnp.int32)

    def sample(scores: jax.Array, steps: jax.Array) -> Sampled:
        # Rows never start late, so the largest count is the step of every active row.
        return with_logprobs(scores, sampling.sampler(scores, jax.random.fold_in(key, jnp.max(steps))), 0)

    def finished(tokens: jax.Array, steps: jax.Array) -> jax.Array:
        return jnp.any(tokens[:, None] == stops, axis=-1) | (steps >= sampling.max_tokens)

    scores, pool = prefill(params, config, pool, batch)
    B = batch.last.shape[0]
    first = sample(scores, jnp.zeros(B, jnp.int32))
    ones = jnp.ones(B, jnp.int32)
    state = DecodeState(
        tokens=first.tokens, positions=jnp.asarray(batch.lengths), steps=ones, active=~finished(first.tokens, ones)
    )
    rest, state, pool = decode_loop(
        params, config, pool, state, batch.table, num_steps=sampling.max_tokens - 1, sample=sample, finished=finished
    )
    tokens = jnp.concatenate([first.tokens[None], rest.tokens]).T
    logprobs = jnp.concatenate([first.logprobs[None], rest.logprobs]).T
    return GenerateOutput(
        tokens=tokens, lengths=jnp.asarray(state.steps), logprobs=jnp.where(tokens >= 0, logprobs, 0.0), pool=pool
    )
