"""Ways to the sum of clipped per-example gradients, one file a method."""

from . import book_keeping, ghost, per_example
from .contract import ClippedSum, Method, TracedLoss

METHODS: dict[str, Method] = {
    "book_keeping": book_keeping.clipped_sum,
    "ghost": ghost.clipped_sum,
    "per_example": per_example.clipped_sum,
}

__all__ = ["METHODS", "ClippedSum", "Method", "TracedLoss"]
