"""What the engine finds in a loss, asked for directly."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from eqx_dp.gradients import clipped_grad
from eqx_dp.gradients.cost import LeafCost, leaf_cost
from eqx_dp.gradients.cross_terms import overlaps
from eqx_dp.gradients.mapped import is_mapped
from eqx_dp.gradients.program import Inputs, Options, Program, trace
from eqx_dp.gradients.split import split
from eqx_dp.gradients.taps import Uses, find_uses
from eqx_dp.gradients.targets import find_targets
from tests.models import Case


def traced(
    fun: Callable[..., Any], model: Any, filter_spec: Any, one: tuple[Any, ...]
) -> tuple[Program, Uses]:
    """One example's loss and the uses in it; `one` holds shapes without the examples' axis."""
    params, rest = eqx.partition(model, filter_spec)
    frozen, static = eqx.partition(rest, eqx.is_array)
    inputs = Inputs(params, frozen, static, one, None, None)
    program = trace(fun, Options(False, False, None, None), inputs)
    return program, find_uses(program, len(jax.tree.leaves(params)))


def uses_of(
    fun: Callable[..., Any], model: Any, *batch: Any, filter_spec: Any = eqx.is_inexact_array
) -> tuple[list[str], Uses]:
    """The paths of the trainable leaves, and their uses."""
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
    _, found = traced(fun, model, filter_spec, one)
    params = eqx.filter(model, filter_spec)
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(params)]
    return paths, found


def costs(case: Case) -> dict[str, LeafCost]:
    """How every leaf is treated, by its path."""
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), case.batch(2))
    program, _ = traced(case.loss, case.model, case.filter_spec, one)
    params, rest = eqx.partition(case.model, case.filter_spec)
    leaves, frozen = (jax.tree.leaves(eqx.filter(x, eqx.is_array)) for x in (params, rest))
    parts = split(program, len(leaves), len(frozen))
    roots = [*leaves, *(its.value for its in parts.derived)]
    found = find_uses(parts.program, len(roots))
    of_roots = [leaf_cost(found, root, value) for root, value in enumerate(roots)]
    dtype = jnp.result_type(jnp.float32, *leaves)
    known = functools.partial(is_mapped, parts, found, leaves, frozen, dtype)
    _, of_leaves = find_targets(found, parts.derived, of_roots, [0] * len(leaves), known)
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(params)]
    return dict(zip(paths, of_leaves, strict=True))


def whole(case: Case) -> dict[str, str]:
    """The leaves that no uses describe, with the reason."""
    return {path: cost.reason for path, cost in costs(case).items() if cost.way == "whole"}


def kinds(case: Case) -> dict[str, list[str]]:
    """The kinds of every leaf's uses, in the order of the program."""
    return {path: list(cost.kinds) for path, cost in costs(case).items()}


def force(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Takes one way to every leaf's norm, where there is a choice, whatever it costs."""
    leaf_cost = clipped_grad.leaf_cost

    def forced(found: Uses, leaf: int, parameter: Any) -> LeafCost:
        cost = leaf_cost(found, leaf, parameter)
        if cost.way not in ("inner_products", "kept"):
            return cost
        possible = overlaps(tuple(found.of[leaf].values()), parameter.shape) is not None
        return cost._replace(way=way if possible else "kept")

    monkeypatch.setattr(clipped_grad, "leaf_cost", forced)


def freshly_jitted(grad_fn: Callable[..., Any], model: Any) -> Callable[..., Any]:
    """Under a jit whose cache nobody shares: a forced way must not be served from another's."""
    arrays, static = eqx.partition(model, eqx.is_array)

    def call(arrays: Any, batch: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return grad_fn(eqx.combine(arrays, static), *batch, **named)

    jitted = jax.jit(call)
    return lambda *batch, **named: jitted(arrays, batch, named)
