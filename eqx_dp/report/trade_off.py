"""The trade-off curve of a run: how often an attack can be right, for how often it is wrong."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from ..privacy import PrivacyPlan
from ..privacy.accounting import (
    LEAST_NOISE,
    ROUNDING_DELTA,
    WIDEST_INTERVAL,
    Run,
    composed,
    discretization,
    epsilon_of,
    unsampled,
)

_EPSILONS = 101
# A plan may have a large delta; the curve says something of small ones as well.
_SMALL_DELTA = 1e-6
# Beyond it lie attacks with fewer false positives than e^-50.
_LARGEST_EPSILON = 50.0


class TradeOff(NamedTuple):
    """The corners of a curve that no attack is above; between them it is straight.

    An attack looks at everything that a run releases, and says whether one example took part.

    Attributes:
        false_positives: from 0 to 1, ascending: with which probability an attack may say yes where
            the example took no part.
        true_positives: with which probability it then says yes, at most, where the example did.
        right_guesses: how often an attack is right, at most, if both cases are equally likely. To
            guess without looking is right in a half of the cases.
    """

    false_positives: Float[np.ndarray, " corners"]
    true_positives: Float[np.ndarray, " corners"]
    right_guesses: float


def trade_off_of(plan: PrivacyPlan, steps: int) -> TradeOff:
    """What an attack can find out, at most, from the first steps of a run.

    **Guarantee.** No attack is above the curve, whatever it knows or computes, if the run kept to
    the plan. Every (epsilon, delta) that holds bounds an attack with false positives a: the rest of
    its true positives, 1 - true positives, is at least

        f(a) = max(0, 1 - delta - e^epsilon a, e^-epsilon (1 - delta - a))

    (Wasserman and Zhou 2010; Kairouz et al. 2017). The curve is the largest f of 101 epsilons, and
    all of them together say what the run's delta as a function of epsilon says (Dong, Roth, Su
    2022, section 2.3). To use a few of them makes the curve larger, never smaller. Delta is that of
    dp_accounting, rounded up, and pays for batches that overflow as that of the plan does.

    | case | curve |
    |---|---|
    | no steps | true positives are as frequent as false ones: nothing can be found out |
    | no noise | true positives are 1 everywhere |
    | epsilon above 50 | true for all attacks; exact to some percent |
    """
    if steps == 0:
        return TradeOff(np.array([0.0, 1.0]), np.array([0.0, 1.0]), 0.5)
    run = Run(plan.sampling_prob, steps, plan.neighboring_relation)
    if math.isinf(plan.epsilon(steps)):
        return TradeOff(np.array([0.0, 1.0]), np.array([1.0, 1.0]), 1.0)
    largest = epsilon_of(run, plan.noise_multiplier, min(plan.delta, _SMALL_DELTA))
    epsilons = np.unique(np.linspace(0.0, min(largest, _LARGEST_EPSILON), _EPSILONS))
    deltas = np.asarray(_deltas_of(run, plan.noise_multiplier, epsilons.tolist()))
    deltas = np.minimum(deltas + plan.overflow_delta(steps), 1.0)
    # Where two lines meet that follow on each other, there is a corner; and one in its mirror.
    steep = np.abs(np.diff(deltas)) / np.diff(np.exp(epsilons))
    mirrored = _least_missed(np.append(0.0, steep), epsilons, deltas)
    corners = np.unique(np.clip(np.concatenate([[0.0, 1.0], steep, mirrored]), 0.0, 1.0))
    caught = 1.0 - _least_missed(corners, epsilons, deltas)
    return TradeOff(corners, np.maximum(caught, corners), float((1 + deltas[0]) / 2))


def _least_missed(
    alphas: Float[np.ndarray, " n"],
    epsilons: Float[np.ndarray, " e"],
    deltas: Float[np.ndarray, " e"],
) -> Float[np.ndarray, " n"]:
    """The largest f of all epsilons, at each number of false positives."""
    kept = 1 - deltas[:, None]
    steep = kept - np.exp(epsilons)[:, None] * alphas
    flat = np.exp(-epsilons)[:, None] * (kept - alphas)
    return np.maximum(0.0, np.maximum(steep, flat).max(axis=0))


def _deltas_of(run: Run, noise_multiplier: float, epsilons: Sequence[float]) -> list[float]:
    """Delta of a run for each epsilon, with what float64 may lose of it, at most 1.

    The run has at least one step, and epsilons are finite. Below `LEAST_NOISE` every delta is 1.
    """
    interval = WIDEST_INTERVAL + 1
    if noise_multiplier >= LEAST_NOISE:
        interval = discretization(run, noise_multiplier)
    if interval > WIDEST_INTERVAL:
        return [1.0] * len(epsilons)
    if run.sampling_prob == 1:
        delta_at = unsampled(run, noise_multiplier, interval).get_delta
    else:
        delta_at = composed(run, noise_multiplier, interval).get_delta_for_epsilon
    # One by one: for a list, dp_accounting subtracts sums that may be large and alike.
    found = [float(delta_at(float(epsilon))) for epsilon in epsilons]
    return [min(max(delta, 0.0) + run.steps * ROUNDING_DELTA, 1.0) for delta in found]
