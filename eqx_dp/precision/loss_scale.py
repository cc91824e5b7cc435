"""A factor of the loss, so that the backward pass does not underflow."""

import dataclasses
import math
from typing import Literal, TypeAlias, get_args

from ..shown import shown
from .refusals import one_of, refusal

LossScaleKind: TypeAlias = Literal["none", "static"]
_KINDS: tuple[LossScaleKind, ...] = get_args(LossScaleKind)


@dataclasses.dataclass(frozen=True)
class LossScale:
    """A factor of the loss for the backward pass, so that float16 does not underflow.

    jmp's dynamic scale changes after an overflow, and so depends on the private data. Here the
    scale is constant, and a power of two, so undoing it is exact. An example whose backward pass
    overflows adds zero.

    Args:
        kind: `"none"`, or `"static"` for a constant scale.
        value: The static scale, a positive power of two; 1 for none.

    Raises:
        ValueError: If the kind is neither; the value is not a finite positive power of
            two; or the kind is not `"static"` and the value is not 1.
    """

    kind: LossScaleKind = "none"
    value: int | float = 1.0

    def __post_init__(self):
        one_of("loss_scale.kind", self.kind, _KINDS)
        if not _is_power_of_two(self.value):
            allowed = "a power of two, such as 32768 or 0.5"
            raise refusal("loss_scale.value", shown(self.value), allowed)
        if self.kind != "static" and self.value != 1:
            allowed = f'1 where loss_scale.kind is "{self.kind}"'
            raise refusal("loss_scale.value", repr(self.value), allowed)
        object.__setattr__(self, "value", float(self.value))


def _is_power_of_two(value: int | float) -> bool:
    # frexp writes a number as m * 2**e with 1/2 <= |m| < 1: m is 1/2 only for powers of two.
    try:
        return math.frexp(value)[0] == 0.5
    except OverflowError:  # an integer that no float holds
        return False
