"""`python -m irminsul_jax`: the same as the console command `irminsul`."""

from irminsul_jax.cli import main

if __name__ == "__main__":
    main()
