"""Weighted sums that devices share out slice by slice, so that none holds a whole one."""

from typing import NamedTuple

from jaxtyping import Array

from ..sharding import Cut
from .uses import ParamUse


class Scattering(NamedTuple):
    """How the weighted sum at a use, in one iteration of the scans around, goes to devices.

    Attributes:
        use: of the slice of a parameter; of the parameter where no scan goes over slices.
        cut: of the parameter.
        ahead: the parameter's dimensions in front of those of a slice.
    """

    use: ParamUse
    cut: Cut
    ahead: tuple[int, ...]

    @property
    def part(self) -> tuple[int, ...]:
        """The shape of a device's part."""
        return self.cut.local(self.use.shape)

    def stacked(self, parts: Array) -> Array:
        """A device's part of the whole parameter's sum, from those of all slices."""
        return parts.reshape(*self.ahead, *self.part)

    def __call__(self, total: Array) -> Array:
        """A device's part of the sum over devices, from the operand's over its own examples."""
        return self.cut.scattered(self.use.from_operand(total))


def scattering_of(use: ParamUse, cut: Cut | None) -> Scattering | None:
    """The same, where scans go over whole slices of a parameter, in order, and cut none of it.

    Args:
        use: the only one of a parameter.
        cut: how its sum is cut; None where it is not.

    Returns:
        None where there are no such slices: the sum is then known, and scattered, as a whole.
    """
    scans = len(use.slices)
    if cut is None or any(dim < scans for dim, _ in cut.over(len(use.shape))):
        return None
    if any(step.lead < scans for step in use.view) or use.shape[:scans] != use.slices:
        return None
    inner = use.inside()._replace(
        shape=use.shape[scans:], view=tuple(step.inside(scans) for step in use.view)
    )
    return Scattering(inner, cut, use.shape[:scans])
