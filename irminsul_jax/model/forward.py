"""The forward pass: embeddings, layers, logits. One function for prefill and decode; the pool goes in and comes out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from irminsul_jax.config import ModelConfig
from irminsul_jax.model.attention import Form, attention, latent_rows
from irminsul_jax.model.layers import dot, mlp, rms_norm, rope_at
from irminsul_jax.model.moe import moe
from irminsul_jax.model.params import MlpParams, Params
from pallas_kernels import AnyArray, FragmentTable, LatentPool


def forward(
    params: Params,
    config: ModelConfig,
    pool: LatentPool,
    tokens: Int[AnyArray, "T"],
    positions: Int[AnyArray, "T"],
    sequence: Int[AnyArray, "T"],
    table: FragmentTable,
    form: Form,
) -> tuple[Float[Array, "T H"], LatentPool]:
    """Hidden states of new tokens before the final norm, and the pool with their rows written.

    Token i stands at `positions[i]` of sequence `sequence[i]` (row of `table`); its own row is where the table says.
    Position −1 is padding. With form `decode` there is one token per sequence, in order. Rows of a layer are written
    before its attention reads, so tokens see each other through the pool.
    """
    tokens, positions, sequence = jnp.asarray(tokens), jnp.asarray(positions), jnp.asarray(sequence)
    page, slot, _, _ = table.locate(sequence, positions)
    cos, sin = rope_at(config, positions)
    h = params.embedding[tokens]
    for i, layer in enumerate(params.layers):
        with jax.named_scope(f"layer{i}"):
            x = rms_norm(h, layer.attention_norm, config.norm_eps)
            pool = pool.write(i, page, slot, **latent_rows(layer.attention, config, x, cos, sin))
            h = h + attention(layer.attention, config, x, cos, sin, positions, sequence, pool, i, table, form)
            x = rms_norm(h, layer.mlp_norm, config.norm_eps)
            h = h + (mlp(layer.mlp, x) if isinstance(layer.mlp, MlpParams) else moe(layer.mlp, config, x))
    return h, pool


def logits(params: Params, config: ModelConfig, hidden: Float[Array, "T H"]) -> Float32[Array, "T V"]:
    """Next-token logits in float32 from the hidden states of `forward`."""
    x = rms_norm(hidden, params.norm, config.norm_eps)
    if params.lm_head is None:
        return dot("th,vh->tv", x, params.embedding, out=jnp.dtype(jnp.float32))
    return dot("th,hv->tv", x, params.lm_head, out=jnp.dtype(jnp.float32))
