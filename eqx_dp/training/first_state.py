"""The state before the first step: its shapes, where it lives, and how it is made there.

The shapes of a state and where each of its arrays lives follow from the model's shapes: nothing is
computed for them. A checkpoint is read, or a first state is made, directly in these places. So
there is one state at a time, and each device holds only its part of it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..expected import function
from ..gradients import ClippedGrad, FilterSpec, check_numbers, checked_trainable
from ..precision import agreed_policy
from ..sharding import ShardingRules
from ..trees import PyTree, is_shape
from ..updates import first_state
from .state import Parameters, TrainState, copied, refuse_used_up, strong

Model = TypeVar("Model")
T = TypeVar("T")


class FirstModel(Generic[Model]):
    """The model before the first step: given arrays, or a function that makes them.

    Attributes:
        shapes: the model, with shapes in place of arrays.
        given: the model that was given, or None.
        make: the function, or None.
        place: where a state without sharding rules lives.

    Raises:
        ValueError: both are None, or none is; an array of the model is gone, or the arrays are in
            several places; the function cannot be traced.
    """

    def __init__(self, model: Model | None, init_model: Callable[[], Model] | None = None):
        if (model is None) == (init_model is None) or isinstance(model, TrainState):
            found = "neither" if model is None else "both, or a state, whose .model is one"
            raise ValueError(
                "Give the starting model, trainer.run(model) or step.init(model), or a function "
                f"that makes it, init_model=make_model. Found {found}."
            )
        self.given, self.make = model, init_model
        if init_model is None:
            check_numbers("model", model)
            refuse_used_up("model", model)
        else:
            function("init_model", init_model, "init_model(), which returns the model")
        try:
            self.shapes: Model = eqx.filter_eval_shape(init_model or (lambda: model))
        except jax.errors.JAXTypeError as error:
            raise ValueError(
                "init_model cannot be compiled: it reads the value of an array that it computes. "
                "Give the model itself; or let init_model compute in numpy what it has to read."
            ) from error
        places = {x.sharding for x in jax.tree.leaves(model) if isinstance(x, jax.Array)}
        self.place = next(iter(places)) if len(places) == 1 else jnp.zeros(()).sharding


class Body(NamedTuple):
    """The parts of a state that follow from a model, and that a checkpoint saves."""

    model: Any
    opt_state: PyTree[Any]
    average: PyTree[Any] | None


class Recipe(NamedTuple):
    """How a state is made of a model.

    Attributes:
        update: the optimizer, without noise.
        grad_fn: the clipped gradient.
        filter_spec: what is trained.
        has_average: whether a moving average is kept.
    """

    update: optax.GradientTransformation
    grad_fn: ClippedGrad[Any]
    filter_spec: FilterSpec
    has_average: bool

    @property
    def parameters(self) -> Parameters:
        """How parameters are stored."""
        return Parameters(self.filter_spec, self.grad_fn.policy, self.grad_fn.sharding)

    def made(self, first: FirstModel[Any]) -> Body:
        """The body of the first state; its arrays are copies, each part made on its device."""
        form, rules = self.form(first), self.parameters.rules
        # With types of Explicit axes every device would draw all random numbers.
        auto = None if rules is None else _on_axes_of(AxisType.Auto, rules)

        def stored(given: Any) -> Any:
            with _traced_on(auto):
                model = given if first.make is None else first.make()
                return self.parameters._replace(rules=None).stored(model)

        given = first.given
        if rules is not None and first.make is None:  # arrays may be on another device
            given = rules.shard(given)
        model = _compiled(stored, form.model, given)
        return Body(model, *self.beside(form, model))

    def beside(self, form: Body, model: Any) -> tuple[PyTree[Any], PyTree[Any]]:
        """Optimizer state and average of a given model."""
        return _compiled(
            lambda model: copied(self._beside(model, self.parameters)),
            (form.opt_state, form.average),
            model,
        )

    def form(self, first: FirstModel[Any]) -> Body:
        """The shapes of a body, each with its sharding; nothing is computed.

        Optimizer state lives where the optimizer's `init` leaves it: `zeros_like` of a parameter
        where that lives, new arrays on all devices. It is read from types: on Explicit axes they
        say where an array lives, so `init` is traced on such axes, whatever the mesh has. Without
        sharding rules all of the state is where the model is.

        Raises:
            ValueError: the step cannot train the model, or the optimizer's `init` reads values.
        """
        rules = self.parameters.rules
        explicit = None if rules is None else _on_axes_of(AxisType.Explicit, rules)

        def body(parameters: Parameters, model: Any) -> Body:
            checked_trainable(model, self.filter_spec)
            if agreed_policy(model, self.grad_fn.policy) != self.grad_fn.policy:
                raise ValueError(
                    "The model is paired with a policy and the step has none, so its noise would "
                    "be drawn without a policy. Give the policy to make_step as well."
                )
            model = parameters.stored(model)
            return Body(model, *self._beside(model, parameters))

        def placed(leaf: Any) -> Any:
            if not is_shape(leaf):
                return leaf
            where = first.place
            if rules is not None:
                spec = PartitionSpec() if leaf.sharding is None else leaf.sharding.spec
                where = NamedSharding(rules.mesh, spec)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

        try:
            with _traced_on(explicit):
                parameters = self.parameters._replace(rules=explicit)
                return jax.tree.map(placed, eqx.filter_eval_shape(body, parameters, first.shapes))
        except jax.errors.JAXTypeError as error:
            raise ValueError(
                "The optimizer's init reads the values of parameters, so it cannot be compiled. "
                "Take an optimizer whose init works under jax.jit, as those of optax do."
            ) from error

    def _beside(self, model: Any, parameters: Parameters) -> tuple[PyTree[Any], PyTree[Any]]:
        """Optimizer state and average; they may share arrays with the model, or hold one twice."""
        params = parameters.wide(self.grad_fn.trainable(model))
        opt_state = strong(first_state(self.update, params, parameters.policy))
        return opt_state, params if self.has_average else None


def _compiled(function: Callable[..., T], form: T, *trees: PyTree[Any]) -> T:
    """Compiles a function whose arrays go where `form` says; the rest comes from `form`."""
    given, static = eqx.partition(trees, eqx.is_array)
    shapes, rest = eqx.partition(form, is_shape)
    leaves, structure = jax.tree.flatten(shapes)

    def arrays(given: PyTree[Any]) -> list[Any]:
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
