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
        entries: the axes along each dimension. Of an array of fewer dimensions, as a slice has, the
            last ones count.
    """

    rules: ShardingRules
    entries: Entries

    def over(self, rank: int) -> list[tuple[int, tuple[str, ...]]]:
        """The dimensions that are cut over example axes, and by which."""
        longer = longer_than_one(self.rules)
        found = [tuple(axis for axis in axes if axis in longer) for axes in self.last(rank)]
        return [(dim, axes) for dim, axes in enumerate(found) if axes]

    def parts(self, axes: Sequence[str]) -> int:
        """How many devices there are along some axes."""
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

        return self.kept(self._by_part(gather, part))

    def scattered(self, total: Array) -> Array:
        """A device's part of the sum over the devices that share the array, in the dtype it has.

        Over example axes that do not cut the array nothing is summed yet.
        """

        def scatter(total: Array) -> Array:
            with stage("devices"):
                for dim, axes in self.over(total.ndim):
                    total = jax.lax.psum_scatter(total, axes, scatter_dimension=dim, tiled=True)
            return total

        return self.kept(self._by_part(scatter, total))

    def _by_part(self, collective: Callable[[Array], Array], x: Array) -> Array:
        """Runs a collective over example axes on each device's part over the other axes.

        Left to itself, the compiler makes the array whole over the other axes first. That is what
        it has to do along a dimension that is cut over both: parts of parts are no part of the sum
        or of what is gathered.
        """
        both = {dim for dim, _ in self.over(x.ndim)}
        others = enumerate(self._over_others(x.ndim))
        spec = PartitionSpec(*(None if dim in both else entry for dim, entry in others))
        axes = {axis for entry in spec for axis in axes_of(entry)}
        if not axes:
            return collective(x)
        return jax.shard_map(
            collective, in_specs=spec, out_specs=spec, axis_names=axes, check_vma=False
        )(x)

    def kept(self, x: Array) -> Array:
        """The array or a part of it, constrained to the other axes of the mesh."""
        if set(self.rules.mesh.axis_names) == set(self.rules.examples):
            return x
        spec = self._over_others(x.ndim)
        return jax.lax.with_sharding_constraint(x, NamedSharding(inner_mesh(self.rules), spec))

    def _over_others(self, rank: int) -> PartitionSpec:
        """The spec over the axes that examples are not spread over."""
        others = [axis for axis in self.rules.mesh.axis_names if axis not in self.rules.examples]
        return only(PartitionSpec(*self.last(rank)), others)

    def last(self, rank: int) -> Entries:
        """The axes along each dimension of an array of so many."""
        return self.entries[len(self.entries) - rank :]


def cut_of(rules: ShardingRules, spec: PartitionSpec, rank: int) -> Cut | None:
    """How a spec cuts an array over example axes; None where it does not."""
    entries = [*spec, *[None] * (rank - len(spec))]
    cut = Cut(rules, tuple(map(axes_of, entries)))
    return cut if cut.over(rank) else None


def longer_than_one(rules: ShardingRules) -> tuple[str, ...]:
    """The example axes that there is something to sum over; XLA refuses the others."""
    return tuple(axis for axis in rules.examples if rules.mesh.shape[axis] > 1)


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
@dataclasses.dataclass(eq=False, repr=False)  # which would show the part
class Shard:
    """A device's part of a parameter, which stands for the whole until an equation needs that.

    It is a tree with one leaf, so that it goes through `jit`, `jax.checkpoint`, and into a scan
    over its slices. To all else it has the shape of the whole.

    Attributes:
        part: what the device holds.
        cut: how the whole is cut.
        is_gathered_again: whether a backward pass gathers it again, so that the whole is not kept
            for it. Inside of `jax.checkpoint` that happens by itself.
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
    def size(self) -> int:
        """Of the whole."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> Any:
        """Of the entries."""
        return self.part.dtype

    def within_checkpoint(self) -> "Shard":
        """The same, as a checkpoint sees it that computes all of its own values again."""
        return Shard(self.part, self.cut, False)

    def of_steps(self) -> "Shard | Array":
        """The same, as a scan over it takes it: whole where no slice has a part on every device.

        The steps' slices would all be kept by a checkpoint around the scan.
        """
        if any(dim == 0 for dim, _ in self.cut.over(self.ndim)):
            return whole(self)
        return Shard(self.part, self.cut)


@overload
def whole(x: Array | Shard) -> Array: ...
@overload
def whole(x: Any) -> Any: ...
def whole(x: Any) -> Any:
    """A value with nothing but whole arrays in it."""
    return x.cut.gathered(x.part) if isinstance(x, Shard) else x


def rearranged(equation: jex_core.JaxprEqn, inputs: Sequence[Any]) -> Shard | None:
    """What an equation makes of a shard alone that devices can do each for its part; else None."""
    rule = _REARRANGED.get(equation.primitive)
    if rule is None or len(inputs) != 1 or not isinstance(inputs[0], Shard):
        return None
    return rule(equation, inputs[0])


def keeps_parts(equation: jex_core.JaxprEqn) -> bool:
    """Whether [`rearranged`][] knows what an equation makes of a shard, as a rule."""
    return equation.primitive in _REARRANGED


def evaluated_whole(equation: jex_core.JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """Evaluates one equation on whole arrays, gathered for it and, if need be, for its gradient."""
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


def _same(equation: jex_core.JaxprEqn, shard: Shard) -> Shard:
    params = {name: None if name == "sharding" else x for name, x in equation.params.items()}
    (part,) = bound(equation, params, [shard.part])
    return Shard(part, shard.cut, shard.is_gathered_again)


def _transposed(equation: jex_core.JaxprEqn, shard: Shard) -> Shard:
    order = equation.params["permutation"]
    entries = shard.cut.last(shard.ndim)
    cut = shard.cut._replace(entries=tuple(entries[i] for i in order))
    return Shard(jax.lax.transpose(shard.part, order), cut, shard.is_gathered_again)


def _reshaped(equation: jex_core.JaxprEqn, shard: Shard) -> Shard | None:
    """In another shape, if each device's part is a part of that.

    A dimension is cut into consecutive parts. So is the dimension of the new shape with as many
    entries ahead of it, if the devices divide it.
    """
    if equation.primitive is primitives.reshape_p and equation.params["dimensions"] is not None:
        return None
    result: Any = equation.outvars[0].aval
    before, after = shard.shape, tuple(result.shape)
    if math.prod(before) != math.prod(after) or 0 in before:  # repeated; or nothing there
        return None
    entries: list[tuple[str, ...]] = [()] * len(after)
    for dim, axes in enumerate(shard.cut.last(shard.ndim)):
        if not axes:
            continue
        ahead, parts = math.prod(before[:dim]), shard.cut.parts(axes)
        fits = (
            new
            for new, n in enumerate(after)
            if n > 1 and math.prod(after[:new]) == ahead and n % parts == 0
        )
        new = next(fits, None)
        if new is None and dim in dict(shard.cut.over(shard.ndim)):
            return None
        if new is not None:
            entries[new] = axes
    cut = shard.cut._replace(entries=tuple(entries))
    return Shard(shard.part.reshape(cut.local(after)), cut, shard.is_gathered_again)


_REARRANGED = {
    primitives.convert_element_type_p: _same,
    primitives.copy_p: _same,
    primitives.name_p: _same,
    primitives.neg_p: _same,
    primitives.transpose_p: _transposed,
    primitives.reshape_p: _reshaped,
    primitives.squeeze_p: _reshaped,
    primitives.broadcast_in_dim_p: _reshaped,
}
