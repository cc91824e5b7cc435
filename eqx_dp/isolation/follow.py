"""Following examples through a program that is differentiated and batched, equation by equation."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, TypeAlias

import jax.extend.core as jex_core

from ..programs import scan_arity
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
    the other examples are, as far as the rules are right. What no rule speaks of is `Mixed`.

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

    def program(self, jaxpr: jex_core.Jaxpr, inputs: Sequence[Place]) -> list[Place]:
        """The places of a program's results, from those of its inputs; its constants are shared."""
        known = self._known.get((id(jaxpr), tuple(inputs), self._bound))
        if known is not None:
            return known[1]
        places: dict[Any, Place] = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(variable: Any) -> Place:
            if isinstance(variable, jex_core.Literal) or 0 in shape_of(variable):
                return SHARED
            return places.get(variable, SHARED)

        for equation in jaxpr.eqns:
            found = self.equation(equation, [read(v) for v in equation.invars])
            places.update(zip(equation.outvars, found, strict=True))
        results = [read(v) for v in jaxpr.outvars]
        self._known[id(jaxpr), tuple(inputs), self._bound] = (jaxpr, results)
        return results

    def equation(self, equation: jex_core.JaxprEqn, inputs: list[Place]) -> list[Place]:
        """The places of an equation's results."""
        name, count = equation.primitive.name, len(equation.outvars)
        if all(place == SHARED for place in inputs):
            return [SHARED] * count
        if name in _WRITES:  # what is read there later, and where, is not followed
            self.written.append(_with_line(Mixed(equation), equation))
        if name in _OPERAND_BY_OPERAND:
            return inputs
        inside = INSIDE.get(name)
        if inside is not None:
            found = inside(self, equation, inputs)
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


_Inside: TypeAlias = Callable[[Follow, jex_core.JaxprEqn, list[Place]], list[Place]]


def _body(value: Any) -> jex_core.Jaxpr:
    return value.jaxpr if isinstance(value, jex_core.ClosedJaxpr) else value


def _call(parameter: str) -> _Inside:
    """A function that is evaluated where it is called."""

    def inside(follow: Follow, equation: jex_core.JaxprEqn, inputs: list[Place]) -> list[Place]:
        return follow.program(_body(equation.params[parameter]), inputs)

    return inside


def _jit(follow: Follow, equation: jex_core.JaxprEqn, inputs: list[Place]) -> list[Place]:
    if equation.params["name"] != ENGINES_SUM:
        return follow.program(_body(equation.params["jaxpr"]), inputs)
    mixed = mixed_among(inputs)
    if mixed is not None and not mixed.is_wanted:
        return [mixed] * len(equation.outvars)
    if any(isinstance(place, Single) for place in inputs):
        return [joined(inputs, equation)] * len(equation.outvars)
    return [Apart(0), *[Mixed(equation, is_wanted=True)] * (len(equation.outvars) - 1)]


def _cond(follow: Follow, equation: jex_core.JaxprEqn, inputs: list[Place]) -> list[Place]:
    index, *operands = inputs
    branches = [_body(branch) for branch in equation.params["branches"]]
    if isinstance(index, Mixed):
        branches = [branch for branch in branches if not stops(branch)]
        if len(branches) != 1:
            return [index] * len(equation.outvars)
    found = [follow.program(branch, operands) for branch in branches]
    steering = [] if isinstance(index, Mixed) else [index]
    return [joined([*places, *steering], equation) for places in zip(*found, strict=True)]


def _scan(follow: Follow, equation: jex_core.JaxprEqn, inputs: list[Place]) -> list[Place]:
    """A loop over time, or over examples one by one, which may then carry nothing of them."""
    num_consts, num_carry = scan_arity(equation.params)
    body = _body(equation.params["jaxpr"])
    consts, start = inputs[:num_consts], inputs[num_consts : num_consts + num_carry]
    slices = [_slice(place, equation) for place in inputs[num_consts + num_carry :]]

    def step(carry: list[Place]) -> list[Place]:
        return follow.program(body, [*consts, *carry, *slices])

    at_hand = Single(equation)

    def carried(places: list[Place]) -> list[Place]:
        return [Mixed(equation) if place == at_hand else place for place in places]

    carry = _settled(start, lambda carry: carried(step(carry)[:num_carry]), equation)
    results = step(carry)[num_carry:]
    stacked = [Apart(0) if place == at_hand else _stacked(place) for place in results]
    return [*carry, *stacked]


def _slice(place: Place, equation: jex_core.JaxprEqn) -> Place:
    """What one step of a loop sees of an array that it goes over."""
    if not isinstance(place, Apart):
        return place
    if place.dim > 0:
        return replace(place, dim=place.dim - 1)
    is_one_by_one = place.inner == 1 and equation.params["length"] > 1
    return Single(equation) if is_one_by_one else Mixed(equation)


def _stacked(place: Place) -> Place:
    """The results of all steps, side by side."""
    return replace(place, dim=place.dim + 1) if isinstance(place, Apart) else place


def _while(follow: Follow, equation: jex_core.JaxprEqn, inputs: list[Place]) -> list[Place]:
    """A loop whose predicate each example has of its own leaves a finished example as it is."""
    params = equation.params
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    of_cond, of_body = inputs[:num_cond], inputs[num_cond : num_cond + num_body]
    condition, body = _body(params["cond_jaxpr"]), _body(params["body_jaxpr"])
    kept = [
        before is after for before, after in zip(body.invars[num_body:], body.outvars, strict=True)
    ]

    def step(carry: list[Place]) -> list[Place]:
        (steering,) = follow.program(condition, [*of_cond, *carry])
        after = follow.program(body, [*of_body, *carry])
        return [
            place if is_kept else joined([place, steering], equation)
            for place, is_kept in zip(after, kept, strict=True)
        ]

    return _settled(inputs[num_cond + num_body :], step, equation)


def _settled(
    start: list[Place],
    step: Callable[[list[Place]], list[Place]],
    equation: jex_core.JaxprEqn,
) -> list[Place]:
    """What a loop carries, once another step changes it no more."""
    carry = start
    while True:
        after = step(carry)
        new = [joined([a, b], equation) for a, b in zip(carry, after, strict=True)]
        if new == carry:
            return carry
        carry = new


def _shard_map(follow: Follow, equation: jex_core.JaxprEqn, inputs: list[Place]) -> list[Place]:
    """Over other axes than those of examples: devices share each example."""
    params = equation.params
    specs = [*params["in_specs"], *params["out_specs"]]
    axes = params.get("manual_axes", params["mesh"].axis_names)
    inside = follow.within(frozenset(axes))
    found = inside.program(_body(params["jaxpr"]), inputs)
    follow.written.extend(inside.written)
    places = [*inputs, *found]
    is_spread = any(
        isinstance(place, Apart) and place.dim < len(spec) and spec[place.dim] is not None
        for place, spec in zip(places, specs, strict=True)
    )
    return [Mixed(equation)] * len(found) if is_spread else found


def _linear_solve(follow: Follow, equation: jex_core.JaxprEqn, inputs: list[Place]) -> list[Place]:
    """A solution found by the user's function; its derivative has been taken already."""
    lengths, jaxprs = equation.params["const_lengths"], equation.params["jaxprs"]
    before = lengths.matvec + lengths.vecmat
    consts = inputs[before : before + lengths.solve]
    right = inputs[sum(lengths) :]
    return follow.program(_body(jaxprs.solve), [*consts, *right])


INSIDE: dict[str, _Inside] = {
    "jit": _jit,
    "pjit": _jit,
    "closed_call": _call("call_jaxpr"),
    "core_call": _call("call_jaxpr"),
    "checkpoint": _call("jaxpr"),
    "remat2": _call("jaxpr"),
    "custom_jvp_call": _call("call_jaxpr"),
    "custom_vjp_call": _call("call_jaxpr"),
    "custom_linear_solve": _linear_solve,
    "cond": _cond,
    "scan": _scan,
    "while": _while,
    "shard_map": _shard_map,
}
"""Primitives that hold programs."""
