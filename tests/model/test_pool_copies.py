"""Case 39: no program copies the pool. Read from the compiled programs, with a control that shows what a copy looks like."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from irminsul_jax.functional import Sampling, decode_step, generate, make_batch, prefill
from tests.support.models import Model

NUM_PAGES = 2048


def compiled(model: Model, name: str, *, donate: bool) -> jax.stages.Compiled:
    donated = "pool" if donate else None
    pool = jax.eval_shape(functools.partial(model.pool, NUM_PAGES))
    batch = make_batch([range(3, 93)], model.config, max_tokens=8)
    if name == "decode_step":
        one = np.ones(1, np.int32)
        program = jax.jit(decode_step, static_argnames="config", donate_argnames=donated)
        return program.lower(model.params, model.config, pool, one, one, batch.table).compile()
    if name == "generate":
        program = jax.jit(generate, static_argnames=("config", "sampling"), donate_argnames=donated)
        sampling, key = Sampling(max_tokens=8), jax.random.key(0)
        return program.lower(model.params, model.config, pool, batch, sampling, key).compile()
    program = jax.jit(prefill, static_argnames=("config", "form"), donate_argnames=donated)
    form = name.removeprefix("prefill_")
    return program.lower(model.params, model.config, pool, batch, form=form).compile()


def pool_copies(model: Model, program: jax.stages.Compiled) -> list[str]:
    """Copies of a whole stream in the optimised program."""
    c = model.config
    shapes = [f"f32[{c.num_layers},{NUM_PAGES},64,{width}]" for width in (c.kv_lora_rank, c.qk_rope_head_dim)]
    lines = (program.as_text() or "").splitlines()
    return [line for line in lines if re.search(r"\bcopy(-start)?\(", line) and any(s in line for s in shapes)]


def memory_of(program: jax.stages.Compiled) -> Any:
    memory = program.memory_analysis()
    assert memory is not None
    return memory


def pool_bytes(model: Model) -> int:
    c = model.config
    return (
        math.prod((c.num_layers, NUM_PAGES, 64, c.kv_lora_rank + c.qk_rope_head_dim)) * jnp.dtype(jnp.float32).itemsize
    )


@pytest.mark.parametrize("name", ["prefill_absorbed", "prefill_expanded", "decode_step", "generate"])
def test_no_copy_of_the_donated_pool(name: str, long_models) -> None:
    model = long_models("one_layer")
    program = compiled(model, name, donate=True)
    memory = memory_of(program)
    assert memory.temp_size_in_bytes < pool_bytes(model) / 4
    assert memory.alias_size_in_bytes >= pool_bytes(model)
    assert pool_copies(model, program) == []


def test_the_same_program_without_donation_shows_the_copy(long_models) -> None:
    model = long_models("one_layer")
    program = compiled(model, "decode_step", donate=False)
    memory = memory_of(program)
    assert memory.alias_size_in_bytes < pool_bytes(model)
    assert pool_copies(model, program) != []
