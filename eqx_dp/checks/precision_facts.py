"""What is known of a value on its way between the clip and the noise."""

from typing import NamedTuple

from .widths import Width


class Draw(NamedTuple):
    """Random bits that a program asks for.

    Attributes:
        line: the source line.
        bits: how many for each number.
        size: how many numbers.
    """

    line: str
    bits: int
    size: int


class Narrowest(NamedTuple):
    """The narrowest floating-point format that a value went through, and the line where it did."""

    width: Width
    line: str


class Facts(NamedTuple):
    """What is known of a value.

    Attributes:
        clipped: whether a sum of clipped gradients is in it that has no noise yet.
        draws: the random bits that it descends from; none where `clipped`.
        narrowest: what it went through since the draws; None without any, or without a float yet.
    """

    clipped: bool = False
    draws: frozenset[Draw] = frozenset()
    narrowest: Narrowest | None = None

    def through(self, width: Width | None, line: str) -> "Facts":
        """The facts about a value of the given width that is made of one with these."""
        if not self.draws or width is None:
            return self
        if self.narrowest and not width.key < self.narrowest.width.key:
            return self
        return self._replace(narrowest=Narrowest(width, line))


NOTHING = Facts()
