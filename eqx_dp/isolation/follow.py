"""Following examples through a program that is differentiated and batched, equation by equation."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.extend.core as jex_core

from ..programs import (
    Call,
    Cond,
    LinearSolve,
    Scan,
    ShardMap,
    While,
    inside,
    interpret,
    own_line,
    settled,
)
from .dependence import SHARED, Apart, Dependence, Mixed, Single, joined, mixed_among, shape_of
from .rules import OPERAND_BY_OPERAND, REDUCTIONS, RULES, WRITES, exchanges, sees_a_batch
from .steering import is_steering, stops

ENGINES_SUM = "eqx_dp_sum_over_examples"
"""The name of the jitted functions in which the engine itself adds examples up."""


@dataclass
class Follow:
    """One pass over a program.

    Guarantee: where a result is `Apart`, its entries of one example are the same whatever
    the other examples are, as far as the rules are right. What no rule speaks of is `Mixed`.

    | what depends on several examples | is |
    |---|---|
    | a value, by any primitive | `Mixed`, and so is all that follows from it |
    | how long a loop runs, the predicate each example's own | nothing: JAX masks finished ones |
    | what Equinox's loops and those on it steer by | nothing: see `steering` |
    | how long another loop runs, or which branch is taken | all that the loop or branch makes |
    | whether Equinox's `error_if` stops the run | nothing that is left |

    Attributes:
        num_examples: at once; of one example alone nothing can mix but devices.
        trusts: whether reductions over examples by Equinox and its family only steer.
        bound: names of axes that the program itself binds; collectives over others mix.
        written: what of examples is written to a mutable array (`jax.new_ref`).
    """

    num_examples: int
    trusts: bool
    bound: frozenset[Any] = frozenset()
    written: list[Dependence] = field(default_factory=list[Dependence])
    _known: dict[Any, list[Dependence]] = field(default_factory=dict[Any, list[Dependence]])

    def program(
        self, program: jex_core.ClosedJaxpr, inputs: Sequence[Dependence]
    ) -> list[Dependence]:
        """What a program's results depend on; its constants are shared."""
        jaxpr = program.jaxpr
        key = jaxpr, tuple(inputs), self.bound
        if key not in self._known:
            consts = [SHARED] * len(jaxpr.constvars)
            facts = list(map(_unless_empty, jaxpr.invars, inputs))
            self._known[key] = interpret(jaxpr, consts, facts, self.equation, lambda _: SHARED)
        return self._known[key]

    def equation(self, equation: jex_core.JaxprEqn, inputs: list[Dependence]) -> list[Dependence]:
        """What an equation's results depend on."""
        return list(map(_unless_empty, equation.outvars, self._results(equation, inputs)))

    def _results(self, equation: jex_core.JaxprEqn, inputs: list[Dependence]) -> list[Dependence]:
        name, count = equation.primitive.name, len(equation.outvars)
        if all(fact == SHARED for fact in inputs):
            return [SHARED] * count
        if name in WRITES:
            self.written.append(_with_line(Mixed(equation), equation))
        if name in OPERAND_BY_OPERAND:
            return inputs
        found = self._inside(equation, inputs)
        if found is not None:
            return [fact if fact in inputs else _with_line(fact, equation) for fact in found]
        mixed = mixed_among(inputs)
        if mixed is not None:
            return [mixed] * count
        if exchanges(equation, self.bound) or sees_a_batch(equation):
            return [Mixed(equation)] * count
        if name in REDUCTIONS:
            is_trusted = self.trusts and is_steering(equation)
            return [SHARED if is_trusted else Mixed(equation)] * count
        if not any(isinstance(fact, Single) for fact in inputs):
            inputs = [self._moved(equation, i, fact) for i, fact in enumerate(inputs)]
        return [joined(inputs, equation)] * count

    def _moved(self, equation: jex_core.JaxprEqn, operand: int, fact: Dependence) -> Dependence:
        """How the results of a primitive depend on examples by one operand."""
        if not isinstance(fact, Apart):
            return fact
        rule = RULES.get(equation.primitive.name)
        moved = None if rule is None else rule(equation, operand, fact, self.num_examples)
        return moved or Mixed(equation)

    def _inside(
        self, equation: jex_core.JaxprEqn, inputs: list[Dependence]
    ) -> list[Dependence] | None:
        """The results of an equation that holds programs; None of any other."""
        match inside(equation):
            case Call("custom_vmap") | None:
                return None
            case Call("jit") if equation.params.get("name") == ENGINES_SUM:
                return _engines_sum(equation, inputs)
            case Call(body=body):
                return self.program(body, inputs)
            case Cond() as cond:
                return self._cond(equation, cond, inputs)
            case Scan() as scan:
                return self._scan(equation, scan, inputs)
            case While() as loop:
                return self._while(equation, loop, inputs)
            case ShardMap() as spread:
                return self._shard_map(equation, spread, inputs)
            case LinearSolve() as system:
                return self.program(system.solve, system.split(inputs))

    def _cond(
        self, equation: jex_core.JaxprEqn, cond: Cond, inputs: list[Dependence]
    ) -> list[Dependence]:
        index, *operands = inputs
        branches = list(cond.branches)
        if isinstance(index, Mixed):
            branches = [branch for branch in branches if not stops(branch.jaxpr)]
            if len(branches) != 1:
                return [index] * len(equation.outvars)
            index = SHARED
        found = [self.program(branch, operands) for branch in branches]
        return [joined([*facts, index], equation) for facts in zip(*found, strict=True)]

    def _scan(
        self, equation: jex_core.JaxprEqn, scan: Scan, inputs: list[Dependence]
    ) -> list[Dependence]:
        """A loop over time, or over examples one by one, which may then carry nothing of them."""
        consts, start, over = scan.split(inputs)
        slices = [_slice(fact, equation, scan.length) for fact in over]
        at_hand = Single(equation)

        def step(carry: list[Dependence]) -> list[Dependence]:
            return self.program(scan.body, [*consts, *carry, *slices])

        def carried(carry: list[Dependence]) -> list[Dependence]:
            after = step(carry)[: scan.num_carry]
            return [Mixed(equation) if fact == at_hand else fact for fact in after]

        carry = settled(carried, start, lambda a, b: joined([a, b], equation))
        results = step(carry)[scan.num_carry :]
        stacked = [Apart(0) if fact == at_hand else _stacked(fact) for fact in results]
        return [*carry, *stacked]

    def _while(
        self, equation: jex_core.JaxprEqn, loop: While, inputs: list[Dependence]
    ) -> list[Dependence]:
        """A loop whose predicate each example has of its own leaves a finished one as it is."""
        of_cond, of_body, start = loop.split(inputs)
        body = loop.body.jaxpr
        before = body.invars[loop.num_body :]
        stays = [one is other for one, other in zip(before, body.outvars, strict=True)]

        def step(carry: list[Dependence]) -> list[Dependence]:
            (steering,) = self.program(loop.condition, [*of_cond, *carry])
            after = self.program(loop.body, [*of_body, *carry])
            return [
                fact if is_same else joined([fact, steering], equation)
                for fact, is_same in zip(after, stays, strict=True)
            ]

        return settled(step, start, lambda a, b: joined([a, b], equation))

    def _shard_map(
        self, equation: jex_core.JaxprEqn, spread: ShardMap, inputs: list[Dependence]
    ) -> list[Dependence]:
        """Over other axes than those of examples: devices share each example."""
        found = replace(self, bound=self.bound | spread.axes).program(spread.body, inputs)
        is_cut = any(
            isinstance(fact, Apart) and fact.dim < len(spec) and spec[fact.dim] is not None
            for fact, spec in zip(
                [*inputs, *found], [*spread.in_specs, *spread.out_specs], strict=True
            )
        )
        return [Mixed(equation)] * len(found) if is_cut else found


def _unless_empty(variable: Any, fact: Dependence) -> Dependence:
    """What holds no number depends on nothing."""
    return SHARED if 0 in shape_of(variable) else fact


def _with_line(fact: Dependence, equation: jex_core.JaxprEqn) -> Dependence:
    """Says where the user called what is mixed; JAX's own functions know no line inside."""
    if not isinstance(fact, Mixed) or fact.line:
        return fact
    return replace(fact, line=own_line(fact.equation) or own_line(equation))


def _engines_sum(equation: jex_core.JaxprEqn, inputs: list[Dependence]) -> list[Dependence]:
    """A sum over examples by the engine itself."""
    mixed = mixed_among(inputs)
    if mixed is not None and not mixed.is_wanted:
        return [mixed] * len(equation.outvars)
    if any(isinstance(fact, Single) for fact in inputs):
        return [joined(inputs, equation)] * len(equation.outvars)
    return [Apart(0), *[Mixed(equation, is_wanted=True)] * (len(equation.outvars) - 1)]


def _slice(fact: Dependence, equation: jex_core.JaxprEqn, length: int) -> Dependence:
    """What one step of a loop sees of an array that it goes over."""
    if not isinstance(fact, Apart):
        return fact
    if fact.dim > 0:
        return replace(fact, dim=fact.dim - 1)
    is_one_by_one = fact.inner == 1 and length > 1
    return Single(equation) if is_one_by_one else Mixed(equation)


def _stacked(fact: Dependence) -> Dependence:
    """The results of all steps, side by side."""
    return replace(fact, dim=fact.dim + 1) if isinstance(fact, Apart) else fact
