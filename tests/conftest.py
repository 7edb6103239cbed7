"""What all tests share: the CPU as platform, a cache directory of their own, and reproducible property tests."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest
from hypothesis import settings

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # bit-identity is promised there; set it to run the tests elsewhere
_CACHE = tempfile.mkdtemp(prefix="irminsul-tests-")
os.environ["IRMINSUL_CACHE"] = _CACHE

# A compilation inside an example takes seconds, so time says nothing about it; fixed examples make a red run repeatable.
settings.register_profile("irminsul", deadline=None, derandomize=True)
settings.load_profile("irminsul")


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(_CACHE, ignore_errors=True)
