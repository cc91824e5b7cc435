"""Specs that do not fit an array."""

import math

from jax.sharding import Mesh, PartitionSpec

from .axes import axes_of


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
