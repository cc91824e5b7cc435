"""Accounting: how far a sum moves, what dp_accounting is asked, and at which discretization."""

import functools
import math
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation
from dp_accounting.pld import common, pld_pmf
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.pld import privacy_loss_mechanism as losses_of_noise

from ..expected import expect
from . import random_allocation

T = TypeVar("T")

# How far one example can move a sum of gradients, each of them at most 1 in norm.
SENSITIVITY_OF_UNIT_NORM = {
    NeighboringRelation.ADD_OR_REMOVE_ONE: 1.0,
    NeighboringRelation.REPLACE_ONE: 2.0,
    NeighboringRelation.REPLACE_SPECIAL: 1.0,
}

ROUNDING_DELTA = 2.0**-51
"""The part of delta that one step may lose, because dp_accounting computes in float64.

Privacy losses of n steps are convolved by raising a discrete Fourier transform to the n-th power,
which makes its relative error n times as large. Against the same in extended precision, delta came
out too small by at most 0.83 n 2^-52 (24 convolutions of 10^3 to 10^6 steps, sampling probabilities
from 1e-5 to 1, intervals from 1e-5 to 1e-3).
"""


def check_relation(relation: object) -> None:
    """Raises a ValueError unless it is one of dp_accounting's relations."""
    known = f"one of NeighboringRelation: {', '.join(NeighboringRelation.__members__)}"
    expect("neighboring_relation", relation, NeighboringRelation, known)


@runtime_checkable
class HasSensitivity(Protocol):
    """A function that sums clipped gradients, as `filter_clipped_grad` returns it."""

    @property
    def l2_norm_bound(self) -> float:
        """The most that one example contributes to the sum, in L2 norm."""
        ...

    def sensitivity(self, neighboring_relation: NeighboringRelation) -> float:
        """The most that the sum changes, in L2 norm, between neighboring data sets."""
        ...


def agreed_with(grad_fn: HasSensitivity, name: str, given: T | None) -> T | None:
    """The given option, or that of `grad_fn`; a ValueError if the two differ."""
    own: T | None = getattr(grad_fn, name, None)
    if own is not None and given is not None and own != given:
        raise ValueError(
            f"grad_fn was made with {name}={own}, but the noise was asked to follow {given}. Leave "
            f"{name} out, or give both the same."
        )
    return own if given is None else given


def checked_sensitivity(grad_fn: HasSensitivity, relation: NeighboringRelation) -> float:
    """The sensitivity of a sum, or a ValueError if it is not finite or not what its bound says."""
    sensitivity = float(grad_fn.sensitivity(relation))
    if not (math.isfinite(sensitivity) and sensitivity >= 0):
        raise ValueError(
            f"the gradients' sensitivity must be finite to be hidden by noise; found {sensitivity} "
            f"for {relation.name}. Without a finite clip norm one example can change the sum "
            "without limit: set l2_clip_norm."
        )
    # Accounting relies on this ratio. More is more noise: the rounding of sums may be in it.
    implied = SENSITIVITY_OF_UNIT_NORM[relation] * grad_fn.l2_norm_bound
    if not implied * (1 - 1e-9) <= sensitivity <= implied * 1.01:
        raise ValueError(
            f"the gradients' sensitivity for {relation.name} must be {implied}, from their "
            f"l2_norm_bound of {grad_fn.l2_norm_bound}; or up to 1 % more, for rounding; "
            f"found {sensitivity}. The plan's accounting would not hold for it."
        )
    return sensitivity


class Run(NamedTuple):
    """What epsilon depends on, beside noise and delta.

    Attributes:
        sampling_prob: the probability that an example takes part in a step.
        steps: how many have been taken.
        relation: which data sets are neighbors.
        bins: above 1, each of the `steps` is a cycle of so many, and an example takes part in one
            of them, drawn at random (`random_allocation.py`).
        is_fixed_size: whether a step takes a fixed number of examples.
    """

    sampling_prob: float
    steps: int
    relation: NeighboringRelation
    bins: int = 1
    is_fixed_size: bool = False


def event_of(run: Run, noise_multiplier: float) -> dp_accounting.DpEvent:
    """The steps of a run of Poisson sampling, in dp_accounting's terms."""
    per_norm_bound = noise_multiplier * SENSITIVITY_OF_UNIT_NORM[run.relation]
    if run.sampling_prob == 1 and run.relation is NeighboringRelation.REPLACE_ONE:
        # Accountants by privacy loss distributions read a bare Gaussian event as two gradients that
        # move, those by Renyi divergences as one. A sampled event means two to the former, and the
        # latter refuse it. All steps together are one mechanism of less noise (Dong et al. 2022,
        # corollary 3.3), so that it costs no more than the bare event.
        gaussian = dp_accounting.GaussianDpEvent(per_norm_bound / math.sqrt(run.steps))
        return dp_accounting.PoissonSampledDpEvent(1.0, gaussian)
    step = dp_accounting.GaussianDpEvent(per_norm_bound)
    if run.sampling_prob < 1:
        step = dp_accounting.PoissonSampledDpEvent(run.sampling_prob, step)
    return dp_accounting.SelfComposedDpEvent(step, run.steps)


# Losses grow with the inverse square of the noise: with less than this they exceed all floats.
LEAST_NOISE = 1e-3
# dp_accounting takes e to the power of an interval, too.
WIDEST_INTERVAL = 300.0


Runs = tuple[tuple[Run, float], ...]
"""Runs that are seen together, of at least one step each, and the noise multiplier of each."""

Pairs = tuple[tuple[float, float], ...]
"""Epsilon and delta of releases of which nothing else is known."""


# A progress bar asks for the same figure at every refresh.
@functools.lru_cache(maxsize=4096)
def epsilon_at(
    runs: Runs, left: float, finished: Pairs = (), interval: float | None = None
) -> float:
    """Epsilon at a discretization: that of PLDAccountant for `event_of`, where there is one.

    `left` is by `delta_left`; without any, or with hardly any noise, epsilon is infinite. The
    interval is by default the widest by `discretization`.
    """
    if left <= 0 or any(noise < LEAST_NOISE for _, noise in runs):
        return math.inf
    width = interval or widest(runs)
    if max([width, *(epsilon for epsilon, _ in finished)]) > WIDEST_INTERVAL:
        return math.inf
    together = [losses_of(*run, width) for run in runs]
    parameters = (common.DifferentialPrivacyParameters(*pair) for pair in finished)
    together += [pld.from_privacy_parameters(one, width) for one in parameters]
    all_of_them = functools.reduce(pld.PrivacyLossDistribution.compose, together)
    return float(all_of_them.get_epsilon_for_delta(left))


@functools.lru_cache(maxsize=2)
def losses_of(run: Run, noise_multiplier: float, interval: float) -> pld.PrivacyLossDistribution:
    """Privacy losses of a run of at least one step, with at least `LEAST_NOISE`."""
    if run.sampling_prob == 1 and not _is_allocated(run, noise_multiplier):
        # All steps are one mechanism of less noise.
        noise = noise_multiplier / math.sqrt(run.steps)
        return _losses_of_step(run._replace(steps=1, bins=1), noise, interval)
    losses = _losses_of_step(run._replace(steps=1), noise_multiplier, interval)
    return pld.identity(interval).compose(losses.self_compose(run.steps))


def _is_allocated(run: Run, noise_multiplier: float) -> bool:
    """Whether the draw of a step is accounted for: without, it only costs more."""
    return run.bins > 1 and noise_multiplier >= random_allocation.LEAST_NOISE


def delta_left(runs: Runs, delta: float) -> float:
    """Delta less what float64 may lose of it."""
    return delta - sum(run.steps for run, _ in runs) * ROUNDING_DELTA


# They take most of the time, and are the same for other numbers of steps.
@functools.lru_cache(maxsize=4)
def _losses_of_step(
    step: Run, noise_multiplier: float, interval: float
) -> pld.PrivacyLossDistribution:
    """Privacy losses of one step, sampled or not, or of one cycle."""
    if step.bins > 1:
        return random_allocation.losses(step.bins, noise_multiplier, interval)
    if step.is_fixed_size:
        return _losses_of_fixed_size(step.sampling_prob, noise_multiplier, interval)
    return pld.from_gaussian_mechanism(
        noise_multiplier * SENSITIVITY_OF_UNIT_NORM[step.relation],
        value_discretization_interval=interval,
        sampling_prob=step.sampling_prob,
        neighboring_relation=step.relation,
    )


def _losses_of_fixed_size(
    share: float, noise_multiplier: float, interval: float
) -> pld.PrivacyLossDistribution:
    """Privacy losses of a step that takes a share of the examples, where one replaces another.

    **Guarantee.** They dominate those of the step, in both directions, so that they compose.

    *Proof.* Let g be delta of the Gaussian mechanism that moves by the sensitivity, a function of
    epsilon. Of a batch drawn without replacement delta at epsilon >= 0 is at most share x
    g(log(1 + (e^epsilon - 1) / share)) (Balle et al. 2018, arXiv 1807.01647, theorem 9): delta of a
    Poisson sampled Gaussian mechanism where an example is removed. Delta of two distributions at
    -epsilon is 1 - e^-epsilon + e^-epsilon delta', where delta' is that of the same two in the
    other order at epsilon; and replacement is symmetric. Where the two meet, at 0, the bound is
    convex: the probabilities of a positive loss add up to 2 (1 - share) Phi(-1 / (2 sigma)) + share
    <= 1. So delta is bounded at all epsilons by that of one pair of distributions (Zhu et al. 2022,
    arXiv 2106.08567, theorem 11), and pairs that dominate compose (theorem 10). Between points of
    the grid chords lie above (Doroshenko et al. 2022). QED

    No lesser pair dominates the step: with +1 in place of -1, others that are all -1 reach the
    bound at each positive epsilon, and others that are all +1 at each negative one. These are two
    data sets, so that several steps cost less than their bound.
    """
    removed = losses_of_noise.GaussianPrivacyLoss(
        noise_multiplier,
        sampling_prob=share,
        adjacency_type=losses_of_noise.AdjacencyType.REMOVE,
    )
    last = math.ceil((removed.connect_dots_bounds().epsilon_upper or 0.0) / interval)
    losses = np.arange(last + 1) * interval
    above = np.asarray(removed.get_delta_for_epsilon(losses.tolist()))
    deltas = np.append((1 - np.exp(-losses) * (1 - above))[:0:-1], above)
    pmf = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, -last, last, deltas)
    return pld.PrivacyLossDistribution(pmf)


def widest(runs: Runs) -> float:
    """The width of the intervals for several runs."""
    return max([1e-4, *(discretization(*run) for run in runs)])


def discretization(run: Run, noise_multiplier: float) -> float:
    """The width of the intervals that a plan's privacy losses are counted in.

    Any width gives a true bound. dp_accounting's default is 1e-4. Its work grows with the range of
    the losses: that of one mechanism (about 1 / noise_multiplier^2) and that of the run. Where they
    are in the hundreds, epsilon is too, and the intervals are wider.
    """
    if _is_allocated(run, noise_multiplier):
        return random_allocation.interval(run.bins, noise_multiplier)
    # Without sampling, all steps are accounted for as one Gaussian mechanism of less noise.
    of_one = (1 if run.sampling_prob < 1 else run.steps) / noise_multiplier**2
    of_all = run.steps * run.sampling_prob**2 / noise_multiplier**2
    return 1e-4 * max(1.0, of_one / 10, of_all / 1000)
