"""One step of private training: a batch and its mask in, the next state out."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Concatenate, NamedTuple, SupportsIndex, TypeVar, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jaxtyping import Array, Bool, PRNGKeyArray, PyTree

from ..gradients import FilterSpec, PerExample
from ..precision import Policy, agreed_policy
from ..privacy import GaussianPrivatizerState, PrivacyPlan, Secret, fold_text
from ..programs import is_changed_by_reading
from ..sharding import ShardingRules
from .disclosure import checked_names, disclosed
from .dispatch import Carry, Dispatch, FlatState
from .extra import checked_extra, updated
from .identity import texts_of
from .settings import MicrobatchSize, StepSettings
from .state import (
    Specs,
    TrainState,
    constrained,
    copied,
    is_gone,
    on_mesh,
    refuse_used_up,
)

Model = TypeVar("Model")
Mask = Bool[Array | np.ndarray, " batch"]


class _Arguments(NamedTuple):
    """What a compiled step is given beside what it uses up."""

    batch: tuple[PyTree[Any], ...]
    mask: Any
    extra: dict[str, Any]
    loss_root: PRNGKeyArray | None
    specs: Specs
    step: Any


class Step(StepSettings[Model]):
    """A compiled step of private training, made by [`make_step`][].

    `state = step.init(model)`, then `state = step(state, *batch, is_padding_example=mask)` for the
    batches of `step.sampler()`. A call **uses up** its state: the buffers are donated to the next
    state. Copy what is still needed. A state that was used up is refused.

    [`make_step`][] says what two steps with one seed have in common. Neither seed nor keys are in
    the printed form of a step, in an error, or in the compiled program.

    Attributes:
        plan: what sampling, noise and accounting follow.
        num_examples: in the data set.
        grad_fn: the clipped gradient.
        policy: as it was given, and so `sharding`, `method`, `l2_clip_norm` and
            `rescale_to_unit_norm`.
        disclose: what each batch discloses although no plan accounts for it.
        microbatch_size: how many examples a device processes at once; "auto" until
            `with_microbatch_size` says.
        filter_spec: what is trained.
        run: the text that `for_run` was given; empty without.
        unrecorded: what trainers without a directory took of its steps.
    """

    def with_microbatch_size(self, size: int | None) -> "Step[Model]":
        """The same step, with other microbatches.

        Args:
            size: how many examples a device processes at once; None for the engine's choice.
        """
        return dataclasses.replace(self, microbatch_size=size)

    def for_run(self, run: str) -> "Step[Model]":
        """The same step, with another sample, other noise and other keys for the loss.

        Args:
            run: a text that is different for each run with this seed; not secret. It replaces an
                earlier text. With an empty text the step is as `make_step` made it.
        """
        return dataclasses.replace(self, run=run)

    def init(self, model: Model) -> TrainState[Model]:
        """The state before the first step; its arrays are copies.

        Args:
            model: the model, of any float dtype, on any device.

        Raises:
            ValueError: the model is paired with another policy than the step's; a sharding rule
                does not fit the model; nothing in the model is trained.
        """
        refuse_used_up("model", model)
        if agreed_policy(model, self.policy) != self.policy:
            raise ValueError(
                "The model is paired with a policy and the step has none, so its noise would be "
                "drawn without a policy. Give the policy to make_step as well."
            )
        with self.mesh():
            model = self._parameters.stored(model)
            params = self._wide(model)
            state = TrainState(
                model,
                copied((self._noise.init(params), self._update.init(params))),
                jnp.zeros((), jnp.int32),
                {name: jnp.zeros((), jnp.float32) for name in self.disclose},
            )
            return state if self.sharding is None else on_mesh(state, self.sharding)

    def place(self, batch: PyTree[Any]) -> PyTree[Any]:
        """Puts this host's part of a batch where the step wants it.

        Args:
            batch: arrays with examples in front.
        """
        if self.sharding is None:
            return jax.tree.map(jnp.asarray, batch)
        with self.mesh():
            return self.sharding.shard_batch(batch)

    def __call__(
        self,
        state: TrainState[Model],
        /,
        *batch: PyTree[Any],
        is_padding_example: Mask,
        extra: Mapping[str, Any] | None = None,
    ) -> TrainState[Model]:
        """Takes a step: clipped gradient, noise, update. Compiled once for each shape of batch.

        Args:
            state: the state after the step before. It is used up.
            *batch: arrays, or trees of arrays, with examples along their leading axes.
            is_padding_example: True where a slot holds no real example: the sampler's mask.
            extra: more arguments of the optimizer's update, numbers or arrays by name, for instance
                `{"value": v}` for `optax.contrib.reduce_on_plateau`. **Public values only**, such
                as a loss on held-out data: they change what is released, and no noise covers them.
                The same names at every step.

        Raises:
            ValueError: as for `grad_fn`; `microbatch_size` is still "auto"; an array of `state` or
                `batch` was used up by an earlier step; the optimizer does not take `extra`.
        """
        flat = FlatState.of(state, self.sharding)
        refuse_used_up("batch", batch)
        after = self.next(flat, batch, is_padding_example, extra).state
        # JAX may read a numpy array where it lies: the caller may fill it anew from now on.
        return after if isinstance(after.step, Tracer) else jax.block_until_ready(after)

    def next(
        self,
        flat: FlatState[Model],
        batch: tuple[PyTree[Any], ...],
        mask: Mask,
        extra: Mapping[str, Any] | None = None,
    ) -> FlatState[Model]:
        """As a call of the step that is not waited for, for a loop that reads the state rarely.

        Args:
            flat: the state before, by `FlatState.of` or of the step before. Used up.
            batch: in memory that nobody writes to.
            mask: `is_padding_example`.
            extra: as for a call.
        """
        if any(map(is_gone, flat.carry.arrays)):
            refuse_used_up("state", flat.state)
        arguments = self._arguments(batch, mask, extra, flat)
        with self.mesh():
            carry, count = self._taken(arguments, flat.carry)
        return FlatState(carry, count, flat.specs)

    def lower(
        self,
        state: TrainState[Model],
        /,
        *batch: PyTree[Any],
        is_padding_example: Any,
        extra: Mapping[str, Any] | None = None,
    ) -> jax.stages.Lowered:
        """Lowers the step for these arguments; nothing is computed.

        Args:
            state: arrays or shapes of arrays; not used up. So the others.
            *batch: as for a call.
            is_padding_example: as for a call.
            extra: as for a call.
        """
        flat = FlatState.of(state, self.sharding)
        arguments = self._arguments(batch, is_padding_example, extra, flat)
        with self.mesh():
            return self._taken.lower(arguments, flat.carry)

    def _arguments(
        self,
        batch: tuple[PyTree[Any], ...],
        mask: Any,
        extra: Mapping[str, Any] | None,
        flat: FlatState[Model],
    ) -> _Arguments:
        if mask is None:
            raise ValueError(
                "is_padding_example is None. A sampled batch has padding, whose index is -1: "
                "without the mask the last example would count in every padding slot. Hand on the "
                "mask that sampler.take or sampler.batch returns; for a batch without padding, "
                "np.zeros(length, bool)."
            )
        if self.microbatch_size == "auto":
            raise ValueError(
                'microbatch_size is "auto", which a Trainer replaces by a number before its first '
                "step; without a Trainer, take step.with_microbatch_size(size)."
            )
        return _Arguments(
            batch,
            mask,
            checked_extra(self._update, extra),
            self._loss_root if self._takes_key(len(batch)) else None,
            flat.specs,
            flat.step,
        )

    @functools.cached_property
    def _taken(self) -> Dispatch[_Arguments, Carry]:
        def take(arguments: _Arguments, carry: Carry) -> tuple[Carry, Array]:
            model, opt_state, shown = carry
            state = self._next(TrainState(model, opt_state, arguments.step, shown), arguments)
            state = constrained(state, arguments.specs, self.sharding)
            return (state.model, state.opt_state, state.disclosed), state.step

        return Dispatch(take)

    def _next(self, state: TrainState[Model], given: _Arguments) -> TrainState[Model]:
        prepared = self.grad_fn.prepare(state.model, given.batch, given.loss_root, given.mask)
        params = self._wide(state.model)
        # Known while the step is traced: what it is, and so what its keys are.
        if is_changed_by_reading(prepared.traced.program.jaxpr):
            texts = self._texts(state.model, given.batch, given.extra)
        else:
            texts = texts_of(prepared, self.sharding, self._update, params, given.extra)
        text = "\n".join((self._known, *texts))
        if given.loss_root is not None:
            key = fold_text(given.loss_root, text)
            prepared = prepared.with_key(jax.random.fold_in(key, state.step))
        result = self.grad_fn.complete(prepared)
        values, grads = cast(
            "tuple[PerExample | None, PyTree[Array]]", result if self.disclose else (None, result)
        )
        noise_state, opt_state = state.opt_state
        grads, noise_state = self._noisy(grads, noise_state, text)
        updates, opt_state = updated(self._update, grads, opt_state, params, given.extra)
        return TrainState(
            self._parameters.updated(state.model, updates),
            (noise_state, opt_state),
            state.step + 1,
            disclosed(self.disclose, values, given.mask),
        )

    def _noisy(self, grads: PyTree[Array], state: Any, text: str) -> tuple[PyTree[Array], Any]:
        if not isinstance(state, GaussianPrivatizerState):  # there is no noise
            return grads, state
        grads, after = cast(
            Any, self._noise.update(grads, state._replace(key=fold_text(state.key, text)))
        )
        return grads, after._replace(key=state.key)


def make_step(
    loss: Callable[Concatenate[Model, ...], Any],
    optimizer: optax.GradientTransformation,
    plan: PrivacyPlan,
    *,
    num_examples: SupportsIndex,
    seed: Secret,
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
    """Makes one jitted step of private training from a loss, an optimizer and a plan.

    ```python
    step = dp.make_step(
        loss, optax.adam(1e-3), plan, num_examples=len(xs), seed=seed, l2_clip_norm=1.0
    )
    state, sampler = step.init(model), step.sampler(model, xs, ys)
    for t in range(plan.steps):
        indices, is_padding_example = sampler.batch(t)
        state = step(state, xs[indices], ys[indices], is_padding_example=is_padding_example)
    ```

    A step is the sum of clipped gradients (see `filter_clipped_grad`) divided by the expected batch
    size, the plan's noise, and the optimizer's update. The optimizer gets gradients and parameters
    in the accumulate dtype; the sum of parameter and update is rounded once, to the dtype that the
    parameter is stored in. With sharding rules all arrays stay where the rules put them.

    **Guarantee.** Sample, noise and the loss's own keys of step t are functions of the seed, of
    the run's identity, and of t, from separate streams. So a run that is repeated, from its start
    or from any of its states, repeats itself and releases nothing twice. The models of all steps
    together are `plan.epsilon()`-differentially private, if batches come from `step.sampler()`, the
    seed is secret, and nothing is disclosed.

    **Two runs with one seed** have independent noise (up to 64 bits of a hash) if their identities
    differ. The identity is a hash (BLAKE2b) of what this table lists:

    | they differ in | noise, keys of the loss | `sampler(model, *batch)` | `sampler()` |
    |---|---|---|---|
    | plan, `num_examples`, `policy`, clip norms, `rescale_to_unit_norm`, `method` | independent | \
independent | independent |
    | program of the optimizer: rates, schedules, weight decay | independent | independent | \
independent, if it runs on any two arrays |
    | program of the loss: constants, derivative rules, the model's architecture, `filter_spec` | \
independent | independent | **the same** |
    | the text of `for_run` | independent | independent | independent |
    | starting values of the model, examples of a data set of equal size, values in `extra`, the \
code of a callback, a state whose values were set by hand | **the same** | the same | the same |
    | microbatch size, sharding, mesh, devices, hosts, `disclose` | the same | the same except for \
padding | the same except for padding |

    So take another seed for another data set, and for another starting model: if two runs have the
    same noise, the difference of their models shows private data without noise. If two runs have
    the same sample and independent noise, each keeps its own epsilon, but the two together do not
    compose as independent runs do.

    | case | what happens |
    |---|---|
    | nothing is sampled, or all is padding | only noise moves the model |
    | an example's loss or gradient is not finite | it adds exactly zero |
    | `plan.noise_multiplier` is 0 | no noise; epsilon is infinite |
    | the same, and `l2_clip_norm` is `inf` | ordinary, non-private training |

    Args:
        loss: the loss of one example, `loss(model, *example)`, or with `key=...`: it then gets a
            separate key for each example and step.
        optimizer: an optax optimizer, without noise. Its update gets the parameters (for weight
            decay) and the step's `extra`. Its state may share arrays with the model or within
            itself, because `init` copies. An optimizer that evaluates losses or gradients by itself
            (a line search, `optax.contrib.sam` in opaque mode, `sophia`) is refused: no noise would
            cover these.
        plan: sampling, noise, accounting.
        num_examples: the number of examples in the data set, on all hosts together; it is public.
        seed: **secret** (`secrets.randbits(128)`, or bytes): a number of at least 0 of any size, or
            bytes of any length, the same on all hosts. For one data set and one starting model; see
            the table above.
        l2_clip_norm: as for `filter_clipped_grad`.
        policy: as for `filter_clipped_grad`; it also holds for the noise.
        sharding: as for `filter_clipped_grad`; it also holds for noise and optimizer state.
        filter_spec: which leaves are trained.
        keep_batch_dim: whether `loss` is written for a batch; it then gets batches of one.
        rescale_to_unit_norm: as for `filter_clipped_grad`.
        microbatch_size: as for `filter_clipped_grad`; or "auto": a Trainer then finds the largest
            microbatch that fits into the memory of a device.
        method: as for `filter_clipped_grad`.
        disclose: names of figures of each batch that are shown although no plan accounts for them:
            "loss", "grad_norm", "num_examples". **Not private.**

    Raises:
        ValueError: `num_examples` or `seed` is not a whole number in its range; a name in
            `disclose` is unknown; and as for `filter_clipped_grad` and `plan.privatizer`.
    """
    sampler = plan.sampler(num_examples, seed)  # checks both
    return Step(
        plan=plan,
        num_examples=sampler.num_examples,
        l2_clip_norm=l2_clip_norm,
        policy=policy,
        sharding=sharding,
        filter_spec=filter_spec,
        rescale_to_unit_norm=rescale_to_unit_norm,
        microbatch_size=microbatch_size,
        method=method,
        disclose=checked_names(disclose),
        _loss=loss,
        _update=optimizer,
        _keep_batch_dim=keep_batch_dim,
        _seed=sampler.seed,
    )
