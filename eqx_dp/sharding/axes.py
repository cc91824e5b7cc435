"""Mesh axes, as specs and rules name them."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

from jax.sharding import Mesh, PartitionSpec

from ..shown import shown

PathRule: TypeAlias = tuple[str, PartitionSpec]
"""A pattern of paths in the model's tree, and where the arrays that it describes live."""


def axes_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes that an entry of a `PartitionSpec` names."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def only(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """What a spec says of the given axes."""
    return PartitionSpec(
        *(tuple(axis for axis in axes_of(entry) if axis in axes) or None for entry in spec)
    )


def axes_text(axes: Sequence[str], kind: str = "") -> str:
    """Axes, for an error."""
    return f"the {kind}ax{'es' if len(axes) > 1 else 'is'} {', '.join(map(repr, axes))}"


def example_axes(mesh: Mesh, examples: str | Sequence[str]) -> tuple[str, ...]:
    """Checks the axes that examples are spread over, and returns them as a tuple."""
    if not isinstance(cast(object, examples), str | tuple | list):  # a set has no order
        raise ValueError(
            f"examples must be an axis of the mesh or a tuple of axes, found {shown(examples)}."
        )
    axes = (examples,) if isinstance(examples, str) else tuple(examples)
    if not axes:
        raise ValueError(
            "examples names no axis of the mesh: say which axes examples are spread over, such as "
            "examples=('data',). An axis of one device is fine."
        )
    _check_axes(mesh, axes, "examples")
    _check_alike(mesh, axes, "examples")
    return axes


def path_rules(mesh: Mesh, rules: object) -> tuple[PathRule, ...]:
    """Checks the rules for parameters, and returns them as a tuple."""
    if isinstance(rules, str | Mapping) or not isinstance(rules, Iterable):
        raise ValueError(
            f"params holds pairs (path pattern, PartitionSpec), in order, found {shown(rules)}. A "
            "mapping's pairs are tuple(mapping.items())."
        )
    return tuple(_path_rule(mesh, rule) for rule in cast(Iterable[Any], rules))


def _path_rule(mesh: Mesh, rule: Any) -> PathRule:
    if not (isinstance(rule, tuple | list) and len(cast(Sequence[Any], rule)) == 2):
        raise ValueError(
            f"params holds pairs (path pattern, PartitionSpec), found {shown(rule)}. A single pair "
            "needs a comma behind it: params=((pattern, spec),)."
        )
    pattern, spec = cast(Sequence[Any], rule)
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(
            f"params: a path pattern is a string such as '**.weight', not {shown(pattern)}."
        )
    if not isinstance(spec, PartitionSpec):
        raise ValueError(
            f"params: {pattern!r} needs a jax.sharding.PartitionSpec, found {shown(spec)}."
        )
    if spec.unreduced or spec.reduced:
        raise ValueError(
            f"params: {pattern!r} has {spec}; a parameter is never partly reduced: leave that out."
        )
    if PartitionSpec.UNCONSTRAINED in tuple(spec):
        raise ValueError(
            f"params: {pattern!r} has {spec}; say for each dimension where it lives, or None."
        )
    where = f"params, {pattern!r}: {spec}"
    _check_axes(mesh, [axis for entry in spec for axis in axes_of(entry)], where)
    for entry in spec:
        _check_alike(mesh, axes_of(entry), where)
    return pattern, spec


def _check_axes(mesh: Mesh, axes: Sequence[Any], where: str) -> None:
    for axis in axes:
        if axis not in mesh.axis_names:
            raise ValueError(
                f"{where} names the axis {axis!r}, which the mesh lacks; its axes are "
                f"{', '.join(map(repr, mesh.axis_names))}."
            )
    if len(set(axes)) < len(axes):
        raise ValueError(f"{where} names an axis twice: {', '.join(map(repr, axes))}.")


def _check_alike(mesh: Mesh, axes: Sequence[str], where: str) -> None:
    # JAX holds to such a spec outside of jit; under jit it may drop the Auto axes.
    types = {mesh.axis_types[mesh.axis_names.index(axis)] for axis in axes}
    if len(types) > 1:
        raise ValueError(
            f"{where} spreads one dimension over {', '.join(map(repr, axes))}, of which some are "
            "Auto and some Explicit. Give the axes that share a dimension one type."
        )


def check_fits(
    mesh: Mesh, pattern: str, spec: PartitionSpec, name: str, shape: tuple[int, ...]
) -> None:
    """Refuses a spec that an array cannot have.

    Raises:
        ValueError: the spec is longer than the array's rank, or spreads a dimension over axes that
            do not divide it.
    """
    array = name or "the model, which is one array,"
    if len(spec) > len(shape):
        raise ValueError(
            f"ShardingRules.params: {pattern!r} gives {array} the spec {spec}, which has "
            f"{len(spec)} dimensions; the array has shape {shape}. Write a pattern that leaves it "
            "out, or a rule for it in front."
        )
    for dimension, entry in enumerate(spec):
        axes = axes_of(entry)
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if shape[dimension] % parts:
            raise ValueError(
                f"ShardingRules.params: {pattern!r} spreads dimension {dimension} of {array} over "
                f"{', '.join(map(repr, axes))}, {parts} devices, which do not divide its length "
                f"{shape[dimension]} (shape {shape}, {spec}, mesh {dict(mesh.shape)}). Choose "
                "another dimension or axis, or change the model's width."
            )
