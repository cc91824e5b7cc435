"""Weighted sums that devices share out slice by slice, so that none holds a whole one."""

import math
from typing import NamedTuple

from jaxtyping import Array

from ..sharding import Cut
from .layouts import Layout, merged
from .uses import ParamUse


class Scattering(NamedTuple):
    """How the weighted sum at a use, in one iteration of the scans around, goes to devices.

    Attributes:
        layout: where the entries of the operand stand in the slice of the parameter.
        shape: of the slice; of the parameter where no scan goes over slices.
        cut: of the parameter.
        ahead: the parameter's dimensions in front of those of a slice.
    """

    layout: Layout
    shape: tuple[int, ...]
    cut: Cut
    ahead: tuple[int, ...]

    @property
    def part(self) -> tuple[int, ...]:
        """The shape of a device's part."""
        return self.cut.local(self.shape)

    def stacked(self, parts: Array) -> Array:
        """A device's part of the whole parameter's sum, from those of all slices."""
        return parts.reshape(*self.ahead, *self.part)

    def __call__(self, total: Array) -> Array:
        """A device's part of the sum over devices, from the sum over its own examples."""
        return self.cut.scattered(self.layout.pulled_back(total, self.shape))


def scattering_of(use: ParamUse, shape: tuple[int, ...], cut: Cut | None) -> Scattering | None:
    """The same, where scans go over whole slices of a parameter, in order, and cut none of it.

    Args:
        use: the only one of a parameter.
        shape: of the parameter.
        cut: how its sum is cut; None where it is not.

    Returns:
        None where there are no such slices: the sum is then known, and scattered, as a whole.
    """
    if cut is None:
        return None
    steps, num_scans = math.prod(use.slices), len(use.slices)
    ahead = next((n for n in range(len(shape) + 1) if math.prod(shape[:n]) == steps), None)
    if ahead is None or any(dim < ahead for dim, _ in cut.over(len(shape))):
        return None
    size = math.prod(shape[ahead:])
    order = merged(digit for axis in use.view.axes[:num_scans] for digit in axis)
    layout = use.view._replace(axes=use.view.axes[num_scans:])
    if order != merged([(steps, size)]) or not layout.is_regular(size):
        return None
    return Scattering(layout, shape[ahead:], cut, shape[:ahead])
