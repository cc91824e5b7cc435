"""One step of private training: a batch and its mask in, the next state out."""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Literal, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, PRNGKeyArray, PyTree

from ..gradients import ClippedGrad, FilterSpec, PerExample, takes_key
from ..precision import Policy, agreed_policy
from ..privacy import GaussianPrivatizerState, PoissonSampler, PrivacyPlan, fold_text
from ..sharding import ShardingRules
from .disclosure import disclosed
from .dispatch import Dispatch, is_gone
from .extra import checked_extra, updated
from .held import Carry, Held
from .identity import Texts, known_text, probe_text, texts_of, texts_of_shapes
from .parameters import Parameters
from .seeds import fingerprint, keyed_digest
from .state import TrainState, Unrecorded, copied, kept_at, on_mesh, refuse_used_up

Model = TypeVar("Model")
Mask = Bool[Array | np.ndarray, " batch"]
MicrobatchSize = int | None | Literal["auto"]


class _Arguments(NamedTuple):
    """What a compiled step is given beside what it uses up."""

    batch: tuple[PyTree[Any], ...]
    mask: Any
    extra: dict[str, Any]
    loss_root: PRNGKeyArray | None
    specs: tuple[PartitionSpec | None, ...]
    step: Any


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Step(Generic[Model]):
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
        method: as it was given.
        l2_clip_norm: as it was given.
        rescale_to_unit_norm: as it was given.
        disclose: names of the figures that each batch discloses although no plan accounts for them.
        microbatch_size: how many examples a device processes at once; "auto" until
            `with_microbatch_size` sets a number.
        filter_spec: which leaves are trained.
        run: the text that `for_run` was given; empty without.
        unrecorded: how many of its steps trainers without a directory have taken.
    """

    plan: PrivacyPlan
    num_examples: int
    grad_fn: ClippedGrad[Any]
    method: str
    l2_clip_norm: PyTree[Any]
    rescale_to_unit_norm: bool
    disclose: tuple[str, ...]
    microbatch_size: MicrobatchSize
    filter_spec: FilterSpec
    run: str
    unrecorded: Unrecorded
    _loss: Callable[..., Any]
    _noise: optax.GradientTransformation
    _update: optax.GradientTransformation
    _loss_root: PRNGKeyArray
    _seed: int | bytes
    _make: Callable[[MicrobatchSize, str], "Step[Model]"]

    @property
    def policy(self) -> Policy | None:
        """The policy that the step was made with."""
        return self.grad_fn.policy

    @property
    def sharding(self) -> ShardingRules | None:
        """The sharding rules that the step was made with."""
        return self.grad_fn.sharding

    def mesh(self) -> AbstractContextManager[Any]:
        """The rules' mesh as a context, for code that works on a state; a step enters it itself."""
        rules = self.sharding
        if rules is None:
            return nullcontext()
        try:
            return jax.set_mesh(rules.mesh)
        except ValueError:  # while a step is traced inside of another program: no devices are named
            return jax.sharding.use_abstract_mesh(rules.mesh.abstract_mesh)

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """The chain of the noise and the optimizer."""
        return optax.chain(self._noise, self._update)

    def sampler(
        self,
        model: Model | None = None,
        /,
        *batch: PyTree[Any],
        extra: Mapping[str, Any] | None = None,
    ) -> PoissonSampler:
        """The sampler of the plan's batches; with sharding rules, of this host's part of them.

        Runs with the same seed and another identity get other batches. `sampler(model, *batch)`
        uses the same identity as the noise (see `identity`). `sampler()` knows no model: its
        identity is everything that the step was made with except the loss, which is plan, data-set
        size, policy, clip norms, method, and the optimizer, if that can be tried on two parameters
        that are not the model's (an optimizer that needs the model's own tree cannot). One run must
        use one of the two forms.

        Args:
            model: arrays or shapes of arrays; or none, and no batch.
            *batch: as for the step, of any length, for instance the data set itself. Only dtypes
                and the shapes of one example count.
            extra: as for the step.
        """
        if model is None:
            text = f"{self._known}\n{probe_text(self._update)}"
        else:
            text = "\n".join((self._known, *self._texts(model, batch, extra)))
        run = json.dumps(["make_step", self.run, keyed_digest(self._seed, text)])
        rules = self.sharding
        if rules is None:
            return self.plan.sampler(self.num_examples, self._seed, run=run)
        hosts, host = jax.process_count(), jax.process_index()
        return self.plan.sampler(
            self.num_examples, self._seed, rules.local_shards(), hosts, host, run=run
        )

    def identity(
        self, model: Model, /, *batch: PyTree[Any], extra: Mapping[str, Any] | None = None
    ) -> dict[str, str]:
        """The identity of a run of this step, to be kept, and compared when the run is resumed.

        It is the same in every process, on any devices, hosts and mesh, at any microbatch size.
        Nothing is computed: the loss and the optimizer are traced once.

        | name | value | another one for |
        |---|---|---|
        | "loss" | 32 hex digits | the program of one example's loss and its derivative rules, the \
values that it closes over, the model's architecture, what is trained, dtypes |
        | "optimizer" | 32 hex digits | the program of its first state and of its update, with the \
numbers that it was made with |
        | "method" | text | another `method` |

        Digests are keyed by the seed (scrypt, RFC 7914; BLAKE2b, RFC 7693), so that nobody without
        the seed can guess values that a loss closes over and compare digests. The values of the
        model and the code of a callback do not enter. Another release of JAX or of a library may
        write the same mathematics as another program.

        Args:
            model: arrays or shapes of arrays, before or while it is trained.
            *batch: as for the step, of any length; only dtypes and the shapes of one example count.
            extra: as for the step.

        Raises:
            ValueError: as the step.
        """
        texts = self._texts(model, batch, extra)
        digests = {name: keyed_digest(self._seed, text) for name, text in texts._asdict().items()}
        return {**digests, "method": self.method}

    def secret_id(self, salt: bytes) -> str:
        """A digest that tells seeds apart and does not show the seed (scrypt, RFC 7914).

        Args:
            salt: random bytes, kept beside the result; not secret.
        """
        return fingerprint(self._seed, salt)

    def with_microbatch_size(self, size: int | None) -> "Step[Model]":
        """The same step, with other microbatches.

        Args:
            size: how many examples a device processes at once; None for all.
        """
        return self._make(size, self.run)

    def for_run(self, run: str) -> "Step[Model]":
        """The same step, with another sample, other noise and other keys for the loss.

        Args:
            run: a text that is different for each run with this seed; not secret. It replaces an
                earlier text. With an empty text the step is as `make_step` made it.
        """
        return self._make(self.microbatch_size, run)

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
        """Puts this host's part of a batch on the devices that the step expects it on.

        Args:
            batch: a tree of arrays with examples along every leading axis.
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
        held = Held.of(state, self.sharding)
        refuse_used_up("batch", batch)
        after = self.next(held, batch, is_padding_example, extra).state
        # JAX may read a numpy array where it lies: the caller may fill it anew from now on.
        return after if isinstance(after.step, Tracer) else jax.block_until_ready(after)

    def next(
        self,
        held: Held[Model],
        batch: tuple[PyTree[Any], ...],
        mask: Mask,
        extra: Mapping[str, Any] | None = None,
    ) -> Held[Model]:
        """A call that does not wait for the result, for a loop that rarely reads the state.

        Args:
            held: the state before, by `Held.of` or of the step before. It is used up.
            batch: the batch, in memory that nobody writes to.
            mask: `is_padding_example`, as for a call.
            extra: as for a call.
        """
        if any(map(is_gone, held.carry.arrays)):
            refuse_used_up("state", held.state)
        arguments = self._arguments(batch, mask, extra, held)
        with self.mesh():
            carry, count = self._taken(arguments, held.carry)
        return Held(carry, count, held.specs)

    def lower(
        self,
        state: TrainState[Model],
        /,
        *batch: PyTree[Any],
        is_padding_example: Any,
        extra: Mapping[str, Any] | None = None,
    ) -> jax.stages.Lowered:
        """Lowers the step for these arguments; nothing is computed, and no state is used up.

        Args:
            state, *batch, is_padding_example, extra: as for a call.
        """
        held = Held.of(state, self.sharding)
        arguments = self._arguments(batch, is_padding_example, extra, held)
        with self.mesh():
            return self._taken.lower(arguments, held.carry)

    def _arguments(
        self,
        batch: tuple[PyTree[Any], ...],
        mask: Any,
        extra: Mapping[str, Any] | None,
        held: Held[Model],
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
            held.specs,
            held.step,
        )

    @functools.cached_property
    def _takes_key(self) -> Callable[[int], bool]:
        """By the number of parts that a batch has."""
        return functools.cache(lambda parts: takes_key(self._loss, 1 + parts)[0])

    @functools.cached_property
    def _taken(self) -> Dispatch[_Arguments, Carry]:
        def take(arguments: _Arguments, carry: Carry) -> tuple[Carry, Array]:
            model, opt_state, shown = carry
            state = self._next(TrainState(model, opt_state, arguments.step, shown), arguments)
            state = kept_at(state, arguments.specs, self.sharding)
            return (state.model, state.opt_state, state.disclosed), state.step

        return Dispatch(take)

    def _next(self, state: TrainState[Model], given: _Arguments) -> TrainState[Model]:
        prepared = self.grad_fn.prepare(state.model, given.batch, given.loss_root, given.mask)
        params = self._wide(state.model)
        # Known while the step is traced: what it is, and so what its keys are.
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

    @functools.cached_property
    def _known(self) -> str:
        """What tells runs apart before there is a model."""
        return known_text(
            self.plan,
            self.num_examples,
            self.policy,
            self.l2_clip_norm,
            self.rescale_to_unit_norm,
            self.method,
        )

    def _texts(
        self, model: Model, batch: tuple[PyTree[Any], ...], extra: Mapping[str, Any] | None
    ) -> Texts:
        """What a call computes, from the shapes of its arguments alone."""
        extra, takes = checked_extra(self._update, extra), self._takes_key(len(batch))
        with self.mesh():
            return texts_of_shapes(
                self.grad_fn, self._update, self._parameters, model, batch, extra, takes_key=takes
            )

    @property
    def _parameters(self) -> Parameters:
        return Parameters(self.policy, self.sharding)

    def _wide(self, model: Model) -> PyTree[Any]:
        """The trained parameters as the optimizer sees them."""
        return self._parameters.wide(self.grad_fn.trainable(model))
