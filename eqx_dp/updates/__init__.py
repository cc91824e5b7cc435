"""Updates by noisy gradients: how a model and an optimizer's state are stored."""

from .apply_updates import apply_updates as apply_updates
from .optimizer_state import first_state as first_state
from .optimizer_state import stored_model as stored_model
from .optimizer_state import stored_state as stored_state
from .optimizer_state import wide_parameters as wide_parameters
from .optimizer_state import widened as widened
