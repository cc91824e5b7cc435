"""The state before the first step: its shapes, where it lives, and how it is made there.

The shapes of a state and where each of its arrays lives follow from the model's shapes: nothing is
computed for them. A checkpoint is read into them, and a first state is made in their place. So
there is one state at a time, and each device holds its own part of it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, PartitionSpec, Sharding

from ..expected import function
from ..gradients import FilterSpec, checked_trainable
from ..precision import Policy, agreed_policy
from ..sharding import ShardingRules
from ..trees import PyTree, is_array_or_shape, is_shape
from ..updates import first_state
from .state import Parameters, as_array, copied, on_mesh, refuse_used_up, sharding_of, strong

Model = TypeVar("Model")
T = TypeVar("T")


class FirstModel(Generic[Model]):
    """The model before the first step: arrays that somebody has, or a function that makes them.

    Attributes:
        shapes: the model, with shapes in place of arrays.
        make: the function, or None.
        given: the model that was given; None after it was taken, and where there is a function.
        place: where a state without sharding rules lives; None if the model's arrays are in several
            places.

    Raises:
        ValueError: both are None, or none is; an array of the model is gone; the function cannot be
            traced.
    """

    def __init__(self, model: Model | None, init_model: Callable[[], Model] | None = None):
        if (model is None) == (init_model is None):
            found = "neither" if model is None else "both"
            raise ValueError(
                "Give the model before the first step, or init_model=, a function without "
                f"arguments that returns it; found {found}."
            )
        self.make: Callable[[], Model] | None = None
        self.given = model
        if init_model is None:
            refuse_used_up("model", model)
            self.shapes: Model = jax.tree.map(_shape_of, model)
        else:
            function("init_model", init_model, "init_model(), which returns the model")
            self.make = lambda: jax.tree.map(as_array, init_model())
            self.shapes = _shapes_made(self.make)
        arrays = jax.tree.leaves(eqx.filter(model, eqx.is_array))
        places = {x.sharding for x in arrays if isinstance(x, jax.Array)}
        places = places or {jnp.zeros(()).sharding}
        self.place: Sharding | None = places.pop() if len(places) == 1 else None

    def take(self) -> Model:
        """The model that was given, which is not held any longer."""
        model, self.given = self.given, None
        if model is None:
            raise ValueError("The model before the first step was taken already.")
        return model

    def check(self, check: Callable[[Any], None]) -> None:
        """Calls a function on the model; on its shapes, where it is not made yet."""
        if self.given is None:
            eqx.filter_eval_shape(check, self.shapes)
        else:
            check(self.given)


class Body(NamedTuple):
    """What of a state is made of a model, and saved in a checkpoint."""

    model: Any
    opt_state: PyTree[Any]
    average: PyTree[Any] | None


class Recipe(NamedTuple):
    """How a state is made of a model.

    Attributes:
        update: the optimizer, without noise.
        policy: of the step.
        rules: where arrays live.
        filter_spec: what is trained.
        trainable: from a model to what is trained of it.
        has_average: whether a moving average is kept.
    """

    update: optax.GradientTransformation
    policy: Policy | None
    rules: ShardingRules | None
    filter_spec: FilterSpec
    trainable: Callable[[Any], PyTree[Any]]
    has_average: bool

    def made(self, first: FirstModel[Any]) -> Body:
        """The body of the first state; its arrays are copies. A model that was given is taken."""
        form, parameters = self.form(first), Parameters(self.policy, self.rules)
        if first.make is None:
            model = parameters.stored(first.take())
        else:
            model = self._compiled_model(first.make, self._form_of(first, Parameters.stored))
        if first.make is None or form is None:
            beside = copied(self._beside(model, parameters))
        else:  # in buffers of their own, each part made on its device
            beside = _compiled(
                lambda model: copied(self._beside(model, parameters)),
                (form.opt_state, form.average),
                model,
            )
        body = Body(model, *beside)
        if form is not None:
            return placed_as(body, form) if self.rules is not None else body
        return body if self.rules is None else on_mesh(body, self.rules)

    def form(self, first: FirstModel[Any]) -> Body | None:
        """The shapes of a body, each with its sharding; nothing is computed.

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
        first.check(self._check)
        if self.rules is None and first.place is None:
            return None

        def body(parameters: Parameters, model: Any) -> Body:
            model = parameters.stored(model)
            return Body(model, *self._beside(model, parameters))

        try:
            return self._form_of(first, body)
        except Exception:  # whatever it is: to run it raises it again, if it is a fault
            return None

    def _check(self, model: Any) -> None:
        """Refuses a model that the step cannot train."""
        checked_trainable(model, self.filter_spec)
        if agreed_policy(model, self.policy) != self.policy:
            raise ValueError(
                "The model is paired with a policy and the step has none, so its noise would "
                "be drawn without a policy. Give the policy to make_step as well."
            )

    def _form_of(self, first: FirstModel[Any], function: Callable[[Parameters, Any], T]) -> T:
        """The shapes of what is made of a model, with shardings."""
        rules = self.rules
        explicit = None if rules is None else _on_axes_of(AxisType.Explicit, rules)
        with _traced_on(explicit):
            parameters = Parameters(self.policy, explicit)
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

    def beside(self, model: Any) -> tuple[PyTree[Any], PyTree[Any]]:
        """Optimizer state and average of a model that is there, in buffers of their own."""
        made = copied(self._beside(model, Parameters(self.policy, self.rules)))
        return made if self.rules is None else on_mesh(made, self.rules)

    def _beside(self, model: Any, parameters: Parameters) -> tuple[PyTree[Any], PyTree[Any]]:
        """Optimizer state and average; they may share arrays with the model, or hold one twice."""
        params = parameters.wide(self.trainable(model))
        opt_state = strong(first_state(self.update, params, self.policy))
        return opt_state, params if self.has_average else None

    def _compiled_model(self, make: Callable[[], Any], form: Any) -> Any:
        """The model as it is stored, each part of it made on its device."""
        parameters = Parameters(self.policy, None)
        # By types of Explicit axes all random numbers would be drawn on every device.
        auto = None if self.rules is None else _on_axes_of(AxisType.Auto, self.rules)

        def compute() -> Any:
            with _traced_on(auto):
                return parameters.stored(make())

        return _compiled(compute, form)


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


def _shape_of(leaf: Any) -> Any:
    """An array's shape, with the dtype that it has in a computation; anything else as it is."""
    if not eqx.is_array(leaf) and not hasattr(leaf, "__array_interface__"):
        return leaf
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
    return jax.ShapeDtypeStruct(leaf.shape, dtype)


def _shapes_made(make: Callable[[], Model]) -> Model:
    try:
        return eqx.filter_eval_shape(make)
    except jax.errors.JAXTypeError as error:
        raise ValueError(
            "init_model cannot be compiled: it reads the value of an array that it computes. Give "
            "the model itself; or let init_model compute in numpy what it has to read."
        ) from error
