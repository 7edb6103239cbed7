"""Parameter pytrees and their shapes. Checkpoints store exactly this tree; conversion fills it; the forward pass reads it.

Layers are a tuple, not a stack: a loop over separate arrays copies no weight, where `lax.scan` over stacked ones copies
each layer's slice in front of the matrix products. `benchmarks/layer_loop.py` measures both: decode is 1.1 to 1.5 times
faster unrolled, a prefill of 512 tokens the same; compiling takes 2 to 4 times as long, which the persistent cache pays once.

Dimension letters: H hidden, A heads, Q query rank, N no-position head dim, D rotary head dim, R latent rank, W value head
dim, I MLP width, E experts, V vocabulary. Matrices multiply from the right (`x @ w`); the rotary columns are in
half-split layout (all first halves of the pairs, then all second halves).
"""

from __future__ import annotations

from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Float

from irminsul_jax.config import ModelConfig

Array = jax.Array


@no_type_check  # tree transformations put anything into the leaves
@struct.dataclass
class AttentionParams:
    """Multi-head latent attention. The query is low-rank (`q_a`, `q_a_norm`) or, where those are None, full (X = H)."""

    q_a: Float[Array, "H Q"] | None
    q_a_norm: Float[Array, "Q"] | None
    q_nope: Float[Array, "X A N"]
    q_rope: Float[Array, "X A D"]
    kv_latent: Float[Array, "H R"]
    kv_rope: Float[Array, "H D"]
    kv_norm: Float[Array, "R"]
    key_up: Float[Array, "A N R"]
    """W_UK: no-position keys from the latent; absorbed into the query for decode and reuse."""
    value_up: Float[Array, "A R W"]
    """W_UV: values from the latent; absorbed into the output for decode and reuse."""
    out: Float[Array, "A W H"]


@no_type_check  # tree transformations put anything into the leaves
@struct.dataclass
class MlpParams:
    gate: Float[Array, "H I"]
    up: Float[Array, "H I"]
    down: Float[Array, "I H"]


@no_type_check  # tree transformations put anything into the leaves
@struct.dataclass
class MoeParams:
    router: Float[Array, "H E"]
    """float32 whatever the model's dtype: routing decisions flip on rounding."""
    router_bias: Float[Array, "E"] | None
    """float32; moves the choice of experts, never their weights."""
    gate: Float[Array, "E H I"]
    up: Float[Array, "E H I"]
    down: Float[Array, "E I H"]
    shared: MlpParams | None


@no_type_check  # tree transformations put anything into the leaves
@struct.dataclass
class LayerParams:
    attention_norm: Float[Array, "H"]
    attention: AttentionParams
    mlp_norm: Float[Array, "H"]
    mlp: MlpParams | MoeParams


@no_type_check  # tree transformations put anything into the leaves
@struct.dataclass
class Params:
    embedding: Float[Array, "V H"]
    layers: tuple[LayerParams, ...]
    norm: Float[Array, "H"]
    lm_head: Float[Array, "H V"] | None
    """None where the model ties it to the embedding."""


def layer_shapes(config: ModelConfig, layer: int, dtype: jnp.dtype) -> LayerParams:
    """`LayerParams` of one layer as `jax.ShapeDtypeStruct`s: the contract between conversion and model."""
    c = config
    H, A, R, D = c.hidden_dim, c.num_heads, c.kv_lora_rank, c.qk_rope_head_dim

    def s(*shape: int, dtype: jnp.dtype = dtype) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    def mlp_shapes(width: int) -> MlpParams:
        return MlpParams(gate=s(H, width), up=s(H, width), down=s(width, H))

    rank = c.q_lora_rank
    attention = AttentionParams(
        q_a=s(H, rank) if rank else None,
        q_a_norm=s(rank) if rank else None,
        q_nope=s(rank or H, A, c.qk_nope_head_dim),
        q_rope=s(rank or H, A, D),
        kv_latent=s(H, R),
        kv_rope=s(H, D),
        kv_norm=s(R),
        key_up=s(A, c.qk_nope_head_dim, R),
        value_up=s(A, R, c.v_head_dim),
        out=s(A, c.v_head_dim, H),
    )
    if c.moe is not None and c.is_moe_layer(layer):
        m = c.moe
        E, I = m.num_experts, m.expert_dim
        f32 = jnp.dtype(jnp.float32)
        mlp = MoeParams(
            router=s(H, E, dtype=f32),
            router_bias=s(E, dtype=f32) if m.router == "sigmoid_bias_grouped" else None,
            gate=s(E, H, I),
            up=s(E, H, I),
            down=s(E, I, H),
            shared=mlp_shapes(m.num_shared_experts * I) if m.num_shared_experts else None,
        )
    else:
        mlp = mlp_shapes(c.mlp_dim)
    return LayerParams(attention_norm=s(H), attention=attention, mlp_norm=s(H), mlp=mlp)


def param_shapes(config: ModelConfig, dtype: jnp.dtype) -> Params:
    """The whole parameter tree as `jax.ShapeDtypeStruct`s, for restoring a checkpoint or planning its memory."""
    V, H = config.vocab_size, config.hidden_dim

    def s(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    return Params(
        embedding=s(V, H),
        layers=tuple(layer_shapes(config, i, dtype) for i in range(config.num_layers)),
        norm=s(H),
        lm_head=None if config.tie_embeddings else s(H, V),
    )
