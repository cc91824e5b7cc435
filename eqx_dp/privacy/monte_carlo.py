"""Epsilon for kinds of sampling whose steps are bound together: by random samples of the loss.

One example x is the question; what the others do is the same on both sides. Which steps x is in is
drawn by the kind of sampling. Then the release is at worst a Gaussian around C times the indicator
of these steps, C the strategy matrix (Choquette-Choo et al. 2024, arXiv 2410.06266, for any lower
triangular, non-negative C). So a run is dominated by the pair of

    P, a mixture of Gaussians, one for each choice of steps ("mode"), and Q, the Gaussian around 0,

both with the noise's standard deviation. The hockey-stick divergences of (P, Q) and of (Q, P) are
delta where an example is removed (or becomes zero), and where it is added.

**Samples.** Delta is the mean over the first distribution of f = max(0, 1 - e^(epsilon - loss)).
Losses are drawn from a distribution that is tilted to large ones, and f is multiplied by a weight
w, the ratio of the two densities; the mean stays. The tilts t >= 0 are such that f w has a known
bound R(epsilon) = e^(known - t epsilon) t^t / (1 + t)^(1 + t). It is that of Renyi divergences, and
near delta. Delta is R times the mean of numbers in [0, 1].

- (P, Q): from the density P (P / Q)^t / Z for a whole number t, Z its integral. That is a mixture
  of Gaussians around sums of t + 1 modes. w = Z e^(-t loss), so that known = log Z.
- (Q, P): from Q moved by -t v, v the mean of the modes. A logarithm of a mean is at least the mean
  of logarithms, so that <v, y> / stddev^2 is at most -loss + n / 2, where n is the mean of the
  modes' squared norms / stddev^2. Therefore known = t n / 2 + t^2 |v|^2 / (2 stddev^2).

**Confidence.** If the mean of n independent numbers in [0, 1] is x, their expected value is above u
with probability at most e^(-n KL(x, u)) (Chernoff; KL is the divergence of two coins). Both R and u
decrease in epsilon, so that the statement at the true epsilon covers the epsilon that is found. How
many samples are drawn, and how they are tilted, is decided by other samples.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation
from dp_accounting.rdp import RdpAccountant
from jaxtyping import Float64
from scipy import signal, special

from ..extras import extra
from .sampling_kinds import BallsInBins, FixedSize, Kind, MinSeparation, RandomAllocation

CONFIDENCE = 1 - 1e-6
"""With which an epsilon by Monte Carlo is an upper bound."""

_PRECISE = 1000.0  # samples x delta / R: delta is found within a fifth
_ENOUGH = 3.0  # times the least number of samples with which anything is found
_MOST_NUMBERS = 2**29  # normal numbers in all samples, if these are enough
_AT_ONCE = 2**21
_MOST_SAMPLES = 2**26
_MOST_EPSILON = 1e4
_LARGEST_LOG = 600.0  # its exponential is a float
_MOST_TILT = 40

Column = Float64[np.ndarray, "bands"]


def epsilon(
    kind: Kind,
    column: Sequence[float],
    steps: int,
    noise_multiplier: float,
    delta: float,
    confidence: float = CONFIDENCE,
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
) -> float:
    """An upper bound of epsilon, for kinds of sampling that bind steps together.

    **Guarantee.** With probability `confidence` (over the samples, whose generator has a fixed
    seed) it is at least the epsilon of the run at `delta`: of `steps` steps from step 0, the
    examples of which `kind` draws, whose sums of gradients of norm at most 1 get the noise C^-1 z.
    C is the lower triangular Toeplitz matrix with `column`, z are independent normal numbers of
    standard deviation `noise_multiplier`. It is some percent above that epsilon. It holds where
    gradients depend on earlier releases, too.

    | case | what happens |
    |---|---|
    | `noise_multiplier` is 0 | infinite |
    | `steps` is 0 | 0 |
    | `column` is longer than `steps` | what is beyond does not matter |
    | independent noise, a run ends within a cycle of bins | counted to the end of the cycle |
    | `column` is (1,) | independent noise |
    | epsilon is above 10^4 | infinite |
    | many bins, or a small epsilon and delta | minutes, or a bound that is less close |

    Args:
        kind: `BallsInBins`, `RandomAllocation` (independent noise only) or `MinSeparation` (at most
            `separation` bands; needs jax_privacy, whose samples these are).
        column: The first column of C, non-negative.
        steps: How many have been taken.
        noise_multiplier: Standard deviation of z / clip norm, as jax_privacy's.
        delta: In (0, 1).
        confidence: In (0, 1).
        relation: Add or remove, or zero-out.

    Raises:
        ValueError: If nothing accounts for that kind, noise or relation, or the column is no column
            of non-negative numbers.
        MissingExtra: If jax_privacy is needed and not installed.
    """
    if relation is NeighboringRelation.REPLACE_ONE:
        raise ValueError(
            f"REPLACE_ONE is not accounted for with {type(kind).__name__}: a replaced example is a "
            "mixture against a mixture, for which no dominating pair is known. Take "
            "ADD_OR_REMOVE_ONE (its epsilon for delta gives that of two changes, by the group)."
        )
    entries = np.trim_zeros(np.asarray(column, np.float64)[:steps], "b")
    if entries.ndim != 1 or not (entries >= 0).all() or (steps and not entries.sum() > 0):
        raise ValueError(f"column must be non-negative numbers, the first above 0; found {column}.")
    if steps == 0 or noise_multiplier == 0:
        return 0.0 if steps == 0 else math.inf
    return _epsilon(kind, tuple(entries / noise_multiplier), steps, delta, confidence)


@functools.lru_cache(maxsize=1024)
def _epsilon(
    kind: Kind, column: tuple[float, ...], steps: int, delta: float, confidence: float
) -> float:
    failure = (1 - confidence) / 2  # of each of the two directions
    pair = _pair(kind, np.array(column), steps)
    # By Renyi divergences, then by a few samples, then by all.
    tilts = range(1, len(pair.log_z))
    about = min(((pair.log_most(True, t, 0.0) - math.log(delta)) / t for t in tilts), default=0.0)
    about = pair.epsilon(True, about, delta, failure=1.0, seed=0)
    if about == math.inf:
        return math.inf
    of_removed = pair.epsilon(True, about, delta, failure, seed=1)
    return max(of_removed, pair.epsilon(False, about, delta, failure, seed=2))


class _Pair(NamedTuple):
    """P and Q.

    Attributes:
        draw: Draws losses of (P, Q), or of (Q, P), and the logarithms of their weights. It takes a
            generator, how many, whether of (P, Q), and the tilt.
        log_z: log Z for each tilt of (P, Q), from 0.
        norms: The mean of the modes' squared norms / stddev^2.
        norm_of_mean: |v|^2 / stddev^2.
        width: Normal numbers in a sample.
    """

    draw: Callable[[np.random.Generator, int, bool, float], tuple[Any, ...]]
    log_z: Float64[np.ndarray, "tilts"]
    norms: float
    norm_of_mean: float
    width: int

    def log_most(self, is_removed: bool, tilt: float, epsilon: float) -> float:
        """The logarithm of R: of the most that f w can be."""
        known = tilt * self.norms / 2 + tilt**2 * self.norm_of_mean / 2
        known = float(self.log_z[int(tilt)]) if is_removed else known
        return (
            known
            - tilt * epsilon
            + float(special.xlogy(tilt, tilt / (1 + tilt)))
            - math.log1p(tilt)
        )

    def epsilon(
        self, is_removed: bool, about: float, delta: float, failure: float, seed: int
    ) -> float:
        """The least epsilon whose delta is at most that, but for a probability of failure.

        With a failure of 1 it is rough. `about` is what is expected.
        """
        tilt = max(0.0, (about - self.norms / 2) / self.norm_of_mean)
        if is_removed:
            tilts = range(len(self.log_z))
            tilt = float(min(tilts, key=lambda tilt: self.log_most(True, tilt, about)))

        def most(epsilon: float) -> float:
            return math.exp(min(self.log_most(is_removed, tilt, epsilon), _LARGEST_LOG))

        relative = most(about) / delta
        # An example that is added costs less: a rough bound suffices.
        wanted = min(_PRECISE * relative * is_removed, _MOST_NUMBERS / self.width)
        wanted = max(wanted, _ENOUGH * -math.log(failure) * relative, 1000)
        count = math.ceil(min(wanted, _MOST_SAMPLES)) if failure < 1 else 2**13
        generator = np.random.Generator(np.random.SFC64(seed))
        blocks = range(0, count, at_once := max(1, _AT_ONCE // self.width))
        sizes = (min(at_once, count - first) for first in blocks)
        parts = [self.draw(generator, size, is_removed, tilt) for size in sizes]
        losses, weights = (np.concatenate(part) for part in zip(*parts, strict=True))

        def suffices(epsilon: float) -> bool:
            above, bound = losses > epsilon, most(epsilon)
            values = np.exp(weights[above]) * -np.expm1(epsilon - losses[above])
            mean = min(1.0, float(values.sum()) / count / bound) if bound else 0.0
            return bound * upper_bound(mean, count, failure) <= delta

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


def _pair(kind: Kind, column: Column, steps: int) -> _Pair:
    """P and Q of a run, whose noise has a standard deviation of 1."""
    if isinstance(kind, (BallsInBins, RandomAllocation)) and len(column) == 1:
        # Modes are orthogonal. More steps than there are, up to a whole cycle, only cost more.
        cycles, norm = -(-steps // kind.cycle), column[0] ** 2
        if isinstance(kind, BallsInBins):
            return _of_bins(_orthogonal(kind.cycle, norm * cycles), 1)
        return _of_bins(_orthogonal(kind.cycle, norm), cycles)
    if isinstance(kind, BallsInBins):
        return _of_bins(_correlated(column, kind.cycle, steps), 1)
    if isinstance(kind, MinSeparation) and len(column) <= kind.separation:
        return _of_min_separation(kind, column, steps)
    raise ValueError(
        f"no Monte Carlo accounting for {kind} with {len(column)} bands of noise: it knows "
        "BallsInBins, RandomAllocation with independent noise (1 band), and MinSeparation with at "
        "most `separation` bands."
    )


class _Modes(NamedTuple):
    """The modes of bins, all as likely, by their inner products / stddev^2.

    Attributes:
        gram: The products, or the diagonal if all others are 0.
        root: R with R^T R = gram, or the diagonal.
        log_z: log Z for each tilt, from 0.
        moved: Draws a sum of tilt + 1 modes from that density: its products with all modes.
    """

    gram: Float64[np.ndarray, "cycle *cycle"]
    root: Float64[np.ndarray, "cycle *cycle"]
    log_z: Float64[np.ndarray, "tilts"]
    moved: Callable[[np.random.Generator, int, float], Any]


def _correlated(column: Column, cycle: int, steps: int) -> _Modes:
    """Modes of one run, for tilts 0 and 1: by pairs of modes."""
    in_first = (np.arange(steps) % cycle == 0).astype(np.float64)
    # The mode of the first bin; that of bin j is the same, j steps later.
    mode = np.asarray(signal.lfilter(column, [1.0], in_first))
    gram = np.zeros((cycle, cycle))
    for lag in range(min(cycle, steps)):
        products = np.cumsum(mode[: steps - lag] * mode[lag:])[::-1][: cycle - lag]
        first = np.arange(len(products))
        gram[first, first + lag] = gram[first + lag, first] = products
    values, vectors = np.linalg.eigh(gram)
    pairs = np.cumsum(np.exp(gram - gram.max()))

    def moved(generator: np.random.Generator, count: int, tilt: float) -> Any:
        if tilt == 0:
            return gram[generator.integers(cycle, size=count)]
        pair = np.searchsorted(pairs, pairs[-1] * generator.random(count))
        return gram[pair // cycle] + gram[pair % cycle]

    root = (vectors * np.sqrt(np.maximum(values, 0))).T
    return _Modes(gram, root, np.array([0.0, float(_log_mean_exp(gram.ravel()))]), moved)


def _orthogonal(cycle: int, norm: float) -> _Modes:
    """Orthogonal modes of one squared norm / stddev^2: tilts by how often a sum has each mode.

    k times the same mode has the weight e^(norm k (k - 1) / 2). As all modes are alike, the first
    of those left of the sum is made mode 0, together with all that are equal to it, and so on.
    """
    most = 1 + max(1, min(_MOST_TILT, int(math.sqrt(2 * _LARGEST_LOG / norm)) - 1))
    times = np.arange(1, most + 1)
    of_times = np.exp(np.minimum(norm * times * (times - 1) / 2, _LARGEST_LOG))
    # left[i, m]: the sum of weights of m further modes if i are taken; shares[i, m, k - 1]: of k.
    left = np.zeros((most + 1, most + 1))
    left[:, 0], shares = 1.0, np.zeros((most, most + 1, most))
    for i in reversed(range(most)):
        for m in times:
            others = special.binom(m - 1, times[:m] - 1) * left[i + 1, m - times[:m]]
            shares[i, m, :m] = (
                max(cycle - i, 0) / cycle * of_times[:m] * others * float(cycle) ** (1 - times[:m])
            )
            left[i, m] = shares[i, m].sum()
    shares = np.cumsum(shares, 2)

    def moved(generator: np.random.Generator, count: int, tilt: float) -> Any:
        products, further = np.zeros((count, cycle)), np.full(count, int(tilt) + 1)
        for i in range(min(cycle, int(tilt) + 1)):
            of_mode = shares[i, further]
            drawn = generator.random((count, 1)) * of_mode[:, -1:]
            taken = np.where(further > 0, 1 + (of_mode < drawn).sum(1), 0)
            products[:, i], further = norm * taken, further - taken
        return products

    diagonal = np.full(cycle, norm)
    return _Modes(diagonal, np.sqrt(diagonal), np.log(left[0, 1:]), moved)


def _of_bins(modes: _Modes, parts: int) -> _Pair:
    """So many independent parts, each with these modes: given the others, their losses add."""
    gram, root = modes.gram, modes.root
    cycle, is_diagonal = len(gram), gram.ndim == 1
    norms = gram if is_diagonal else np.diag(gram)
    products = gram / cycle if is_diagonal else gram.mean(0)  # of modes with their mean

    def draw(
        generator: np.random.Generator, count: int, is_removed: bool, tilt: float
    ) -> tuple[Any, ...]:
        losses, weights = np.zeros(count), np.zeros(count)
        for _ in range(parts):
            # <mode, y> / stddev^2 for each mode, y Gaussian.
            dots = generator.standard_normal((count, cycle))
            dots = dots * root if is_diagonal else dots @ root
            if is_removed:
                dots += modes.moved(generator, count, tilt)
            else:
                dots -= tilt * products
                weights += tilt * dots.mean(1) + tilt**2 * products.mean() / 2
            losses += _log_mean_exp(dots - norms / 2)
        if is_removed:
            return losses, parts * modes.log_z[int(tilt)] - tilt * losses
        return -losses, weights

    of_mean = float(products.mean())
    return _Pair(
        draw, parts * modes.log_z, parts * float(norms.mean()), parts * of_mean, parts * cycle
    )


def _log_mean_exp(x: Float64[np.ndarray, "*rows n"]) -> Any:
    top = x.max(-1)
    return np.log(np.exp(x - top[..., None]).mean(-1)) + top


def _of_min_separation(kind: MinSeparation, column: Column, steps: int) -> _Pair:
    """The samples of jax_privacy, which are not tilted."""
    selection = extra("jax_privacy.batch_selection", name="mechanisms")
    library = extra("jax_privacy.experimental.monte_carlo.sample_generation", name="mechanisms")
    drawn = selection.BMinSepSampling(kind.sampling_prob, steps, kind.separation, warm_start=True)

    def draw(
        generator: np.random.Generator, count: int, is_removed: bool, tilt: float
    ) -> tuple[Any, ...]:
        with np.errstate(divide="ignore"):  # a sampling probability of 1
            found = library.get_privacy_loss_sample(
                drawn, 1.0, column, generator, is_removed, count
            )
        return found[0], np.zeros(count)

    return _Pair(draw, np.zeros(1), norms=_MOST_EPSILON**2, norm_of_mean=1.0, width=steps)


def fixed_size_epsilon(
    kind: FixedSize,
    steps: int,
    noise_multiplier: float,
    delta: float,
    relation: NeighboringRelation = NeighboringRelation.REPLACE_ONE,
) -> float:
    """Epsilon of fixed-size sampling without replacement, by dp_accounting's Renyi divergences.

    Args:
        kind: The sampling.
        steps: How many have been taken.
        noise_multiplier: Standard deviation / sensitivity, which is two clip norms, as of a plan.
        delta: In (0, 1).
        relation: `REPLACE_ONE`, the only one that dp_accounting accounts for.

    Raises:
        ValueError: If the relation is another.
    """
    if relation is not NeighboringRelation.REPLACE_ONE:
        raise ValueError(
            f"FixedSize is accounted for under REPLACE_ONE alone; found {relation.name}. An "
            "example that is not in a batch makes place for another, whichever relation is meant: "
            "take REPLACE_ONE, or Poisson sampling."
        )
    gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
    event = dp_accounting.SampledWithoutReplacementDpEvent(
        kind.num_examples, kind.batch_size, gaussian
    )
    accountant = RdpAccountant(neighboring_relation=relation)
    return float(accountant.compose(event, steps).get_epsilon(delta))
