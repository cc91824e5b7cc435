"""A program in two halves, of which the second may run again with other inputs.

Less is left by the first half to the second than it finds: what a few entry-by-entry operations
make of something else that is left, the second half makes again.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp

from .inside import Call, closed, inside
from .names import ENTRY_BY_ENTRY, named
from .repeated import call_of

_CHEAP = ENTRY_BY_ENTRY | named(
    "broadcast_in_dim iota name reshape squeeze stop_gradient transpose"
)
"""Primitives that are made again."""

_ROOM = 1.25
"""How many times the bytes of a result the values may have that it is made again of."""


class Halves(NamedTuple):
    """A program in two halves.

    Attributes:
        first: from the inputs that are not late to what is left to the second.
        second: from that, and the late inputs behind it, to the results.
    """

    first: jex_core.ClosedJaxpr
    second: jex_core.ClosedJaxpr


def halved(program: jex_core.ClosedJaxpr, is_late: Sequence[bool]) -> Halves:
    """Divides a program: all that depends on a late input is in the second half.

    So is, again, what is made of something else that is left to it, or of nothing but constants, by
    operations that cost little: entry by entry, of arrays no larger together than their result.

    Args:
        program: the program.
        is_late: of every input.
    """
    jaxpr = program.jaxpr
    late = {x for x, its in zip(jaxpr.invars, is_late, strict=True) if its}
    first, second = list[jex_core.JaxprEqn](), list[jex_core.JaxprEqn]()
    for equation in jaxpr.eqns:
        is_second = not late.isdisjoint(_variables(equation.invars))
        if is_second:
            late.update(equation.outvars)
        (second if is_second else first).append(equation)
    needed = {x for one in second for x in _variables(one.invars)} | {*_variables(jaxpr.outvars)}
    left = _Left(needed - late - {*jaxpr.constvars}, {*jaxpr.constvars})
    first, again = left.found(first)
    early = [x for x in jaxpr.invars if x not in late]
    left_over = [*left.values, *(x for x in early if x in left.needed)]
    given = [x for x in jaxpr.invars if x in late]
    return Halves(
        _part(program, early, first, left_over),
        _part(program, [*left_over, *given], [*again, *second], jaxpr.outvars),
    )


class _Left:
    """What of some equations is left to others that come later.

    Attributes:
        needed: the variables that later equations need.
        free: the variables that are there in any case.
        values: of the former, and in the place of some, those that are left.
    """

    def __init__(self, needed: set[Any], free: set[Any]) -> None:
        self.needed = needed
        self.free = free
        self.values = dict[Any, None]()
        self._parts = dict[Any, _Parts | None]()

    def found(
        self, equations: list[jex_core.JaxprEqn]
    ) -> tuple[list[jex_core.JaxprEqn], list[jex_core.JaxprEqn]]:
        """The equations, some of which leave other values, and those that are evaluated again."""
        cheap = _made_again(equations, self.free)
        first, again = list[jex_core.JaxprEqn](), list[jex_core.JaxprEqn]()
        for equation in reversed(equations):
            wanted = [x in self.needed for x in equation.outvars]
            if not any(wanted):
                first.append(equation)
            elif id(equation) in cheap:
                first.append(equation)
                again.append(equation)
                self._need(equation.invars)
            elif parts := self._of_call(equation, wanted):
                call, behind = parts.calls(equation, wanted)
                first.append(call)
                self.values.update(dict.fromkeys(call.outvars[len(equation.outvars) :]))
                kept = (x for i, x in enumerate(equation.outvars) if i in parts.kept)
                self.values.update(dict.fromkeys(kept))
                if behind is not None:
                    again.append(behind)
                    self._need(x for x in _variables(behind.invars) if x not in self.values)
            else:
                first.append(equation)
                its = zip(equation.outvars, wanted, strict=True)
                self.values.update({x: None for x, is_wanted in its if is_wanted})
        return first[::-1], again[::-1]

    def _need(self, atoms: Iterable[Any]) -> None:
        self.needed.update(x for x in _variables(atoms) if x not in self.free)

    def _of_call(self, equation: jex_core.JaxprEqn, wanted: list[bool]) -> "_Parts | None":
        found = inside(equation)
        if not isinstance(found, Call) or found.wrapper != "jit" or equation.effects:
            return None
        key = found.body, tuple(wanted)
        if key not in self._parts:
            self._parts[key] = _parts_of(found.body, wanted)
        return self._parts[key]


class _Parts(NamedTuple):
    """A call in two: one that leaves what is costly, and one that makes the rest of it.

    Attributes:
        first: a call of the former, whose results are those of the call, and what it leaves.
        second: a call of the latter; None where all is left as it is.
        kept: which of the call's results are left as they are.
        operands: which operands of the call the latter takes, before what is left.
        made: which results of the call it makes.
    """

    first: jex_core.JaxprEqn
    second: jex_core.JaxprEqn | None
    kept: frozenset[int]
    operands: tuple[int, ...]
    made: tuple[int, ...]

    def calls(
        self, equation: jex_core.JaxprEqn, wanted: list[bool]
    ) -> tuple[jex_core.JaxprEqn, jex_core.JaxprEqn | None]:
        """Both in the place of a call."""
        said, count = equation.source_info, len(equation.outvars)
        fresh = [jex_core.Var(x.aval) for x in self.first.outvars[count:]]
        call = self.first.replace(
            invars=equation.invars, outvars=[*equation.outvars, *fresh], source_info=said
        )
        if self.second is None:
            return call, None
        taken = [equation.invars[i] for i in self.operands]
        made = [equation.outvars[i] for i in self.made]
        return call, self.second.replace(invars=[*taken, *fresh], outvars=made, source_info=said)


def _parts_of(body: jex_core.ClosedJaxpr, wanted: list[bool]) -> _Parts | None:
    """Both parts of a program, some of whose results are wanted later; None where all is left."""
    jaxpr = body.jaxpr
    variables = [*jaxpr.invars, *(x for one in jaxpr.eqns for x in one.outvars)]
    if any(map(_is_extended, variables)):
        return None
    results = [x for x, its in zip(jaxpr.outvars, wanted, strict=True) if its]
    left = _Left({*_variables(results)} - {*jaxpr.constvars}, {*jaxpr.constvars})
    first, again = left.found(list(jaxpr.eqns))
    again_made = {x for one in again for x in one.outvars} | {*jaxpr.invars, *jaxpr.constvars}
    made = tuple(
        i
        for i, (x, its) in enumerate(zip(jaxpr.outvars, wanted, strict=True))
        if its and (not isinstance(x, jex_core.Var) or x in again_made)
    )
    if not made:
        return None
    kept = frozenset(i for i, its in enumerate(wanted) if its and i not in made)
    of_kept = {jaxpr.outvars[i] for i in kept}
    beside = [x for x in left.values if x not in of_kept or x in _needed_by(again)]
    operands = tuple(i for i, x in enumerate(jaxpr.invars) if x in left.needed)
    inputs = [*(jaxpr.invars[i] for i in operands), *beside]
    outputs = [jaxpr.outvars[i] for i in made]
    return _Parts(
        call_of(_part(body, jaxpr.invars, first, [*jaxpr.outvars, *beside])),
        call_of(_part(body, inputs, again, outputs)),
        kept,
        operands,
        made,
    )


def _needed_by(equations: list[jex_core.JaxprEqn]) -> set[Any]:
    return {x for one in equations for x in _variables(one.invars)}


def _made_again(equations: Iterable[jex_core.JaxprEqn], free: set[Any]) -> set[int]:
    """Which equations are cheap to evaluate again."""
    made_of, found = dict[Any, frozenset[Any]](), set[int]()
    for equation in equations:
        if not _is_cheap(equation):
            continue
        operands = [x for x in _variables(equation.invars) if x not in free]
        source = frozenset[Any]().union(*(made_of.get(x, frozenset({x})) for x in operands))
        if sum(map(_bytes, source)) <= _ROOM * sum(map(_bytes, equation.outvars)):
            found.add(id(equation))
            made_of.update(dict.fromkeys(equation.outvars, source))
    return found


def _is_cheap(equation: jex_core.JaxprEqn) -> bool:
    match inside(equation):
        case Call("jit", body):
            return not body.consts and all(map(_is_cheap, body.jaxpr.eqns))
        case None:
            return equation.primitive.name in _CHEAP and not equation.effects
        case _:
            return False


def _bytes(variable: Any) -> int:
    aval = variable.aval
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 8)


def _is_extended(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jax.dtypes.extended)


def _part(
    program: jex_core.ClosedJaxpr,
    inputs: Sequence[Any],
    equations: list[jex_core.JaxprEqn],
    results: Sequence[Any],
) -> jex_core.ClosedJaxpr:
    """Some of a program's equations, with those of its constants that they need."""
    needed = _needed_by(equations) | {*_variables(results)}
    consts = [
        (variable, value)
        for variable, value in zip(program.jaxpr.constvars, program.consts, strict=True)
        if variable in needed
    ]
    jaxpr = jex_core.Jaxpr(
        [variable for variable, _ in consts],
        list(inputs),
        list(results),
        equations,
        frozenset[Any]().union(*(equation.effects for equation in equations)),
        debug_info=jex_core.DebugInfo("halves", "half", None, None),
    )
    values = [value for _, value in consts]
    return jex_core.ClosedJaxpr(jaxpr, values) if values else closed(jaxpr)


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return [atom for atom in atoms if isinstance(atom, jex_core.Var)]
