"""A use: an equation that multiplies a parameter by data, and where in the parameter it does so."""

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..precision import Matmul
from ..sharding import Cut, evaluated_whole, whole
from .kind import Kind
from .narrow_products import restored, scaled, with_cast_cotangent
from .norms import parts_of
from .views import Place, Step, Steps, place_of, pulled_back, taken

ScanUse: TypeAlias = Literal["slices", "time"]


class ParamUse(NamedTuple):
    """An equation that multiplies a parameter by data; equal ones have equal gradients.

    Attributes:
        kind: what the equation does.
        shape: of the parameter.
        view: from the parameter to the operand; slices of scans are in front.
        scans: the scans around it, outermost first: whether each goes over slices of the parameter
            or uses all of it many times.
        result: shape and dtype of the equation's result, the lengths of the scans in front.
        data: of the operand that the parameter meets, likewise.
        matmul: the narrow dtypes that the equation multiplies in, if it does.
        is_held: whether the data is held for the backward pass: the equation is in no checkpoint.
    """

    kind: Kind
    shape: tuple[int, ...]
    view: Steps
    scans: tuple[ScanUse, ...]
    result: jax.ShapeDtypeStruct
    data: jax.ShapeDtypeStruct
    matmul: Matmul | None = None
    is_held: bool = True

    @property
    def name(self) -> str:
        """The kind, and the dtype that the parameter is cast to there."""
        return self.kind.name + (f"[{self.matmul.forward}]" if self.matmul else "")

    @property
    def bytes(self) -> int:
        """Of the residual and the cotangent."""
        kept = self.data.dtype if self.matmul is None else self.matmul.forward
        size = math.prod(self.data.shape) * np.dtype(kept).itemsize
        return size + math.prod(self.result.shape) * self.result.dtype.itemsize

    def tap(self) -> Array:
        """A zero of the result's shape, the lengths of the enclosing scans in front."""
        return jnp.zeros_like(self.result)

    def evaluated(
        self, equation: jex_core.JaxprEqn, inputs: list[Any], tap: Array
    ) -> tuple[Array, Any]:
        """The result with the tap added to it, and the residual."""
        (result,) = evaluated_whole(equation, inputs)
        return self.received(result + tap), self.residual(inputs)

    def residual(self, inputs: Sequence[Any]) -> Any:
        """What is kept of the equation's operands: of a narrow product, the cast data."""
        kept = self.kind.residual(whole(inputs[1 - self.kind.operand]))
        return kept if self.matmul is None else scaled(kept, self.matmul.forward, self.matmul)

    def restored(self, residual: Any) -> Any:
        """The residual as the kind takes it: exactly the multiplied values."""
        return residual if self.matmul is None else restored(residual, jnp.dtype("float32"))

    def received(self, result: Array) -> Array:
        """The result; its cotangent is cast as the derivative of a narrow product needs it."""
        return result if self.matmul is None else with_cast_cotangent(self.matmul, result)

    @property
    def slices(self) -> tuple[int, ...]:
        """The lengths of the scans around it that go over slices of the parameter."""
        return self._lengths("slices")

    @property
    def terms(self) -> int:
        """How many outer products there are in each of its matrices."""
        return math.prod(self._lengths("time")) * self.kind.terms

    def _lengths(self, of: ScanUse) -> tuple[int, ...]:
        scans = zip(self.result.shape, self.scans, strict=False)
        return tuple(length for length, use in scans if use == of)

    @property
    def is_repeated(self) -> bool:
        """Whether a scan repeats it: `ghost` cannot measure it within the backward pass."""
        return "time" in self.scans

    @property
    def _split(self) -> tuple[Step, tuple[tuple[int, ...], ...]]:
        """The step from the operand to an array with parts of groups, rows and columns as axes."""
        axes, lead = self.kind.matrix_axes, len(self.slices)
        of_groups, rows, columns = (tuple(lead + i for i in part) for part in axes[1:])
        return Step("reshape", axes.shape, lead), ((*range(lead), *of_groups), rows, columns)

    @property
    def place(self) -> Place | None:
        """The positions of its matrices' entries in the parameter."""
        return place_of(self.view, self.shape, *self._split)

    @property
    def matrices(self) -> tuple[int, int, int]:
        """How many groups, rows and columns its matrices have."""
        axes = self.kind.matrix_axes
        groups, rows, columns = (math.prod(axes.shape[i] for i in part) for part in axes[1:])
        return math.prod(self.slices) * groups, rows, columns

    @property
    def lengths(self) -> tuple[int, int]:
        """How many numbers of each vector are multiplied: those of the data, of the cotangent."""
        _, rows, columns = self.matrices
        return 0 if self.kind.is_one_hot else rows, columns

    def factors(
        self, residual: Any, cotangent: Array, dtype: np.dtype[Any]
    ) -> tuple[Array, Float[Array, "group time features_out"]]:
        """One example's factors: scans over slices make groups, scans over time more time."""

        def of_one(residual: Any, cotangent: Array) -> tuple[Array, Array]:
            return self.kind.factors(self.restored(residual), cotangent, dtype)

        for _ in self.scans:
            of_one = jax.vmap(of_one)
        x, g = of_one(residual, cotangent)
        return self._fold_scans(x), self._fold_scans(g)

    def _fold_scans(self, factor: Array) -> Array:
        """`(*scans, group, time, features)` to `(slices x group, scans x time, features)`."""
        slices = [axis for axis, use in enumerate(self.scans) if use == "slices"]
        times = [axis for axis, use in enumerate(self.scans) if use == "time"]
        group, time, features = (len(self.scans) + i for i in range(3))
        groups = math.prod(self.slices) * factor.shape[group]
        order = (*slices, group, *times, time, features)
        return jnp.transpose(factor, order).reshape(groups, self.terms, factor.shape[features])

    def to_parameter(self, gradient: Float[Array, "group in out"]) -> Array:
        """The gradient with respect to the parameter, from that with respect to the matrices."""
        split, parts = self._split

        def of_parameter(parameter: Array) -> Array:
            x = split(taken(self.view, parameter))
            order = [axis for part in parts for axis in part]
            return x.transpose(*order).reshape(self.matrices)

        return pulled_back(of_parameter, gradient, self.shape)

    def from_operand(self, gradient: Array) -> Array:
        """The parameter's gradient from that of the operand, slices of scans in front."""
        return pulled_back(functools.partial(taken, self.view), gradient, self.shape)

    def inside(self) -> "ParamUse":
        """The use in one iteration of the enclosing scans: of its operand alone."""

        def inner(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape[len(self.scans) :], x.dtype)

        result, data = inner(self.result), inner(self.data)
        return self._replace(shape=self.kind.shape, view=(), scans=(), result=result, data=data)


Address: TypeAlias = tuple[int, ...]
"""The address of an equation: the indices of the enclosing equations, then its own."""


def parts_of_uses(uses: Sequence[ParamUse], dtype: np.dtype[Any]) -> int:
    """How many bfloat16 numbers add up to any number that the uses meet; 0 if some take more."""
    met: list[Any] = []
    for use in uses:
        narrow = use.matmul
        met += [narrow.backward if narrow else use.result.dtype]
        if not use.kind.is_one_hot:  # rows are whole numbers
            met += [narrow.forward if narrow else use.data.dtype]
    return parts_of(met) if dtype == jnp.float32 else 0


class Uses(NamedTuple):
    """The uses of every leaf, and the leaves that are formed.

    A leaf that has no uses, and is not formed, does not enter the loss.

    Attributes:
        of: the uses of each trainable leaf, by their address.
        formed: the leaves that are differentiated themselves, with the reason.
        by_rule: uses of formed leaves whose kinds have a rule of their own for the gradient.
    """

    of: tuple[dict[Address, ParamUse], ...]
    formed: dict[int, str]
    by_rule: dict[Address, ParamUse]

    @property
    def at(self) -> dict[Address, ParamUse]:
        """All uses."""
        return {address: use for uses in self.of for address, use in uses.items()}

    @property
    def leaf_of(self) -> dict[Address, int]:
        """The leaf of every use."""
        return {address: leaf for leaf, uses in enumerate(self.of) for address in uses}

    def forming(self, reasons: dict[int, str]) -> "Uses":
        """These uses with more leaves that are formed."""
        formed, by_rule = {**reasons, **self.formed}, dict(self.by_rule)
        for leaf in formed:
            uses = self.of[leaf].items()
            by_rule |= {at: use for at, use in uses if use.kind.has_rule and not use.matmul}
        of = tuple({} if leaf in formed else uses for leaf, uses in enumerate(self.of))
        return Uses(of, formed, by_rule)


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
    sets: list[tuple[Place, list[Member]]] = []
    for index, use in enumerate(uses):
        place = use.place
        assert place is not None
        for first, members in sets:
            if place in (first, first._replace(rows=first.columns, columns=first.rows)):
                members.append(Member(index, place != first))
                break
            if not first.is_apart(place):
                return None
        else:
            sets.append((place, [Member(index, False)]))
    return tuple(tuple(members) for _, members in sets)
