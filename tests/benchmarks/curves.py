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
    make: Callable[..., Row],
    sizes: dict[str, int],
    contenders: list[Contender],
    repeats: int,
    tell: Callable[[str], None],
    factors: tuple[int, ...] = (1, 2, 4, 8, 16),
) -> list[Curve]:
    """Ours in microbatches of a fixed size, against the non-private gradient of all at once."""
    fixed = [_fixed(each) for each in contenders if each.name.startswith((NON_PRIVATE, "eqx_dp"))]
    batch_sizes = [MICROBATCH_SIZE * factor for factor in factors]
    measured = [
        measure(make(**{**sizes, "batch": batch_size}), fixed, repeats, tell)
        for batch_size in batch_sizes
    ]
    return [
        Curve(contender.name, batch_sizes, list(results))
        for contender, results in zip(fixed, zip(*measured, strict=True), strict=True)
    ]


def _fixed(contender: Contender) -> Contender:
    if not (contender.microbatched or contender.name == AUTO):
        return contender
    return Contender(
        f"{contender.name}, {MICROBATCH_SIZE} at a time",
        lambda row, _: contender.prepare(row, MICROBATCH_SIZE),
        microbatched=False,
    )
