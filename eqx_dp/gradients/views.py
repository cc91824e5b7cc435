"""Views: a parameter on its way to the equations that use it."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jaxtyping import Array

from ..programs import evaluated


class View(NamedTuple):
    """A linear image of one parameter: reshaped, transposed, cast, sliced, broadcast.

    Inside a scan that goes over slices of the parameter, `value` is one slice, and `image`
    still makes all of them, stacked along leading axes.

    Attributes:
        leaf: index of the parameter among the trainable leaves.
        value: the image as the program sees it at this point.
        image: makes the (stacked) image from the parameter; linear.
        over: the scans that go over slices of the image, outermost first; each is a leading axis
            of the stacked image.
        isometric: whether a gradient with respect to the image has the norm of the gradient with
            respect to the parameter. Only a broadcast, or a product with a number, changes it.
        sliced: whether the image leaves part of the parameter out.
    """

    leaf: int
    value: Array
    image: Callable[[Array], Array]
    over: tuple[Any, ...] = ()
    isometric: bool = True
    sliced: bool = False

    def map(
        self, function: Callable[[Array], Array], isometric: bool = True, sliced: bool = False
    ) -> "View":
        """The view that `function`, linear in one slice, makes of this one."""
        image, stacked = self.image, function
        for _ in self.over:
            stacked = jax.vmap(stacked)
        return View(
            self.leaf,
            function(self.value),
            lambda parameter: stacked(image(parameter)),
            self.over,
            self.isometric and isometric,
            self.sliced or sliced,
        )

    def pull_back(self, gradient: Array, parameter: jax.ShapeDtypeStruct) -> Array:
        """The gradient with respect to the parameter, from the one of the stacked image.

        Both have the dtype of `parameter`, the accumulate dtype.
        """
        (result,) = jax.linear_transpose(self.image, parameter)(gradient)
        return result


def parameter_view(leaf: int, parameter: Array | jax.ShapeDtypeStruct) -> View:
    """The view that a parameter is of itself."""
    value: Any = parameter
    return View(leaf, value, lambda parameter: parameter)


_REARRANGES = frozenset(
    {"reshape", "transpose", "squeeze", "expand_dims", "rev", "neg", "copy", "copy_p"}
)


def view_through(equation: jex_core.JaxprEqn, inputs: Sequence[Any]) -> list[View] | None:
    """The views that an equation makes of a view, or None if it is no rearrangement of one."""
    view = inputs[0]
    if len(inputs) != 1 or not isinstance(view, View):
        return None
    name = equation.primitive.name

    def bind(value: Array) -> Array:
        return evaluated(equation, [value])[0]

    if name in _REARRANGES:
        return [view.map(bind)]
    if name == "slice":
        return [view.map(bind, sliced=True)]
    if name == "convert_element_type" and jnp.issubdtype(
        equation.params["new_dtype"], jnp.floating
    ):
        # The image keeps the gradient's dtype: the accumulate dtype goes back to the parameter.
        return [view.map(lambda x: x)._replace(value=bind(view.value))]
    if name == "broadcast_in_dim":
        repeats = math.prod(shape_of(equation.outvars[0])) != math.prod(
            shape_of(equation.invars[0])
        )
        return [view.map(bind, isometric=not repeats)]
    if name == "split":
        return [
            view.map(lambda x, i=i: evaluated(equation, [x])[i], sliced=True)
            for i in range(len(equation.outvars))
        ]
    return None


def shape_of(variable: jex_core.Var | jex_core.Literal) -> tuple[int, ...]:
    """The shape of what a variable of a jaxpr holds."""
    aval: Any = variable.aval
    return tuple(aval.shape)
