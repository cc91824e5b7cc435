"""A sharding constraint on a batch, as it reads inside the boundary, for one example."""

from typing import Any, NamedTuple

import jax.extend.core as jex_core
from jax.sharding import NamedSharding, PartitionSpec

from ..programs import source_line
from .rules import ShardingRules, axes_of


class Constraint(NamedTuple):
    """A place where a loss says how a value is to be spread over devices.

    Attributes:
        equation: what says it.
        sharding: what it says.
        one: the value's shape in a batch of one.
        two: the value's shape in a batch of two.
    """

    equation: jex_core.JaxprEqn
    sharding: Any
    one: tuple[int, ...]
    two: tuple[int, ...]

    @property
    def _told(self) -> str:
        spec = getattr(self.sharding, "spec", self.sharding)
        where = source_line(self.equation)
        return (
            f"The loss's {self.equation.primitive.name} with spec {spec} on a value of shape "
            f"{self.one} (in a batch of one example), at {where},"
        )

    def inside(self, rules: ShardingRules) -> PartitionSpec:
        """The spec without the example axes.

        Each device works on its own examples, so the dimensions that carry examples are spread
        over the example axes already; what the constraint says about other axes stays.

        Raises:
            ValueError: the constraint cannot be moved.
        """
        sharding = self.sharding
        if not isinstance(sharding, NamedSharding):
            raise ValueError(
                f"{self._told} is a {type(sharding).__name__}. Only a PartitionSpec or a "
                "NamedSharding names axes of the mesh: use one of them."
            )
        if sharding.mesh.axis_names != rules.mesh.axis_names:
            raise ValueError(
                f"{self._told} is for a mesh with axes {sharding.mesh.axis_names}; the mesh of the "
                f"sharding rules has {rules.mesh.axis_names}. Use one mesh for both."
            )
        if sharding.memory_kind not in (None, "device", _default_memory(rules)):
            raise ValueError(
                f"{self._told} moves it to the memory {sharding.memory_kind!r}, which the "
                "per-example boundary does not support. Leave the memory kind out."
            )
        if sharding.spec.unreduced or sharding.spec.reduced:
            raise ValueError(
                f"{self._told} leaves a sum over devices open (unreduced, reduced), which cannot "
                "be taken example by example. Reduce it in the loss."
            )
        entries = [
            self._entry(dimension, entry, rules) for dimension, entry in enumerate(sharding.spec)
        ]
        return PartitionSpec(*entries)

    def _entry(self, dimension: int, entry: Any, rules: ShardingRules) -> Any:
        axes = axes_of(entry)
        if not axes:
            return entry
        others = tuple(axis for axis in axes if axis not in rules.examples)
        carries_examples = self.one[dimension] != self.two[dimension]
        if not carries_examples and len(others) < len(axes):
            raise ValueError(
                f"{self._told} spreads dimension {dimension}, which carries no examples, over "
                f"{_told_axes(axes)}, over which the rules spread examples "
                f"(examples={rules.examples}). Take these axes out of the spec: each device works "
                "on its own examples, whole. To spread parameters or sums of gradients over these "
                "axes, use ShardingRules(params=..., accumulators='examples')."
            )
        # A dimension that folds examples and something else (batch x time) may be spread over the
        # example axes first, then, within an example, over others.
        splits_examples = self.one[dimension] == 1 or axes[0] not in rules.examples
        if carries_examples and others and splits_examples:
            raise ValueError(
                f"{self._told} spreads examples (dimension {dimension}) over {_told_axes(others)}, "
                f"which the rules do not name: examples={rules.examples}. Either "
                f"ShardingRules(mesh, examples={(*rules.examples, *others)!r}), or take "
                f"{_told_axes(others)} out of the spec."
            )
        return others or None


def _told_axes(axes: tuple[str, ...]) -> str:
    return f"the ax{'es' if len(axes) > 1 else 'is'} {', '.join(map(repr, axes))}"


def _default_memory(rules: ShardingRules) -> str:
    return rules.mesh.devices.flat[0].default_memory().kind
