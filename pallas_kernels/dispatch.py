"""Which implementation serves a call, and why the others do not."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Literal, get_args

from pallas_kernels import mosaic_gpu, mosaic_tpu, triton
from pallas_kernels.call import Call

Implementation = Literal["triton", "mosaic_gpu", "mosaic_tpu", "xla"]
"""`triton` and `mosaic_gpu` (Hopper) run on NVIDIA GPUs, `mosaic_tpu` on TPUs, `xla` everywhere."""

_WHY_NOT: dict[str, Callable[[Call], str | None]] = {
    "mosaic_gpu": mosaic_gpu.why_not,
    "triton": triton.why_not,
    "mosaic_tpu": mosaic_tpu.why_not,
    "xla": lambda call: None,
}

_log = logging.getLogger("pallas_kernels")


class ImplementationError(ValueError):
    """The implementation asked for cannot serve the call; the text says why, and what can."""


def reasons(call: Call) -> dict[str, str | None]:
    """For each implementation why it cannot serve the call; None where it can."""
    return {name: why_not(call) for name, why_not in _WHY_NOT.items()}


def choose(call: Call, implementation: str | None) -> str:
    """The implementation to use: the one asked for, or the first of the platform's that fits."""
    if implementation is None:
        return _first_that_fits(call)
    if implementation not in get_args(Implementation):
        raise ImplementationError(
            f"unknown implementation {implementation!r}; known: {', '.join(get_args(Implementation))}"
        )
    if _WHY_NOT[implementation](call) is None:
        return implementation
    lines = [f"  {name}: {reason or 'fits'}" for name, reason in reasons(call).items()]
    raise ImplementationError(
        f"mla_{call.op}: implementation {implementation!r} cannot serve this call. Choose one that fits, or None for "
        "the best:\n" + "\n".join(lines)
    )


def _first_that_fits(call: Call) -> str:
    if call.interpret:
        raise ImplementationError(f"mla_{call.op}: interpret=True needs an implementation by name")
    for name in _preference(call):
        reason = _WHY_NOT[name](call)
        if reason is None:
            return name
        _say_once(f"mla_{call.op}: not {name}: {reason}")
    return "xla"


def _preference(call: Call) -> tuple[str, ...]:
    if call.target.platform == "tpu":
        return ("mosaic_tpu",)
    if call.target.platform != "gpu":
        return ()
    return ("mosaic_gpu", "triton") if mosaic_gpu.is_faster(call) else ("triton",)


@functools.cache
def _say_once(text: str) -> None:
    _log.warning(text)
