"""The privacy plan: sampling, sensitivity, noise and accounting that cannot disagree."""

import dataclasses
import warnings
from typing import SupportsFloat, SupportsIndex, cast

import dp_accounting
import optax
from dp_accounting import NeighboringRelation
from jaxtyping import PRNGKeyArray

from ..expected import expect, real_number, whole_number
from ..precision import JmpPolicy, Policy, checked_policy
from ..sharding import ShardingRules
from ..shown import shown
from .accounting import ROUNDING_DELTA, check_relation
from .finite_precision import (
    PRECISION_EPSILON,
    PRECISION_SHARE,
    delta_of_jax_noise,
    within_charge,
)
from .keys import Secret
from .mechanism import Mechanism
from .noise import gaussian_privatizer
from .plan_json import fields_of, written
from .sample_size import Sampling
from .sampling import OVERFLOW_PROBABILITY, Sampler
from .sampling_kinds import FixedSize, Kind, Poisson
from .sensitivity import HasSensitivity, agreed_with, checked_sensitivity
from .strategies import Banded

_MOST_STEPS = 2**53
_DELTA_WANTED = (
    "between 0 and 1, both excluded (well below 1 / number of examples to mean anything)"
)


@dataclasses.dataclass(frozen=True, init=False)
class PrivacyPlan:
    """The sampling and the noise of a training run: everything that its privacy depends on.

    A plan keeps sampling, noise and accounting consistent. `sampler` and `privatizer` take their
    numbers from it, and `epsilon` accounts for exactly those: `steps` steps, each of which draws
    examples and releases the sum of their clipped gradients plus Gaussian noise.

    `sampling_prob` stands for Poisson sampling. Another kind is `sampling=dp.sampling.BallsInBins(
    cycle=100)` in its place, and noise that is correlated over steps `noise=dp.Banded.bisr(4)`.
    Sampling and noise that nothing accounts for together are refused.

    | sampling | noise | accounted for by |
    |---|---|---|
    | `Poisson` | independent | privacy loss distributions |
    | `CyclicPoisson` | independent, `Banded` | privacy loss distributions |
    | `BallsInBins`, `MinSeparation` | independent, `Banded` | Monte Carlo; a run has one start |
    | `RandomAllocation` | independent | Monte Carlo |
    | `FixedSize`, `REPLACE_ONE` | independent | Renyi divergences |

    Privacy loss distributions are those of dp_accounting (Koskela et al. 2020; Doroshenko et al.
    2022), rounded so that epsilon is never too small. float64 may round the other way, by at most
    2^-51 of delta a step; that much is subtracted from delta first. An epsilon by Monte Carlo
    holds with confidence 1 - 1e-6 over the draws of the accounting (`accounting_confidence`).

    **Noise multiplier** is standard deviation / sensitivity. The sensitivity is `l2_norm_bound`
    of the gradients where an example is added, removed or zeroed out, and twice that where it is
    replaced by any other. dp_accounting divides by the norm bound instead, and counts for itself
    that replacement moves two gradients: `GaussianDpEvent` gets twice the noise multiplier for
    `REPLACE_ONE`. Without sampling (probability 1) one noise multiplier therefore means the same
    epsilon under every relation.

    **Guarantee.** A run of `k <= steps` steps with this plan's sampler and privatizer, whose
    randomness is fresh or a secret, is (`epsilon(k)`, `delta`)-differentially private under
    `neighboring_relation`, for the numbers that the machine adds (see `gaussian_privatizer`).
    `delta` is the total: it pays for batches that overflow, too (`overflow.md`). For finite
    precision, 5e-5 is added to epsilon, and a thousandth of delta is taken first
    (`finite_precision.md`); the privatizer refuses more entries than that covers. A run of more
    steps than `steps` is outside the plan, and `epsilon` refuses it.

    | case | what happens |
    |---|---|
    | `noise_multiplier` is 0 | epsilon is infinite (after 0 steps it is 0) |
    | `noise_multiplier` below 0.001 | epsilon is given as infinite: too large to be computed |
    | epsilon is in the tens of millions or beyond | the same |
    | `sampling_prob` is 1 | plain composition of Gaussian mechanisms |
    | epsilon is above 70 | it does not include what finite precision may cost |
    | `delta` is at most 2^-51 a step (4.4e-16) | refused: float64 cannot tell it from 0 |
    | `delta` is at least 1 / number of examples | `sampler` warns |

    Args:
        sampling_prob: Probability with which each example takes part in a step, in (0, 1].
        steps: How many steps the run may take, at least 1.
        noise_multiplier: Noise standard deviation / sensitivity, at least 0 and finite.
        delta: Total delta of the run, in (0, 1). Choose it well below 1 / number of examples.
        neighboring_relation: Which data sets are neighbors: `ADD_OR_REMOVE_ONE`, `REPLACE_ONE`,
            or `REPLACE_SPECIAL` (an example is zeroed out).
        sampling: How batches are drawn, one of `dp.sampling`, in place of `sampling_prob` (which
            is then the probability that a given example is in a given step).
        noise: How noise is correlated over steps, a `dp.Banded`; None: independent.

    Raises:
        ValueError: If a number has the wrong type or is out of its range, the relation is none of
            the three, `delta` is too small for that many steps, or nothing accounts for sampling
            and noise together.
    """

    sampling_prob: float
    steps: int
    noise_multiplier: float
    delta: float
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    sampling: Kind = dataclasses.field(kw_only=True)
    noise: Banded | None = dataclasses.field(default=None, kw_only=True)

    # Written out for its types: any number is accepted, floats and ints are stored.
    def __init__(
        self,
        sampling_prob: SupportsFloat | None = None,
        steps: SupportsIndex = 0,
        noise_multiplier: SupportsFloat = -1,
        delta: SupportsFloat = 0,
        neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
        *,
        sampling: Kind | None = None,
        noise: Banded | None = None,
    ):
        check_relation(neighboring_relation)
        kind = _kind(sampling_prob, sampling)
        if noise is not None:
            expect("noise", noise, Banded, "a dp.Banded, or None for independent noise")
        checked = {
            "sampling_prob": kind.step_prob,
            "steps": whole_number("steps", steps, least=1, most=_MOST_STEPS),
            "noise_multiplier": real_number(
                "noise_multiplier", noise_multiplier, lambda real: real >= 0, "at least 0"
            ),
            "delta": real_number("delta", delta, lambda real: 0 < real < 1, _DELTA_WANTED),
            "neighboring_relation": neighboring_relation,
            "sampling": kind,
            "noise": noise,
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        self._mechanism(self.steps).check()
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
        steps: SupportsIndex,
        sampling_prob: SupportsFloat | None = None,
        neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
        sampling: Kind | None = None,
        noise: Banded | None = None,
    ) -> "PrivacyPlan":
        """Finds the plan with the least noise that stays within a privacy budget.

        Args:
            epsilon: The budget: `plan.epsilon()` is at most this.
            delta: As for the plan.
            steps: As for the plan.
            sampling_prob: As for the plan.
            neighboring_relation: As for the plan.
            sampling: As for the plan.
            noise: As for the plan.

        Returns:
            The plan. Its noise multiplier is at most 1.0002 times the least that keeps to the
            budget; 1.01 times where delta is less than some 10 times what float64 may lose of it,
            and 1.001 times where epsilon is no privacy loss distribution's.

        Raises:
            ValueError: If epsilon is not a finite number above 0, another argument is refused as
                for the plan itself, the budget cannot be met, or hardly any noise meets it.
        """
        budget = real_number("epsilon", epsilon, lambda real: real > 0, "greater than 0")
        draft = cls(
            sampling_prob, steps, 1.0, delta, neighboring_relation, sampling=sampling, noise=noise
        )
        left = draft._delta_left(draft.steps)
        if budget <= PRECISION_EPSILON:
            raise ValueError(
                f"epsilon {budget:g} is out of reach: finite precision alone is charged "
                f"{PRECISION_EPSILON:g}. Take a larger epsilon."
            )
        multiplier = draft._mechanism(draft.steps).least_noise(left, budget)
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
        found = self._mechanism(taken).epsilon(self.noise_multiplier, self._delta_left(taken))
        return found + PRECISION_EPSILON if taken else 0.0

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
        return self._mechanism(self._steps_taken(steps)).event(self.noise_multiplier)

    @property
    def charged(self) -> float:
        """The part of delta that overflow, finite precision and float64 accounting may cost."""
        rounding = self.steps * ROUNDING_DELTA
        return self.delta - self._delta_left(self.steps) + rounding

    @property
    def discretization(self) -> float:
        """The width of the intervals in which dp_accounting should count privacy losses."""
        return self._mechanism(self.steps).discretization(self.noise_multiplier)

    @property
    def accounting_confidence(self) -> float:
        """The confidence in `epsilon`: 1, or 1 - 1e-6 where Monte Carlo accounts for the plan."""
        return self._mechanism(self.steps).confidence

    @property
    def is_one_start(self) -> bool:
        """Whether all steps must be taken by one start.

        Accounting for `BallsInBins` and `MinSeparation` knows a run of one start alone: each start
        draws the bins of examples anew.
        """
        return self._mechanism(self.steps).is_one_start

    def counted(self, steps: int) -> int:
        """The steps that a start of so many counts for: whole cycles, where sampling has cycles."""
        cycle = self._mechanism(self.steps).cycle
        return -(-steps // cycle) * cycle

    def draws_as(self, sampler: Sampler) -> bool:
        """Whether a sampler draws the batches that this plan accounts for."""
        own = (self.sampling, self._overflow_probability)
        return own == (sampler.kind, sampler.overflow_probability)

    @property
    def batches(self) -> Sampling:
        """How many examples batches hold, for `grad_fn.of_samples`."""
        probability = 1.0 if isinstance(self.sampling, FixedSize) else self.sampling_prob
        return Sampling(probability, self._overflow_probability)

    @property
    def _overflow_probability(self) -> float:
        """An upper bound tau on the probability that a batch is cut; the sampler keeps to it.

        It is a thousandth of delta over all steps, and at most 1e-12 a step.
        """
        return min(OVERFLOW_PROBABILITY, self.delta / self.steps / 1000)

    def _overflow_delta(self, steps: SupportsIndex | None = None) -> float:
        """The part of delta that pays for batches cut to their capacity.

        It is tau = `_overflow_probability` a step: at most a thousandth of delta in all. Accounting
        knows sampling without a cut. If k steps without a cut are (epsilon, delta)-differentially
        private, k steps with it are (epsilon, delta + k tau)-differentially private; `overflow.md`
        beside this module has the proof.

        Args:
            steps: As for `epsilon`.

        Returns:
            steps x tau.

        Raises:
            ValueError: As for `epsilon`.
        """
        return self._steps_taken(steps) * self._overflow_probability

    def sampler(
        self,
        num_examples: SupportsIndex,
        *,
        seed: Secret | None = None,
        pad_to: SupportsIndex = 1,
        hosts: SupportsIndex = 1,
        host: SupportsIndex = 0,
        devices: SupportsIndex = 1,
        shared: bool = False,
    ) -> Sampler:
        """The sampler that draws this plan's batches, or one host's part of them.

        Epsilon is the same for any number of hosts. Without a seed the sampler draws fresh
        randomness: two samplers draw independent batches.

        Args:
            num_examples: How many examples the data set holds (on all hosts together).
            seed: None for 256 fresh bits of the operating system, the same on every host. Or a
                secret, to repeat an experiment: a number of any size or bytes, the same on every
                host; see `PoissonSampler`.
            pad_to: Batches have a multiple of this many slots (on each host).
            hosts: How many hosts draw, `jax.process_count()`.
            host: The index of this host, `jax.process_index()`.
            devices: How many devices of a host share its batch; examples are dealt out to them.
            shared: Whether every host can read every example; examples are then dealt out to hosts.

        Returns:
            A `Sampler` with the plan's `sampling` and `overflow_probability`. It raises
            an error for steps beyond the plan's.

        Raises:
            ValueError: As for `PoissonSampler`.

        Warns:
            UserWarning: If `delta` is at least 1 / `num_examples`.
        """
        sampler = Sampler(
            num_examples,
            self.sampling,
            seed=seed,
            pad_to=pad_to,
            steps=self.steps,
            hosts=hosts,
            host=host,
            overflow_probability=self._overflow_probability,
            devices=devices,
            shared=shared,
        )
        _warn_of_large_delta(self.delta, sampler.num_examples)
        return sampler

    def privatizer(
        self,
        grad_fn: HasSensitivity,
        key: PRNGKeyArray | Secret | None = None,
        policy: Policy | JmpPolicy | None = None,
        sharding: ShardingRules | None = None,
        certified: bool = True,
    ) -> optax.GradientTransformation:
        """The noise that this plan accounts for, for the gradients of one function.

        Without a key every `init` draws fresh randomness from the operating system, so that no two
        runs have the same noise.

        `grad_fn` stays as it is. If the plan samples (`sampling_prob` below 1), calls of it need
        `is_padding_example`: the sampler's padding has index -1, so without the mask the last
        example would count in every padding slot. `check_privacy` reports a step without the mask.
        A step of `make_step` refuses a call without it, and so does the function that
        `grad_fn.of_samples(plan.sampling)` returns.

        Args:
            grad_fn: What `filter_clipped_grad` or `filter_value_and_clipped_grad` returned.
            key: None for fresh randomness. Or a secret, to repeat an experiment: a number of any
                size, bytes, or one JAX key; see `gaussian_privatizer`.
            policy: As for `gaussian_privatizer`; by default the one that `grad_fn` was made with.
            sharding: As for `gaussian_privatizer`; by default the rules that `grad_fn` was made
                with.
            certified: As for `gaussian_privatizer`. If not, `uncertified_delta` bounds the true
                delta.

        Returns:
            A `gaussian_privatizer` of standard deviation noise_multiplier x sensitivity. `init` and
            `update` refuse more entries than the plan has paid for. (If one privatizer serves
            several groups of leaves, each group is counted separately.)

        Raises:
            ValueError: If `grad_fn` is no such function, or was made with another policy or other
                sharding rules; if the sensitivity is not finite, or differs from the one that the
                norm bound implies under the plan's neighboring relation; and as for
                `gaussian_privatizer`.
        """
        if not isinstance(cast(object, grad_fn), HasSensitivity):
            raise ValueError(
                "grad_fn must be what filter_clipped_grad or filter_value_and_clipped_grad "
                "returned, before it is wrapped in jit or anything else: a wrapped function does "
                f"not tell its sensitivity; found a {type(grad_fn).__name__}."
            )
        policy = agreed_with(grad_fn, "policy", checked_policy(policy))
        sharding = agreed_with(grad_fn, "sharding", sharding)
        stddev = self.noise_multiplier * checked_sensitivity(grad_fn, self.neighboring_relation)
        privatizer = gaussian_privatizer(
            stddev=stddev,
            key=key,
            policy=policy,
            sharding=sharding,
            certified=certified,
            correlation=self.noise,
        )
        if not certified or stddev == 0:
            return privatizer
        growth = 1.0 if self.noise is None else self.noise.error_growth(self.steps)
        return within_charge(privatizer, self.steps, self.delta, growth)

    def uncertified_delta(self, entries: SupportsIndex = 1) -> float:
        """A lower bound on the true delta, for every epsilon, if noise is not certified.

        Args:
            entries: The entries that an example's gradient is spread over, at most those trained.

        Returns:
            The probability that some output proves that the example is there: float32 normals of
            JAX never exceed 5.22.
        """
        return delta_of_jax_noise(self.sampling_prob, self.steps, self.noise_multiplier, entries)

    def to_json(self) -> str:
        """Writes the plan as JSON; `from_json` reads an equal plan from it."""
        return written(
            {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        )

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
        return cls(**fields_of(text))

    def _delta_left(self, steps: int) -> float:
        """What is left of delta for accounting."""
        return self.delta * (1 - PRECISION_SHARE) - self._overflow_delta(steps)

    def _mechanism(self, steps: int) -> Mechanism:
        return Mechanism(self.sampling, self.noise, steps, self.neighboring_relation)

    def _steps_taken(self, steps: SupportsIndex | None) -> int:
        if steps is None:
            return self.steps
        return whole_number(
            "steps",
            steps,
            least=0,
            most=self.steps,
            advice=" For a longer run make a new plan, before the run starts.",
        )


def _kind(sampling_prob: SupportsFloat | None, sampling: Kind | None) -> Kind:
    """How batches are drawn; a ValueError unless one of the two says so, or both agree."""
    if sampling is None:
        if sampling_prob is None:
            raise ValueError(
                "a plan needs to know how batches are drawn: sampling_prob=0.01 for Poisson "
                "sampling, or sampling=, one of dp.sampling."
            )
        return Poisson(sampling_prob)
    if not isinstance(cast(object, sampling), Kind):
        raise ValueError(f"sampling must be one of dp.sampling; found {shown(sampling)}.")
    if sampling_prob not in (None, sampling.step_prob):
        raise ValueError(
            f"sampling_prob={sampling_prob} and sampling={sampling} disagree: give one of them."
        )
    return sampling


def _warn_of_large_delta(delta: float, num_examples: int) -> None:
    if delta < 1 / num_examples:
        return
    # The warning names this line, not the caller's: Python shows a warning of one line once, so the
    # samplers of one run (`make_step` makes some) do not repeat it.
    warnings.warn(
        f"delta is {delta:g}, and 1 / num_examples is {1 / num_examples:g} ({num_examples} "
        "examples): such a delta allows a program to publish one example at random, in full. Make "
        "a plan with a delta well below 1 / num_examples.",
        stacklevel=1,
    )
