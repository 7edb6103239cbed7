"""The TPU kernels without a TPU: numbers in the interpreter of Mosaic, which also finds races."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # private: before 0.12 a race does not raise
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import PAGE_SIZE, FragmentTable, LatentPool, fragments_of, pack_fragments
from pallas_kernels.call import Call
from pallas_kernels.mosaic_tpu import attend, block_rows, flash, why_not
from pallas_kernels.pool import PoolLayout, to_stored
from pallas_kernels.schedule import decode_items, extend_items
from pallas_kernels.target import Target
from tests.kernels.layouts import exact_attention, turned
from tests.kernels.tpu_compile import pool_shapes, specs, table_shapes
from tests.support.tolerance import U32, U_BF16, attention_tolerance

R, D, LAYERS, LAYER, PAGES = 128, 64, 2, 1, 48
SCALE = (R + D) ** -0.5
INV_FREQ = 10000.0 ** (-2.0 * np.arange(D // 2) / D)
LENGTHS = (0, 1, 63, 0, 0, 64, 65, 560, 200, 0)
UNIT = {jnp.float32: U32, jnp.bfloat16: U_BF16}

PAGES_PER_STEP = 4
"""Fewer than in production: more steps, and less to trace, from the same number of pages."""

SIMULATED = pltpu.InterpretParams(detect_races=True, vector_clock_size=64)
"""With the default clock of size 2, all copies share one component and order each other: races stay hidden."""


@pytest.fixture(autouse=True)
def _simulator() -> Iterator[None]:
    pltpu.reset_tpu_interpret_mode_state()
    yield
    pltpu.reset_tpu_interpret_mode_state()


def race_found() -> bool:
    get = getattr(interpret_pallas_call, "get_races", None)
    races = get() if get else interpret_pallas_call.races
    return bool(races and races.races_found)


# Layouts: sequences of pieces with a shift each, in pages whose other rows are NaN.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    rows: list[np.ndarray]
    shifts: list[np.ndarray]
    pool: LatentPool
    table: FragmentTable

    def keys(self, b: int) -> tuple[np.ndarray, np.ndarray]:
        """`(keys [S, R + D] with the rotary part at its target position, latents [S, R])` in float64."""
        page, slot = self.rows[b] // PAGE_SIZE, self.rows[b] % PAGE_SIZE
        c_kv, k_r = (np.asarray(self.pool.read(n, LAYER, page, slot)).astype(np.float64) for n in ("c_kv", "k_r"))
        return np.concatenate([c_kv, turned(k_r, self.shifts[b], INV_FREQ)], axis=1), c_kv


def case_of(rows: list[np.ndarray], shifts: list[np.ndarray], dtype: Any, *, seed: int) -> Case:
    rng = np.random.default_rng(seed)
    used = np.unique(np.concatenate(rows))
    values = {}
    for spec in specs(dtype, R, D):
        all_rows = np.full((LAYERS, PAGES * PAGE_SIZE, spec.width), np.nan, np.float32)
        all_rows[LAYER, used] = rng.standard_normal((len(used), spec.width))
        values[spec.name] = jnp.asarray(all_rows.reshape(LAYERS, PAGES, PAGE_SIZE, spec.width))
    pool = LatentPool.from_rows(specs(dtype, R, D), "lanes", **values)
    fragments = [fragments_of(r.astype(np.int32), s.astype(np.int32)) for r, s in zip(rows, shifts, strict=True)]
    return Case(rows=rows, shifts=shifts, pool=pool, table=pack_fragments(fragments, INV_FREQ))


def ragged_case(dtype: Any, *, seed: int, lengths: tuple[int, ...] = LENGTHS) -> Case:
    """Sequences of pieces, whole pages and cut ones, that start anywhere in shuffled pages."""
    rng = np.random.default_rng(seed)
    shifts_in_use = itertools.cycle([160_000, -160_000, 0, 1, -5, 123_457])
    pages = rng.permutation(np.arange(1, PAGES - 1))
    rows, shifts = [], []
    for length in lengths:
        own_rows, own_shifts = [np.zeros(0, int)], [np.zeros(0, int)]
        while length:
            size = min(length, int(rng.choice([int(rng.integers(1, 64)), 64, 100])))
            offset = 0 if size == 64 else int(rng.integers(PAGE_SIZE))
            own_rows.append(int(rng.choice(pages)) * PAGE_SIZE + offset + np.arange(size))
            own_shifts.append(np.full(size, next(shifts_in_use)))
            length -= size
        rows.append(np.minimum(np.concatenate(own_rows), PAGES * PAGE_SIZE - 1))
        shifts.append(np.concatenate(own_shifts))
    longest = int(np.argmax([len(r) for r in rows]))
    size = len(rows[longest]) // 3
    rows[longest][-size:] = rows[longest][:size]  # one donor at two places, shifted differently
    shifts[longest][-size:] = shifts[longest][:size] - 431
    return case_of(rows, shifts, dtype, seed=seed)


# Calling the kernel with tokens and heads.


def queries(tokens: int, heads: int, dtype: Any, *, seed: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    latent, rope = (jnp.asarray(rng.standard_normal((tokens, heads, n)), dtype) for n in (R, D))
    return latent, rope


def run_decode(
    case: Case, q_latent: jax.Array, q_rope: jax.Array, *, block_rows: int = 16, pages_per_step: int = PAGES_PER_STEP
) -> tuple[np.ndarray, np.ndarray]:
    B, H, _ = q_latent.shape
    padding = ((0, 0), (0, -H % block_rows), (0, 0))
    q_latent, q_rope = jnp.pad(q_latent, padding), jnp.pad(q_rope, padding)
    blocks = q_latent.shape[1] // block_rows
    out, lse = attend(
        q_latent.reshape(-1, R),
        to_stored(q_rope.reshape(-1, D), case.pool.spec("k_r"), "lanes"),
        None,
        None,
        case.pool,
        LAYER,
        case.table,
        decode_items(case.table, blocks),
        scale=SCALE,
        block_rows=block_rows,
        pages_per_step=pages_per_step,
        interpret=SIMULATED,
    )
    return np.asarray(out).reshape(B, -1, R)[:, :H], np.asarray(lse).reshape(B, -1)[:, :H]


def assert_close(
    out: np.ndarray, lse: np.ndarray, q: tuple[jax.Array, jax.Array], keys: np.ndarray, values: np.ndarray, unit: float
) -> None:
    """One query `[H]` against the keys that it sees."""
    joined = np.concatenate([np.asarray(x).astype(np.float64) for x in q], axis=-1)
    exact, exact_lse = exact_attention(joined, keys, values, SCALE)
    if not len(keys):
        assert (out == 0).all()
        assert (lse == -np.inf).all()
        return
    tolerance = attention_tolerance(joined, keys, values, SCALE, unit=unit)
    np.testing.assert_allclose(out, exact, rtol=0, atol=tolerance)
    np.testing.assert_allclose(lse, exact_lse, rtol=0, atol=tolerance)


def assert_decode_is_exact(case: Case, heads: int, dtype: Any, **how: Any) -> None:
    q = queries(len(case.rows), heads, dtype, seed=heads)
    out, lse = run_decode(case, *q, **how)
    assert out.dtype == lse.dtype == np.float32
    for b in range(len(case.rows)):
        assert_close(out[b], lse[b], (q[0][b], q[1][b]), *case.keys(b), UNIT[dtype])
    assert not race_found()


@pytest.mark.parametrize(
    ("heads", "pages_per_step", "dtype"),
    [(1, 2, jnp.float32), (3, 4, jnp.bfloat16), (16, 8, jnp.bfloat16), (20, 2, jnp.float32)],
)
def test_decode_equals_float64_for_a_ragged_batch_with_empty_members(
    heads: int, pages_per_step: int, dtype: Any
) -> None:
    case = ragged_case(dtype, seed=heads)
    assert {160_000, -160_000} <= set(np.concatenate(case.shifts))
    assert_decode_is_exact(case, heads, dtype, pages_per_step=pages_per_step)


def test_decode_with_a_table_that_turns_nothing() -> None:
    rows = np.arange(3 * 64 + 5, 3 * 64 + 205)
    case = case_of([rows], [np.zeros_like(rows)], jnp.bfloat16, seed=2)
    table = dataclasses.replace(case.table, cos=case.table.cos[:1], sin=case.table.sin[:1])
    assert_decode_is_exact(dataclasses.replace(case, table=table), 3, jnp.bfloat16)


def test_the_layer_and_the_lengths_may_be_traced() -> None:
    """All layers of a scan share one kernel, and a decode loop moves the end of its table on the device. The interpreter
    that compiles serves here; queries are in plain layout."""
    case = ragged_case(jnp.float32, seed=6, lengths=(100, 40, 65))
    lengths = np.array([80, 0, 65])
    heads, padding = 3, ((0, 0), (0, 13), (0, 0))
    q = queries(3, heads, jnp.float32, seed=6)
    rows = [jnp.pad(x, padding).reshape(48, -1) for x in q]

    @jax.jit
    def run(pool: LatentPool, layer: Any, table: FragmentTable, lengths: Any) -> Any:
        table = table.until(lengths)
        how = dict(scale=SCALE, block_rows=16, pages_per_step=2, interpret=True)
        return attend(*rows, None, None, pool, layer, table, decode_items(table, 1), **how)

    out, lse = (np.asarray(x) for x in run(case.pool, LAYER, case.table, lengths))
    for b, length in enumerate(lengths):
        own = slice(16 * b, 16 * b + heads)
        keys, values = case.keys(b)
        assert_close(out[own], lse[own], (q[0][b], q[1][b]), keys[:length], values[:length], U32)


POSITIONS = {0: [0, 29], 1: [0], 2: [0, 31, 62], 5: [63], 6: [0, 64], 7: [0, 511, 512, 559], 8: [63, 64, 65, 66, 199]}


@pytest.mark.parametrize(("heads", "dtype"), [(3, jnp.float32), (5, jnp.bfloat16)])
def test_extend_equals_float64_with_several_sequences_in_a_block(heads: int, dtype: Any) -> None:
    rows_of_block = 32
    case = ragged_case(dtype, seed=20 + heads, lengths=(30, *LENGTHS[1:]))
    pairs = [(p, b) for b, own in POSITIONS.items() for p in own]
    padding = -len(pairs) % rows_of_block
    position, sequence = np.array(pairs + [(-1, pairs[-1][1])] * padding, np.int32).T
    q = queries(len(position), heads, dtype, seed=heads)
    row_position, row_sequence = (jnp.repeat(jnp.asarray(x), heads) for x in (position, sequence))
    items = extend_items(row_position, row_sequence, case.table, rows_of_block)
    assert np.bincount(np.asarray(items.block)[np.asarray(items.count) > 0]).max() > 2
    out, lse = attend(
        q[0].reshape(-1, R),
        to_stored(q[1].reshape(-1, D), case.pool.spec("k_r"), "lanes"),
        row_position,
        row_sequence,
        case.pool,
        LAYER,
        case.table,
        items,
        scale=SCALE,
        block_rows=rows_of_block,
        pages_per_step=PAGES_PER_STEP,
        interpret=SIMULATED,
    )
    out, lse = np.asarray(out).reshape(-1, heads, R), np.asarray(lse).reshape(-1, heads)
    for t, (p, b) in enumerate(zip(position, sequence, strict=True)):
        keys, values = case.keys(b)
        assert_close(out[t], lse[t], (q[0][t], q[1][t]), keys[: p + 1], values[: p + 1], UNIT[dtype])
    assert not race_found()


@pytest.mark.parametrize(
    ("T", "S", "num_keys", "first", "dtype"),
    [(20, 700, 650, 100, jnp.float32), (140, 600, 600, 0, jnp.bfloat16)],
)
def test_flash_equals_float64(T: int, S: int, num_keys: int, first: int, dtype: Any) -> None:
    H, N, W = 2, 48, 40
    rng = np.random.default_rng(T)
    q_nope, q_rope, keys, values = (
        jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((H, T, N), (H, T, D), (H, S, N), (H, S, W))
    )
    k_rope = jnp.asarray(rng.standard_normal((S, D)), dtype).at[num_keys:].set(0)
    keys, values = keys.at[:, num_keys:].set(0), values.at[:, num_keys:].set(0)
    q_limit = rng.integers(first - 1, first + S, T).astype(np.int32)
    q_limit[:3] = -1, first, first + num_keys - 1
    q_limit[128:] = -1  # a block of queries that sees nothing
    scale = (N + D) ** -0.5
    out, lse = flash(
        *(q_nope, q_rope, keys, k_rope, values, jnp.asarray(q_limit), jnp.int32(num_keys), jnp.int32(first)),
        scale=scale,
        interpret=SIMULATED,
    )
    assert out.dtype == lse.dtype == jnp.float32
    q_nope, q_rope, keys, k_rope, values = (
        np.asarray(x).astype(np.float64) for x in (q_nope, q_rope, keys, k_rope, values)
    )
    q = np.concatenate([q_nope, q_rope], axis=-1)
    k = np.concatenate([keys, np.broadcast_to(k_rope, (H, S, D))], axis=-1)
    for t in range(T):
        n = int(np.clip(q_limit[t] - first + 1, 0, num_keys))
        exact, exact_lse = exact_attention(q[:, t], k[:, :n], values[:, :n], scale)
        tolerance = attention_tolerance(q[:, t], k[:, :n], values[0, :n], scale, unit=UNIT[dtype]) if n else 0
        np.testing.assert_allclose(out[:, t], exact, rtol=0, atol=tolerance)
        np.testing.assert_allclose(lse[:, t], exact_lse, rtol=0, atol=tolerance)
    assert not race_found()


# Controls: what the tests above would notice.


def test_a_flipped_shift_is_noticed() -> None:
    case = ragged_case(jnp.float32, seed=3, lengths=(200,))
    flipped = dataclasses.replace(case, table=dataclasses.replace(case.table, sin=-case.table.sin))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_decode_is_exact(flipped, 3, jnp.float32)


def test_a_missing_wait_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unawaited:
        def __init__(self, *args: Any) -> None:
            self.start = make_async_copy(*args).start

        def wait(self) -> None:
            pass

    make_async_copy = pltpu.make_async_copy
    monkeypatch.setattr(pltpu, "make_async_copy", Unawaited)
    case = ragged_case(jnp.float32, seed=4, lengths=(130,))
    try:
        out, _ = run_decode(case, *queries(1, 2, jnp.float32, seed=4))
    except Exception as error:
        assert "race" in str(error).lower()  # noqa: PT017
    else:
        assert race_found() or np.isnan(out).any()


# What does not fit is refused, with the reason.


def empty_pool(dtype: Any = jnp.bfloat16, rank: int = R, rope: int = D, layout: PoolLayout = "lanes") -> LatentPool:
    return LatentPool.create(specs(dtype, rank, rope), num_layers=1, num_pages=2, layout=layout)


def call_of(**changes: Any) -> Call:
    """A call that fits, but for the changes."""
    fitting = Call(
        op="decode",
        num_tokens=64,
        heads=16,
        query_dtype=jnp.dtype(jnp.bfloat16),
        pool=pool_shapes(),
        table=table_shapes(),
        target=Target(platform="tpu", kind="TPU v6 lite"),
        interpret=False,
    )
    return dataclasses.replace(fitting, **changes)


CPU = Target(platform="cpu", kind="cpu")


@pytest.mark.parametrize(
    "fitting",
    [
        call_of(),
        call_of(heads=128, table=table_shapes(1, 8192, 8192)),
        call_of(op="extend", num_tokens=4096, heads=128),
        call_of(op="extend", query_dtype=jnp.dtype(jnp.float32), pool=pool_shapes(jnp.float32)),
        call_of(op="extend_expanded", pool=empty_pool(layout="plain")),
        call_of(target=CPU, interpret=True),
    ],
)
def test_what_fits(fitting: Call) -> None:
    assert why_not(fitting) is None


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (call_of(target=CPU), "needs a TPU"),
        (call_of(query_dtype=jnp.dtype(jnp.float16)), "queries are float16"),
        (call_of(query_dtype=jnp.dtype(jnp.float32)), "queries are float32 and the pool's latents bfloat16"),
        (call_of(pool=empty_pool(layout="plain")), "layout 'lanes', this one has 'plain'"),
        (call_of(pool=empty_pool(jnp.float8_e4m3fn)), "the pool's latents float8_e4m3fn"),
        (call_of(pool=empty_pool(rank=96)), "latents are 96 wide"),
        (call_of(pool=empty_pool(rope=192)), "rotary keys are 192 wide"),
        (call_of(pool=empty_pool(rank=16384), heads=128), "vector memory"),
        (call_of(table=table_shapes(64, 2048)), "64x2048 fragments"),
        (call_of(table=table_shapes(turns=2**17)), "distinct shifts"),
    ],
)
def test_what_does_not_fit_says_why(call: Call, reason: str) -> None:
    assert reason in (why_not(call) or "")


@pytest.mark.parametrize(("heads", "rows"), [(1, 16), (16, 16), (20, 32), (64, 64), (128, 128), (192, 96), (130, 80)])
def test_blocks_hold_the_heads_of_a_token(heads: int, rows: int) -> None:
    assert block_rows("decode", heads) == rows
    assert block_rows("extend", heads) % 16 == 0


def test_what_does_not_fit_raises_before_anything_runs() -> None:
    case = ragged_case(jnp.float32, seed=7, lengths=(10,))
    q = queries(1, 1, jnp.float32, seed=7)
    plain = LatentPool.create(specs(jnp.float32, R, D), num_layers=2, num_pages=2)
    with pytest.raises(ValueError, match="this one has 'plain'"):
        run_decode(dataclasses.replace(case, pool=plain), *q)
    items = decode_items(case.table, 1)
    with pytest.raises(ValueError, match="not a multiple of blocks"):
        attend(
            *(jnp.zeros((24, R)), jnp.zeros((24, 128)), None, None, case.pool, 0, case.table, items),
            scale=1.0,
            block_rows=16,
        )
