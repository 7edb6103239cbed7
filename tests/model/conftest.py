"""Fixtures of the model tests live with their helpers in `tests/support/models.py`."""

from tests.support.models import long_models, tiny_models

__all__ = ["long_models", "tiny_models"]
