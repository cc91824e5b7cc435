"""Attacks on a step or a clipped gradient: does one example show?"""

from .neighbours import neighbours
from .neighbours_report import NeighboursReport

__all__ = ["NeighboursReport", "neighbours"]
