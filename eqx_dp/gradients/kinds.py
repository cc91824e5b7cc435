"""What the engine knows of an equation that multiplies a parameter by data.

One file a kind: `contraction`, `convolution`, `lookup`.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.extend.core as jex_core
from jaxtyping import Array


class Operation(NamedTuple):
    """What an equation does, apart from its variables: equal ones do the same.

    Attributes:
        primitive: its name.
        params: its parameters, by name.
        operands: the shapes of what it takes.
        result: the shape of what it makes.
    """

    primitive: str
    params: tuple[tuple[str, Any], ...]
    operands: tuple[tuple[int, ...], ...]
    result: tuple[int, ...]

    def param(self, name: str) -> Any:
        """One parameter."""
        return dict(self.params)[name]


def operation_of(equation: jex_core.JaxprEqn) -> Operation:
    """What an equation with one result does."""
    return Operation(
        equation.primitive.name,
        tuple(sorted(equation.params.items())),
        tuple(map(shape_of, equation.invars)),
        shape_of(equation.outvars[0]),
    )


class MatrixAxes(NamedTuple):
    """How an array is made of matrices.

    Attributes:
        shape: what the array is reshaped to first.
        groups, rows, columns: the axes of that which make up each dimension of the matrices.
    """

    shape: tuple[int, ...]
    groups: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]


@runtime_checkable
class Kind(Protocol):
    """What the engine knows of one kind of use. One file a kind, one entry in `KINDS`.

    All methods but the first speak of one example and of one iteration of the scans around.
    """

    name: str

    def claims(self, equation: jex_core.JaxprEqn, operand: int) -> bool:
        """Whether the equation is of this kind, with the parameter as the given operand."""
        ...

    def residuals(self, operation: Operation, operand: int, inputs: list[Any]) -> Any:
        """What has to be kept of the other operands until the cotangent is known."""
        ...

    def matrix_axes(self, operation: Operation, operand: int) -> MatrixAxes:
        """How the operand is made of matrices (group, in, out)."""
        ...

    def steps(self, operation: Operation, operand: int) -> int:
        """How many outer products there are in each group."""
        ...

    def factors(
        self, operation: Operation, operand: int, residuals: Any, cotangent: Array
    ) -> tuple[Array, Array]:
        """The vectors whose outer products are summed: (group, time, in), (group, time, out)."""
        ...


def shape_of(variable: jex_core.Var | jex_core.Literal) -> tuple[int, ...]:
    """The shape of what a variable of a jaxpr holds."""
    aval: Any = variable.aval
    return tuple(aval.shape)
