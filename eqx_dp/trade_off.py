"""What an attack on one example finds out, at most, in more than one number."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import dp_accounting
import numpy as np
from jaxtyping import Float64
from numpy.typing import ArrayLike
from scipy import stats

_SHARES = np.linspace(0.0, 1.0, 1001)


@dataclasses.dataclass(frozen=True)
class TradeOff:
    """Bounds on every attack that guesses from all releases whether one example was in the data.

    **Guarantee.** If every pair (epsilon, delta) holds, no attack finds more, whatever it knows or
    computes. With false alarms a, a pair bounds the share that is found by

        min(1, delta + e^epsilon a, 1 - e^-epsilon (1 - delta - a))

    (Kairouz et al. 2017); the smallest bound of all pairs is taken. The trade-off function of Dong
    et al. (2022) is at least 1 - `found(a)`.

    | case | what is said |
    |---|---|
    | every epsilon is infinite | all is found, the advantage is 1, `mu` infinite |
    | no step was taken | epsilon is 0: what is found is at most a + delta |

    Attributes:
        pairs: Of epsilon and delta; epsilons fall.
    """

    pairs: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, epsilon: Callable[[float], float], least_delta: float) -> "TradeOff":
        """From epsilon as a function of delta, at 17 deltas from the least on."""
        deltas = *np.geomspace(least_delta, 0.1, 9), *np.linspace(0.2, 0.9, 8)
        known = [max(float(delta), least_delta) for delta in deltas]
        return cls(tuple((epsilon(delta), delta) for delta in known))

    def found(self, false_alarms: ArrayLike) -> Float64[np.ndarray, "..."]:
        """The share of participants that is found, at most.

        Args:
            false_alarms: Shares, in [0, 1], of the others that are taken for participants.
        """
        alarms = np.asarray(false_alarms, np.float64)
        bounds = [np.ones_like(alarms)]
        for epsilon, delta in self.pairs:
            # An epsilon above 500 bounds nothing, and its exponential may be no float.
            times = np.exp(min(epsilon, 500.0))
            if epsilon <= 500:
                bounds += [delta + times * alarms, 1 - (1 - delta - alarms) / times]
        return np.min(bounds, axis=0)

    @property
    def advantage(self) -> float:
        """The most by which the share that is found exceeds false alarms, in [0, 1]."""
        advantages = [
            1 - 2 * (1 - delta) / (np.exp(epsilon) + 1) if epsilon <= 500 else 1.0
            for epsilon, delta in self.pairs
        ]
        return float(min(advantages))

    @property
    def right(self) -> float:
        """The share of right guesses at most, if both cases are equally likely."""
        return (1 + self.advantage) / 2

    @property
    def mu(self) -> float:
        """The least mu of Gaussian differential privacy that promises no more than the pairs.

        At no pair does one Gaussian mechanism of noise multiplier 1 / mu reveal less (Dong et al.
        2022). It is a summary for deltas from the first pair's up; `distance` says how good.
        """
        return _mu(self)

    @property
    def distance(self) -> float:
        """How far the trade-off function of `mu` is from the one of all pairs.

        The least d, to 1e-3, with which no attack on the Gaussian mechanism finds more than
        `found(a + d)` + d at any false alarms a. Of trade-off functions f and that of `mu`, f_mu:
        f(a + d) - d <= f_mu(a), the regret of Gomez et al. (arXiv 2503.10945, as their gdpnum
        computes it). Below 0.01, `mu` says it all. At one a, the two shares that are found may
        differ by about twice as much. 17 pairs in place of 180 change it by at most 0.003.
        """
        return _distance(self)


# Each statement of a run says the same again, until more steps are announced.


@functools.lru_cache(maxsize=64)
def _mu(of: TradeOff) -> float:
    most = of.pairs[0][0]
    if most == 0 or np.isinf(most):
        return float(most)
    # Pairs next to 0 say that delta is large, and not how large it has to be. Finite precision
    # alone makes an epsilon of 5e-5.
    least = max(most / 100, 1e-3)
    tight = [of.pairs[0], *(pair for pair in of.pairs[1:] if pair[0] > least)]
    return 1 / min(dp_accounting.get_sigma_gaussian(*pair) for pair in tight)


@functools.lru_cache(maxsize=64)
def _distance(of: TradeOff) -> float:
    normal, alarms = cast(Any, stats.norm), _SHARES[1:]  # scipy is not typed
    gaussian = normal.cdf(normal.ppf(alarms) + of.mu)

    def covers(distance: float) -> bool:
        moved = of.found(np.minimum(alarms + distance, 1)) + distance
        return bool(np.all(gaussian <= moved + 1e-12))

    return float(next(filter(covers, _SHARES)))
