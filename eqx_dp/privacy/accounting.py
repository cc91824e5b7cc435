"""Accounting: what dp_accounting is asked, how finely, and with how much noise it is satisfied."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import dp_accounting
from dp_accounting import NeighboringRelation
from dp_accounting.pld import PLDAccountant

# How far one example can move a sum of gradients that are each at most 1 in norm.
SENSITIVITY_OF_UNIT_NORM = {
    NeighboringRelation.ADD_OR_REMOVE_ONE: 1.0,
    NeighboringRelation.REPLACE_ONE: 2.0,
    NeighboringRelation.REPLACE_SPECIAL: 1.0,
}

ROUNDING_DELTA = 2.0**-51
"""What one step may lose of delta, since dp_accounting counts in float64.

Privacy losses of n steps are convolved by raising a discrete Fourier transform to the n-th power,
which makes its relative error n times as large. Against the same in extended precision, delta came
out too small by at most 0.83 n 2^-52 (24 convolutions of 10^3 to 10^6 steps, sampling probabilities
from 1e-5 to 1, intervals from 1e-5 to 1e-3).
"""


def check_relation(relation: object) -> None:
    """Raises a ValueError unless it is one of dp_accounting's relations."""
    if not isinstance(relation, NeighboringRelation):
        raise ValueError(
            "neighboring_relation must be one of "
            f"{', '.join(f'NeighboringRelation.{known.name}' for known in NeighboringRelation)}; "
            f"found {relation!r}."
        )


class Run(NamedTuple):
    """What epsilon depends on, beside noise and delta.

    Attributes:
        sampling_prob: with which each example takes part in a step.
        steps: how many have been taken.
        relation: which data sets are neighbors.
    """

    sampling_prob: float
    steps: int
    relation: NeighboringRelation


def event_of(run: Run, noise_multiplier: float) -> dp_accounting.DpEvent:
    """The steps of a run, in dp_accounting's terms."""
    if run.steps == 0:
        return dp_accounting.NoOpDpEvent()
    per_norm_bound = noise_multiplier * SENSITIVITY_OF_UNIT_NORM[run.relation]
    if run.sampling_prob < 1:
        gaussian = dp_accounting.GaussianDpEvent(per_norm_bound)
        sampled = dp_accounting.PoissonSampledDpEvent(run.sampling_prob, gaussian)
        return dp_accounting.SelfComposedDpEvent(sampled, run.steps)
    if run.relation is not NeighboringRelation.REPLACE_ONE:
        gaussian = dp_accounting.GaussianDpEvent(per_norm_bound)
        return dp_accounting.SelfComposedDpEvent(gaussian, run.steps)
    # Of a bare Gaussian event, accountants by privacy loss distributions take it that replacement
    # moves two gradients, and those by Renyi divergences that it moves one. A sampled event means
    # two to the former, and the latter refuse it. All steps together are one mechanism of less
    # noise (Dong et al. 2022, corollary 3.3), which makes them as cheap as the bare event.
    gaussian = dp_accounting.GaussianDpEvent(per_norm_bound / math.sqrt(run.steps))
    return dp_accounting.PoissonSampledDpEvent(1.0, gaussian)


# Privacy loss grows with the inverse square of the noise: below this it leaves the range of floats.
_LEAST_ACCOUNTED_NOISE = 1e-3


# A progress bar asks for the same figure at every refresh.
@functools.lru_cache(maxsize=4096)
def epsilon_of(run: Run, noise_multiplier: float, delta: float) -> float:
    """Epsilon of a run, what float64 may lose of delta paid for: infinite if that is all of it."""
    if run.steps == 0:
        return 0.0
    left = delta - run.steps * ROUNDING_DELTA
    if noise_multiplier < _LEAST_ACCOUNTED_NOISE or left <= 0:
        return math.inf
    interval = _discretization(run, noise_multiplier)
    accountant = PLDAccountant(run.relation, value_discretization_interval=interval)
    accountant.compose(event_of(run, noise_multiplier))
    return float(accountant.get_epsilon(left))


def _discretization(run: Run, noise_multiplier: float) -> float:
    """How finely privacy losses are told apart; any value gives a true bound.

    dp_accounting's own 1e-4 is kept wherever epsilon is of use. Its work grows with the range of
    losses, though: that of one mechanism (about 1 / noise_multiplier^2) and that of the whole run.
    Where those run into the hundreds, epsilon does too, and the interval grows along.
    """
    # Without sampling, all steps are accounted for as one Gaussian mechanism of less noise.
    of_one = (1 if run.sampling_prob < 1 else run.steps) / noise_multiplier**2
    of_all = run.steps * run.sampling_prob**2 / noise_multiplier**2
    return 1e-4 * max(1.0, of_one / 10, of_all / 1000)


# Calibration.

_MOST_NOISE = 1e15
# Relative to the noise multiplier.
_CALIBRATION_TOLERANCE = 1e-4


def least_noise(run: Run, delta: float, budget: float) -> float:
    """The least noise multiplier, to 1e-4 of it, that keeps a run within a budget of epsilon."""

    def epsilon_at(noise_multiplier: float) -> float:
        return epsilon_of(run, noise_multiplier, delta)

    # What the textbook bound asks for (Dwork and Roth 2014, appendix A) if sampling scaled it by q.
    of_one = math.sqrt(2 * math.log(1.25 / delta)) / budget
    guess = run.sampling_prob * math.sqrt(run.steps) * of_one
    enough = _enough_noise(epsilon_at, max(1.0, guess), budget)
    little = max(enough / 2, _LEAST_ACCOUNTED_NOISE)
    interval = _discretization(run, little)
    # Searched on a logarithmic scale, where one tolerance suits large and small noise alike.
    log_noise = dp_accounting.calibrate_dp_mechanism(
        lambda: PLDAccountant(run.relation, value_discretization_interval=interval),
        lambda log_noise: event_of(run, math.exp(log_noise)),
        budget,
        delta - run.steps * ROUNDING_DELTA,
        dp_accounting.ExplicitBracketInterval(math.log(little), math.log(enough)),
        tol=_CALIBRATION_TOLERANCE,
    )
    noise_multiplier = math.exp(log_noise)
    # The search and the plan may discretize a little differently, and the plan's word counts.
    while epsilon_at(noise_multiplier) > budget:
        noise_multiplier *= 1 + _CALIBRATION_TOLERANCE
    return noise_multiplier


def _enough_noise(epsilon_at: Callable[[float], float], guess: float, budget: float) -> float:
    """A noise multiplier that meets the budget and half of which does not.

    Searched from where epsilon is moderate: accounting for very little noise is slow.
    """
    noise_multiplier = guess
    while epsilon_at(noise_multiplier) > budget:
        noise_multiplier *= 2
        if noise_multiplier > _MOST_NOISE:
            raise ValueError(
                f"epsilon {budget:g} is out of reach: a noise multiplier of {_MOST_NOISE:g} does "
                "not meet it. Take a larger epsilon or delta, or fewer steps."
            )
    while epsilon_at(noise_multiplier / 2) <= budget:
        noise_multiplier /= 2
        if epsilon_at(_LEAST_ACCOUNTED_NOISE) <= budget:
            raise ValueError(
                f"epsilon {budget:g} is met with hardly any noise (a noise multiplier of "
                f"{_LEAST_ACCOUNTED_NOISE:g}), which gives no useful protection: epsilon is too "
                "large, or delta is not well below steps x sampling_prob. Choose a smaller epsilon "
                "or delta, or make the plan with a noise_multiplier of your own."
            )
    return noise_multiplier
