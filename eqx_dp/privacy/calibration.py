"""Calibration: the least noise that keeps a run within a budget of epsilon."""

import functools
import math
from collections.abc import Callable
from typing import Any, cast

from scipy import optimize

from .accounting import LEAST_NOISE, Run, delta_left, discretization, epsilon_at, epsilon_of
from .finite_precision import PRECISION_EPSILON

_LEAST, _MOST = math.log(LEAST_NOISE), math.log(1e15)
# The intervals of the first search are this many times as wide, where epsilon is cheap.
_COARSE = 30.0
# Epsilon of 0, and infinite epsilon, on a logarithmic scale.
_ZERO, _INFINITE = -700.0, 700.0


def least_noise_of(run: Run, delta: float, budget: float) -> float:
    """The least noise multiplier that keeps a run within a budget of epsilon, to 1e-4 of it.

    (To 5e-3 of it where delta is close to what float64 may lose: rounding makes epsilon jump up and
    down there.) The result keeps to the budget at the plan's own discretization.

    It is searched by a rough epsilon first, and from there on by the plan's own.
    """
    left = delta_left(((run, 1.0),), delta)

    def roughly(noise: float) -> float:
        own = discretization(run, noise)
        return epsilon_at(((run, noise),), left, max(own, min(_COARSE * own, budget / 50)))

    def exactly(noise: float) -> float:
        return epsilon_of(((run, noise),), delta)

    start = math.log(least_noise(roughly, budget, 1e-3))
    return least_noise(exactly, budget, 1e-4 if left > 0.9 * delta else 5e-3, start)


def least_noise(
    epsilon: Callable[[float], float], budget: float, tolerance: float, start: float = 0.0
) -> float:
    """The least noise multiplier that keeps to a budget, to a tolerance, by any falling function.

    It is searched by bisection and secants (Brent 1973), from the logarithm `start` on.
    """
    exceeds = functools.partial(_excess, epsilon, budget)
    best = _root(exceeds, start, tolerance / 2, budget)
    while exceeds(best) > 0:
        best += tolerance / 2
    return max(math.exp(best), LEAST_NOISE)


def _excess(epsilon: Callable[[float], float], budget: float, log_noise: float) -> float:
    """By how much the logarithm of epsilon exceeds that of a budget."""
    found = epsilon(max(math.exp(log_noise), LEAST_NOISE))
    log_epsilon = math.log(found) if found > 0 else _ZERO
    return min(log_epsilon, _INFINITE) - math.log(budget - PRECISION_EPSILON)


def _root(
    function: Callable[[float], float], start: float, tolerance: float, budget: float
) -> float:
    """The root of a falling function of the logarithm of the noise multiplier."""
    excess = functools.cache(function)
    low = high = start
    # Epsilon falls about as fast as noise grows, or faster, so this reaches beyond the root.
    step = min(max(1.1 * abs(excess(low)), tolerance), 2.0)
    while excess(high) > 0:
        if high >= _MOST:
            raise ValueError(
                f"epsilon {budget:g} is out of reach: a noise multiplier of {math.exp(_MOST):g} "
                "does not meet it. Take a larger epsilon or delta, or fewer steps."
            )
        low, high, step = high, min(high + step, _MOST), 2 * step
    while excess(low) <= 0:
        if low <= _LEAST:
            raise ValueError(
                f"epsilon {budget:g} is met with hardly any noise (a noise multiplier of "
                f"{LEAST_NOISE:g}), which protects no one: epsilon is too large, or delta not well "
                "below steps x sampling_prob. Ask for less, or give noise_multiplier yourself."
            )
        low, high, step = max(low - step, _LEAST), low, 2 * step
    return float(cast(Any, optimize).brentq(excess, low, high, xtol=tolerance))
