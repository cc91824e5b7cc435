"""Which steps of a run are taken together, in one call of a compiled program."""

from collections.abc import Iterable, Iterator
from typing import Any, SupportsIndex

from .step import Step


def checked_number(steps_per_call: SupportsIndex, step: Step[Any], *, has_extra: bool) -> int:
    """How many steps a call takes; a ValueError if that is no number, or does not go.

    What an optimizer is given beside (`has_extra`) depends on the model of every step.
    """
    number = step.with_steps_per_call(steps_per_call).steps_per_call
    if step.steps_per_call > 1:
        raise ValueError(
            f"step takes {step.steps_per_call} steps a call. Give the trainer the single step, and "
            "the number as steps_per_call."
        )
    if number > 1 and has_extra:
        raise ValueError(
            f"steps_per_call is {number}, and extra wants the model before every step, which is "
            "not there within a call. Leave one of them out."
        )
    return number


def calls(start: int, stop: int, most: int, ends: Iterable[int]) -> Iterator[range]:
    """The steps of each call, counted from 0, in their order.

    A call takes `most` steps or a single one, so that a run has two programs at most. No call goes
    on beyond a step after which something is to be done with the state; single steps fill what is
    left before it.

    | case | the calls |
    |---|---|
    | 0 to 20, 8 at most, nothing in between | 0-7, 8-15, 16, 17, 18, 19 |
    | 0 to 20, 8 at most, a save after every 10 | 0-7, 8, 9, 10-17, 18, 19 |
    | a run that goes on after an end | as if it had not been interrupted |

    Steps from `start` to below `stop` are taken, and a call ends after every multiple of a number
    in `ends`.
    """
    every, done = tuple(ends), start
    while done < stop:
        end = min([stop, *((done // number + 1) * number for number in every)])
        length = most if done + most <= end else 1
        yield range(done, done + length)
        done += length
