"""Private selection: the best of a random number of runs is published, and no other."""

import dataclasses
import math
import secrets
from typing import TYPE_CHECKING

import numpy as np

from ..expected import real_number

if TYPE_CHECKING:
    from .accounted_plan import AccountedPlan


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The best of a random number of runs, made by `plan.tuned` (Papernot and Steinke 2022).

    The number is geometric; draw it by `draw`, and keep it secret. Each run takes its
    hyperparameters at random from a list that does not depend on the data, trains by the plan with
    fresh randomness, and gets a score. Publish the run of the best score, with its hyperparameters
    and its score, and nothing else. The score is a function of what the run releases and of public
    data. (Of private data it is a release of its own; then `plan` must be one for both.)

    **Guarantee.** What is published is (`epsilon()`, `delta`)-differentially private.

    *Proof* (after Koskela, Redberg and Wang 2024, arXiv 2402.06701). Let q and q' be the densities
    of one run's outcome y on two neighboring data sets, x = Q(> y) and x' = Q'(> y) the
    probabilities of a better one (equal scores are ordered by a number drawn with each run), g the
    inverse of the mean, and f the generating function of the number of runs. What is published has
    the density q(y) f'(1 - x), where f'(1 - x) = g / (g + (1 - g) x)^2 is at most f'(1), the mean.
    For any pair (a, b) that one run keeps to, x' is at most 1 and e^a x + b, so

        f'(1 - x) / f'(1 - x') = ((g + (1 - g) x') / (g + (1 - g) x))^2 <= c^2,
        c = max(1 + (1 - g) b / g, 1 / (g + (1 - g) (1 - b) e^-a)):

    with x' = e^a x + b the quotient is monotone in x, from x = 0 to where x' is 1, and beyond it
    falls. So the probability of a set, less e^epsilon times that on the other data, is at most the
    integral of f'(1 - x) (q - (e^epsilon / c^2) q') over it, at most the mean times
    delta_1(epsilon - 2 log c), with delta_1 that of one run. Hence epsilon is that of one run at
    delta / mean, plus 2 log c, and the least of it over 25 pairs (a, b). All deltas of one run pay
    for overflow and finite precision of the plan as it is: `plan.charged`.

    Attributes:
        plan: of one run.
        mean: number of runs, above 1; `delta` / mean must exceed what the plan is charged.
    """

    plan: "AccountedPlan"
    mean: float

    def __post_init__(self) -> None:
        most = self.plan.delta / self.plan.charged / 2 if self.plan.charged else math.inf
        allowed = f"above 1, at most {most:.4g}: one run gets delta / mean, and pays for overflow"
        known = real_number("mean", self.mean, lambda real: 1 < real <= most, allowed)
        object.__setattr__(self, "mean", known)

    @property
    def delta(self) -> float:
        """Of what is published: the plan's."""
        return self.plan.delta

    def epsilon(self) -> float:
        """Epsilon of what is published, at `delta`."""
        g, factors = 1 / self.mean, list[float]()
        of_each = self.delta / self.mean

        def of_one(delta: float) -> float:
            return dataclasses.replace(self.plan, delta=delta - self.plan.charged).epsilon()

        for b in np.geomspace(of_each, 0.3, 25).tolist():
            is_sure = 1 / (g + (1 - g) * (1 - b) * math.exp(-of_one(b)))
            factors.append(max(1 + (1 - g) * b / g, is_sure))
        return of_one(of_each) + 2 * math.log(min(factors))

    def draw(self) -> int:
        """A number of runs, by the operating system's randomness. **Not private**: keep it."""
        return int(np.random.default_rng(secrets.randbits(256)).geometric(1 / self.mean))
