"""The layers of a model, and policies by which each of them is narrow or wide."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from ..paths import dotted
from ..precision import ModuleRule, Policy, agreed_policy, matched_by, modules_of, refusal

# As many layers as are measured, unless a user names them: each is compiled once for each policy.
MOST_LAYERS = 16
REST = "(rest)"

_Path = tuple[Any, ...]
_Module = tuple[_Path, eqx.Module]


class Layer(NamedTuple):
    """A module of a model, without the layers in it; or all that is in no layer.

    Attributes:
        path: where it stands, dotted; `REST` for what is in no layer.
        pattern: of a module rule that matches it alone.
        within: which layer is around it; -1, which is the rest, without one.
        leaves: which of the trained leaves are its own.
        size: how many numbers these are.
    """

    path: str
    pattern: str
    within: int
    leaves: tuple[int, ...]
    size: int


class Level(NamedTuple):
    """What a layer computes in.

    Attributes:
        compute: the compute dtype.
        is_wide: whether its products are in that dtype, whatever a policy's `[matmul]` says.
    """

    compute: np.dtype[Any]
    is_wide: bool = False


def layers_of(
    model: PyTree[Any], trained: PyTree[Any], patterns: Sequence[str] | None
) -> tuple[Layer, ...]:
    """The layers of a model, each in front of those in it, and the rest as the last one.

    Without patterns these are the modules that hold trained leaves, level by level from the outside
    as far in as there are at most `MOST_LAYERS` of them.

    Raises:
        ValueError: a pattern matches no module, or only the model itself; two layers cannot be told
            apart by their paths.
    """
    leaves = jax.tree_util.tree_leaves_with_path(trained)
    found, modules = [path for path, _ in leaves], modules_of(model)
    if patterns is None:
        chosen = _by_depth([path for path, _ in modules if path], found)
    else:
        chosen = _named(model, modules, patterns)
    owners = [_innermost(path, chosen) for path in found]
    layers: list[Layer] = []
    for index, path in enumerate((*chosen, ())):
        mine = index if path else -1
        own = tuple(leaf for leaf, owner in enumerate(owners) if owner == mine)
        name = dotted(path)
        layers.append(
            Layer(
                name if path else REST,
                "".join("?" if x in " ,=*" or not x.isprintable() else x for x in name),
                _innermost(path[:-1], chosen),
                own,
                sum(leaves[leaf][1].size for leaf in own),
            )
        )
    _check_patterns(modules, layers[:-1])
    return tuple(layers)


def _by_depth(modules: list[_Path], trained: list[_Path]) -> list[_Path]:
    """Modules with trained leaves, as far in as there are few enough."""
    holding = [path for path in modules if any(leaf[: len(path)] == path for leaf in trained)]
    around = [sum(_is_in(path, other) for other in holding) for path in holding]
    has_inner = [any(_is_in(other, path) for other in holding) for path in holding]
    best: list[_Path] = []
    for depth in range(max(around, default=-1) + 1):
        found = [
            path
            for path, rank, opens in zip(holding, around, has_inner, strict=True)
            if rank == depth or (rank < depth and not opens)
        ]
        if len(found) > MOST_LAYERS and len(best) > 1:
            break
        best = found
    return best


def _named(model: PyTree[Any], modules: list[_Module], patterns: Sequence[str]) -> list[_Path]:
    rules = [_rule(pattern) for pattern in patterns]
    policy = Policy(np.float32, np.float32, np.float32, modules=rules)
    agreed_policy(model, policy)  # which refuses what matches nothing
    matched = [matched_by(rule, modules) for rule in rules]
    chosen = [path for path, _ in modules if path and any(path in paths for paths in matched)]
    if not chosen:
        names = ", ".join(map(repr, patterns))
        raise refusal("modules", f"{names}, the model itself", "patterns of modules in the model")
    return chosen


def _rule(pattern: str) -> ModuleRule:
    return ModuleRule(pattern, np.float32)


def _is_in(path: _Path, other: _Path) -> bool:
    return len(path) > len(other) and path[: len(other)] == other


def _innermost(path: _Path, chosen: list[_Path]) -> int:
    """Which of the paths is that or the nearest around it; -1 if none is."""
    around = [i for i, one in enumerate(chosen) if path[: len(one)] == one]
    return max(around, key=lambda i: len(chosen[i]), default=-1)


def _check_patterns(modules: list[_Module], layers: list[Layer]) -> None:
    for layer in layers:
        matched = list(map(dotted, matched_by(_rule(layer.pattern), modules)))
        if matched != [layer.path]:
            raise refusal(
                "modules",
                f"{layer.path!r}, whose pattern in a rule matches {', '.join(matched)}",
                "modules whose paths differ in more than spaces, commas, '=' and '*', and are no "
                "names of classes",
            )


def _depth(layers: Sequence[Layer], layer: Layer) -> int:
    return 0 if layer.within == -1 else 1 + _depth(layers, layers[layer.within])


def assembled(base: Policy, layers: Sequence[Layer], levels: Sequence[Level]) -> Policy:
    """A policy by which every layer has its level, with as few rules as that takes.

    Each layer has a level. One that is wide needs a base with `[matmul]`; with such a base, one
    that is not has the base's compute dtype.
    """
    rest, narrows = levels[-1], base.matmul is not None
    catches_all = narrows and rest.is_wide
    rules: list[ModuleRule] = []
    own = zip(layers[:-1], levels[:-1], strict=True)
    for layer, level in sorted(own, key=lambda one: -_depth(layers, one[0])):
        if level != levels[layer.within]:
            # The last rule takes every module, those in this one too if it may.
            pattern = f"{layer.pattern}.**" if catches_all else layer.pattern
            rules.append(ModuleRule(pattern, level.compute, "wide" if level.is_wide else None))
    if catches_all:
        rules.append(ModuleRule("**", rest.compute, "wide", optional=True))
    return dataclasses.replace(base, compute_dtype=rest.compute, modules=tuple(rules))
