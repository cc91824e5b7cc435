"""The narrowest policy within a tolerance: the layers that cost most are kept wide."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..precision import Policy, load_policy
from .clipped_errors import Costs
from .layers import Layer, Level, assembled

_FLOAT32 = np.dtype(np.float32)


class _Rung(NamedTuple):
    """One of the policies that a layer can follow beside a base.

    Attributes:
        level: what it computes in.
        errors: what that costs, layer by layer.
        everywhere: the policy that all layers follow if all are here.
        told: what the table says that it is.
    """

    level: Level
    errors: list[float]
    everywhere: Policy
    told: str


def recommended(
    costs: Sequence[Costs],
    layers: Sequence[Layer],
    tolerance: float,
    measure: Callable[[Policy], float],
) -> tuple[Policy | None, float, list[str]]:
    """The policy, its error as measured, and what each layer is multiplied in."""
    for base in sorted(costs, key=lambda one: (one.bits, one.error)):
        rungs = _ladder(base, costs)
        found = _climbed(base, rungs, layers, tolerance, measure)
        if found is not None:
            return found
    float32 = load_policy("float32")
    error = measure(float32)
    is_within = error <= tolerance
    told = "float32" if is_within else "-"
    return float32 if is_within else None, error, [told] * len(layers)


def _ladder(base: Costs, costs: Sequence[Costs]) -> list[_Rung]:
    """The base, and the wider policies that a module rule beside it can give, in the end float32.

    A rule gives a compute dtype, so that a policy with `[matmul]`, or with a loss scale that the
    base does not have, is none of them.
    """
    products = base.policy.matmul is not None
    told = str(base.policy.matmul.forward if base.policy.matmul else base.policy.compute_dtype)
    rungs = [_Rung(Level(base.policy.compute_dtype), _errors(base), base.policy, told)]
    wider = [
        one
        for one in costs
        if one.policy.matmul is None
        and one.policy.loss_scale == base.policy.loss_scale
        and one.bits > base.bits
    ]
    for one in sorted(wider, key=lambda one: (one.bits, one.error)):
        level = Level(one.policy.compute_dtype, products)
        # What no rule can keep wide is narrow by the base.
        own = [*_errors(one)[:-1], math.hypot(_errors(one)[-1], base.floor)]
        rungs.append(_Rung(level, own, one.policy, str(level.compute)))
    level = Level(_FLOAT32, products)
    if all(rung.level != level for rung in rungs):
        zero = [0.0] * (len(base.rows) - 1)
        rungs.append(_Rung(level, [*zero, base.floor], load_policy("float32"), "float32"))
    return rungs


def _errors(cost: Costs) -> list[float]:
    return [row.error for row in cost.rows]


def _climbed(
    base: Costs,
    rungs: list[_Rung],
    layers: Sequence[Layer],
    tolerance: float,
    measure: Callable[[Policy], float],
) -> tuple[Policy, float, list[str]] | None:
    """Lets the costliest layers climb, until the error that is measured is within the tolerance."""
    at, target = [0] * len(layers), tolerance
    while True:
        while math.hypot(*(rungs[rung].errors[i] for i, rung in enumerate(at))) > target:
            if not _climb(at, rungs):
                break
        levels = [rungs[rung].level for rung in at]
        if len(set(at)) == 1:
            policy = rungs[at[0]].everywhere
        else:
            wider = sum(rung > 0 for rung in at)
            policy = dataclasses.replace(
                assembled(base.policy, layers, levels),
                name=None,
                description=f"{base.label}, {wider} of {len(layers)} parts wider",
            )
        error = measure(policy)
        if error <= tolerance:
            return policy, error, [rungs[rung].told for rung in at]
        predicted = math.hypot(*(rungs[rung].errors[i] for i, rung in enumerate(at)))
        if not _climb(at, rungs):
            return None
        target = min(target, predicted) * tolerance / error


def _climb(at: list[int], rungs: list[_Rung]) -> bool:
    """Moves the layer that costs most to the next rung that costs less; False if none can."""
    order = sorted(range(len(at)), key=lambda i: -rungs[at[i]].errors[i])
    for layer in order:
        now = rungs[at[layer]].errors[layer]
        for rung in range(at[layer] + 1, len(rungs)):
            if rungs[rung].errors[layer] < now:
                at[layer] = rung
                return True
    return False
