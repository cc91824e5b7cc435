"""How many examples a Poisson sample holds: what a step is expected to compute."""

import bisect
import dataclasses
import functools
from typing import Any, cast

import numpy as np
from jaxtyping import Float64
from scipy import stats

_MOST_EXAMPLES = 2**53  # of a sampler


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the batches of a plan are drawn; public.

    Attributes:
        sampling_prob: The probability with which each example takes part, in (0, 1].
        overflow_probability: The largest probability that more examples are drawn than a batch has
            slots.
    """

    sampling_prob: float
    overflow_probability: float

    def of(self, slots: int) -> "SampleSize":
        """The sample that a batch of so many slots was made for, the capacity of a sampler.

        The capacity determines the size of the data set, up to rounding. If examples are drawn very
        rarely, this is the largest data set with that capacity.
        """

        def overflows(num_examples: int) -> bool:
            tail = binomial().sf(slots, num_examples, self.sampling_prob)
            return float(tail) > self.overflow_probability

        most = int(min(slots / self.sampling_prob + 1, _MOST_EXAMPLES))
        first = bisect.bisect_left(range(most + 1), True, key=overflows)
        return SampleSize(slots, max(first - 1, 0), self.sampling_prob)


@dataclasses.dataclass(frozen=True)
class SampleSize:
    """How many of a batch's slots hold an example: a binomially distributed number.

    Attributes:
        slots: The capacity of the batch.
        num_examples: Of the data set.
        sampling_prob: The probability that an example takes part.
    """

    slots: int
    num_examples: int
    sampling_prob: float

    @property
    def mean(self) -> float:
        """The expected number of examples in a batch."""
        return self.num_examples * self.sampling_prob

    def microbatches(self, size: int, slots: int | None = None) -> float:
        """The expected number of microbatches that hold an example, if examples come first.

        It is the sum over k of the probability that there are more than k x `size` examples. With
        `slots`, those of one device count: the first of several among which the batch's slots are
        divided, and to which the examples are dealt out. It holds more than k of them if there are
        more than k x devices.
        """
        devices = 1 if not slots else max(1, self.slots // slots)
        return float(np.sum(self._tails[:: size * devices]))

    @functools.cached_property
    def _tails(self) -> Float64[np.ndarray, "slots"]:
        """For each slot the probability that it holds an example."""
        return binomial().sf(np.arange(self.slots), self.num_examples, self.sampling_prob)


def binomial() -> Any:
    """The distribution of scipy."""
    return cast(Any, stats.binom)  # scipy is not typed
