"""A use site: an equation in which a parameter meets data, and what each kind has to know of it."""

from typing import Any, Protocol, runtime_checkable

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jaxtyping import Array

from ..views import shape_of

Matrices = tuple[Array, Array]
"""A gradient as a sum of outer products over time: x (group, time, in) and g (group, time, out)."""


@runtime_checkable
class Kind(Protocol):
    """What the engine knows of one kind of equation. One file a kind, one entry in `KINDS`.

    All methods but the first speak of one example and of one iteration of the scans around.
    """

    name: str

    def claims(self, equation: jex_core.JaxprEqn, operand: int) -> bool:
        """Whether the equation is of this kind, with the parameter as the given operand."""
        ...

    def keep(self, equation: jex_core.JaxprEqn, operand: int, inputs: list[Any]) -> Any:
        """What has to be kept of the other operands until the cotangent is known."""
        ...

    def gradient(
        self, equation: jex_core.JaxprEqn, operand: int, kept: Any, cotangent: Array
    ) -> Array:
        """The gradient with respect to the operand, in the dtype of what it is given."""
        ...


@runtime_checkable
class MatrixKind(Kind, Protocol):
    """A kind whose gradient is a sum of outer products."""

    def matrices(
        self, equation: jex_core.JaxprEqn, operand: int, kept: Any, cotangent: Array
    ) -> Matrices:
        """The factors of the gradient: x (group, time, in) and g (group, time, out)."""
        ...

    def in_matrix_form(
        self, equation: jex_core.JaxprEqn, operand: int, kept: Any, cotangent: Array
    ) -> Array:
        """The sum of the outer products: (group, in, out)."""
        ...

    def from_matrix(self, equation: jex_core.JaxprEqn, operand: int, gradient: Array) -> Array:
        """Brings a gradient (group, in, out) into the operand's shape."""
        ...


def outer_products(x: Array, g: Array) -> Array:
    """Sums x_t (outer) g_t over time, at the highest precision: `(group, in, out)`."""
    return jnp.einsum("...gtk,...gtp->...gkp", x, g, precision=jax.lax.Precision.HIGHEST)


def sum_to(equation: jex_core.JaxprEqn, operand: int, gradient: Array) -> Array:
    """Sums a gradient over the dimensions along which the equation repeats the operand."""
    shape = shape_of(equation.invars[operand])
    if not shape:
        return jnp.sum(gradient)
    repeated = [i for i, n in enumerate(shape) if n == 1 and gradient.shape[i] != 1]
    return jnp.sum(gradient, repeated, keepdims=True) if repeated else gradient
