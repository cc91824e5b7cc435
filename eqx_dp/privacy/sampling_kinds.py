"""Kinds of sampling: which examples take part in which step.

A kind is data: a frozen value with checked arguments. `Sampler` draws its batches; a plan accounts
for them. All kinds but `FixedSize` draw examples independently of each other, so that privacy
amplification holds for one example whatever the others do.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, cast

import numpy as np
from jaxtyping import Int64, UInt64
from scipy import stats

from ..expected import real_number, whole_number
from .sample_size import binomial

Numbers = Callable[[tuple[str, ...], int], UInt64[np.ndarray, "count"]]
"""Secret random numbers of 64 bits: so many of them for a purpose, always the same."""

Places = Int64[np.ndarray, "drawn"]
"""Positions of examples in the data set, each once. Their order means nothing."""

Draw = Callable[[int], Places]
"""The examples of a step."""

_AT_ONCE = 2**20  # numbers
_PROBABILITY = "greater than 0 and at most 1 (the probability that an example is drawn in a step)"


@dataclasses.dataclass(frozen=True)
class Kind:
    """What all kinds of sampling have; a kind is one of the other classes of this module."""

    extra_slots: ClassVar[int] = 1
    """Slots beyond those that a step overflows with the allowed probability (`overflow.md`)."""

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if name == "sampling_prob":
                checked = real_number(name, value, lambda real: 0 < real <= 1, _PROBABILITY)
            else:
                checked = whole_number(name, value, least=1, most=2**53)
            object.__setattr__(self, name, checked)

    @property
    def step_prob(self) -> float:
        """The probability that a given example is in a given step."""
        raise NotImplementedError

    def draws(self, num_examples: int, numbers: Numbers) -> Draw:
        """How the steps of one run are drawn.

        Args:
            num_examples: Of the data set.
            numbers: They must be bound to this kind, its arguments and `num_examples`.

        Returns:
            A function of the step, from 0. Several threads may call it.
        """
        raise NotImplementedError

    def overflow(self, slots: int, part: int, num_examples: int) -> float:
        """The probability that a step draws more than `slots` of `part` given examples."""
        return float(binomial().sf(slots, part, self.step_prob))

    def check(self, num_examples: int) -> None:
        """Raises a ValueError if the kind is for a data set of another size."""

    def fields(self) -> dict[str, Any]:
        """The name of the kind and its arguments, for JSON."""
        name = next(name for name, kind in KINDS.items() if kind is type(self))
        return {"kind": name} | dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Poisson(Kind):
    """Every example takes part in every step with one probability, independently.

    It buys the best amplification that independent noise can have, accounted for without samples
    (Abadi et al. 2016, section 3). It costs a number of examples that varies from step to step.

    | case | what happens |
    |---|---|
    | `sampling_prob` is 1 | every step takes every example |
    | no example is drawn | a batch of padding |

    Args:
        sampling_prob: The probability, in (0, 1].

    Raises:
        ValueError: If it has the wrong type or is out of its range.
    """

    sampling_prob: float
    extra_slots = 0  # its steps are independent

    @property
    def step_prob(self) -> float:
        """`sampling_prob`."""
        return self.sampling_prob

    def draws(self, num_examples: int, numbers: Numbers) -> Draw:
        """See `Kind`."""
        return functools.partial(_poisson, num_examples, self.sampling_prob, numbers)


@dataclasses.dataclass(frozen=True)
class CyclicPoisson(Kind):
    """Examples are divided into groups; step t draws from group t mod `cycle` by Poisson sampling.

    Each example draws its group once, independently and uniformly, so that neighbors may differ in
    the number of examples. An example takes part at most once in `cycle` steps in a row. This buys
    amplification for correlated noise of up to `cycle` bands (BandMF, Choquette-Choo et al. 2023,
    arXiv 2306.08153). Steps of one group are accounted for like those of Poisson sampling, without
    samples. It costs amplification: for the same batches, `sampling_prob` is `cycle` times as
    large as that of `Poisson`.

    | case | what happens |
    |---|---|
    | `cycle` is 1 | the same as `Poisson` |
    | `sampling_prob` is 1 | each example is in one step of each cycle: as `BallsInBins` |
    | `cycle` exceeds the number of examples | some groups are empty: batches of padding |
    | `num_examples` is large | the groups take 8 bytes an example on each host |

    Args:
        sampling_prob: The probability for an example of the group whose turn it is, in (0, 1].
        cycle: The number of groups, from 1 to 2**53.

    Raises:
        ValueError: If an argument has the wrong type or is out of its range.
    """

    sampling_prob: float
    cycle: int

    @property
    def step_prob(self) -> float:
        """`sampling_prob` / `cycle`."""
        return self.sampling_prob / self.cycle

    def draws(self, num_examples: int, numbers: Numbers) -> Draw:
        """See `Kind`."""
        in_bin = _bins(num_examples, self.cycle, numbers)

        def draw(step: int) -> Places:
            group = in_bin(step, 0)
            return group[_poisson(len(group), self.sampling_prob, numbers, step)]

        return draw


@dataclasses.dataclass(frozen=True)
class FixedSize(Kind):
    """Every step takes the same number of examples: a uniformly random set, without replacement.

    It buys batches without padding (on one host, or where hosts share their examples). It costs
    noise: it is accounted for only where one example replaces another, which moves the sum by two
    clip norms (by a privacy loss distribution, after Balle et al. 2018, arXiv 1807.01647, theorem
    9, and Zhu et al. 2022, arXiv 2106.08567, theorem 11). Epsilon is 1.06 to 1.12 times the
    largest that is known to be reached (`python -m tests.benchmarks accounting`): a step is bounded
    by the worse of two data sets at each loss, and no data set is both.

    | case | what happens |
    |---|---|
    | `batch_size` is `num_examples` | every step takes every example |
    | the data set has another size | refused: the size is public, and part of the accounting |
    | each host owns a part of the examples | its part of a batch varies, and is padded |

    Args:
        batch_size: Examples of a step, from 1 to `num_examples`.
        num_examples: Of the data set, from 1 to 2**53.

    Raises:
        ValueError: If an argument has the wrong type or is out of its range.
    """

    batch_size: int
    num_examples: int

    def __post_init__(self) -> None:
        super().__post_init__()
        advice = " A batch holds an example at most once."
        whole_number("batch_size", self.batch_size, least=1, most=self.num_examples, advice=advice)

    @property
    def step_prob(self) -> float:
        """`batch_size` / `num_examples`."""
        return self.batch_size / self.num_examples

    def draws(self, num_examples: int, numbers: Numbers) -> Draw:
        """See `Kind`."""
        size, last = self.batch_size, 2**64 // num_examples * num_examples - 1

        def draw(step: int) -> Places:
            # Places drawn with replacement, but only the first time that each is drawn.
            drawn, rounds = np.empty(0, np.uint64), 0
            while len(drawn) < size:
                more = numbers((str(step), f"places {rounds}"), min(2 * size + 40, 2**25))
                more = more[more <= np.uint64(last)] % np.uint64(num_examples)  # none is likelier
                drawn, rounds = np.concatenate([drawn, more]), rounds + 1
                drawn = drawn[np.sort(np.unique(drawn, return_index=True)[1])]
            return drawn[:size].astype(np.int64)

        return draw

    def overflow(self, slots: int, part: int, num_examples: int) -> float:
        """See `Kind`; the number of examples of a part is hypergeometric."""
        hypergeometric = cast(Any, stats.hypergeom)  # scipy is not typed
        return float(hypergeometric.sf(slots, num_examples, part, self.batch_size))

    def check(self, num_examples: int) -> None:
        """Raises a ValueError for a data set of another size."""
        if num_examples != self.num_examples:
            raise ValueError(
                f"num_examples must be {self.num_examples}, that of FixedSize, because privacy "
                f"depends on the share of examples in a batch; found {num_examples}. Make a plan "
                "for this data set."
            )


@dataclasses.dataclass(frozen=True)
class Bins(Kind):
    """Each example is in one of `cycle` bins; step t takes all examples of bin t mod `cycle`."""

    cycle: int
    are_drawn_anew: ClassVar[bool] = False
    """Whether each cycle has bins of its own."""

    @property
    def step_prob(self) -> float:
        """1 / `cycle`."""
        return 1 / self.cycle

    def draws(self, num_examples: int, numbers: Numbers) -> Draw:
        """See `Kind`."""
        in_bin = _bins(num_examples, self.cycle, numbers)
        return lambda step: in_bin(step, step // self.cycle if self.are_drawn_anew else 0)


class BallsInBins(Bins):
    """Each example draws one of `cycle` bins once; step t takes all examples of bin t mod `cycle`.

    So each example takes part once in every `cycle` steps, in the same place of each cycle. It buys
    amplification for correlated noise of any number of bands (Choquette-Choo et al. 2024, arXiv
    2410.06266), and steady use of the data. With independent noise it is accounted for like
    `RandomAllocation`. With correlated noise epsilon is a bound, 1.2 to 1.9 times the truth:
    it counts every k-th bin alone.

    | case | what happens |
    |---|---|
    | `cycle` is 1 | every step takes every example |
    | `cycle` exceeds the number of examples | some bins are empty: batches of padding |
    | a run ends within a cycle | examples of later bins took part once less |
    | `num_examples` is large | the bins take 8 bytes an example on each host |

    Args:
        cycle: The number of bins, from 1 to 2**53.

    Raises:
        ValueError: If it has the wrong type or is out of its range.
    """


class RandomAllocation(Bins):
    """As `BallsInBins`, but every `cycle` steps all examples draw their bins anew.

    Each example takes part once in each cycle, in a place that is drawn for each cycle: in k of t
    steps, with a cycle of t / k. (For k steps that are drawn freely from all t the proven epsilon
    is the same, that of k cycles: arXiv 2502.08202. So there is no kind for them.) It buys
    amplification close to that of `Poisson`, with every example in every cycle (Feldman and
    Shenfeld 2025, arXiv 2502.08202; accounting: arXiv 2602.17284), accounted for without samples.
    For 300 steps, cycle 100, delta 1e-5 epsilon is 0.955 at noise multiplier 1, 13.7 at 0.4; that
    of `Poisson` is 1.068 and 17.2. It costs correlated noise: noise must be independent.

    | case | what happens |
    |---|---|
    | `cycle` is 1 | every step takes every example |
    | a run ends within a cycle | an example took part in that cycle, or not yet |
    | noise is correlated | nothing accounts for it: two steps of an example may be neighbors |
    | `num_examples` is large | the bins take 8 bytes an example on each host |

    Args:
        cycle: The number of bins, from 1 to 2**53.

    Raises:
        ValueError: If it has the wrong type or is out of its range.
    """

    are_drawn_anew = True


KINDS: dict[str, type[Kind]] = {
    "poisson": Poisson,
    "cyclic_poisson": CyclicPoisson,
    "fixed_size": FixedSize,
    "balls_in_bins": BallsInBins,
    "random_allocation": RandomAllocation,
}


def _poisson(total: int, prob: float, numbers: Numbers, step: int) -> Places:
    """Which of so many places a step draws. From one to the next it is a geometric number."""
    at_once = int(total * prob + 10 * math.sqrt(total * prob)) + 40
    parts = [np.full(1, -1)]
    while parts[-1][-1] < total:
        uniform = (numbers((str(step), f"gaps {len(parts)}"), at_once) + 0.5) * 2.0**-64
        with np.errstate(divide="ignore", over="ignore"):  # a probability of 1, or next to 0
            skipped = np.minimum(np.log(uniform) / np.log1p(-prob), total).astype(np.int64)
        parts.append(parts[-1][-1] + np.cumsum(skipped + 1))
    drawn = np.concatenate(parts[1:])
    return drawn[drawn < total]


def _bins(num_examples: int, cycle: int, numbers: Numbers) -> Callable[[int, int], Places]:
    """The examples in the bin of a step, by the bins of an epoch.

    Bins are uniform, but for cycle x 2^-64 of each probability.
    """

    @functools.lru_cache(maxsize=1)
    def bins(epoch: int) -> UInt64[np.ndarray, "num_examples"]:
        return _in_blocks(num_examples, f"bins {epoch}", numbers) % np.uint64(cycle)

    return lambda step, epoch: np.flatnonzero(bins(epoch) == step % cycle)


def _in_blocks(count: int, purpose: str, numbers: Numbers) -> UInt64[np.ndarray, "count"]:
    """Numbers by the block: a hash gives a limited number of them."""
    firsts = range(0, count, _AT_ONCE)
    blocks = [numbers((purpose, str(first)), min(_AT_ONCE, count - first)) for first in firsts]
    return np.concatenate(blocks)
