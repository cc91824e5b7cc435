"""The per-example gradient engine."""

from .api import filter_clipped_grad, filter_value_and_clipped_grad
from .calls import PerExample, Prepared
from .clipped_grad import ClippedGrad
from .explain import Explanation, checked_grad_fn, described, explain
from .marks import Mark, mark_of
from .methods import METHODS, MethodName
from .program import takes_key
from .slices import Slices, slices_of
from .trained import FilterSpec, checked_trainable, split_trainable

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
