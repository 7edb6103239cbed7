"""The three routers against a loop over tokens and experts, and the cases in which others got them wrong."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from irminsul_jax.config import MoeConfig, RouterKind
from irminsul_jax.model.moe import experts_dense, ordered_sum, route
from irminsul_jax.model.params import MoeParams
from tests.support.tolerance import SIGMAS, U32

HIDDEN, EXPERTS = 32, 16
_route = jax.jit(route, static_argnames="config")


def moe_config(router: RouterKind, **changes) -> MoeConfig:
    fields: dict[str, Any] = {"num_experts": EXPERTS, "experts_per_token": 3, "expert_dim": 8, "num_shared_experts": 0}
    fields |= {"router": router, "num_groups": 4, "groups_per_token": 2, "scale": 2.5}
    return MoeConfig(**(fields | changes))


def router_params(router: np.ndarray, bias: np.ndarray | None) -> MoeParams:
    none = jnp.zeros((router.shape[1], 1, 1), jnp.float32)
    return MoeParams(
        router=jnp.asarray(router, jnp.float32),
        router_bias=None if bias is None else jnp.asarray(bias, jnp.float32),
        gate=none,
        up=none,
        down=none,
        shared=None,
    )


def naive_route(scores: np.ndarray, choice: np.ndarray, config: MoeConfig) -> tuple[list[int], list[float]]:
    """One token. Scans experts in order and replaces only by strictly better ones, so ties go to the lower index."""

    def best(values: dict[int, float], count: int) -> list[int]:
        left, taken = dict(values), []
        for _ in range(count):
            winner = min(left)
            for i in sorted(left):
                if left[i] > left[winner]:
                    winner = i
            taken.append(winner)
            del left[winner]
        return taken

    allowed = dict(enumerate(choice))
    if config.router != "softmax_greedy" and config.num_groups > 1:
        size = len(choice) // config.num_groups
        members = [range(g * size, (g + 1) * size) for g in range(config.num_groups)]
        wanted = 2 if config.router == "sigmoid_bias_grouped" else 1
        merit = {g: float(sum(sorted((choice[e] for e in m), reverse=True)[:wanted])) for g, m in enumerate(members)}
        kept = best(merit, config.groups_per_token)
        allowed = {e: choice[e] for g in kept for e in members[g]}
    chosen = best(allowed, config.experts_per_token)
    weights = [scores[e] for e in chosen]
    if config.normalize:
        weights = [w / sum(weights) for w in weights]
    return chosen, [w * config.scale for w in weights]


def scores_of(logits: np.ndarray, config: MoeConfig) -> np.ndarray:
    if config.router == "sigmoid_bias_grouped":
        return 1 / (1 + np.exp(-logits))
    odds = np.exp(logits - logits.max(-1, keepdims=True))
    return odds / odds.sum(-1, keepdims=True)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("router", ["softmax_greedy", "softmax_group_limited_greedy", "sigmoid_bias_grouped"])
def test_each_router_equals_a_naive_loop(router: RouterKind, normalize: bool) -> None:
    rng = np.random.default_rng(1)
    config = moe_config(router, normalize=normalize)
    matrix, x = rng.standard_normal((HIDDEN, EXPERTS)) * HIDDEN**-0.5, rng.standard_normal((64, HIDDEN))
    matrix, x = matrix.astype(np.float32), x.astype(np.float32)
    bias = (0.3 * rng.standard_normal(EXPERTS)).astype(np.float32) if router == "sigmoid_bias_grouped" else None
    experts, weights = _route(router_params(matrix, bias), config, jnp.asarray(x))
    scores = scores_of(x.astype(np.float64) @ matrix.astype(np.float64), config)
    choice = scores if bias is None else scores + bias
    groups_disagree = 0
    for t in range(len(x)):
        chosen, expected = naive_route(scores[t], choice[t], config)
        assert experts[t].tolist() == chosen
        # A score's relative error is the absolute one of its logit: a sum of HIDDEN products of size 1/sqrt(HIDDEN).
        np.testing.assert_allclose(weights[t], expected, rtol=SIGMAS * U32 * (HIDDEN**0.5 + EXPERTS**0.5))
        groups_disagree += chosen != naive_route(scores[t], choice[t], moe_config("softmax_greedy"))[0]
    assert (groups_disagree > 0) == (router != "softmax_greedy")  # the group limit binds in this data


def decide(router: RouterKind, logits: list[float], bias: list[float] | None = None, **changes):
    """Routes one token whose router logits are given outright."""
    config = moe_config(router, num_experts=len(logits), **changes)
    x = jnp.ones((1, 1), jnp.float32)
    experts, weights = _route(router_params(np.array([logits]), None if bias is None else np.array(bias)), config, x)
    return experts[0].tolist(), np.asarray(weights[0])


def test_v2_ranks_groups_by_their_maximum_and_v3_by_the_sum_of_their_best_two() -> None:
    # Group 0 has the single best expert, group 1 the best pair.
    logits = [2.0, -4.0, -4.0, -4.0, 1.0, 1.0, -4.0, -4.0]
    changes: dict[str, Any] = {"num_groups": 2, "groups_per_token": 1, "experts_per_token": 2}
    assert decide("softmax_group_limited_greedy", logits, **changes)[0] == [0, 1]
    assert decide("sigmoid_bias_grouped", logits, [0.0] * 8, **changes)[0] == [4, 5]
    assert decide("softmax_greedy", logits, **changes)[0] == [0, 4]


def test_masked_groups_are_minus_infinity_so_that_negative_choices_still_win() -> None:
    """Case 29: the correction bias makes every choice of the kept group negative; masks of 0.0 would let the others in."""
    bias = [-2.0] * 4 + [-3.0] * 4
    experts, weights = decide(
        "sigmoid_bias_grouped", [0.0] * 8, bias, num_groups=2, groups_per_token=1, experts_per_token=3
    )
    assert experts == [0, 1, 2]
    np.testing.assert_allclose(weights, [0.5 * 2.5] * 3, rtol=4 * U32)


def test_the_correction_bias_moves_the_choice_but_never_the_weights() -> None:
    """Case 30."""
    logits = [3.0, 2.0, 1.0, 0.0]
    changes: dict[str, Any] = {"num_groups": 1, "groups_per_token": 1, "experts_per_token": 2}
    without = decide("sigmoid_bias_grouped", logits, [0.0] * 4, **changes)
    with_bias = decide("sigmoid_bias_grouped", logits, [0.0, 0.0, 0.0, 5.0], **changes)
    assert (without[0], with_bias[0]) == ([0, 1], [3, 0])
    expected = 2.5 / (1 + np.exp(-np.array([0.0, 3.0])))
    np.testing.assert_allclose(with_bias[1], expected, rtol=8 * U32)
    normalized = decide("sigmoid_bias_grouped", logits, [0.0, 0.0, 0.0, 5.0], normalize=True, **changes)[1]
    np.testing.assert_allclose(normalized, 2.5 * expected / expected.sum(), rtol=16 * U32)


def test_the_correction_bias_decides_at_float32_precision() -> None:
    """Case 30: 7.001 and 7.002 are one value in bfloat16."""
    close = [7.001, 7.002, 7.0, 7.0]
    assert len({float(ml_dtypes.bfloat16(v)) for v in close}) == 1
    experts, _ = decide("sigmoid_bias_grouped", [0.0] * 4, close, num_groups=1, groups_per_token=1, experts_per_token=1)
    assert experts == [1]


@pytest.mark.parametrize("router", ["softmax_greedy", "softmax_group_limited_greedy", "sigmoid_bias_grouped"])
def test_ties_choose_the_lower_index(router: RouterKind) -> None:
    bias = [0.0] * 8 if router == "sigmoid_bias_grouped" else None
    assert decide(router, [0.0] * 8, bias, num_groups=4, experts_per_token=3)[0] == [0, 1, 2]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 64])
def test_ordered_sum_is_the_sum_and_does_not_depend_on_the_number_of_rows(size: int) -> None:
    x = np.random.default_rng(size).standard_normal((300, size)).astype(np.float32)
    summed = jax.jit(lambda a: ordered_sum(a, -1))
    total = np.asarray(summed(x))
    assert total.shape == (300, 1)
    bound = U32 * np.ceil(np.log2(max(size, 2))) * np.abs(x).astype(np.float64).sum(-1)
    assert (np.abs(total[:, 0] - x.astype(np.float64).sum(-1)) <= bound).all()
    for rows in (1, 7, 64):
        assert np.array_equal(np.asarray(summed(x[:rows])), total[:rows])


def test_experts_are_combined_by_their_weights_alone() -> None:
    rng = np.random.default_rng(2)
    gate, up = rng.standard_normal((2, EXPERTS, HIDDEN, 8)).astype(np.float32) * np.float32(HIDDEN**-0.5)
    down = rng.standard_normal((EXPERTS, 8, HIDDEN)).astype(np.float32) * np.float32(8**-0.5)
    x = rng.standard_normal((64, HIDDEN)).astype(np.float32)
    experts = np.stack([rng.permutation(EXPERTS)[:3] for _ in range(64)]).astype(np.int32)
    weights = rng.random((64, 3)).astype(np.float32)
    params = MoeParams(
        router=jnp.zeros((HIDDEN, EXPERTS)),
        router_bias=None,
        shared=None,
        gate=jnp.asarray(gate),
        up=jnp.asarray(up),
        down=jnp.asarray(down),
    )
    out = experts_dense(params, jnp.asarray(experts), jnp.asarray(weights), jnp.asarray(x))
    exact = np.zeros((64, HIDDEN))
    for t in range(64):
        for e, w in zip(experts[t], weights[t], strict=True):
            g, u = x[t].astype(np.float64) @ gate[e], x[t].astype(np.float64) @ up[e]
            exact[t] += w * ((g / (1 + np.exp(-g)) * u) @ down[e])
    assert np.abs(out - exact).max() <= SIGMAS * U32 * (HIDDEN**0.5 + 8**0.5 + 3) * max(1.0, np.abs(exact).max())
