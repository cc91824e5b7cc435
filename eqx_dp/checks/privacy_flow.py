"""Facts about the values of a training step, from its arguments to its results."""

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from ..gradients import Mark
from ..privacy import NoiseMark
from ..programs import COLLECTIVES, SUMS_OF_DEVICES, ShardMap, mark_on, named, settled
from .facts import Fact, Kind, either, evaluated, made_of, of_array
from .flow import Context, Flow, Loop, dtype_of
from .keys import Along, Key, Number
from .marked import Record, engine_call, is_door, is_error_if, noise
from .numbers import counted, entry, key_of
from .rows import dimensions, gathered, index_of
from .sums import linear

_HOST = named("pure_callback io_callback buffer_callback")
_ALIKE_ON_DEVICES = SUMS_OF_DEVICES | named("pmax pmin all_gather all_gather_invariant")


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
        return either(facts)

    def holder(self, context: Context, equation: JaxprEqn, inputs: list[Fact]) -> list[Fact]:
        """The facts about an equation's results; none if the check itself fails."""
        try:
            match mark_on(equation):
                case Mark() as mark:
                    results = engine_call(self.record, context, equation, mark, inputs)
                case NoiseMark() as mark:
                    results = noise(self.record, context, equation, mark, inputs)
                case _:
                    results = super().holder(context, equation, inputs)
            assert len(results) == len(equation.outvars)
            return results
        except Exception as error:
            found = f"the check failed at '{equation.primitive.name}': {error!r}"
            advice = "This is a fault of the check. Write it in another way, and report it."
            self.record.note(context, "release", found, advice, is_decided=False)
            lost = Fact(Kind.PRIVATE, reason="unknown", where=context.line)
            return [lost] * len(equation.outvars)

    def equation(self, context: Context, equation: JaxprEqn, inputs: list[Fact]) -> list[Fact]:
        """The facts about the results of an equation that holds no program."""
        name, params = equation.primitive.name, equation.params
        for i, fact in enumerate(inputs if is_door(equation) else ()):
            if not fact.is_public:
                self.record.door(context, equation)
            elif fact.key is not None:
                self.record.use(context, "door", fact.key, i)
        if name == "optimization_barrier":
            return inputs
        if context.axes and (name in COLLECTIVES or "axis_name" in params):
            return self._exchanged(context, equation, inputs)
        if not equation.outvars:
            return []
        if name in _HOST and not is_error_if(equation):
            lost = made_of(inputs)._replace(kind=Kind.PRIVATE, reason="host", where=context.line)
            return [lost] * len(equation.outvars)
        found = self._made(context, equation, inputs)
        if name == "unstack" and found.key is not None:
            keys = (entry(found.key, i) for i in range(len(equation.outvars)))
            return [found._replace(key=key) for key in keys]
        return [found] * len(equation.outvars)

    def _made(self, context: Context, equation: JaxprEqn, inputs: list[Fact]) -> Fact:
        name, key = equation.primitive.name, key_of(equation, inputs)
        if {fact.kind for fact in inputs} - {Kind.PUBLIC} == {Kind.SUM}:
            return linear(context, equation, inputs)
        found = made_of(inputs, "rows", context.line)
        if key is None:
            dtype = dtype_of(equation.outvars[0])
            if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
                key = Key(None)
            # Numbers that are drawn, or computed from a key's words.
            for i, fact in enumerate(inputs):
                if fact.key is not None:
                    self.record.use(context, "draw", fact.key, i)
                    found = found._replace(is_random=True)
        found = found._replace(key=key, **dimensions(equation, inputs))
        if found.is_public:
            number, constant = counted(equation, inputs), evaluated(equation, inputs)
            return found._replace(number=number, constant=constant, refs=())
        refs = gathered(equation, inputs) if name == "gather" else None
        refs = found.refs if refs is None else refs
        return found._replace(refs=refs, even=frozenset(), indexes=index_of(equation, inputs))

    def steered(self, context: Context, by: Fact, results: list[Fact]) -> list[Fact]:
        """Results of a choice or a loop that a value controls."""
        if by.is_public:
            return [x._replace(is_random=x.is_random or by.is_random) for x in results]
        found = "a private value decides which branch is taken, or how long a loop runs"
        advice = "Decide by public values, or in the loss, where each example decides for itself."
        self.record.note(context, "side door", found, advice)
        return [made_of([by, fact], "steered", context.line) for fact in results]

    # Loops.

    def sliced(self, context: Context, fact: Fact) -> Fact:
        """An entry along the first dimension, in a turn of a loop."""
        path, length = context.loops[-1]
        if fact.kind is Kind.SUM:
            return made_of([fact], "loop", context.line)
        first, *refs = fact.refs or (None,)
        if first is not None and first.dim == 0:
            refs = [ref and ref._replace(loops=(*ref.loops, path)) for ref in refs]
        return fact._replace(
            constant=None,
            number=fact.number and fact.number.turned(path, length),
            key=fact.key and fact.key.each(lambda one: one.turned(path, length)),
            even=frozenset(dim - 1 for dim in fact.even if dim),
            refs=tuple(refs),
        )

    def stacked(self, context: Context, fact: Fact) -> Fact:
        """The stacked results of all turns."""
        return made_of([fact], "loop", context.line)._replace(key=fact.key and Key(None))

    def loop(self, context: Context, body: ClosedJaxpr, parts: Sequence[list[Fact]]) -> list[Fact]:
        """Follows a loop until the facts about its carry settle, and once more.

        Counters begin as symbols: what one turn does with a symbol, all turns do with it.
        """
        consts, carry, slices = parts
        size, before = len(carry), context._replace(is_final=False)
        inner = [self.sliced(context, fact) for fact in slices]
        names = [("carry", context.path, i) for i in range(size)]

        def turn(entry: list[Fact]) -> list[Fact]:
            return self.program(body, [*consts, *entry, *inner], before)[:size]

        symbols = map(_symbol, carry, names, [context.line] * size)
        entry = settled(turn, [*symbols], lambda a, b: a if a == b else _widened(a, b, context))
        loops = [context.loops[-1]] * size
        found = [*map(_in_all_turns, carry, entry, turn(entry), names, loops)]
        starts = [start for start, _ in found]
        results = self.program(body, [*consts, *starts, *inner], context)
        return [*(end for _, end in found), *(self.stacked(context, x) for x in results[size:])]

    # Devices: a public value is the same on all of them, and a value that may differ is private.

    def on_devices(self, context: Context, spread: ShardMap, inputs: list[Fact]) -> list[Fact]:
        """Follows a `shard_map`: each device has its part, or all, of each operand."""
        parts = map(_part, inputs, spread.in_specs, [context.line] * len(inputs))
        results = zip(self.program(spread.body, [*parts], context), spread.out_specs, strict=True)
        return [
            made_of([fact], "devices", context.line)._replace(key=fact.key and Key(None))
            if any(spec) or fact.over
            else fact
            for fact, spec in results
        ]

    def _exchanged(self, context: Context, equation: JaxprEqn, inputs: list[Fact]) -> list[Fact]:
        """Values that devices exchange: parts of one sum, or values that are the same on all."""
        name, params = equation.primitive.name, equation.params
        is_whole = params.get("axis_index_groups") is None
        axes = frozenset(params.get("axes", ()))

        def of(fact: Fact) -> Fact:
            if fact.is_public and not fact.key and is_whole and name in _ALIKE_ON_DEVICES:
                return made_of([fact])
            if fact.kind is Kind.SUM and is_whole and name in SUMS_OF_DEVICES and fact.over == axes:
                return fact._replace(over=frozenset[str]())
            return _differs(fact, context.line)

        return [*map(of, inputs)] or [of(made_of([]))] * len(equation.outvars)


def _part(fact: Fact, spec: Any, line: str) -> Fact:
    """A device's part of a value: all of it, some rows, or unknown."""
    if not any(spec):
        return fact
    first, *others = spec
    ref = next(iter(fact.refs), None)
    if fact.kind is Kind.PRIVATE and ref is not None and not any(others):
        axes = frozenset(first if isinstance(first, tuple) else (first,))
        return fact._replace(refs=(ref._replace(axes=ref.axes | axes),))
    return _differs(fact, line)


def _differs(fact: Fact, line: str) -> Fact:
    """A value that may differ between devices."""
    reason, where, key = fact.reason or "devices", fact.where or line, fact.key and Key(None)
    return made_of([fact])._replace(kind=Kind.PRIVATE, reason=reason, where=where, key=key)


# The carry of a loop.


def _symbol(fact: Fact, name: Hashable, line: str) -> Fact:
    """The fact about a carry at the beginning of a turn, if it may change."""
    return (fact if fact.past else made_of([fact], "loop", line))._replace(
        number=Number(name) if fact.number and fact.number.is_one else None,
        key=fact.key and Key(name if fact.key.is_one else None, is_words=fact.key.is_words),
    )


def _widened(start: Fact, end: Fact, context: Context) -> Fact:
    """The fact at the beginning of a turn, given that at its end: numbers grow, keys stay."""
    if start.is_public and end.past:  # before step 0 nothing is kept
        return end
    number, key = start.number, start.key if start.key == end.key else Key(None)
    if number is None or end.number is None or end.number != number.plus(end.number.offset):
        number = None
    return made_of([start, end], "loop", context.line)._replace(number=number, key=key)


def _in_all_turns(
    fact: Fact, start: Fact, end: Fact, name: Hashable, loop: Loop
) -> tuple[Fact, Fact]:
    """The facts about a carry at the beginning of a turn, and at the end of the loop."""
    if start.key is not None and start.key.root == name:
        start = start._replace(key=fact.key)
    if start.number is None or end.number is None or fact.number is None:
        return start, start
    path, length, stride = loop.path, loop.length, end.number.offset
    along = (*fact.number.along, *([Along(path, stride, length)] if stride else []))
    first = start._replace(number=fact.number._replace(along=along))
    last = start._replace(number=fact.number.plus(stride * (length or 0)))
    return first, last if length else first  # also if there is no turn
