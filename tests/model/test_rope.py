"""Rotary frequencies and angles: float64 on the host, float32 on the device, whatever the dtype of the model."""

import jax.numpy as jnp
import numpy as np
import pytest

from irminsul_jax.config import ModelConfig, RopeConfig
from irminsul_jax.model.layers import rope_at
from irminsul_jax.rope import inv_freq
from tests.support.reference_f64 import Reference
from tests.support.synthetic import write_hf_checkpoint

YARN = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
EQUAL_BETAS = YARN | {"factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0}


@pytest.mark.parametrize("scaling", [None, YARN, EQUAL_BETAS], ids=["plain", "yarn", "equal-betas"])
def test_frequencies_are_those_of_the_reference(scaling, tmp_path):
    path = write_hf_checkpoint(tmp_path, rope_scaling=scaling, rope_theta=50000.0, num_hidden_layers=1)
    reference = Reference(path)
    rope = RopeConfig.from_hf({"rope_theta": 50000.0, "rope_scaling": scaling})
    np.testing.assert_allclose(inv_freq(rope, 16), reference.inv_freq, rtol=1e-14)


@pytest.mark.parametrize("scaling", [None, YARN], ids=["plain", "yarn"])
def test_angles_are_exact_to_float32_rounding_at_160k(scaling):
    """A frequency rounded to bfloat16 is off by 2^-9, so the angle at 160,000 by hundreds of radians; the product taken in
    float32 by 0.01. Here cos and sin come from two float64 tables: three float32 roundings are left."""
    config = ModelConfig.from_hf(
        {
            "model_type": "deepseek_v3", "vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 1, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 64, "v_head_dim": 8,
            "intermediate_size": 8, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
            "rope_scaling": scaling,
        }
    )  # fmt: skip
    positions = np.array([0, 1, 511, 512, 4095, 4097, 65537, 131071, 160000, 163839])
    cos, sin = rope_at(config, jnp.asarray(positions))
    angles = positions[:, None] * inv_freq(config.rope, 64)
    bar = 4 * np.finfo(np.float32).eps
    assert cos.dtype == sin.dtype == jnp.float32
    assert np.abs(np.asarray(cos, np.float64) - np.cos(angles)).max() <= bar
    assert np.abs(np.asarray(sin, np.float64) - np.sin(angles)).max() <= bar
