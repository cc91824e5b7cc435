"""What a plan says, and what it costs: fields, accounting, calibration."""

import dataclasses
import math
from typing import Any, Self, SupportsFloat, SupportsIndex, cast

import dp_accounting
from dp_accounting import NeighboringRelation

from ..expected import expect, real_number, whole_number
from ..trade_off import TradeOff
from .accounting import ROUNDING_DELTA, SENSITIVITY_OF_UNIT_NORM, check_relation, delta_left
from .calibration import least_noise
from .finite_precision import PRECISION_EPSILON, PRECISION_SHARE
from .mechanism import Mechanism
from .plan_json import read, written
from .sampling import OVERFLOW_PROBABILITY
from .sampling_kinds import Kind, Poisson
from .selection import Tuned
from .strategies import Banded
from .users import Users

_MOST_STEPS = 2**32 - 1  # noise of a further step would repeat that of the first
_DELTAS = "between 0 and 1, both excluded (well below 1 / number of examples to mean anything)"


@dataclasses.dataclass(frozen=True, init=False)
class AccountedPlan:
    """The fields of `PrivacyPlan`, which documents them, and what follows from them alone."""

    sampling_prob: float
    steps: int
    noise_multiplier: float
    delta: float
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    sampling: Kind = dataclasses.field(kw_only=True)
    noise: Banded | None = dataclasses.field(default=None, kw_only=True)
    unit: Users | None = dataclasses.field(default=None, kw_only=True)

    # Written out for its types: any number is accepted, floats and ints are stored.
    def __init__(
        self,
        sampling_prob: SupportsFloat | None = None,
        steps: SupportsIndex | None = None,
        noise_multiplier: SupportsFloat | None = None,
        delta: SupportsFloat | None = None,
        neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
        *,
        sampling: Kind | None = None,
        noise: Banded | None = None,
        unit: Users | None = None,
    ):
        check_relation(neighboring_relation)
        kind = _kind(sampling_prob, sampling)
        expect("noise", noise, (Banded, type(None)), "a dp.Banded, or None for independent noise")
        allowed = "a dp.Users, or None if each example is protected alone"
        expect("unit", unit, (Users, type(None)), allowed)
        checked = {
            "sampling_prob": kind.step_prob,
            "steps": whole_number("steps", steps, least=1, most=_MOST_STEPS),
            "noise_multiplier": real_number(
                "noise_multiplier", noise_multiplier, lambda x: 0 <= x <= 1e150, "from 0 to 1e150"
            ),
            "delta": real_number("delta", delta, lambda real: 0 < real < 1, _DELTAS),
            "neighboring_relation": neighboring_relation,
            "sampling": kind,
            "noise": noise,
            "unit": unit,
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        self.mechanism().check()
        rounding = self.steps * ROUNDING_DELTA
        if self._delta_left(self.steps) <= rounding:
            raise ValueError(
                f"delta must exceed {rounding:g} by more than two thousandths: accounting in "
                f"float64 may lose that much in {self.steps} steps ({ROUNDING_DELTA:g} a step). "
                f"Found {self.delta:g}. Take a larger delta or fewer steps."
            )

    @classmethod
    def calibrate(
        cls,
        *,
        epsilon: SupportsFloat,
        delta: SupportsFloat,
        steps: SupportsIndex | None = None,
        epochs: SupportsFloat | None = None,
        sampling_prob: SupportsFloat | None = None,
        neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
        sampling: Kind | None = None,
        noise: Banded | None = None,
        unit: Users | None = None,
    ) -> Self:
        """Finds the plan with the least noise that stays within a privacy budget.

        Args:
            epsilon: The budget: `plan.epsilon()` is at most this.
            delta: As for the plan.
            steps: As for the plan.
            epochs: In place of `steps`: how often an example is expected to take part. Rounded up
                to a step, or to a cycle.
            sampling_prob: As for the plan.
            neighboring_relation: As for the plan.
            sampling: As for the plan.
            noise: As for the plan.
            unit: As for the plan.

        Returns:
            The plan. Its noise multiplier is at most 1.0002 times the least that keeps to the
            budget; 1.01 times where delta is less than some 10 times what float64 may lose of it.

        Raises:
            ValueError: If epsilon is not a finite number above 5e-5, another argument is refused as
                for the plan itself, the budget cannot be met, or hardly any noise meets it.
        """
        allowed = f"greater than {PRECISION_EPSILON:g}, which finite precision is charged"
        budget = real_number("epsilon", epsilon, lambda real: real > PRECISION_EPSILON, allowed)
        if (epochs is None) == (steps is None):
            raise ValueError(f"steps must be given, or epochs; found {steps=} and {epochs=}.")
        if epochs is not None:
            passes = real_number("epochs", epochs, lambda real: real > 0, "greater than 0")
            kind = _kind(sampling_prob, sampling)
            cycle = getattr(kind, "cycle", 1)
            # What float64 may have added makes no further step.
            steps = math.ceil(passes / (kind.step_prob * cycle) - 1e-6) * cycle
        extras: Any = {"sampling": sampling, "noise": noise, "unit": unit}
        draft = cls(sampling_prob, steps, 1.0, delta, neighboring_relation, **extras)
        runs = draft.mechanism().reduced
        left = delta_left(runs(), draft._delta_left(draft.steps))
        multiplier = least_noise(runs, left, budget - PRECISION_EPSILON)
        return dataclasses.replace(draft, noise_multiplier=multiplier)

    def epsilon(self, steps: SupportsIndex | None = None) -> float:
        """Epsilon of the first steps of the run, at the plan's delta.

        It depends on the plan and not on data, so it is public and may be shown while training.

        Args:
            steps: How many steps have been taken, from 0 to the plan's `steps`; None for all of
                them.

        Returns:
            Epsilon: 0 for no steps, infinite without noise.

        Raises:
            ValueError: If `steps` is not a whole number in that range.
        """
        taken = self._steps_taken(steps)
        found = self.mechanism(taken).epsilon(self.noise_multiplier, self._delta_left(taken))
        return found + PRECISION_EPSILON if taken else 0.0

    def trade_off(self, steps: SupportsIndex | None = None) -> TradeOff:
        """What an attack on the first steps of the run finds out, at most.

        From 17 pairs of epsilon and delta, whose deltas are the plan's and larger ones.

        Args:
            steps: As for `epsilon`.

        Returns:
            A [`TradeOff`][]: `found(false_alarms)`, `advantage`, `right`, `mu`, `distance`.

        Raises:
            ValueError: As for `epsilon`.
        """
        return TradeOff.of(
            lambda delta: dataclasses.replace(self, delta=delta).epsilon(steps), self.delta
        )

    def mu(self, steps: SupportsIndex | None = None) -> float:
        """Mu of Gaussian differential privacy: `trade_off(steps).mu`; see `TradeOff.distance`."""
        return self.trade_off(steps).mu

    def advantage(self, steps: SupportsIndex | None = None) -> float:
        """By how much attacks find more than false alarms: `trade_off(steps).advantage`."""
        return self.trade_off(steps).advantage

    def error(self, steps: SupportsIndex | None = None) -> float:
        """Root mean square error of the prefix sums of gradients: one number to compare plans by.

        What optimizers use of the gradients of t steps is mostly their sum. This is the standard
        deviation of the noise in an entry of it, as a root mean square over t = 1, 2, ..., in units
        of the clip norm. Divide it by the expected batch size to compare plans of several sampling
        probabilities. It says nothing of single gradients, whose noise may grow meanwhile.

        Args:
            steps: As for `epsilon`.

        Returns:
            The error, 0 for no steps.

        Raises:
            ValueError: As for `epsilon`; noise is correlated, and there are more than 2^24 steps.
        """
        taken = self._steps_taken(steps)
        stddev = self.noise_multiplier * SENSITIVITY_OF_UNIT_NORM[self.neighboring_relation]
        if self.noise is None or taken == 0:
            return stddev * math.sqrt((taken + 1) / 2) if taken else 0.0
        return stddev * self.noise.error(taken)

    def tuned(self, mean: SupportsFloat) -> Tuned:
        """The best of a random number of runs of this plan, at the plan's delta.

        Args:
            mean: Of the number of runs, above 1.

        Returns:
            A [`Tuned`][]: its `draw` and `epsilon`; `dp.compose` takes it.
        """
        return Tuned(self, cast(float, mean))

    def event(self, steps: SupportsIndex | None = None) -> dp_accounting.DpEvent:
        """The event that `epsilon` accounts for, for dp_accounting.

        Overflow and finite precision are not in it.

        Args:
            steps: As for `epsilon`.

        Returns:
            An event for dp_accounting's accountants, made with the plan's neighboring relation.
            `PLDAccountant` reads it right. `RdpAccountant` refuses it for `REPLACE_ONE`, under
            which it knows no Poisson sampling, and else reads it right.

        Raises:
            ValueError: As for `epsilon`.
        """
        if self._steps_taken(steps) == 0:
            return dp_accounting.NoOpDpEvent()
        return self.mechanism(steps).event(self.noise_multiplier)

    @property
    def charged(self) -> float:
        """The part of delta that overflow, finite precision and float64 accounting may cost."""
        return self.delta - self._delta_left(self.steps) + self.steps * ROUNDING_DELTA

    @property
    def _overflow_probability(self) -> float:
        """An upper bound tau on the probability that a batch is cut; the sampler keeps to it.

        It is a thousandth of delta over all steps, and at most 1e-12 a step. Accounting knows
        sampling without a cut. If k steps without a cut are (epsilon, delta)-differentially
        private, k steps with it are (epsilon, delta + k tau)-differentially private; `overflow.md`
        beside this module has the proof.
        """
        return min(OVERFLOW_PROBABILITY, self.delta / self.steps / 1000)

    def to_json(self) -> str:
        """Writes the plan as JSON; `from_json` reads an equal plan from it."""
        return written(
            {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads a plan that `to_json` wrote.

        Args:
            text: JSON.

        Returns:
            The plan.

        Raises:
            ValueError: If the text is not JSON of this format and version, a key is unknown,
                or a value is missing or refused as for the plan itself.
        """
        return read(cls, text)

    def _delta_left(self, steps: int) -> float:
        """What is left of delta for accounting."""
        return self.delta * (1 - PRECISION_SHARE) - steps * self._overflow_probability

    def mechanism(self, steps: SupportsIndex | None = None) -> Mechanism:
        """The sampling and the noise of the first steps of the run, by default of all of them."""
        taken = self._steps_taken(steps)
        return Mechanism(self.sampling, self.noise, taken, self.neighboring_relation)

    def _steps_taken(self, steps: SupportsIndex | None) -> int:
        if steps is None:
            return self.steps
        advice = " For a longer run make a new plan, before the run starts."
        return whole_number("steps", steps, least=0, most=self.steps, advice=advice)


def epsilon_beyond(plan: AccountedPlan, steps: int) -> float:
    """Epsilon of so many steps of all starts of a run, also if they are more than the plan's.

    The starts of one directory take at most the plan's steps. Copies of it, put together, may have
    more: each start kept to the plan, and all their steps are one adaptive composition.

    **Guarantee.** It is at least the true epsilon of `steps` steps at the plan's delta. Beyond the
    plan's steps it is that of a longer plan. What a plan adds to epsilon for finite precision, and
    takes of delta for that and for batches that overflow, is counted once for each time that the
    plan's steps fit in, rounded up.

    | case | what happens |
    |---|---|
    | at most the plan's steps | `plan.epsilon(steps)` |
    | a cycle was begun | it counts as a whole |
    | delta does not pay for so many steps, or nothing accounts for them | infinite |
    | more than the plan's steps, and the plan is for one start (`BallsInBins`) | infinite |
    """
    if steps <= plan.steps:
        return plan.epsilon(steps)
    if plan.mechanism().is_one_start:  # each start has bins of its own
        return math.inf
    times, counted = -(-steps // plan.steps), plan.mechanism().counted(steps)
    try:
        longer = dataclasses.replace(plan, steps=counted, delta=plan.delta - times * plan.charged)
    except ValueError:
        return math.inf
    return longer.epsilon() + (times - 1) * PRECISION_EPSILON


def _kind(sampling_prob: SupportsFloat | None, sampling: Kind | None) -> Kind:
    """How batches are drawn; a ValueError unless one of the two says so, or both agree."""
    if sampling is None:
        if sampling_prob is None:
            raise ValueError(
                "sampling_prob must be a number in (0, 1], for Poisson sampling, or sampling= one "
                "of dp.sampling; found neither: None."
            )
        return Poisson(cast(float, sampling_prob))
    expect("sampling", sampling, Kind, "one of dp.sampling")
    if sampling_prob not in (None, sampling.step_prob):
        raise ValueError(
            f"sampling_prob={sampling_prob} and sampling={sampling} disagree: give one of them."
        )
    return sampling
