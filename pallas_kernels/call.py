"""One call of an attention op, as far as it decides which implementation can serve it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp

from pallas_kernels.fragments import FragmentTable
from pallas_kernels.pool import LatentPool
from pallas_kernels.target import Target

OpName = Literal["decode", "extend", "extend_expanded"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    op: OpName
    num_tokens: int
    heads: int
    query_dtype: jnp.dtype
    pool: LatentPool
    table: FragmentTable
    target: Target
    interpret: bool
    nope_width: int = 0
    """Width of a head's expanded key without its rotary part, for `extend_expanded`."""
    value_width: int = 0
    """Width of a head's expanded value, for `extend_expanded`."""
