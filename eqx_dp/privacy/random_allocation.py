"""Privacy losses of a cycle in which each example takes part in one step, drawn at random.

**The pair.** One example x is the question. In the step that x draws its gradient moves the sum by
at most 1, in units of the sensitivity. Whatever the steps before released, the cycle is dominated
(Feldman and Shenfeld 2025, arXiv 2502.08202, 2602.17284) by

    P = (1/t) (N(e_1, s^2) + ... + N(e_t, s^2))  and  Q = N(0, s^2),

t the steps of the cycle, e_i the unit vectors, s the noise multiplier. The density of P to Q is

    X = (1/t) (Y_1 + ... + Y_t),  Y_i = exp(z_i / s - 1 / (2 s^2)),

and z_i is standard normal under Q. Delta is E (X - e^epsilon)_+ where an example is removed, and
E (1 - e^epsilon X)_+ where it is added, both under Q.

**Direction of all errors.** Both are means of convex functions of X. If X' has the mean of X and is
a spread of it (larger in convex order), delta of X' is therefore at least that of X, at every
epsilon and in both directions. Averages of independent spreads are spreads. So a mass between two
points of a grid is divided among the two, in the shares that keep its mean; nothing else is
rounded. The error is of second order in the width of the grid, and X' has a privacy loss
distribution on the grid as it is: the mass p at X' = x is a mass p x of loss log x under P, and a
mass p of loss -log x under Q.

An average of more of the Y is no spread of one of fewer: it is smaller in convex order. So a cycle
may be counted as a shorter one (`_counted`).

**What is cut off.** Of each Y values beyond `_FURTHEST` standard deviations, of averages the ends
with a mass of at most `_CUT`: the lower end under Q, the upper end under P. All such events of all
steps together have, under P as under Q, a probability of at most t (2 Phi(-9.5) + 8e-22) < 1e-20 t.
That is added to delta.

**Float64.** Masses are sums of non-negative products, so that they have relative errors, below
1e-11 for all cycles. 1e-10 of each is charged.
"""

import math
from typing import NamedTuple

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as pld
from jaxtyping import Float64
from scipy import special

LEAST_NOISE = 0.05
"""With less noise, densities exceed the floating point numbers."""

_FURTHEST, _CUT, _CUT_OF_STEP, _CHARGED = 9.5, 1e-22, 1e-20, 1e-10
_POINTS = 32  # of a grid, in a standard deviation
_FINEST = 1e-9
_MOST_BITS, _MOST_BINS = 9, 2**20


class _Law(NamedTuple):
    """Masses at the points exp(width first), exp(width (first + 1)), ...."""

    masses: Float64[np.ndarray, "points"]
    first: int

    @property
    def last(self) -> int:
        return self.first + len(self.masses) - 1


def interval(bins: int, noise_multiplier: float) -> float:
    """The width of the grid that the losses of a cycle are close on: see `losses`."""
    return max(_spread(_counted(bins), noise_multiplier) / _POINTS, _FINEST)


def losses(bins: int, noise_multiplier: float, width: float) -> pld.PrivacyLossDistribution:
    """Privacy losses of one cycle of `bins` steps, in one of which the example takes part.

    **Guarantee.** They dominate those of the cycle, where an example is added, removed or zeroed
    out, for any width of the grid.

    | case | what happens |
    |---|---|
    | `bins` is 1 | the Gaussian mechanism |
    | `bins` has more than 9 binary digits | the others are taken for 0 |
    | `bins` is above 2^20 | counted as 2^20 |
    | `width` is that of `interval` | epsilon is too large by some 0.1 % |

    Args:
        bins: The steps of the cycle, at least 1.
        noise_multiplier: At least `LEAST_NOISE`.
        width: Of the intervals of losses.
    """
    count = _counted(bins)

    def coarser(copies: int) -> int:
        ratio = _spread(copies, noise_multiplier) / (_POINTS * width)
        return 2 ** int(math.log2(max(ratio, 1.0)))

    one, of_one, copies = _of_one(noise_multiplier, width * coarser(1)), coarser(1), 1
    law, times = one, of_one
    for bit in f"{count:b}"[1:]:
        finer, copies = times // coarser(2 * copies), 2 * copies
        law = _average(law, law, 0.5, width * times, finer)
        times //= finer
        if bit == "1":
            masses = np.zeros((len(one.masses) - 1) * (of_one // times) + 1)
            masses[:: of_one // times] = one.masses
            again = _Law(masses, one.first * (of_one // times))
            law, copies = _average(law, again, copies / (copies + 1), width * times, 1), copies + 1
    masses = law.masses * (1 + _CHARGED)
    of_p = masses * np.exp(width * np.arange(law.first, law.last + 1))
    cut = _CUT_OF_STEP * count
    return pld.PrivacyLossDistribution(
        pld_pmf.DensePLDPmf(width, law.first, of_p, cut, True),
        pld_pmf.DensePLDPmf(width, -law.last, masses[::-1], cut, True),
    )


def _counted(bins: int) -> int:
    """A number of bins that costs no less: few binary digits, so that averages are of halves."""
    capped = min(bins, _MOST_BINS)
    dropped = max(capped.bit_length() - _MOST_BITS, 0)
    return capped >> dropped << dropped


def _spread(copies: int, noise_multiplier: float) -> float:
    """About the standard deviation of the logarithm of an average of so many Y."""
    variance = math.expm1(min(noise_multiplier**-2, 700.0)) / copies
    return min(1 / noise_multiplier, math.sqrt(variance))


def _of_one(noise_multiplier: float, width: float) -> _Law:
    """The law of one Y, spread to the points of a grid."""
    mean, middle = 1 / noise_multiplier, 0.5 / noise_multiplier**2
    reach = _FURTHEST * mean + middle
    first, last = math.floor(-reach / width), math.ceil(reach / width)
    logs = np.arange(first, last + 1) * width
    z = (logs + middle) / mean
    mass, mass_by_mean = _between(z), _between(z - mean)
    upper = np.clip((mass_by_mean / np.exp(logs[:-1]) - mass) / math.expm1(width), 0, mass)
    masses = np.append(mass - upper, 0.0)
    masses[1:] += upper
    return _Law(masses, first)


def _between(edges: Float64[np.ndarray, "edges"]) -> Float64[np.ndarray, "cells"]:
    """The normal probabilities between neighbors of rising edges."""
    below, above = special.ndtr(edges), special.ndtr(-edges)
    return np.where(edges[:-1] > 0, -np.diff(above), np.diff(below))


def _average(x: _Law, y: _Law, share: float, width: float, finer: int) -> _Law:
    """The law of share X + (1 - share) Y, X and Y independent, on a grid so many times as fine.

    Where Y is a number of points behind X, so is the average, whichever the point of X.
    """
    fine, logs = width / finer, (math.log(share), math.log1p(-share))
    lags = np.arange(y.first - x.last, y.last - x.first + 1)
    ahead = np.logaddexp(logs[0], logs[1] + lags * width) / fine
    below = np.floor(ahead).astype(np.int64)
    upper = np.expm1((ahead - below) * fine) / math.expm1(fine)
    ends = [
        np.logaddexp(logs[0] + width * i, logs[1] + width * j) / fine
        for i, j in ((x.first, y.first), (x.last, y.last))
    ]
    first = math.floor(ends[0]) - 1
    masses = np.zeros(math.ceil(ends[1]) + 3 - first)
    for lag, point, share_above in zip(lags.tolist(), below.tolist(), upper.tolist(), strict=True):
        start, end = max(x.first, y.first - lag), min(x.last, y.last - lag) + 1
        products = x.masses[start - x.first : end - x.first]
        products = products * y.masses[start + lag - y.first : end + lag - y.first]
        at = start * finer + point - first
        until = at + (end - start - 1) * finer + 1
        masses[at:until:finer] += (1 - share_above) * products
        masses[at + 1 : until + 1 : finer] += share_above * products
    masses /= masses.sum()
    of_p = masses * np.exp(fine * np.arange(first, first + len(masses)))
    low = int(np.searchsorted(np.cumsum(masses), _CUT))
    high = len(masses) - int(np.searchsorted(np.cumsum(of_p[::-1]), _CUT))
    return _Law(masses[low:high], first + low)
