"""A walk along the flow of values through a jaxpr: what each one descends from.

One table of rules for primitives that hold programs of their own, one loop, one default. What an
equation makes of the facts about its inputs is up to a `Visitor`. How JAX's equations hold their
inner programs, and where they came from, is read here and nowhere else in `precision`; written for
JAX 0.10 and 0.11.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax.extend.core as jex_core
from jax.extend import source_info_util

from ..programs import scan_arity
from .widths import Width


class Draw(NamedTuple):
    """Random bits that a program asks for.

    Attributes:
        where: the source line.
        bits: how many for each number.
        size: how many numbers.
    """

    where: str
    bits: int
    size: int


class Narrowest(NamedTuple):
    """The narrowest floating-point format that a value went through, and the line where it did."""

    width: Width
    where: str


class Facts(NamedTuple):
    """What is known of a value.

    Attributes:
        clipped: whether a sum of clipped gradients is in it that has no noise yet.
        draws: the random bits that it descends from; none where ``clipped``.
        narrowest: what it went through since the draws; None without any, or without a float yet.
    """

    clipped: bool = False
    draws: frozenset[Draw] = frozenset()
    narrowest: Narrowest | None = None

    def narrowed(self, width: Width, where: str) -> "Facts":
        """The facts about a value of the given width that is made of one with these."""
        if not self.draws or (self.narrowest and not width.key < self.narrowest.width.key):
            return self
        return self._replace(narrowest=Narrowest(width, where))


NOTHING = Facts()


def joined(facts: Sequence[Facts]) -> Facts:
    """What is known of a value that is made of several; what is clipped tells of nothing else."""
    found = [one for one in facts if one.clipped] or list(facts)
    narrowest = [one.narrowest for one in found if one.narrowest is not None]
    return Facts(
        any(one.clipped for one in found),
        frozenset[Draw]().union(*(one.draws for one in found)),
        min(narrowest, key=lambda one: (one.width.key, one.where), default=None),
    )


class Here(NamedTuple):
    """Where the walk is.

    Attributes:
        scope: the name stack, that of the programs around included.
        where: the source line.
        times: how often an equation here runs, as far as shapes tell.
        recording: False while the facts about a loop's carry are still being found.
    """

    scope: str = ""
    where: str = "unknown"
    times: int = 1
    recording: bool = True

    def at(self, equation: jex_core.JaxprEqn) -> "Here":
        """The place of an equation."""
        info = equation.source_info
        where = source_info_util.summarize(info) if info.traceback is not None else ""
        return self._replace(scope=f"{self.scope}/{info.name_stack}", where=where or self.where)


@runtime_checkable
class Visitor(Protocol):
    """What is done on the way."""

    def equation(self, here: Here, equation: jex_core.JaxprEqn, inputs: list[Facts]) -> list[Facts]:
        """Looks at an equation that holds no program, and says what is known of its results."""
        ...

    def carried(self, here: Here, variable: Any, facts: Facts) -> None:
        """Looks at what a loop carries from step to step."""
        ...


class Walk:
    """One walk through a program."""

    def __init__(self, visitor: Visitor):
        self.visitor = visitor
        self._learned: dict[Any, list[Facts]] = {}

    def jaxpr(self, jaxpr: jex_core.Jaxpr, inputs: Sequence[Facts], here: Here) -> list[Facts]:
        """From what is known of the inputs to what is known of the outputs."""
        if here.recording:
            return self._equations(jaxpr, inputs, here)
        # Loops within loops are gone round many times, mostly with nothing new.
        key = id(jaxpr), tuple(inputs), here.scope, here.where
        if key not in self._learned:
            self._learned[key] = self._equations(jaxpr, inputs, here)
        return self._learned[key]

    def _equations(self, jaxpr: jex_core.Jaxpr, inputs: Sequence[Facts], here: Here) -> list[Facts]:
        known: dict[Any, Facts] = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(variable: Any) -> Facts:
            return (
                NOTHING if isinstance(variable, jex_core.Literal) else known.get(variable, NOTHING)
            )

        for equation in jaxpr.eqns:
            rule = _RULES.get(equation.primitive.name, _default)
            outputs = rule(self, equation, list(map(read, equation.invars)), here.at(equation))
            known.update(zip(equation.outvars, outputs, strict=True))
        return list(map(read, jaxpr.outvars))

    def loop(
        self,
        body: jex_core.Jaxpr,
        around: list[Facts],
        carry: list[Facts],
        rest: list[Facts],
        here: Here,
    ) -> list[Facts]:
        """Goes round a loop until nothing new is learned of what it carries; then records."""
        quiet = here._replace(recording=False)
        while True:
            outputs = self.jaxpr(body, [*around, *carry, *rest], quiet)
            found = [joined(pair) for pair in zip(carry, outputs, strict=False)]
            if found == carry:
                break
            carry = found
        if here.recording:
            self.jaxpr(body, [*around, *carry, *rest], here)
            variables = body.invars[len(around) :]
            for variable, facts in zip(variables, carry, strict=False):
                self.visitor.carried(here, variable, facts)
        return [*carry, *outputs[len(carry) :]]


_Rule: TypeAlias = Callable[[Walk, jex_core.JaxprEqn, list[Facts], Here], list[Facts]]


def _default(
    walk: Walk, equation: jex_core.JaxprEqn, inputs: list[Facts], here: Here
) -> list[Facts]:
    """An equation without a program in it; a call, whose inputs are those of its program; or what
    nothing is known of, whose results descend from all of its inputs.

    The program of a scatter says only how two numbers are put together.
    """
    programs = list(jex_core.jaxprs_in_params(equation.params))
    if not programs or "update_jaxpr" in equation.params:
        return walk.visitor.equation(here, equation, inputs)
    if len(programs) == 1:
        (inner,) = programs
        sizes = len(inner.invars), len(inner.outvars)
        if sizes == (len(equation.invars), len(equation.outvars)):
            return walk.jaxpr(inner, inputs, here._replace(times=here.times * _devices(equation)))
    everything = joined(inputs)
    for inner in programs:
        outputs = walk.jaxpr(inner, [everything] * len(inner.invars), here)
        everything = joined([everything, *outputs])
    return [everything] * len(equation.outvars)


def _devices(equation: jex_core.JaxprEqn) -> int:
    """On how many devices a program runs, each with shapes of its own."""
    params = equation.params
    if equation.primitive.name != "shard_map":
        return 1
    axes = params["manual_axes" if "manual_axes" in params else "newly_manual_axes"]
    return math.prod(params["mesh"].shape[axis] for axis in axes)


def _scan(walk: Walk, equation: jex_core.JaxprEqn, inputs: list[Facts], here: Here) -> list[Facts]:
    params = equation.params
    consts, carry = scan_arity(params)
    end = consts + carry
    return walk.loop(
        params["jaxpr"].jaxpr,
        inputs[:consts],
        inputs[consts:end],
        inputs[end:],
        here._replace(times=here.times * params["length"]),
    )


def _while(walk: Walk, equation: jex_core.JaxprEqn, inputs: list[Facts], here: Here) -> list[Facts]:
    """A loop of unknown length counts as one step."""
    params = equation.params
    of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
    start = of_cond + of_body
    carry = walk.loop(params["body_jaxpr"].jaxpr, inputs[of_cond:start], inputs[start:], [], here)
    walk.jaxpr(params["cond_jaxpr"].jaxpr, [*inputs[:of_cond], *carry], here)
    return carry


def _cond(walk: Walk, equation: jex_core.JaxprEqn, inputs: list[Facts], here: Here) -> list[Facts]:
    """All branches count."""
    branches = [
        walk.jaxpr(branch.jaxpr, inputs[1:], here) for branch in equation.params["branches"]
    ]
    return [joined(found) for found in zip(*branches, strict=True)]


def _select(
    walk: Walk, equation: jex_core.JaxprEqn, inputs: list[Facts], here: Here
) -> list[Facts]:
    """A choice descends from what there is to choose, if anything is known of that."""
    if any(facts != NOTHING for facts in inputs[1:]):
        inputs = [NOTHING, *inputs[1:]]
    return walk.visitor.equation(here, equation, inputs)


_RULES: dict[str, _Rule] = {"scan": _scan, "while": _while, "cond": _cond, "select_n": _select}
