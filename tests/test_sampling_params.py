"""Sampling parameters: what is accepted, what is refused and how it says so, and which defaults win."""

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest

from irminsul_jax.errors import ConfigError, RequestError
from irminsul_jax.sampling_params import SamplingParams, eos_token_ids


def test_defaults() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.stop, params.stop_token_ids) == (16, 0, (), ())
    assert (params.seed, params.logprobs, params.ignore_eos, params.explicit) == (None, None, False, frozenset())


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", -0.1, "≥ 0"),
        ("temperature", math.nan, "≥ 0"),
        ("temperature", math.inf, "≥ 0"),
        ("temperature", "hot", "≥ 0"),
        ("temperature", True, "≥ 0"),
        ("temperature", None, "≥ 0"),
        ("top_p", 0.0, r"\(0, 1\]"),
        ("top_p", 1.01, r"\(0, 1\]"),
        ("top_p", np.float32("nan"), r"\(0, 1\]"),
        ("top_k", -2, "0 or -1 to keep all"),
        ("top_k", 1.5, "integer"),
        ("min_p", -0.1, r"\[0, 1\]"),
        ("min_p", 2, r"\[0, 1\]"),
        ("seed", -1, "from 0"),
        ("seed", 2**64, "2\\*\\*64 - 1"),
        ("stop", "", "non-empty string"),
        ("stop", ["a", ""], "non-empty string"),
        ("stop", [1], "non-empty string"),
        ("stop", 5, "non-empty string"),
        ("stop_token_ids", 5, "list of token ids"),
        ("stop_token_ids", "12", "list of token ids"),
        ("stop_token_ids", [1, -1], "≥ 0"),
        ("max_tokens", 0, "≥ 1"),
        ("max_tokens", 3.0, "integer"),
        ("max_tokens", None, "≥ 1"),
        ("min_tokens", -1, "≥ 0"),
        ("ignore_eos", 1, "True or False"),
        ("logprobs", -1, "≥ 0"),
        ("logprobs", True, "≥ 0"),
    ],
)
def test_refused_values_name_field_value_and_range(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(RequestError, match=rf"(?s)^{field}.*{allowed}") as caught:
        SamplingParams(**{field: value})
    shown = value[1] if isinstance(value, list) and field == "stop_token_ids" else value
    assert str(shown) in str(caught.value)


def test_numpy_scalars_become_plain() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(3),
        seed=np.uint64(2**63),
        max_tokens=np.int32(2),
        stop_token_ids=np.array([4, 5]),
        ignore_eos=np.bool_(True),
    )
    assert (params.temperature, params.top_k, params.seed, params.max_tokens) == (0.5, 3, 2**63, 2)
    assert params.stop_token_ids == (4, 5)
    assert params.ignore_eos is True
    assert {type(params.temperature), type(params.top_k), type(params.seed)} == {float, int}


def test_stop_and_off_switches() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None).stop == ()
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(logprobs=0).logprobs == 0
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams().greedy


def test_min_tokens_within_max_tokens() -> None:
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4
    with pytest.raises(RequestError, match="min_tokens=20 is more than max_tokens=16"):
        SamplingParams(min_tokens=20)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("max_new_tokens", "use max_tokens"),
        ("do_sample", "use temperature"),
        ("num_return_sequences", "send the prompt several times"),
        ("n", "send the prompt several times"),
        ("top_n", "use top_k"),
        ("repetition_penalty", "not supported"),
        ("temprature", "did you mean 'temperature'"),
        ("max_token", "did you mean 'max_tokens'"),
        ("stop_token_id", "did you mean 'stop_token_ids'"),
        ("zzz", "it has temperature, top_p"),
        ("explicit", "it has temperature, top_p"),
    ],
)
def test_unknown_names_get_advice(name: str, advice: str) -> None:
    with pytest.raises(RequestError, match=rf"no '{name}'.*{advice}"):
        SamplingParams(**{name: 3})


def test_unknown_names_win_over_wrong_values() -> None:
    with pytest.raises(RequestError, match="max_new_tokens"):
        SamplingParams(temperature=-1, max_new_tokens=3)  # type: ignore[call-arg]


def test_immutable_comparable_and_copyable() -> None:
    params = SamplingParams(seed=3, stop=["x"])
    with pytest.raises(AttributeError):
        params.seed = 4  # type: ignore[misc]
    assert params == SamplingParams(stop="x", seed=3)
    assert hash(params) == hash(SamplingParams(stop="x", seed=3))
    assert "explicit" not in repr(params)
    for twin in (copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert twin == params
        assert twin.explicit == {"seed", "stop"}


def test_precedence() -> None:
    config = {"temperature": 0.6, "top_p": 0.95, "max_new_tokens": 100, "eos_token_id": 1, "transformers_version": "x"}
    defaults = SamplingParams.from_generation_config(config)
    assert (defaults.temperature, defaults.top_p, defaults.max_tokens, defaults.top_k) == (0.6, 0.95, 100, 0)
    assert defaults.explicit == frozenset()

    request = SamplingParams(temperature=1.0, max_tokens=16).with_defaults(defaults)
    assert (request.temperature, request.top_p, request.max_tokens) == (1.0, 0.95, 16)
    assert request.explicit == {"temperature", "max_tokens"}
    assert SamplingParams.from_generation_config(config, temperature=1.0, max_tokens=16) == request


def test_do_sample_false_is_greedy_unless_overridden() -> None:
    config = {"do_sample": False, "temperature": 0.6, "top_k": None}
    assert SamplingParams.from_generation_config(config).greedy
    assert SamplingParams.from_generation_config(config, temperature=0.3).temperature == 0.3
    assert SamplingParams.from_generation_config({"do_sample": True, "temperature": 0.6}).temperature == 0.6
    assert SamplingParams.from_generation_config({}) == SamplingParams()


def test_bad_generation_config_is_not_the_request_s_fault() -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json: top_p=2"):
        SamplingParams.from_generation_config({"top_p": 2})
    with pytest.raises(RequestError, match=r"^top_p=2"):
        SamplingParams.from_generation_config({}, top_p=2)


def test_eos_token_ids() -> None:
    class WithEos:
        eos_ids = (7,)

    assert eos_token_ids({"eos_token_id": [5, 6]}, {"eos_token_id": 5}, None) == (5, 6)
    assert eos_token_ids({}, {"eos_token_id": 5}, None) == (5,)
    assert eos_token_ids({"eos_token_id": None}, {}, None) == ()
    for bad in ("1", [True], [-1], 1.0):
        with pytest.raises(ConfigError, match=r"config\.json: eos_token_id"):
            eos_token_ids({}, {"eos_token_id": bad}, None)
