"""What the engine finds in a loss, asked for directly."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import pytest

from eqx_dp.gradients import clipped_grad
from eqx_dp.gradients.cost import LeafCost
from eqx_dp.gradients.leaves import has_ghost
from eqx_dp.gradients.program import Inputs, Options, Program, trace
from eqx_dp.gradients.taps import Survey, survey
from tests.models import Case


def traced(
    fun: Callable[..., Any], model: Any, filter_spec: Any, one: tuple[Any, ...]
) -> tuple[Program, Survey]:
    """One example's loss and its sites; `one` holds shapes without the examples' axis."""
    params, rest = eqx.partition(model, filter_spec)
    frozen, static = eqx.partition(rest, eqx.is_array)
    inputs = Inputs(params, frozen, static, one, None, None)
    program = trace(fun, Options(False, False, None, None), inputs)
    return program, survey(program, inputs.structs, len(jax.tree.leaves(params)))


def surveyed(
    fun: Callable[..., Any], model: Any, *batch: Any, filter_spec: Any = eqx.is_inexact_array
) -> tuple[list[str], Survey]:
    """The paths of the trainable leaves, and the survey."""
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
    _, found = traced(fun, model, filter_spec, one)
    params = eqx.filter(model, filter_spec)
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(params)]
    return paths, found


def whole(case: Case) -> dict[str, str]:
    """The leaves that no site describes, with the reason."""
    paths, found = surveyed(case.loss, case.model, *case.batch(2), filter_spec=case.filter_spec)
    return {paths[leaf]: reason for leaf, reason in found.whole.items()}


def kinds(case: Case) -> dict[str, list[str]]:
    """The kinds of every leaf's sites, in the order of the program."""
    paths, found = surveyed(case.loss, case.model, *case.batch(2), filter_spec=case.filter_spec)
    return {path: [site.kind.name for _, site in found.of(i)] for i, path in enumerate(paths)}


def force(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Takes one way to every leaf's norm, where there is a choice, whatever it costs."""
    leaf_cost = clipped_grad.leaf_cost

    def forced(found: Survey, leaf: int, parameter: Any) -> LeafCost:
        cost = leaf_cost(found, leaf, parameter)
        if cost.way not in ("ghost", "kept"):
            return cost
        shape = jax.ShapeDtypeStruct(parameter.shape, parameter.dtype)
        possible = has_ghost([site for _, site in found.of(leaf)], shape)
        return cost._replace(way="ghost" if way == "ghost" and possible else "kept")

    monkeypatch.setattr(clipped_grad, "leaf_cost", forced)


def freshly_jitted(grad_fn: Callable[..., Any], model: Any) -> Callable[..., Any]:
    """Under a jit whose cache nobody shares: a forced way must not be served from another's."""
    arrays, static = eqx.partition(model, eqx.is_array)

    def call(arrays: Any, batch: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return grad_fn(eqx.combine(arrays, static), *batch, **named)

    jitted = jax.jit(call)
    return lambda *batch, **named: jitted(arrays, batch, named)
