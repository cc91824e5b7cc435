"""One step of private training: a batch and its mask in, the next state out."""

import dataclasses
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool

from ..gradients import ClippedGrad, FilterSpec, takes_key
from ..precision import Policy
from ..privacy import (
    GaussianPrivatizerState,
    PoissonSampler,
    PrivacyPlan,
    digest,
    fold_text,
    fresh_secret,
    is_wide,
    key_from_secret,
)
from ..sharding import ShardingRules
from ..shown import function_name
from ..trees import PyTree, is_array_or_shape
from ..updates import stored_state, widened
from .dispatch import Carry, Dispatch, FlatState
from .first_state import Body, FirstModel, Recipe
from .state import (
    Parameters,
    TrainState,
    is_gone,
    moved,
    refuse_used_up,
    strong,
)

Model = TypeVar("Model")
Mask = Bool[Array | np.ndarray, " batch"]


class _Arguments(NamedTuple):
    """What a compiled step is given beside what it uses up."""

    batch: tuple[PyTree[Any], ...]
    mask: Any
    step: Any


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Step(Generic[Model]):
    """A compiled step of private training, made by `make_step`.

    `state = step.init(model)`, then `state = step(state, *batch, is_padding_example=mask)` for the
    batches of `step.sampler()`. A call **uses up** its state: the buffers are donated to the next
    state. Copy what is still needed. A state that was used up is refused.

    `init` and `sampler` draw fresh randomness each time, unless the step has a `seed`. No secret is
    in the printed form of a step, in an error, or in the compiled program.

    Attributes:
        plan: what sampling, noise and accounting follow.
        num_examples: in the data set.
        grad_fn: the clipped gradient, divided by the expected batch size.
        ema: the decay of the moving average, or None.
        shared: whether hosts share one draw evenly.
        certified: whether noise is certified, see `gaussian_privatizer`.
    """

    plan: PrivacyPlan
    num_examples: int
    grad_fn: ClippedGrad[Any]
    ema: float | None
    shared: bool
    certified: bool
    _update: optax.GradientTransformation
    _filter_spec: FilterSpec
    _seed: int | bytes | None

    def __post_init__(self) -> None:
        _ = self._noise  # refused now if at all, and made outside of any trace

    def __repr__(self) -> str:
        loss, policy = function_name(self.grad_fn.__wrapped__), self.policy and str(self.policy)
        more = f"num_examples={self.num_examples}, policy={policy!r}"
        return f"{type(self).__name__}({loss}, {self.plan}, {more})"

    @property
    def policy(self) -> Policy | None:
        """The policy that the step was made with."""
        return self.grad_fn.policy

    @property
    def sharding(self) -> ShardingRules | None:
        """The sharding rules that the step was made with."""
        return self.grad_fn.sharding

    @functools.cached_property
    def _noise(self) -> optax.GradientTransformation | None:
        if self.plan.noise_multiplier == 0:  # then clipping may be without a bound as well
            return None
        return self.plan.privatizer(self.grad_fn, certified=self.certified)

    @property
    def has_certified_noise(self) -> bool:
        """Whether the noise is proven: it was asked for, and the policy's noise is not narrow."""
        return self.certified and (self.policy is None or is_wide(self.policy.noise_dtype))

    @property
    def is_seeded(self) -> bool:
        """Whether randomness follows from a seed, so that it can be repeated."""
        return self._seed is not None

    def mesh(self) -> AbstractContextManager[Any]:
        """The rules' mesh as a context, for code that works on a state; a step enters it itself."""
        rules = self.sharding
        if rules is None:
            return nullcontext()
        try:
            return jax.set_mesh(rules.mesh)
        except ValueError:  # while a step is traced inside of another program: no devices are named
            return jax.sharding.use_abstract_mesh(rules.mesh.abstract_mesh)

    def place(self, batch: PyTree[Any]) -> PyTree[Any]:
        """Puts this host's part of a batch where the step wants it.

        Args:
            batch: arrays with examples in front.
        """
        if self.sharding is None:
            return jax.tree.map(jnp.asarray, batch)
        with self.mesh():
            return self.sharding.shard_batch(batch)

    # Randomness.

    def secret_of(self, start: int) -> bytes:
        """The secret of a start: fresh, the same on all hosts; or what follows from the seed.

        Args:
            start: its number, of which a seeded secret is a function.
        """
        if self._seed is None:
            return fresh_secret()
        return digest(self._seed, ("eqx_dp start", str(start)), size=32)

    def sampler(self) -> PoissonSampler:
        """The sampler of the plan's batches; with sharding rules, of this host's part of them.

        Each call draws fresh randomness. With a seed it is that of the first start.
        """
        return self.sampler_from(self.secret_of(0))

    def sampler_from(self, secret: bytes) -> PoissonSampler:
        """As `sampler`, for the secret of a start.

        Args:
            secret: of the start.
        """
        rules, seed = self.sharding, digest(secret, ("sample",), size=32)
        if rules is None:
            return self.plan.sampler(self.num_examples, seed)
        hosts, host, parts = jax.process_count(), jax.process_index(), rules.local_shards()
        return self.plan.sampler(
            *(self.num_examples, seed, parts, hosts, host), devices=parts, shared=self.shared
        )

    # The first state.

    def init(
        self, model: Model | None = None, *, init_model: Callable[[], Model] | None = None
    ) -> TrainState[Model]:
        """The state before the first step; its arrays are copies, and its keys are fresh.

        A model that is too large for one device is made where it is to live:

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
            ValueError: neither is given, or both; `init_model` cannot be compiled; the model is
                paired with another policy than the step's; a sharding rule does not fit the model;
                nothing in the model is trained; the optimizer keeps state narrower than the
                policy's optimizer dtype.
        """
        first = FirstModel(model, init_model)
        del model  # so that an array goes as soon as its copy is there, if nobody else holds it
        with self.mesh():
            return self.begun(self.recipe.made(first), 0, self.secret_of(0))

    @property
    def recipe(self) -> Recipe:
        """How a state is made of a model."""
        return Recipe(self._update, self.grad_fn, self._filter_spec, self.ema is not None)

    def begun(self, body: Body, steps: int, secret: bytes) -> TrainState[Model]:
        """The state of a start, whose keys follow from its secret.

        Args:
            body: model, optimizer's state and average.
            steps: how many steps the model has taken before.
            secret: of the start.
        """
        noise: Any = optax.EmptyState()
        if self._noise is not None:
            key = key_from_secret(secret, "noise")
            noise = GaussianPrivatizerState(key, jnp.zeros((), jnp.int32))
        where = next(x.sharding for x in jax.tree.leaves(body.model) if is_array_or_shape(x))
        if self.sharding is not None:
            where = NamedSharding(self.sharding.mesh, PartitionSpec())
        # Put where the model is: else the first step would be compiled by itself.
        small = (noise, jnp.asarray(steps, jnp.int32), key_from_secret(secret, "step"))
        noise, count, key = jax.device_put(small, where)
        return TrainState(body.model, (noise, body.opt_state), count, key, body.average)

    # A step.

    def __call__(
        self,
        state: TrainState[Model],
        /,
        *batch: PyTree[Any],
        is_padding_example: Mask,
    ) -> TrainState[Model]:
        """Takes a step: clipped gradient, noise, update. Compiled once for each shape of batch.

        Args:
            state: the state after the step before. It is used up.
            *batch: arrays, or trees of arrays, with examples along their leading axes.
            is_padding_example: True where a slot holds no real example: the sampler's mask.

        Raises:
            ValueError: as for `grad_fn`; an array of `state` or `batch` was used up by an earlier
                step.
        """
        flat = FlatState.of(state)
        refuse_used_up("batch", batch)
        after = self.next(flat, batch, is_padding_example).state
        # JAX may read a numpy array where it lies: the caller may fill it anew from now on.
        return after if isinstance(after.step, Tracer) else jax.block_until_ready(after)

    def next(
        self,
        flat: FlatState[Model],
        batch: tuple[PyTree[Any], ...],
        mask: Mask,
    ) -> FlatState[Model]:
        """As a call of the step that is not waited for, for a loop that reads the state rarely.

        Args:
            flat: the state before, by `FlatState.of` or of the step before. Used up.
            batch: in memory that nobody writes to.
            mask: `is_padding_example`.
        """
        if any(map(is_gone, flat.carry.arrays)):
            refuse_used_up("state", flat.state)
        with self.mesh():
            carry, count = self._taken(_arguments(batch, mask, flat), flat.carry)
        return FlatState(carry, count)

    def lower(
        self,
        state: TrainState[Model],
        /,
        *batch: PyTree[Any],
        is_padding_example: Any,
    ) -> jax.stages.Lowered:
        """Lowers the step for these arguments; nothing is computed.

        Args:
            state: arrays or shapes of arrays; not used up. So the others.
            *batch: as for a call.
            is_padding_example: the same.
        """
        flat = FlatState.of(state)
        with self.mesh():
            return self._taken.lower(_arguments(batch, is_padding_example, flat), flat.carry)

    @functools.cached_property
    def _taken(self) -> Dispatch[_Arguments, Carry, Array]:
        def take(arguments: _Arguments, carry: Carry) -> tuple[Carry, Array]:
            model, opt_state, key, average = strong(carry)
            state = TrainState(model, opt_state, arguments.step, key, average)
            after = self._next(state, strong(arguments.batch), arguments.mask)
            return (after.model, after.opt_state, after.key, after.average), after.step

        return Dispatch(take, self.sharding is not None)

    def _next(
        self, state: TrainState[Model], batch: tuple[PyTree[Any], ...], mask: Any
    ) -> TrainState[Model]:
        def key_for(purpose: str) -> Any:
            return jax.random.fold_in(fold_text(state.key, purpose), state.step)

        has_key, _ = takes_key(self.grad_fn.__wrapped__, 1 + len(batch))
        key = key_for("loss") if has_key else None
        grads = self.grad_fn(state.model, *batch, key=key, is_padding_example=mask)
        noise_state, opt_state = state.opt_state
        if self._noise is not None:
            grads, noise_state = cast(Any, self._noise.update(grads, noise_state))
        params = self._wide(state.model)
        grads, opt_state = widened((grads, opt_state), self.policy)
        updates, opt_state = self._updated(grads, opt_state, params)
        opt_state = stored_state(opt_state, self.policy)
        is_random = self.policy is not None and self.policy.rounding == "stochastic"
        parameters = Parameters(self.policy, self.sharding)
        model = parameters.updated(state.model, updates, key_for("rounding") if is_random else None)
        average = state.average
        if self.ema is not None:
            average = moved(average, self._wide(model), self.ema, state.step + 1)
        return TrainState(model, (noise_state, opt_state), state.step + 1, state.key, average)

    def _updated(self, *arguments: PyTree[Any]) -> tuple[PyTree[Any], PyTree[Any]]:
        """The optimizer's update; a ValueError if it wants more than gradients and parameters."""
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
        return Parameters(self.policy, self.sharding).wide(self.grad_fn.trainable(model))


def _arguments(batch: tuple[PyTree[Any], ...], mask: Any, flat: FlatState[Any]) -> _Arguments:
    if mask is None:
        raise ValueError(
            "is_padding_example is None: what lies in padding slots would count as examples. Hand "
            "on the mask that sampler.take or sampler.batch returns; for a batch without padding, "
            "np.zeros(length, bool)."
        )
    return _Arguments(batch, mask, flat.step)
