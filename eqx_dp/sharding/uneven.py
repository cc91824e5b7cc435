"""Arrays that every device holds whole, because no dimension of them can be divided."""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from ..paths import dotted, matches
from ..shown import some
from ..trees import PyTree
from .axes import axes_of, axes_text
from .rules import ShardingRules, has_shape


def warn_of_uneven(rules: ShardingRules, model: PyTree[Any], trained: PyTree[Any]) -> None:
    """Warns of what stays whole on every device because no dimension can be divided.

    It is said by name, of parameters that no rule speaks of where others are spread over example
    axes, and of sums that are to be spread over them. Arrays with fewer entries than devices are
    left out.
    """
    arrays = {
        dotted(path): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(model)
        if has_shape(leaf)
    }
    ruled = {axis for _, spec in rules.params for entry in spec for axis in axes_of(entry)}
    free = [
        name for name in arrays if not any(matches(pattern, name) for pattern, _ in rules.params)
    ]
    axes = [axis for axis in rules.examples if axis in ruled]
    _warn("parameter", {name: arrays[name] for name in free}, rules.mesh, axes)
    if rules.accumulators == "examples":
        sums: dict[str, tuple[int, ...]] = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(trained):
            spec = rules.accumulator_spec(rules.spec(path, leaf.shape), leaf.shape)
            if not any(axis in rules.examples for entry in spec for axis in axes_of(entry)):
                sums[dotted(path)] = leaf.shape
        _warn("gradient", sums, rules.mesh, rules.examples)


def _warn(what: str, arrays: dict[str, tuple[int, ...]], mesh: Mesh, axes: Sequence[str]) -> None:
    """Warns of arrays that axes do not divide."""
    devices = math.prod(mesh.shape[axis] for axis in axes)
    whole = [
        f"{name or 'the model'} {shape}"
        for name, shape in arrays.items()
        if math.prod(shape) >= devices and not any(n % devices == 0 for n in shape)
    ]
    if devices == 1 or not whole:
        return
    warnings.warn(
        f"Every device holds the whole {what} of {some(whole, 8)}: no dimension is a "
        f"multiple of the {devices} devices of {axes_text(axes)} (mesh {dict(mesh.shape)}). Where "
        "that is large, change the model's width, or the mesh.",
        stacklevel=2,
    )
