"""The TPU kernels through the real compiler, without a TPU, at sizes of production."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import PAGE_SIZE, FragmentTable, LatentPool
from pallas_kernels.mosaic_tpu import attend, block_rows, flash, paged
from pallas_kernels.schedule import decode_items, extend_items
from tests.kernels.tpu_compile import TOPOLOGIES, compile_for, copies_of, pool_shapes, shape, table_shapes

D = 64
SCALE = 192**-0.5

FITTING_LAYERS = {"v5e": 3, "v6e": 8, "v7x": 27}
"""Layers of 32,768 pages that fit into the memory of one device; a copy of the pool beside it would not."""


def paged_program(q_latent, q_rope, position, sequence, pool, layer, table, *, block_rows: int) -> Any:
    if position is None:
        items = decode_items(table, q_latent.shape[0] // table.num_sequences // block_rows)
    else:
        items = extend_items(position, sequence, table, block_rows)
    return attend(q_latent, q_rope, position, sequence, pool, layer, table, items, scale=SCALE, block_rows=block_rows)


def paged_arguments(pool: LatentPool, table: FragmentTable, num_rows: int, *, decode: bool) -> tuple[Any, ...]:
    dtype = pool["c_kv"].dtype
    q = (shape(num_rows, pool["c_kv"].shape[-1], dtype=dtype), shape(num_rows, 128, dtype=dtype))
    rows = (None, None) if decode else (shape(num_rows), shape(num_rows))
    return (*q, *rows, pool, shape(), table)


def assert_nothing_is_copied(compiled: Any, pool: LatentPool) -> None:
    assert 'custom_call_target="tpu_custom_call"' in compiled.as_text()
    assert not copies_of(compiled, pool.num_pages, PAGE_SIZE)
    assert compiled.memory_analysis().temp_size_in_bytes < 8 << 20


USUAL = [(16, table_shapes(64, 512, 128)), (128, table_shapes(1, 8192, 8192))]
OTHERS = [(128, table_shapes(64, 512, 128)), (16, table_shapes(128, 128, 32)), (16, table_shapes(64, 1264, 1))]
"""Heads and table, on one chip only; the last fills the scalar memory, of which every chip has the same."""


@pytest.mark.parametrize(
    ("chip", "heads", "table"),
    [*((chip, *usual) for chip in TOPOLOGIES for usual in USUAL), *(("v5e", *other) for other in OTHERS)],
)
def test_decode_compiles(chip: str, heads: int, table: FragmentTable) -> None:
    pool = pool_shapes(layers=FITTING_LAYERS[chip])
    arguments = paged_arguments(pool, table, table.num_sequences * heads, decode=True)
    compiled = compile_for(chip, functools.partial(paged_program, block_rows=block_rows("decode", heads)), *arguments)
    assert_nothing_is_copied(compiled, pool)


@pytest.mark.parametrize(("chip", "heads"), [*((chip, 16) for chip in TOPOLOGIES), ("v6e", 128)])
def test_extend_compiles(chip: str, heads: int) -> None:
    pool = pool_shapes(layers=FITTING_LAYERS[chip])
    table = table_shapes(1, 8192, 2048) if heads == 128 else table_shapes(16, 512, 128)
    arguments = paged_arguments(pool, table, 512 * heads, decode=False)
    compiled = compile_for(chip, functools.partial(paged_program, block_rows=block_rows("extend", heads)), *arguments)
    assert_nothing_is_copied(compiled, pool)


def test_what_just_fits_into_vector_memory_compiles() -> None:
    """On the chip that has least of it."""
    table, most, more = table_shapes(2, 512), *(pool_shapes(layers=1, pages=2048, rank=n) for n in (8192, 9216))
    assert paged.misfit(most, table, block_rows=128, num_items=2) is None
    assert "vector memory" in (paged.misfit(more, table, block_rows=128, num_items=2) or "")
    arguments = paged_arguments(most, table, 256, decode=True)
    assert_nothing_is_copied(compile_for("v7x", functools.partial(paged_program, block_rows=128), *arguments), most)


@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_flash_compiles(chip: str) -> None:
    H, T, S, b = 16, 512, 2048, jnp.bfloat16
    compiled = compile_for(
        chip,
        functools.partial(flash, scale=SCALE),
        *(shape(H, T, 128, dtype=b), shape(H, T, D, dtype=b), shape(H, S, 128, dtype=b), shape(S, D, dtype=b)),
        *(shape(H, S, 128, dtype=b), shape(T), shape(), shape()),
    )
    assert 'custom_call_target="tpu_custom_call"' in compiled.as_text()
    assert not [c for c in copies_of(compiled, H, S, 128) if "S(1)" not in c]  # S(1): fetched ahead into VMEM
    assert compiled.memory_analysis().temp_size_in_bytes < 8 << 20


def test_a_copied_pool_is_noticed() -> None:
    """A layer sliced out in front of the kernel."""
    pool = pool_shapes(layers=2)

    def sliced(*arguments: Any) -> Any:
        q_latent, q_rope, position, sequence, pool, layer, table = arguments
        one = tuple(jax.lax.dynamic_slice_in_dim(a, layer, 1) for a in pool.arrays)
        pool = dataclasses.replace(pool, arrays=one)
        return paged_program(q_latent, q_rope, position, sequence, pool, jnp.int32(0), table, block_rows=16)

    compiled = compile_for("v5e", sliced, *paged_arguments(pool, table_shapes(), 1024, decode=True))
    with pytest.raises(AssertionError):
        assert_nothing_is_copied(compiled, pool)
    assert copies_of(compiled, pool.num_pages, PAGE_SIZE)


def test_too_little_vector_memory_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "misfit", lambda *_, **__: None)
    monkeypatch.setattr(paged, "VMEM_BYTES", 1 << 20)
    arguments = paged_arguments(pool_shapes(layers=1), table_shapes(1, 128), 128, decode=True)
    with pytest.raises(Exception, match="vmem"):
        compile_for("v5e", functools.partial(paged_program, block_rows=128), *arguments)
