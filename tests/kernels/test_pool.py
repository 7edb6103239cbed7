"""What is written into a pool comes back, in every layout; float8 latents within their rounding."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import LatentPool, StreamSpec, merge_partial
from pallas_kernels.pool import from_stored, row_scale, stored_width, to_stored
from tests.kernels.layouts import exact_attention

PAGE, SLOT = np.array([1, 2, 2], np.int32), np.array([63, 0, 17], np.int32)


def specs(latent: str = "bfloat16", width: int = 64, rope: int = 64) -> tuple[StreamSpec, ...]:
    return (
        StreamSpec(name="c_kv", width=width, dtype=jnp.dtype(latent)),
        StreamSpec(name="k_r", width=rope, dtype=jnp.dtype(jnp.bfloat16), rotary=(0, rope)),
    )


def rows(width: int, seed: int = 0, count: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)


@pytest.mark.parametrize("layout", ["plain", "lanes"])
@pytest.mark.parametrize("widths", [(64, 16), (512, 64), (96, 32)])
def test_rows_come_back_bit_identical(layout, widths: tuple[int, int]) -> None:
    pool = LatentPool.create(specs("bfloat16", *widths), num_layers=2, num_pages=3, layout=layout)
    c_kv, k_r = (jnp.asarray(rows(w), jnp.bfloat16) for w in widths)
    written = pool.write(1, PAGE, SLOT, c_kv=c_kv, k_r=k_r)
    assert np.array_equal(written.read("c_kv", 1, PAGE, SLOT), c_kv)
    assert np.array_equal(written.read("k_r", 1, PAGE, SLOT), k_r)
    assert not np.asarray(written["c_kv"])[0].any()


def test_lanes_are_whole_registers_and_rotary_halves_lie_half_the_width_apart() -> None:
    spec = specs()[1]
    stored = np.asarray(to_stored(jnp.asarray(rows(64)), spec, "lanes"))
    assert stored_width(spec, "lanes") == stored.shape[-1] == 128
    assert np.array_equal(stored[:, :32], rows(64)[:, :32])
    assert np.array_equal(stored[:, 64:96], rows(64)[:, 32:])
    assert not stored[:, 32:64].any()
    assert not stored[:, 96:].any()
    assert np.array_equal(from_stored(jnp.asarray(stored), spec, "lanes"), rows(64))


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 448.0, 449.0, 1e30])
def test_a_scale_is_the_smallest_power_of_two_that_fits(size: float) -> None:
    values = np.array([[0.5 * size, -size]], np.float32)
    scale = float(row_scale(jnp.asarray(values))[0])
    assert np.log2(scale) == np.round(np.log2(scale))
    assert np.abs(values).max() / scale <= 448
    assert np.abs(values).max() / (scale / 2) > 448


def test_float8_rows_are_within_half_a_step_and_zeros_stay_zeros() -> None:
    """e4m3 has 3 bits behind the point: half a step is 2^-4 of a normal number, and 2^-10 below 2^-6 of the scale."""
    values = rows(512) * np.array([[1e-3], [1.0], [0.0]], np.float32)
    pool = LatentPool.create(specs("float8_e4m3fn", 512), num_layers=1, num_pages=3)
    pool = pool.write(0, PAGE, SLOT, c_kv=jnp.asarray(values))
    back = np.asarray(pool.read("c_kv", 0, PAGE, SLOT)).astype(np.float64)
    scale = np.asarray(row_scale(jnp.asarray(values)), np.float64)[:, None]
    assert (np.abs(back - values) <= np.maximum(np.abs(values) * 2.0**-4, scale * 2.0**-10)).all()
    assert not back[2].any()


def test_a_pool_made_of_rows_equals_one_that_they_were_written_to() -> None:
    everything = {"c_kv": rows(64, 1, 192), "k_r": rows(64, 2, 192)}
    shaped = {name: jnp.asarray(x.reshape(1, 3, 64, 64)) for name, x in everything.items()}
    made = LatentPool.from_rows(specs("float8_e4m3fn"), "lanes", **shaped)
    page, slot = np.arange(192, dtype=np.int32) // 64, np.arange(192, dtype=np.int32) % 64
    written = LatentPool.create(specs("float8_e4m3fn"), num_layers=1, num_pages=3, layout="lanes")
    written = written.write(0, page, slot, **{name: jnp.asarray(x) for name, x in everything.items()})
    for name in everything:
        assert np.array_equal(made.read(name, 0, page, slot), written.read(name, 0, page, slot))


def test_partial_attention_merges_to_the_whole_also_where_a_part_is_empty() -> None:
    rng = np.random.default_rng(0)
    q, keys, values = (rng.standard_normal(s) for s in ((3, 8), (50, 8), (50, 5)))
    whole = exact_attention(q, keys, values, 1.0)
    for cut in (0, 20, 50):
        parts = [exact_attention(q, keys[a:b], values[a:b], 1.0) for a, b in ((0, cut), (cut, 50))]
        merged = merge_partial(*(jnp.asarray(x, jnp.float32) for part in parts for x in part))
        for got, expected in zip(merged, whole, strict=True):
            assert np.abs(np.asarray(got) - expected).max() < 50 * 2.0**-23
    empty = (jnp.zeros((3, 5)), jnp.full(3, -jnp.inf))
    out, lse = merge_partial(*empty, *empty)
    assert not np.asarray(out).any()
    assert np.isneginf(lse).all()
