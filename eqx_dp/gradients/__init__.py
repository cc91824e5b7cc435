"""The per-example gradient engine."""

from .calls import PerExample
from .clipped_grad import (
    ClippedGrad,
    filter_clipped_grad,
    filter_value_and_clipped_grad,
)
from .explain import Explanation, explain, is_array_or_shape
from .outline import Outline, outline

__all__ = [
    "ClippedGrad",
    "Explanation",
    "Outline",
    "PerExample",
    "explain",
    "filter_clipped_grad",
    "filter_value_and_clipped_grad",
    "is_array_or_shape",
    "outline",
]
