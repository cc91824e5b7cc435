"""How arrays that are spread over example axes come together on a device: whole, or in slices."""

import math
from typing import NamedTuple

import jax.extend.core as jex_core

from ..gradients import Prepared, parts_that_stay, scattering_of
from ..programs import Call, Scan, inside
from ..sharding import Cut, ShardingRules, keeps_parts


class Slices(NamedTuple):
    """How the arrays of a model that are spread over example axes come together on a device.

    Attributes:
        gathered: for each trainable leaf, and then for all other arrays, the number of slices that
            it is gathered in where it is used (1: as a whole); 0 where a device has all of it from
            beginning to end; None where it is not spread.
        scattered: likewise for the sum of each trainable leaf; 0 where it is whole until the end.
    """

    gathered: list[int | None]
    scattered: list[int | None]


def slices_of(call: Prepared, rules: ShardingRules | None) -> Slices:
    """The slices of every parameter of a call.

    Args:
        call: on shapes.
        rules: the sharding rules of its clipped gradient.
    """
    traced, specs = call.traced, call.specs
    if rules is None or specs is None:
        num_params, num_frozen = len(traced.params), len(traced.frozen)
        return Slices([None] * (num_params + num_frozen), [None] * num_params)
    may_stay = parts_that_stay(traced)
    is_once = rules.accumulators == "params_once"
    return Slices(
        [
            None if cut is None else _gathered(call, i, cut) if i in may_stay else 0
            for i, cut in enumerate(specs.cuts)
        ],
        [
            None if cut is None else 0 if is_once else _scattered(call, i, cut)
            for i, cut in enumerate(specs.cuts[: len(traced.params)])
        ],
    )


def _gathered(call: Prepared, place: int, cut: Cut) -> int:
    """In how many slices the engine gathers an array: more than one only in scans over it."""
    program = call.traced.program.jaxpr.jaxpr
    if any(dim == 0 for dim, _ in cut.over(len(cut.entries))):
        return 1
    return _slices(program, program.invars[place])


def _slices(program: jex_core.Jaxpr, array: jex_core.Var) -> int:
    """The smallest number of slices in which an equation of the program gathers an array."""
    found: list[int] = [1] if array in program.outvars else []
    for equation in program.eqns:
        for i, operand in enumerate(equation.invars):
            if operand is array:
                found.append(_slices_at(equation, i))
                if keeps_parts(equation):
                    found[-1] = _slices(program, equation.outvars[0])
    return min(found, default=1)


def _slices_at(equation: jex_core.JaxprEqn, i: int) -> int:
    match inside(equation):
        case Call("jit" | "remat", body):
            return _slices(body.jaxpr, body.jaxpr.invars[i])
        case Scan() as scan if i >= scan.num_consts + scan.num_carry:
            return scan.length * _slices(scan.body.jaxpr, scan.body.jaxpr.invars[i])
        case _:
            return 1


def _scattered(call: Prepared, leaf: int, cut: Cut) -> int:
    traced = call.traced
    uses = [*traced.uses.of[leaf].values()]
    if call.choice.method == "per_example" or len(uses) != 1:
        return 1
    found = scattering_of(uses[0], cut)
    return 1 if found is None else math.prod(found.ahead)
