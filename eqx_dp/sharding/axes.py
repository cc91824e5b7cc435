"""Mesh axes, as specs and rules name them."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

from jax.sharding import Mesh, PartitionSpec

from ..expected import expect
from ..shown import shown

PathRule: TypeAlias = tuple[str, PartitionSpec]
"""A pattern of paths in the model's tree, and the spec of the matching arrays."""


def axes_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes that an entry of a `PartitionSpec` names."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def only(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """The part of a spec about the given axes."""
    return PartitionSpec(
        *(tuple(axis for axis in axes_of(entry) if axis in axes) or None for entry in spec)
    )


def axes_text(axes: Sequence[str], kind: str = "") -> str:
    """Axes, for an error."""
    return f"the {kind}ax{'es' if len(axes) > 1 else 'is'} {', '.join(map(repr, axes))}"


def example_axes(mesh: Mesh, examples: str | Sequence[str]) -> tuple[str, ...]:
    """Checks the axes that examples are spread over, and returns them as a tuple."""
    allowed = "an axis of the mesh or a tuple of axes"  # a set has no order
    expect("examples", examples, (str, tuple, list), allowed)
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
    is_iterable = isinstance(rules, Iterable) and not isinstance(rules, str | Mapping)
    found = tuple(cast(Iterable[Any], rules)) if is_iterable else (rules,)
    return tuple(_path_rule(mesh, rule) for rule in found)


def _path_rule(mesh: Mesh, rule: Any) -> PathRule:
    pattern, spec = rule if isinstance(rule, tuple | list) and len(rule) == 2 else (None, None)
    if not pattern or not isinstance(pattern, str) or not isinstance(spec, PartitionSpec):
        raise ValueError(
            "params holds pairs of a path pattern, such as '**.weight', and a "
            f"jax.sharding.PartitionSpec; found {shown(rule)}. A single pair needs a comma after "
            "it: params=((pattern, spec),). A mapping's pairs are tuple(mapping.items())."
        )
    where = f"params, {pattern!r}: {spec}"
    if spec.unreduced or spec.reduced or PartitionSpec.UNCONSTRAINED in tuple(spec):
        raise ValueError(
            f"{where} does not say for each dimension where it lives. Name axes, or None; a "
            "parameter is never partly reduced."
        )
    _check_axes(mesh, [axis for entry in spec for axis in axes_of(entry)], where)
    for entry in spec:
        _check_alike(mesh, axes_of(entry), where)
    return pattern, spec


def _check_axes(mesh: Mesh, axes: Sequence[Any], where: str) -> None:
    lacking = [axis for axis in axes if axis not in mesh.axis_names]
    if lacking:
        raise ValueError(
            f"{where} names {axes_text(lacking)}, which the mesh lacks; it has "
            f"{axes_text(mesh.axis_names)}."
        )
    if len(set(axes)) < len(axes):
        raise ValueError(f"{where} names an axis twice: {', '.join(map(repr, axes))}.")


def _check_alike(mesh: Mesh, axes: Sequence[str], where: str) -> None:
    # JAX keeps such a spec outside of jit; under jit it may drop the Auto axes.
    if len({mesh.axis_types[mesh.axis_names.index(axis)] for axis in axes}) > 1:
        raise ValueError(
            f"{where} spreads one dimension over {axes_text(axes)}, of which some are Auto and "
            "some Explicit. Give the axes that share a dimension one type."
        )


def check_fits(
    mesh: Mesh, pattern: str, spec: PartitionSpec, name: str, shape: tuple[int, ...]
) -> None:
    """Refuses a spec that does not fit an array.

    Raises:
        ValueError: the spec is longer than the array's rank, or spreads a dimension over axes that
            do not divide it.
    """
    given = (
        f"ShardingRules.params: {pattern!r} gives {name or 'the model, which is one array,'} of "
        f"shape {shape} the spec {spec},"
    )
    if len(spec) > len(shape):
        raise ValueError(
            f"{given} which has {len(spec)} dimensions. Write a pattern that leaves it out, or a "
            "rule for it in front."
        )
    for dimension, axes in enumerate(map(axes_of, spec)):
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if shape[dimension] % parts:
            raise ValueError(
                f"{given} and the {parts} devices of {axes_text(axes)} do not divide dimension "
                f"{dimension} (mesh {dict(mesh.shape)}). Choose another dimension or axis, or "
                "change the model's width."
            )
