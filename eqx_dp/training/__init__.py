"""A loop around sampling, clipped gradients, noise and updates that can be killed and resumed."""

from .data import DataError as DataError
from .directory import CHECKS as CHECKS
from .directory import METRICS as METRICS
from .directory import PRIVACY as PRIVACY
from .directory import RUN as RUN
from .directory import RunDirectory as RunDirectory
from .events import Event as Event
from .events import TensorBoard as TensorBoard
from .files import CheckpointError as CheckpointError
from .files import CheckpointWarning as CheckpointWarning
from .files import finite_or_none as finite_or_none
from .files import read_json as read_json
from .kept_secret import kept_secret as kept_secret
from .make_step import make_step as make_step
from .parquet import Parquet as Parquet
from .record import versions as versions
from .sources import Records as Records
from .state import TrainState as TrainState
from .step import Step as Step
from .trained_model import load_model as load_model
from .trained_model import save_model as save_model
from .trainer import Trainer as Trainer
