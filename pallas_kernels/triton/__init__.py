"""The Triton lowering of Pallas: any NVIDIA GPU that Triton supports. The only place that touches it.

JAX deprecates this lowering (a `DeprecationWarning` at each lowering, since 0.11) in favour of Mosaic GPU, which has no
counterpart below Hopper; it is still there in 0.12.
"""

import warnings

from pallas_kernels.triton.absorbed import MERGE_TILE, attend, merge_pieces
from pallas_kernels.triton.expanded import flash
from pallas_kernels.triton.fit import why_not

warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning)

__all__ = ["MERGE_TILE", "attend", "flash", "merge_pieces", "why_not"]
