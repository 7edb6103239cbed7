"""Tiny Hugging Face directories and their conversions, built once per test run."""

import functools

import pytest

from checkpoints_convert import convert
from tests.support.hf_tiny import hf_tiny_dir


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """name → Hugging Face directory (shared: do not change it)."""
    root = tmp_path_factory.mktemp("hf_tiny")
    return lambda name: hf_tiny_dir(name, root)


@pytest.fixture(scope="session")
def converted(tiny, tmp_path_factory):
    """name → converted directory in the source's dtype (shared: do not change it)."""
    root = tmp_path_factory.mktemp("converted")

    @functools.cache
    def build(name):
        convert(tiny(name), root / name)
        return root / name

    return build
