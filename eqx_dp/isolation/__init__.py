"""Examples never meet: shown on the differentiated program of one of them."""

from .primitives import engines_rule as engines_rule
from .run import Mapped as Mapped
from .run import Values as Values
from .run import mapped_apart as mapped_apart
from .run import run_apart as run_apart
