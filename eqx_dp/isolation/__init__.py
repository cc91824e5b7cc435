"""Examples never meet: proven on the differentiated program of one example."""

from .primitives import engines_rule as engines_rule
from .run import run_apart as run_apart
