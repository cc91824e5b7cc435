"""How much one example could show: steps that are attacked, in a user's tests and in a run."""

from . import canaries
from .neighbours import neighbours
from .neighbours_report import NeighboursReport

__all__ = ["NeighboursReport", "canaries", "neighbours"]
