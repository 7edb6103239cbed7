"""Which cases `check_kernels.py` runs where: as much of everything as fits the time of the machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
from kernel_cases import DEEPSEEK, LANES, MIDDLE, RAGGED, RAGGED_SHORT, SMALL, Case, Extent

HEADS = (1, 3, 16, 20, 64, 128)
MOSAIC_GPU_INTERPRETER = (0, 11, 2)
"""The first jax whose Mosaic GPU interpreter runs these kernels."""

NATIVE = {"cpu": ("xla",), "gpu": ("triton", "mosaic_gpu", "xla"), "tpu": ("mosaic_tpu", "xla")}
IMPLEMENTATIONS = ("triton", "mosaic_gpu", "mosaic_tpu", "xla")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The cases of one implementation on this machine, or why there are none."""

    implementation: str
    interpret: bool = False
    cases: Sequence[Case] = field(default=())
    why_not: str | None = None


def make_plan(implementation: str, platform: str, *, quick: bool) -> Plan:
    if implementation in NATIVE[platform]:
        extents = _on_cpu(quick) if platform == "cpu" else _on_accelerator(implementation, quick)
        return Plan(implementation=implementation, cases=_cases(extents))
    if platform != "cpu":
        reason = f"does not run on a {platform}; JAX_PLATFORMS=cpu runs it in the interpreter"
        return Plan(implementation=implementation, why_not=reason)
    version = tuple(int(part) for part in jax.__version__.split(".")[:3])
    if implementation == "mosaic_gpu" and version < MOSAIC_GPU_INTERPRETER:
        needed = ".".join(map(str, MOSAIC_GPU_INTERPRETER))
        return Plan(
            implementation=implementation, why_not=f"its interpreter needs jax {needed}, this is {jax.__version__}"
        )
    return Plan(implementation=implementation, interpret=True, cases=_cases(_INTERPRETED[implementation](quick)))


def _cases(extents: list[Extent]) -> list[Case]:
    return list(dict.fromkeys(case for extent in extents for case in extent.cases()))


def _on_accelerator(implementation: str, quick: bool) -> list[Extent]:
    new = ((512, 4097), (512, 512), (512, 575))
    if quick:
        return [
            Extent(sizes=DEEPSEEK, dtype="bf16", heads=(16, 128), lengths=RAGGED, single=RAGGED[-1:], merged=True),
            Extent(sizes=DEEPSEEK, dtype="fp8", heads=(16,), lengths=RAGGED),
            Extent(sizes=DEEPSEEK, dtype="f32", heads=(3,), lengths=RAGGED),
        ]
    of_oracle = implementation == "xla"
    others = (3, 16) if of_oracle else HEADS
    extents = [
        Extent(sizes=DEEPSEEK, dtype="bf16", heads=HEADS, lengths=RAGGED, merged=True),
        Extent(sizes=DEEPSEEK, dtype="bf16", heads=(16, 128), lengths=RAGGED, single=RAGGED, unshifted=True, new=new),
        Extent(sizes=DEEPSEEK, dtype="fp8", heads=others, lengths=RAGGED, merged=True),
        Extent(sizes=DEEPSEEK, dtype="f32", heads=others, lengths=RAGGED, merged=True),
    ]
    if implementation != "mosaic_tpu":
        small = (3,) if of_oracle else (3, 16)
        extents += [Extent(sizes=z, dtype="bf16", heads=small, lengths=RAGGED) for z in (SMALL, MIDDLE)]
    return extents


def _on_cpu(quick: bool) -> list[Extent]:
    """XLA alone runs there as it is."""
    extents = [
        Extent(sizes=SMALL, dtype="f32", heads=(3,), lengths=RAGGED, merged=True),
        Extent(sizes=SMALL, dtype="f32", heads=(3,), lengths=RAGGED, ops=("decode",), layouts=(), unshifted=True),
        Extent(sizes=SMALL, dtype="f32", heads=(3,), lengths=RAGGED, ops=("decode",), layouts=(), single=RAGGED),
        Extent(
            sizes=SMALL, dtype="bf16", heads=(20,), lengths=RAGGED_SHORT, ops=("decode", "extend_expanded"), merged=True
        ),
        Extent(sizes=SMALL, dtype="fp8", heads=(1,), lengths=RAGGED_SHORT, ops=("extend",)),
    ]
    if not quick:
        extents += [
            Extent(sizes=z, dtype=dtype, heads=(1, 16, 20), lengths=RAGGED, merged=True)
            for z in (SMALL, MIDDLE)
            for dtype in ("f32", "bf16", "fp8")
        ]
        extents.append(
            Extent(sizes=DEEPSEEK, dtype="bf16", heads=(16,), lengths=RAGGED, unshifted=True, new=((512, 4097),))
        )
    return extents


def _triton(quick: bool) -> list[Extent]:
    extents = [
        Extent(sizes=SMALL, dtype="bf16", heads=(3,), lengths=RAGGED_SHORT, tokens=32, fragments=32, merged=True),
        Extent(
            sizes=SMALL,
            dtype="f32",
            heads=(20,),
            lengths=RAGGED_SHORT,
            ops=("decode",),
            layouts=(),
            fragments=32,
            unshifted=True,
        ),
        Extent(sizes=SMALL, dtype="fp8", heads=(1,), lengths=RAGGED_SHORT, ops=("decode",), fragments=32, merged=True),
    ]
    if not quick:
        extents += [
            Extent(
                sizes=z, dtype=dtype, heads=(1, 3, 16, 20), lengths=RAGGED_SHORT, tokens=32, fragments=32, merged=True,
            )
            for z in (SMALL, MIDDLE)
            for dtype in ("bf16", "f32", "fp8")
        ]  # fmt: skip
        extents.append(Extent(sizes=DEEPSEEK, dtype="bf16", heads=(16,), lengths=RAGGED))
    return extents


def _mosaic_tpu(quick: bool) -> list[Extent]:
    short = (0, 1, 63, 65, 130)
    extents = [
        Extent(
            sizes=LANES,
            dtype="bf16",
            heads=(3,),
            lengths=short,
            layouts=("cut", "twice", "reserved"),
            tokens=24,
            fragments=16,
        ),
    ]
    if not quick:
        extents += [
            Extent(
                sizes=LANES, dtype=dtype, heads=(1, 20), lengths=RAGGED_SHORT, tokens=32, fragments=32, merged=True,
                unshifted=True,
            )
            for dtype in ("bf16", "f32")
        ]  # fmt: skip
        extents.append(Extent(sizes=DEEPSEEK, dtype="bf16", heads=(16,), lengths=(0, 511, 64), fragments=32))
    return extents


def _mosaic_gpu(quick: bool) -> list[Extent]:
    extents = [
        Extent(
            sizes=DEEPSEEK, dtype="bf16", heads=(64,), lengths=(0, 65), layouts=("cut",), tokens=8, fragments=32,
            ops=("decode", "extend"),
        )
    ]  # fmt: skip
    if not quick:
        extents.append(
            Extent(
                sizes=DEEPSEEK, dtype="bf16", heads=(16, 64, 128), lengths=(0, 1, 65, 130), tokens=8, fragments=32,
                merged=True, unshifted=True,
            )
        )  # fmt: skip
    return extents


_INTERPRETED = {"triton": _triton, "mosaic_tpu": _mosaic_tpu, "mosaic_gpu": _mosaic_gpu}
