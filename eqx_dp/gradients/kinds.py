"""The description of an equation that multiplies a parameter by data.

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
        operands: the shapes of its operands.
        result: the shape of its result.
    """

    primitive: str
    params: tuple[tuple[str, Any], ...]
    operands: tuple[tuple[int, ...], ...]
    result: tuple[int, ...]

    def param(self, name: str) -> Any:
        """One parameter."""
        return dict(self.params)[name]


def operation_of(equation: jex_core.JaxprEqn) -> Operation:
    """The operation of an equation with one result."""
    return Operation(
        equation.primitive.name,
        tuple(sorted(equation.params.items())),
        tuple(map(shape_of, equation.invars)),
        shape_of(equation.outvars[0]),
    )


class MatrixAxes(NamedTuple):
    """How an array consists of matrices.

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
    """One kind of use. Each kind has a file, and an entry in `KINDS`.

    All methods except the first describe one example and one iteration of the enclosing scans.
    """

    name: str

    def claims(self, equation: jex_core.JaxprEqn, operand: int) -> bool:
        """Whether the equation is of this kind, with the parameter as the given operand."""
        ...

    def residuals(self, operation: Operation, operand: int, inputs: list[Any]) -> Any:
        """The part of the other operands that is kept until the cotangent is known."""
        ...

    def matrix_axes(self, operation: Operation, operand: int) -> MatrixAxes:
        """How the operand consists of matrices (group, in, out)."""
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
    """The shape of a variable of a jaxpr."""
    aval: Any = variable.aval
    return tuple(aval.shape)
