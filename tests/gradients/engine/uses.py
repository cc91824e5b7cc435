"""What the engine finds in a loss, asked for directly."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import pytest

from eqx_dp.gradients import clipped_grad
from eqx_dp.gradients.choice import LeafCost, leaf_costs
from eqx_dp.gradients.program import Inputs, Options, Program, trace
from eqx_dp.gradients.taps import find_uses
from eqx_dp.gradients.uses import Uses, overlaps
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
    _, found = traced(case.loss, case.model, case.filter_spec, one)
    params, _ = eqx.partition(case.model, case.filter_spec)
    sizes = [leaf.size for leaf in jax.tree.leaves(params)]
    _, of_leaves = leaf_costs(found, sizes, [False] * len(sizes), "book_keeping")
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(params)]
    return dict(zip(paths, of_leaves, strict=True))


def kinds(case: Case) -> dict[str, list[str]]:
    """The kinds of every leaf's uses, in the order of the program."""
    return {path: list(cost.uses) for path, cost in costs(case).items()}


def force(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Takes one way to every leaf's norm, where there is a choice, whatever it costs."""

    def forced(found: Uses, sizes: Any, is_spread: Any, method: str) -> Any:
        as_chosen, costs = leaf_costs(found, sizes, is_spread, method)
        if method == "per_example":
            return as_chosen, costs
        uses = [tuple(its.values()) for its in found.of]
        can = {i for i, its in enumerate(uses) if i not in found.formed and its and overlaps(its)}
        costs = [
            cost._replace(way=way if leaf in can else cost.way) for leaf, cost in enumerate(costs)
        ]
        formed = {leaf: cost.reason for leaf, cost in enumerate(costs) if cost.way == "formed"}
        return found.forming(formed), costs

    monkeypatch.setattr(clipped_grad, "leaf_costs", forced)


def freshly_jitted(grad_fn: Callable[..., Any], model: Any) -> Callable[..., Any]:
    """Under a jit whose cache nobody shares: a forced way must not be served from another's."""
    arrays, static = eqx.partition(model, eqx.is_array)

    def call(arrays: Any, batch: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return grad_fn(eqx.combine(arrays, static), *batch, **named)

    jitted = jax.jit(call)
    return lambda *batch, **named: jitted(arrays, batch, named)
