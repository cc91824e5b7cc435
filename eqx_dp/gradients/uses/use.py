"""A use: an equation that multiplies a parameter by data, and what each kind has to know of it."""

import functools
import math
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...precision import Matmul
from ...sharding import whole
from ..narrow_products import Scaled, restored, scaled, with_cast_cotangent
from ..views import Place, Step, Steps, place_of, pulled_back, shape_of, taken

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


ScanUse: TypeAlias = Literal["slices", "time"]


class ParamUse(NamedTuple):
    """An equation that multiplies a parameter by data; equal ones have equal gradients.

    Attributes:
        kind: which kind of equation it is.
        operation: what the equation does.
        operand: which operand is the parameter.
        shape: of the parameter.
        view: from the parameter to that operand; slices of scans are in front.
        scans: the scans around it, outermost first: whether each goes over slices of the parameter
            or uses all of it many times.
        result: shape and dtype of the equation's result, the lengths of the scans in front.
        residuals: the same of what is kept.
        matmul: the narrow dtypes that the equation multiplies in, if it does.
    """

    kind: Kind
    operation: Operation
    operand: int
    shape: tuple[int, ...]
    view: Steps
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
        stack = tuple(self.result.shape[: len(self.scans)])
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
    def slices(self) -> tuple[int, ...]:
        """The lengths of the scans around it that go over slices of the parameter."""
        lengths = zip(self.result.shape, self.scans, strict=False)
        return tuple(n for n, use in lengths if use == "slices")

    @property
    def steps(self) -> int:
        """How many outer products there are in each of its matrices."""
        lengths = zip(self.result.shape, self.scans, strict=False)
        times = math.prod(n for n, use in lengths if use == "time")
        return times * self.kind.steps(self.operation, self.operand)

    @property
    def is_empty(self) -> bool:
        """Whether nothing can come of it: a scan of no steps, a slice of no rows."""
        return 0 in (*self.result.shape, *self.shape, *self.operation.operands[self.operand])

    @property
    def _split(self) -> tuple[Step, tuple[tuple[int, ...], ...]]:
        """From the operand to an array whose axes are parts of groups, rows and columns."""
        found, lead = self.kind.matrix_axes(self.operation, self.operand), len(self.slices)
        of_groups, rows, columns = (tuple(lead + i for i in part) for part in found[1:])
        return Step("reshape", found.shape, lead), ((*range(lead), *of_groups), rows, columns)

    @property
    def place(self) -> Place | None:
        """Where the entries of its matrices stand in the parameter."""
        return place_of(self.view, self.shape, *self._split)

    @property
    def matrices(self) -> tuple[int, int, int]:
        """How many groups, rows and columns its matrices have."""
        found = self.kind.matrix_axes(self.operation, self.operand)
        groups, rows, columns = (math.prod(found.shape[i] for i in part) for part in found[1:])
        return math.prod(self.slices) * groups, rows, columns

    def to_parameter(self, gradient: Float[Array, "group in out"]) -> Array:
        """The gradient with respect to the parameter, from that with respect to the matrices."""
        split, parts = self._split

        def of_parameter(parameter: Array) -> Array:
            x = split(taken(self.view, parameter))
            order = [axis for part in parts for axis in part]
            return x.transpose(*order).reshape(self.matrices)

        return pulled_back(of_parameter, gradient, self.shape)

    def from_operand(self, gradient: Array) -> Array:
        """The same from that with respect to the operand, slices of scans in front."""
        return pulled_back(functools.partial(taken, self.view), gradient, self.shape)

    def inside(self) -> "ParamUse":
        """The use as one iteration of the scans around it sees it: of its operand alone."""

        def inner(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape[len(self.scans) :], x.dtype)

        result, residuals = jax.tree.map(inner, (self.result, self.residuals))
        shape = self.operation.operands[self.operand]
        return self._replace(shape=shape, view=(), scans=(), result=result, residuals=residuals)
