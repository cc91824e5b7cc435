"""Epsilon for kinds of sampling that nothing else accounts for: by random samples of the loss.

These are `BallsInBins` with correlated noise (which has a second, looser bound without samples:
`Mechanism._in_bins`), and `MinSeparation`.

One example x is the question; what the others do is the same on both sides. Which steps x is in is
drawn by the kind of sampling. Then the release is at worst a Gaussian around C times the indicator
of these steps, C the strategy matrix (Choquette-Choo et al. 2024, arXiv 2410.06266, for any lower
triangular, non-negative C). So a run is dominated by the pair of

    P, a mixture of Gaussians, one for each choice of steps ("mode"), and Q, the Gaussian around 0,

both with the noise's standard deviation. The hockey-stick divergences of (P, Q) and of (Q, P) are
delta where an example is removed (or becomes zero), and where it is added.

**Samples.** Delta is the mean of max(0, 1 - e^(epsilon - loss)) over losses of the first
distribution. The hockey-stick divergences of (P, Q) and of (Q, P) are delta where an example is
removed (or becomes zero), and where it is added. Only the inner products of a sample with the modes
matter, so these are drawn: Gaussian numbers with the modes' Gram matrix, as many as there are bins.

**Confidence.** If the mean of n independent numbers in [0, 1] is x, their expected value is above u
with probability at most e^(-n KL(x, u)) (Chernoff; KL is the divergence of two coins). The mean
falls with epsilon, so that the statement at the true epsilon covers the epsilon that is found.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from jaxtyping import Float64
from scipy import signal, special

from ..extras import extra
from .sampling_kinds import BallsInBins, Kind, MinSeparation

CONFIDENCE = 1 - 1e-6
"""With which an epsilon by Monte Carlo is an upper bound."""

_ENOUGH, _PRECISE = 20.0, 1000.0  # samples x delta: the least, and as many as are affordable
_MOST_NUMBERS = 2**29  # normal numbers in all samples, if these are enough
_MOST_SAMPLES = 2**26
_AT_ONCE = 2**21
_MOST_EPSILON = 1e4

Column = Float64[np.ndarray, "bands"]
Losses = Float64[np.ndarray, "count"]
Draw = Callable[[np.random.Generator, int, bool], Losses]
"""Draws losses of (P, Q), or of (Q, P): so many, and of which of the two."""


@functools.lru_cache(maxsize=1024)
def epsilon(
    kind: Kind,
    column: tuple[float, ...],
    steps: int,
    noise_multiplier: float,
    delta: float,
    confidence: float = CONFIDENCE,
) -> float:
    """An upper bound of epsilon, for kinds of sampling that bind steps together.

    **Guarantee.** With probability `confidence` (over the samples, whose generator has a fixed
    seed) it is at least the epsilon of the run at `delta`: of `steps` steps from step 0, the
    examples of which `kind` draws, whose sums of gradients of norm at most 1 get the noise C^-1 z.
    C is the lower triangular Toeplitz matrix with `column`, z are independent normal numbers of
    standard deviation `noise_multiplier`. Examples are added, removed or zeroed out. It is some
    percent above that epsilon. It holds where gradients depend on earlier releases, too.

    | case | what happens |
    |---|---|
    | epsilon is above 10^4 | infinite |
    | many bins, or delta of 1e-6 | minutes, and a bound that is less close |
    | `delta` is below 3e-7 | infinite: too few samples are drawn to find anything |

    Args:
        kind: `BallsInBins`, or `MinSeparation` (needs jax_privacy, whose samples these are).
        column: The first column of C, non-negative, at most `separation` entries.
        steps: How many have been taken, at least 1.
        noise_multiplier: Standard deviation of z / clip norm, as jax_privacy's; above 0.
        delta: In (0, 1).
        confidence: In (0, 1).

    Raises:
        MissingExtra: If jax_privacy is needed and not installed.
    """
    if delta * _MOST_SAMPLES < _ENOUGH:
        return math.inf
    failure = (1 - confidence) / 2  # of each of the two directions
    draw, width = _losses(kind, np.array(column[:steps]) / noise_multiplier, steps)
    affordable = min(_PRECISE / delta, _MOST_NUMBERS / width)
    count = math.ceil(min(max(_ENOUGH / delta, affordable), _MOST_SAMPLES))
    return max(
        _bound(draw, width, is_removed, count, delta, failure) for is_removed in (True, False)
    )


def _bound(
    draw: Draw, width: int, is_removed: bool, count: int, delta: float, failure: float
) -> float:
    """The least epsilon whose delta is at most that, but for a probability of failure."""
    generator = np.random.Generator(np.random.SFC64(is_removed))
    blocks = range(0, count, at_once := max(1, _AT_ONCE // width))
    sizes = (min(at_once, count - first) for first in blocks)
    drawn = (draw(generator, size, is_removed) for size in sizes)
    losses = np.concatenate([loss[loss > 0] for loss in drawn])  # others add nothing

    def suffices(epsilon: float) -> bool:
        values = -np.expm1(epsilon - losses[losses > epsilon])
        return upper_bound(float(values.sum()) / count, count, failure) <= delta

    return _least(suffices, 0.0, _MOST_EPSILON)


def upper_bound(mean: float, count: int, failure: float) -> float:
    """The most that numbers in [0, 1] can be expected to be, if so many have that mean.

    Args:
        mean: Of independent numbers in [0, 1].
        count: How many they are.
        failure: The probability with which they are expected to be more than what is returned.
            With 1 that is the mean.
    """

    def is_beyond(u: float) -> bool:
        divergence = special.rel_entr(mean, u) + special.rel_entr(1 - mean, 1 - u)
        return bool(count * divergence >= -math.log(failure))

    return min(1.0, _least(is_beyond, mean, 1 - 1e-12))


def _least(suffices: Callable[[float], bool], low: float, high: float) -> float:
    """A number that suffices, above the least by at most 1e-7 of it; infinite if none does."""
    if not suffices(high):
        return math.inf
    while high - low > 1e-7 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


def _losses(kind: Kind, column: Column, steps: int) -> tuple[Draw, int]:
    """Losses of a run whose noise has a standard deviation of 1, and normal numbers in each."""
    if isinstance(kind, MinSeparation):
        return _of_min_separation(kind, column, steps), steps
    cycle = cast(BallsInBins, kind).cycle
    return _of_bins(_gram(column, cycle, steps)), cycle


def _gram(column: Column, cycle: int, steps: int) -> Float64[np.ndarray, "cycle cycle"]:
    """The inner products of the modes of all bins."""
    in_first = (np.arange(steps) % cycle == 0).astype(np.float64)
    # The mode of the first bin; that of bin j is the same, j steps later.
    mode = np.asarray(signal.lfilter(column, [1.0], in_first))
    gram = np.zeros((cycle, cycle))
    for lag in range(min(cycle, steps)):
        products = np.cumsum(mode[: steps - lag] * mode[lag:])[::-1][: cycle - lag]
        first = np.arange(len(products))
        gram[first, first + lag] = gram[first + lag, first] = products
    return gram


def _of_bins(gram: Float64[np.ndarray, "cycle cycle"]) -> Draw:
    """Losses of the modes of bins."""
    values, vectors = np.linalg.eigh(gram)
    root = np.sqrt(np.maximum(values, 0))

    def draw(generator: np.random.Generator, count: int, is_removed: bool) -> Losses:
        # <mode, y> for each mode, y Gaussian.
        dots = generator.standard_normal((count, len(gram))) * root @ vectors.T
        if is_removed:
            dots += gram[generator.integers(len(gram), size=count)]
        losses = cast(Any, special).logsumexp(dots - np.diag(gram) / 2, axis=1)
        return (losses - math.log(len(gram))) * (1 if is_removed else -1)

    return draw


def _of_min_separation(kind: MinSeparation, column: Column, steps: int) -> Draw:
    """The samples of jax_privacy."""
    selection = extra("jax_privacy.batch_selection", name="mechanisms")
    library = extra("jax_privacy.experimental.monte_carlo.sample_generation", name="mechanisms")
    drawn = selection.BMinSepSampling(kind.sampling_prob, steps, kind.separation, warm_start=True)

    def draw(generator: np.random.Generator, count: int, is_removed: bool) -> Losses:
        with np.errstate(divide="ignore"):  # a sampling probability of 1
            return library.get_privacy_loss_sample(
                drawn, 1.0, column, generator, is_removed, count
            )[0]

    return draw
