"""Epsilon as plans state it, beside a bound from below: simulated, and by brute force.

**Simulated.** The two sides are the release with one example and without it, in the worst case of
which the accounting speaks. Losses are drawn by importance sampling, in both directions; delta at
an epsilon is a mean of them. `at least` is the largest epsilon that a first sample finds and a
second one, drawn anew, confirms: its delta less 4 standard errors exceeds the plan's. Steps of
Poisson sampling are seen in 1,200 intervals, which shows less than the release itself. (Batches of
a fixed size: all other examples are -1, and +1 replaces -1 or the other way round.) What the plan
charges for finite precision is in its epsilon: 5e-5. Aims: at most 1.02 times, 5 s an epsilon and
20 s a calibration of noise to it, of CPU time, with cold caches.

**Batches of a fixed size** once more: epsilon where the others are -1 in all steps, and where they
are chosen before each step, of -1, -1/2, 0, 1/2 and 1, so that delta becomes largest; by dynamic
programming over the loss so far, on a grid, both directions. It is an estimate, not a bound.

**Bins and correlated noise**: where the stated epsilon exceeds the truth. Samples of the mixture of
all bins; of every k-th bin alone; of that with the covariances that the accounting raises.

**Brute force.** Runs of 1 to 4 steps: the probabilities of all that is released, each step in cells
(which shows a little less), for all draws of the sampler, and for all ways in which the gradients
of an example follow from the signs of what was released before. The worst of them, in both
directions, must be below what is stated.
"""

import argparse
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import scipy
from numpy.random import Generator

import eqx_dp as dp
from eqx_dp.privacy import accounting
from eqx_dp.privacy.sampling_kinds import (
    BallsInBins,
    CyclicPoisson,
    FixedSize,
    Kind,
    Poisson,
    RandomAllocation,
)

from .command import Part
from .page import Table

UNTYPED: Any = scipy
optimize, signal, special = UNTYPED.optimize, UNTYPED.signal, UNTYPED.special

AT_ONCE = 5_000
REPLACE_ONE = dp.NeighboringRelation.REPLACE_ONE
BANDS = dp.Banded(strategy=(1.0, 0.5, 0.375, 0.3125))


class Sample(NamedTuple):
    """Privacy losses of the worst case, drawn from another distribution.

    Attributes:
        losses: logarithms of the density of the one side to the other.
        weights: density of the one side to what was drawn from.
    """

    losses: np.ndarray
    weights: np.ndarray

    def gains(self, epsilon: float) -> np.ndarray:
        """Their mean is delta."""
        return -np.expm1(np.minimum(epsilon - self.losses, 0)) * self.weights

    def exceeds(self, epsilon: float, delta: float, errors: float = 4.0) -> bool:
        """Whether delta at epsilon is surely above a number."""
        gains = self.gains(epsilon)
        return bool(gains.mean() - errors * gains.std() / math.sqrt(len(gains)) > delta)


Draw = Callable[[Generator, int], Sample]
"""Draws so many losses."""


def at_least(draws: list[Draw], stated: float, delta: float, count: int) -> float:
    """An epsilon that is surely not above the true one: the largest by any of two directions."""
    found = 0.0
    for draw in draws:
        first, second = (in_parts(draw, np.random.default_rng(seed), count) for seed in (1, 2))
        if not first.exceeds(0.0, delta):
            continue
        least = optimize.bisect(lambda x, its=first: its.exceeds(x, delta) - 0.5, 0, 2 * stated)
        while least > 0 and not second.exceeds(least, delta):
            least *= 0.9995
        found = max(found, least)
    return found


def in_parts(draw: Draw, random: Generator, count: int) -> Sample:
    """So many losses, in parts that fit in memory."""
    parts = [draw(random, AT_ONCE) for _ in range(-(-count // AT_ONCE))]
    return Sample(*map(np.concatenate, zip(*parts, strict=True)))


# Steps that are drawn independently of each other.


def of_steps(share: float, noise: float, steps: int, epsilon: float, both: bool) -> list[Draw]:
    """Poisson sampled Gaussian mechanisms; with `both`, +1/2 replaces -1/2."""
    shift = 1 / noise
    edges = np.linspace(-12 - shift, 12 + shift, 1200)

    def masses(mean: float) -> np.ndarray:
        below, above = special.ndtr(edges - mean), special.ndtr(mean - edges)
        inner = np.where(edges[1:] > mean, -np.diff(above), np.diff(below))
        return np.concatenate([below[:1], inner, above[-1:]])

    middle = masses(0.0)
    p = (1 - share) * middle + share * masses(shift / 2 if both else shift)
    q = (1 - share) * middle + share * masses(-shift / 2) if both else middle
    return [of_masses(p, q, steps, epsilon), of_masses(q, p, steps, epsilon)]


def of_masses(p: np.ndarray, q: np.ndarray, steps: int, epsilon: float) -> Draw:
    """Steps whose releases have some masses, tilted so that losses are about epsilon."""
    there = (p > 1e-300) & (q > 1e-300)
    p, losses = p[there], np.log(p[there] / q[there])

    def tilted(tilt: float) -> tuple[np.ndarray, float]:
        logs = np.log(p) + tilt * losses
        scale = float(special.logsumexp(logs))
        return np.exp(logs - scale), scale

    def excess(tilt: float) -> float:
        return float(steps * tilted(tilt)[0] @ losses - epsilon)

    most = 200.0
    best = optimize.brentq(excess, 0, most) if excess(0) < 0 < excess(most) else 0.0
    tilts = np.array([0.7, 0.9, 1.0, 1.2]) * best

    def draw(random: Generator, count: int) -> Sample:
        kinds, runs = [tilted(tilt) for tilt in tilts], (count // len(tilts), steps)
        drawn = [np.searchsorted(np.cumsum(masses), random.random(runs)) for masses, _ in kinds]
        total = np.concatenate([losses[np.minimum(its, len(losses) - 1)].sum(1) for its in drawn])
        logs = [tilt * total - steps * scale for tilt, (_, scale) in zip(tilts, kinds, strict=True)]
        return Sample(total, len(tilts) * np.exp(-special.logsumexp(logs, axis=0)))

    return draw


# Cycles in which the example is in one step, drawn at random.


def of_cycles(bins: int, cycles: int, noise: float, epsilon: float) -> list[Draw]:
    """Both directions of random allocation."""
    # By how much one step is moved so that it alone has such a loss.
    alone = noise * math.log1p(bins * math.expm1(epsilon)) - 0.5 / noise
    moves = np.array([0.25, 0.5, 0.75, 1.0]) * max(alone, 1.0)
    return [
        lambda random, count: removed_from_cycles(bins, cycles, noise, moves, random, count),
        lambda random, count: added_to_cycles(bins, cycles, noise, random, count),
    ]


def losses_of_cycles(z: np.ndarray, noise: float) -> np.ndarray:
    """Losses by the normals of all steps, `(runs, cycles, bins)`."""
    logs = special.logsumexp(z / noise - 0.5 / noise**2, axis=2) - math.log(z.shape[2])
    return logs.sum(axis=1)


def partitions(total: int, most: int) -> Iterator[tuple[int, ...]]:
    """Of a number into others, the largest first."""
    if total == 0:
        yield ()
    for first in range(min(total, most), 0, -1):
        for rest in partitions(total - first, first):
            yield (first, *rest)


def removed_from_cycles(
    bins: int, cycles: int, noise: float, moves: np.ndarray, random: Generator, count: int
) -> Sample:
    """Drawn from powers of the density, and with the example's steps moved further."""
    orders, (share, lift) = (1, 2, 4), (min(0.06, 3 / bins), 2.0)
    normal = random.normal(size=(count, cycles, bins))
    parts = np.split(normal, [count * x // 8 for x in (1, 2, 3, 5)])
    scales: list[float] = []
    for part, order in zip(parts, orders, strict=False):
        ways = [way for way in partitions(order, order) if len(way) <= bins]
        weights = np.array(
            [
                special.gammaln(order + 1)
                - sum(special.gammaln(x + 1) - (x * x - x) / (2 * noise**2) for x in way)
                + special.gammaln(bins + 1)
                - special.gammaln(bins - len(way) + 1)
                - sum(special.gammaln(way.count(x) + 1) for x in set(way))
                - order * math.log(bins)
                for way in ways
            ]
        )
        scales.append(float(special.logsumexp(weights)))
        chosen = random.choice(len(ways), part.shape[:2], p=np.exp(weights - scales[-1]))
        for index in np.ndindex(*part.shape[:2]):
            way = ways[chosen[index]]
            part[index][: len(way)] += np.array(way) / noise  # bins are alike: in the first ones
    lifted, part = parts[-2:]
    lifted += lift * (random.random(lifted.shape) < share)
    lifted[:, :, 0] += 1 / noise
    moved_prob = 1 / cycles if cycles > 1 else 0.8
    is_moved = random.random(part.shape[:2]) < moved_prob
    part[:, :, 0] += 1 / noise + is_moved * random.choice(moves, part.shape[:2])
    total = losses_of_cycles(normal, noise)
    drawn = [order * total - cycles * scale for order, scale in zip(orders, scales, strict=True)]
    # The step that is moved further is that of the example: the mean over all that may be it.
    own = normal / noise - 0.5 / noise**2
    further = special.logsumexp(
        [own + move * (normal - 1 / noise) - move**2 / 2 for move in moves], axis=0
    )
    ratio = special.logsumexp(further, axis=2) - special.logsumexp(own, axis=2)
    ratio += math.log(moved_prob / len(moves))
    drawn.append(total + np.logaddexp(math.log1p(-moved_prob), ratio).sum(1))
    # Any step may be lifted; that of the example is, from where it is.
    by_step = np.log1p(share * np.expm1(lift * normal - lift**2 / 2))
    of_example = np.log1p(share * np.expm1(lift * (normal - 1 / noise) - lift**2 / 2))
    by_cycle = special.logsumexp(own + of_example - by_step, axis=2) - math.log(bins)
    drawn.insert(len(orders), (by_cycle + by_step.sum(2)).sum(1))
    shares = np.log([len(part) / count for part in parts])
    return Sample(total, np.exp(total - special.logsumexp(np.stack(drawn, 1) + shares, axis=1)))


def added_to_cycles(bins: int, cycles: int, noise: float, random: Generator, count: int) -> Sample:
    """Without the example; all steps are moved down together."""
    size = math.sqrt(bins * cycles)
    moves = np.array([0.0, 2.0, 4.0, 5.0]) / size
    moved = random.choice(moves, count)
    z = random.normal(size=(count, cycles, bins)) - moved[:, None, None]
    sums = z.sum(axis=(1, 2))[:, None]
    logs = -moves * sums - bins * cycles * moves**2 / 2 - math.log(len(moves))
    return Sample(-losses_of_cycles(z, noise), np.exp(-special.logsumexp(logs, axis=1)))


# All steps together: the example moves the release by one of some modes.


def of_modes(modes: np.ndarray, shares: np.ndarray) -> list[Draw]:
    """Both directions of a mixture of normals, by the inner products of their means."""
    gram = modes @ modes.T
    values, vectors = np.linalg.eigh(gram)
    root, squares = np.sqrt(np.maximum(values, 0)) * vectors, np.diag(gram)

    def density(dots: np.ndarray, factor: float) -> np.ndarray:
        logs = factor * dots - factor**2 * squares / 2 + np.log(shares)
        return special.logsumexp(logs, axis=1)

    def draw(factors: np.ndarray, sign: int, random: Generator, count: int) -> Sample:
        dots = random.normal(size=(count, len(gram))) @ root.T
        chosen = random.choice(len(gram), count, p=shares)
        dots += random.choice(factors, count)[:, None] * gram[chosen]
        total = density(dots, 1.0)
        drawn = special.logsumexp([density(dots, x) for x in factors], axis=0)
        weights = np.exp((total if sign > 0 else 0) - drawn + math.log(len(factors)))
        return Sample(sign * total, weights)

    up, down = np.array([1.0, 1.5, 2.0, 3.0]), np.array([0.0, -0.5, -1.0, -2.0])
    return [
        lambda random, count: draw(up, 1, random, count),
        lambda random, count: draw(down, -1, random, count),
    ]


def patterns(kind: Kind, steps: int) -> dict[tuple[int, ...], float]:
    """The steps that an example may be in, with their probabilities (its group is known)."""
    found: dict[tuple[int, ...], float] = {}
    cycle = getattr(kind, "cycle", 1)
    rounds = -(-steps // cycle)
    if isinstance(kind, BallsInBins):
        chosen = [((i,) * rounds, 1 / cycle) for i in range(cycle)]
    elif isinstance(kind, RandomAllocation):
        chosen = [(x, cycle**-rounds) for x in itertools.product(range(cycle), repeat=rounds)]
    else:
        prob = kind.step_prob * cycle
        chosen = [
            (x, math.prod(prob if i == 0 else 1 - prob for i in x))
            for x in itertools.product((0, None), repeat=rounds)
        ]
    for places, probability in chosen:
        is_in = np.zeros(rounds * cycle, int)
        is_in[[t * cycle + x for t, x in enumerate(places) if x is not None]] = 1
        key = tuple(is_in[:steps].tolist())
        found[key] = found.get(key, 0.0) + probability
    return {key: share for key, share in found.items() if share > 0}


def modes_of(plan: dp.PrivacyPlan) -> tuple[np.ndarray, np.ndarray]:
    """The modes of correlated noise, in units of its deviation, and how likely they are."""
    known = patterns(plan.sampling, plan.steps)
    column = plan.mechanism().column()
    modes = np.stack([signal.lfilter(column, [1.0], np.array(x, float)) for x in known])
    return modes / plan.noise_multiplier, np.array(list(known.values()))


def draws_of(plan: dp.PrivacyPlan, stated: float) -> list[Draw]:
    """The worst case of a plan, in both directions."""
    kind, noise, column = plan.sampling, plan.noise_multiplier, plan.mechanism().column()
    cycle = getattr(kind, "cycle", 1)
    rounds = -(-plan.steps // cycle)
    if isinstance(kind, RandomAllocation):
        return of_cycles(cycle, rounds, noise, stated)
    if isinstance(kind, BallsInBins) and len(column) == 1:
        return of_cycles(cycle, 1, noise / math.sqrt(rounds), stated)
    if isinstance(kind, BallsInBins) or len(column) > cycle:
        return of_modes(*modes_of(plan))
    share = kind.step_prob * cycle
    both = plan.neighboring_relation is REPLACE_ONE and not isinstance(kind, FixedSize)
    return of_steps(share, noise / math.hypot(*column), rounds, stated, both)


def seconds(work: Callable[[], object]) -> float:
    """CPU time of a call, with cold caches."""
    for function in vars(accounting).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()
    start = time.process_time()
    work()
    return time.process_time() - start


def plan_of(kind: Kind, steps: int, times: float, delta: float = 1e-5, **more: Any):
    """A plan."""
    return dp.PrivacyPlan(None, steps, times, delta, sampling=kind, **more)


REPLACED: dict[str, Any] = {"neighboring_relation": REPLACE_ONE}
SIMULATED = [
    plan_of(Poisson(0.01), 1000, 1.0),
    plan_of(Poisson(0.01), 1000, 1.0, 1e-10),
    plan_of(Poisson(0.2), 50, 2.0, **REPLACED),
    plan_of(Poisson(0.5), 20, 3.0, unit=dp.Users(np.arange(100), 4)),
    plan_of(CyclicPoisson(0.5, 50), 500, 2.0),
    plan_of(CyclicPoisson(0.1, 4), 400, 1.5, noise=BANDS),
    plan_of(CyclicPoisson(0.5, 4), 32, 3.0, noise=dp.Banded.bisr(4)),
    plan_of(FixedSize(10, 1000), 300, 1.0, **REPLACED),
    plan_of(FixedSize(100, 1000), 100, 3.0, **REPLACED),
    plan_of(RandomAllocation(100), 300, 1.0),
    plan_of(RandomAllocation(100), 300, 1.0, 1e-10),
    plan_of(RandomAllocation(20), 200, 3.0),
    plan_of(BallsInBins(100), 300, 1.5),
    plan_of(BallsInBins(100), 300, 1.5, 1e-10),
    plan_of(BallsInBins(50), 50, 0.8, noise=dp.Banded(strategy=(1.0, 0.5))),
    plan_of(BallsInBins(50), 100, 1.5, noise=BANDS),
    plan_of(BallsInBins(100), 100, 1.0, noise=dp.Banded.bisr(4)),
    plan_of(BallsInBins(20), 200, 3.0, noise=dp.Banded.bisr(4)),
]


def described(plan: dp.PrivacyPlan) -> dict[str, str]:
    """What a line says of a plan."""
    noise = plan.noise
    correlated = "" if noise is None else f", C of {len(plan.mechanism().column())} bands"
    relation = "replaced" if plan.neighboring_relation is REPLACE_ONE else "added or removed"
    return {
        "sampling": f"`{plan.sampling}`{correlated}{', users' if plan.unit else ''}",
        "neighbor": relation,
        "steps": str(plan.steps),
        "noise multiplier": f"{plan.noise_multiplier:g}",
        "delta": f"{plan.delta:.0e}",
    }


def simulated(plan: dp.PrivacyPlan, count: int) -> dict[str, str]:
    """A line of the table."""
    taken = seconds(plan.epsilon)
    stated = plan.epsilon()
    given: dict[str, Any] = {"sampling": plan.sampling, "noise": plan.noise, "unit": plan.unit}
    given |= {"neighboring_relation": plan.neighboring_relation, "steps": plan.steps}
    calibrated = seconds(
        lambda: dp.PrivacyPlan.calibrate(epsilon=stated, delta=plan.delta, **given)
    )
    least = at_least(draws_of(plan, stated), stated, plan.delta, count)
    return {
        **described(plan),
        "stated": f"{stated:.4f}",
        "at least": f"{least:.4f}",
        "stated / at least": f"{stated / least:.3f}",
        "an epsilon, s": f"{taken:.2f}",
        "a calibration, s": f"{calibrated:.1f}",
    }


# What a bound that composes single steps cannot know.


def losses_on_grid(others: float, share: float, noise: float, width: float):
    """Probabilities of the losses of a step in which +1/2 replaces -1/2, and the first loss."""
    z = np.linspace(-9 - 1 / noise, 9 + 1 / noise, 100_001)

    def masses(mean: float) -> np.ndarray:
        below, above = special.ndtr(z - mean), special.ndtr(mean - z)
        return np.where(z[1:] > mean, -np.diff(above), np.diff(below))

    one, two = (
        (1 - share) * masses(0.0) + share * masses((sign / 2 - others) / noise) for sign in (1, -1)
    )
    there = (one > 1e-300) & (two > 1e-300)
    place = np.log(one[there] / two[there]) / width
    below = np.floor(place).astype(int)
    found = np.zeros(below.max() + 2 - below.min())
    np.add.at(found, below - below.min(), one[there] * (1 - place + below))
    np.add.at(found, below + 1 - below.min(), one[there] * (place - below))
    return found, int(below.min())


def worst_delta(steps: list[tuple[np.ndarray, int]], count: int, epsilon: float, width: float):
    """Delta at an epsilon, if one of some steps is chosen each time by the losses so far."""
    losses = np.arange(round(-3 / width), round(5 / width)) * width
    value = -np.expm1(np.minimum(epsilon - losses, 0))
    for _ in range(count):
        ways: list[np.ndarray] = []
        for masses, first in steps:
            before, after = max(0, -first), max(0, first + len(masses) - 1)
            known = np.pad(value, (before, after), mode="edge")
            ahead = signal.fftconvolve(known, masses[::-1], mode="valid")
            ways.append(ahead[before + first :][: len(value)])
        value = np.clip(np.max(ways, axis=0), 0, 1)
    return float(np.interp(0.0, losses, value))


def fixed_size(plan: dp.PrivacyPlan, width: float) -> dict[str, str]:
    """A line of the table."""
    stated, found = plan.epsilon(), list[float]()
    for choices in ([-0.5], [-0.5, -0.25, 0.0, 0.25, 0.5]):
        kind, noise = plan.sampling, plan.noise_multiplier
        steps = [losses_on_grid(x, kind.step_prob, noise, width) for x in choices]

        def excess(epsilon: float, steps: Any = steps) -> float:
            return math.log(worst_delta(steps, plan.steps, epsilon, width) / plan.delta)

        found.append(float(optimize.brentq(excess, 0.3 * stated, 1.1 * stated, xtol=1e-4)))
    return {
        **described(plan),
        "stated": f"{stated:.4f}",
        "others -1": f"{found[0]:.4f}",
        "others chosen each time": f"{found[1]:.4f}",
        "stated / chosen": f"{stated / found[1]:.3f}",
    }


def in_bins(plan: dp.PrivacyPlan, count: int) -> dict[str, str]:
    """A line of the table."""
    stated, reduced = plan.epsilon(), plan.mechanism().reduced(plan.noise_multiplier)
    (of_bins, noise), *rest = reduced
    modes, _ = modes_of(plan)
    apart = next(k for k in range(1, len(modes) + 1) if len(modes) // k == of_bins.bins)
    shared = sum(of_rest**-2 for _, of_rest in rest)
    raised = np.full((of_bins.bins, of_bins.bins), shared) + np.eye(of_bins.bins) / noise**2
    chosen = modes[::apart][: of_bins.bins]
    samples: dict[str, np.ndarray] = {
        "all bins": modes,
        "every k-th": chosen,
        "covariances raised": np.linalg.cholesky(raised),
    }
    found = {
        name: at_least(of_modes(x, np.full(len(x), 1 / len(x))), stated, plan.delta, count)
        for name, x in samples.items()
    }
    return {
        **described(plan),
        "stated": f"{stated:.4f}",
        **{name: f"{epsilon:.4f}" for name, epsilon in found.items()},
        "k": str(apart),
    }


# Brute force.

TINY = [
    plan_of(Poisson(0.3), 1, 1.0, 1e-3),
    plan_of(Poisson(0.3), 3, 1.5, 1e-3),
    plan_of(Poisson(0.3), 3, 1.5, 1e-3, **REPLACED),
    plan_of(Poisson(1.0), 3, 2.0, 1e-3, **REPLACED),
    plan_of(CyclicPoisson(0.5, 2), 4, 1.5, 1e-3),
    plan_of(CyclicPoisson(0.5, 2), 4, 2.0, 1e-3, noise=dp.Banded(strategy=(1.0, 0.5))),
    plan_of(CyclicPoisson(0.5, 1), 3, 2.0, 1e-3, noise=dp.Banded.bisr(2)),
    plan_of(CyclicPoisson(0.5, 2), 4, 2.0, 1e-3, noise=dp.Banded(strategy=(1.0, 0.5)), **REPLACED),
    plan_of(RandomAllocation(3), 3, 1.0, 1e-3),
    plan_of(RandomAllocation(2), 4, 1.5, 1e-3),
    plan_of(BallsInBins(2), 4, 1.5, 1e-3),
    plan_of(BallsInBins(2), 3, 1.5, 1e-3),
    plan_of(BallsInBins(3), 3, 1.0, 1e-3, noise=dp.Banded(strategy=(1.0, 0.5))),
    plan_of(BallsInBins(2), 4, 2.0, 1e-3, noise=dp.Banded.bisr(2)),
]


# By the sign of what the step before released: how an example's gradient follows from it.
ANSWERS = ((1.0, 1.0), (-1.0, -1.0), (-1.0, 1.0), (1.0, 0.0))


def masses_of(
    plan: dp.PrivacyPlan, answers: tuple[tuple[float, float], ...], scale: float, cells: int
) -> np.ndarray:
    """Of all that is released, each step in cells; an example's gradients are so long at most."""
    steps, noise, column = plan.steps, plan.noise_multiplier, plan.mechanism().column()
    edges = np.linspace(-6 - 1 / noise, 6 + 1 / noise, 2 * cells - 1)
    blocks: list[np.ndarray] = []
    for signs in itertools.product((0, 1), repeat=steps - 1):
        gradients = [
            scale,
            *(scale * answer[sign] for answer, sign in zip(answers, signs, strict=True)),
        ]
        block: np.ndarray | float = 0.0
        for pattern, share in patterns(plan.sampling, steps).items():
            means = np.convolve(np.multiply(pattern, gradients), column)[:steps] / noise
            below = special.ndtr(np.append(edges, np.inf) - means[:, None])
            masses = np.diff(below, prepend=0)
            halves = [
                its[sign * cells : (sign + 1) * cells]
                for its, sign in zip(masses, signs, strict=False)
            ]
            block = block + share * functools.reduce(np.multiply.outer, [*halves, masses[-1]])
        blocks.append(np.ravel(block))
    return np.concatenate(blocks)


def brute_force(plan: dp.PrivacyPlan, cells: int) -> float:
    """The largest epsilon of all ways in which gradients follow from releases."""
    is_replaced = plan.neighboring_relation is REPLACE_ONE
    scale, worst = 0.5 if is_replaced else 1.0, 0.0  # sums move by twice as much as gradients are
    for answers in itertools.product(ANSWERS, repeat=plan.steps - 1):
        p = masses_of(plan, answers, scale, cells)
        q = masses_of(plan, answers, -scale if is_replaced else 0.0, cells)
        for one, two in ((p, q), (q, p)):

            def excess(epsilon: float, one: np.ndarray = one, two: np.ndarray = two) -> float:
                return float(np.maximum(one - math.exp(epsilon) * two, 0).sum()) - plan.delta

            if excess(worst) > 0:
                worst = float(optimize.brentq(excess, worst, 60, xtol=1e-6))
    return worst


def by_brute_force(plan: dp.PrivacyPlan) -> dict[str, str]:
    """A line of the table."""
    found, stated = brute_force(plan, {1: 5000, 2: 300, 3: 40, 4: 14}[plan.steps]), plan.epsilon()
    return {
        **described(plan),
        "stated": f"{stated:.4f}",
        "brute force": f"{found:.4f}",
        "stated / brute force": f"{stated / found:.3f}",
    }


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """One of simulations, one of brute force."""
    plans, tiny = (SIMULATED[3:4], TINY[:2]) if options.tiny else (SIMULATED, TINY)
    plans = [x for x in plans if options.only in described(x)["sampling"]]
    tiny = [x for x in tiny if options.only in described(x)["sampling"]]
    if "simulated" in options.tables:
        rounds = [simulated(plan, 5_000 * options.rounds) for plan in plans]
        yield Table("Stated and simulated", rounds)
    if "brute" in options.tables:
        yield Table("Stated and by brute force", [by_brute_force(x) for x in tiny])
    if options.tiny or "gaps" not in options.tables:
        return
    sizes = [x for x in plans if isinstance(x.sampling, FixedSize)]
    yield Table("Batches of a fixed size", [fixed_size(x, 0.001) for x in sizes])
    bins = [x for x in plans if isinstance(x.sampling, BallsInBins) and x.noise]
    rows = [in_bins(x, 5_000 * options.rounds) for x in bins]
    yield Table("Bins and correlated noise: what exceeds the truth", rows)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of this benchmark."""
    parser.add_argument("--only", default="", help="plans whose sampling contains this text")
    kinds = ["simulated", "brute", "gaps"]
    parser.add_argument("--tables", nargs="+", choices=kinds, default=kinds, help="some of them")


PART = Part(__doc__, tables, add_options, rounds=(16, 4))
