"""Private data followed through a step, from its arguments to every result."""

import math
from collections.abc import Sequence
from dataclasses import replace

import jax.extend.core as jex_core

from ..gradients import mark_of
from ..programs import Cond, Scan, ShardMap, While, inside, programs_of
from . import loops, rows
from .doors import DOORS
from .engine import Engine
from .equations import Equations
from .flow import Context
from .record import Record
from .releases import Source, joint_bound
from .values import (
    SOME,
    Cut,
    Linear,
    Private,
    Public,
    Random,
    Rows,
    Sum,
    Value,
    either,
    made_of,
)


class PrivacyFlow(Equations):
    """Follows values through all that a program is made of."""

    def __init__(self) -> None:
        super().__init__(Record())
        self._engine = Engine(self.record)

    def program(
        self, program: jex_core.ClosedJaxpr, inputs: Sequence[Value], context: Context
    ) -> list[Value]:
        """What is known of a program's results; two calls of one program are two things."""
        return self.equations(program, inputs, context)

    def either(self, facts: Sequence[Value]) -> Value:
        """What is known of a value that is any of several, as a public value decides."""
        first = facts[0]
        if all(fact == first for fact in facts):
            return first
        sums = [fact for fact in facts if isinstance(fact, Sum)]
        public = [fact for fact in facts if isinstance(fact, Public)]
        if sums and len(sums) + len(public) == len(facts) and not made_of(public).noise:
            found = either(sums)
            return replace(found, releases=found.releases | made_of(public).releases)
        found = self.joined(facts)
        if isinstance(found, Public):
            terms = {x.term for x in public}
            if len(public) == len(facts):
                low, high = min(x.low for x in public), max(x.high for x in public)
                term = terms.pop() if len(terms) == 1 else None
                return replace(found, low=low, high=high, term=term)
        if isinstance(found, Private) and not sums:
            private = [fact for fact in facts if isinstance(fact, Private)]
            shared = frozenset[Rows].intersection(*(fact.rows for fact in private))
            cuts = frozenset[Cut].intersection(*(fact.cuts for fact in private))
            return replace(private[0], rows=shared, cuts=cuts)
        return found

    def holder(
        self, context: Context, equation: jex_core.JaxprEqn, inputs: list[Value]
    ) -> list[Value]:
        """What is known of an equation's results, whatever it holds."""
        mark = mark_of(equation)
        if mark is not None:
            return self._engine.call(context, equation, mark, inputs)
        match inside(equation):
            case Cond() as cond:
                return self._cond(context, cond, inputs)
            case Scan() as scan:
                consts, start, over = scan.split(inputs)
                turned = [self._turn(value, context, scan.length) for value in over]
                found, stacked = self._turns(
                    context.turn(scan.length), scan.body, consts, start, turned, scan.length
                )
                return [*found, *(self._stacked(x, context, scan.length) for x in stacked)]
            case While() as loop:
                of_condition, of_body, start = loop.split(inputs)
                return self._while(context, loop, of_condition, of_body, start)
            case ShardMap() as spread:
                return self._shard_map(context, equation, spread, inputs)
            case None if programs_of(equation) and "update_jaxpr" not in equation.params:
                # Nothing is known of it: a kernel, or a reduction by the user's function.
                if equation.primitive.name in DOORS:
                    self.record.door(context, equation, inputs)
                return [self.joined(inputs)] * len(equation.outvars)
            case _:
                return super().holder(context, equation, inputs)

    def _cond(self, context: Context, cond: Cond, inputs: list[Value]) -> list[Value]:
        which, *operands = inputs
        branches = list(cond.branches)
        if isinstance(which, Public) and which.low == which.high:
            index = min(max(int(which.low), 0), len(branches) - 1)
            return self.program(branches[index], operands, context)
        found = [
            self.program(
                branch,
                operands,
                context._replace(branches=(*context.branches, (context.path, i))),
            )
            for i, branch in enumerate(branches)
        ]
        if isinstance(which, Private | Sum):
            self.record.steered(context, "which branch is taken")
            return [self.joined([which, *facts]) for facts in zip(*found, strict=True)]
        if isinstance(which, Random) or which.noise:
            return [self.joined([which, *facts]) for facts in zip(*found, strict=True)]
        found = self._one_source(context, found)
        return [_told(self.either(facts), which) for facts in zip(*found, strict=True)]

    def _one_source(self, context: Context, found: list[list[Value]]) -> list[list[Value]]:
        """Of sums that different branches make, as one clipped sum with the largest bound."""
        names = [
            {term.source for value in values if isinstance(value, Sum) for term in value.terms}
            for values in found
        ]
        known = [name for some in names for name in some]
        if len(set(map(frozenset, names))) == 1 or not all(
            name in self.record.sources for name in known
        ):
            return found
        bounds = [joint_bound(values, self.record.sources) for values in found]
        sources = [self.record.sources[name] for name in known]
        cuts = frozenset[Cut].intersection(*(source.cuts for source in sources))
        is_one = all(source.cuts == cuts for source in sources)
        bound = max(bounds) * (1 if is_one else 2)  # parts lose an example, and gain one
        self.record.sources[context.path, "either"] = Source(bound, cuts, context.line)
        return [
            [
                replace(
                    value,
                    terms=frozenset({Linear((context.path, "either"), frozenset({i}), 1.0)}),
                )
                if isinstance(value, Sum)
                else value
                for i, value in enumerate(values)
            ]
            for values in found
        ]

    def _while(
        self,
        context: Context,
        loop: While,
        of_condition: list[Value],
        of_body: list[Value],
        start: list[Value],
    ) -> list[Value]:
        turn = context.turn(None)
        carry, _ = self._turns(turn, loop.body, of_body, start, [], None)
        (goes_on,) = self.program(loop.condition, [*of_condition, *carry], turn)
        if isinstance(goes_on, Private | Sum):
            self.record.steered(context, "how long a loop runs")
            return [self.joined([goes_on, value]) for value in carry]
        if isinstance(goes_on, Random) or goes_on.noise:
            return [self.joined([goes_on, value]) for value in carry]
        return [_told(value, goes_on) for value in carry]

    def _turns(
        self,
        context: Context,
        body: jex_core.ClosedJaxpr,
        consts: list[Value],
        start: list[Value],
        slices: list[Value],
        length: int | None,
    ) -> tuple[list[Value], list[Value]]:
        """What a loop carries in the end, and what its turns give beside."""
        loop, size = context.loops[-1].path, len(start)
        before, variables = context._replace(is_final=False), body.jaxpr.invars[len(consts) :]
        places = [
            loops.carried(loop, i, value, body.jaxpr.outvars[i] is variables[i])
            for i, value in enumerate(start)
        ]

        def turn(carry: list[Value], context: Context) -> list[Value]:
            return self.program(body, [*consts, *carry, *slices], context)

        while True:
            after = turn([place.symbol for place in places], before)[:size]
            seen = [place.seen(value) for place, value in zip(places, after, strict=True)]
            if seen == places:
                break
            places = seen
        # Counters are known now, and with them what turns take of the rows.
        for place, value in zip(places, after, strict=True):
            _, turns = loops.counted(place, value, loop, length)
            if turns is not None:
                self.record.counters[place.name] = turns
        ways = [
            loops.counted(place, value, loop, length)[0]
            for place, value in zip(places, after, strict=True)
        ]
        known = [
            place.symbol if way is None else way.inside
            for place, way in zip(places, ways, strict=True)
        ]
        after = turn(known, before)[:size]
        inside_sums, done = loops.sums_of_turns(places, after, self.record.sources, loop, length)
        known = [
            inside_sums.get(place.name, value) for place, value in zip(places, known, strict=True)
        ]
        results = turn(known, context)
        for place, value in zip(places, results, strict=False):
            if context.is_final and isinstance(place.symbol, Sum) and isinstance(value, Public):
                self.record.met |= value.releases
        ends = [
            done.get(place.name) or (self._ended(place, value) if way is None else way.after)
            for place, way, value in zip(places, ways, results, strict=False)
        ]
        return [value for value in ends if value is not None], results[size:]

    def _ended(self, place: loops.Carried, value: Value) -> Value:
        """What is left of what nothing special is known of."""
        found = self.either([place.start, value]) if place.start != value else value
        return replace(found, term=None) if isinstance(found, Public) else found

    def _turn(self, value: Value, context: Context, length: int) -> Value:
        """What a turn of a loop sees of an array that it goes over."""
        match value:
            case Public():
                return loops.turn_of(value, context.path, length)
            case Private():
                kept, cuts = rows.sliced(value.rows, context.path)
                return replace(value, rows=kept, cuts=value.cuts | cuts)
            case Random():
                return replace(value, turns=value.turns | {context.path}, part=SOME)
            case Sum():
                return replace(value, turns=value.turns | {context.path}, apart_along=None)

    def _stacked(self, value: Value, context: Context, length: int) -> Value:
        """The results of all turns, side by side."""
        loop = context.path
        match value:
            case Public():
                return replace(value, term=None)
            case Random():
                return Public(noise=value.draws)
            case Sum():
                names = {term.source for term in value.terms}
                has_own = loop not in value.kept_in and all(
                    any(cut.start == loop for cut in self.record.sources[name].cuts)
                    for name in names
                    if name in self.record.sources
                )
                if has_own:
                    # An example that is left out moves one from each turn to the one before.
                    whole = value.scaled(2 * math.sqrt(length))
                    return replace(whole, turns=value.turns - {loop}, apart_along=0)
                is_cut = loop in value.turns
                whole = value if is_cut else value.scaled(math.sqrt(length))
                return replace(whole, turns=value.turns - {loop}, apart_along=None)
            case Private():
                own = [cut for cut in value.cuts if cut.start == loop]
                stacked = {row._replace(dim=row.dim + 1) for row in value.rows}
                stacked |= {Rows(cut.axis, 0, 1, length) for cut in own[:1]}
                return replace(value, rows=frozenset(stacked), cuts=value.cuts - set(own))

    def _shard_map(
        self,
        context: Context,
        equation: jex_core.JaxprEqn,
        spread: ShardMap,
        inputs: list[Value],
    ) -> list[Value]:
        mesh, outside = equation.params["mesh"], self.lengths
        self.lengths = outside | {axis: mesh.shape[axis] for axis in spread.axes}
        cut = [
            rows.on_devices(value, spec, self.lengths)
            for value, spec in zip(inputs, spread.in_specs, strict=True)
        ]
        context = context._replace(times=context.times * spread.num_devices)
        found = self.program(spread.body, cut, context)
        for value, spec in zip(found, spread.out_specs, strict=True):
            if any(entry is not None for entry in spec):
                self.put_together(context, [value])
        results = [
            rows.off_devices(value, spec, self.lengths)
            for value, spec in zip(found, spread.out_specs, strict=True)
        ]
        self.lengths = outside
        return results


def _told(value: Value, which: Public) -> Value:
    """A value that a public one has decided on tells of the releases that this one is made of."""
    match value:
        case Public() | Sum() if which.releases:
            return replace(value, releases=value.releases | which.releases)
        case Random() if which.releases:
            return Public(releases=which.releases, noise=value.draws)
        case _:
            return value
