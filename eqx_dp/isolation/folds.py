"""Where examples are after primitives that fold them and others into one dimension."""

import math
from dataclasses import replace

import jax.extend.core as jex_core

from .dependence import Apart, shape_of


def reshaped(
    equation: jex_core.JaxprEqn, operand: int, apart: Apart, num_examples: int
) -> Apart | None:
    """All entries stay in order, and are laid out in another shape."""
    before, after = shape_of(equation.invars[0]), shape_of(equation.outvars[0])
    order = equation.params["dimensions"]
    if order is not None:
        before = tuple(before[axis] for axis in order)
        apart = replace(apart, dim=order.index(apart.dim))
    stride = apart.inner * math.prod(before[apart.dim + 1 :])
    for dim, size in enumerate(after):
        behind = math.prod(after[dim + 1 :])
        is_inside = behind <= stride and stride * num_examples <= behind * size
        if is_inside and stride % behind == 0 and size * behind % (stride * num_examples) == 0:
            return Apart(dim, stride // behind)
    return None


def convolved(
    equation: jex_core.JaxprEqn, operand: int, apart: Apart, num_examples: int
) -> Apart | None:
    """Examples are among those of the convolution, among features of a filter, or in groups.

    Each group meets no other, and all of it has to be one example's.
    """
    params, dim, inner = equation.params, apart.dim, apart.inner
    numbers = params["dimension_numbers"]
    spec = numbers.lhs_spec if operand == 0 else numbers.rhs_spec
    size = shape_of(equation.invars[operand])[dim]
    features_out = shape_of(equation.invars[1])[numbers.rhs_spec[0]]
    example_axis, feature_axis = numbers.out_spec[:2]
    if operand == 1:
        return Apart(feature_axis, inner) if dim == spec[0] else None
    if dim == spec[0]:
        groups = params["batch_group_count"]
        if size // groups % (inner * num_examples) == 0:
            return Apart(example_axis, inner)
    elif dim == spec[1]:
        groups = params["feature_group_count"]
    else:
        return None
    # From groups of entries that one example has to itself to the features made of them.
    of_group, made = size // groups, features_out // groups
    return Apart(feature_axis, inner // of_group * made) if inner % of_group == 0 else None
