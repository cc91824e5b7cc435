"""One budget for several releases: plans whose runs are seen together."""

import dataclasses
import math
from collections.abc import Sequence
from typing import SupportsFloat

import dp_accounting

from ..expected import real_number
from ..shown import shown
from .accounting import Pairs, Runs, epsilon_at
from .calibration import least_noise
from .finite_precision import PRECISION_EPSILON
from .plan import PrivacyPlan
from .selection import Tuned

Release = PrivacyPlan | Tuned | Sequence[float]
"""A plan, the best of several runs, or the (epsilon, delta) of a finished release."""


@dataclasses.dataclass(frozen=True)
class Composition:
    """Several plans under one epsilon, made by `compose`.

    Each plan's sampler and privatizer are used as without the others: training by one plan, a mean
    of features by another, a quantile or an evaluation by a third (`filter_clipped_sum`).

    **Guarantee.** The releases of all plans, seen together, are (`epsilon()`, `delta`)-
    differentially private, in any order, also if a later one depends on what an earlier one
    released (which features it reads, how many of its plan's steps it takes, its clip norm). Each
    must have fresh randomness.

    Attributes:
        plans: of the releases.
        delta: of all together.
        tuned: of which the best of several runs is released.
        finished: (epsilon, delta) of releases that have no plan.
    """

    plans: tuple[PrivacyPlan, ...]
    delta: float
    tuned: tuple[Tuned, ...] = ()
    finished: Pairs = ()

    def __post_init__(self) -> None:
        known = *self.plans, *(one.plan for one in self.tuned)
        units = {(x.neighboring_relation.name, "users" if x.unit else "rows") for x in known}
        if len(units) > 1 or not (units or self.finished):
            raise ValueError(
                "plans that are composed must have one neighboring_relation and one unit; found "
                f"{', '.join(sorted(map(' of '.join, units))) or 'no plan'}."
            )
        if self._left <= 0:
            raise ValueError(
                f"delta must exceed {self.delta - self._left:.3g}, what overflow and finite "
                f"precision of these plans may cost; found {self.delta:g}."
            )

    @property
    def _left(self) -> float:
        """What is left of delta for accounting."""
        return self.delta - math.fsum(plan.charged for plan in self.plans)

    def event(self) -> dp_accounting.DpEvent:
        """All releases, for dp_accounting; as `PrivacyPlan.event`.

        Its accountants refuse it with a tuned or a finished release, which they know nothing of:
        take `epsilon()` then.
        """
        unknown = [dp_accounting.UnsupportedDpEvent() for _ in (*self.tuned, *self.finished)]
        return dp_accounting.ComposedDpEvent([*(plan.event() for plan in self.plans), *unknown])

    def within(self, epsilon: SupportsFloat) -> "Composition":
        """The same plans with the least noise that keeps to a budget, all scaled by one factor.

        For phases of one training run, whose noise or sampling changes: each is a plan, with the
        noise multipliers in the wanted ratio.

        Args:
            epsilon: the budget of all releases together.

        Returns:
            A `Composition`, whose `plans` go to `make_step`, one after the other.

        Raises:
            ValueError: the budget is out of reach, or met with hardly any noise.
        """
        charged = len(self.plans) * PRECISION_EPSILON
        allowed = f"greater than {charged:g}, which finite precision is charged"
        budget = real_number("epsilon", epsilon, lambda real: real > charged, allowed)
        times = least_noise(self._runs, self._left, budget - charged, self._pairs)

        def scaled(plan: PrivacyPlan) -> PrivacyPlan:
            return dataclasses.replace(plan, noise_multiplier=times * plan.noise_multiplier)

        return dataclasses.replace(self, plans=tuple(map(scaled, self.plans)))

    def epsilon(self) -> float:
        """Epsilon of all releases together, at `delta`; infinite if one has hardly any noise."""
        found = epsilon_at(self._runs(), self._left, self._pairs)
        return found + len(self.plans) * PRECISION_EPSILON

    @property
    def _pairs(self) -> Pairs:
        """What is known of releases without a plan."""
        return *self.finished, *((one.epsilon(), one.delta) for one in self.tuned)

    def _runs(self, times: float = 1.0) -> Runs:
        """Those of all plans, with so many times their noise."""
        reduced = (x.mechanism().reduced(times * x.noise_multiplier) for x in self.plans)
        return tuple(run for runs in reduced for run in runs)


def compose(*releases: Release, delta: SupportsFloat | None = None) -> Composition:
    """One epsilon for the releases of several plans.

    ```python
    both = dp.compose(statistics, training, delta=1e-5)
    both.epsilon()
    ```

    Args:
        *releases: plans with one neighboring relation and one unit (all of users, or none). Also
            `plan.tuned(...)`, and (epsilon, delta) of a finished release, for the same neighbors.
        delta: of all together; by default the sum of theirs.

    Returns:
        A [`Composition`][].

    Raises:
        ValueError: `releases` holds something else, or plans of several relations or units;
            `delta` is out of its range, or less than overflow and precision cost.
    """
    plans, tuned, pairs = list[PrivacyPlan](), list[Tuned](), list[tuple[float, float]]()
    allowed = "plans, plan.tuned(...), or pairs of epsilon and delta"
    for release in releases:
        match release:
            case PrivacyPlan():
                plans.append(release)
            case Tuned():
                tuned.append(release)
            case (epsilon, of_pair) if not isinstance(epsilon, PrivacyPlan | Tuned):
                least = real_number("epsilon", epsilon, lambda real: real >= 0, "at least 0")
                share = real_number("delta", of_pair, lambda real: 0 <= real < 1, "in [0, 1)")
                pairs.append((least, share))
            case _:
                raise ValueError(f"releases must be {allowed}, one by one; found {shown(release)}.")
    deltas = *(x.delta for x in (*plans, *tuned)), *(share for _, share in pairs)
    total = math.fsum(deltas) if delta is None else delta
    known = real_number("delta", total, lambda real: 0 < real < 1, "between 0 and 1, both excluded")
    return Composition(tuple(plans), known, tuple(tuned), tuple(pairs))
