"""Turning cached rotary keys by δ: accuracy in bfloat16, exactness of what must not change, no drift over moves."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from irminsul_jax.config import RopeConfig
from irminsul_jax.rope import inv_freq
from pallas_kernels import PAGE_SIZE, LatentPool, StreamSpec, fragments_of, pack_fragments, rotate, turn_table
from pallas_kernels.xla import _load_block
from tests.kernels.layouts import turned

D, R = 64, 32
BAR = 2.5e-3
YARN = RopeConfig(kind="yarn", factor=40.0, original_max_position=4096, mscale=1.0, mscale_all_dim=1.0)
ROPES = {"plain": RopeConfig(), "yarn": YARN}
SHIFTS = np.array([1, 31, 45, 4097, 65_536, 99_991, 131_071, 160_000])


def stored_keys(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, D)).astype(ml_dtypes.bfloat16)


def relative_l2(values: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(values.astype(np.float64) - exact) / np.linalg.norm(exact))


def move(keys: np.ndarray, shift: int, freq: np.ndarray) -> np.ndarray:
    cos, sin = turn_table(np.array([shift]), freq)
    return np.asarray(rotate(jnp.asarray(keys), jnp.asarray(cos), jnp.asarray(sin)))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("rope", ROPES)
def test_turned_bfloat16_keys_are_within_2_5e_3_of_float64_up_to_160k(rope: str, sign: int) -> None:
    freq, keys = inv_freq(ROPES[rope], D), stored_keys(256)
    for shift in sign * SHIFTS:
        out = move(keys, shift, freq)
        assert out.dtype == ml_dtypes.bfloat16
        assert relative_l2(out, turned(keys, shift, freq)) <= BAR
    assert relative_l2(move(keys, 160_000, freq), turned(keys, 159_999, freq)) > 0.1


@pytest.mark.parametrize("rope", ROPES)
def test_float32_keys_are_turned_to_float32_rounding_at_160k(rope: str) -> None:
    """Two products and a sum of rounded factors: 4 roundings; an angle taken in float32 would be off by 1e-2 here."""
    freq, keys = inv_freq(ROPES[rope], D), stored_keys(64).astype(np.float32)
    for shift in (160_000, -160_000):
        assert relative_l2(move(keys, shift, freq), turned(keys, shift, freq)) <= 4 * 2.0**-24


def test_no_shift_leaves_every_bit() -> None:
    keys = stored_keys(64)
    assert np.array_equal(move(keys, 0, inv_freq(YARN, D)).view(np.uint16), keys.view(np.uint16))


def bf16_pool(seed: int = 0) -> LatentPool:
    rng = np.random.default_rng(seed)
    bf16 = jnp.dtype(jnp.bfloat16)
    specs = (
        StreamSpec(name="c_kv", width=R, dtype=bf16),
        StreamSpec(name="k_r", width=D, dtype=bf16, rotary=(0, D)),
    )
    rows = {s.name: jnp.asarray(rng.standard_normal((1, 6, PAGE_SIZE, s.width))) for s in specs}
    return LatentPool.from_rows(specs, **rows)


@pytest.mark.parametrize("shift", [0, 7, -160_000, 160_000])
def test_content_is_loaded_bit_identical_and_keys_within_the_bar(shift: int) -> None:
    pool, freq = bf16_pool(), inv_freq(YARN, D)
    rows = np.arange(2 * 64 + 11, 2 * 64 + 11 + 100, dtype=np.int32)
    table = pack_fragments([fragments_of(rows, np.full(100, shift, np.int32))], freq)
    positions = jnp.arange(100, dtype=jnp.int32)
    c_kv, k_r, valid = _load_block(pool, 0, table, jnp.int32(0), positions, jnp.int32(100))
    page, slot = rows // PAGE_SIZE, rows % PAGE_SIZE
    base = np.asarray(pool["k_r"])[0, page, slot]
    assert np.asarray(valid).all()
    assert np.array_equal(np.asarray(c_kv).view(np.uint16), np.asarray(pool["c_kv"])[0, page, slot].view(np.uint16))
    assert relative_l2(np.asarray(k_r), turned(base, shift, freq)) <= BAR
    assert np.array_equal(np.asarray(k_r).view(np.uint16), base.view(np.uint16)) == (shift == 0)


def test_sixteen_moves_of_the_same_rows_are_each_as_good_as_one() -> None:
    """Case 17: every move turns the base copy. Turning the turned copy again, as a control, drifts over the bar."""
    pool, freq = bf16_pool(), inv_freq(YARN, D)
    before = [np.asarray(a).view(np.uint16).copy() for a in pool.arrays]
    rows = np.arange(3 * 64, 4 * 64, dtype=np.int32)
    base = np.asarray(pool["k_r"])[0, 3]
    steps = np.random.default_rng(3).integers(-9000, 9000, 16)
    chained, errors = base, []
    for total, step in zip(np.cumsum(steps), steps, strict=True):
        table = pack_fragments([fragments_of(rows, np.full(64, total, np.int32))], freq)
        positions = jnp.arange(64, dtype=jnp.int32)
        _, k_r, _ = _load_block(pool, 0, table, jnp.int32(0), positions, jnp.int32(64))
        errors.append(relative_l2(np.asarray(k_r), turned(base, total, freq)))
        chained = move(chained, step, freq)
    assert max(errors) <= BAR
    # Rounding to bfloat16 once: at most 2^-9 of each value, and whatever the total shift the same on average.
    assert max(errors) <= 1.1 * errors[0]
    assert relative_l2(chained, turned(base, steps.sum(), freq)) > 2 * BAR
    assert all(np.array_equal(np.asarray(a).view(np.uint16), b) for a, b in zip(pool.arrays, before, strict=True))
