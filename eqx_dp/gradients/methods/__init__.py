"""Ways to the sum of clipped per-example gradients, one file a method."""

from typing import Literal, TypeAlias

from . import book_keeping, ghost, per_example
from .contract import ClippedSum, Method, TracedLoss

METHODS: dict[str, Method] = {
    "book_keeping": book_keeping.clipped_sum,
    "ghost": ghost.clipped_sum,
    "per_example": per_example.clipped_sum,
}

MethodName: TypeAlias = Literal["auto", "book_keeping", "ghost", "per_example"]
"""What a caller may ask for: a method by name, or the choice of one."""

__all__ = ["METHODS", "ClippedSum", "Method", "MethodName", "TracedLoss"]
