"""The per-example gradient engine."""

from .api import filter_clipped_grad, filter_value_and_clipped_grad
from .arguments import FilterSpec, checked_trainable, split_trainable
from .calls import Mark, PerExample, Prepared, mark_of
from .clipped_grad import ClippedGrad
from .configuration import METHODS, MethodName
from .explain import Explanation, Slices, checked_grad_fn, described, explain, slices_of
from .program import takes_key

__all__ = [
    "METHODS",
    "ClippedGrad",
    "Explanation",
    "FilterSpec",
    "Mark",
    "MethodName",
    "PerExample",
    "Prepared",
    "Slices",
    "checked_grad_fn",
    "checked_trainable",
    "described",
    "explain",
    "filter_clipped_grad",
    "filter_value_and_clipped_grad",
    "mark_of",
    "slices_of",
    "split_trainable",
    "takes_key",
]
