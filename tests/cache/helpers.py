"""Small prompts and a request that runs through the whole life of a reservation."""

import numpy as np

from irminsul_jax.cache import LatentCache, Namespace, Plan, Reservation, TokenClass

NS = Namespace(model="m")


def text(seed: int, length: int) -> np.ndarray:
    """Pseudo-random token ids, the same for the same seed; different seeds practically never agree in 32 tokens."""
    return np.random.default_rng(seed).integers(0, 100_000, length).astype(np.int32)


def join(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts).astype(np.int32)


def admit(
    cache: LatentCache, tokens: np.ndarray, namespace: Namespace = NS, *, max_new: int = 0, **options
) -> Reservation:
    reservation = cache.reserve(cache.plan(tokens, namespace, **options), namespace, max_new_tokens=max_new)
    assert reservation is not None
    return reservation


def serve(
    cache: LatentCache,
    tokens: np.ndarray,
    namespace: Namespace = NS,
    *,
    generated: np.ndarray | None = None,
    **options,
) -> Reservation:
    """Plan, reserve, publish (prompt, then prompt and reply), release."""
    reply = np.zeros(0, np.int32) if generated is None else generated
    reservation = admit(cache, tokens, namespace, max_new=len(reply), **options)
    cache.publish(reservation, tokens)
    if len(reply):
        cache.publish(reservation, join(tokens, reply))
    cache.release(reservation)
    return reservation


def counts(plan: Plan) -> tuple[int, int, int]:
    """Exact, shifted, recomputed tokens."""
    return plan.num_exact, plan.num_shifted, len(plan.recompute_positions)


def check_balance(cache: LatentCache) -> None:
    assert cache.free_pages + cache.evictable_pages + cache.held_pages == cache.total_pages


def check_tiling(plan: Plan) -> None:
    """Runs and recomputed positions tile the prompt, and every array tells the same story."""
    covered = np.zeros(len(plan.tokens), np.int64)
    for run in plan.runs:
        here = slice(run.target, run.target + run.length)
        covered[here] += 1
        assert (plan.classes[here] == run.token_class).all()
        assert run.length > 0
    covered[plan.recompute_positions] += 1
    assert (covered == 1).all()
    served = plan.rows >= 0
    assert ((plan.reasons == 0) == served).all()
    assert ((plan.classes != TokenClass.RECOMPUTED) == served).all()
    assert (plan.shifts[~served] == 0).all()
    assert not served[-1]
    assert sum(plan.recomputed_by_reason().values()) == (~served).sum()
