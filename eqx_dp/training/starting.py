"""The state before the first step: its shapes, where it lives, and how it is made there.

The shapes of a state and where each of its arrays lives follow from the model's shapes: nothing is
computed for them. A step is traced on these, a checkpoint is read into them, and a first state is
made in their place. So there is one state at a time, and each device holds its own part of it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, PartitionSpec
from jaxtyping import Array, Bool

from ..gradients import checked_trainable, split_trainable
from ..precision import agreed_policy
from ..sharding import ShardingRules
from ..trees import PyTree, is_array_or_shape, is_shape
from ..updates import first_state
from .first_model import FirstModel
from .settings import StepSettings
from .state import (
    Parameters,
    TrainState,
    arrays_of,
    as_array,
    copied,
    on_mesh,
    same,
    sharding_of,
    strong,
)

Model = TypeVar("Model")
T = TypeVar("T")


class Starting(StepSettings[Model]):
    """How a step makes the state before the first step."""

    def init(
        self, model: Model | None = None, *, init_model: Callable[[], Model] | None = None
    ) -> TrainState[Model]:
        """The state before the first step; its arrays are copies.

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
        return self.first_state(first)

    def first_state(self, first: FirstModel[Model]) -> TrainState[Model]:
        """As `init`. A model that was given is taken."""
        form = self.form(first)
        with self.mesh():
            if first.make is None:
                model = self._parameters.stored(first.take())
            else:
                model = self._made(first.make, self._form_of(first, Parameters.stored))
            if first.make is None or form is None:
                beside = copied(self._beside(model, self._parameters))
            else:
                beside = self._made_beside(model, (form.opt_state[1], form.average))
            state = self._assembled(model, *beside)
            if self.sharding is None:
                return state
            return on_mesh(state, self.sharding) if form is None else placed_as(state, form)

    def _check(self, first: FirstModel[Model]) -> None:
        """Refuses a model that the step cannot train."""

        def check(model: Model) -> None:
            checked_trainable(model, self.filter_spec)
            if agreed_policy(model, self.policy) != self.policy:
                raise ValueError(
                    "The model is paired with a policy and the step has none, so its noise would "
                    "be drawn without a policy. Give the policy to make_step as well."
                )

        if first.given is None:
            eqx.filter_eval_shape(check, first.shapes)
        else:
            check(first.given)

    # The shapes of a state.

    def form(self, first: FirstModel[Model]) -> TrainState[Model] | None:
        """The shapes of a state, each with its sharding; nothing is computed.

        Optimizer state lives where the optimizer's `init` leaves it: `zeros_like` of a parameter
        where that lives, new arrays on all devices. It is read from types: on Explicit axes they
        say where an array lives, so `init` is traced on such axes, whatever the mesh has.

        | case | what happens |
        |---|---|
        | the optimizer's `init` cannot be traced on Explicit axes | None: it has to be run |
        | no sharding rules, and a model whose arrays are in several places | the same |
        | no sharding rules otherwise | all of the state is where the model is |

        Raises:
            ValueError: the step cannot train the model.
        """
        self._check(first)
        if self.sharding is None and first.place is None:
            return None

        def state_of(parameters: Parameters, model: Model) -> TrainState[Model]:
            model = parameters.stored(model)
            return self._assembled(model, *self._beside(model, parameters))

        try:
            return self._form_of(first, state_of)
        except Exception:  # whatever it is: to run it raises it again, if it is a fault
            return None

    def _form_of(self, first: FirstModel[Model], function: Callable[[Parameters, Model], T]) -> T:
        """The shapes of what is made of a model, with shardings."""
        rules = self.sharding
        explicit = None if rules is None else _on_axes_of(AxisType.Explicit, rules)
        parameters = self._parameters._replace(rules=explicit)
        with _traced_on(explicit):
            shapes = eqx.filter_eval_shape(function, parameters, first.shapes)

        def placed(leaf: Any) -> Any:
            if not is_shape(leaf):
                return leaf
            where = first.place
            if rules is not None:
                spec = PartitionSpec() if leaf.sharding is None else leaf.sharding.spec
                where = sharding_of(spec, leaf.ndim, rules)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

        return jax.tree.map(placed, shapes)

    def _beside(self, model: Model, parameters: Parameters) -> tuple[PyTree[Any], PyTree[Any]]:
        """Optimizer state and average; they may share arrays with the model, or hold one twice."""
        params = parameters.wide(self.grad_fn.trainable(model))
        opt_state = strong(first_state(self._update, params, self.policy))
        return opt_state, None if self.ema is None else params

    def _assembled(
        self, model: Model, opt_state: PyTree[Any], average: PyTree[Any]
    ) -> TrainState[Model]:
        return TrainState(
            model,
            (self._noise.init(()), opt_state),
            jnp.zeros((), jnp.int32),
            {name: jnp.zeros((), jnp.float32) for name in self.disclose},
            average,
        )

    # What is made where it is to live.

    def _made(self, make: Callable[[], Model], form: Model) -> Model:
        """The model as it is stored, each part of it made on its device."""
        parameters = self._parameters._replace(rules=None)
        rules = self.sharding
        # By types of Explicit axes all random numbers would be drawn on every device.
        auto = None if rules is None else _on_axes_of(AxisType.Auto, rules)

        def compute() -> Model:
            with _traced_on(auto):
                return parameters.stored(make())

        return _compiled(compute, form)

    def _made_beside(
        self, model: Model, form: tuple[PyTree[Any], PyTree[Any]]
    ) -> tuple[PyTree[Any], PyTree[Any]]:
        """Optimizer state and average, likewise, in buffers of their own."""
        return _compiled(lambda model: copied(self._beside(model, self._parameters)), form, model)

    # What a state that was read needs beside.

    def with_noise(self, form: TrainState[Model]) -> TrainState[Model]:
        """A state, or its shapes, with the noise's own state, which is saved nowhere."""
        with self.mesh():
            noise = self._noise.init(())
            if self.sharding is not None:
                noise = placed_as(noise, form.opt_state[0])
        return eqx.tree_at(lambda state: state.opt_state, form, (noise, form.opt_state[1]))

    def other_frozen(self, first: FirstModel[Model], model: Model) -> list[str]:
        """Paths of arrays that are not trained, and whose values are others than in the beginning.

        Those that `init_model` makes are compared up to rounding, because a compiler rounds as it
        likes, and otherwise for another number of devices.
        """
        found = _frozen(model, self.filter_spec)
        if not found:
            return []
        with self.mesh():
            if first.make is None:
                given = _frozen(jax.tree.map(as_array, first.given), self.filter_spec)

                def alike(name: str, leaf: Array) -> bool:
                    one = given[name]  # of another dtype if the policy stores it in another
                    one = one if one.dtype == leaf.dtype else one.astype(leaf.dtype)
                    return same(jax.device_put(one, leaf.sharding), leaf)

                return [name for name, leaf in found.items() if not alike(name, leaf)]
            make, parameters = first.make, self._parameters._replace(rules=None)

            def compare(found: dict[str, Array]) -> dict[str, Bool[Array, ""]]:
                with _traced_on(None):
                    made = _frozen(parameters.stored(make()), self.filter_spec)
                return {name: _close(made[name], leaf) for name, leaf in found.items()}

            rules = self.sharding
            everywhere = None if rules is None else sharding_of(PartitionSpec(), 0, rules)
            is_alike = jax.jit(compare, out_shardings=everywhere)(found)
            return [name for name, alike in is_alike.items() if not bool(alike)]


def placed_as(tree: T, form: PyTree[Any]) -> T:
    """Puts each array where its form says."""

    def put(shape: Any, leaf: Any) -> Any:
        return jax.device_put(leaf, shape.sharding) if is_array_or_shape(shape) else leaf

    return jax.tree.map(put, form, tree)


def _compiled(function: Callable[..., T], form: T, *trees: PyTree[Any]) -> T:
    """The arrays of a function's result, compiled, where a form says; all else from the form."""
    given, static = eqx.partition(trees, eqx.is_array)
    shapes, rest = eqx.partition(form, is_shape)
    leaves, structure = jax.tree.flatten(shapes)

    def arrays(given: PyTree[Any]) -> list[Array]:
        result = function(*eqx.combine(given, static))
        return [leaf for leaf in jax.tree.leaves(result) if eqx.is_array(leaf)]

    made = jax.jit(arrays, out_shardings=[leaf.sharding for leaf in leaves])(given)
    return eqx.combine(structure.unflatten(made), rest)


def _on_axes_of(kind: AxisType, rules: ShardingRules) -> ShardingRules:
    """The same rules, on a mesh whose axes are all of one kind."""
    mesh = rules.mesh
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(kind,) * len(mesh.axis_names))
    return ShardingRules(mesh, rules.examples, rules.params, rules.accumulators)


def _traced_on(rules: ShardingRules | None) -> AbstractContextManager[Any]:
    """A context for what is traced on the axes of some rules."""
    if rules is None:
        return nullcontext()
    return jax.sharding.use_abstract_mesh(rules.mesh.abstract_mesh)


def _frozen(model: PyTree[Any], filter_spec: Any) -> dict[str, Array]:
    """What is not trained of a model, by path."""
    return arrays_of(split_trainable(model, filter_spec)[1])


def _close(one: Array, other: Array) -> Bool[Array, ""]:
    """Whether two arrays hold the same values, up to rounding."""
    if not jnp.issubdtype(other.dtype, jnp.inexact):
        return jnp.array_equal(one, other)
    sizes = jnp.abs(one)  # a mask of infinities says nothing of how the rest is rounded
    largest = jnp.max(sizes, initial=0, where=jnp.isfinite(sizes))
    bound = 64 * jnp.finfo(other.dtype).eps * largest
    return jnp.allclose(one, other, rtol=0, atol=bound, equal_nan=True)
