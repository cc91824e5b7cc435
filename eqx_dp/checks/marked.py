"""Calls of the engine and noise in a traced step, read from their marks."""

import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from ..gradients import Mark
from ..privacy import NoiseMark
from ..programs import Context, is_as_marked, mark_on, named, programs_of
from .facts import ANY, CONSTANT, DATA, EVEN, Fact, Reach, Row, Sum, Term, met, private, turns_of
from .record import DOORS, OWN_MEMORY, Record
from .roles import MASK
from .streams import PAST, Given, Key, loops_of, state_of
from .sums import Release, Source
from .variables import dtype_of, shape_of, size_of


def engine_call(
    record: Record, context: Context, equation: JaxprEqn, mark: Mark, inputs: list[Fact]
) -> list[Fact]:
    """What a call's results are: clipped sums, and values of single examples."""
    count, line = len(equation.outvars), context.line
    unknown = [private("a clipped sum of unknown sensitivity is in it", line)] * count
    end = mark.num_shared + mark.num_batched
    models = models_of(equation, slice(mark.num_shared, end))
    if models is None or (len(inputs), count) != (mark.num_operands, mark.num_results):
        found = "the clipped gradient is mapped over more than whole models, or differentiated"
        record.note(context, "release", found)
        return unknown
    shared, batch = inputs[: mark.num_shared], inputs[mark.num_shared : end]
    keys, mask = inputs[end : end + mark.has_keys], inputs[end + mark.has_keys :]
    if context.is_final:
        _look_inside(record, context, equation)
        dtypes = map(dtype_of, equation.invars[: mark.num_shared])
        if any(jnp.issubdtype(dtype, jax.dtypes.prng_key) for dtype in dtypes):
            record.note(context, "fresh noise", _OTHER_KEY)
    if all(fact.is_public for fact in inputs):
        return [Fact(turns=turns_of(inputs))] * count
    record.trained |= {fact.token.root for fact in shared if isinstance(fact.token, Given)}
    lost = [fact for fact in (*shared, *keys) if not fact.is_public]
    if lost:
        found = "private data is in the model or in the loss's key: noise multiplier unbounded"
        record.note(context, "release", found, any(fact.is_proven for fact in lost))
        return unknown
    if models > 1 and mask and shape_of(equation.invars[-1]) != (mark.num_examples,):
        return unknown
    own = _rows_of(shared, batch, mask)
    if isinstance(own, str):
        record.note(context, "examples apart", own)
        return unknown
    if context.is_final:
        _note_arguments(record, context, own, keys, mask)
    over = own.turns[-1] if own.part else None
    batches = frozenset[Hashable](own.turns[:1] if own.dim == 1 else ())
    for group, bound in enumerate(mark.bounds):
        record.sources[context.path, group] = Source(bound, batches, mark.unit, line)
    gain = math.sqrt(models)  # side by side
    terms = (Term(((context.path, g), i), gain) for i, g in enumerate(mark.groups))
    sums = [Fact(sum=Sum((term,), over)) for term in terms]
    return [*sums, *[private(DATA, line, True)] * (count - len(sums))]


def models_of(equation: JaxprEqn, alike: slice = slice(0)) -> int | None:
    """Over how many models a marked equation is mapped; 1 if it is not, None if that is unclear.

    The operands in `alike` must be the same for all. The first result is an array like the first
    operand: it has one for each model.
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
    count = counts.pop() if len(counts) == 1 and is_plain else 0
    return count if size_of(equation.outvars[0]) == count * math.prod(before[0]) else None


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
    if not isinstance(own, Row):
        return "no argument of filter_clipped_grad is private but its mask"
    for fact in (fact for fact in mask if not fact.is_public):
        if fact.token != MASK or met([own, fact.places[0]]) != own:
            return "the mask is not proven to be that of the step's arguments, or of the same rows"
    if own.part and any(own.turns[-1] in fact.turns for fact in (*shared, *batch, *mask)):
        return "microbatches of one batch meet other values in each turn of a loop"
    if any({*own.turns} & fact.turns for fact in (*batch, *mask) if not fact.is_public):
        return "a batch may be that of another turn of the loop, too"
    return own


def _note_arguments(
    record: Record, context: Context, own: Row, keys: Sequence[Fact], mask: Sequence[Fact]
) -> None:
    """Notes a missing mask, and what an index is assumed to be; uses of keys."""
    if not mask or mask[0].is_public:
        record.unmasked[context.line] = not mask
    if own.chosen_by not in ("", ANY):
        assumed = f"entries of {own.chosen_by} are different rows, except those of padding"
        record.assumed[assumed] = None
    for fact in keys:
        record.use(fact, context.line, of_loss=context.path)
        is_fresh = all(loop.path in fact.turns for loop in context.loops)
        if not isinstance(fact.token, Key) or not is_fresh:
            found = "the loss's key does not follow from an argument, or is the same in each turn"
            record.note(context, "fresh noise", found)


# Inside of the loss.

_OTHER_KEYS = named("random_wrap random_seed threefry2x32 rng_bit_generator rng_uniform")


_OTHER_KEY = "the loss draws random numbers with another key than its own"


def _look_inside(record: Record, context: Context, equation: JaxprEqn) -> None:
    """Finds where values leave the loss of an example, and keys that examples share.

    The engine keeps examples apart by itself. At a door, also a public value tells of an example
    that steers a loop or a branch.
    """
    for held in jax.tree.leaves([*equation.params.values()]):
        for value in getattr(held, "consts", ()):
            record.constants += [value] if np.ndim(value) else []
            if jnp.issubdtype(jnp.result_type(value), jax.dtypes.prng_key):
                record.note(context, "fresh noise", _OTHER_KEY)
    for one in (one for body in programs_of(equation) for one in body.eqns):
        at = context.at(one)
        if one.primitive.name in DOORS - OWN_MEMORY:
            record.door(at, one)
        if one.primitive.name in _OTHER_KEYS:
            record.note(at, "fresh noise", _OTHER_KEY)
        if isinstance(mark_on(one), NoiseMark):
            record.note(at, "noise", "noise is added within the loss")
        _look_inside(record, at, one)


# Noise.


def noise(
    record: Record, context: Context, equation: JaxprEqn, mark: NoiseMark, inputs: list[Fact]
) -> list[Fact]:
    """What noise makes of each leaf, and of the stream: of a clipped sum, a release."""
    size = mark.num_leaves
    leaves, state = inputs[:size], inputs[size:]
    count = PAST + 2 * size * mark.correlation.kept
    stream = state_of([fact.token for fact in state], count)
    is_plain = len(state) == count == len(equation.outvars) - size
    is_plain = is_plain and models_of(equation) is not None and not context.is_choice
    is_plain = is_plain and not _is_repeated(equation, leaves)
    if not size:
        return state
    if stream is None or not is_plain:
        is_constant = bool(state) and state[0].token == CONSTANT
        found = "noise in a branch, mapped over streams alone, or not of an argument's stream"
        found += ": its key is a constant, the same in each call" * is_constant
        record.note(context, "fresh noise", found, is_constant)
        return [_unbounded(context)] * len(equation.outvars)
    record.draw(context, stream)
    sums = [fact.sum for fact in leaves if fact.sum and not fact.sum.over]
    is_bounded = [fact.is_public or fact.sum in sums for fact in leaves]
    released = Fact(Reach(is_random=True), turns=frozenset(loops_of(context)))
    noisy = [released if is_so else _unbounded(context) for is_so in is_bounded]
    if sums and context.is_final:
        batches = {record.sources[term.leaf[0]].batches for one in sums for term in one.terms}
        own = batches.pop() if len(batches) == 1 else frozenset[Any]()
        release = Release(tuple(sums), mark.stddev, mark.correlation, own, context)
        record.releases[context.path] = release
    after = stream._replace(at=context.path, loops=loops_of(context))
    return [*noisy, *(Fact(token=after._replace(part=part)) for part in range(count))]


def _is_repeated(equation: JaxprEqn, leaves: Sequence[Fact]) -> bool:
    """Whether one clipped sum gets several noises, of a stack of streams."""
    before = equation.params["name"].shapes
    own = zip(leaves, equation.invars, before, strict=False)
    is_one = any(fact.sum and shape_of(variable) == shape for fact, variable, shape in own)
    return is_one and not is_as_marked(equation)


def _unbounded(context: Context) -> Fact:
    """Something without a known bound, with noise."""
    why = "noise was added to something without a known bound"
    return Fact(Reach(why, context.line, is_random=True))
