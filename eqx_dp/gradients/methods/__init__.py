"""Ways to the sum of clipped per-example gradients, one file a method."""

from . import per_example
from .contract import ClippedSum, Method, Task

METHODS: dict[str, Method] = {"per_example": per_example.clipped_sum}

__all__ = ["METHODS", "ClippedSum", "Method", "Task"]
