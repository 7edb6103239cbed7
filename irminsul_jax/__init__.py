"""Irminsul for JAX: serve MLA models from a position-independent latent cache.

Names are loaded on first use, so that planning, `--help` and `inspect` never import jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from irminsul_jax.cache import CacheConfig, LatentCache
    from irminsul_jax.checkpoint import Checkpoint, load_checkpoint
    from irminsul_jax.config import ModelConfig
    from irminsul_jax.engine.engine import Engine, EngineConfig
    from irminsul_jax.engine.outputs import RequestOutput, Usage
    from irminsul_jax.errors import IrminsulError
    from irminsul_jax.functional import Batch, GenerateOutput, decode_step, generate, init_pool, make_batch, prefill
    from irminsul_jax.sampling_params import SamplingParams

_HOME = {
    "CacheConfig": "cache",
    "LatentCache": "cache",
    "Checkpoint": "checkpoint",
    "load_checkpoint": "checkpoint",
    "ModelConfig": "config",
    "Engine": "engine.engine",
    "EngineConfig": "engine.engine",
    "RequestOutput": "engine.outputs",
    "Usage": "engine.outputs",
    "IrminsulError": "errors",
    "Batch": "functional",
    "GenerateOutput": "functional",
    "decode_step": "functional",
    "generate": "functional",
    "init_pool": "functional",
    "make_batch": "functional",
    "prefill": "functional",
    "SamplingParams": "sampling_params",
}

__all__ = [
    "Batch",
    "CacheConfig",
    "Checkpoint",
    "Engine",
    "EngineConfig",
    "GenerateOutput",
    "IrminsulError",
    "LatentCache",
    "ModelConfig",
    "RequestOutput",
    "SamplingParams",
    "Usage",
    "decode_step",
    "generate",
    "init_pool",
    "load_checkpoint",
    "make_batch",
    "prefill",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'irminsul_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"irminsul_jax.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
