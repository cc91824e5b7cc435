"""A step of private training, a loop that can be killed, and the trained model."""

from .data import DataError as DataError
from .data import Records as Records
from .events import Event as Event
from .ledger import CHECKS as CHECKS
from .ledger import METRICS as METRICS
from .ledger import CheckpointError as CheckpointError
from .ledger import CheckpointWarning as CheckpointWarning
from .ledger import entries_in as entries_in
from .ledger import statement as statement
from .ledger import versions as versions
from .make_step import make_step as make_step
from .state import TrainState as TrainState
from .step import Step as Step
from .trained_model import load_model as load_model
from .trained_model import save_model as save_model
from .trainer import Trainer as Trainer
