"""One step of private training: a batch and its mask in, the next state out."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool

from ..gradients import ClippedGrad, FilterSpec, takes_key
from ..privacy import (
    GaussianPrivatizerState,
    PrivacyPlan,
    Sampler,
    digest,
    fold_text,
    fresh_secret,
    key_from_secret,
    no_past,
    printed_without_key,
    refuse_to_pickle,
    stream_of,
)
from ..shown import function_name
from ..trees import PyTree, is_array_or_shape
from ..updates import stored_state, widened
from .dispatch import Carry, Dispatch, FlatState
from .first_state import Body, FirstModel, Recipe
from .state import AdaptiveState, OptState, TrainState, is_gone, moved, refuse_used_up, strong

Model = TypeVar("Model")
Mask = Bool[Array | np.ndarray, " batch"]


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Step(Generic[Model]):
    """A compiled step of private training, made by `make_step`.

    `state = step.init(model)`, then `state = step(state, *batch, is_padding_example=mask)` for the
    batches of `step.sampler()`. A call **uses up** its state: the buffers are donated to the next
    state. Copy what you still need. A used-up state is refused.

    `init` and `sampler` draw fresh randomness each time, unless the step has a `seed`. No secret is
    in the printed form of a step, in an error, or in the compiled program.

    Attributes:
        plan: what sampling, noise and accounting follow.
        grad_fn: the clipped gradient, divided by the expected batch size; it has the step's policy
            and sharding rules.
    """

    plan: PrivacyPlan
    grad_fn: ClippedGrad[Any]
    _num_examples: int
    _update: optax.GradientTransformation
    _filter_spec: FilterSpec
    _ema: float | None
    _shared: bool
    _seed: int | bytes | None

    def __post_init__(self) -> None:
        _ = self._noise  # checked now, outside of any trace

    __pdoc__, __reduce__ = printed_without_key, refuse_to_pickle

    def __repr__(self) -> str:
        loss, policy = function_name(self.grad_fn.__wrapped__), self.grad_fn.policy
        more = f"num_examples={self._num_examples}, policy={policy and str(policy)!r}"
        return f"{type(self).__name__}({loss}, {self.plan}, {more})"

    @functools.cached_property
    def _noise(self) -> optax.GradientTransformation | None:
        if self.plan.noise_multiplier == 0:  # without noise, the clip norm may be infinite
            return None
        return self.plan.privatizer(self.grad_fn)

    def _mesh(self) -> AbstractContextManager[Any]:
        """The rules' mesh as a context."""
        rules = self.grad_fn.sharding
        if rules is None:
            return nullcontext()
        try:
            return jax.set_mesh(rules.mesh)
        except ValueError:  # while a step is traced inside another program, no devices are named
            return jax.sharding.use_abstract_mesh(rules.mesh.abstract_mesh)

    def shard_batch(self, batch: PyTree[Any]) -> PyTree[Any]:
        """Puts this host's part of a batch where the step wants it.

        Args:
            batch: arrays with examples in front.
        """
        if (rules := self.grad_fn.sharding) is None:
            return jax.tree.map(jnp.asarray, batch)
        with self._mesh():
            return rules.shard_batch(batch)

    # Randomness.

    def _secret_of(self, start: int) -> bytes:
        """The secret of a start: fresh, the same on all hosts; or from the seed and its number."""
        if self._seed is None:
            return fresh_secret()
        return digest(self._seed, ("eqx_dp start", str(start)), size=32)

    def sampler(self) -> Sampler:
        """The sampler of the plan's batches; with sharding rules, of this host's part of them.

        Each call draws fresh randomness. With a seed it is that of the first start.
        """
        return self._sampler_of(self._secret_of(0))

    def _sampler_of(self, secret: bytes) -> Sampler:
        rules, parts, hosts, host = self.grad_fn.sharding, 1, 1, 0
        if rules is not None:
            parts, hosts, host = rules.local_shards(), jax.process_count(), jax.process_index()
        seed, shared = digest(secret, ("sample",), size=32), self._shared
        return self.plan.sampler(
            self._num_examples, seed=seed, hosts=hosts, host=host, devices=parts, shared=shared
        )

    # The first state.

    def init(
        self, model: Model | None = None, *, init_model: Callable[[], Model] | None = None
    ) -> TrainState[Model]:
        """The state before the first step; its arrays are copies, and its keys are fresh.

        A model that is too large for one device is made in its place:

        ```python
        state = step.init(init_model=lambda: GPT(config, key=jax.random.key(0)))
        ```

        The function is compiled with the shardings of the step's rules: each device computes its
        part of every array, and no device or host holds a whole one. The values are those that the
        function gives outside of `jit`, up to rounding.

        Args:
            model: the model, of any float dtype, on any device.
            init_model: in place of a model; `init_model()` returns it. It is traced, so it must not
                read values of arrays. Arrays that it closes over become constants of the compiled
                program: give a model that was trained before as `model`.

        Raises:
            ValueError: it is called under `jit` or `vmap`; neither is given, or both; `init_model`
                cannot be compiled; the model is paired with another policy than the step's; a
                sharding rule does not fit the model; nothing in the model is trained; the optimizer
                keeps state narrower than the policy's optimizer dtype.
        """
        if any(isinstance(x, Tracer) for x in (jnp.zeros(()), *jax.tree.leaves(model))):
            raise ValueError(
                "init draws secrets, which no compiled program may hold; found a call under jit or "
                "vmap. Call it outside, once for each model, and compile the step instead."
            )
        first = FirstModel(model, init_model)
        del model  # so that an array is freed as soon as its copy exists, if nobody else holds it
        with self._mesh():
            return self._begun(self._recipe.made(first), 0, self._secret_of(0))

    @functools.cached_property
    def _recipe(self) -> Recipe:
        """How a state is made of a model."""
        return Recipe(self._update, self.grad_fn, self._filter_spec, self._ema is not None)

    def _begun(self, body: Body, steps: int, secret: bytes) -> TrainState[Model]:
        """The state of a start after so many steps, whose keys follow from its secret."""
        noise: Any = optax.EmptyState()
        if self._noise is not None:
            noise = GaussianPrivatizerState(stream_of(key_from_secret(secret, "noise")))
        where = next(x.sharding for x in jax.tree.leaves(body.model) if is_array_or_shape(x))
        if (rules := self.grad_fn.sharding) is not None:
            where = NamedSharding(rules.mesh, PartitionSpec())
        # Put where the model is: else the first step would be compiled by itself.
        small = (noise, jnp.asarray(steps, jnp.int32), key_from_secret(secret, "step"))
        noise, count, key = jax.device_put(small, where)
        if self._noise is not None and self.plan.noise is not None:
            params = eqx.filter_eval_shape(self.grad_fn.trainable, body.model)
            noise = noise._replace(past=no_past(params, self.plan.noise, rules))
        return TrainState(body.model, OptState(noise, body.opt_state, body.average, key), count)

    # A step.

    def __call__(
        self,
        state: TrainState[Model],
        x: PyTree[Any],
        /,
        *more: PyTree[Any],
        is_padding_example: Mask,
    ) -> TrainState[Model]:
        """Takes a step: clipped gradient, noise, update. Compiled once for each shape of batch.

        Args:
            state: the state after the step before. It is used up.
            x: an array, or a tree of arrays, with examples along their leading axes: the argument
                of the loss behind the model.
            *more: the same for further arguments of the loss.
            is_padding_example: True where a slot holds no real example: the sampler's mask.

        Raises:
            ValueError: as for `grad_fn`; the loss takes another number of arguments; an array of
                `state` or of the batch was used up by an earlier step.
        """
        flat, batch = FlatState.of(state), (x, *more)
        refuse_used_up("batch", batch)
        if (rules := self.grad_fn.sharding) is not None:
            rules.check_examples(len(is_padding_example), (batch, is_padding_example))
        after = self._next(flat, batch, is_padding_example).state
        # JAX may read a numpy array in place, and the caller may overwrite it after the call: copy.
        return after if isinstance(after.step, Tracer) else jax.block_until_ready(after)

    def _next(
        self, flat: FlatState[Model], batch: tuple[PyTree[Any], ...], mask: Mask
    ) -> FlatState[Model]:
        """As a call of the step, without waiting for it: for a loop that reads the state rarely.

        Args:
            flat: the state before, by `FlatState.of` or of the step before. Used up.
            batch: in memory that nobody writes to.
            mask: `is_padding_example`.
        """
        if any(map(is_gone, (*flat.carry.arrays, flat.step))):
            refuse_used_up("state", flat.state)
        with self._mesh():
            carry, count = self._taken((batch, mask, flat.step), flat.carry)
        return FlatState(carry, count)

    def lower(
        self,
        state: TrainState[Model],
        x: PyTree[Any],
        /,
        *more: PyTree[Any],
        is_padding_example: Any,
    ) -> jax.stages.Lowered:
        """Lowers the step for these arguments; nothing is computed.

        Args:
            state: arrays or shapes of arrays; not used up. The same holds for the others.
            x: as for a call.
            *more: the same.
            is_padding_example: the same.
        """
        flat = FlatState.of(state)
        with self._mesh():
            return self._taken.lower(((x, *more), is_padding_example, flat.step), flat.carry)

    @functools.cached_property
    def _taken(self) -> Dispatch:
        def take(beside: Any, carry: Carry) -> tuple[Carry, Array]:
            batch, mask, step = beside
            after = self._after(TrainState(*strong(carry), step), strong(batch), mask)
            return (after.model, after.opt_state), after.step

        return Dispatch(take, self.grad_fn.sharding is not None)

    def _after(
        self, state: TrainState[Model], batch: tuple[PyTree[Any], ...], mask: Any
    ) -> TrainState[Model]:
        def key_for(purpose: str) -> Any:
            return jax.random.fold_in(fold_text(state.opt_state.key, purpose), state.step)

        loss = self.grad_fn.__wrapped__
        has_key, _ = takes_key(loss, 1 + len(batch))
        _check_arguments(loss, batch, has_key)
        key = key_for("loss") if has_key else None
        noise_state, opt_state, average, root = state.opt_state
        clip_norm = opt_state.clip_norm if isinstance(opt_state, AdaptiveState) else None
        grads = self.grad_fn(
            state.model, *batch, key=key, is_padding_example=mask, clip_norm=clip_norm
        )
        if self._noise is not None:
            parts = (grads,) if clip_norm is None else grads
            noised = list[Any]()
            for part in parts:  # each with the stream as the one before leaves it
                noisy, noise_state = cast(Any, self._noise.update(part, noise_state))
                noised.append(noisy)
            grads = noised[0] if clip_norm is None else tuple(noised)
        params = self._wide(state.model)
        parameters, policy = self._recipe.parameters, self.grad_fn.policy
        grads, opt_state = widened((grads, opt_state), policy)
        updates, opt_state = self._updated(grads, opt_state, params)
        opt_state = stored_state(opt_state, policy)
        is_random = policy is not None and policy.rounding == "stochastic"
        model = parameters.updated(state.model, updates, key_for("rounding") if is_random else None)
        if self._ema is not None:
            average = moved(average, self._wide(model), self._ema, state.step + 1)
        return TrainState(model, OptState(noise_state, opt_state, average, root), state.step + 1)

    def _updated(self, *arguments: PyTree[Any]) -> tuple[PyTree[Any], PyTree[Any]]:
        """The optimizer's update; a ValueError if it needs more than gradients and parameters."""
        try:
            return self._update.update(*arguments)
        except (TypeError, ValueError) as error:
            if "argument" not in str(error) and "must be provided" not in str(error):
                raise
            raise ValueError(
                f"The optimizer's update failed: {error}. It gets gradients, state and parameters "
                "alone. One that evaluates losses or gradients by itself cannot be used, because "
                "no plan accounts for these: take it without a line search "
                "(optax.lbfgs(linesearch=None)), and optax.contrib.sam with opaque_mode=False."
            ) from error

    def _wide(self, model: Any) -> PyTree[Any]:
        """The trained parameters as the optimizer sees them."""
        return self._recipe.parameters.wide(self.grad_fn.trainable(model))


def _check_arguments(
    loss: Callable[..., Any], batch: tuple[PyTree[Any], ...], has_key: bool
) -> None:
    """Raises a ValueError unless the loss takes so many arguments."""
    try:
        inspect.signature(loss).bind(None, *batch, **({"key": None} if has_key else {}))
    except TypeError as error:
        raise ValueError(
            f"{function_name(loss)} was given a model and {len(batch)} arguments ({error}). Give "
            "each argument an array or a tree of arrays: step(state, x, y, is_padding_example=mask)"
            ", and a Trainer's data as a tuple, (xs, ys)."
        ) from None
