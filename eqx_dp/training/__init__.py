"""A loop around sampling, clipped gradients, noise and updates that can be killed and resumed."""

from .data import DataError
from .directory import CHECKS, METRICS, PRIVACY, RUN, RunDirectory
from .events import Event, TensorBoard
from .files import CheckpointError, CheckpointWarning, read_json
from .record import versions
from .state import TrainState
from .step import Step, make_step
from .trainer import Trainer

__all__ = [
    "CHECKS",
    "METRICS",
    "PRIVACY",
    "RUN",
    "CheckpointError",
    "CheckpointWarning",
    "DataError",
    "Event",
    "RunDirectory",
    "Step",
    "TensorBoard",
    "TrainState",
    "Trainer",
    "make_step",
    "read_json",
    "versions",
]
