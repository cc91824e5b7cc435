"""The model before the first step: arrays that somebody has, or a function that makes them."""

from collections.abc import Callable
from typing import Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from ..expected import function
from ..gradients import FilterSpec, split_trainable
from .identity import shape_of
from .state import as_array, refuse_used_up

Model = TypeVar("Model")


class FirstModel(Generic[Model]):
    """The model before the first step.

    It is a model, which is held until `take`, or a function that returns it.

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
                "Give either the model before the first step, or init_model, a function without "
                f"arguments that returns it; found {found}."
            )
        self.make: Callable[[], Model] | None = None
        self.given = model
        if init_model is None:
            refuse_used_up("model", model)
            self.shapes: Model = jax.tree.map(shape_of, model)
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
        if self.given is None:
            raise ValueError("The model before the first step was taken already.")
        model, self.given = self.given, None
        return model

    def keep_frozen(self, filter_spec: FilterSpec) -> None:
        """Lets go of what is trained of a model that was given."""
        if self.given is not None:
            self.given = split_trainable(self.given, filter_spec)[1]


def _shapes_made(make: Callable[[], Model]) -> Model:
    try:
        return eqx.filter_eval_shape(make)
    except jax.errors.JAXTypeError as error:
        raise ValueError(
            "init_model cannot be compiled: it reads the value of an array that it computes. Give "
            "the model itself; or let init_model compute in numpy what it has to read."
        ) from error
