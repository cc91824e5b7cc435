"""A loop around sampling, clipped gradients, noise and updates that can be killed and resumed."""

from .data import DataError
from .directory import CHECKS, METRICS, PRIVACY, RUN, RunDirectory
from .events import Event, TensorBoard
from .files import CheckpointError, CheckpointWarning, read_json
from .kept_secret import kept_secret
from .make_step import make_step
from .parquet import Parquet
from .record import versions
from .sources import Records
from .state import TrainState
from .step import Step
from .trained_model import load_model, save_model
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
    "Parquet",
    "Records",
    "RunDirectory",
    "Step",
    "TensorBoard",
    "TrainState",
    "Trainer",
    "kept_secret",
    "load_model",
    "make_step",
    "read_json",
    "save_model",
    "versions",
]
