"""A use: an equation in which a parameter meets data, and what each kind has to know of it."""

import math
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jaxtyping import Array

from ...precision import Matmul
from ...sharding import whole
from ..layouts import Layout, layout_of, merged, reshaped, shape_of
from ..scaled_products import Scaled, restored, scaled, with_cast_cotangent

_FLOAT32 = jnp.dtype(jnp.float32)


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

    def gradient(
        self, operation: Operation, operand: int, residuals: Any, cotangent: Array
    ) -> Array:
        """The gradient with respect to the operand; of a `MatrixKind`, as matrices."""
        ...


@runtime_checkable
class MatrixKind(Kind, Protocol):
    """A kind whose gradient is a sum of outer products."""

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


ScanUse: TypeAlias = Literal["slices", "time", "added"]


class ParamUse(NamedTuple):
    """An equation that uses a parameter linearly; equal ones have equal gradients.

    Attributes:
        kind: which kind of equation it is.
        operation: what the equation does.
        operand: which operand is the parameter.
        view: where the entries of that operand stand in the parameter; where scans go over slices
            of it, those of all slices, along axes in front.
        matrices: the same of the operand as matrices (group, in, out), slices being groups; None
            where the kind knows none.
        scans: the scans around it, outermost first: whether each goes over slices of the parameter
            or uses all of it many times; of the latter, whether the steps' cotangents are held side
            by side (`time`) or added up.
        result: shape and dtype of what is tapped, the equation's result or the operand of a `vjp`;
            the lengths of the scans in front, but for those whose steps are added up.
        residuals: the same of what is kept.
        matmul: the narrow dtypes that the equation multiplies in, if it does.
    """

    kind: Kind
    operation: Operation
    operand: int
    view: Layout
    matrices: Layout | None
    scans: tuple[ScanUse, ...]
    result: jax.ShapeDtypeStruct
    residuals: Any
    matmul: Matmul | None = None

    @property
    def name(self) -> str:
        """The kind, and what the parameter is cast to there."""
        return self.kind.name + (f"[{self.matmul.forward}]" if self.matmul else "")

    def narrowed(self, matmul: Matmul) -> "ParamUse":
        """The same use where the equation multiplies in narrow dtypes: a product's."""
        stack = tuple(self.result.shape[: len(self.stacked)])
        values = jax.ShapeDtypeStruct(self.residuals.shape, matmul.forward)
        exponent = jax.ShapeDtypeStruct(stack, jnp.int32)
        return self._replace(residuals=Scaled(values, exponent), matmul=matmul)

    def kept(self, inputs: list[Any]) -> Any:
        """What is kept of the other operands, of a narrow product as they are multiplied."""
        others = [x if i == self.operand else whole(x) for i, x in enumerate(inputs)]
        found = self.kind.residuals(self.operation, self.operand, others)
        return found if self.matmul is None else scaled(found, self.matmul.forward, self.matmul)

    def restored(self, residuals: Any) -> Any:
        """What the kind takes for residuals, from what was kept: what was multiplied, exactly."""
        return residuals if self.matmul is None else restored(residuals, _FLOAT32)

    def received(self, result: Array) -> Array:
        """The result, whose cotangent becomes what a narrow product is differentiated by."""
        return result if self.matmul is None else with_cast_cotangent(self.matmul, result)

    @property
    def stacked(self) -> tuple[ScanUse, ...]:
        """The scans whose steps stand side by side, an axis for each."""
        return tuple(its for its in self.scans if its != "added")

    @property
    def slices(self) -> tuple[int, ...]:
        """The lengths of the scans around it that go over slices of the parameter."""
        lengths = zip(self.result.shape, self.stacked, strict=False)
        return tuple(n for n, use in lengths if use == "slices")

    @property
    def steps(self) -> int:
        """How many outer products there are in each of its matrices."""
        assert isinstance(self.kind, MatrixKind)
        lengths = zip(self.result.shape, self.stacked, strict=False)
        times = math.prod(n for n, use in lengths if use == "time")
        return times * self.kind.steps(self.operation, self.operand)

    @property
    def is_empty(self) -> bool:
        """Whether nothing can come of it: a scan of no steps, a slice of no rows."""
        return 0 in (*self.result.shape, *self.view.shape)

    def inside(self) -> "ParamUse":
        """The use as one iteration of the scans around it sees it: of its operand alone."""

        def inner(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape[len(self.stacked) :], x.dtype)

        result, residuals = jax.tree.map(inner, (self.result, self.residuals))
        view = layout_of(self.operation.operands[self.operand])
        matrices = as_matrices(self.kind, self.operation, self.operand, view)
        return self._replace(
            view=view, matrices=matrices, scans=(), result=result, residuals=residuals
        )


def as_matrices(kind: Kind, operation: Operation, operand: int, view: Layout) -> Layout | None:
    """The layout of a view's matrices; None where the kind knows none, or in no regular order.

    Args:
        kind: the kind of a use.
        operation: what it does.
        operand: which operand the view is.
        view: its layout, slices of scans in front, which are groups.
    """
    if not isinstance(kind, MatrixKind):
        return None
    found, over = (
        kind.matrix_axes(operation, operand),
        len(view.axes) - len(operation.operands[operand]),
    )
    axes = reshaped(view.axes[over:], found.shape)
    if axes is None:
        return None
    groups, rows, columns = ([axes[i] for i in part] for part in found[1:])
    return view._replace(
        axes=tuple(
            merged(digit for axis in part for digit in axis)
            for part in ([*view.axes[:over], *groups], rows, columns)
        )
    )


def sum_to(operation: Operation, operand: int, gradient: Array) -> Array:
    """Sums a gradient over the dimensions along which the equation repeats the operand."""
    shape = operation.operands[operand]
    if not shape:
        return jnp.sum(gradient)
    repeated = [i for i, n in enumerate(shape) if n == 1 and gradient.shape[i] != 1]
    return jnp.sum(gradient, repeated, keepdims=True) if repeated else gradient
