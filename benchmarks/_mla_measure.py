"""Device programs of `mla_kernels.py` and their times: the two rates of the machine, and many attention calls in one jit."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _mla_cases import Case, D, R, Variant, Workload, workload

from pallas_kernels import PAGE_SIZE, LatentPool, StreamSpec

WARM_UPS = 2
PROGRAM_SECONDS = 5e-3
"""One program makes calls for at least so long, by estimate; for up to four times so long to go through more layers."""

SAMPLE_SECONDS = 10e-3
"""One timed sample launches its program until so much work is queued: the host's part of a launch, some 0.1 ms, then
happens while the device is busy."""

CALL_SECONDS = 10e-6
"""No call is estimated to be shorter; there are launches and a merge."""

ROTATED_BYTES = 512e6
"""Calls go through so many bytes of layers before they come to one again, so that nothing is left in the cache."""

SPECS = (
    StreamSpec(name="c_kv", width=R, dtype=jnp.dtype(jnp.bfloat16)),
    StreamSpec(name="k_r", width=D, dtype=jnp.dtype(jnp.bfloat16), rotary=(0, D)),
)
SEED = np.int32(0)
RANDOM_PAGES = 1024
"""Pages of random numbers that the pool is filled with, over and over in another order."""


KERNEL_MARKS = {"custom_call @mosaic_gpu": "mosaic_gpu", "xla.gpu.triton": "triton", "tpu_custom_call": "mosaic_tpu"}
"""What the calls of each implementation are named in a lowered program; `xla` makes none."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of one call: the median of the samples, and their 10th and 90th percentile."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, samples: list[float], calls: int) -> Times:
        p10, median, p90 = (float(q) / calls for q in np.quantile(samples, (0.1, 0.5, 0.9)))
        return cls(median=median, p10=p10, p90=p90)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What the machine does at best: bytes a second of a plain sum, operations a second of a dense product."""

    read: float
    matmul: float


def interleaved(candidates: Mapping[str, Callable[[], Any]], repeats: int, launches: int = 1) -> dict[str, list[float]]:
    """Seconds per launch of each candidate, `repeats` samples. They take turns, in alternating order."""
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for i in range(WARM_UPS + repeats):
        names = list(candidates)
        for name in names if i % 2 else names[::-1]:
            started = time.perf_counter()
            for _ in range(launches):
                result = candidates[name]()
            jax.block_until_ready(result)
            if i >= WARM_UPS:
                samples[name].append((time.perf_counter() - started) / launches)
    return samples


def measure_rates(repeats: int, quick: bool) -> Rates:
    return Rates(
        read=_read_rate(1 << (22 if quick else 30), repeats), matmul=_matmul_rate(256 if quick else 8192, repeats)
    )


def _read_rate(words: int, repeats: int, passes: int = 6) -> float:
    """A sum of everything. Each pass needs the sum of the one before, so none can be left out, moved or fused."""
    x = jax.jit(lambda: jax.random.bits(jax.random.key(0), (words // 4096, 4096), jnp.uint32))()

    @jax.jit
    def sums(x: jax.Array) -> jax.Array:
        total = jnp.uint32(0)
        for _ in range(passes):
            total = jnp.sum(x ^ total, dtype=jnp.uint32)
        return total

    samples = interleaved({"sums": functools.partial(sums, x)}, repeats)["sums"]
    return 4 * words / Times.of(samples, passes).median


def _matmul_rate(size: int, repeats: int, passes: int = 8) -> float:
    """A chain of bfloat16 products of random numbers."""
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in (1, 2))
    b = b * jnp.bfloat16(size**-0.5)

    @jax.jit
    def chain(a: jax.Array, b: jax.Array) -> jax.Array:
        for _ in range(passes):
            a = a @ b
        return a

    samples = interleaved({"chain": functools.partial(chain, a, b)}, repeats)["chain"]
    return 2.0 * size**3 / Times.of(samples, passes).median


class TooLarge(Exception):
    """The pool of a case does not fit."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A case on its way: its programs compile in other threads. A variant that failed already is an exception."""

    case: Case
    work: Workload
    calls: int
    layers: int
    launches: int
    inputs: Future
    programs: dict[str, Future | Exception]
    kernels: dict[str, str]
    """By variant, the implementation that serves it."""

    def wait(self) -> None:
        for pending in (self.inputs, *self.programs.values()):
            if isinstance(pending, Future):
                pending.exception()


def prepare(
    case: Case, rates: Rates, compilers: Executor, *, implementation: str | None, most_calls: int, most_bytes: float
) -> Job:
    """Traces the programs of a case and starts to compile them. Raises `TooLarge` if its pool is."""
    work = workload(case)
    estimates = (max(v.bytes / rates.read, 2 * v.flops / rates.matmul, CALL_SECONDS) for v in work.variants.values())
    estimate = max(estimates)
    rotation = math.ceil(ROTATED_BYTES / work.layer_bytes)
    enough = math.ceil(PROGRAM_SECONDS / estimate)
    calls = min(max(enough, min(rotation, 4 * enough), 2), most_calls)
    layers = min(calls, rotation)
    if (size := layers * work.layer_bytes) > most_bytes:
        raise TooLarge(f"{size / 1e9:.1f} GB of pool, more than {most_bytes / 1e9:.1f} GB")
    make = functools.partial(make_inputs, work=work, calls=calls, layers=layers)
    pool, _ = jax.eval_shape(make, SEED)
    programs: dict[str, Future | Exception] = {}
    kernels: dict[str, str] = {}
    for name, variant in work.variants.items():
        try:
            program = jax.jit(
                functools.partial(_program, variant=variant, layers=layers, implementation=implementation)
            )
            one_call = tuple(jax.ShapeDtypeStruct(work.operands[n], jnp.bfloat16) for n in variant.takes)
            queries = [one_call] * calls
            lowered = program.lower(queries, work.at, pool, variant.table)
            text = lowered.as_text()
            kernels[name] = next((kernel for mark, kernel in KERNEL_MARKS.items() if mark in text), "xla")
            programs[name] = compilers.submit(lowered.compile)
        except Exception as error:  # a kernel that cannot do this case: the others are measured all the same
            programs[name] = error
    return Job(
        case=case,
        work=work,
        calls=calls,
        layers=layers,
        launches=min(max(math.ceil(SAMPLE_SECONDS / (calls * estimate)), 1), 8),
        inputs=compilers.submit(jax.jit(make).lower(SEED).compile),
        programs=programs,
        kernels=kernels,
    )


def make_inputs(seed: jax.Array, *, work: Workload, calls: int, layers: int) -> tuple[LatentPool, dict[str, jax.Array]]:
    """A random pool, and random operands for all calls, one after the other. Products with the two expansions keep unit
    variance. The seed is an argument because XLA would compute what depends on constants alone while it compiles."""
    keys = iter(jax.random.split(jax.random.key(seed), len(SPECS) + len(work.operands)))
    number = jnp.arange(layers)[:, None] * 389 + jnp.arange(work.num_pages) * 7 + seed
    rows = {}
    for spec in SPECS:
        some = jax.random.normal(next(keys), (min(RANDOM_PAGES, work.num_pages), PAGE_SIZE, spec.width), spec.dtype)
        rows[spec.name] = some[number % some.shape[0]]
    pool = LatentPool.from_rows(SPECS, "lanes" if jax.default_backend() == "tpu" else "plain", **rows)
    operands = {}
    for name, shape in work.operands.items():
        factor = R**-0.5 if name in ("key_up", "value_up") else 1.0
        operands[name] = jax.random.normal(next(keys), (calls, *shape), jnp.bfloat16) * jnp.bfloat16(factor)
    return pool, operands


def _queries(variant: Variant, operands: dict[str, jax.Array]) -> list[tuple[jax.Array, ...]]:
    """The operands of each call, as arrays of their own: cut out inside the program they would be copied there."""
    return list(zip(*(list(operands[name]) for name in variant.takes), strict=True))


def _program(
    queries: list, at: tuple, pool: LatentPool, table: Any, *, variant: Variant, layers: int, implementation: str | None
) -> list:
    """One call per entry of `queries`, each on the next layer. All results are returned, so that no call is dropped.
    The op is traced once: the number of the layer is an argument of the inner function, and a constant once inlined."""
    one = jax.jit(functools.partial(variant.op, scale=variant.scale, implementation=implementation))
    return [one(q, at, pool, np.int32(i % layers), table) for i, q in enumerate(queries)]


def measure(job: Job, repeats: int) -> dict[str, Times | Exception]:
    """Times of one call of each variant, or why there are none."""
    pool, operands = job.inputs.result()(SEED)
    at = jax.device_put(job.work.at)
    launches: dict[str, Callable[[], Any]] = {}
    outcome: dict[str, Times | Exception] = {}
    for name, pending in job.programs.items():
        variant = job.work.variants[name]
        queries = _queries(variant, operands)
        try:
            if isinstance(pending, Exception):
                raise pending
            launch = functools.partial(pending.result(), queries, at, pool, jax.device_put(variant.table))
            _check(jax.device_get(launch()[-1]), job.work.seen)
            launches[name] = launch
        except Exception as error:  # does not compile, does not run, or computes something else
            outcome[name] = error
    samples = interleaved(launches, repeats, job.launches)
    return outcome | {name: Times.of(seconds, job.calls) for name, seconds in samples.items()}


def _check(result: tuple[np.ndarray, np.ndarray], seen: np.ndarray) -> None:
    """Scores are distributed like N(0, 1), whatever the turn, so the log-sum-exp over n keys is log n + 1/2, but for the
    noise of the sample. That tells a call that left keys out, or saw some twice."""
    out, lse = result
    off = float(np.mean(lse - np.log(seen)[:, None])) - 0.5
    if not (np.isfinite(out).all() and abs(off) < 0.05 + 2 * seen.min() ** -0.5):
        raise ArithmeticError(f"wrong result: log-sum-exp is off by {off:.3f} in the mean, or the output is not finite")
