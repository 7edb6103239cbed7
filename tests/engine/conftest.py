"""Fixtures of the serving tests."""

from tests.support.engine import engine, load_model, model_folder

__all__ = ["engine", "load_model", "model_folder"]
