"""Examples never meet: shown on the program that runs, differentiated and batched."""

from .run import run_apart, sum_over_examples

__all__ = ["run_apart", "sum_over_examples"]
