"""The mechanism of a plan: its sampling and its noise, and what accounts for the two together."""

import functools
import math
from typing import NamedTuple

import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation
from dp_accounting.rdp import RdpAccountant

from . import monte_carlo
from .accounting import Run, epsilon_of, event_of
from .calibration import least_noise, least_noise_of
from .sampling_kinds import BallsInBins, CyclicPoisson, FixedSize, Kind, Poisson, RandomAllocation
from .strategies import Banded


class Mechanism(NamedTuple):
    """The sampling and the noise of so many steps of a run, and what they cost.

    | sampling | noise | accounted for |
    |---|---|---|
    | `Poisson` | independent | privacy loss distribution of a step, composed |
    | `CyclicPoisson`, C of at most `cycle` bands | any | the same, of a cycle (arXiv 2306.08153) |
    | `CyclicPoisson`, C with more | `Banded` | one Gaussian mechanism of `Banded.sensitivity` |
    | `FixedSize` | independent | Renyi divergences (`REPLACE_ONE` alone) |
    | `RandomAllocation` | independent | the distribution of a cycle (`random_allocation.py`) |
    | `BallsInBins` | independent | the same, of one cycle with the noise / sqrt(cycles) |
    | `BallsInBins` | `Banded` | Monte Carlo |
    | `MinSeparation` | any | Monte Carlo |

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
        match self.sampling:
            case CyclicPoisson(cycle=cycle) | RandomAllocation(cycle=cycle):
                return -(-steps // cycle) * cycle
            case _:
                return steps

    @property
    def is_one_start(self) -> bool:
        """Whether all steps must be taken by one start.

        Examples keep a bin, or a distance, over the whole run; another start draws others. So
        accounting knows a run of one start alone.
        """
        composed = Poisson | CyclicPoisson | FixedSize | RandomAllocation
        return not isinstance(self.sampling, composed)

    @property
    def confidence(self) -> float:
        """In `epsilon`: below 1 where it comes from random draws."""
        is_by_samples = self.is_one_start and self.reduced() is None
        return monte_carlo.CONFIDENCE if is_by_samples else 1.0

    def check(self) -> None:
        """Raises a ValueError unless something accounts for sampling and noise together."""
        sampling, name, bands = self.sampling, type(self.sampling).__name__, len(self.column())
        is_free = isinstance(sampling, Poisson | FixedSize | RandomAllocation)
        if bands > (1 if is_free else getattr(sampling, "separation", bands)):
            raise ValueError(
                f"nothing accounts for correlated noise of {bands} bands with {sampling}: an "
                "example may take part again before all of them have passed. Take dp.sampling."
                "CyclicPoisson, BallsInBins, or MinSeparation and band_mf(separation, steps)."
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

    def reduced(self, noise_multiplier: float = 1.0) -> tuple[Run, float] | None:
        """A run that has a privacy loss distribution and costs as much, and its noise multiplier.

        None where there is none.
        """
        column, cycle = self.column(), getattr(self.sampling, "cycle", 1)
        rounds = -(-self.steps // cycle)
        match self.sampling:
            case Poisson(sampling_prob=probability) | CyclicPoisson(sampling_prob=probability):
                if len(column) <= cycle:
                    # An example touches at most `cycle` rows of C G each time, and never one twice.
                    run = Run(probability, rounds, self.relation)
                    return run, noise_multiplier / math.hypot(*column)
                assert self.noise is not None
                sensitivity = self.noise.sensitivity(rounds * cycle, cycle)
                return Run(1.0, min(rounds, 1), self.relation), noise_multiplier / sensitivity
            case RandomAllocation():
                return Run(1.0, rounds, self.relation, cycle), noise_multiplier
            case BallsInBins() if len(column) == 1:
                # An example moves the same step of each cycle. A begun cycle only costs less.
                run = Run(1.0, min(self.steps, 1), self.relation, cycle)
                return run, noise_multiplier / math.sqrt(max(rounds, 1))
            case _:
                return None

    def event(self, noise_multiplier: float) -> dp_accounting.DpEvent:
        """The event for dp_accounting; a ValueError where it has none."""
        if (reduced := self.reduced(noise_multiplier)) is not None:
            return event_of(*reduced)
        if not isinstance(self.sampling, FixedSize):
            raise ValueError(
                f"dp_accounting has no event for {type(self.sampling).__name__} with this noise: "
                "its epsilon is by Monte Carlo. For several releases together take CyclicPoisson."
            )
        gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
        sizes = self.sampling.num_examples, self.sampling.batch_size
        step = dp_accounting.SampledWithoutReplacementDpEvent(*sizes, gaussian)
        return dp_accounting.SelfComposedDpEvent(step, self.steps)

    def epsilon(self, noise_multiplier: float, delta: float) -> float:
        """Epsilon at a delta."""
        if self.steps == 0:
            return 0.0
        if (reduced := self.reduced(noise_multiplier)) is not None:
            return epsilon_of(*reduced, delta)
        if noise_multiplier == 0:
            return math.inf
        if isinstance(self.sampling, FixedSize):
            accountant = RdpAccountant(neighboring_relation=self.relation)
            return float(accountant.compose(self.event(noise_multiplier)).get_epsilon(delta))
        run = self.sampling, self.column(), self.steps
        return monte_carlo.epsilon(*run, noise_multiplier, delta)

    def least_noise(self, delta: float, budget: float) -> float:
        """The least noise multiplier that keeps to a budget of epsilon: see `calibrate`."""
        if (reduced := self.reduced()) is not None:
            return least_noise_of(reduced[0], delta, budget) / reduced[1]
        return least_noise(functools.partial(self.epsilon, delta=delta), budget, 1e-3)
