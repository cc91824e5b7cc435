"""Examples never meet: shown on the differentiated program of one of them."""

from .primitives import engines_rule as engines_rule
from .run import run_apart as run_apart
