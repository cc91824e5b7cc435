"""A kind of use: what it takes to know of an equation that multiplies a parameter by data.

There is one file and one class a kind, and an entry in `KINDS` (`taps.py`). No other file asks
which kind a use is.

Three things are no kind's own. Norm, bound and sum are a leaf's: the uses of one leaf may be of two
kinds (a table that is looked up, and multiplied by the output), and what counts are inner products
between them. They follow from the vectors, of which `is_one_hot` says how they are given; so does
their cost. And a policy says which products are narrow, among them those that no parameter enters.
"""

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple, Self

import jax.extend.core as jex_core
from jaxtyping import Array, Float


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


@dataclasses.dataclass(frozen=True)
class Kind(abc.ABC):
    """An equation of two operands, one of which is the parameter; equal ones do the same.

    The parameter's gradient is the sum of outer products of vectors: one from the other operand,
    the *data*, and one from the cotangent of the result. Everything here describes one example and
    one iteration of the enclosing scans.

    Attributes:
        name: for `explain`.
        is_one_hot: whether the data's vectors are one-hot, and given by their rows.
        always: why a leaf that has such uses alone is factored, whatever it costs; "" where
            costs decide.
        has_rule: whether a parameter that is formed has its gradient from `outer_products`, not
            from JAX's rule.
        operand: which operand is the parameter; the data is the other one of the first two.
        operands: the shapes of both.
        result: the shape of the result.
        params: the equation's parameters.
    """

    name: ClassVar[str]
    is_one_hot: ClassVar[bool] = False
    always: ClassVar[str] = ""
    has_rule: ClassVar[bool] = False

    operand: int
    operands: tuple[tuple[int, ...], ...]
    result: tuple[int, ...]
    params: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, equation: jex_core.JaxprEqn, operand: int) -> Self:
        """The kind of an equation that it claims."""
        shapes = tuple(map(shape_of, equation.invars[:2]))
        result = shape_of(equation.outvars[0])
        return cls(operand, shapes, result, tuple(sorted(equation.params.items())))

    @classmethod
    @abc.abstractmethod
    def claims(cls, equation: jex_core.JaxprEqn, operand: int) -> bool:
        """Whether the equation is of this kind, with the parameter as the given operand."""

    @property
    @abc.abstractmethod
    def matrix_axes(self) -> MatrixAxes:
        """How the parameter consists of matrices (group, in, out)."""

    @property
    @abc.abstractmethod
    def terms(self) -> int:
        """How many outer products there are in each group."""

    def residual(self, data: Any) -> Any:
        """What is kept of the data until the cotangent is known."""
        return data

    @abc.abstractmethod
    def factors(
        self, residual: Any, cotangent: Array, dtype: Any
    ) -> tuple[Array, Float[Array, "group time features_out"]]:
        """The vectors of all outer products, cast: (group, time, in), and of the cotangent.

        One-hot vectors are given by their rows, (group, time, 1), as they are.
        """

    def outer_products(
        self, residual: Any, cotangent: Array, dtype: Any
    ) -> Float[Array, "group features_in features_out"]:
        """The gradient as matrices, of vectors cast to a dtype first; of kinds with `has_rule`."""
        raise NotImplementedError(f"{self.name} has no rule of its own.")

    @property
    def order(self) -> tuple[int, ...]:
        """The axes of the result in the order in which `factors` takes them."""
        return tuple(range(len(self.result)))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter."""
        return self.operands[self.operand]

    def param(self, name: str) -> Any:
        """A parameter of the equation; None if it has none of that name."""
        return dict(self.params).get(name)


def shape_of(variable: jex_core.Var | jex_core.Literal) -> tuple[int, ...]:
    """The shape of a variable of a jaxpr."""
    aval: Any = variable.aval
    return tuple(aval.shape)
