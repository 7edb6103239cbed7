"""The engine: `submit`, `step`, `cancel`, and `generate` and `chat` on top of them.

One thread owns the device: whoever calls `step` (or `generate`, `chat`) holds the engine's lock meanwhile. `submit` and
`cancel` may be called from any thread at any time. One step admits waiting requests while there is room, computes their
prompts and decodes one block of tokens for all that run.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from irminsul_jax.cache import PAGE_SIZE, CacheConfig, LatentCache, Namespace
from irminsul_jax.checkpoint import Checkpoint, load_checkpoint
from irminsul_jax.engine.options import EngineConfig
from irminsul_jax.engine.outputs import RequestOutput
from irminsul_jax.engine.request import Prompt, Request, parse_prompt
from irminsul_jax.engine.runner import Runner, Slot, bytes_per_token, enable_compile_cache, num_compilations
from irminsul_jax.errors import RequestError
from irminsul_jax.functional import check_prompt
from irminsul_jax.sampling_params import SamplingParams, eos_token_ids
from irminsul_jax.text.tokenizer import Tokenizer

_MAX_ATTEMPTS = 2
"""Times that a request is tried when device calls fail, before it is given back with the error."""

_log = logging.getLogger("irminsul_jax")


class Engine:
    """Serves one checkpoint from one latent pool."""

    def __init__(
        self, checkpoint: Checkpoint, *, cache: CacheConfig | None = None, options: EngineConfig | None = None
    ) -> None:
        """Raises `TokenizerError` if the checkpoint's tokenizer has ids that the model does not, and `CheckpointError` if
        its parameters cannot be read."""
        self.checkpoint, self.config = checkpoint, checkpoint.config
        self.cache_config, self.options = cache or CacheConfig(), options or EngineConfig()
        enable_compile_cache(self.options.compile_cache)
        self.tokenizer: Tokenizer | None = None
        if checkpoint.tokenizer_path is not None:
            self.tokenizer = Tokenizer.from_directory(checkpoint.path, vocab_size=self.config.vocab_size)
        self.eos_ids = eos_token_ids(checkpoint.generation_config, checkpoint.hf_config, self.tokenizer)
        self.default_sampling = SamplingParams.from_generation_config(checkpoint.generation_config)
        self.max_model_len = min(self.options.max_model_len or self.config.max_position, self.config.max_position)
        params = checkpoint.params
        num_pages = 1 + -(-self._capacity_tokens() // PAGE_SIZE)
        self._runner = Runner(params, self.config, self.options, num_pages)
        self._cache = LatentCache(self.cache_config, num_pages=num_pages)
        dtypes = [params.embedding.dtype, *(stream.dtype for stream in self._runner.pool.specs)]
        self._model_key = f"{checkpoint.fingerprint} {' '.join(map(str, dtypes))} {self.config.rope}"
        if self.config.shift_refusal and not self.cache_config.exact_only:
            _log.warning("%s", self.config.shift_refusal)
        self._slots: list[Slot | None] = [None] * self.options.max_num_seqs
        self._waiting: deque[Request] = deque()
        self._requests: dict[str, Request] = {}
        self._outbox: list[RequestOutput] = []
        self._ids = itertools.count()
        self._inbox_lock = threading.Lock()
        """Guards `_waiting` and `_requests` against submissions from other threads."""
        self._owner_lock = threading.RLock()
        """Held by the thread that steps."""

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        cache: CacheConfig | None = None,
        options: EngineConfig | None = None,
        dtype: str | None = None,
        sharding: Any = None,
    ) -> Engine:
        """Opens a converted checkpoint (see `irminsul convert`) and builds an engine on it. `dtype` ("float32",
        "bfloat16") overrides the stored dtype of the parameters."""
        return cls(load_checkpoint(path, dtype=dtype, sharding=sharding), cache=cache, options=options)

    # --- requests in ------------------------------------------------------------------------------------------------

    def submit(self, prompt: Prompt, sampling: SamplingParams | None = None) -> str:
        """Queues one request and returns its id. Thread-safe. Raises `RequestError` if it can never be served."""
        request = self._prepare(prompt, sampling)
        self._enqueue([request])
        return request.id

    def _prepare(self, prompt: Prompt, sampling: SamplingParams | None) -> Request:
        """A request that can be served once there is room. Raises `RequestError` if it never can."""
        ids, salt = parse_prompt(prompt, self.tokenizer)
        merged = (sampling or SamplingParams()).with_defaults(self.default_sampling)
        check_prompt(ids, self.config.vocab_size, len(ids) + merged.max_tokens, self.max_model_len)
        self._check_sampling(merged)
        needed, total = -(-(len(ids) + merged.max_tokens) // PAGE_SIZE), self._cache.total_pages
        if needed > total:
            raise RequestError(
                f"{len(ids)} prompt tokens and max_tokens={merged.max_tokens} need {needed} pages, but the latent pool has "
                f"{total} ({total * PAGE_SIZE} tokens); shorten the request or raise CacheConfig.capacity_tokens"
            )
        number = next(self._ids)
        stop_ids = {*merged.stop_token_ids, *(() if merged.ignore_eos else self.eos_ids)}
        request = Request(
            id=f"request-{number}",
            prompt=ids,
            sampling=merged,
            seed=merged.seed if merged.seed is not None else (self.options.seed + (number << 32)) % 2**64,
            stop_ids=tuple(sorted(stop_ids)),
            eos_ids=self.eos_ids,
            namespace=Namespace(model=self._model_key, salt=salt),
            tokenizer=self.tokenizer,
        )
        request.restart()
        return request

    def _check_sampling(self, sampling: SamplingParams) -> None:
        vocab = self.config.vocab_size
        if sampling.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this checkpoint has none; use stop_token_ids")
        if sampling.logprobs is not None and sampling.logprobs > vocab:
            raise RequestError(f"logprobs={sampling.logprobs} is more than the model's vocabulary of {vocab}; lower it")
        if outside := [token for token in sampling.stop_token_ids if token >= vocab]:
            raise RequestError(
                f"stop_token_ids holds {outside[0]}, which is outside the model's vocabulary of {vocab}; remove it"
            )

    def _enqueue(self, requests: Sequence[Request]) -> None:
        with self._inbox_lock:
            self._requests.update((request.id, request) for request in requests)
            self._waiting.extend(requests)

    def cancel(self, request_id: str) -> bool:
        """Ends a request at the next step; what it computed so far stays reusable. Thread-safe. False if it is not known
        or has ended."""
        with self._inbox_lock:
            request = self._requests.get(request_id)
            if request is None:
                return False
            request.cancelled = True
            return True

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    # --- stepping ---------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Admits, prefills and decodes one block; returns the requests that ended, in order of ending."""
        with self._owner_lock:
            self._step()
            done, self._outbox = self._outbox, []
            return done

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Serves prompts to the end, in order. One `SamplingParams` for all, or one per prompt.

        Raises `RequestError` for the first prompt that can never be served; then none of them is."""
        prompts = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        each = list(sampling) if isinstance(sampling, Sequence) else [sampling] * len(prompts)
        if len(each) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts but {len(each)} SamplingParams; give one, or one per prompt")
        requests = []
        for number, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
            with _naming_prompt(number, len(prompts)):
                requests.append(self._prepare(prompt, one))
        ids = [request.id for request in requests]
        with self._owner_lock:  # from before they are queued: a `step` elsewhere must not take their outputs
            try:
                self._enqueue(requests)
                return self._run(ids)
            except BaseException:
                for request_id in ids:
                    self.cancel(request_id)
                raise

    def chat(
        self,
        conversations: Sequence[Any],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Any] | None = None,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """`generate` on conversations (lists of `{"role", "content"}` messages, or one such list), rendered by the
        checkpoint's own chat template. Raises `ChatTemplateError` or `TokenizerError` if that cannot be done."""
        if conversations and isinstance(conversations[0], Mapping):
            conversations = [conversations]
        return self.generate(
            [self.chat_prompt(messages, tools=tools, **template_kwargs) for messages in conversations], sampling
        )

    def chat_prompt(
        self, messages: Sequence[Any], *, tools: Sequence[Any] | None = None, **template_kwargs: Any
    ) -> dict[str, Any]:
        """The prompt that `chat` would submit for one conversation."""
        if self.tokenizer is None:
            raise RequestError(
                "this checkpoint has no tokenizer.json, so chat is not possible; pass token ids to generate"
            )
        options = {"special_tokens_in_text": self.options.special_tokens_in_text, **template_kwargs}
        return {"prompt_token_ids": self.tokenizer.encode_chat(messages, tools=tools, **options)}

    def warmup(self, longest: int | None = None) -> int:
        """Compiles ahead what sequences up to `longest` tokens need (default: the whole context), so that the first
        requests do not wait for it. Returns the number of compiled programs; the persistent cache makes the next start
        fast."""
        with self._owner_lock:
            self._runner.warm_up(min(longest or self.max_model_len, self.max_model_len))
            return self.num_compilations

    @property
    def num_compilations(self) -> int:
        """Programs compiled in this process so far (engines of one process share them)."""
        return num_compilations()

    def cache_stats(self) -> dict[str, int]:
        """Pages free, evictable, held and in total, and what the cache has done so far."""
        return self._cache.stats()

    def _run(self, ids: Iterable[str]) -> list[RequestOutput]:
        """Steps until the given requests have ended; outputs of others stay for `step` to return."""
        wanted = dict.fromkeys(ids)
        with self._owner_lock:
            while any(output is None for output in wanted.values()):
                self._step()
                others = []
                for output in self._outbox:
                    if output.request_id in wanted:
                        wanted[output.request_id] = output
                    else:
                        others.append(output)
                self._outbox = others
        return [output for output in wanted.values() if output is not None]

    def _step(self) -> None:
        try:
            self._drop_cancelled()
            self._admit()
            self._retire()
            if any(slot is not None for slot in self._slots):
                self._runner.decode(self._slots)
            self._retire()
        except jax.errors.JaxRuntimeError as error:
            self._recover(error)
        except BaseException as error:  # an interrupt, say: the pool may be lost all the same
            self._recover(error)
            raise

    def _drop_cancelled(self) -> None:
        with self._inbox_lock:
            cancelled = [request for request in self._waiting if request.cancelled]
            for request in cancelled:
                self._waiting.remove(request)
        for request in cancelled:
            self._end(request, "cancelled")

    def _admit(self) -> None:
        """Plans and prefills waiting requests, oldest first, until slots or pages run out. Rows are published right after
        prefill, so the same content in the next request of the same batch is served, not computed again."""
        for index, slot in enumerate(self._slots):
            if slot is not None:
                continue
            with self._inbox_lock:
                request = self._waiting[0] if self._waiting else None
            if request is None or not self._start(request, index):
                return
            with self._inbox_lock:
                self._waiting.popleft()

    def _start(self, request: Request, index: int) -> bool:
        """Plans, reserves and prefills one request into a slot; False if its pages do not fit now."""
        request.planned_at = time.perf_counter()
        plan = self._cache.plan(request.prompt, request.namespace, shift_refusal=self.config.shift_refusal)
        reservation = self._cache.reserve(plan, request.namespace, max_new_tokens=request.sampling.max_tokens)
        if reservation is None:
            return False
        request.attempts += 1
        request.reservation, request.plan = reservation, reservation.plan
        new = reservation.plan.recompute_positions
        self._slots[index] = self._runner.prefill(request, reservation.rows, reservation.shifts, new)
        self._cache.publish(reservation, request.prompt)
        request.donor_id = reservation.donor_id if reservation.donor_id >= 0 else None
        return True

    def _retire(self) -> None:
        """Publishes and releases what running requests hold once they have ended or were cancelled."""
        for index, slot in enumerate(self._slots):
            if slot is None or (slot.request.finish_reason is None and not slot.request.cancelled):
                continue
            self._slots[index] = None
            request, reservation = slot.request, slot.request.reservation
            if reservation is not None:
                # The newest token was sampled but never computed; of tokens behind a stop string nothing is kept.
                known = request.token_ids[: slot.position - len(request.prompt)]
                self._cache.publish(reservation, np.concatenate([request.prompt, np.array(known, np.int32)]))
                self._cache.release(reservation)
            self._end(request, request.finish_reason or "cancelled")

    def _end(self, request: Request, reason: Any) -> None:
        request.finish_reason = reason
        with self._inbox_lock:
            self._requests.pop(request.id, None)
        self._outbox.append(request.output())

    def _recover(self, error: BaseException) -> None:
        """After a failed device call: the pool was donated to it, so pool, tree and index start anew together. Requests
        that ran are queued again in their order (same seed, same tokens), or given back with the error if that happened
        before."""
        _log.error("device call failed, starting with an empty cache: %s", error)
        running = [slot.request for slot in self._slots if slot is not None]
        with self._inbox_lock:
            started = [r for r in self._waiting if r.reservation is not None]  # failed in its own prefill
            for request in started:
                self._waiting.remove(request)
        self._slots = [None] * len(self._slots)
        self._runner.reset()
        self._cache.reset()
        again = []
        for request in (*running, *started):
            request.reservation = None
            if request.attempts < _MAX_ATTEMPTS:
                request.restart()
                again.append(request)
            else:
                request.error = f"the device call failed {request.attempts} times: {error}"
                self._end(request, "error")
        with self._inbox_lock:
            self._waiting.extendleft(reversed(again))

    def _capacity_tokens(self) -> int:
        """Rows of the pool: as configured, else what is left of the accelerator's memory, else 2 GiB or 256k tokens."""
        if self.cache_config.capacity_tokens is not None:
            return self.cache_config.capacity_tokens
        per_token = bytes_per_token(self.checkpoint.params, self.config, self.options)
        memory = jax.local_devices()[0].memory_stats() or {}
        if "bytes_limit" in memory:
            # A fifth of what is free stays for activations and compiled programs.
            return max(PAGE_SIZE, int(0.8 * (memory["bytes_limit"] - memory["bytes_in_use"])) // per_token)
        return max(PAGE_SIZE, min(256 * 1024, 2**31 // per_token))


@contextlib.contextmanager
def _naming_prompt(number: int, total: int) -> Any:
    """Says which of several prompts a `RequestError` is about."""
    try:
        yield
    except RequestError as error:
        if total == 1:
            raise
        raise RequestError(f"prompt {number} of {total}: {error}") from None
