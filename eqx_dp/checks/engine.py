"""Calls of the engine in a traced step, read from their marks."""

import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from ..gradients import Mark
from ..privacy import NoiseMark
from ..programs import Call, inside, is_as_marked, mark_on, named
from .facts import EVEN, Fact, Kind, Reach, Row, Sum, Term, met, private
from .flow import Context, Flow, dtype_of, shape_of
from .record import Record, is_door, is_proven
from .roles import MASK
from .sums import Source


def engine_call(
    record: Record, context: Context, equation: JaxprEqn, mark: Mark, inputs: list[Fact]
) -> list[Fact]:
    """What a call's results are: clipped sums, and values of single examples."""
    count, line = len(equation.outvars), context.line
    unknown = [private("mixed", line)] * count
    end = mark.num_shared + mark.num_batched
    models = models_of(equation, slice(mark.num_shared, end))
    if models is None or (len(inputs), count) != (mark.num_operands, mark.num_results):
        found = "the clipped gradient is mapped over more than whole models, or differentiated"
        record.note(context, "release", found, is_decided=False)
        return unknown
    shared, batch = inputs[: mark.num_shared], inputs[mark.num_shared : end]
    keys, mask = inputs[end : end + mark.has_keys], inputs[end + mark.has_keys :]
    held = inside(equation)
    if context.is_final and isinstance(held, Call):
        _Loss(record, context).program(held.body, [not fact.is_public for fact in inputs], context)
        for variable in equation.invars[: mark.num_shared]:
            _check_key(record, context, dtype_of(variable))
    if all(fact.is_public for fact in inputs):
        return [Fact()] * count
    if models > 1 and mask and shape_of(equation.invars[-1]) != (mark.num_examples,):
        return unknown
    lost = [fact for fact in (*shared, *keys) if not fact.is_public]
    if lost:
        found = "private data is in the model or in the loss's key: noise multiplier unbounded"
        record.note(context, "release", found, any(map(is_proven, lost)))
        return unknown
    own = _rows_of(shared, batch, mask)
    if isinstance(own, str):
        record.note(context, "examples apart", own, is_decided=False)
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
            record.note(context, "noise", found)
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


def _rows_of(shared: Sequence[Fact], batch: Sequence[Fact], mask: Sequence[Fact]) -> Row | str:
    """Which rows the engine's examples are, or what of it is not proven."""
    for fact in (*batch, *mask):
        place = fact.places[0] if fact.places else None
        if fact.is_public and place != EVEN:
            return "an array that is not private has other values for other slots"
        if not fact.is_public and (not isinstance(place, Row) or not place.is_one_dimension):
            return "rows are not proven to be apart before filter_clipped_grad clips"
    examples = [fact.places[0] for fact in batch if not fact.is_public]
    if len({*examples}) > 1:
        return "arguments of filter_clipped_grad hold other rows"
    own = met(examples)
    for fact in mask:
        kind, *who = fact.role or ("",)
        place = fact.places[0]
        if kind == "negative" and isinstance(own, Row) and isinstance(place, Row):
            place = place._replace(chosen_by=who[0])
        elif kind != "mask" and not fact.is_public:
            return "the mask is not proven to be that of the step's arguments"
        own = met([own, place])
    if not isinstance(own, Row):
        return "the mask is one of other rows"
    if own.part and any(own.turns[-1] in fact.turns for fact in (*shared, *batch, *mask)):
        return "microbatches of one batch meet other values in each turn of a loop"
    return own


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
            record.note(context, "fresh noise", found, is_decided=False)


# Inside of the loss.

_OTHER_KEYS = named("random_wrap random_seed threefry2x32 rng_bit_generator rng_uniform")


class _Loss(Flow[bool]):
    """Finds where values leave the loss of an example, and notes what it closes over.

    A fact is whether private values have reached a value. The engine keeps examples apart by
    itself. At a door, also a public value tells of an example that steers a loop or a branch.
    """

    nothing = False

    def __init__(self, record: Record, context: Context) -> None:
        super().__init__()
        self.record, self.context = record, context

    def constant(self, value: Any) -> bool:
        self.record.constants += [value] if np.ndim(value) else []
        _check_key(self.record, self.context, getattr(value, "dtype", None))
        return False

    def joined(self, facts: Sequence[bool]) -> bool:
        return any(facts)

    def equation(self, context: Context, equation: JaxprEqn, inputs: list[bool]) -> list[bool]:
        if is_door(equation):
            self.record.door(context, equation, any(inputs))
        if equation.primitive.name in _OTHER_KEYS:
            self.record.note(context, "fresh noise", _OTHER_KEY, is_decided=False)
        return [any(inputs)] * len(equation.outvars)

    def steered(self, context: Context, by: bool, results: list[bool]) -> list[bool]:
        return [by or result for result in results]

    def holder(self, context: Context, equation: JaxprEqn, inputs: list[bool]) -> list[bool]:
        if isinstance(mark_on(equation), NoiseMark):
            self.record.note(context, "noise", "noise is added within the loss", is_decided=False)
        return super().holder(context, equation, inputs)


_OTHER_KEY = "the loss draws random numbers with another key than its own"


def _check_key(record: Record, context: Context, dtype: Any) -> None:
    """Notes a key that all examples share."""
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        record.note(context, "fresh noise", _OTHER_KEY, is_decided=False)
