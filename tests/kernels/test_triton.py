"""The Triton kernels alone: dense attention over expanded tiles, and merges of more pieces than one load holds."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import absorbed, expanded, mla_extend_expanded
from pallas_kernels.target import Target
from pallas_kernels.triton import MERGE_TILE
from pallas_kernels.tuning import AbsorbedParameters
from tests.kernels import layouts
from tests.kernels.layouts import LAYER, SCALE, double, exact_attention, expand, random_layout
from tests.kernels.test_gpu_kernels import AT, LENGTHS, assert_decode, normal, resize
from tests.support.tolerance import U32, U_BF16, attention_tolerance

R, D, N, W = 64, 32, 32, 16


def test_more_pieces_than_one_load_of_the_merge_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    resize(monkeypatch, R, D)
    monkeypatch.setattr(layouts, "BUCKET", (256, 32))
    layout = random_layout((4500,), seed=11)
    table = jax.tree.map(jnp.asarray, layout.table)
    fragments = int(jnp.sum(table.hi > table.lo))
    assert fragments > MERGE_TILE
    q = normal(1, 16, R), normal(1, 16, D, seed=1)
    got = absorbed.decode(
        *q, layout.pool, jnp.int32(LAYER), table, implementation="triton", scale=SCALE, interpret=True,
        target=Target(platform="gpu", kind="interpreted", capability=90, num_cores=fragments),
        parameters=AbsorbedParameters(block_rows=16, block_keys=64, warps=4, stages=1, programs_per_core=1),
    )  # fmt: skip
    assert_decode(layout, q, got, U32)


@pytest.mark.parametrize(
    ("heads", "dtype", "unit", "lengths", "tile_bytes"),
    [
        pytest.param(1, jnp.float32, U32, LENGTHS, expanded.TILE_BYTES, id="one tile"),
        pytest.param(3, jnp.bfloat16, U_BF16, (*LENGTHS[:-1], 1100), 1, id="tiles merged"),
    ],
)
def test_expanded_equals_float64(
    heads: int, dtype: Any, unit: float, lengths: tuple[int, ...], tile_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    resize(monkeypatch, R, D)
    monkeypatch.setattr(layouts, "BUCKET", (64, 32))
    monkeypatch.setattr(expanded, "TILE_BYTES", tile_bytes)  # 1: the smallest tiles, of 512 keys
    layout = random_layout(lengths, seed=heads, dtype=dtype)
    at = np.where(AT >= 199, lengths[-1] - 1, AT)  # the last token of the longest sequence
    q_nope, q_rope = normal(9, heads, N, dtype=dtype), normal(9, heads, D, dtype=dtype, seed=1)
    key_up, value_up = normal(heads, N, R, seed=2) * R**-0.5, normal(heads, R, W, seed=3) * R**-0.5
    key_up, value_up = key_up.astype(dtype), value_up.astype(dtype)
    got = mla_extend_expanded(
        q_nope, q_rope, *map(jnp.asarray, at), key_up, value_up, layout.pool, LAYER, layout.table,
        scale=SCALE, implementation="triton", interpret=True,
    )  # fmt: skip
    out, lse = (np.asarray(a) for a in got)
    q = double(q_nope, q_rope)
    for i, (position, b) in enumerate(at.T):
        if position < 0:
            assert not out[i].any()
            assert np.isneginf(lse[i]).all()
            continue
        c_kv, k_r = (part[: position + 1] for part in layout.keys(b))
        keys, values = expand(c_kv, k_r, double(key_up), double(value_up))
        expected, expected_lse = exact_attention(q[i], keys, values)
        tolerance = attention_tolerance(q[i], keys, values, SCALE, unit=unit)
        assert np.abs(out[i] - expected).max() <= tolerance
        assert np.abs(lse[i] - expected_lse).max() <= tolerance
