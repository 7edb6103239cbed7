"""Attention over a paged latent pool, with the rotary keys turned by a shift while they load.

`LatentPool` and `FragmentTable` are the data contract; `attention` has one public op per job. This package imports
nothing of the rest of the project, so it can be used on its own.
"""

from pallas_kernels.attention import mla_decode, mla_extend, mla_extend_expanded
from pallas_kernels.dispatch import Implementation, ImplementationError
from pallas_kernels.fragments import TABLE_BUCKETS, AnyArray, Fragments, FragmentTable, fragments_of, pack_fragments
from pallas_kernels.merge import merge_partial
from pallas_kernels.pool import PAGE_SIZE, SCRATCH_PAGE, LatentPool, PoolLayout, StreamSpec
from pallas_kernels.products import einsum_f32
from pallas_kernels.rotary import rotate, turn_table

__all__ = [
    "PAGE_SIZE",
    "SCRATCH_PAGE",
    "TABLE_BUCKETS",
    "AnyArray",
    "FragmentTable",
    "Fragments",
    "Implementation",
    "ImplementationError",
    "LatentPool",
    "PoolLayout",
    "StreamSpec",
    "einsum_f32",
    "fragments_of",
    "merge_partial",
    "mla_decode",
    "mla_extend",
    "mla_extend_expanded",
    "pack_fragments",
    "rotate",
    "turn_table",
]
