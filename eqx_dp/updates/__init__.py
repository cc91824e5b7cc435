"""What becomes of noisy gradients: how a model and an optimizer's state are stored again."""

from .apply_updates import apply_updates
from .optimizer_state import first_state, stored_state, wide_parameters, widened

__all__ = ["apply_updates", "first_state", "stored_state", "wide_parameters", "widened"]
