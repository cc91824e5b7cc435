"""A loop around sampling, clipped gradients, noise and updates that can be killed and resumed."""

from .data import DataError
from .events import Event
from .files import CheckpointError, CheckpointWarning
from .make import make_step
from .metrics import TensorBoard
from .state import TrainState
from .step import Step
from .trainer import Trainer

__all__ = [
    "CheckpointError",
    "CheckpointWarning",
    "DataError",
    "Event",
    "Step",
    "TensorBoard",
    "TrainState",
    "Trainer",
    "make_step",
]
