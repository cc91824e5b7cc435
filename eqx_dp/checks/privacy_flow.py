"""Facts about the values of a training step, from its arguments to its results."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from ..gradients import Mark
from ..privacy import NoiseMark
from ..programs import UNCHANGED, UNSEEN, Context, Flow, ShardMap, inside, mark_on, named, settled
from . import rows, streams
from .arguments import Argument
from .facts import EVEN, Fact, either, of_array, private, reached, turns_of
from .marked import engine_call, noise
from .record import Record, is_door, is_error_if
from .roles import gathered, role_of
from .streams import CALL, EVERY, Key, Stream
from .sums import is_added_to, linear

_NOT_FOLLOWED = UNSEEN | named("rng_uniform")
_DRAWS = named("random_bits rng_bit_generator rng_uniform threefry2x32 random_gamma")
_SAME_VALUE = UNCHANGED | named("broadcast_in_dim reshape squeeze")
_LOOP = "a loop carries a clipped sum, or stacks several"
_NOT_TAKEN_ON = "a turn of a loop does not end with the state after its last draw from a stream"
SECRET = "the key of a noise, or noise that is kept, is in it: anyone with that can subtract it"


class PrivacyFlow(Flow[Fact]):
    """Follows facts about values through a step.

    Attributes:
        record: findings, sums, releases and keys on the way.
    """

    nothing = Fact()

    def __init__(self, arguments: Sequence[Argument]) -> None:
        super().__init__()
        self.record = Record(arguments)
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
        return either([self._read(fact, fact.reach.where) for fact in facts])

    def holder(self, context: Context, equation: JaxprEqn, inputs: list[Fact]) -> list[Fact]:
        """The facts about an equation's results; none if the check itself fails."""
        try:
            match mark_on(equation):
                case Mark() as mark:
                    read = [self._secret(fact, context.line) for fact in inputs]
                    return engine_call(self.record, context, equation, mark, read)
                case NoiseMark() as mark:
                    return noise(self.record, context, equation, mark, inputs)
                case None if isinstance(spread := inside(equation), ShardMap):
                    return self._on_devices(context, spread, inputs)
                case _:
                    return super().holder(context, equation, inputs)
        except Exception as error:
            found = f"the check failed at '{equation.primitive.name}' (report it): {error!r}"
            self.record.note(context, "release", found)
            return [private("the check failed", context.line)] * len(equation.outvars)

    def equation(self, context: Context, equation: JaxprEqn, inputs: list[Fact]) -> list[Fact]:
        """The facts about the results of an equation that holds no program."""
        name, count = equation.primitive.name, len(equation.outvars)
        if name == "optimization_barrier":
            return inputs
        if name in UNCHANGED and isinstance(inputs[0].token, Stream):
            return [Fact(token=inputs[0].token)]
        inputs = [self._secret(fact, context.line) for fact in inputs]
        for fact in inputs if is_door(equation) else ():
            if not fact.is_public:
                self.record.door(context, equation, fact.is_proven)
        token = streams.token_of(equation, inputs) if count else None
        for fact in inputs[isinstance(token, Key) :]:
            self.record.use(fact, context.line)
        is_mutable = any("Ref" in type(variable.aval).__name__ for variable in equation.invars)
        is_known = not is_mutable and (name not in _NOT_FOLLOWED or is_error_if(equation))
        if not (count and is_known):
            why = "a host function or a mutable array returns it, which may be of any data"
            return [private(why, context.line)] * count
        if any(fact.sum for fact in inputs) and not any(fact.reach.why for fact in inputs):
            return [linear(context, equation, inputs)] * count
        reach = reached(inputs, f"a clipped sum is in it, through '{name}'", context.line)
        reach = reach._replace(is_random=reach.is_random or name in _DRAWS)
        value = inputs[0].value if inputs and name in _SAME_VALUE else None
        found = Fact(reach, (), turns_of(inputs), None, token or role_of(equation, inputs), value)
        gathers = gathered(equation, inputs) if name == "gather" else None
        places = [gathers or rows.places_of(equation, v, inputs) for v in equation.outvars]
        return [found._replace(places=one) for one in places]

    def steered(self, context: Context, by: Fact, results: list[Fact]) -> list[Fact]:
        """Results of a choice or a loop that a value controls."""
        by = self._read(by, context.line)
        if by.is_public:
            return [fact._replace(turns=fact.turns | by.turns) for fact in results]
        found = "a private value decides which branch is taken, or how long a loop runs"
        self.record.note(context, "side door", found, by.is_proven)
        lost = [by, *(self._read(fact, context.line) for fact in results)]
        return [Fact(reached(lost, "a clipped sum decides about it", context.line))] * len(results)

    def _on_devices(self, context: Context, spread: ShardMap, inputs: list[Fact]) -> list[Fact]:
        """A `shard_map` by hand: of what is private, nothing is known in it."""
        why = "it comes from a shard_map by hand: use sharding= of filter_clipped_grad instead"
        lost = private(why, context.line)
        read = [self._read(fact, context.line) for fact in inputs]
        public = Fact(turns=turns_of(read))
        found = self.program(spread.body, [public if f.is_public else lost for f in read], context)
        return [public if self._read(f, context.line).is_public else lost for f in found]

    def _secret(self, fact: Fact, line: str) -> Fact:
        """A value that is read by something other than noise; a counter is a public number."""
        if not isinstance(fact.token, Stream):
            return fact
        if fact.token.is_secret:
            return private(SECRET, line, True)
        return Fact(turns=frozenset({CALL, *fact.token.loops}))

    def _read(self, fact: Fact, line: str) -> Fact:
        """The same, by something that is of no use for keys, too."""
        self.record.use(fact, line)
        return self._secret(fact, line)

    # Loops.

    def loop(self, context: Context, body: ClosedJaxpr, parts: Sequence[list[Fact]]) -> list[Fact]:
        """The facts about a loop's results.

        Streams begin as symbols: what one turn does, all turns do. Values that each turn does
        nothing but add to are running totals.
        """
        consts, carry, slices = parts
        size, before = len(carry), context._replace(is_final=False)
        totals = [is_added_to(body.jaxpr, len(consts) + i, i) for i in range(size)]
        slices = [self._sliced(context, fact) for fact in slices]

        def step(carry: list[Fact], context: Context) -> list[Fact]:
            return self.program(body, [*consts, *carry, *slices], context)

        start = settled(
            lambda start: step(start, before)[:size],
            [self._entry(context, *entry) for entry in zip(carry, totals, strict=True)],
            lambda start, end: self._widened(context, start, end),
        )
        around = zip(carry, start, step(start, before)[:size], strict=True)
        after = [self._after(context, *facts) for facts in around]
        return [*after, *(self._stacked(context, fact) for fact in step(start, context)[size:])]

    def _sliced(self, context: Context, fact: Fact) -> Fact:
        """An entry along the first dimension, in a turn of a loop."""
        loop = context.loops[-1].path
        fact = self._read(fact, context.line)
        is_other = fact.is_public and fact.places[:1] != (EVEN,)
        turns = fact.turns | ({loop} if is_other else set())
        token = fact.token if (fact.token or ())[:1] in (("mask",), ("index",)) else None
        places = rows.sliced(fact.places, loop)
        return Fact(reached([fact], _LOOP, context.line), places, turns, token=token)

    def _stacked(self, context: Context, fact: Fact) -> Fact:
        """The stacked results of all turns."""
        fact = self._read(fact, context.line)
        outer = fact.turns - {context.loops[-1].path}
        return Fact(reached([fact], _LOOP, context.line), turns=outer)

    def _entry(self, context: Context, fact: Fact, is_total: bool) -> Fact:
        """What a loop carries, at the beginning of a turn; others than totals may change."""
        loop, token = context.loops[-1].path, fact.token
        if isinstance(token, Stream):
            return Fact(token=token._replace(at=("turn", loop), loops=streams.loops_of(context)))
        # A key whose path is known is one value, until it is found to change.
        if is_total or (isinstance(token, Key) and EVERY not in token.path):
            return Fact(token=("total", loop)) if is_total else fact
        fact = self._read(fact, context.line)
        return Fact(reached([fact], _LOOP, context.line), fact.places, fact.turns | {loop})

    def _widened(self, context: Context, start: Fact, end: Fact) -> Fact:
        """The fact at the beginning of a turn, given that at its end."""
        if isinstance(start.token, Stream):
            is_same = isinstance(end.token, Stream) and end.token[:2] == start.token[:2]  # its part
            return start if is_same else private(SECRET, context.line)
        if _is_total(start):
            return start
        found = self.joined([start, end])
        if start.token != end.token:
            found = found._replace(turns=found.turns | {context.loops[-1].path})
        return found

    def _after(self, context: Context, first: Fact, start: Fact, end: Fact) -> Fact:
        """What a loop carries, after its last turn, from what it was before."""
        loop, outer = context.loops[-1], context._replace(loops=context.loops[:-1])
        if _is_total(start):
            # In each turn it is the same function of the engine's sum.
            found = end.sum if first.is_public and loop.path not in end.turns else None
            if found is not None and found.over == loop.path:
                return Fact(sum=found._replace(over=None))
            both = [self._read(first, context.line), end]
            return Fact(reached(both, _LOOP, context.line), turns=turns_of(both))
        if not isinstance(first.token, Stream):
            return start
        token = streams.after_loop(first.token, end.token, loop, outer)
        if token is None or (token.root, end.token.at) in self.record.drawn:
            self.record.note(context, "fresh noise", _NOT_TAKEN_ON)
            return private(SECRET, context.line)
        if token != first.token:
            self.record.draw(outer, first.token)
        return Fact(token=token)


def _is_total(fact: Fact) -> bool:
    """Whether it is a running total, at the beginning of a turn."""
    return (fact.token or ())[:1] == ("total",)
