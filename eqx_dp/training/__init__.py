"""A loop around sampling, clipped gradients, noise and updates that can be killed and resumed."""

from .data import DataError
from .events import Event, TensorBoard
from .files import CheckpointError, CheckpointWarning
from .state import TrainState
from .step import Step, make_step
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
