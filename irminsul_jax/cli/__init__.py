"""The console command `irminsul`. Importing it, and `--help`, imports no jax."""

from irminsul_jax.cli.app import main

__all__ = ["main"]
