"""Facts about the values of a training step, from its arguments to its results."""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from ..gradients import Mark
from ..privacy import NoiseMark
from ..programs import UNCHANGED, ShardMap, mark_on, named
from . import rows, streams
from .engine import engine_call
from .facts import EVEN, Fact, Kind, Reach, either, evaluated, of_array, private, reached
from .flow import Context, Flow, shape_of
from .noise import noise
from .record import Record, is_door, is_error_if, is_proven
from .roles import gathered, role_of
from .streams import Counter, Key, Stream
from .sums import ADDITIONS, added, linear

_HOST = named("pure_callback io_callback buffer_callback")
_DRAWS = named("random_bits rng_bit_generator rng_uniform threefry2x32 random_gamma")


class PrivacyFlow(Flow[Fact]):
    """Follows facts about values through a step.

    Attributes:
        record: findings, sums, releases and keys on the way.
    """

    nothing = Fact()

    def __init__(self) -> None:
        super().__init__()
        self.record = Record()
        self._facts: dict[int, tuple[Any, Fact]] = {}

    def constant(self, value: Any) -> Fact:
        """The fact about a constant or a literal."""
        if id(value) not in self._facts:  # with the value, which gives its number
            self._facts[id(value)] = value, of_array(value)
            self.record.constants += [value] if np.ndim(value) else []
        return self._facts[id(value)][1]

    def joined(self, facts: Sequence[Fact]) -> Fact:
        """The fact about a value that may be any of several."""
        if len({*facts}) == 1:
            return facts[0]
        found = either([self._read(fact) for fact in facts])
        for fact in facts if found.token is None else ():
            self.record.use("something else", fact, fact.reach.where)
        return found

    def holder(self, context: Context, equation: JaxprEqn, inputs: list[Fact]) -> list[Fact]:
        """The facts about an equation's results; none if the check itself fails."""
        try:
            match mark_on(equation):
                case Mark() as mark:
                    read = [self._read(fact, context.line) for fact in inputs]
                    results = engine_call(self.record, context, equation, mark, read)
                case NoiseMark() as mark:
                    results = noise(self.record, context, equation, mark, inputs)
                case _:
                    results = super().holder(context, equation, inputs)
            assert len(results) == len(equation.outvars)
            return results
        except Exception as error:
            found = f"the check failed at '{equation.primitive.name}' (report it): {error!r}"
            self.record.note(context, "release", found, is_decided=False)
            return [private("unknown", context.line)] * len(equation.outvars)

    def equation(self, context: Context, equation: JaxprEqn, inputs: list[Fact]) -> list[Fact]:
        """The facts about the results of an equation that holds no program."""
        name, count = equation.primitive.name, len(equation.outvars)
        if name == "optimization_barrier":
            return inputs
        if name in UNCHANGED and isinstance(inputs[0].token, Stream):
            return [Fact(token=inputs[0].token)]
        inputs = [self._read(fact, context.line) for fact in inputs]
        for fact in inputs if is_door(equation) else ():
            if not fact.is_public:
                self.record.door(context, equation, is_proven(fact))
        if (total := _total(equation, inputs)) is not None:
            return [total]
        if name in _HOST and not is_error_if(equation):
            return [private("host", context.line)] * count
        tokens = self._tokens(context, equation, inputs)
        return [
            self._made(context, equation, variable, inputs)._replace(token=token)
            for variable, token in zip(equation.outvars, tokens, strict=True)
        ]

    def _made(
        self, context: Context, equation: JaxprEqn, variable: Any, inputs: list[Fact]
    ) -> Fact:
        name = equation.primitive.name
        if {fact.reach.kind for fact in inputs} - {Kind.PUBLIC} == {Kind.SUM}:
            return linear(context, equation, inputs)
        reach = reached(inputs, "rows", context.line)
        reach = reach._replace(is_drawn=reach.is_drawn or name in _DRAWS)
        places = gathered(equation, inputs) if name == "gather" else None
        if places is None:
            places = rows.places_of(equation, variable, inputs)
        value = evaluated(equation, inputs) if reach.kind is Kind.PUBLIC else None
        turns = frozenset[Hashable]().union(*(fact.turns for fact in inputs))
        return Fact(reach, places, turns, role_of(equation, inputs), value=value)

    def _tokens(self, context: Context, equation: JaxprEqn, inputs: list[Fact]) -> list[object]:
        """The keys and counters that results are; notes what else reads a key."""
        count, first = len(equation.outvars), inputs[0].token if inputs else None
        if isinstance(first, Key) and first.is_many and equation.primitive.name == "unstack":
            return [first.one(i) for i in range(count)]
        token = streams.token_of(equation, inputs) if count else None
        for fact in inputs[isinstance(token, Key) :]:
            self.record.use("something else", fact, context.line)
        return [token] * count

    def steered(self, context: Context, by: Fact, results: list[Fact]) -> list[Fact]:
        """Results of a choice or a loop that a value controls."""
        by = self._read(by, context.line)
        if by.is_public:
            return [fact._replace(turns=fact.turns | by.turns) for fact in results]
        found = "a private value decides which branch is taken, or how long a loop runs"
        self.record.note(context, "side door", found, is_proven(by))
        lost = [self._read(fact, context.line) for fact in results]
        return [Fact(reached([by, fact], "steered", context.line)) for fact in lost]

    def on_devices(self, context: Context, spread: ShardMap, inputs: list[Fact]) -> list[Fact]:
        """A `shard_map` by hand: of what is private, nothing is known in it."""
        for fact in inputs:
            self.record.use("something else", fact, context.line)
        lost = private("devices", context.line)
        read = [self._read(fact) for fact in inputs]
        found = self.program(spread.body, [Fact() if f.is_public else lost for f in read], context)
        return [Fact() if self._read(fact).is_public else lost for fact in found]

    def _read(self, fact: Fact, line: str = "") -> Fact:
        """A value that something other than noise reads."""
        is_secret = isinstance(fact.token, Stream) and fact.token.is_secret
        return private("secret", line) if is_secret else fact

    # Loops.

    def sliced(self, context: Context, fact: Fact) -> Fact:
        """An entry along the first dimension, in a turn of a loop."""
        loop = context.loops[-1].path
        if fact.sum is not None:
            return Fact(reached([fact], "loop", context.line))
        fact = self._read(fact, context.line)
        self.record.use("something else", fact, context.line)
        is_other = fact.is_public and fact.places[:1] != (EVEN,)
        return fact._replace(
            role=fact.role if fact.role[:1] in (("mask",), ("index",)) else (),
            places=rows.sliced(fact.places, loop),
            turns=fact.turns | ({loop} if is_other else set()),
            token=None,
            value=None,
        )

    def stacked(self, context: Context, fact: Fact) -> Fact:
        """The stacked results of all turns."""
        loop = context.loops[-1].path
        fact = self._read(fact, context.line)
        self.record.use("something else", fact, context.line)
        return Fact(reached([fact], "loop", context.line), turns=fact.turns - {loop})

    def entry(self, context: Context, fact: Fact, i: int) -> Fact:
        """Running totals and streams begin as symbols: what one turn does, all turns do."""
        loop = context.loops[-1].path
        if isinstance(fact.token, Stream):
            inside = streams.loops_of(context)
            return Fact(token=fact.token._replace(at=("turn", loop), loops=inside))
        role = ("total", loop, i) if fact.is_public else ()
        reach = reached([fact], "loop", context.line)
        turns = fact.turns if isinstance(fact.token, Key) else fact.turns | {loop}
        return Fact(reach, fact.places, turns, role, token=fact.token)

    def widened(self, context: Context, start: Fact, end: Fact) -> Fact:
        """The fact at the beginning of a turn, given that at its end."""
        if isinstance(start.token, Stream) or (start.role and end.role == start.role):
            return start
        if start.role and end.role == ("added", *start.role[1:]):
            return Fact(private("loop", context.line).reach, role=start.role)
        token = start.token if start.token == end.token else None
        if isinstance(start.token, Counter) and isinstance(end.token, Counter):
            is_up = end.token.root == start.token.root and end.token.plus >= start.token.plus
            token = start.token if is_up else None
        found = either([fact._replace(role=(), token=token) for fact in (start, end)])
        if end.sum is not None:
            found = found._replace(reach=reached([end], "loop", context.line))
        return found._replace(role=start.role if found.is_public else ())

    def after(self, context: Context, first: Fact, start: Fact, end: Fact) -> Fact:
        """What a loop carries, after its last turn."""
        loop, outer = context.loops[-1], context._replace(loops=context.loops[:-1])
        if isinstance(first.token, Stream):
            token = streams.after_loop(first.token, end.token, loop, outer)
            if token is None:
                return private("secret", context.line)
            if token != first.token:
                self.record.streams.use(outer, first.token)
            return Fact(token=token)
        if start.role and end.role == ("added", *start.role[1:]) and end.sum is not None:
            return Fact(Reach(Kind.SUM), sum=end.sum._replace(over=None))
        if isinstance(start.token, Counter) and isinstance(end.token, Counter):
            return start._replace(token=end.token, role=())
        return start._replace(role=())


def _total(equation: JaxprEqn, inputs: list[Fact]) -> Fact | None:
    """The running total of microbatches: what a loop carries, plus a clipped sum of its turn."""
    if equation.primitive.name not in ADDITIONS:
        return None
    for one, other in (inputs, inputs[::-1]):
        if one.role[:1] not in (("total",), ("added",)) or other.sum is None or other.role:
            continue
        is_beside = len({shape_of(variable) for variable in equation.invars}) == 1
        if is_beside and other.sum.over == one.role[1]:
            sums = [other.sum, *([] if one.sum is None else [one.sum])]
            is_exact = other.sum.is_exact and one.sum is None
            total = other.sum._replace(rows=added(sums), is_exact=is_exact)
            return Fact(Reach(Kind.SUM), role=("added", *one.role[1:]), sum=total)
    return None
