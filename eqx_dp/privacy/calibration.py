"""Calibration: the least noise that keeps a run within a budget of epsilon."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

from .accounting import (
    LEAST_NOISE,
    WIDEST_INTERVAL,
    Run,
    delta_left,
    discretization,
    epsilon_at,
    epsilon_of,
)

_MOST_NOISE = 1e15
# The coarsest discretization has intervals so many times as wide as the plan's own, at most, and
# divides the losses of one step into so many intervals, at least.
_COARSEST, _FEWEST_INTERVALS = 100.0, 128
# The discretizations of the search, as powers of the coarsest.
_POWERS = (1.0, 2 / 3, 1 / 3)
# How far the search goes at once where it knows one side of the result alone.
_LONGEST_MOVE = math.log(8)


class _Point(NamedTuple):
    """A noise multiplier, and how epsilon changes with it there; both on logarithmic scales."""

    log_noise: float
    slope: float

    @property
    def noise_multiplier(self) -> float:
        return max(math.exp(self.log_noise), LEAST_NOISE)


def least_noise(run: Run, delta: float, budget: float) -> float:
    """The least noise multiplier, to 1e-4 of it, that keeps a run within a budget of epsilon.

    It is searched at coarse discretizations first, where epsilon is cheap. From what two of them
    change follows what the next one will. The plan's own discretization has the last word: epsilon
    of the result is within the budget there.
    """

    def rough(noise_multiplier: float, power: float) -> float:
        interval = _coarse_interval(run, noise_multiplier, power)
        return epsilon_at(run, noise_multiplier, delta_left(run, delta), interval, in_stages=True)

    tolerance = _tolerance(run, delta)
    point, changes = _Point(math.log(_guess(run, delta, budget)), -1.0), [0.0]
    for power in _POWERS:
        found = _searched(functools.partial(rough, power=power), budget, point, tolerance)
        changes.append(found.log_noise - point.log_noise)
        point = found
    expected = point.log_noise + _next_change(*changes[-2:]) + tolerance / 2
    last = _searched(
        lambda noise_multiplier: epsilon_of(run, noise_multiplier, delta),
        budget,
        point._replace(log_noise=expected),
        tolerance,
        is_last=True,
    )
    return last.noise_multiplier


def _tolerance(run: Run, delta: float) -> float:
    """How much more noise than the least is accepted, relative to it."""
    # Not far above what float64 may lose, rounding makes epsilon jump up and down.
    return 1e-4 if delta_left(run, delta) > 0.9 * delta else 5e-3


def _guess(run: Run, delta: float, budget: float) -> float:
    """The noise multiplier if losses were normally distributed, by their variance."""
    z = math.sqrt(2 * math.log(1.25 / delta))
    # The noise multiplier of one Gaussian mechanism (Dwork and Roth 2014, appendix A), inverted.
    mu = 2 * budget / (z + math.sqrt(z**2 + 2 * budget))
    # The variance of a loss is about sampling_prob^2 (exp(1 / noise_multiplier^2) - 1).
    deviation = min(max(mu / run.sampling_prob, 1e-100), 1e100)
    return min(1 / math.sqrt(math.log1p(deviation**2 / run.steps)), _MOST_NOISE)


def _coarse_interval(run: Run, noise_multiplier: float, power: float) -> float:
    own, q = discretization(run, noise_multiplier), run.sampling_prob
    # Without sampling, all steps are one mechanism of less noise.
    shift = (math.sqrt(run.steps) if q == 1 else 1.0) / noise_multiplier
    # The largest privacy loss of one mechanism, at ten standard deviations; with sampling then.
    loss = shift * (shift / 2 + 10)
    loss += math.log(q + (1 - q) * math.exp(-loss))
    interval = own * min(max(loss / _FEWEST_INTERVALS / own, 1.0), _COARSEST) ** power
    return max(own, min(interval, WIDEST_INTERVAL))


def _next_change(before: float, last: float) -> float:
    """The next change of a series whose changes shrink by one factor, which lies in [0, 1]."""
    return last * min(max(last / before, 0.0), 1.0) if before else 0.0


def _searched(
    epsilon_at: Callable[[float], float],
    budget: float,
    start: _Point,
    tolerance: float,
    *,
    is_last: bool = False,
) -> _Point:
    """Where epsilon is the budget, and in the last search within it: secants in a bracket."""
    (at, slope), low, high, evaluation = start, -math.inf, math.inf, 0
    before: tuple[float, float] | None = None
    while True:
        evaluation += 1
        epsilon = epsilon_at(_Point(at, slope).noise_multiplier)
        excess = (math.log(epsilon) if epsilon > 0 else -math.inf) - math.log(budget)
        _check_reach(at, excess, budget)
        low, high = (at, high) if excess > 0 else (low, at)
        if before is not None:
            slope = _slope(before, (at, excess), slope, tolerance)
        root = at - excess / slope
        if high - low <= tolerance:
            return _Point(high, slope)
        if 0 <= at - root <= tolerance if is_last else abs(at - root) <= max(2e-3, tolerance):
            return _Point(at if is_last else root, slope)
        before = at, excess
        at = _next_log_noise(root + tolerance / 2 * is_last, at, low, high, evaluation)


def _slope(
    before: tuple[float, float], now: tuple[float, float], known: float, tolerance: float
) -> float:
    """The slope between two evaluations, or the one known where rounding may show instead."""
    distance, rise = (after - earlier for earlier, after in zip(before, now, strict=True))
    # Epsilon falls at least with the square root of the noise multiplier.
    is_of_use = abs(distance) >= tolerance and -math.inf < rise / distance < -0.3
    return rise / distance if is_of_use else known


def _next_log_noise(aim: float, at: float, low: float, high: float, evaluation: int) -> float:
    if math.isfinite(high - low):
        # Now and then the middle: the bracket shrinks whatever epsilon looks like.
        return aim if low < aim < high and evaluation % 4 else (low + high) / 2
    moved = min(max(aim, at - _LONGEST_MOVE), at + _LONGEST_MOVE)
    return min(max(moved, math.log(LEAST_NOISE)), math.log(_MOST_NOISE))


def _check_reach(log_noise: float, excess: float, budget: float) -> None:
    if excess > 0 and log_noise >= math.log(_MOST_NOISE):
        raise ValueError(
            f"epsilon {budget:g} is out of reach: a noise multiplier of {_MOST_NOISE:g} does "
            "not meet it. Take a larger epsilon or delta, or fewer steps."
        )
    if excess <= 0 and log_noise <= math.log(LEAST_NOISE):
        raise ValueError(
            f"epsilon {budget:g} is met with hardly any noise (a noise multiplier of "
            f"{LEAST_NOISE:g}), which protects no one: epsilon is too large, or delta not well "
            "below steps x sampling_prob. Ask for less, or give noise_multiplier yourself."
        )
