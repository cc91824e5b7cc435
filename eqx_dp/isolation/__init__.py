"""Examples never meet: proven on the differentiated program of one example."""

from .made_up import warn_if_zero as warn_if_zero
from .run import of_one as of_one
from .run import run_apart as run_apart
