"""The mechanism of a plan: its sampling and its noise, and what accounts for the two together."""

import math
from typing import NamedTuple

import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation
from jaxtyping import Float64
from scipy import signal

from .accounting import LEAST_NOISE, Run, Runs, delta_left, epsilon_at, event_of
from .sampling_kinds import BallsInBins, CyclicPoisson, FixedSize, Kind, Poisson, RandomAllocation
from .strategies import Banded


class Mechanism(NamedTuple):
    """The sampling and the noise of so many steps of a run, and what they cost.

    | sampling | noise | accounted for |
    |---|---|---|
    | `Poisson` | independent | privacy loss distribution of a step, composed |
    | `CyclicPoisson`, C of at most `cycle` bands | any | the same, of a cycle (arXiv 2306.08153) |
    | `CyclicPoisson`, C with more | `Banded` | one Gaussian mechanism of `Banded.sensitivity` |
    | `FixedSize` | independent | the same, symmetric (`REPLACE_ONE` alone) |
    | `RandomAllocation` | independent | the distribution of a cycle (`random_allocation.py`) |
    | `BallsInBins` | independent | the same, of one cycle with the noise / sqrt(cycles) |
    | `BallsInBins` | `Banded` | the same, of two that cost more (`_in_bins`) |

    Attributes:
        sampling: how batches are drawn.
        noise: how noise is correlated; None: independent.
        steps: how many are taken.
        relation: which data sets are neighbors.
    """

    sampling: Kind
    noise: Banded | None
    steps: int
    relation: NeighboringRelation

    def counted(self, steps: int) -> int:
        """The steps that a start of so many counts for: a cycle that was begun, as a whole."""
        cycle = getattr(self.sampling, "cycle", 1)
        return steps if self.is_one_start else -(-steps // cycle) * cycle

    @property
    def is_one_start(self) -> bool:
        """Whether all steps must be taken by one start.

        Starts of `BallsInBins` cost at most one run if all have whole cycles and noise is
        independent (`correlated_noise.md`, part 2).
        """
        kind, is_correlated = self.sampling, len(self.column()) > 1
        return isinstance(kind, BallsInBins) and (self.steps % kind.cycle > 0 or is_correlated)

    def check(self) -> None:
        """Raises a ValueError unless something accounts for sampling and noise together."""
        sampling, name, bands = self.sampling, type(self.sampling).__name__, len(self.column())
        if bands > 1 and not isinstance(sampling, CyclicPoisson | BallsInBins):
            raise ValueError(
                f"nothing accounts for correlated noise of {bands} bands with {sampling}: an "
                "example may take part again before all of them have passed. Take dp.sampling."
                "CyclicPoisson or BallsInBins."
            )
        if (whole := self.counted(self.steps)) != self.steps:
            raise ValueError(
                f"steps must be a multiple of the cycle of {sampling}: a cycle that was begun "
                f"counts as a whole. Found {self.steps}; take {whole}."
            )
        is_replaced = self.relation is NeighboringRelation.REPLACE_ONE
        if isinstance(sampling, FixedSize) != is_replaced and not isinstance(
            sampling, Poisson | CyclicPoisson
        ):
            known = "REPLACE_ONE alone" if isinstance(sampling, FixedSize) else "no REPLACE_ONE"
            raise ValueError(
                f"accounting for {name} knows {known}; found {self.relation.name}. Give another "
                "neighboring_relation, or take Poisson or CyclicPoisson."
            )

    def column(self) -> tuple[float, ...]:
        """First column of the strategy matrix, up to its last entry that is not 0."""
        if self.noise is None or not self.noise.is_correlated:
            return (1.0,)
        found = self.noise.column(self.steps)
        return tuple(found[: int(np.flatnonzero(found)[-1]) + 1].tolist())

    def reduced(self, noise_multiplier: float = 1.0) -> Runs:
        """Runs with a privacy loss distribution, which together cost as much or more.

        There is at least one step.
        """
        column, cycle = self.column(), getattr(self.sampling, "cycle", 1)
        rounds = -(-self.steps // cycle)
        match self.sampling:
            case Poisson(sampling_prob=probability) | CyclicPoisson(sampling_prob=probability):
                if len(column) <= cycle:
                    # An example touches at most `cycle` rows of C G each time, and never one twice.
                    run = Run(probability, rounds, self.relation)
                    return ((run, noise_multiplier / math.hypot(*column)),)
                assert self.noise is not None
                sensitivity = self.noise.sensitivity(rounds * cycle, cycle)
                return ((Run(1.0, 1, self.relation), noise_multiplier / sensitivity),)
            case RandomAllocation():
                return ((Run(1.0, rounds, self.relation, cycle), noise_multiplier),)
            case BallsInBins() if len(column) == 1:
                # An example moves the same step of each cycle. A begun cycle only costs less.
                run = Run(1.0, 1, self.relation, cycle)
                return ((run, noise_multiplier / math.sqrt(rounds)),)
            case BallsInBins():
                return self._in_bins(np.array(column), cycle, noise_multiplier)
            case _:  # FixedSize
                run = Run(self.sampling.step_prob, rounds, self.relation, is_fixed_size=True)
                return ((run, noise_multiplier),)

    def _in_bins(
        self, column: Float64[np.ndarray, "bands"], cycle: int, noise_multiplier: float
    ) -> Runs:
        """Runs that cost at least as much as `BallsInBins` with correlated noise.

        One example, in bin i, moves what is released by a mode m_i at most, C times the indicator
        of the bin's steps (Choquette-Choo et al. 2024, arXiv 2410.06266; C is not negative).
        The density of the mixture of all modes to no mode is, under the latter,

            X = mean over i of exp(v_i - G_ii / 2),  v normal with the covariances G,

        G the inner products of the modes, divided by the variance of the noise. Delta is the mean
        of a convex function of X, in both directions (`random_allocation.py`). Two steps raise it:

        1. Of the bins take every k-th, beginning with a random one: n = cycle // k of them. X is
           the mean, over the beginnings, of the averages of n terms. A convex function of a mean is
           at most the mean of the function (Jensen).
        2. Raise the covariances: to a for two of the bins taken, and a + b for one, where no entry
           of G is larger. That raises the mean of each convex function (Kahane 1986, "Sur le chaos
           multiplicatif": his inequality for convex functions, of any Gaussian vectors).

        With these covariances X is a product of two independent densities: of a Gaussian mechanism
        of noise 1 / sqrt(a), and of a cycle of n steps of noise 1 / sqrt(b). So the two mechanisms
        together cost at least as much. k is chosen by the variance of X; any is right. Step 1 makes
        nearly all that epsilon exceeds the truth by, step 2 some 1 % (`tests/benchmarks`).
        """
        if noise_multiplier < LEAST_NOISE:  # the squares of its inverse may exceed all floats
            return ((Run(1.0, 1, self.relation), noise_multiplier),)
        in_first = np.arange(self.steps) % cycle == 0
        mode = np.asarray(signal.lfilter(column, [1.0], in_first.astype(np.float64)))
        # G of bins i < j is a sum over fewer steps than that of 0 and j - i.
        inner = np.zeros(cycle)
        found = signal.correlate(mode, mode, method="fft")[self.steps - 1 :][:cycle]
        inner[: len(found)] = found + 1e-12 * found[0]  # what float64 may lose
        inner[len(column) : cycle - len(column) + 1] = 0
        # Modes k or more apart, on a circle: beginnings move all bins on.
        apart = np.arange(1, cycle // 2 + 1)
        furthest = np.maximum.accumulate(np.maximum(inner[apart], inner[-apart])[::-1])[::-1]
        shared = np.append(furthest, 0) / noise_multiplier**2
        own = inner[0] / noise_multiplier**2 - shared
        bins = cycle // np.append(apart, cycle)
        variance = shared + np.log1p(np.expm1(np.minimum(own, 700)) / bins)
        best = int(np.argmin(variance))
        runs = (int(bins[best]), own[best]), (1, shared[best])
        return tuple(
            (Run(1.0, 1, self.relation, count), float(square**-0.5))
            for count, square in runs
            if square > 0
        )

    def event(self, noise_multiplier: float) -> dp_accounting.DpEvent:
        """The event for dp_accounting; a ValueError where it has none."""
        if not isinstance(self.sampling, Poisson | CyclicPoisson):
            raise ValueError(
                f"dp_accounting has no tight event for {type(self.sampling).__name__}. Take "
                "plan.epsilon, or dp.compose for several releases together."
            )
        return event_of(*self.reduced(noise_multiplier)[0])

    def epsilon(self, noise_multiplier: float, delta: float) -> float:
        """Epsilon at a delta."""
        if self.steps == 0:
            return 0.0
        runs = self.reduced(noise_multiplier)
        return epsilon_at(runs, delta_left(runs, delta))
