"""Models of the numeric tests, and one way to compute any part of a prompt with them.

Session fixtures convert each checkpoint once with the real converter; compiled programs are shared by all tests.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_convert import convert
from irminsul_jax.checkpoint import load_checkpoint
from irminsul_jax.config import ModelConfig, MoeConfig, RopeConfig
from irminsul_jax.functional import init_pool, query_bucket
from irminsul_jax.model.attention import Form
from irminsul_jax.model.forward import forward, logits
from irminsul_jax.model.params import Params, param_shapes
from irminsul_jax.rope import inv_freq
from pallas_kernels import PAGE_SIZE, FragmentTable, LatentPool, fragments_of, pack_fragments
from tests.support.hf_tiny import hf_tiny_dir
from tests.support.reference_f64 import Reference
from tests.support.synthetic import write_hf_checkpoint

FORMS: tuple[Form, ...] = ("absorbed", "expanded")
NUM_PAGES = 24

QUICK = {"xla_backend_optimization_level": 0}
"""Compiler options of tests whose result does not depend on code quality: a third less time to compile."""

_FORWARD = {"static_argnames": ("config", "form"), "donate_argnames": "pool"}
_forward = jax.jit(forward, **_FORWARD)
_forward_quick = jax.jit(forward, compiler_options=QUICK, **_FORWARD)
_logits = jax.jit(logits, static_argnames="config")


@dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    params: Params
    config: ModelConfig
    hf_dir: Path | None = None

    @functools.cached_property
    def reference(self) -> Reference:
        """The float64 reference of the same Hugging Face directory."""
        assert self.hf_dir is not None
        return Reference(self.hf_dir)

    def pool(self, num_pages: int = NUM_PAGES) -> LatentPool:
        return init_pool(self.config, num_pages, jnp.float32)

    def placed_pool(self, num_pages: int = NUM_PAGES) -> LatentPool:
        """On the device of the parameters, as a returned pool is: else the second call compiles again."""
        return jax.device_put(self.pool(num_pages), jax.devices()[0])

    def table(
        self,
        rows: np.ndarray,
        shifts: np.ndarray | None = None,
        *,
        first: int = 0,
        bucket: tuple[int, int] | None = None,
    ) -> FragmentTable:
        """The table of one sequence: pool row and shift of each position from `first` on."""
        shifts = np.zeros(len(rows), np.int32) if shifts is None else shifts
        fragments = fragments_of(rows.astype(np.int32), shifts.astype(np.int32))
        fragments = fragments._replace(start=fragments.start + np.int32(first))
        return pack_fragments([fragments], inv_freq(self.config.rope, self.config.qk_rope_head_dim), bucket)

    def compute(
        self,
        pool: LatentPool,
        tokens: np.ndarray,
        positions: np.ndarray,
        table: FragmentTable,
        form: Form,
        *,
        bucket: int | None = None,
        optimised: bool = False,
    ) -> tuple[np.ndarray, LatentPool]:
        """Logits `[T, V]` after each of the tokens, which are computed in one call padded to `bucket` (default: the
        query bucket that they would have in use). `optimised` compiles exactly as in use."""
        padding = (bucket or query_bucket(len(tokens))) - len(tokens)
        hidden, pool = (_forward if optimised else _forward_quick)(
            self.params,
            self.config,
            pool,
            np.pad(tokens.astype(np.int32), (0, padding)),
            np.pad(positions.astype(np.int32), (0, padding), constant_values=-1),
            np.zeros(len(tokens) + padding, np.int32),
            table,
            form,
        )
        return np.asarray(_logits(self.params, self.config, hidden))[: len(tokens)], pool

    def cached(self, pool: LatentPool, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`(c_kv [L, n, R], k_r [L, n, D])` as stored in the given pool rows."""
        page, slot = rows // PAGE_SIZE, rows % PAGE_SIZE
        return np.asarray(pool["c_kv"])[:, page, slot], np.asarray(pool["k_r"])[:, page, slot]


def rows_from(page: int, count: int) -> np.ndarray:
    """Consecutive pool rows from the start of a page."""
    return np.arange(page * PAGE_SIZE, page * PAGE_SIZE + count)


def shuffled_rows(count: int, seed: int, num_pages: int = NUM_PAGES) -> np.ndarray:
    """Rows in pages of random order (never the scratch page)."""
    pages = np.random.default_rng(seed).permutation(np.arange(1, num_pages))
    return (pages[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).ravel()[:count]


def converted(hf_dir: Path, out: Path) -> Model:
    convert(hf_dir, out, dtype="float32")
    checkpoint = load_checkpoint(out)
    return Model(params=checkpoint.params, config=checkpoint.config, hf_dir=hf_dir)


def random_model(hidden_dim: int, *, num_dense_layers: int = 1) -> Model:
    """One MoE layer on top of dense ones: a V3 kind with random parameters and the head sizes of real models in miniature; never saved or converted."""
    config = ModelConfig(
        model_type="deepseek_v3",
        vocab_size=256,
        hidden_dim=hidden_dim,
        num_layers=num_dense_layers + 1,
        num_heads=4,
        q_lora_rank=96,
        kv_lora_rank=128,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
        mlp_dim=2 * hidden_dim,
        num_dense_layers=num_dense_layers,
        moe=MoeConfig(
            num_experts=8,
            experts_per_token=2,
            expert_dim=64,
            num_shared_experts=1,
            router="sigmoid_bias_grouped",
            num_groups=2,
            groups_per_token=1,
            normalize=True,
            scale=2.5,
        ),
        rope=RopeConfig(),
        max_position=4096,
        norm_eps=1e-6,
    )
    count = itertools.count()

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        values = np.random.default_rng(next(count)).standard_normal(leaf.shape, np.float32)
        if len(leaf.shape) == 1:
            return jnp.asarray(1 + np.float32(0.1) * values)
        return jnp.asarray(values * np.float32(leaf.shape[-2] ** -0.5))

    params = jax.tree.map(draw, param_shapes(config, jnp.dtype(jnp.float32)))
    return Model(params=jax.device_put(params, jax.devices()[0]), config=config)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """Name of one of the eight tiny families → the converted model."""
    root = tmp_path_factory.mktemp("tiny_models")
    return functools.cache(lambda name: converted(hf_tiny_dir(name, root / "hf"), root / "converted" / name))


LONG_MODELS = {
    "v2": {
        "model_type": "deepseek_v2",
        "rope_scaling": {
            "type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
    },
    "v3_two_mscales": {
        "model_type": "deepseek_v3",
        "rope_scaling": {
            "type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.3,
            "mscale_all_dim": 0.6,
        },
    },
    "one_layer": {"model_type": "deepseek_v3", "num_hidden_layers": 1},
}


@pytest.fixture(scope="session")
def long_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """Key of `LONG_MODELS` → a converted model of random weights, for prompts of several pages."""
    root = tmp_path_factory.mktemp("long_models")

    def build(name: str) -> Model:
        return converted(
            write_hf_checkpoint(root / "hf" / name, seed=7, **LONG_MODELS[name]), root / "converted" / name
        )

    return functools.cache(build)
