"""Which implementation serves a call, and what is said when one cannot."""

from __future__ import annotations

import functools
import inspect
import logging

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import Implementation, ImplementationError, dispatch, mla_decode, mla_extend, mla_extend_expanded
from pallas_kernels.call import Call
from pallas_kernels.mosaic_gpu.fit import MIN_JAX
from pallas_kernels.target import Target, current_target
from tests.kernels import gpu_lowering as gpu

NEW_ENOUGH = jax.__version_info__ >= MIN_JAX
H200 = Target(platform="gpu", kind="NVIDIA H200", capability=90)
A100 = Target(platform="gpu", kind="NVIDIA A100-SXM4-80GB", capability=80)
CPU = Target(platform="cpu", kind="cpu")


def call(op: str, target: Target, *, heads: int = 16, latent=jnp.bfloat16, interpret: bool = False) -> Call:
    return Call(
        op=op,  # type: ignore[arg-type]
        num_tokens=8,
        heads=heads,
        query_dtype=jnp.dtype(jnp.bfloat16),
        pool=gpu.pool(latent, layers=2, pages=9),
        table=gpu.table(8, 32),
        target=target,
        interpret=interpret,
        nope_width=128,
        value_width=128,
    )


@pytest.mark.parametrize(
    ("op", "target", "heads", "expected"),
    [
        ("decode", CPU, 16, "xla"),
        ("decode", A100, 128, "triton"),
        ("decode", H200, 16, "triton"),
        ("decode", H200, 128, "mosaic_gpu" if NEW_ENOUGH else "triton"),
        ("extend", H200, 16, "mosaic_gpu" if NEW_ENOUGH else "triton"),
        ("extend_expanded", H200, 16, "triton"),
        ("decode", Target(platform="gpu", kind="Tesla V100", capability=70), 16, "xla"),
        ("decode", Target(platform="tpu", kind="TPU v6 lite"), 16, "xla"),  # a plain pool
    ],
)
def test_the_best_that_fits_is_chosen(op: str, target: Target, heads: int, expected: str) -> None:
    assert dispatch.choose(call(op, target, heads=heads), None) == expected


def test_float8_latents_go_to_a_kernel_that_reads_them() -> None:
    assert dispatch.choose(call("decode", H200, heads=128, latent=jnp.float8_e4m3fn), None) == "triton"
    assert dispatch.choose(call("decode", A100, latent=jnp.float8_e4m3fn), None) == "xla"


def test_the_error_names_every_implementation_with_its_reason() -> None:
    with pytest.raises(ImplementationError) as refused:
        dispatch.choose(call("decode", A100), "mosaic_gpu")
    text = str(refused.value)
    assert "'mosaic_gpu' cannot serve this call" in text
    for line in ("triton: fits", "xla: fits", "mosaic_tpu: it needs a TPU, this is 'NVIDIA A100"):
        assert line in text
    assert ("Hopper GPU" if NEW_ENOUGH else "it needs jax 0.11.2 or newer") in text


def test_an_old_jax_is_told_which_version_the_hopper_kernel_needs(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 1))
    dispatch._say_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="pallas_kernels"):
        for _ in range(2):
            assert dispatch.choose(call("decode", H200, heads=128), None) == "triton"
    assert [r.message.partition(", this is")[0] for r in caplog.records] == [
        "mla_decode: not mosaic_gpu: it needs jax 0.11.2 or newer"
    ]


def test_the_interpreter_needs_to_be_told_what_to_interpret() -> None:
    with pytest.raises(ImplementationError, match="interpret=True needs an implementation by name"):
        dispatch.choose(call("decode", CPU, interpret=True), None)
    assert dispatch.choose(call("decode", CPU, interpret=True), "triton") == "triton"


def test_the_target_is_the_named_device_or_the_default_one() -> None:
    assert current_target().platform == jax.default_backend()
    with gpu.naming("NVIDIA H200"):
        assert (current_target().platform, current_target().capability) == ("gpu", 90)
    with gpu.naming("TPU v6 lite", "tpu"):
        assert current_target().platform == "tpu"


def test_ops_refuse_before_anything_is_built() -> None:
    """The type checker of the tests would refuse an unknown name before the ops themselves can."""
    decode, extend, expanded = map(inspect.unwrap, (mla_decode, mla_extend, mla_extend_expanded))
    pool, table = gpu.pool(layers=2, pages=9), gpu.table(8, 32)
    q, q_rope, at = gpu.shape(8, 4, 512), gpu.shape(8, 4, 64), gpu.shape(8, dtype=jnp.int32)
    up = gpu.shape(4, 128, 512), gpu.shape(4, 512, 128)
    calls = (
        (decode, (q, q_rope, pool, 0, table)),
        (extend, (q, q_rope, at, at, pool, 0, table)),
        (expanded, (gpu.shape(8, 4, 128), q_rope, at, at, *up, pool, 0, table)),
    )
    for op, args in calls:
        for name, text in (("cudnn", "unknown implementation 'cudnn'"), ("mosaic_tpu", "it needs a TPU")):
            with pytest.raises(ImplementationError, match=text):
                op(*args, scale=1.0, implementation=name)


def test_every_implementation_has_a_reason_to_give() -> None:
    assert set(dispatch.reasons(call("decode", CPU))) == set(Implementation.__args__)
    assert functools.reduce(lambda n, r: n + (r is None), dispatch.reasons(call("decode", CPU)).values(), 0) == 1
