"""Attention on TPUs, as Pallas kernels for Mosaic: over the paged pool, and over expanded keys."""

from pallas_kernels.mosaic_tpu.fit import block_rows, why_not
from pallas_kernels.mosaic_tpu.flash import flash
from pallas_kernels.mosaic_tpu.paged import attend

__all__ = ["attend", "block_rows", "flash", "why_not"]
