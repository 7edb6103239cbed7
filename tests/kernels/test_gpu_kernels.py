"""The GPU kernels without a GPU: their numbers in the interpreter, and what they are lowered to for CUDA.

`benchmarks/check_kernels.py` compares many more cases, here and on a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import LatentPool, StreamSpec, absorbed, mla_decode, mla_extend, mla_extend_expanded
from pallas_kernels.mosaic_gpu.fit import MIN_JAX
from pallas_kernels.target import Target
from pallas_kernels.tuning import AbsorbedParameters
from tests.kernels import gpu_lowering as gpu
from tests.kernels import layouts
from tests.kernels.layouts import LAYER, SCALE, Layout, double, exact_attention, random_layout
from tests.support.tolerance import U32, U_BF16, attention_tolerance

hopper = pytest.mark.skipif(jax.__version_info__ < MIN_JAX, reason="the Hopper kernel needs jax 0.11.2")
LENGTHS = (0, 1, 63, 65, 200)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layouts of the sizes that the Hopper kernel takes."""
    resize(monkeypatch, 512, 64)


def resize(monkeypatch: pytest.MonkeyPatch, R: int, D: int) -> None:
    for name, value in {"R": R, "D": D, "PAGES": 24, "INV_FREQ": 10000.0 ** (-2.0 * np.arange(D // 2) / D),
                        "BUCKET": (32, 32)}.items():  # fmt: skip
        monkeypatch.setattr(layouts, name, value)


def normal(*shape: int, dtype: Any = jnp.float32, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def assert_decode(layout: Layout, q: tuple[jax.Array, jax.Array], got: Any, unit: float) -> None:
    out, lse = (np.asarray(a) for a in got)
    for b, length in enumerate(map(len, layout.rows)):
        c_kv, k_r = layout.keys(b)
        keys = np.concatenate([c_kv, k_r], axis=-1)
        expected, expected_lse = exact_attention(double(*q)[b], keys, c_kv)
        if not length:
            assert not out[b].any()
            assert np.isneginf(lse[b]).all()
            continue
        tolerance = attention_tolerance(double(*q)[b], keys, c_kv, SCALE, unit=unit)
        assert np.abs(out[b] - expected).max() <= tolerance
        assert np.abs(lse[b] - expected_lse).max() <= tolerance


def assert_extend(layout: Layout, q: tuple[jax.Array, jax.Array], at: np.ndarray, got: Any, unit: float) -> None:
    out, lse = (np.asarray(a) for a in got)
    for i, (position, b) in enumerate(at.T):
        c_kv, k_r = (part[: position + 1] for part in layout.keys(b))
        keys = np.concatenate([c_kv, k_r], axis=-1)
        expected, expected_lse = exact_attention(double(*q)[i], keys, c_kv)
        if position < 0:
            assert not out[i].any()
            assert np.isneginf(lse[i]).all()
            continue
        tolerance = attention_tolerance(double(*q)[i], keys, c_kv, SCALE, unit=unit)
        assert np.abs(out[i] - expected).max() <= tolerance
        assert np.abs(lse[i] - expected_lse).max() <= tolerance


AT = np.array([[0, 62, 3, 64, 199, 150, -1, 199, 7], [1, 2, 2, 3, 4, 4, 0, 4, 4]], np.int32)
"""Positions and sequences of queries in no order, with padding."""


@pytest.mark.parametrize(("R", "D", "heads"), [(64, 16, 3), (64, 32, 16), (128, 64, 20)])
@pytest.mark.parametrize("programs", [1, 5], ids=["few programs", "pieces merged"])
def test_triton_decode_equals_float64(R: int, D: int, heads: int, programs: int, monkeypatch) -> None:
    resize(monkeypatch, R, D)
    layout = random_layout(LENGTHS, seed=heads)
    q = normal(len(LENGTHS), heads, R), normal(len(LENGTHS), heads, D, seed=1)
    target = Target(platform="gpu", kind="interpreted", capability=90, num_cores=programs)
    parameters = AbsorbedParameters(block_rows=16, block_keys=32, warps=4, stages=1, programs_per_core=2)
    options = {"implementation": "triton", "scale": SCALE, "target": target, "interpret": True}
    table = jax.tree.map(jnp.asarray, layout.table)
    got = absorbed.decode(*q, layout.pool, jnp.int32(LAYER), table, parameters=parameters, **options)
    assert_decode(layout, q, got, U32)


@pytest.mark.parametrize("cores", [1, 40], ids=["a program per block", "pieces merged"])
def test_triton_extend_equals_float64(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    resize(monkeypatch, 64, 32)
    layout = random_layout(LENGTHS, seed=5, dtype=jnp.bfloat16)
    q = normal(9, 20, 64, dtype=jnp.bfloat16), normal(9, 20, 32, dtype=jnp.bfloat16, seed=1)
    target = Target(platform="gpu", kind="interpreted", capability=90, num_cores=cores)
    got = absorbed.extend(
        *q, *map(jnp.asarray, AT), layout.pool, jnp.int32(LAYER), jax.tree.map(jnp.asarray, layout.table),
        implementation="triton", scale=SCALE, target=target, interpret=True,
    )  # fmt: skip
    assert_extend(layout, q, AT, got, U_BF16)


def test_triton_reads_float8_latents_as_the_oracle_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both see the same stored numbers, so what differs is rounding alone."""
    resize(monkeypatch, 64, 32)
    plain = random_layout(LENGTHS, seed=6, dtype=jnp.bfloat16)
    specs = (StreamSpec(name="c_kv", width=64, dtype=jnp.dtype(jnp.float8_e4m3fn)), plain.pool.specs[1])
    pool = LatentPool.from_rows(specs, c_kv=plain.pool["c_kv"], k_r=plain.pool["k_r"])
    stored = (pool["c_kv"].astype(jnp.bfloat16) * pool.scale("c_kv")[..., None].astype(jnp.bfloat16), pool["k_r"])
    layout = dataclasses.replace(plain, pool=dataclasses.replace(plain.pool, arrays=stored))
    q = normal(len(LENGTHS), 16, 64, dtype=jnp.bfloat16), normal(len(LENGTHS), 16, 32, dtype=jnp.bfloat16, seed=1)
    for implementation in ("triton", "xla"):
        interpret = implementation == "triton"
        got = mla_decode(*q, pool, LAYER, layout.table, scale=SCALE, implementation=implementation, interpret=interpret)
        assert_decode(layout, q, got, U_BF16)


@hopper
def test_hopper_decode_equals_float64_and_a_flipped_sine_does_not(wide: None) -> None:
    layout = random_layout((0, 65, 200), seed=3, dtype=jnp.bfloat16)
    q = normal(3, 20, 512, dtype=jnp.bfloat16), normal(3, 20, 64, dtype=jnp.bfloat16, seed=1)
    run = functools.partial(mla_decode, *q, layout.pool, LAYER, scale=SCALE, implementation="mosaic_gpu",
                            interpret=True)  # fmt: skip
    got = run(table=layout.table)
    assert_decode(layout, q, got, U_BF16)
    flipped = run(table=dataclasses.replace(layout.table, sin=-layout.table.sin))
    assert np.abs(np.asarray(flipped[1] - got[1])[1:]).max() > 0.05


@hopper
def test_hopper_extend_equals_float64_with_several_sequences_in_a_block(wide: None) -> None:
    layout = random_layout(LENGTHS, seed=4, dtype=jnp.bfloat16)
    q = normal(9, 3, 512, dtype=jnp.bfloat16), normal(9, 3, 64, dtype=jnp.bfloat16, seed=1)
    got = mla_extend(
        *q, *map(jnp.asarray, AT), layout.pool, LAYER, layout.table,
        scale=SCALE, implementation="mosaic_gpu", interpret=True,
    )  # fmt: skip
    assert_extend(layout, q, AT, got, U_BF16)


OPS = {"decode": mla_decode, "extend": mla_extend, "extend_expanded": mla_extend_expanded}
MARKS = {"triton": "xla.gpu.triton", "mosaic_gpu": "@mosaic_gpu"}
CASES = [
    *(pytest.param("triton", op, latent, id=f"triton-{op}-{latent.__name__}")
      for op in OPS for latent in (jnp.bfloat16, jnp.float8_e4m3fn)),
    *(pytest.param("mosaic_gpu", op, jnp.bfloat16, id=f"mosaic_gpu-{op}", marks=hopper) for op in ("decode", "extend")),
]  # fmt: skip


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize(("name", "op", "latent"), CASES)
def test_kernels_are_lowered_to_cuda_and_make_nothing_of_the_size_of_the_pool(
    name: str, op: str, latent: Any, heads: int
) -> None:
    run = functools.partial(OPS[op], scale=0.1, implementation=name)
    text = gpu.lowered_text(lambda *args: run(*args), *gpu.arguments_of(op, latent, heads))
    assert not gpu.pool_sized(text)
    kernels = [line for line in text.splitlines() if MARKS[name] in line]
    assert kernels
    stream = f"tensor<{gpu.LAYERS}x{gpu.PAGES}x64x512x"
    assert any(stream in line for line in kernels) == (op != "extend_expanded")  # that one gathers rows first


@pytest.mark.parametrize("name", ["triton", "xla"])
@pytest.mark.parametrize(
    "change",
    [lambda a, layer: -a, lambda a, layer: a + 1, lambda a, layer: jax.lax.dynamic_slice_in_dim(a, layer, 1)],
    ids=["negated", "added to", "layer sliced out"],
)
def test_the_search_for_copies_finds_them(change: Any, name: str) -> None:
    def run(q: Any, q_rope: Any, pool: LatentPool, layer: Any, table: Any) -> Any:
        pool = dataclasses.replace(pool, arrays=tuple(change(a, layer) for a in pool.arrays))
        return mla_decode(q, q_rope, pool, 0, table, scale=0.1, implementation=name)

    assert gpu.pool_sized(gpu.lowered_text(run, *gpu.arguments_of("decode", jnp.bfloat16, 16)))
