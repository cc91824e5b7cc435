"""What a plan needs to know of a function that sums clipped gradients."""

import math
from typing import Protocol, TypeVar, runtime_checkable

from dp_accounting import NeighboringRelation

from .accounting import SENSITIVITY_OF_UNIT_NORM

T = TypeVar("T")


@runtime_checkable
class HasSensitivity(Protocol):
    """A function that sums clipped gradients, as `filter_clipped_grad` returns it."""

    @property
    def l2_norm_bound(self) -> float:
        """The most that one example contributes to the sum, in L2 norm."""
        ...

    def sensitivity(self, neighboring_relation: NeighboringRelation) -> float:
        """The most that the sum changes, in L2 norm, between neighboring data sets."""
        ...


def agreed_with(grad_fn: HasSensitivity, name: str, given: T | None) -> T | None:
    """The given option, or that of `grad_fn`; a ValueError if the two differ."""
    own: T | None = getattr(grad_fn, name, None)
    if own is not None and given is not None and own != given:
        raise ValueError(
            f"grad_fn was made with {name}={own}, but the noise was asked to follow {given}. Leave "
            f"{name} out, or give both the same."
        )
    return own if given is None else given


def checked_sensitivity(grad_fn: HasSensitivity, relation: NeighboringRelation) -> float:
    """The sensitivity of a sum, or a ValueError if it is not finite or not what its bound says."""
    sensitivity = float(grad_fn.sensitivity(relation))
    if not (math.isfinite(sensitivity) and sensitivity >= 0):
        raise ValueError(
            f"the gradients' sensitivity must be finite to be hidden by noise; found {sensitivity} "
            f"for {relation.name}. Without a finite clip norm one example can change the sum "
            "without limit: set l2_clip_norm."
        )
    # Accounting relies on this ratio. More is more noise: the rounding of sums may be in it.
    implied = SENSITIVITY_OF_UNIT_NORM[relation] * grad_fn.l2_norm_bound
    if not implied * (1 - 1e-9) <= sensitivity <= implied * 1.01:
        raise ValueError(
            f"the gradients' sensitivity for {relation.name} must be {implied}, from their "
            f"l2_norm_bound of {grad_fn.l2_norm_bound}; or up to 1 % more, for rounding; "
            f"found {sensitivity}. The plan's accounting would not hold for it."
        )
    return sensitivity
