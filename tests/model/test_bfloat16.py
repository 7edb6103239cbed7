"""A bfloat16 model and pool run on every platform, in all three attention forms, and stay near the float64 reference."""

import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_convert import convert
from irminsul_jax.checkpoint import load_checkpoint
from irminsul_jax.functional import decode_step, init_pool, make_batch, prefill
from tests.support.reference_f64 import Reference
from tests.support.synthetic import write_hf_checkpoint

LAYERS = 2
# Rounding to bfloat16 is off by 2^-9 relative. About ten roundings lie behind each other in a layer (norm, query latent,
# query, key latent, absorbed query, output latent, value, projection, gate, down), and errors of independent roundings add
# in squares; three times that covers what later layers amplify.
BAR = 3 * 2**-9 * (10 * LAYERS) ** 0.5


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Dense layers alone: where experts are nearly tied, a rounding rightly chooses another one."""
    path = tmp_path_factory.mktemp("bfloat16")
    hf = write_hf_checkpoint(path / "hf", dtype="bfloat16", num_hidden_layers=LAYERS, n_routed_experts=None)
    convert(hf, path / "out")
    return load_checkpoint(path / "out"), Reference(hf)


def _distance(got, exact) -> float:
    return float(np.linalg.norm(np.asarray(got, np.float64) - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_prefill_and_decode_are_near_float64(model, form):
    checkpoint, reference = model
    ids = np.random.default_rng(0).integers(3, 250, 71)
    exact = reference.forward(ids).logits
    config, params = checkpoint.config, checkpoint.params
    assert params.embedding.dtype == jnp.bfloat16
    batch = make_batch([ids[:70]], config, max_tokens=2)
    scores, pool = prefill(params, config, init_pool(config, 4), batch, form=form)
    assert pool["c_kv"].dtype == jnp.bfloat16
    assert _distance(scores[0], exact[69]) < BAR
    scores, _ = decode_step(params, config, pool, jnp.asarray(ids[70:]), jnp.array([70]), batch.table)
    assert _distance(scores[0], exact[70]) < BAR
