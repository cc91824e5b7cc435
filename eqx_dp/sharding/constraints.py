"""What a loss says about sharding, and how it reads inside the boundary, for one example."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex_core
from jax.sharding import NamedSharding, PartitionSpec

from ..programs import equations, has_rules, result_sharding, shardings, source_line
from .axes import axes_of, axes_text
from .rules import ShardingRules


def demands(equation: jex_core.JaxprEqn, examples: Sequence[str]) -> dict[int, Any]:
    """The shardings that an equation demands, by the positions of operands and results behind them.

    Where it says where its result goes, JAX may have filled that in, but never with an example
    axis: types do not speak of those.
    """
    found, result = shardings(equation), result_sharding(equation)
    if found or result is None:
        return found
    axes = {axis for entry in result.spec for axis in axes_of(entry)}
    return {} if axes.isdisjoint(examples) else {len(equation.invars): result}


def demanding(jaxpr: jex_core.Jaxpr, examples: Sequence[str]) -> Iterator[jex_core.JaxprEqn]:
    """All equations that demand shardings, or whose derivative rules may."""
    for equation in equations(jaxpr):
        if has_rules(equation) or demands(equation, examples):
            yield equation


def constraints_of(jaxpr: jex_core.Jaxpr) -> list[str]:
    """What a program says about sharding, for an error."""
    return [
        f"{equation.primitive.name} with spec {getattr(sharding, 'spec', sharding)} at "
        f"{source_line(equation)}"
        for equation in demanding(jaxpr, ())
        for sharding in demands(equation, ()).values()
    ]


class Constraint(NamedTuple):
    """A sharding that a loss demands for a value.

    Attributes:
        equation: what demands it.
        sharding: the sharding.
        one: the value's shape in a batch of one.
        two: the value's shape in a batch of two.
    """

    equation: jex_core.JaxprEqn
    sharding: Any
    one: tuple[int, ...]
    two: tuple[int, ...]

    @property
    def _described(self) -> str:
        spec = getattr(self.sharding, "spec", self.sharding)
        return (
            f"The loss's {self.equation.primitive.name} with spec {spec} on a value of shape "
            f"{self.one} (in a batch of one example), at {source_line(self.equation)},"
        )

    def without_examples(self, rules: ShardingRules) -> PartitionSpec:
        """The spec without the example axes.

        Each device works on its own examples, so the dimensions that carry examples are spread
        over the example axes already; what the constraint says about other axes stays.

        Raises:
            ValueError: the constraint cannot be moved.
        """
        sharding = self.sharding
        if self.equation.params.get("layout") is not None:
            raise ValueError(
                f"{self._described} constrains a memory layout, which the per-example boundary "
                "does not support. Constrain the sharding alone."
            )
        if not isinstance(sharding, NamedSharding):
            raise ValueError(
                f"{self._described} is a {type(sharding).__name__}. Only a PartitionSpec or a "
                "NamedSharding names axes of the mesh: use one of them."
            )
        if sharding.mesh.axis_names != rules.mesh.axis_names:
            raise ValueError(
                f"{self._described} is for a mesh with axes {sharding.mesh.axis_names}; the mesh "
                f"of the sharding rules has {rules.mesh.axis_names}. Use one mesh for both."
            )
        memory = rules.mesh.devices.flat[0].default_memory().kind
        if sharding.memory_kind not in (None, "device", memory):
            raise ValueError(
                f"{self._described} moves it to the memory {sharding.memory_kind!r}, which the "
                "per-example boundary does not support. Leave the memory kind out."
            )
        if sharding.spec.unreduced or sharding.spec.reduced:
            raise ValueError(
                f"{self._described} leaves a sum over devices open (unreduced, reduced), which "
                "cannot be taken example by example. Reduce it in the loss."
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
                f"{self._described} spreads dimension {dimension}, which carries no examples, over "
                f"{axes_text(axes)}, over which the rules spread examples "
                f"(examples={rules.examples}). Take these axes out of the spec: each device works "
                "on its own examples, whole. To spread parameters or sums of gradients over these "
                "axes, use ShardingRules(params=..., accumulators='examples')."
            )
        # A dimension that folds examples and something else (batch x time) may be spread over the
        # example axes first, then, within an example, over others.
        splits_examples = self.one[dimension] == 1 or axes[0] not in rules.examples
        if carries_examples and others and splits_examples:
            raise ValueError(
                f"{self._described} spreads examples (dimension {dimension}) over "
                f"{axes_text(others)}, which the rules do not name: examples={rules.examples}. "
                f"Either ShardingRules(mesh, examples={(*rules.examples, *others)!r}), or take "
                f"{axes_text(others)} out of the spec."
            )
        return others or None
