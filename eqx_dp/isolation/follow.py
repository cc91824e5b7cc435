"""Following examples through a program that is differentiated and batched, equation by equation."""

from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

import jax.extend.core as jex_core

from ..programs import Call, Cond, LinearSolve, Scan, ShardMap, While, inside, interpret, settled
from .lines import line_of
from .places import (
    SHARED,
    Apart,
    Mixed,
    Place,
    Single,
    joined,
    mixed_among,
    reshaped,
    shape_of,
)
from .rules import RULES, convolved
from .steering import REDUCTIONS, is_steering, stops

ENGINES_SUM = "eqx_dp_sum_over_examples"
"""The name of the jitted functions in which the engine itself adds examples up."""


class Follow:
    """One pass over a program.

    Guarantee: where a result's place is `Apart`, its entries of one example are the same whatever
    the other examples are, as far as the rules are right. The results of a primitive without a
    rule are `Mixed`.

    | what depends on several examples | is |
    |---|---|
    | a value, by any primitive | `Mixed`, and so is all that follows from it |
    | how long a loop runs, the predicate each example's own | nothing: JAX masks finished ones |
    | what Equinox's loops and those on it steer by | nothing: see `steering` |
    | how long another loop runs, or which branch is taken | all that the loop or branch makes |
    | whether Equinox's `error_if` stops the run | nothing that is left |

    Args:
        num_examples: at once; of one example alone nothing can mix but devices.
        trusts: whether reductions over examples by Equinox and its family only steer.
        bound: names of axes that the program itself binds; collectives over others mix.

    Attributes:
        written: what of examples is written to a mutable array (`jax.new_ref`).
    """

    def __init__(self, num_examples: int, trusts: bool, bound: frozenset[Any] = frozenset()):
        self._num_examples = num_examples
        self._trusts = trusts
        self._bound = bound
        self.written: list[Place] = []
        # Programs are told apart by identity, so those that were followed must not go away.
        self._known: dict[Any, tuple[jex_core.Jaxpr, list[Place]]] = {}

    def program(self, program: jex_core.ClosedJaxpr, inputs: Sequence[Place]) -> list[Place]:
        """The places of a program's results, from those of its inputs; its constants are shared."""
        jaxpr = program.jaxpr
        known = self._known.get((id(jaxpr), tuple(inputs), self._bound))
        if known is not None:
            return known[1]
        consts = [SHARED] * len(jaxpr.constvars)
        places = list(map(_unless_empty, jaxpr.invars, inputs))
        results = interpret(jaxpr, consts, places, self.equation, lambda _: SHARED)
        self._known[id(jaxpr), tuple(inputs), self._bound] = (jaxpr, results)
        return results

    def equation(self, equation: jex_core.JaxprEqn, inputs: list[Place]) -> list[Place]:
        """The places of an equation's results."""
        return list(map(_unless_empty, equation.outvars, self._results(equation, inputs)))

    def _results(self, equation: jex_core.JaxprEqn, inputs: list[Place]) -> list[Place]:
        name, count = equation.primitive.name, len(equation.outvars)
        if all(place == SHARED for place in inputs):
            return [SHARED] * count
        if name in _WRITES:  # what is read there later, and where, is not followed
            self.written.append(_with_line(Mixed(equation), equation))
        if name in _OPERAND_BY_OPERAND:
            return inputs
        found = self._inside(equation, inputs)
        if found is not None:
            return [p if p in inputs else _with_line(p, equation) for p in found]
        mixed = mixed_among(inputs)
        if mixed is not None:
            return [mixed] * count
        if self._is_over_devices(equation):
            return [Mixed(equation)] * count
        if name in REDUCTIONS:
            is_trusted = self._trusts and is_steering(equation)
            return [SHARED if is_trusted else Mixed(equation)] * count
        if _sees_a_batch(equation):
            return [Mixed(equation)] * count
        if any(isinstance(place, Single) for place in inputs):
            return [joined(inputs, equation)] * count
        return [self._result(equation, inputs, variable) for variable in equation.outvars]

    def _inside(self, equation: jex_core.JaxprEqn, inputs: list[Place]) -> list[Place] | None:
        """The places of the results of an equation that holds programs; None of any other."""
        match inside(equation):
            case Call("custom_vmap") | None:
                return None
            case Call("jit", body) if equation.params.get("name") != ENGINES_SUM:
                return self.program(body, inputs)
            case Call("jit"):
                return _sum(equation, inputs)
            case Call(body=body):
                return self.program(body, inputs)
            case Cond() as cond:
                return _cond(self, equation, cond, inputs)
            case Scan() as scan:
                return _scan(self, equation, scan, inputs)
            case While() as loop:
                return _while(self, equation, loop, inputs)
            case ShardMap() as spread:
                return _shard_map(self, equation, spread, inputs)
            case LinearSolve() as system:
                return self.program(system.solve, system.split(inputs))

    def _is_over_devices(self, equation: jex_core.JaxprEqn) -> bool:
        return bool(axes_named(equation) - self._bound) and equation.primitive.name not in _LOCAL

    def _result(self, equation: jex_core.JaxprEqn, inputs: list[Place], variable: Any) -> Place:
        """The place of one result of a primitive that works along dimensions."""
        found: list[Place] = []
        for operand, place in enumerate(inputs):
            if not isinstance(place, Apart):
                continue
            after = self._moved(equation, operand, place, shape_of(variable))
            if after is None:
                return Mixed(equation)
            found.append(after)
        return joined(found, equation)

    def _moved(
        self, equation: jex_core.JaxprEqn, operand: int, place: Apart, after: tuple[int, ...]
    ) -> Apart | None:
        """Where examples are in a result, from where they are in one operand."""
        name = equation.primitive.name
        if name == "reshape":
            return self._reshaped(equation, place)
        if name == "conv_general_dilated":
            return convolved(equation, operand, place, self._num_examples)
        rule = RULES.get(name)
        dim = None if rule is None else rule(equation, operand, place.dim)
        was = shape_of(equation.invars[operand])[place.dim]
        # A dimension of another length was cut, or repeated.
        return None if dim is None or after[dim] != was else replace(place, dim=dim)

    def _reshaped(self, equation: jex_core.JaxprEqn, place: Apart) -> Apart | None:
        before, order = shape_of(equation.invars[0]), equation.params["dimensions"]
        if order is not None:
            before = tuple(before[axis] for axis in order)
            place = replace(place, dim=order.index(place.dim))
        return reshaped(place, before, shape_of(equation.outvars[0]), self._num_examples)

    def within(self, axes: frozenset[Any]) -> "Follow":
        """The same, inside of what binds axes."""
        return Follow(self._num_examples, self._trusts, self._bound | axes)


def _unless_empty(variable: Any, place: Place) -> Place:
    """The place of a value; what holds no number depends on nothing."""
    return SHARED if 0 in shape_of(variable) else place


def _with_line(place: Place, equation: jex_core.JaxprEqn) -> Place:
    """Says where the user called what is mixed; JAX's own functions know no line inside."""
    if not isinstance(place, Mixed) or place.line:
        return place
    return replace(place, line=line_of(place.equation) or line_of(equation))


def axes_named(equation: jex_core.JaxprEqn) -> frozenset[Any]:
    """The names of the axes that an equation's collective goes over."""
    axes = equation.params.get("axes", equation.params.get("axis_name", ()))
    axes = axes if isinstance(axes, tuple) else (axes,)
    return frozenset(axis for axis in axes if not isinstance(axis, Integral))


def _sees_a_batch(equation: jex_core.JaxprEqn) -> bool:
    """Whether it acts on all examples that vmap hands it, those of a vmap around all of this too.

    A function with a batching rule that is left has not been mapped yet; what its rule does will
    not be seen here. A host function is handed whole batches unless it says otherwise.
    """
    if equation.primitive.name == "custom_vmap_call":
        return True
    method = equation.params.get("vmap_method")
    return method is not None and not method.startswith("sequential")


# Asking for one's own position exchanges nothing; neither does saying along what a value varies.
_LOCAL = frozenset({"axis_index", "pvary", "pcast"})
_WRITES = frozenset({"swap", "addupdate"})
_OPERAND_BY_OPERAND = frozenset({"optimization_barrier", "device_put"})


def _sum(equation: jex_core.JaxprEqn, inputs: list[Place]) -> list[Place]:
    """A sum over examples by the engine itself."""
    mixed = mixed_among(inputs)
    if mixed is not None and not mixed.is_wanted:
        return [mixed] * len(equation.outvars)
    if any(isinstance(place, Single) for place in inputs):
        return [joined(inputs, equation)] * len(equation.outvars)
    return [Apart(0), *[Mixed(equation, is_wanted=True)] * (len(equation.outvars) - 1)]


def _cond(
    follow: Follow, equation: jex_core.JaxprEqn, cond: Cond, inputs: list[Place]
) -> list[Place]:
    index, *operands = inputs
    branches = list(cond.branches)
    if isinstance(index, Mixed):
        branches = [branch for branch in branches if not stops(branch.jaxpr)]
        if len(branches) != 1:
            return [index] * len(equation.outvars)
    found = [follow.program(branch, operands) for branch in branches]
    steering = [] if isinstance(index, Mixed) else [index]
    return [joined([*places, *steering], equation) for places in zip(*found, strict=True)]


def _scan(
    follow: Follow, equation: jex_core.JaxprEqn, scan: Scan, inputs: list[Place]
) -> list[Place]:
    """A loop over time, or over examples one by one, which may then carry nothing of them."""
    consts, start, over = scan.split(inputs)
    slices = [_slice(place, equation, scan.length) for place in over]

    def step(carry: list[Place]) -> list[Place]:
        return follow.program(scan.body, [*consts, *carry, *slices])

    at_hand = Single(equation)

    def carried(carry: list[Place]) -> list[Place]:
        after = step(carry)[: scan.num_carry]
        return [Mixed(equation) if place == at_hand else place for place in after]

    carry = settled(carried, start, lambda a, b: joined([a, b], equation))
    results = step(carry)[scan.num_carry :]
    stacked = [Apart(0) if place == at_hand else _stacked(place) for place in results]
    return [*carry, *stacked]


def _slice(place: Place, equation: jex_core.JaxprEqn, length: int) -> Place:
    """What one step of a loop sees of an array that it goes over."""
    if not isinstance(place, Apart):
        return place
    if place.dim > 0:
        return replace(place, dim=place.dim - 1)
    is_one_by_one = place.inner == 1 and length > 1
    return Single(equation) if is_one_by_one else Mixed(equation)


def _stacked(place: Place) -> Place:
    """The results of all steps, side by side."""
    return replace(place, dim=place.dim + 1) if isinstance(place, Apart) else place


def _while(
    follow: Follow, equation: jex_core.JaxprEqn, loop: While, inputs: list[Place]
) -> list[Place]:
    """A loop whose predicate each example has of its own leaves a finished example as it is."""
    of_cond, of_body, start = loop.split(inputs)
    body = loop.body.jaxpr
    before = body.invars[loop.num_body :]
    kept = [one is other for one, other in zip(before, body.outvars, strict=True)]

    def step(carry: list[Place]) -> list[Place]:
        (steering,) = follow.program(loop.condition, [*of_cond, *carry])
        after = follow.program(loop.body, [*of_body, *carry])
        return [
            place if is_kept else joined([place, steering], equation)
            for place, is_kept in zip(after, kept, strict=True)
        ]

    return settled(step, start, lambda a, b: joined([a, b], equation))


def _shard_map(
    follow: Follow, equation: jex_core.JaxprEqn, spread: ShardMap, inputs: list[Place]
) -> list[Place]:
    """Over other axes than those of examples: devices share each example."""
    within = follow.within(spread.axes)
    found = within.program(spread.body, inputs)
    follow.written.extend(within.written)
    is_spread = any(
        isinstance(place, Apart) and place.dim < len(spec) and spec[place.dim] is not None
        for place, spec in zip(
            [*inputs, *found], [*spread.in_specs, *spread.out_specs], strict=True
        )
    )
    return [Mixed(equation)] * len(found) if is_spread else found
