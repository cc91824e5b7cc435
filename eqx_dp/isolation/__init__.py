"""Examples never meet: shown on the program that runs, differentiated and batched."""

from .dependence import Apart, Dependence, Mixed, Shared, shape_of
from .follow import Follow
from .rules import OPERAND_BY_OPERAND, RULES
from .run import run_apart, sum_over_examples

__all__ = [
    "OPERAND_BY_OPERAND",
    "RULES",
    "Apart",
    "Dependence",
    "Follow",
    "Mixed",
    "Shared",
    "run_apart",
    "shape_of",
    "sum_over_examples",
]
