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

from pallas_kernels import LatentPool, StreamSpec, absorbed, mla_decode, mla_extend, mla_extend_expanded, xla
from pallas_kernels.mosaic_gpu.fit import MIN_JAX
from pallas_kernels.target import Target
from pallas_kernels.tuning import AbsorbedParameters
from tests.kernels import gpu_lowering as gpu
from tests.kernels import layouts
from tests.kernels.layouts import LAYER, SCALE, Layout, exact_attention, random_layout
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


def double(*arrays: jax.Array) -> np.ndarray:
    return np.concatenate([np.asarray(a).astype(np.float64) for a in arrays], axis=-1)


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


MARKS = {"triton": "xla.gpu.triton", "mosaic_gpu": "@mosaic_gpu"}


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("latent", [jnp.bfloat16, jnp.float8_e4m3fn], ids=["bf16", "float8"])
@pytest.mark.parametrize("name", ["triton", pytest.param("mosaic_gpu", marks=hopper)])
def test_kernels_are_lowered_to_cuda_and_leave_the_pool_alone(name: str, latent: Any, heads: int) -> None:
    if name == "mosaic_gpu" and latent != jnp.bfloat16:
        pytest.skip("the Hopper kernel reads bfloat16")
    options = {"scale": 0.1, "implementation": name}
    at = gpu.shape(512, dtype=jnp.int32)

    def decode(q: Any, q_rope: Any, pool: Any, layer: Any, table: Any) -> Any:
        return mla_decode(q, q_rope, pool, layer, table, **options)

    def extend(q: Any, q_rope: Any, position: Any, sequence: Any, pool: Any, layer: Any, table: Any) -> Any:
        return mla_extend(q, q_rope, position, sequence, pool, layer, table, **options)

    pool, layer = gpu.pool(latent), gpu.shape(dtype=jnp.int32)
    texts = [
        gpu.lowered_text(decode, gpu.shape(64, heads, 512), gpu.shape(64, heads, 64), pool, layer, gpu.table(64, 512)),
        gpu.lowered_text(
            extend, gpu.shape(512, heads, 512), gpu.shape(512, heads, 64), at, at, pool, layer, gpu.table(2, 2048)
        ),
    ]
    for text in texts:
        assert MARKS[name] in text
        assert not gpu.makers_of_the_pool(text)


def test_the_expanded_form_is_lowered_to_cuda() -> None:
    def expanded(q: Any, q_rope: Any, at: Any, key_up: Any, value_up: Any, pool: Any, table: Any) -> Any:
        return mla_extend_expanded(q, q_rope, at, at, key_up, value_up, pool, 3, table, scale=0.1)

    text = gpu.lowered_text(
        expanded, gpu.shape(512, 16, 128), gpu.shape(512, 16, 64), gpu.shape(512, dtype=jnp.int32),
        gpu.shape(16, 128, 512), gpu.shape(16, 512, 128), gpu.pool(), gpu.table(1, 2048),
    )  # fmt: skip
    assert MARKS["triton"] in text
    assert not gpu.makers_of_the_pool(text)


def test_the_search_for_copies_finds_one() -> None:
    """The control of the two tests above: a layer sliced out before the call, or the pool passed through an op."""

    def copies(q: Any, q_rope: Any, pool: LatentPool, table: Any) -> Any:
        moved = dataclasses.replace(pool, arrays=tuple(a + 1 for a in pool.arrays))
        return xla.decode(q, q_rope, moved, 0, table, scale=0.1)

    text = gpu.lowered_text(copies, gpu.shape(4, 16, 512), gpu.shape(4, 16, 64), gpu.pool(), gpu.table(4, 32))
    assert gpu.makers_of_the_pool(text)
