"""The attention ops against float64 NumPy: ragged lengths, cut and shuffled pages, poisoned memory, large shifts."""

from __future__ import annotations

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import FragmentTable, mla_decode, mla_extend, mla_extend_expanded
from tests.kernels.layouts import (
    LAYER,
    SCALE,
    D,
    Layout,
    R,
    double,
    exact_attention,
    expand,
    poisoned_pool,
    random_layout,
)
from tests.support.tolerance import U32, U_BF16, attention_tolerance

LENGTHS = (0, 1, 63, 64, 65, 511, 512, 513, 1025)
HEADS = (1, 3, 4)

decode = jax.jit(functools.partial(mla_decode, layer=LAYER, scale=SCALE))
extend = jax.jit(functools.partial(mla_extend, layer=LAYER, scale=SCALE))
extend_expanded = jax.jit(functools.partial(mla_extend_expanded, layer=LAYER, scale=SCALE))


def queries(count: int, heads: int, *, seed: int, dtype=jnp.float32) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    latent, rope = (jnp.asarray(rng.standard_normal((count, heads, n)), dtype) for n in (R, D))
    return latent, rope


def assert_decode_is_exact(layout: Layout, q: tuple[jax.Array, jax.Array], unit: float) -> None:
    out, lse = (np.asarray(a) for a in decode(q_latent=q[0], q_rope=q[1], pool=layout.pool, table=layout.table))
    assert out.dtype == lse.dtype == np.float32
    for b, length in enumerate(map(len, layout.rows)):
        c_kv, k_r = layout.keys(b)
        keys = np.concatenate([c_kv, k_r], axis=-1)
        expected, expected_lse = exact_attention(double(*q)[b], keys, c_kv)
        if not length:
            assert (out[b] == 0).all()
            assert (lse[b] == -np.inf).all()
            continue
        tolerance = attention_tolerance(double(*q)[b], keys, c_kv, SCALE, unit=unit)
        assert np.abs(out[b] - expected).max() <= tolerance
        assert np.abs(lse[b] - expected_lse).max() <= tolerance


@pytest.mark.parametrize("heads", HEADS)
def test_decode_equals_float64_for_a_ragged_batch_with_empty_members(heads: int) -> None:
    layout = random_layout(LENGTHS, seed=heads)
    shifts = np.concatenate(layout.shifts)
    assert shifts.max() > 100_000
    assert shifts.min() < -100_000
    assert_decode_is_exact(layout, queries(len(LENGTHS), heads, seed=heads), U32)


def test_decode_from_a_bfloat16_pool() -> None:
    layout = random_layout(LENGTHS, seed=9, dtype=jnp.bfloat16)
    assert_decode_is_exact(layout, queries(len(LENGTHS), 4, seed=9, dtype=jnp.bfloat16), U_BF16)


def test_decode_with_the_same_donor_rows_twice_under_two_shifts() -> None:
    """Case 10: one document at two places of one prompt."""
    donor = np.arange(5 * 64 + 10, 5 * 64 + 150)
    rows = np.r_[np.arange(20 * 64, 20 * 64 + 40), donor, np.arange(30 * 64 + 7, 30 * 64 + 27), donor].astype(np.int32)
    shifts = np.r_[np.zeros(40), np.full(140, -431), np.zeros(20), np.full(140, 123_456)].astype(np.int32)
    layout = Layout(rows=[rows], shifts=[shifts], pool=poisoned_pool(rows, seed=1))
    same = Layout(rows=[rows], shifts=[np.zeros_like(shifts)], pool=layout.pool)
    q = queries(1, 4, seed=2)
    assert_decode_is_exact(layout, q, U32)
    outs = [np.asarray(decode(q_latent=q[0], q_rope=q[1], pool=m.pool, table=m.table)[0]) for m in (layout, same)]
    assert np.abs(outs[0] - outs[1]).max() > 1e-2


def every_query(positions: dict[int, list[int]], padding: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions and sequences of queries in mixed order, with padding (position −1) in between and behind."""
    pairs = [(p, b) for b, own in positions.items() for p in own] + [(-1, 0)] * padding
    order = np.random.default_rng(0).permutation(len(pairs))
    position, sequence = np.array(pairs, np.int32)[order].T
    return position, sequence


POSITIONS = {
    1: [0],
    2: [0, 31, 62],
    3: [63],
    4: [0, 63, 64],
    5: [510],
    6: [511],
    7: [511, 512],
    8: [0, 64, 512, 1024, 700],
}


def assert_extend_is_exact(heads: int, dtype, unit: float, *, expanded: bool) -> None:
    layout = random_layout(LENGTHS, seed=20 + heads, dtype=dtype)
    position, sequence = every_query(POSITIONS, padding=6)
    q_latent, q_rope = queries(len(position), heads, seed=heads, dtype=dtype)
    common = {
        "q_rope": q_rope,
        "q_position": jnp.asarray(position),
        "q_sequence": jnp.asarray(sequence),
        "pool": layout.pool,
        "table": layout.table,
    }
    rng = np.random.default_rng(heads)
    key_up = jnp.asarray(rng.standard_normal((heads, 24, R)) * R**-0.5, dtype)
    value_up = jnp.asarray(rng.standard_normal((heads, R, 16)) * R**-0.5, dtype)
    if expanded:
        q_nope = q_latent[..., :24]
        out, lse = extend_expanded(q_nope=q_nope, key_up=key_up, value_up=value_up, **common)
        q = double(q_nope, q_rope)
    else:
        out, lse = extend(q_latent=q_latent, **common)
        q = double(q_latent, q_rope)
    out, lse = np.asarray(out), np.asarray(lse)
    for i, (p, b) in enumerate(zip(position, sequence, strict=True)):
        if p < 0:
            assert (out[i] == 0).all()
            assert (lse[i] == -np.inf).all()
            continue
        c_kv, k_r = (part[: p + 1] for part in layout.keys(b))
        keys, values = np.concatenate([c_kv, k_r], axis=-1), c_kv
        if expanded:
            keys, values = expand(c_kv, k_r, double(key_up), double(value_up))
        expected, expected_lse = exact_attention(q[i], keys, values)
        tolerance = attention_tolerance(q[i], keys, values, SCALE, unit=unit)
        assert np.abs(out[i] - expected).max() <= tolerance
        assert np.abs(lse[i] - expected_lse).max() <= tolerance


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("expanded", [False, True], ids=["absorbed", "expanded"])
def test_extend_equals_float64_for_several_sequences_at_once(expanded: bool, heads: int) -> None:
    """Queries of eight sequences in mixed order; one sequence is empty; each sees its own past only."""
    assert_extend_is_exact(heads, jnp.float32, U32, expanded=expanded)


@pytest.mark.parametrize("expanded", [False, True], ids=["absorbed", "expanded"])
def test_extend_from_a_bfloat16_pool(expanded: bool) -> None:
    assert_extend_is_exact(4, jnp.bfloat16, U_BF16, expanded=expanded)


def part_of(table: FragmentTable, begin: np.ndarray, end: np.ndarray) -> FragmentTable:
    """The table with the rows at target positions in `[begin, end)` alone."""
    lo = np.clip(begin[:, None] - table.start, table.lo, table.hi)
    hi = np.clip(end[:, None] - table.start, lo, table.hi)
    return dataclasses.replace(table, lo=lo.astype(np.int32), hi=hi.astype(np.int32))


def test_partial_results_merge_by_their_natural_log_sum_exp() -> None:
    lengths = np.array(LENGTHS, np.int32)
    layout = random_layout(LENGTHS, seed=33)
    q = queries(len(LENGTHS), 4, seed=33)
    middle = lengths * 2 // 3
    tables = (layout.table, part_of(layout.table, lengths * 0, middle), part_of(layout.table, middle, lengths))
    (whole, whole_lse), *parts = (
        tuple(np.asarray(a, np.float64) for a in decode(q_latent=q[0], q_rope=q[1], pool=layout.pool, table=t))
        for t in tables
    )
    lse = np.logaddexp(parts[0][1], parts[1][1])
    some = np.isfinite(lse)
    assert (np.isfinite(whole_lse) == some).all()
    merged = sum(o[some] * np.exp(part[some] - lse[some])[:, None] for o, part in parts)
    keys, values = np.ones((1025, R + D)), np.ones((1025, R))  # unit variance, the longest member
    tolerance = 2 * attention_tolerance(double(*q), keys, values, SCALE)
    assert np.abs(merged - whole[some]).max() <= tolerance
    assert np.abs(lse[some] - whole_lse[some]).max() <= tolerance


def test_rows_beyond_until_are_not_read() -> None:
    layout = random_layout((1025, 300), seed=40)
    shorter = Layout(rows=[layout.rows[0][:600], layout.rows[1][:5]], shifts=[layout.shifts[0][:600], layout.shifts[1][:5]],
                     pool=poisoned_pool(np.r_[layout.rows[0][:600], layout.rows[1][:5]], seed=40))  # fmt: skip
    q = queries(2, 4, seed=40)
    table = jax.tree.map(jnp.asarray, layout.table).until(jnp.array([600, 5]))
    out, lse = decode(q_latent=q[0], q_rope=q[1], pool=shorter.pool, table=table)
    expected, expected_lse = decode(q_latent=q[0], q_rope=q[1], pool=shorter.pool, table=shorter.table)
    assert np.array_equal(out, expected)
    assert np.array_equal(lse, expected_lse)


def test_an_unknown_implementation_is_refused_with_the_list_of_known_ones() -> None:
    layout, q = random_layout((5,), seed=1), queries(1, 1, seed=1)
    one = jnp.zeros(1, jnp.int32)
    up = jnp.zeros((1, 24, R)), jnp.zeros((1, R, 16))
    # The type checker of the tests would refuse the name before the ops themselves can.
    decode_op, extend_op, expanded_op = map(inspect.unwrap, (mla_decode, mla_extend, mla_extend_expanded))
    calls = (
        lambda name: decode_op(*q, layout.pool, 0, layout.table, scale=1.0, implementation=name),
        lambda name: extend_op(*q, one, one, layout.pool, 0, layout.table, scale=1.0, implementation=name),
        lambda name: expanded_op(
            q[0][..., :24], q[1], one, one, *up, layout.pool, 0, layout.table, scale=1.0, implementation=name
        ),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"unknown implementation 'cudnn'; known: .*xla"):
            call("cudnn")
        jax.eval_shape(functools.partial(call, "xla"))
