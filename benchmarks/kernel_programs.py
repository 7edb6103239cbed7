"""The compiled programs of `check_kernels.py`: one per implementation and setting, and those that show copies."""

from __future__ import annotations

import functools
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from kernel_cases import LAYER, LAYERS, Setting, argument_shapes, stream_specs
from kernel_reference import Deviation
from rich.console import Console

from irminsul_jax.replay.progress import Meter
from pallas_kernels import FragmentTable, LatentPool, PoolLayout, mla_decode, mla_extend, mla_extend_expanded

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "decode": mla_decode,
    "extend": mla_extend,
    "extend_expanded": mla_extend_expanded,
}


@dataclass(frozen=True)
class Key:
    """Names a compiled program."""

    implementation: str
    interpret: bool
    setting: Setting

    @property
    def layout(self) -> PoolLayout:
        return "lanes" if self.implementation == "mosaic_tpu" else "plain"

    @property
    def op(self) -> Callable[..., Any]:
        return functools.partial(
            FUNCTIONS[self.setting.op],
            layer=LAYER,
            scale=self.setting.scale,
            implementation=self.implementation,
            interpret=self.interpret,
        )


Program = Callable[..., Any] | Exception
"""A compiled program, or what its compilation ended with."""


def compiler_options(interpret: bool) -> dict[str, Any]:
    """Only what does not concern the kernels: an interpreter is not worth optimising (half the time of compilation),
    and neither are the matrix products around a kernel on a GPU worth tuning."""
    if interpret:
        return {"xla_backend_optimization_level": 0}
    return {"xla_gpu_autotune_level": 0} if jax.default_backend() == "gpu" else {}


def abstract_pool(key: Key) -> LatentPool:
    s = key.setting
    specs = stream_specs(s.sizes, s.dtype)
    create = functools.partial(LatentPool.create, specs, num_layers=LAYERS, num_pages=s.pages, layout=key.layout)
    return jax.eval_shape(create)


def abstract_table(s: Setting) -> FragmentTable:
    fragments, turns = s.bucket
    field: Any = jax.ShapeDtypeStruct((s.batch, fragments), jnp.int32)
    turn: Any = jax.ShapeDtypeStruct((turns, s.sizes.rotary // 2), jnp.float32)
    return FragmentTable(page=field, lo=field, hi=field, start=field, turn=field, cos=turn, sin=turn)


def compile_all(keys: Sequence[Key], console: Console) -> dict[Key, Program]:
    """Traced one after another, compiled side by side: that is most of the time, and outside of Python."""
    started = time.perf_counter()
    programs: dict[Key, Program] = {}
    pending: dict[Future[Any], Key] = {}
    with (
        Meter(console, "compile", unit="programs", total=len(keys)) as meter,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
    ):
        for key in keys:
            s = key.setting
            try:
                arguments = {"pool": abstract_pool(key), "table": abstract_table(s)} | argument_shapes(s)
                lowered = jax.jit(key.op).lower(**arguments)
                pending[pool.submit(lowered.compile, compiler_options=compiler_options(key.interpret))] = key
            except Exception as error:  # whatever a kernel does wrong is a result, not the end
                programs[key] = error
            meter.update(len(programs) + sum(future.done() for future in pending))
        traced = len(programs)
        for done, future in enumerate(as_completed(pending), 1):
            programs[pending[future]] = future.exception() or future.result()  # type: ignore[assignment]
            meter.update(traced + done)
    console.print(f"{len(programs)} programs compiled in {time.perf_counter() - started:.0f} s", highlight=False)
    return programs


def copying_program(key: Key) -> jax.stages.Compiled:
    """Writes one row per token to the donated pool, then attends to it."""
    s = key.setting

    def step(pool: LatentPool, page: Any, slot: Any, rows: dict[str, Any], **arguments: Any) -> tuple[Any, Any]:
        pool = pool.write(LAYER, page, slot, **rows)
        return pool, key.op(pool=pool, **arguments)

    place = jax.ShapeDtypeStruct((s.tokens,), jnp.int32)
    rows = {
        spec.name: jax.ShapeDtypeStruct((s.tokens, spec.width), jnp.float32) for spec in stream_specs(s.sizes, s.dtype)
    }
    lowered = jax.jit(step, donate_argnames="pool").lower(
        abstract_pool(key), place, place, rows, table=abstract_table(s), **argument_shapes(s)
    )
    return lowered.compile(compiler_options=compiler_options(key.interpret))


def copies_in(compiled: jax.stages.Compiled, key: Key) -> Deviation:
    """Copies of a stream in the program's text, and its temporary memory against half a pool."""
    pool = abstract_pool(key)
    shapes = [f"[{','.join(map(str, a.shape))}]" for a in pool.arrays]
    found = [
        line
        for line in (compiled.as_text() or "").splitlines()
        if re.search(r"\bcopy(-start)?\(", line) and any(shape in line for shape in shapes)
    ]
    if found:
        return Deviation(math.inf, math.nan, 0.0, f"the pool is copied: {found[0].strip()[:160]}")
    pool_bytes = sum(math.prod(a.shape) * a.dtype.itemsize for a in pool.arrays)
    memory = compiled.memory_analysis()
    if memory is None:
        return Deviation(0.0, 0.0, 0.0, "no copy in the text")
    if memory.alias_size_in_bytes < pool_bytes:
        return Deviation(math.inf, math.nan, 0.0, "the donated pool is not written in place")
    temporary, allowed = memory.temp_size_in_bytes, pool_bytes // 2
    return Deviation(temporary / allowed, temporary, allowed, "bytes of temporary memory against half the pool")
