"""Calls of the engine in a traced step, read from their marks."""

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn

from ..gradients import Mark
from ..precision.stages import stage_of
from ..privacy import NoiseMark
from ..programs import Call, Cond, While, equations, inside, is_as_marked, mark_on, named
from ..programs import programs_of as programs_in
from .facts import EVEN, Fact, Kind, Reach, Row, Sum, Term, met, private
from .flow import Context, Flow, shape_of
from .record import DOORS, Record, is_door, is_error_if, is_proven
from .roles import MASK
from .sums import Source

_APART = (
    "Give the engine the step's own batch arguments, or views of them row by row. Work and draw "
    "within the loss of one example, let the engine make microbatches, use constants that are the "
    "same for all, and name public arrays with a row for each example in public_rows=."
)
_PLAIN = (
    "Pass the mask argument as it came, or OR-ed: is_padding_example=mask | more. If the step has "
    "several boolean vectors, call it is_padding_example."
)


class _Rows(NamedTuple):
    """Whose rows a call of the engine gets, or why that is not known.

    Attributes:
        own: the rows.
        found: what is not proven.
        advice: what to do.
    """

    own: Row | None
    found: str = ""
    advice: str = _APART


def engine_call(
    record: Record, context: Context, equation: JaxprEqn, mark: Mark, inputs: list[Fact]
) -> list[Fact]:
    """What a call's results are: clipped sums, and values of single examples."""
    count, line = len(equation.outvars), context.line
    unknown = [private("mixed", line)] * count
    end = mark.num_shared + mark.num_batched
    models = models_of(equation, slice(mark.num_shared, end))
    if models is None or (len(inputs), count) != (mark.num_operands, mark.num_results):
        found = "the clipped gradient is mapped over examples, or differentiated"
        advice = "Map the whole step over models alone (vmap), or loop over plain calls."
        record.note(context, "release", found, advice, is_decided=False)
        return unknown
    shared, batch = inputs[: mark.num_shared], inputs[mark.num_shared : end]
    keys, mask = inputs[end : end + mark.has_keys], inputs[end + mark.has_keys :]
    held = inside(equation)
    if context.is_final and isinstance(held, Call):
        given = [
            _Value(not fact.is_public, i in range(end, end + mark.has_keys))
            for i, fact in enumerate(inputs)
        ]
        _Doors(record).program(held.body, given, context)
    if all(fact.is_public for fact in inputs):
        if context.is_final:
            record.of_public[line] = None
        return [Fact()] * count
    if models > 1 and mask and shape_of(equation.invars[-1]) != (mark.num_examples,):
        return unknown
    lost = [fact for fact in (*shared, *keys) if not fact.is_public]
    if lost:
        found = "private data is in the model or in the loss's key: noise multiplier unbounded"
        advice = "Add noise to every clipped sum before it reaches anything that the loss reads."
        record.note(context, "release", found, advice, any(map(is_proven, lost)))
        return unknown
    own, found, advice = _rows_of(shared, batch, mask)
    if own is None:
        record.note(context, "examples apart", found, advice, is_decided=False)
        return unknown
    if context.is_final:
        _note_arguments(record, context, own, keys, mask)
    over = own.turns[-1] if own.part else None
    batches = frozenset[Hashable](own.turns[:1] if own.dim == 1 else ())
    for group, bound in enumerate(mark.bounds):
        source = Source(bound, batches, own.length, mark.unit, line)
        record.sources[context.path, group] = source
        if math.isinf(bound):
            found = "a clipped sum has no finite clip norm: the noise multiplier is unbounded"
            record.note(context, "noise", found, "Set a finite l2_clip_norm.")
    rows = (frozenset({Term(((context.path, g), i), 1.0)}) for i, g in enumerate(mark.groups))
    sums = [Fact(Reach(Kind.SUM), sum=Sum((row,), over=over)) for row in rows]
    if models > 1:  # side by side
        sums = [f._replace(sum=f.sum and f.sum.scaled(math.sqrt(models), False)) for f in sums]
    return [*sums, *[private("data", line)] * (count - len(sums))]


def models_of(equation: JaxprEqn, alike: slice = slice(0)) -> int | None:
    """Over how many models a marked equation is mapped; 1 if it is not, None if that is unclear.

    The operands in `alike` must be the same for all.
    """
    before = equation.params["name"].shapes
    shapes = [shape_of(variable) for variable in equation.invars]
    if is_as_marked(equation):
        return 1
    if len(before) != len(shapes) or before[alike] != shapes[alike]:
        return None
    mapped = [(a, b) for a, b in zip(before, shapes, strict=True) if a != b]
    counts = {math.prod(b) // max(1, math.prod(a)) for a, b in mapped}
    is_plain = all(sorted(b) == sorted((*a, *counts)) for a, b in mapped)
    return counts.pop() if len(counts) == 1 and is_plain else None


def _rows_of(shared: Sequence[Fact], batch: Sequence[Fact], mask: Sequence[Fact]) -> _Rows:
    """Which rows the engine's examples are."""
    for fact in (*batch, *mask):
        place = fact.places[0] if fact.places else None
        if fact.is_public and place != EVEN:
            return _Rows(None, "an array that is not private has other values for other slots")
        if not fact.is_public and (not isinstance(place, Row) or not place.is_one_dimension):
            return _Rows(None, "rows are not proven to be apart before filter_clipped_grad clips")
    examples = [fact.places[0] for fact in batch if not fact.is_public]
    if len({*examples}) > 1:
        return _Rows(None, "arguments of filter_clipped_grad hold other rows")
    own = met(examples)
    for fact in mask:
        kind, *who = fact.role or ("",)
        place = fact.places[0]
        if kind == "negative" and isinstance(own, Row) and isinstance(place, Row):
            place = place._replace(chosen_by=who[0])
        elif kind != "mask" and not fact.is_public:
            return _Rows(None, "the mask is not proven to be that of the step's arguments", _PLAIN)
        own = met([own, place])
    if not isinstance(own, Row):
        return _Rows(None, "the mask is one of other rows", _PLAIN)
    if own.part and any(own.turns[-1] in fact.turns for fact in (*shared, *batch, *mask)):
        return _Rows(None, "microbatches of one batch meet other values in each turn of a loop")
    return _Rows(own)


def _note_arguments(
    record: Record, context: Context, own: Row, keys: Sequence[Fact], mask: Sequence[Fact]
) -> None:
    """Notes a missing mask, and what an index is assumed to be; uses of keys."""
    if not mask or mask[0].is_public:
        record.unmasked[context.line] = not mask
    elif mask[0].role != MASK:
        record.assumed[f"slots whose index in {own.chosen_by} is negative are padding"] = None
    if own.chosen_by not in ("", "*"):
        record.assumed[
            f"entries of {own.chosen_by} are different rows, except those of padding"
        ] = None
    for fact in keys:
        is_fresh = all(loop.path in fact.turns for loop in context.loops)
        record.use("loss", fact, context.line, is_fresh)
        if fact.token is None:
            found = "the key that the loss draws with does not follow from an argument"
            record.note(context, "fresh noise", found, KEY_OF_LOSS, is_decided=False)


KEY_OF_LOSS = (
    "Pass a key and fold a counter of the state into it (jax.random.fold_in(key, step)), or split "
    "it once and return the other half at its place. Use it for nothing else."
)


# Inside of the loss.


class _Value(NamedTuple):
    """Whether private values have reached a value in the loss, and whether its key has."""

    is_private: bool
    is_keyed: bool


_DRAWS = named("random_bits random_wrap random_seed random_unwrap threefry2x32 rng_bit_generator")


class _Doors(Flow[_Value]):
    """Finds where private values leave the loss of an example, and notes what it closes over.

    What a value is made of decides, and nothing else: the engine keeps examples apart by itself.
    """

    nothing = _Value(False, False)

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record

    def constant(self, value: Any) -> _Value:
        self.record.constants += [value] if np.ndim(value) else []
        return self.nothing

    def joined(self, facts: Sequence[_Value]) -> _Value:
        return _Value(any(fact[0] for fact in facts), any(fact[1] for fact in facts))

    def equation(self, context: Context, equation: JaxprEqn, inputs: list[_Value]) -> list[_Value]:
        found = self.joined(inputs)
        if found.is_private and is_door(equation):
            self.record.door(context, equation)
        if equation.primitive.name in _DRAWS and not found.is_keyed:
            what = "the loss draws random numbers with another key than its own"
            self.record.note(context, "fresh noise", what, _OWN_KEY, is_decided=False)
        return [found] * len(equation.outvars)

    def steered(self, context: Context, by: _Value, results: list[_Value]) -> list[_Value]:
        return [self.joined([by, result]) for result in results]

    def holder(self, context: Context, equation: JaxprEqn, inputs: list[_Value]) -> list[_Value]:
        """What stands in a branch or a loop that a private value steers tells of it."""
        held = inside(equation)
        if isinstance(mark_on(equation), NoiseMark):
            what = "noise is added within the loss"
            self.record.note(context, "noise", what, _AFTERWARDS, is_decided=False)
        is_while = isinstance(held, While) and self.joined(inputs).is_private
        is_own = is_while and stage_of(context.scope) != "loss"  # of the engine, over microbatches
        if is_while or (isinstance(held, Cond) and inputs[0].is_private):
            for inner in (one for body in programs_in(equation) for one in equations(body)):
                # Whether a check of what is public stops a run, does not depend on how often it is.
                if inner.primitive.name in DOORS and not (is_own and is_error_if(inner)):
                    self.record.door(context.at(inner), inner)
        return super().holder(context, equation, inputs)


_OWN_KEY = "Let the loss take key=, give filter_clipped_grad a fresh key, and draw with that alone."
_AFTERWARDS = (
    "Add noise to what filter_clipped_grad returns, by a stream that comes in and goes out."
)
