"""What is known of the values of a training step, from its arguments to its results."""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex_core
import numpy as np

from ..gradients import Mark
from ..privacy import NoiseMark
from ..programs import (
    COLLECTIVES,
    SUMS_OF_DEVICES,
    ShardMap,
    equations,
    mark_on,
    programs_of,
)
from .facts import Alike, Cut, Fact, Kind, either, evaluated, made_of, of_array, union
from .flow import Context, Flow, shape_of
from .keys import Key, Number
from .marked import DOORS, Record, engine_call, noise
from .numbers import counted, key_of, sliced, unstacked
from .rows import dimensions, gathered, index_of, layout, taken_once
from .sums import (
    as_total,
    counter,
    grown,
    linear,
    scaled,
    sum_over_devices,
    symbol,
    widened,
    without_turn,
)

_OF_KEYS = frozenset({"random_fold_in", "random_split", "random_wrap", "random_unwrap"})
_PASSED_ON = frozenset({"optimization_barrier"})


_MOST = 200
"""How often a loop is gone round at most."""


class PrivacyFlow(Flow[Fact]):
    """Follows what is known of values through a step.

    Attributes:
        record: what was noted on the way.
    """

    nothing = Fact()

    def __init__(self) -> None:
        super().__init__()
        self.record = Record()
        self._facts: dict[int, tuple[Any, Fact]] = {}

    def constant(self, value: Any) -> Fact:
        """What is known of a constant or a literal."""
        if id(value) not in self._facts:  # with the value, whose number is its own then
            self._facts[id(value)] = value, of_array(value)
            self.record.constants += [value] if np.ndim(value) else []
        return self._facts[id(value)][1]

    def joined(self, facts: Sequence[Fact]) -> Fact:
        """What is known of a value that may be any of several."""
        return either(facts)

    def holder(
        self, context: Context, equation: jex_core.JaxprEqn, inputs: list[Fact]
    ) -> list[Fact]:
        """What is known of an equation's results; where the check itself fails, nothing."""
        try:
            results = self._held(context, equation, inputs)
            if len(results) != len(equation.outvars):
                raise ValueError("other results than the equation has")
            return results
        except Exception as error:
            name, kind = equation.primitive.name, type(error).__name__
            found = f"the check failed at '{name}': {kind}: {error}"
            advice = "This is a fault of the check. Write it in another way, and report it."
            self.record.note(context, "release", found, advice, is_decided=False)
            lost = Fact(Kind.PRIVATE, reason="unknown", where=context.line)
            return [lost] * len(equation.outvars)

    def _held(
        self, context: Context, equation: jex_core.JaxprEqn, inputs: list[Fact]
    ) -> list[Fact]:
        match mark_on(equation):
            case Mark() as mark:
                return engine_call(self.record, context, equation, mark, inputs)
            case NoiseMark() as mark:
                return noise(self.record, context, equation, mark, inputs)
            case _:
                return super().holder(context, equation, inputs)

    def primitive(
        self, context: Context, equation: jex_core.JaxprEqn, inputs: list[Fact]
    ) -> list[Fact]:
        """Nothing, of an equation with programs of which it is not known how it runs them."""
        inner = [one.primitive.name for held in programs_of(equation) for one in equations(held)]
        doors = DOORS - {"swap", "addupdate"}  # a kernel's own memory
        if doors & {*inner} and any(not fact.is_public for fact in inputs):
            self.record.door(context, equation)
        return self.equation(context, equation, inputs)

    def equation(
        self, context: Context, equation: jex_core.JaxprEqn, inputs: list[Fact]
    ) -> list[Fact]:
        """What is known of the results of an equation that holds no program."""
        name = equation.primitive.name
        if name in DOORS and context.is_final:
            self._door(context, equation, inputs)
        if name in _PASSED_ON:
            return inputs
        if name in COLLECTIVES:
            return [self._exchanged(context, equation, fact) for fact in inputs]
        if not equation.outvars:
            return []
        if name == "unstack":
            parts = [self._one(context, cut, inputs) for cut, _ in unstacked(equation)]
            squeezes = [squeeze for _, squeeze in unstacked(equation)]
            return [self._one(context, e, [x]) for e, x in zip(squeezes, parts, strict=True)]
        found = self._one(context, equation, inputs)
        return [found] * len(equation.outvars)

    def _one(self, context: Context, equation: jex_core.JaxprEqn, inputs: list[Fact]) -> Fact:
        key, name = key_of(equation, inputs), equation.primitive.name
        found = made_of(inputs, "rows", context.line)
        if key is None and name not in _OF_KEYS:
            found = self._drawn(context, equation, inputs, found)
        if any(fact.kind is Kind.SUM for fact in inputs) and all(
            fact.kind is not Kind.PRIVATE for fact in inputs
        ):
            return linear(context, equation, inputs)
        places = layout(equation)
        if name == "axis_index":
            axis = equation.params["axis_name"]
            return found._replace(varies=frozenset(axis if isinstance(axis, tuple) else {axis}))
        if found.is_public:
            found = found._replace(
                constant=evaluated(equation, inputs),
                number=counted(equation, inputs),
                key=key or found.key,
            )
        elif key is not None or name in _OF_KEYS:
            found = found._replace(key=Key(None))
        if places is not None:
            found = found._replace(**dimensions(equation, places, inputs))
            if not found.is_public:
                found = self._of_rows(equation, inputs, found)
        elif name == "random_bits":
            found = self._bits(context, equation, inputs, found)
        elif name not in _OF_KEYS:
            loops = {loop.path for loop in context.loops}
            found = found._replace(varies=found.varies | context.axes | loops)
        return found

    def _drawn(
        self, context: Context, equation: jex_core.JaxprEqn, inputs: list[Fact], found: Fact
    ) -> Fact:
        """A value that is drawn with keys, or made of their words."""
        for i, fact in enumerate(inputs):
            if fact.key is not None:
                draw = self.record.use(context, "draw", fact, i)
                found = found._replace(draws=found.draws | {draw})
        dtype = getattr(equation.outvars[0].aval, "dtype", None) if equation.outvars else None
        is_key = dtype is not None and "key<" in str(dtype)
        return found._replace(key=Key(None)) if is_key else found

    def _bits(
        self, context: Context, equation: jex_core.JaxprEqn, inputs: list[Fact], found: Fact
    ) -> Fact:
        """Random bits: numbers of one key are alike, and those of different keys."""
        rank, keys = len(shape_of(equation.outvars[0])), len(shape_of(equation.invars[0]))
        of_keys = frozenset[int]() if inputs[0].key is None else inputs[0].key.dims
        draw = (*context.path, 0)
        dims = frozenset(range(keys, rank)) | of_keys
        return found._replace(alike=frozenset(Alike(dim, draw, dim) for dim in dims))

    def _of_rows(self, equation: jex_core.JaxprEqn, inputs: list[Fact], found: Fact) -> Fact:
        """Private values: one of several batches, rows taken at indices."""
        name, params, first = equation.primitive.name, equation.params, inputs[0]
        before = shape_of(equation.invars[0]) if equation.invars else ()
        after = shape_of(equation.outvars[0])
        if name == "slice" and not first.is_public:
            starts = params["start_indices"]
            found = found._replace(cuts=taken_once(first, before, after, starts))
        elif name == "dynamic_slice" and all(fact.is_public for fact in inputs[1:]):
            known = [fact.constant and fact.constant.value for fact in inputs[1:]]
            starts = [
                int(start) if start is not None and 0 <= int(start) < size else None
                for start, size in zip(known, before, strict=True)
            ]
            found = found._replace(cuts=taken_once(first, before, after, starts))
        elif name == "gather":
            found = gathered(equation, inputs, found)
        return found._replace(indexes=index_of(equation, inputs))

    def _exchanged(self, context: Context, equation: jex_core.JaxprEqn, fact: Fact) -> Fact:
        """What devices exchange."""
        params, axes = equation.params, context.axes
        if equation.primitive.name in SUMS_OF_DEVICES:
            axes = frozenset(params.get("axes", ()))
            is_whole = params.get("axis_index_groups") is None and axes <= context.axes
            if fact.kind is Kind.SUM and is_whole:
                return sum_over_devices(fact, axes, context.line)
            if fact.is_public and is_whole:
                plain = Fact(even=fact.even, varies=fact.varies - axes, draws=fact.draws)
                return plain._replace(releases=fact.releases)
        found = made_of([fact], "devices" if fact.kind is Kind.SUM else "rows", context.line)
        return found._replace(varies=found.varies | context.axes)

    def _door(self, context: Context, equation: jex_core.JaxprEqn, inputs: list[Fact]) -> None:
        for i, fact in enumerate(inputs):
            if not fact.is_public:
                self.record.door(context, equation)
            else:
                self.record.shown.append((fact, context.line))
                if fact.key is not None:
                    self.record.use(context, "door", fact, i)

    def steered(self, context: Context, by: Fact, results: list[Fact]) -> list[Fact]:
        """Results of a choice, or of a loop, that a value decides about."""
        if by.is_public:
            self.record.shown += [(by, context.line)] if context.is_final else []
            return [
                fact._replace(
                    varies=fact.varies | by.varies,
                    draws=fact.draws | by.draws,
                    releases=fact.releases | by.releases,
                )
                for fact in results
            ]
        found = "a private value decides which branch is taken, or how long a loop runs"
        advice = (
            "How long a step takes, and what it does, is seen. Decide by values that are public, "
            "or inside of the loss, where each example decides for itself."
        )
        self.record.note(context, "side door", found, advice)
        return [made_of([by, fact], "steered", context.line) for fact in results]

    # Loops.

    def sliced(self, context: Context, fact: Fact) -> Fact:
        """An entry along the first dimension, in a turn of a loop."""
        path, length = context.loops[-1]
        cuts = fact.cuts
        if fact.refs and fact.refs[0] is not None:
            cuts |= {Cut(fact.refs[0], "loop", path)}
        number = fact.number and sliced(fact.number, path, length)
        key = fact.key
        if key is not None:
            path_ = [
                sliced(one, path, length) if isinstance(one, Number) else one for one in key.path
            ]
            key = key._replace(path=tuple(path_))
        return fact._replace(
            constant=None,
            number=number,
            key=key,
            even=frozenset(d - 1 for d in fact.even if d),
            alike=frozenset(one._replace(dim=one.dim - 1) for one in fact.alike if one.dim),
            refs=fact.refs[1:],
            cuts=cuts,
            varies=fact.varies if 0 in fact.even and fact.is_public else fact.varies | {path},
            rows=scaled(fact.rows, 1.0, False, False),
        )

    def stacked(self, context: Context, fact: Fact) -> Fact:
        """The results of all turns side by side."""
        path, length = context.loops[-1]
        even = frozenset(d + 1 for d in fact.even)
        found = fact._replace(
            constant=None,
            number=None,
            key=None if fact.key is None else Key(None),
            even=even | ({0} if path not in fact.varies and fact.is_public else set()),
            alike=frozenset[Alike](),
            refs=(None, *without_turn(fact, path).refs),
            indexes=(),
            varies=fact.varies - {path},
        )
        if fact.kind is not Kind.SUM:
            return found
        if length is None:
            return made_of([fact], "loop", context.line)
        return found._replace(rows=scaled(fact.rows, length**0.5, False, False))

    def loop(
        self,
        context: Context,
        body: jex_core.ClosedJaxpr,
        consts: list[Fact],
        carry: list[Fact],
        slices: list[Fact],
    ) -> list[Fact]:
        """Goes round a loop until nothing new is learned of what it carries, and once more.

        Counters, keys and clipped sums are symbols first: what a turn makes of a symbol tells what
        all turns make of it.
        """
        path, length = context.loops[-1]
        size, before = len(carry), context._replace(is_final=False)
        inner = [self.sliced(context, fact) for fact in slices]
        variables = body.jaxpr.invars[len(consts) : len(consts) + size]
        stays = [
            result is variable
            for result, variable in zip(body.jaxpr.outvars, variables, strict=False)
        ]
        entry = [
            fact if same else symbol(fact, ("carry", path, i))
            for i, (fact, same) in enumerate(zip(carry, stays, strict=True))
        ]
        for _ in range(_MOST):
            after = self.program(body, [*consts, *entry, *inner], before)[:size]
            wider = [
                start if same else widened(start, end, ("carry", path, i))
                for i, (start, end, same) in enumerate(zip(entry, after, stays, strict=True))
            ]
            if wider == entry:
                break
            entry = wider
        else:
            raise RuntimeError("a loop does not settle")
        starts, ends = list[Fact](), list[Fact]()
        for i, (fact, start, end) in enumerate(zip(carry, entry, after, strict=True)):
            if stays[i]:
                starts.append(fact)
                ends.append(fact)
                continue
            name = ("carry", path, i)
            first, last = counter(fact, start, end, name, context)
            if start.kind is Kind.SUM:
                totals = grown(fact, end, name, length, context.line)
                first, last = as_total(totals[0], first), as_total(totals[1], last)
            starts.append(first)
            ends.append(without_turn(last, path)._replace(varies=last.varies - {path}))
        results = self.program(body, [*consts, *starts, *inner], context)
        return [*ends, *(self.stacked(context, fact) for fact in results[size:])]

    # Devices.

    def on_devices(self, context: Context, spread: ShardMap, inputs: list[Fact]) -> list[Fact]:
        """Goes through a `shard_map`: each device has its part, or all, of each operand."""
        parts = [
            _part(fact, _axes_of(spec), context.line)
            for fact, spec in zip(inputs, spread.in_specs, strict=True)
        ]
        results = self.program(spread.body, parts, context)
        placed = (union(_axes_of(spec)) for spec in spread.out_specs)
        ways = zip(results, placed, strict=True)
        return [self._from_devices(context, spread.axes, fact, where) for fact, where in ways]

    def _from_devices(
        self, context: Context, axes: frozenset[str], fact: Fact, placed: frozenset[str]
    ) -> Fact:
        """What devices have together: one value, or each its own part along some axes."""
        if fact.over or (fact.kind is Kind.SUM and placed):
            return made_of([fact], "devices", context.line)
        if fact.is_public and (fact.varies & axes) - placed:
            found = "a value that differs between devices leaves shard_map as if it were one"
            advice = "Add it up over devices, or give it a place along their axes in out_specs."
            self.record.note(context, "examples apart", found, advice, is_decided=False)
        if placed or not fact.is_public:
            found = made_of([fact])._replace(rows=fact.rows, kind=fact.kind)
            fact = found._replace(key=fact.key and Key(None))
        return fact._replace(varies=fact.varies - axes)


def _axes_of(spec: Any) -> list[frozenset[str]]:
    return [
        frozenset(part if isinstance(part, tuple) else () if part is None else (part,))
        for part in spec
    ]


def _part(fact: Fact, axes: list[frozenset[str]], line: str) -> Fact:
    """What a device has of a value."""
    placed = union(axes)
    if not placed:
        return fact
    if fact.kind is Kind.SUM:
        return made_of([fact], "devices", line)._replace(varies=fact.varies | placed)
    cuts = fact.cuts
    for ref, names in zip(fact.refs, axes, strict=False):
        cuts |= {Cut(ref, "devices", names)} if names and ref is not None else set()
    dims = {dim for dim, names in enumerate(axes) if names}
    return fact._replace(
        constant=None,
        number=None,
        key=Key(None) if fact.key else None,
        cuts=cuts,
        alike=fact.alike,
        indexes=(),
        varies=fact.varies if dims <= fact.even and fact.is_public else fact.varies | placed,
    )
