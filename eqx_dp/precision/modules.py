"""Which dtypes every module of a model has: a policy's module rules, matched with the model.

A rule matches modules, by path or by class. It holds for a module and everything below it, except
where another rule matches a module further in.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jmp
import numpy as np

from ..paths import dotted, matches
from ..shown import some
from ..trees import PyTree
from .module_rule import ModuleRule
from .refusals import refusal

T = TypeVar("T")
Rules = tuple[ModuleRule, ...]


def cast_floats(tree: T, dtype: np.dtype[Any]) -> T:
    """Converts the floating-point arrays of a tree: jmp alone decides which leaves are cast."""
    return jmp.Policy(dtype, dtype, dtype).cast_to_param(tree)


class Governed(NamedTuple):
    """The dtype of a leaf or a module, and its origin.

    Attributes:
        path: its path, as `jax.tree_util` gives it.
        compute: the dtype that it computes in.
        rule: the rule that gave that dtype, of the innermost matched module around it or of itself;
            None if the policy did.
        around: the compute dtype around it, in which a module's outputs leave.
        own: the rule that matched the module itself, or None.
    """

    path: tuple[Any, ...]
    compute: np.dtype[Any]
    rule: ModuleRule | None
    around: np.dtype[Any]
    own: ModuleRule | None = None


Matched = Callable[[str, eqx.Module], ModuleRule | None]
ANY = np.dtype(np.float32)  # where nothing is cast to a compute dtype


def as_it_is(node: Any, governed: Governed) -> Any:
    """For `rebuild`: a leaf or a module stays."""
    return node


def rebuild(
    tree: T,
    compute: np.dtype[Any],
    matched: Matched = lambda path, module: None,
    on_module: Callable[[eqx.Module, Governed], eqx.Module] = as_it_is,
    on_leaf: Callable[[Any, Governed], Any] = as_it_is,
) -> T:
    """Rebuilds a tree from its leaves up, passing every leaf and module its dtype.

    The contents of a module are rebuilt before `on_module` rebuilds the module. `matched` gives the
    rule that matches a module at a dotted path, or None; `compute` is the dtype around the tree.
    """

    def visit(node: Any, governed: Governed) -> Any:
        if not isinstance(node, eqx.Module):
            return on_leaf(node, governed)
        rule = matched(dotted(governed.path), node)
        if rule is not None:
            governed = governed._replace(compute=rule.compute_dtype, rule=rule, own=rule)
        return on_module(below(node, governed), governed)

    def below(node: Any, governed: Governed) -> Any:
        def child(path: tuple[Any, ...], node: Any) -> Any:
            path, compute = (*governed.path, *path), governed.compute
            return visit(node, Governed(path, compute, governed.rule, compute))

        def is_leaf(x: Any) -> bool:
            return x is not node and isinstance(x, eqx.Module)

        return jax.tree_util.tree_map_with_path(child, node, is_leaf=is_leaf)

    whole = Governed((), compute, None, compute)
    return visit(tree, whole) if isinstance(tree, eqx.Module) else below(tree, whole)


def cast_leaf(leaf: Any, governed: Governed) -> Any:
    """For `rebuild`: casts a leaf to its dtype."""
    return cast_floats(leaf, governed.compute)


def stored(tree: T, rules: Rules, otherwise: np.dtype[Any] | None) -> T:
    """Converts the floating-point arrays of a model, or of a part of it, to their storage dtypes.

    The dtype of a leaf is that of the rule that governs it. Where the rule has none, and where
    there is no rule, it is `otherwise`; with None the leaf keeps its own.
    """

    def store(leaf: Any, governed: Governed) -> Any:
        dtype = (governed.rule and governed.rule.param_dtype) or otherwise
        return cast_floats(leaf, dtype) if dtype else leaf

    return rebuild(tree, ANY, rules_of(rules), on_leaf=store)


# Rules against modules.


def rules_of(rules: Rules) -> Matched:
    """For `rebuild`: the first of a policy's rules that matches a module."""

    def first(path: str, module: eqx.Module) -> ModuleRule | None:
        return next((rule for rule in rules if _matches(rule, path, module)), None)

    return first


def _matches(rule: ModuleRule, path: str, module: eqx.Module) -> bool:
    classes = [c for c in type(module).__mro__ if issubclass(c, eqx.Module) and c is not eqx.Module]
    return rule.match in [c.__name__ for c in classes] or matches(rule.match, path)


def check_rules(model: PyTree[Any], rules: Rules) -> None:
    """Refuses rules that have no effect on a model.

    Raises:
        ValueError: A rule matches no module, or only modules that earlier rules match. The message
            names the rule and lists the modules.
    """
    modules: dict[str, eqx.Module] = {}
    taken: dict[str, str] = {}

    def collect(path: str, module: eqx.Module) -> None:
        modules[path] = module

    if rules:
        rebuild(model, ANY, collect)
    for rule in rules:
        mine = [path for path, module in modules.items() if _matches(rule, path, module)]
        if not mine and not rule.optional:
            raise refusal("modules.match", _no_module(rule, model), _listed(modules))
        if all(path in taken for path in mine) and not rule.optional:
            first = ", ".join(dict.fromkeys(repr(taken[path]) for path in mine))
            raise refusal(
                "modules.match",
                f"{rule.match!r} behind {first}, which takes every module that it matches",
                "rules that have an effect; the first match wins, so put the narrower one in front",
            )
        taken |= {path: rule.match for path in mine if path not in taken}


def _no_module(rule: ModuleRule, model: PyTree[Any]) -> str:
    leaves = (dotted(path) for path, _ in jax.tree_util.tree_leaves_with_path(model))
    leaf = next((path for path in leaves if matches(rule.match, path)), None)
    hint = "" if leaf is None else f" ({leaf} is a leaf; rules are for the modules that hold them)"
    return f"{rule.match!r}, which matches no module of the model{hint}"


def _listed(modules: dict[str, eqx.Module]) -> str:
    if not modules:
        return "no module rules, as the model holds no eqx.Module"
    names = [f"{path or '(root)'} {type(module).__name__}" for path, module in modules.items()]
    return f"the path or the class of a module, of which there are: {some(names, 40)}"
