"""Attacks that measure how much one example shows, in a user's tests and in a run."""

from . import canaries as canaries
from .neighbours import neighbours as neighbours
from .neighbours_report import NeighboursReport as NeighboursReport
