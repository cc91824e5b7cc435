"""How much one example could show: steps that are attacked, in a user's tests and in a run."""

from . import canaries as canaries
from .neighbours import neighbours as neighbours
from .neighbours_report import NeighboursReport as NeighboursReport
