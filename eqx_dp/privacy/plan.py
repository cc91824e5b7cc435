"""The privacy plan: sampling, sensitivity, noise and accounting that cannot disagree."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable
from typing import (
    Any,
    Protocol,
    SupportsFloat,
    SupportsIndex,
    TypeVar,
    cast,
    runtime_checkable,
)

import dp_accounting
import optax
from dp_accounting import NeighboringRelation
from dp_accounting.pld import PLDAccountant
from jaxtyping import PRNGKeyArray

from ..precision import Policy
from ..sharding import ShardingRules
from ..shown import shown
from .arguments import real_number, sampling_probability, whole_number
from .noise import gaussian_privatizer
from .sampling import OVERFLOW_PROBABILITY, PoissonSampler

# How far one example can move a sum of gradients that are each at most 1 in norm.
_SENSITIVITY_OF_UNIT_NORM = {
    NeighboringRelation.ADD_OR_REMOVE_ONE: 1.0,
    NeighboringRelation.REPLACE_ONE: 2.0,
    NeighboringRelation.REPLACE_SPECIAL: 1.0,
}

_JSON_FORMAT = "eqx_dp.PrivacyPlan"
_JSON_VERSION = 1

_MOST_STEPS = 2**53

T = TypeVar("T")


@runtime_checkable
class ClippedSum(Protocol):
    """What a plan has to know of a function that `filter_clipped_grad` gives."""

    @property
    def l2_norm_bound(self) -> float:
        """The most that one example contributes to the sum, in L2 norm."""
        ...

    def sensitivity(self, neighboring_relation: NeighboringRelation) -> float:
        """The most that the sum changes, in L2 norm, between neighboring data sets."""
        ...


@dataclasses.dataclass(frozen=True, init=False)
class PrivacyPlan:
    """How a training run samples and how much noise it adds: all that its privacy depends on.

    A plan decides once what has to agree everywhere. `sampler` and `privatizer` take their numbers
    from it, and `epsilon` accounts for exactly those: `steps` steps, each of which draws examples
    by Poisson sampling and releases the sum of their clipped gradients plus Gaussian noise. All
    accounting is that of dp_accounting, by privacy loss distributions (Koskela et al. 2020;
    Doroshenko et al. 2022), rounded so that epsilon is never too small.

    **Noise multiplier** is standard deviation / sensitivity. The sensitivity is `l2_norm_bound`
    of the gradients where an example is added, removed or zeroed out, and twice that where it is
    replaced by any other. dp_accounting always divides by the norm bound, and counts for itself
    that replacement moves two gradients; so `GaussianDpEvent` gets twice the noise multiplier for
    `REPLACE_ONE`. Without sampling (probability 1) one noise multiplier therefore means one and
    the same epsilon under every relation.

    **Guarantee.** A run of `k <= steps` steps with this plan's sampler and privatizer, the seed and
    key being secret, is (`epsilon(k)`, `delta`)-differentially private under
    `neighboring_relation`, up to what finite precision falls short of (see `gaussian_privatizer`).
    `delta` is the total: batches that overflow are paid for out of it (`overflow_delta`). A run of
    more steps than `steps` is outside the plan, and `epsilon` refuses to speak of it.

    | case | what happens |
    |---|---|
    | `noise_multiplier` is 0 | epsilon is infinite (after 0 steps it is 0) |
    | `noise_multiplier` below 0.001 | epsilon is given as infinite: too large to be computed |
    | `sampling_prob` is 1 | plain composition of Gaussian mechanisms |
    | overflow would use up `delta` | refused |

    Args:
        sampling_prob: Probability with which each example takes part in a step, in (0, 1].
        steps: How many steps the run may take, at least 1.
        noise_multiplier: Noise standard deviation / sensitivity, at least 0 and finite.
        delta: Total delta of the whole run, in (0, 1); to be well below 1 / number of examples.
        neighboring_relation: Which data sets are neighbors: `ADD_OR_REMOVE_ONE`, `REPLACE_ONE`,
            or `REPLACE_SPECIAL` (an example is zeroed out).

    Raises:
        ValueError: If a number is not of its kind or out of its range, the relation is none of the
            three, or `steps` overflows may together have a probability of `delta` or more.
    """

    sampling_prob: float
    steps: int
    noise_multiplier: float
    delta: float
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE

    # By hand, for the sake of its types: any number is accepted, floats and ints are stored.
    def __init__(
        self,
        sampling_prob: SupportsFloat,
        steps: SupportsIndex,
        noise_multiplier: SupportsFloat,
        delta: SupportsFloat,
        neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
    ):
        _check_relation(neighboring_relation)
        checked = {
            "sampling_prob": sampling_probability(sampling_prob),
            "steps": whole_number("steps", steps, least=1, most=_MOST_STEPS),
            "noise_multiplier": _checked_noise_multiplier(noise_multiplier),
            "delta": _checked_delta(delta),
            "neighboring_relation": neighboring_relation,
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.overflow_delta() >= self.delta:
            raise ValueError(
                f"delta must exceed {self.overflow_delta():g}, the probability that in {self.steps}"
                f" steps some batch overflows ({OVERFLOW_PROBABILITY:g} a step); found "
                f"{self.delta:g}. Take a larger delta or fewer steps."
            )

    @classmethod
    def calibrate(
        cls,
        *,
        epsilon: SupportsFloat,
        delta: SupportsFloat,
        sampling_prob: SupportsFloat,
        steps: SupportsIndex,
        neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
    ) -> "PrivacyPlan":
        """Finds the plan with the least noise that keeps to a privacy budget.

        Args:
            epsilon: The budget, which `plan.epsilon()` does not exceed.
            delta: As for the plan.
            sampling_prob: As for the plan.
            steps: As for the plan.
            neighboring_relation: As for the plan.

        Returns:
            The plan, with a noise multiplier within a factor of 1.0002 of the least that does.

        Raises:
            ValueError: If epsilon is not a finite number above 0, another argument is refused as
                for the plan itself, or the budget is out of reach or is met by hardly any noise.
        """
        budget = real_number("epsilon", epsilon)
        if budget <= 0:
            raise ValueError(f"epsilon must be greater than 0; found {budget}.")
        draft = cls(sampling_prob, steps, 1.0, delta, neighboring_relation)
        return dataclasses.replace(draft, noise_multiplier=_least_noise(draft, budget))

    def epsilon(self, steps: SupportsIndex | None = None) -> float:
        """Epsilon of the first steps of the run, at the plan's delta.

        Depends on the plan alone, not on data: it is public and may be shown while training.

        Args:
            steps: How many steps have been taken, from 0 to the plan's `steps`; None for them all.

        Returns:
            Epsilon: 0 for no steps, infinite without noise.

        Raises:
            ValueError: If `steps` is no such number.
        """
        taken = self._steps_taken(steps)
        if taken == 0:
            return 0.0
        return _epsilon(
            self.sampling_prob,
            taken,
            self.noise_multiplier,
            self.delta - self.overflow_delta(taken),
            self.neighboring_relation,
        )

    def event(self, steps: SupportsIndex | None = None) -> dp_accounting.DpEvent:
        """What `epsilon` accounts for, in dp_accounting's terms (overflow is not part of it).

        Args:
            steps: As for `epsilon`.

        Returns:
            An event for any of dp_accounting's accountants under the plan's neighboring relation.

        Raises:
            ValueError: As for `epsilon`.
        """
        return _event(
            self.sampling_prob,
            self._steps_taken(steps),
            self.noise_multiplier,
            self.neighboring_relation,
        )

    def overflow_delta(self, steps: SupportsIndex | None = None) -> float:
        """The part of delta that pays for batches cut to their capacity: tau = 1e-12 a step.

        Accounting knows Poisson sampling without a cut. Why tau a step makes up for the cut:

        Let P and Q be the releases of one step for neighboring data sets, x the example in which
        they differ (absent, replaced or zeroed out on the other side), and B the draw from all the
        others, the same on both sides. From P, of total mass 1, take away every B that does not fit
        both batches, and the fraction q = `sampling_prob` of every B that fits but leaves no room
        for x. With a capacity of c on both sides this is Pr(|B| > c) + q Pr(|B| = c): the
        probability that a batch with x overflows, so at most tau. (Adding an example may raise the
        capacity from c to c' > c; but then every B that fits c leaves room for x in c', and only
        Pr(|B| > c) is taken away: at most tau, too.)

        What is left of P is no worse, at every order of the hockey-stick divergence, than the
        mechanism without a cut, held against the part of Q that comes from the same B. Where B has
        room for x, both sides are just what that mechanism releases given B. Where it has none, P
        keeps 1 - q of one Gaussian, and Q holds at least as much of the same one: nothing is told.
        Mixing over B makes it no worse, since the divergence is jointly convex; nor does the rest
        of Q, which only lowers the divergence. Mass is taken from P alone, and that is why no
        factor of e^epsilon appears. What is kept of a batch that is cut, and how that is chosen,
        never enters: all cuts are in what is taken from P, or in the rest of Q.

        On several hosts a draw fits if every host has room for its part of it, and leaves room for
        x if the host that owns x has room for one more; all else above stands as it is. Where x is
        replaced or zeroed out, hosts own the same examples on both sides, and once more the
        probability that a batch with x overflows is taken away. Where x is absent on one side, the
        borders between hosts lie elsewhere there, and a draw from the others may fit either side
        and not the other. What is taken away is then at most the probability that a batch overflows
        on the one side plus that on the other; capacities on several hosts leave each of the two no
        more than tau / 2, by the union bound over hosts (`PoissonSampler`).

        Such measures of mass below 1 compose adaptively as distributions do (Zhu et al. 2022,
        theorem 10, whose proof does not need total mass 1). From k steps of P at most k tau is
        taken away, and delta bears it.

        Args:
            steps: As for `epsilon`.

        Returns:
            steps x 1e-12.

        Raises:
            ValueError: As for `epsilon`.
        """
        return self._steps_taken(steps) * OVERFLOW_PROBABILITY

    def sampler(
        self,
        num_examples: SupportsIndex,
        seed: SupportsIndex,
        pad_to: SupportsIndex = 1,
        hosts: SupportsIndex = 1,
        host: SupportsIndex = 0,
    ) -> PoissonSampler:
        """The sampler that draws this plan's batches, or one host's part of them.

        Epsilon is the same for any number of hosts.

        Args:
            num_examples: How many examples the data set holds (on all hosts together).
            seed: Secret, and the same on every host; see `PoissonSampler`.
            pad_to: Batches have a multiple of this many places (on each host).
            hosts: How many hosts draw, `jax.process_count()`.
            host: Which of them this one is, `jax.process_index()`.

        Returns:
            A `PoissonSampler` with the plan's `sampling_prob`, which refuses steps beyond the
            plan's.

        Raises:
            ValueError: As for `PoissonSampler`.
        """
        return PoissonSampler(
            num_examples=num_examples,
            sampling_prob=self.sampling_prob,
            seed=seed,
            pad_to=pad_to,
            steps=self.steps,
            hosts=hosts,
            host=host,
        )

    def privatizer(
        self,
        grad_fn: ClippedSum,
        key: PRNGKeyArray,
        policy: Policy | None = None,
        sharding: ShardingRules | None = None,
    ) -> optax.GradientTransformation:
        """The noise that this plan accounts for, for the gradients of one function.

        Args:
            grad_fn: What `filter_clipped_grad` or `filter_value_and_clipped_grad` returned.
            key: One key, secret; see `gaussian_privatizer`.
            policy: As for `gaussian_privatizer`; by default the one that `grad_fn` was made with.
            sharding: As for `gaussian_privatizer`; by default the rules that `grad_fn` was made
                with.

        Returns:
            A `gaussian_privatizer` of standard deviation noise_multiplier x sensitivity.

        Raises:
            ValueError: If `grad_fn` is no such function, or was made with another policy or other
                sharding rules; if the sensitivity is not finite, or not what the norm bound
                implies under the plan's neighboring relation; and as for `gaussian_privatizer`.
        """
        if not isinstance(cast(object, grad_fn), ClippedSum):
            raise ValueError(
                "grad_fn must be what filter_clipped_grad or filter_value_and_clipped_grad "
                "returned, before it is wrapped in jit or anything else: only that knows its "
                f"sensitivity; found {shown(grad_fn)}."
            )
        policy = _agreed(grad_fn, "policy", policy)
        sharding = _agreed(grad_fn, "sharding", sharding)
        stddev = self.noise_multiplier * _checked_sensitivity(grad_fn, self.neighboring_relation)
        return gaussian_privatizer(stddev=stddev, key=key, policy=policy, sharding=sharding)

    def to_json(self) -> str:
        """Writes the plan as JSON, from which `from_json` gives an equal plan back."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["neighboring_relation"] = self.neighboring_relation.name
        return json.dumps({"format": _JSON_FORMAT, "version": _JSON_VERSION} | fields, indent=2)

    @classmethod
    def from_json(cls, text: str) -> "PrivacyPlan":
        """Reads a plan that `to_json` wrote.

        Args:
            text: JSON.

        Returns:
            The plan.

        Raises:
            ValueError: If the text is not JSON of this format and version, a key is unknown,
                missing or there twice, or a value is refused as for the plan itself.
        """
        return cls(**_fields_of_json(text, [field.name for field in dataclasses.fields(cls)]))

    def _steps_taken(self, steps: SupportsIndex | None) -> int:
        if steps is None:
            return self.steps
        taken = whole_number("steps", steps, least=0, most=_MOST_STEPS)
        if taken > self.steps:
            raise ValueError(
                f"steps must be at most {self.steps}, for which the plan was made; found {taken}. "
                "For a longer run make a new plan, before the run starts."
            )
        return taken


# Accounting: what dp_accounting is asked, and how finely.


def _event(
    sampling_prob: float, steps: int, noise_multiplier: float, relation: NeighboringRelation
) -> dp_accounting.DpEvent:
    if steps == 0:
        return dp_accounting.NoOpDpEvent()
    per_norm_bound = noise_multiplier * _SENSITIVITY_OF_UNIT_NORM[relation]
    event: dp_accounting.DpEvent = dp_accounting.GaussianDpEvent(per_norm_bound)
    if sampling_prob < 1:
        event = dp_accounting.PoissonSampledDpEvent(sampling_prob, event)
    return dp_accounting.SelfComposedDpEvent(event, steps)


# Privacy loss grows with the inverse square of the noise: below this it leaves the range of floats.
_LEAST_ACCOUNTED_NOISE = 1e-3


# A progress bar asks for the same figure at every refresh.
@functools.lru_cache(maxsize=4096)
def _epsilon(
    sampling_prob: float,
    steps: int,
    noise_multiplier: float,
    delta: float,
    relation: NeighboringRelation,
) -> float:
    if noise_multiplier < _LEAST_ACCOUNTED_NOISE:
        return math.inf
    interval = _discretization(sampling_prob, steps, noise_multiplier)
    accountant = PLDAccountant(relation, value_discretization_interval=interval)
    accountant.compose(_event(sampling_prob, steps, noise_multiplier, relation))
    return float(accountant.get_epsilon(delta))


def _discretization(sampling_prob: float, steps: int, noise_multiplier: float) -> float:
    """How finely privacy losses are told apart; any value gives a true bound.

    dp_accounting's own 1e-4 is kept wherever epsilon is of use. Its work grows with the range of
    losses, though: that of one mechanism (about 1 / noise_multiplier^2) and that of the whole run.
    Where those run into the hundreds, epsilon does too, and the interval grows along.
    """
    # Without sampling, all steps are accounted for as one Gaussian mechanism of less noise.
    of_one = (1 if sampling_prob < 1 else steps) / noise_multiplier**2
    of_all = steps * sampling_prob**2 / noise_multiplier**2
    return 1e-4 * max(1.0, of_one / 10, of_all / 1000)


# Calibration.

_MOST_NOISE = 1e15
# Relative to the noise multiplier.
_CALIBRATION_TOLERANCE = 1e-4


def _least_noise(draft: PrivacyPlan, budget: float) -> float:
    """The least noise multiplier, to 1e-4 of it, that keeps the draft's run within the budget."""
    q, steps, relation = draft.sampling_prob, draft.steps, draft.neighboring_relation
    delta = draft.delta - draft.overflow_delta()

    def epsilon_at(noise_multiplier: float) -> float:
        return _epsilon(q, steps, noise_multiplier, delta, relation)

    # What the textbook bound asks for (Dwork and Roth 2014, appendix A) if sampling scaled it by q.
    guess = q * math.sqrt(steps) * math.sqrt(2 * math.log(1.25 / delta)) / budget
    enough = _enough_noise(epsilon_at, max(1.0, guess), budget)
    little = max(enough / 2, _LEAST_ACCOUNTED_NOISE)
    interval = _discretization(q, steps, little)
    # Searched on a logarithmic scale, where one tolerance suits large and small noise alike.
    log_noise = dp_accounting.calibrate_dp_mechanism(
        lambda: PLDAccountant(relation, value_discretization_interval=interval),
        lambda log_noise: _event(q, steps, math.exp(log_noise), relation),
        budget,
        delta,
        dp_accounting.ExplicitBracketInterval(math.log(little), math.log(enough)),
        tol=_CALIBRATION_TOLERANCE,
    )
    noise_multiplier = math.exp(log_noise)
    # The search and the plan may discretize a little differently, and the plan's word counts.
    while epsilon_at(noise_multiplier) > budget:
        noise_multiplier *= 1 + _CALIBRATION_TOLERANCE
    return noise_multiplier


def _enough_noise(epsilon_at: Callable[[float], float], guess: float, budget: float) -> float:
    """A noise multiplier that meets the budget and half of which does not.

    Searched from where epsilon is moderate: accounting for very little noise is slow.
    """
    noise_multiplier = guess
    while epsilon_at(noise_multiplier) > budget:
        noise_multiplier *= 2
        if noise_multiplier > _MOST_NOISE:
            raise ValueError(
                f"epsilon {budget:g} is out of reach: a noise multiplier of {_MOST_NOISE:g} does "
                "not meet it. Take a larger epsilon or delta, or fewer steps."
            )
    while epsilon_at(noise_multiplier / 2) <= budget:
        noise_multiplier /= 2
        if epsilon_at(_LEAST_ACCOUNTED_NOISE) <= budget:
            raise ValueError(
                f"epsilon {budget:g} is met with hardly any noise (a noise multiplier of "
                f"{_LEAST_ACCOUNTED_NOISE:g}), which protects no one: epsilon is too large, or "
                "delta not well below steps x sampling_prob. Ask for less, or give "
                "noise_multiplier yourself."
            )
    return noise_multiplier


# The numbers of a plan.


def _checked_noise_multiplier(value: object) -> float:
    noise_multiplier = real_number("noise_multiplier", value)
    if noise_multiplier < 0:
        raise ValueError(f"noise_multiplier must be at least 0; found {noise_multiplier}.")
    return noise_multiplier


def _checked_delta(value: object) -> float:
    delta = real_number("delta", value)
    if not 0 < delta < 1:
        raise ValueError(
            "delta must be between 0 and 1, both excluded (well below 1 / number of examples to "
            f"mean anything); found {delta}."
        )
    return delta


def _check_relation(relation: object) -> None:
    if not isinstance(relation, NeighboringRelation):
        raise ValueError(
            "neighboring_relation must be one of "
            f"{', '.join(f'NeighboringRelation.{known.name}' for known in NeighboringRelation)}; "
            f"found {relation!r}."
        )


def _agreed(grad_fn: ClippedSum, name: str, given: T | None) -> T | None:
    """What `grad_fn` was made with under a name, unless something else is given."""
    own: T | None = getattr(grad_fn, name, None)
    if own is not None and given is not None and own != given:
        raise ValueError(
            f"grad_fn was made with {name}={own}, and the noise is to follow {given}. Leave "
            f"{name} out, or give both the same."
        )
    return own if given is None else given


def _checked_sensitivity(grad_fn: ClippedSum, relation: NeighboringRelation) -> float:
    sensitivity = float(grad_fn.sensitivity(relation))
    if not (math.isfinite(sensitivity) and sensitivity >= 0):
        raise ValueError(
            f"the gradients' sensitivity must be finite to be hidden by noise; found {sensitivity} "
            f"for {relation.name}. Without a finite clip norm one example can change the sum "
            "without limit: set l2_clip_norm."
        )
    # The event that is accounted for takes this ratio for granted.
    implied = _SENSITIVITY_OF_UNIT_NORM[relation] * grad_fn.l2_norm_bound
    if not math.isclose(sensitivity, implied, rel_tol=1e-9):
        raise ValueError(
            f"the gradients' sensitivity for {relation.name} must be {implied}, from their "
            f"l2_norm_bound of {grad_fn.l2_norm_bound}; found {sensitivity}. The plan's accounting "
            "would not hold for it."
        )
    return sensitivity


# JSON.


def _fields_of_json(text: str, names: list[str]) -> dict[str, Any]:
    fields = _json_object(text)
    if fields.pop("format", None) != _JSON_FORMAT:
        raise ValueError(f'a plan in JSON must say "format": "{_JSON_FORMAT}"; this does not.')
    version = fields.pop("version", None)
    if isinstance(version, bool) or version != _JSON_VERSION:
        raise ValueError(
            f"this release reads version {_JSON_VERSION} of a plan in JSON; found {version!r}."
        )
    for problem, keys in (("unknown", fields.keys() - names), ("missing", names - fields.keys())):
        if keys:
            raise ValueError(
                f"{problem} in a plan in JSON: {', '.join(sorted(keys))}; its keys are "
                f"format, version, {', '.join(names)}."
            )
    relation = fields["neighboring_relation"]
    known = NeighboringRelation.__members__
    if not isinstance(relation, str) or relation not in known:
        raise ValueError(
            f"neighboring_relation must be one of {', '.join(known)}; found {relation!r}."
        )
    return fields | {"neighboring_relation": known[relation]}


def _json_object(text: str) -> dict[str, Any]:
    def without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twins = sorted({key for key in keys if keys.count(key) > 1})
        if twins:
            raise ValueError(f"there more than once in a plan in JSON: {', '.join(twins)}.")
        return dict(pairs)

    try:
        found = json.loads(text, object_pairs_hook=without_twins)
    except json.JSONDecodeError as error:
        raise ValueError(f"a plan must be JSON, as to_json writes it; {error}.") from error
    if not isinstance(found, dict):
        raise ValueError(f"a plan in JSON must be an object; found {type(found).__name__}.")
    return cast(dict[str, Any], found)
