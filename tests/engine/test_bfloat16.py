"""Serving in bfloat16 on the CPU: what most released checkpoints are."""

import logging

from irminsul_jax.checkpoint import load_checkpoint
from tests.support.engine import greedy, ids, new_engine, prompt


def test_bfloat16_checkpoints_are_served_with_shifted_reuse(load_model, caplog):
    checkpoint = load_checkpoint(load_model("one_layer").path, dtype="bfloat16")
    engine = new_engine(checkpoint)
    text = ids(5, 150)
    with caplog.at_level(logging.WARNING, "irminsul_jax"):
        first, moved = engine.generate([prompt(text), prompt(ids(6, 40), text)], greedy(4))
    assert not caplog.records  # a device call that fails is tried again and logged
    assert len(first.token_ids) == len(moved.token_ids) == 4
    assert moved.usage.shifted_tokens > 100
