"""The privacy plan: sampling, sensitivity, noise and accounting that cannot disagree."""

import dataclasses
import functools
import warnings
from typing import SupportsIndex, cast

import optax
from jaxtyping import PRNGKeyArray

from ..precision import JmpPolicy, Policy, checked_policy
from ..sharding import ShardingRules
from .accounted_plan import AccountedPlan
from .accounting import HasSensitivity, agreed_with, checked_sensitivity
from .finite_precision import within_charge
from .keys import Secret
from .noise import gaussian_privatizer
from .sample_size import Sampling
from .sampling import Sampler
from .sampling_kinds import CyclicPoisson, FixedSize


@dataclasses.dataclass(frozen=True, init=False)
class PrivacyPlan(AccountedPlan):
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
    | `RandomAllocation` | independent | the distribution of a cycle (arXiv 2602.17284), composed |
    | `BallsInBins` | independent | the same, of one cycle of less noise |
    | `BallsInBins` | `Banded` | two distributions that cost more; a run has one start |
    | `FixedSize`, `REPLACE_ONE` | independent | the amplified Gaussian mechanism, composed |

    Privacy loss distributions are those of dp_accounting (Koskela et al. 2020; Doroshenko et al.
    2022), rounded so that epsilon is never too small. float64 may round the other way, by at most
    2^-51 of delta a step; that much is subtracted from delta first.

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

    Attributes:
        sampling_prob: Probability with which each example takes part in a step, in (0, 1].
        steps: How many steps the run may take, from 1 to 2^32 - 1: noise has a counter of 32 bits.
        noise_multiplier: Noise standard deviation / sensitivity, from 0 to 1e150.
        delta: Total delta of the run, in (0, 1). Choose it well below 1 / number of examples.
        neighboring_relation: Which data sets are neighbors: `ADD_OR_REMOVE_ONE`, `REPLACE_ONE`,
            or `REPLACE_SPECIAL` (an example is zeroed out).
        sampling: How batches are drawn, one of `dp.sampling`, in place of `sampling_prob` (which
            is then the probability that a given example is in a given step).
        noise: How noise is correlated over steps, a `dp.Banded`; None: independent.
        unit: `dp.Users(...)` to protect all rows of a user together; None: each example alone.
            `num_examples` is then everywhere the number of users.

    Raises:
        ValueError: If a number has the wrong type or is out of its range, the relation is none of
            the three, `delta` is too small for that many steps, or nothing accounts for sampling
            and noise together.
    """

    def draws_as(self, sampler: Sampler) -> bool:
        """Whether a sampler draws the batches that this plan accounts for."""
        own = (self.sampling, self._overflow_probability, self.steps)
        drawn = (sampler.kind, sampler.overflow_probability, sampler.steps or self.steps)
        users = None if self.unit is None else self.unit.num_users
        return own == drawn and users in (None, sampler.num_examples)

    @property
    def batches(self) -> Sampling:
        """How many examples batches hold, for `grad_fn.of_samples`."""
        probability = 1.0 if isinstance(self.sampling, FixedSize) else self.sampling_prob
        return Sampling(probability, self._overflow_probability)

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
            UserWarning: If `delta` is at least 1 / `num_examples`; or C of `noise` has more bands
                than the cycle of `CyclicPoisson`, and examples are left out without amplification.
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
        users = sampler.num_examples if self.unit is None else self.unit.num_users
        if users not in (None, sampler.num_examples):
            raise ValueError(
                f"num_examples must be the number of users, {users}: the plan's unit is users. "
                f"Found {sampler.num_examples}."
            )
        if self.delta >= 1 / sampler.num_examples:
            _warn_of_delta(self.delta, sampler.num_examples)
        bands, cycle = len(self.mechanism().column()), getattr(self.sampling, "cycle", 1)
        is_left_out = isinstance(self.sampling, CyclicPoisson) and self.sampling.sampling_prob < 1
        if is_left_out and bands > cycle:
            warnings.warn(
                f"C has {bands} bands, more than the cycle of {cycle}, so leaving out examples "
                "amplifies no privacy. Take sampling_prob=1, BallsInBins, or band_mf(bands, steps) "
                "of at most as many bands as the cycle.",
                stacklevel=1,
            )
        return sampler

    def privatizer(
        self,
        grad_fn: HasSensitivity,
        key: PRNGKeyArray | Secret | None = None,
        policy: Policy | JmpPolicy | None = None,
        sharding: ShardingRules | None = None,
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
                size, bytes, or one key of ChaCha; see `gaussian_privatizer`.
            policy: As for `gaussian_privatizer`; by default the one that `grad_fn` was made with.
            sharding: As for `gaussian_privatizer`; by default the rules that `grad_fn` was made
                with.

        Returns:
            A `gaussian_privatizer` of standard deviation noise_multiplier x sensitivity. `init` and
            `update` refuse more entries than the plan has paid for. (If one privatizer serves
            several groups of leaves, each group is counted separately.)

        Raises:
            ValueError: If `grad_fn` is no such function, or was made with another policy or other
                sharding rules; if the sensitivity is 0 (but with a noise multiplier of 0), is not
                finite, or differs from the one that the norm bound implies under the plan's
                neighboring relation; and as for `gaussian_privatizer`.
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
            stddev=stddev, key=key, policy=policy, sharding=sharding, correlation=self.noise
        )
        if stddev == 0 < self.noise_multiplier:
            raise ValueError(
                "l2_clip_norm must be greater than 0 to train; found a grad_fn whose sensitivity "
                "is 0, so that all gradients and all noise are 0."
            )
        growth = 1.0 if self.noise is None else self.noise.error_growth(self.steps)
        return within_charge(privatizer, self.steps, self.delta, growth)


@functools.cache  # the samplers of one run (`make_step` makes some) do not repeat it
def _warn_of_delta(delta: float, num_examples: int) -> None:
    warnings.warn(
        f"delta is {delta:g}, and 1 / num_examples is {1 / num_examples:g} ({num_examples} "
        "examples): such a delta allows a program to publish one example at random, in full. Make "
        "a plan with a delta well below 1 / num_examples.",
        stacklevel=3,
    )
