"""Rolling hashes against naive loops; cuts against their definition."""

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from irminsul_jax.cache import hashing
from tests.cache.helpers import join, text

MASK = (1 << 64) - 1


def naive_gear(tokens: np.ndarray) -> list[int]:
    values, h, out = hashing.gear_values(tokens).tolist(), 0, []
    for value in values:
        h = ((h << 1) + value) & MASK
        out.append(h)
    return out


def naive_cuts(tokens: np.ndarray) -> list[int]:
    cuts, start = [], 0
    for i, h in enumerate(naive_gear(tokens)):
        length = i + 1 - start
        if (length >= 32 and h < 1 << 57) or length == 512:
            cuts.append(i + 1)
            start = i + 1
    if start < len(tokens):
        cuts.append(len(tokens))
    return cuts


@pytest.mark.parametrize("length", [1, 2, 31, 32, 63, 64, 65, 1000])
def test_gear_hash_equals_the_loop(length):
    tokens = text(length, length)
    assert hashing.gear_hash(tokens).tolist() == naive_gear(tokens)


def test_gear_hash_is_a_window_of_exactly_64_tokens():
    same_tail = text(1, 64)
    a, b = (hashing.gear_hash(join(text(s, 50), same_tail))[-1] for s in (2, 3))
    assert a == b
    changed = same_tail.copy()
    changed[0] += 1
    # The oldest token is shifted by 63: one bit of it is left.
    values = hashing.gear_values(same_tail[:1]) ^ hashing.gear_values(changed[:1])
    assert (hashing.gear_hash(changed)[-1] != hashing.gear_hash(same_tail)[-1]) == bool(values[0] & np.uint64(1))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 3000), st.sampled_from([2, 50, 100_000]))
def test_gear_cuts_equal_the_loop_and_the_clamp(seed, length, vocabulary):
    tokens = text(seed, length) % vocabulary
    cuts = hashing.gear_cuts(tokens).tolist()
    assert cuts == naive_cuts(tokens)
    sizes = np.diff([0, *cuts])
    assert (sizes <= 512).all()
    assert (sizes[:-1] >= 32).all()


def test_chunks_carry_the_xxhash64_of_their_tokens_and_resynchronise():
    body = text(1, 5000)
    a, b = hashing.gear_chunks(body), hashing.gear_chunks(join(text(2, 77), body))
    for start, length, key in zip(a.starts[:3], a.lengths[:3], a.keys[:3], strict=True):
        assert int(key) == xxhash.xxh64_intdigest(body[start : start + length].astype("<i4").tobytes())
    assert np.isin(a.keys, b.keys).mean() > 0.85


@pytest.mark.parametrize("length", [1, 31, 32, 33, 200])
def test_window_hash_depends_on_its_32_tokens_alone(length):
    tokens = text(1, length)
    keys = hashing.window_hash(tokens)
    assert len(keys) == max(0, length - 31)
    for at in range(0, len(keys), 7):
        assert keys[at] == hashing.window_hash(tokens[at : at + 32])[0]
        for edit in (0, 13, 31):
            other = tokens[at : at + 32].copy()
            other[edit] += 1
            assert hashing.window_hash(other)[0] != keys[at]
        assert hashing.window_hash(tokens[at : at + 32][::-1].copy())[0] != keys[at]


def test_fixed_windows_and_anchors_lie_on_their_grids():
    tokens = text(1, 700)
    assert hashing.fixed_windows(tokens, 128).starts.tolist() == [0, 128, 256, 384, 512]
    assert len(hashing.fixed_windows(tokens[:127], 128).starts) == 0
    assert hashing.anchors(tokens, 8).starts.tolist() == list(range(0, 669, 8))
