"""A loop around sampling, clipped gradients, noise and updates that can be killed and resumed."""

from .state import TrainState
from .step import Step, make_step

__all__ = ["Step", "TrainState", "make_step"]
