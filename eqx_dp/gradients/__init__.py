"""The per-example gradient engine."""

from .calls import PerExample, Prepared
from .clipped_grad import (
    ClippedGrad,
    FilterSpec,
    filter_clipped_grad,
    filter_value_and_clipped_grad,
)
from .explain import Explanation, explain, is_array_or_shape
from .outline import Outline, outline
from .program import takes_key

__all__ = [
    "ClippedGrad",
    "Explanation",
    "FilterSpec",
    "Outline",
    "PerExample",
    "Prepared",
    "explain",
    "filter_clipped_grad",
    "filter_value_and_clipped_grad",
    "is_array_or_shape",
    "outline",
    "takes_key",
]
