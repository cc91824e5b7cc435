"""Parameters of which each device holds a part: gathered where they are used, scattered as sums."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, overload

import jax
import jax.extend.core as jex_core
from jax.extend.core import primitives
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

from ..precision import stage
from ..programs import bound, evaluated
from .axes import axes_of, only
from .rules import ShardingRules

Entries: TypeAlias = tuple[tuple[str, ...], ...]
"""The mesh axes along each dimension, as in a `PartitionSpec`."""


class Cut(NamedTuple):
    """How an array is divided over a mesh, inside the boundary over the example axes.

    Attributes:
        rules: the sharding rules.
        entries: the axes along each dimension. For an array of fewer dimensions, such as a slice,
            the last ones count.
    """

    rules: ShardingRules
    entries: Entries

    def over(self, rank: int) -> list[tuple[int, tuple[str, ...]]]:
        """The dimensions that are cut over example axes, and these axes."""
        longer = longer_than_one(self.rules)
        found = [tuple(axis for axis in axes if axis in longer) for axes in self.last(rank)]
        return [(dim, axes) for dim, axes in enumerate(found) if axes]

    def parts(self, axes: Sequence[str]) -> int:
        """The number of devices along some axes."""
        return math.prod(self.rules.mesh.shape[axis] for axis in axes)

    def local(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a device's part."""
        parts = {dim: self.parts(axes) for dim, axes in self.over(len(shape))}
        return tuple(n // parts.get(dim, 1) for dim, n in enumerate(shape))

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the array, from that of a device's part."""
        parts = {dim: self.parts(axes) for dim, axes in self.over(len(shape))}
        return tuple(n * parts.get(dim, 1) for dim, n in enumerate(shape))

    def gathered(self, part: Array) -> Array:
        """The array, from a device's part."""

        def gather(part: Array) -> Array:
            for dim, axes in self.over(part.ndim):
                part = jax.lax.all_gather(part, axes, axis=dim, tiled=True)
            return part

        return self._kept(self._by_part(gather, part))

    def scattered(self, total: Array) -> Array:
        """A device's part of the sum over the devices that share the array, in the dtype it has.

        There is no sum yet over example axes that do not cut the array.
        """

        def scatter(total: Array) -> Array:
            with stage("devices"):
                for dim, axes in self.over(total.ndim):
                    total = jax.lax.psum_scatter(total, axes, scatter_dimension=dim, tiled=True)
            return total

        return self._kept(self._by_part(scatter, total))

    def _by_part(self, collective: Callable[[Array], Array], x: Array) -> Array:
        """Runs a collective over example axes on each device's part over the other axes.

        Otherwise the compiler would first make the array whole over the other axes. It has to do so
        along a dimension that is cut over both, because parts of parts are no part of the result.
        """
        both = {dim for dim, _ in self.over(x.ndim)}
        spec = only(PartitionSpec(*self.last(x.ndim)), _others(self.rules))
        spec = PartitionSpec(*(None if dim in both else its for dim, its in enumerate(spec)))
        axes = {axis for entry in spec for axis in axes_of(entry)}
        if not axes:
            return collective(x)
        return jax.shard_map(
            collective, in_specs=spec, out_specs=spec, axis_names=axes, check_vma=False
        )(x)

    def _kept(self, x: Array) -> Array:
        return over_others(x, PartitionSpec(*self.last(x.ndim)), self.rules)

    def last(self, rank: int) -> Entries:
        """The axes along each dimension of an array with that many dimensions."""
        return self.entries[len(self.entries) - rank :]


def cut_of(rules: ShardingRules, spec: PartitionSpec, rank: int) -> Cut | None:
    """How a spec cuts an array over example axes; None if it does not."""
    entries = [*spec, *[None] * (rank - len(spec))]
    cut = Cut(rules, tuple(map(axes_of, entries)))
    return cut if cut.over(rank) else None


def longer_than_one(rules: ShardingRules) -> tuple[str, ...]:
    """The example axes with more than one device; XLA refuses a sum over the others."""
    return tuple(axis for axis in rules.examples if rules.mesh.shape[axis] > 1)


def over_others(x: Array, spec: PartitionSpec, rules: ShardingRules) -> Array:
    """An array or a part of it, constrained by the part of a spec about other axes of the mesh."""
    others = _others(rules)
    if not others:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(inner_mesh(rules), only(spec, others)))


def _others(rules: ShardingRules) -> list[str]:
    """The axes that examples are not spread over."""
    return [axis for axis in rules.mesh.axis_names if axis not in rules.examples]


def inner_mesh(rules: ShardingRules) -> jax.sharding.AbstractMesh:
    """The mesh inside the boundary: example axes are Manual, all others Auto."""
    types = {
        name: AxisType.Manual if name in rules.examples else AxisType.Auto
        for name in rules.mesh.axis_names
    }
    return rules.mesh.abstract_mesh.update_axis_types(types)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("part",),
    meta_fields=("cut", "is_gathered_again"),
)
@dataclasses.dataclass(eq=False, repr=False)  # which would print the part
class Shard:
    """A device's part of a parameter, which represents the whole until an equation needs it.

    It is a tree with one leaf, so that it goes through `jit`, `jax.checkpoint`, and into a scan
    over its slices. To other code it has the shape of the whole.

    Attributes:
        part: the device's part.
        cut: how the whole is cut.
        is_gathered_again: whether a backward pass gathers it again, so that the whole is not kept
            for it. Inside of `jax.checkpoint` that always happens.
    """

    part: Any
    cut: Cut
    is_gathered_again: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        return self.cut.whole(self.part.shape)

    @property
    def ndim(self) -> int:
        """How many dimensions."""
        return self.part.ndim

    @property
    def dtype(self) -> Any:
        """Of the entries."""
        return self.part.dtype

    def within_checkpoint(self) -> "Shard":
        """The same, inside a checkpoint that recomputes all of its values."""
        return Shard(self.part, self.cut, False)

    def of_steps(self) -> "Shard | Array":
        """The same for a scan over it: whole if some device has no part of a slice.

        A checkpoint around the scan would keep the slices of all steps.
        """
        if any(dim == 0 for dim, _ in self.cut.over(self.ndim)):
            return whole(self)
        return Shard(self.part, self.cut)


@overload
def whole(x: Array | Shard) -> Array: ...
@overload
def whole(x: Any) -> Any: ...
def whole(x: Any) -> Any:
    """A value with whole arrays instead of shards."""
    return x.cut.gathered(x.part) if isinstance(x, Shard) else x


def rearranged(equation: jex_core.JaxprEqn, inputs: Sequence[Any]) -> Shard | None:
    """The result of an equation that each device can evaluate on its part; otherwise None."""
    shard, *_ = (*inputs, None)
    if not keeps_parts(equation) or not isinstance(shard, Shard):
        return None
    cut, params = shard.cut, equation.params
    if equation.primitive is primitives.transpose_p:
        entries = cut.last(shard.ndim)
        cut = cut._replace(entries=tuple(entries[i] for i in params["permutation"]))
    params = {name: None if name == "sharding" else x for name, x in params.items()}
    (part,) = bound(equation, params, [shard.part])
    return Shard(part, cut, shard.is_gathered_again)


def keeps_parts(equation: jex_core.JaxprEqn) -> bool:
    """Whether each device can evaluate an equation on its part of an array."""
    return equation.primitive in (
        primitives.convert_element_type_p,
        primitives.copy_p,
        primitives.name_p,
        primitives.transpose_p,
    )


def evaluated_whole(equation: jex_core.JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """Evaluates one equation on whole arrays, gathered for it, and again for its gradient."""
    shards = {i: x for i, x in enumerate(inputs) if isinstance(x, Shard)}
    if not shards:
        return evaluated(equation, inputs)
    others = {
        i: x
        for i, (x, atom) in enumerate(zip(inputs, equation.invars, strict=True))
        if i not in shards and not isinstance(atom, jex_core.Literal)
    }

    def run(shards: dict[int, Shard], others: dict[int, Any]) -> list[Any]:
        values = {**others, **{i: whole(x) for i, x in shards.items()}}
        return evaluated(equation, [values.get(i) for i in range(len(inputs))])

    if any(x.is_gathered_again for x in shards.values()):
        run = jax.checkpoint(run)
    return run(shards, others)
