"""Time and temporary memory against the size of the batch, at a fixed microbatch size."""

from collections.abc import Callable
from typing import NamedTuple

from .contenders import AUTO, NON_PRIVATE, Contender
from .measure import Result, measure
from .rows import Row

MICROBATCH_SIZE = 8


class Curve(NamedTuple):
    """A contender's results at each size of the batch."""

    name: str
    batch_sizes: list[int]
    results: list[Result]


def curves(
    make: Callable[[int], Row],
    batch_sizes: list[int],
    contenders: list[Contender],
    repeats: int,
    tell: Callable[[str], None],
) -> list[Curve]:
    """`auto` in microbatches of a fixed size, against the non-private gradient of all at once."""
    by_name = {contender.name: contender for contender in contenders}
    compared = [by_name[NON_PRIVATE], _fixed(by_name[AUTO])]
    measured = [measure(make(size), compared, repeats, tell) for size in batch_sizes]
    return [
        Curve(contender.name, batch_sizes, list(results))
        for contender, results in zip(compared, zip(*measured, strict=True), strict=True)
    ]


def _fixed(contender: Contender) -> Contender:
    return Contender(
        f"{contender.name}, {MICROBATCH_SIZE} at a time",
        lambda row, _: contender.prepare(row, MICROBATCH_SIZE),
        microbatched=False,
    )
