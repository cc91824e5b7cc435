"""Calibration: the least noise that keeps a run within a budget of epsilon."""

import functools
import math
from collections.abc import Callable
from typing import Any, cast

from scipy import optimize

from .accounting import LEAST_NOISE, Pairs, Runs, delta_left, epsilon_at, widest

_LEAST, _MOST = math.log(LEAST_NOISE), math.log(1e15)
# The intervals of a rough epsilon are this many times as wide, where epsilon is cheap.
_COARSE = 30.0


def least_noise(
    runs: Callable[[float], Runs], left: float, budget: float, finished: Pairs = ()
) -> float:
    """The least noise that keeps runs within a budget of epsilon, to 1e-4 of the noise.

    (To 5e-3 of it where delta is close to what float64 may lose: rounding makes epsilon jump up and
    down there.) The result keeps to the budget at the runs' own discretization.

    A fine epsilon takes most of the time. So the noise is searched by a rough one (wider intervals,
    a little more), for what the rough one is where the fine one meets the budget: about as many
    times the budget as it is where both are known. At first the fine one is estimated: what wide
    intervals add grows with the square of their width. One or two fine ones suffice.

    Args:
        runs: by the noise: a noise multiplier, or the factor of several.
        left: delta of all together, less what float64 may lose of it.
        budget: of epsilon, without what finite precision is charged.
        finished: epsilon and delta of releases that are seen, too.
    """
    tolerance = 1e-4 if left > -9 * delta_left(runs(1.0), 0.0) else 5e-3

    def roughly(times: float, noise: float) -> float:
        found = runs(noise)
        own = widest(found)
        width = max(own, times * min(_COARSE * own, budget / 50))
        return epsilon_at(found, left, finished, width)

    def searched(times: float, start: float, wanted: float) -> float:
        return _root(functools.partial(roughly, times), math.log(start), wanted, tolerance / 20)

    times = 1.0
    noise = searched(times, 1.0, budget)
    while (finer := roughly(times / 2, noise)) < 0.97 * (rough := roughly(times, noise)):
        times /= 4
        noise = searched(times, noise, budget)
    # By how much epsilon may be below the budget, from how fast it falls.
    slope = math.log(roughly(times, 0.999 * noise) / rough) / 1e-3
    below = tolerance * min(max(1.0, slope), 100.0)
    aim = budget * (1 - below / 2)
    found = (4 * finer - rough) / 3
    for _ in range(6):
        if not 0 < found < math.inf:
            break
        noise = searched(times, noise, roughly(times, noise) * aim / found)
        found = epsilon_at(runs(noise), left, finished)
        if budget * (1 - below) <= found <= budget:
            break
    while epsilon_at(runs(noise), left, finished) > budget:
        noise *= 1 + tolerance / 2
    return noise


def _root(
    epsilon: Callable[[float], float], start: float, wanted: float, tolerance: float
) -> float:
    """The noise whose epsilon is wanted, by secants and bisection (Brent 1973).

    From the logarithm `start` on, for any falling function.
    """

    @functools.cache
    def excess(log_noise: float) -> float:
        found = epsilon(max(math.exp(log_noise), LEAST_NOISE))
        return math.log(min(max(found, 1e-300), 1e300) / wanted)

    low = high = start
    # Epsilon falls about as fast as noise grows, or faster, so this reaches beyond the root.
    step = min(max(1.1 * abs(excess(low)), tolerance), 2.0)
    while excess(high) > 0:
        if high >= _MOST:
            raise ValueError(
                f"epsilon is out of reach: a noise multiplier of {math.exp(_MOST):g} is not enough "
                f"for {wanted:.4g}. Take a larger epsilon or delta, or fewer steps."
            )
        low, high, step = high, min(high + step, _MOST), 2 * step
    while excess(low) <= 0:
        if low <= _LEAST:
            raise ValueError(
                f"epsilon {wanted:.4g} is met with hardly any noise (a noise multiplier of "
                f"{LEAST_NOISE:g}), which protects no one: epsilon is too large, or delta not well "
                "below steps x sampling_prob. Ask for less, or give noise_multiplier yourself."
            )
        low, high, step = max(low - step, _LEAST), low, 2 * step
    found = float(cast(Any, optimize).brentq(excess, low, high, xtol=tolerance))
    return max(math.exp(found), LEAST_NOISE)
