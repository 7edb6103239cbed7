"""Host-side latent cache: which rows of the latent pool serve which tokens of a prompt. NumPy only, never jax."""

from irminsul_jax.cache.config import POLICIES, CacheConfig, Namespace
from irminsul_jax.cache.latent_cache import LatentCache, Reservation
from irminsul_jax.cache.plan import CARVE_OUT, PAGE_SIZE, Plan, Reason, Run, TokenClass

__all__ = [
    "CARVE_OUT",
    "PAGE_SIZE",
    "POLICIES",
    "CacheConfig",
    "LatentCache",
    "Namespace",
    "Plan",
    "Reason",
    "Reservation",
    "Run",
    "TokenClass",
]
