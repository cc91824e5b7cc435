"""The per-example gradient engine."""

from .clipped_grad import (
    ClippedGrad,
    PerExample,
    filter_clipped_grad,
    filter_value_and_clipped_grad,
)
from .explain import Explanation, explain

__all__ = [
    "ClippedGrad",
    "Explanation",
    "PerExample",
    "explain",
    "filter_clipped_grad",
    "filter_value_and_clipped_grad",
]
