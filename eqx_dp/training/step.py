"""One step of private training: a batch and its mask in, the next state out."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Concatenate, Generic, Literal, SupportsIndex, TypeVar, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, PRNGKeyArray, PyTree

from ..gradients import (
    ClippedGrad,
    FilterSpec,
    PerExample,
    filter_clipped_grad,
    filter_value_and_clipped_grad,
    takes_key,
)
from ..precision import Policy, agreed_policy
from ..privacy import PoissonSampler, PrivacyPlan
from ..sharding import ShardingRules
from .disclosure import checked_names, disclosed
from .seeds import fingerprint, key_of
from .state import TrainState, kept_at, on_mesh, specs_of

Model = TypeVar("Model")
Mask = Bool[Array | np.ndarray, " batch"]
MicrobatchSize = int | None | Literal["auto"]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Step(Generic[Model]):
    """A compiled step of private training, made by [`make_step`][].

    `state = step.init(model)`, then `state = step(state, *batch, is_padding_example=mask)` for the
    batches of `step.sampler()`. A call **uses up** the state that it is given: its buffers are
    donated to the next one. Copy what is still needed.

    Attributes:
        plan: what sampling, noise and accounting follow.
        num_examples: in the data set.
        grad_fn: the clipped gradient.
        optimizer: the noise, and behind it the optimizer.
        l2_clip_norm: as it was given.
        rescale_to_unit_norm: as it was given.
        disclose: what each batch discloses although no plan accounts for it.
        microbatch_size: how many examples a device processes at once; "auto" until
            `with_microbatch_size` says.
        filter_spec: what is trained.
    """

    plan: PrivacyPlan
    num_examples: int
    grad_fn: ClippedGrad[Any]
    optimizer: optax.GradientTransformation
    l2_clip_norm: PyTree[Any]
    rescale_to_unit_norm: bool
    disclose: tuple[str, ...]
    microbatch_size: MicrobatchSize
    filter_spec: FilterSpec
    _loss: Callable[..., Any]
    _seed: int
    _make: Callable[[int | None], "Step[Model]"]

    @property
    def policy(self) -> Policy | None:
        """The policy that the step was made with."""
        return self.grad_fn.policy

    @property
    def sharding(self) -> ShardingRules | None:
        """The sharding rules that the step was made with."""
        return self.grad_fn.sharding

    def mesh(self) -> AbstractContextManager[Any]:
        """The rules' mesh as a context, for what works on a state; the step enters it itself."""
        rules = self.sharding
        return nullcontext() if rules is None else jax.set_mesh(rules.mesh)

    def sampler(self) -> PoissonSampler:
        """The sampler of the plan's batches: with sharding rules, of this host's part of them."""
        rules = self.sharding
        if rules is None:
            return self.plan.sampler(self.num_examples, self._seed)
        hosts, host = jax.process_count(), jax.process_index()
        return self.plan.sampler(
            self.num_examples, self._seed, pad_to=rules.local_shards(), hosts=hosts, host=host
        )

    def secret_id(self, salt: bytes) -> str:
        """Tells one seed from another without telling the seed (scrypt, RFC 7914)."""
        return fingerprint(self._seed, salt)

    def with_microbatch_size(self, size: int | None) -> "Step[Model]":
        """The same step, with other microbatches."""
        return self._make(size)

    def init(self, model: Model) -> TrainState[Model]:
        """The state before the first step; none of its arrays is the caller's own.

        Args:
            model: the model, of any float dtype, on any device.

        Raises:
            ValueError: the model is paired with another policy than the step's; a sharding rule
                does not fit it; nothing in it is trained.
        """
        if agreed_policy(model, self.policy) != self.policy:
            raise ValueError(
                "The model is paired with a policy and the step has none, so that its noise would "
                "be drawn as without a policy. Give the policy to make_step as well."
            )
        with self.mesh():
            model = self._stored(model)
            state = TrainState(
                model,
                self.optimizer.init(self._wide(model)),
                jnp.zeros((), jnp.int32),
                {name: jnp.zeros((), jnp.float32) for name in self.disclose},
            )
            return state if self.sharding is None else on_mesh(state, self.sharding)

    def place(self, batch: PyTree[Any]) -> PyTree[Any]:
        """Puts this host's part of a batch, examples in front, where the step wants it."""
        if self.sharding is None:
            return jax.tree.map(jnp.asarray, batch)
        with self.mesh():
            return self.sharding.shard_batch(batch)

    def __call__(
        self, state: TrainState[Model], /, *batch: PyTree[Any], is_padding_example: Mask
    ) -> TrainState[Model]:
        """Takes a step: clipped gradient, noise, update. Compiled once for a shape of batch.

        Args:
            state: of the step before. Used up.
            *batch: arrays, or trees of arrays, with examples along their leading axes.
            is_padding_example: True where a slot holds no real example, as the sampler says.

        Raises:
            ValueError: as `grad_fn`; `microbatch_size` is still "auto".
        """
        with self.mesh():
            return self._jitted(self._arguments(batch, is_padding_example, state), state)

    def lower(
        self, state: TrainState[Model], /, *batch: PyTree[Any], is_padding_example: Any
    ) -> jax.stages.Lowered:
        """Lowers the step for these arguments; nothing is computed."""
        with self.mesh():
            arguments = self._arguments(batch, is_padding_example, state)
            return self._jitted.lower(arguments, state).lowered

    def _arguments(self, batch: tuple[PyTree[Any], ...], mask: Any, state: Any) -> Any:
        if self.microbatch_size == "auto":
            raise ValueError(
                'microbatch_size is "auto", which a Trainer settles before its first step; '
                "outside of one, take step.with_microbatch_size(size)."
            )
        return batch, mask, specs_of(state, self.sharding)

    @functools.cached_property
    def _jitted(self) -> Any:
        def take(arguments: Any, state: TrainState[Model]) -> TrainState[Model]:
            batch, mask, specs = arguments
            return kept_at(self._next(state, batch, mask), specs, self.sharding)

        return eqx.filter_jit(take, donate="all-except-first")

    def _next(
        self, state: TrainState[Model], batch: tuple[PyTree[Any], ...], mask: Mask
    ) -> TrainState[Model]:
        result = self.grad_fn(
            state.model, *batch, key=self._loss_key(state, batch), is_padding_example=mask
        )
        values, grads = cast(
            "tuple[PerExample | None, PyTree[Array]]", result if self.disclose else (None, result)
        )
        updates, opt_state = self.optimizer.update(grads, state.opt_state, self._wide(state.model))
        return TrainState(
            self._updated(state.model, updates),
            opt_state,
            state.step + 1,
            disclosed(self.disclose, values, mask),
        )

    def _loss_key(
        self, state: TrainState[Model], batch: tuple[PyTree[Any], ...]
    ) -> PRNGKeyArray | None:
        can_take, _ = takes_key(self._loss, 1 + len(batch))
        return jax.random.fold_in(key_of(self._seed, "loss"), state.step) if can_take else None

    def _stored(self, model: Model) -> Model:
        """A copy of the model as it is stored."""
        model = jax.tree.map(lambda leaf: jnp.copy(leaf) if eqx.is_array(leaf) else leaf, model)
        model = model if self.policy is None else self.policy.cast_to_param(model)
        return model if self.sharding is None else self.sharding.shard(model)

    def _wide(self, model: Model) -> PyTree[Any]:
        """Parameters as the optimizer sees them: as wide as gradients, and where those live."""
        params = self.grad_fn.trainable(model)
        params = params if self.policy is None else self.policy.cast_to_accumulate(params)
        return params if self.sharding is None else self.sharding.shard_accumulators(params)

    def _updated(self, model: Model, updates: PyTree[Array | None]) -> Model:
        def add(update: Array | None, leaf: Any) -> Any:
            # Added in the wider dtype, then rounded once to what is stored.
            return leaf if update is None else (leaf + update).astype(leaf.dtype)

        updated = cast(Model, jax.tree.map(add, updates, model, is_leaf=lambda x: x is None))
        return updated if self.sharding is None else self.sharding.shard(updated)


def make_step(
    loss: Callable[Concatenate[Model, ...], Any],
    optimizer: optax.GradientTransformation,
    plan: PrivacyPlan,
    *,
    num_examples: SupportsIndex,
    seed: SupportsIndex,
    l2_clip_norm: PyTree[Any],
    policy: Policy | None = None,
    sharding: ShardingRules | None = None,
    filter_spec: FilterSpec = eqx.is_inexact_array,
    keep_batch_dim: bool = False,
    rescale_to_unit_norm: bool = False,
    microbatch_size: MicrobatchSize = None,
    method: str = "auto",
    disclose: Iterable[str] = (),
) -> Step[Model]:
    """Makes one jitted step of private training out of a loss, an optimizer and a plan.

    ```python
    step = dp.make_step(
        loss, optax.adam(1e-3), plan, num_examples=len(xs), seed=seed, l2_clip_norm=1.0
    )
    state, sampler = step.init(model), step.sampler()
    for t in range(plan.steps):
        indices, is_padding_example = sampler.batch(t)
        state = step(state, xs[indices], ys[indices], is_padding_example=is_padding_example)
    ```

    A step is the sum of clipped gradients (`filter_clipped_grad`, which explains the arguments that
    are not below) divided by the expected batch size, the plan's noise, and the optimizer's update,
    for which gradients and parameters are in the accumulate dtype; the sum of parameter and update
    is rounded once, to the dtype that the parameter is stored in. With sharding rules everything
    stays where the rules put it.

    **Guarantee.** Sample, noise and the loss's own keys of step t are functions of (seed, t) alone,
    from streams that never meet: a run that is repeated, from its start or from any state of it,
    repeats itself and releases nothing twice. The models of all steps together are
    `plan.epsilon()`-differentially private, if batches come from `step.sampler()`, the seed is
    secret, and nothing is disclosed.

    | case | what happens |
    |---|---|
    | nothing is sampled, or all is padding | noise alone moves the model |
    | an example's loss or gradient is not finite | it adds exactly zero |
    | `plan.noise_multiplier` is 0 | no noise; epsilon is infinite |
    | the same, and `l2_clip_norm` is `inf` | ordinary, non-private training |

    Args:
        loss: of one example, `loss(model, *example)`, or with `key=...`: it then gets a key of its
            own for each example and step.
        optimizer: any of optax's, without noise; it is given parameters, for weight decay.
        plan: sampling, noise, accounting.
        num_examples: in the data set, on all hosts together; a public number.
        seed: from 0 to 2**128 - 1, **secret** (`secrets.randbits(128)`), the same on all hosts, and
            **of this run alone**. Another run with it (another clip norm, learning rate, loss, data
            set) would add the same noise to other sums, and the difference of the two would show
            what is private without any noise.
        l2_clip_norm: as for `filter_clipped_grad`.
        policy: as for `filter_clipped_grad`; noise follows it, too.
        sharding: as for `filter_clipped_grad`; noise and optimizer state follow it, too.
        filter_spec: what is trained.
        keep_batch_dim: whether `loss` is written for a batch; it then sees batches of one.
        rescale_to_unit_norm: as for `filter_clipped_grad`.
        microbatch_size: as for `filter_clipped_grad`; or "auto", for a Trainer to find the largest
            that fits into the memory of a device.
        method: as for `filter_clipped_grad`.
        disclose: names of figures of each batch that are to be seen although no plan accounts for
            them: "loss", "grad_norm", "num_examples". **Not private.**

    Raises:
        ValueError: `num_examples` or `seed` is no whole number in its range; a name in `disclose`
            is unknown; and as `filter_clipped_grad` and `plan.privatizer`.
    """
    sampler = plan.sampler(num_examples, seed)  # checks both

    def made(size: MicrobatchSize) -> Step[Model]:
        make_grad = filter_value_and_clipped_grad if names else filter_clipped_grad
        grad_fn = make_grad(
            loss,
            l2_clip_norm=l2_clip_norm,
            policy=policy,
            sharding=sharding,
            filter_spec=filter_spec,
            keep_batch_dim=keep_batch_dim,
            rescale_to_unit_norm=rescale_to_unit_norm,
            normalize_by=plan.sampling_prob * sampler.num_examples,
            microbatch_size=None if size == "auto" else size,
            method=method,
        )
        return Step(
            plan,
            sampler.num_examples,
            grad_fn,
            optax.chain(_noise(plan, grad_fn, sampler.seed), optimizer),
            l2_clip_norm,
            rescale_to_unit_norm,
            names,
            size,
            filter_spec,
            loss,
            sampler.seed,
            made,
        )

    names = checked_names(disclose)
    return made(microbatch_size)


def _noise(plan: PrivacyPlan, grad_fn: ClippedGrad[Any], seed: int) -> optax.GradientTransformation:
    if plan.noise_multiplier == 0:  # without noise, clipping may be without a bound as well
        return optax.identity()
    return plan.privatizer(grad_fn, key=key_of(seed, "noise"))
