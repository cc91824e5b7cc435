"""One budget for several releases: plans whose runs are seen together."""

import dataclasses
import itertools
import math
from typing import SupportsFloat

import dp_accounting

from ..expected import expect, real_number
from .accounting import epsilon_at
from .finite_precision import PRECISION_EPSILON
from .plan import PrivacyPlan


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
    """

    plans: tuple[PrivacyPlan, ...]
    delta: float

    def __post_init__(self) -> None:
        units = {(x.neighboring_relation.name, "users" if x.unit else "rows") for x in self.plans}
        if len(units) != 1:
            raise ValueError(
                "plans that are composed must have one neighboring_relation and one unit; found "
                f"{', '.join(sorted(map(' of '.join, units))) or 'no plan'}."
            )
        if self._left <= 0:
            raise ValueError(
                f"delta must exceed {self.delta - self._left:.3g}, what overflow and finite "
                f"precision of these plans may cost; found {self.delta:g}."
            )
        for plan in self.plans:
            if not plan.mechanism().reduced():
                raise ValueError(
                    f"plans of {type(plan.sampling).__name__} have no privacy loss distribution, "
                    "and cannot be composed. Take Poisson, CyclicPoisson, RandomAllocation or "
                    "BallsInBins."
                )

    @property
    def _left(self) -> float:
        """What is left of delta for accounting."""
        return self.delta - math.fsum(plan.charged for plan in self.plans)

    def event(self) -> dp_accounting.DpEvent:
        """All releases, for dp_accounting; as `PrivacyPlan.event`."""
        return dp_accounting.ComposedDpEvent([plan.event() for plan in self.plans])

    def epsilon(self) -> float:
        """Epsilon of all releases together, at `delta`; infinite if one has hardly any noise."""
        reduced = [plan.mechanism().reduced(plan.noise_multiplier) for plan in self.plans]
        runs = tuple(itertools.chain.from_iterable(reduced))
        return epsilon_at(runs, self._left) + len(self.plans) * PRECISION_EPSILON


def compose(*plans: PrivacyPlan, delta: SupportsFloat | None = None) -> Composition:
    """One epsilon for the releases of several plans.

    ```python
    both = dp.compose(statistics, training, delta=1e-5)
    both.epsilon()
    ```

    Args:
        *plans: two or more, with one neighboring relation and one unit (all of users, or none), of
            kinds that have a privacy loss distribution: neither `FixedSize` nor `MinSeparation`.
        delta: of all together; by default the sum of theirs.

    Returns:
        A [`Composition`][].

    Raises:
        ValueError: `plans` holds something else, plans of several relations or units, or one
            without a distribution; `delta` is out of its range, or less than overflow and precision
            cost.
    """
    for plan in plans:
        expect("plans", plan, PrivacyPlan, "dp.PrivacyPlan objects")
    total = math.fsum(plan.delta for plan in plans) if delta is None else delta
    known = real_number("delta", total, lambda real: 0 < real < 1, "between 0 and 1, both excluded")
    return Composition(plans, known)
