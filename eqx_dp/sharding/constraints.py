"""The sharding constraints of a loss, and their form inside the boundary, for one example."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax.extend.core as jex_core
from jax.sharding import NamedSharding, PartitionSpec

from ..programs import equations, has_rules, result_sharding, shardings, source_line
from .axes import axes_of, axes_text
from .rules import ShardingRules


def demands(equation: jex_core.JaxprEqn, examples: Sequence[str]) -> dict[int, Any]:
    """The shardings that an equation demands, by the positions of operands and results behind them.

    JAX may have filled in the sharding of a result, but never with an example axis, because types
    do not name those.
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
    """The constraints of a program, for an error."""
    return [
        f"{equation.primitive.name} with spec {getattr(sharding, 'spec', sharding)} at "
        f"{source_line(equation)}"
        for equation in demanding(jaxpr, ())
        for sharding in demands(equation, ()).values()
    ]


def without_examples(
    equation: jex_core.JaxprEqn,
    sharding: Any,
    one: tuple[int, ...],
    two: tuple[int, ...],
    rules: ShardingRules,
) -> PartitionSpec:
    """The spec that an equation demands, without the example axes.

    Each device works on its own examples, so the dimensions that carry examples are spread over the
    example axes already. The rest of the constraint stays.

    Args:
        equation: the equation that demands a sharding of a value.
        sharding: the sharding.
        one: the value's shape in a batch of one.
        two: the value's shape in a batch of two: dimensions that differ carry examples.
        rules: the sharding rules.

    Raises:
        ValueError: the constraint cannot be moved.
    """

    def refused(reason: str) -> ValueError:
        return ValueError(
            f"The loss's {equation.primitive.name} with spec {getattr(sharding, 'spec', sharding)} "
            f"on a value of shape {one} (in a batch of one example), at {source_line(equation)}, "
            f"{reason}"
        )

    def moved(dimension: int, entry: Any) -> Any:
        axes, has_examples = axes_of(entry), one[dimension] != two[dimension]
        others = tuple(axis for axis in axes if axis not in rules.examples)
        if not has_examples and others != axes:
            raise refused(
                f"spreads dimension {dimension}, which carries no examples, over "
                f"{axes_text(axes)}, over which the rules spread examples "
                f"(examples={rules.examples}). Take these axes out of the spec: each device works "
                "on its own examples, whole. To spread parameters or sums of gradients, use "
                "ShardingRules(params=..., accumulators='examples')."
            )
        # A dimension that folds examples and something else (batch x time) may be spread over the
        # example axes first, then, within an example, over others.
        if has_examples and others and (one[dimension] == 1 or axes[0] not in rules.examples):
            raise refused(
                f"spreads examples (dimension {dimension}) over {axes_text(others)}, which the "
                f"rules do not name: examples={rules.examples}. Either ShardingRules(mesh, "
                f"examples={(*rules.examples, *others)!r}), or take {axes_text(others)} out of the "
                "spec."
            )
        return others or (None if axes else entry)

    if not isinstance(sharding, NamedSharding):
        raise refused(
            f"is a {type(sharding).__name__}. Only a PartitionSpec or a NamedSharding names axes "
            "of the mesh: use one of them."
        )
    if sharding.mesh.axis_names != rules.mesh.axis_names:
        raise refused(
            f"is for a mesh with axes {sharding.mesh.axis_names}; the mesh of the sharding rules "
            f"has {rules.mesh.axis_names}. Use one mesh for both."
        )
    kind, device = sharding.memory_kind, rules.mesh.devices.flat[0]
    # A GPU that is not here, but in the mesh, does not know its memory.
    is_on_device = kind in (None, "device") or kind == device.default_memory().kind
    is_open = bool(sharding.spec.unreduced or sharding.spec.reduced)
    if equation.params.get("layout") is not None or is_open or not is_on_device:
        raise refused(
            "asks for more than a sharding: a memory layout, another memory than the device's, or "
            "a sum over devices that is left open. The per-example boundary does not support that."
        )
    return PartitionSpec(*(moved(*entry) for entry in enumerate(sharding.spec)))
