"""A use: an equation that multiplies a parameter by data, and where in the parameter it does so.

There is one file per kind of use: `contraction`, `convolution`, `lookup`.
"""

import functools
import math
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..precision import Matmul
from ..sharding import Cut, evaluated_whole, whole
from .narrow_products import Scaled, restored, scaled, with_cast_cotangent
from .views import Place, Step, Steps, place_of, pulled_back, taken


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
        residuals: shapes and dtypes of the residuals, likewise.
        matmul: the narrow dtypes that the equation multiplies in, if it does.
        is_held: whether what it meets is held for the backward pass: it is in no checkpoint.
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
    is_held: bool = True

    @property
    def name(self) -> str:
        """The kind, and the dtype that the parameter is cast to there."""
        return self.kind.name + (f"[{self.matmul.forward}]" if self.matmul else "")

    def narrowed(self, matmul: Matmul) -> "ParamUse":
        """The same use, with a product in narrow dtypes."""
        stack = tuple(self.result.shape[: len(self.scans)])
        values = jax.ShapeDtypeStruct(self.residuals.shape, matmul.forward)
        exponent = jax.ShapeDtypeStruct(stack, jnp.int32)
        return self._replace(residuals=Scaled(values, exponent), matmul=matmul)

    def kept(self, inputs: list[Any]) -> Any:
        """The residuals: of a narrow product, the cast operands."""
        others = [x if i == self.operand else whole(x) for i, x in enumerate(inputs)]
        found = self.kind.residuals(self.operation, self.operand, others)
        return found if self.matmul is None else scaled(found, self.matmul.forward, self.matmul)

    def restored(self, residuals: Any) -> Any:
        """The residuals as the kind takes them: exactly the multiplied values."""
        return residuals if self.matmul is None else restored(residuals, jnp.dtype("float32"))

    def tap(self) -> Array:
        """A zero of the result's shape, the lengths of the enclosing scans in front."""
        return jnp.zeros_like(self.result)

    def evaluated(
        self, equation: jex_core.JaxprEqn, inputs: list[Any], tap: Array
    ) -> tuple[Array, Any]:
        """The result with the tap added to it, and the residuals."""
        (result,) = evaluated_whole(equation, inputs)
        return self.received(result + tap), self.kept(inputs)

    def received(self, result: Array) -> Array:
        """The result; its cotangent is cast as the derivative of a narrow product needs it."""
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
    def is_seen(self) -> bool:
        """Whether `ghost` may measure and sum it within the backward pass: no scan repeats it."""
        return "time" not in self.scans

    @property
    def is_empty(self) -> bool:
        """Whether it contributes nothing: a scan without steps, a slice without rows."""
        return 0 in (*self.result.shape, *self.shape, *self.operation.operands[self.operand])

    @property
    def _split(self) -> tuple[Step, tuple[tuple[int, ...], ...]]:
        """The step from the operand to an array with parts of groups, rows and columns as axes."""
        found, lead = self.kind.matrix_axes(self.operation, self.operand), len(self.slices)
        of_groups, rows, columns = (tuple(lead + i for i in part) for part in found[1:])
        return Step("reshape", found.shape, lead), ((*range(lead), *of_groups), rows, columns)

    @property
    def place(self) -> Place | None:
        """The positions of its matrices' entries in the parameter."""
        return place_of(self.view, self.shape, *self._split)

    @property
    def matrices(self) -> tuple[int, int, int]:
        """How many groups, rows and columns its matrices have."""
        found = self.kind.matrix_axes(self.operation, self.operand)
        groups, rows, columns = (math.prod(found.shape[i] for i in part) for part in found[1:])
        return math.prod(self.slices) * groups, rows, columns

    def factors(
        self, residuals: Any, cotangent: Array, dtype: np.dtype[Any]
    ) -> tuple[Array, Float[Array, "group time features_out"]]:
        """One example's factors: scans over slices make groups, scans over time more time."""

        def of_one(residuals: Any, cotangent: Array) -> tuple[Array, Array]:
            return self.kind.factors(
                self.operation, self.operand, self.restored(residuals), cotangent
            )

        for _ in self.scans:
            of_one = jax.vmap(of_one)
        x, g = of_one(residuals, cotangent)
        x = x if self.kind.name == "lookup" else x.astype(dtype)  # rows stay whole numbers
        return self._fold_scans(x), self._fold_scans(g.astype(dtype))

    def _fold_scans(self, factor: Array) -> Array:
        """`(*scans, group, time, features)` to `(slices x group, scans x time, features)`."""
        slices = [axis for axis, its in enumerate(self.scans) if its == "slices"]
        times = [axis for axis, its in enumerate(self.scans) if its == "time"]
        group, time, features = (len(self.scans) + i for i in range(3))
        groups = math.prod(self.slices) * factor.shape[group]
        order = (*slices, group, *times, time, features)
        return jnp.transpose(factor, order).reshape(groups, self.steps, factor.shape[features])

    def to_parameter(self, gradient: Float[Array, "group in out"]) -> Array:
        """The gradient with respect to the parameter, from that with respect to the matrices."""
        split, parts = self._split

        def of_parameter(parameter: Array) -> Array:
            x = split(taken(self.view, parameter))
            order = [axis for part in parts for axis in part]
            return x.transpose(*order).reshape(self.matrices)

        return pulled_back(of_parameter, gradient, self.shape)

    def from_operand(self, gradient: Array) -> Array:
        """The same from the gradient with respect to the operand, slices of scans in front."""
        return pulled_back(functools.partial(taken, self.view), gradient, self.shape)

    def inside(self) -> "ParamUse":
        """The use in one iteration of the enclosing scans: of its operand alone."""

        def inner(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape[len(self.scans) :], x.dtype)

        result, residuals = jax.tree.map(inner, (self.result, self.residuals))
        shape = self.operation.operands[self.operand]
        return self._replace(shape=shape, view=(), scans=(), result=result, residuals=residuals)


class AtUse(Protocol):
    """What is known of a use. Equal ones evaluate an equation equally."""

    def tap(self) -> Any:
        """A tree of zeros, the lengths of the scans around the use in front."""
        ...

    def evaluated(
        self, equation: jex_core.JaxprEqn, inputs: list[Any], tap: Any
    ) -> tuple[Array, Any]:
        """The result of the equation, and what the use keeps."""
        ...


Address: TypeAlias = tuple[int, ...]
"""The address of an equation: the indices of the enclosing equations, then its own."""


class Uses(NamedTuple):
    """The uses of every leaf, and the leaves that are formed.

    A leaf that has no uses, and is not formed, does not enter the loss.

    Attributes:
        of: the uses of each trainable leaf, by their address.
        formed: the leaves that are differentiated themselves, with the reason.
        kernels: uses of formed leaves as kernels, whose gradients come from patches.
    """

    of: tuple[dict[Address, ParamUse], ...]
    formed: dict[int, str]
    kernels: dict[Address, ParamUse]

    @property
    def at(self) -> dict[Address, ParamUse]:
        """All uses."""
        return {address: use for its in self.of for address, use in its.items()}

    def forming(self, reasons: dict[int, str]) -> "Uses":
        """The same with more leaves that are formed."""
        formed, kernels = {**reasons, **self.formed}, dict(self.kernels)
        for leaf in formed:
            its = self.of[leaf].items()
            kernels |= {
                at: use for at, use in its if use.kind.name == "convolution" and not use.matmul
            }
        of = tuple({} if leaf in formed else its for leaf, its in enumerate(self.of))
        return Uses(of, formed, kernels)


class Scattering(NamedTuple):
    """How the weighted sum at a use, in one iteration of the enclosing scans, is scattered.

    Attributes:
        use: of the slice of a parameter; of the parameter where no scan goes over slices.
        cut: of the parameter.
        ahead: the parameter's dimensions in front of those of a slice.
    """

    use: ParamUse
    cut: Cut
    ahead: tuple[int, ...]

    @property
    def part(self) -> tuple[int, ...]:
        """The shape of a device's part."""
        return self.cut.local(self.use.shape)

    def stacked(self, parts: Array) -> Array:
        """A device's part of the parameter's sum, from the parts of all slices."""
        return parts.reshape(*self.ahead, *self.part)

    def __call__(self, total: Array) -> Array:
        """A device's part of the sum over devices, from the sum over its own examples."""
        return self.cut.scattered(self.use.from_operand(total))


def scattering_of(use: ParamUse, cut: Cut | None) -> Scattering | None:
    """The scattering of one slice, if scans go over whole slices of a parameter, in order.

    Args:
        use: the only use of a parameter.
        cut: how its sum is cut; None where it is not.

    Returns:
        None if there are no such slices: the sum is then scattered as a whole.
    """
    scans = len(use.slices)
    if cut is None or any(dim < scans for dim, _ in cut.over(len(use.shape))):
        return None
    if any(step.lead < scans for step in use.view) or use.shape[:scans] != use.slices:
        return None
    inner = use.inside()._replace(
        shape=use.shape[scans:], view=tuple(step.inside(scans) for step in use.view)
    )
    return Scattering(inner, cut, use.shape[:scans])


class Member(NamedTuple):
    """A use among those of the same matrices.

    Attributes:
        use: which use it is.
        transposed: whether its rows are the columns of the first.
    """

    use: int
    transposed: bool


@functools.lru_cache(maxsize=1024)
def overlaps(uses: tuple[ParamUse, ...]) -> tuple[tuple[Member, ...], ...] | None:
    """Groups the uses of a parameter by their matrices.

    |sum_i G_i|^2 = sum_ij <G_i, G_j>. Two uses of the same matrices, upright or transposed (an
    embedding and the output that is tied to it), have inner products that never form a gradient;
    uses of separate parts have none at all.

    Returns:
        The uses, sorted; None where two overlap in any other way.
    """
    sets: list[tuple[ParamUse, list[Member]]] = []
    for index, use in enumerate(uses):
        for first, members in sets:
            one, its = first.place, use.place
            assert one is not None
            assert its is not None
            if its in (one, one._replace(rows=one.columns, columns=one.rows)):
                members.append(Member(index, its != one))
                break
            if not one.is_apart(its):
                return None
        else:
            sets.append((use, [Member(index, False)]))
    return tuple(tuple(members) for _, members in sets)
