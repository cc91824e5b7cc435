"""The per-example gradient engine."""

from .clipped_grad import (
    ClippedGrad,
    PerExample,
    filter_clipped_grad,
    filter_value_and_clipped_grad,
)

__all__ = ["ClippedGrad", "PerExample", "filter_clipped_grad", "filter_value_and_clipped_grad"]
