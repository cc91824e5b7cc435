"""Calls of the engine and the noise in a traced step, as their marks tell of them."""

import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax.extend.core as jex_core
import numpy as np

from ..gradients import Mark
from ..privacy import NoiseMark
from ..programs import UNSEEN, Call, Cond, While, equations, inside, is_as_marked, named, written_in
from .facts import Fact, Kind, Path, Ref, Term, made_of, union
from .flow import Context, Flow
from .keys import Key, Number, Use
from .privacy_report import Finding
from .rows import outer
from .sums import Release, Source

DOORS = UNSEEN | named("debug_callback debug_print swap addupdate")
"""Primitives by which a value leaves a program, or goes where it is not followed."""


class Record:
    """What is noted on the way through a step.

    Attributes:
        found: findings, each once.
        sources: clipped sums.
        releases: noise on clipped sums.
        uses: what random numbers are drawn for.
        noises: of these, the noise: with the words of its leaves where they are in the key.
        slots: draws that examples meet slot by slot.
        constants: arrays that the step closes over.
        shown: public values that go through a side door.
        unmasked: lines of engine calls without a mask.
        is_noised_again: whether noise was added to what is a release already.
    """

    def __init__(self) -> None:
        self.found: dict[Finding, None] = {}
        self.sources: dict[Hashable, Source] = {}
        self.releases: dict[Path, Release] = {}
        self.uses: dict[Path, Use] = {}
        self.noises: dict[Path, frozenset[Any]] = {}
        self.slots: dict[Path, str] = {}
        self.shown: list[tuple[Fact, str]] = []
        self.constants: list[Any] = []
        self.unmasked: dict[str, None] = {}
        self.is_noised_again = False

    def note(
        self,
        context: Context,
        rule: str,
        found: str,
        advice: str,
        is_decided: bool = True,
        where: str = "",
    ) -> None:
        """Notes a finding, once what loops carry is settled."""
        if context.is_final:
            self.found[Finding(rule, found, where or context.line, advice, is_decided)] = None

    def use(self, context: Context, what: str, fact: Fact, at: Hashable = 0) -> Path:
        """Notes what a key is used for."""
        path = (*context.path, at)
        if context.is_final:
            self.uses[path] = Use(what, fact.key or Key(None), context)
        return path

    def door(self, context: Context, equation: jex_core.JaxprEqn) -> None:
        """Notes a private value at a side door."""
        found, advice = said_of(equation)
        self.note(context, "side door", found, advice)


_APART = (
    "What one example adds to the clipped sum must depend on that example alone, and count once. "
    "Let the engine make microbatches, work within the example, use constants that are the same "
    "for all, and name public arrays with a row for each example in public_rows=."
)


def engine_call(
    record: Record, context: Context, equation: jex_core.JaxprEqn, mark: Mark, inputs: list[Fact]
) -> list[Fact]:
    """What a call's results are: clipped sums, and values of single examples."""
    count, line = len(equation.outvars), context.line
    unknown = [_lost(inputs, "mixed", line)] * count
    if not is_as_marked(equation) or (len(inputs), count) != (mark.num_operands, mark.num_results):
        found = "the clipped gradient is mapped (vmap) or differentiated"
        advice = "Its sensitivity is only known of a plain call. Loop over calls instead."
        record.note(context, "release", found, advice, is_decided=False)
        return unknown
    end = mark.num_shared + mark.num_batched
    shared, batch = inputs[: mark.num_shared], inputs[mark.num_shared : end]
    keys, mask = inputs[end : end + mark.has_keys], inputs[end + mark.has_keys :]
    for i, fact in enumerate((*keys, *(x for x in (*shared, *batch) if x.key))):
        record.use(context, "loss", fact, i)
    _leaves_the_loss(record, context, equation, inputs)
    examples = [*batch, *mask]
    if all(fact.is_public for fact in inputs):
        return [made_of(inputs)] * count
    if any(not fact.is_public for fact in (*shared, *keys)):
        found = (
            "the model that is differentiated, or the loss's key, is not released: private data is "
            "in it without noise, so the noise multiplier of its clipped sum is unbounded"
        )
        advice = "Add noise to every clipped sum before it reaches anything that the loss reads."
        record.note(context, "release", found, advice)
        return unknown
    own = _rows(record, context, examples)
    if own is None:
        return unknown
    if all(fact.is_public for fact in mask) and context.is_final:  # of no mask as well
        record.unmasked[line] = None
    private = [fact for fact in examples if not fact.is_public]
    public = [*shared, *(fact for fact in examples if fact.is_public), *keys]
    cuts = union(outer(fact.cuts, own) for fact in private)
    over = union(cut.where for cut in cuts if cut.how == "devices")
    varies = union(fact.varies for fact in public)
    alike = [fact for fact in examples if any(one.dim == 0 for one in fact.alike)]
    slots = {one.draw: one.of for fact in examples for one in fact.alike if one.dim == 0}
    record.slots |= dict.fromkeys(slots, line)
    others = union(
        fact.draws - {one.draw for one in fact.alike if one.dim == 0}
        for fact in (*shared, *examples)
    )
    if slots.keys() & others or (over and (over & varies or keys or alike)):
        found = "random numbers of slots meet others, or devices have models or draws of their own"
        record.note(context, "examples apart", found, _APART, is_decided=False)
        return unknown
    samples = frozenset(cut for cut in cuts if cut.ref.dim < own.dim)
    if samples and all(fact.is_public for fact in mask):
        found = "it is not clear which dimension of the arguments holds the examples"
        advice = (
            "Give the mask of each batch, of the shape (batches, slots), as a private argument."
        )
        record.note(context, "examples apart", found, advice, is_decided=False)
    for group, bound in enumerate(mark.bounds):
        record.sources[context.path, group] = Source(bound, samples)
        if math.isinf(bound):
            found = "a clipped sum has no finite clip norm: the noise multiplier is unbounded"
            record.note(context, "noise", found, "Set a finite l2_clip_norm.")
    common = Fact(
        varies=union(fact.varies for fact in inputs),
        draws=union(fact.draws for fact in public if fact not in alike),
        releases=union(fact.releases for fact in public),
    )
    sums = [
        common._replace(
            kind=Kind.SUM,
            rows=(frozenset({Term(((context.path, group), leaf), 1.0)}),),
            over=over,
        )
        for leaf, group in enumerate(mark.groups)
    ]
    values = common._replace(kind=Kind.PRIVATE, refs=(own,), cuts=cuts, reason="data", where=line)
    return [*sums, *[values] * (count - len(sums))]


def _lost(inputs: list[Fact], reason: str, where: str) -> Fact:
    """Of what a finding tells already."""
    return made_of(inputs)._replace(kind=Kind.PRIVATE, reason=reason, where=where)


def _rows(record: Record, context: Context, examples: list[Fact]) -> Ref | None:
    """Which rows the engine's examples are; None, and a finding, where they are not apart."""
    own: Any = None
    for fact in examples:
        if fact.is_public and (0 in fact.even or any(one.dim == 0 for one in fact.alike)):
            continue
        ref = fact.refs[0] if fact.refs else None
        rows = None if ref is None or not _is_of_rows(fact, ref) else (ref, outer(fact.cuts, ref))
        if rows is not None and own in (None, rows):
            own = rows
            continue
        if fact.constant is not None:
            found = "examples are constants of the program, and other ones in other slots"
        elif fact.is_public:
            found = "an array that is not private has other values for other slots of the batch"
        elif rows is not None:
            found = "arguments of filter_clipped_grad hold other rows"
        else:
            found = "rows of the data are not proven to be apart before filter_clipped_grad clips"
        record.note(context, "examples apart", found, _APART, rows is not None, fact.where)
        return None
    return own and own[0]


def _is_of_rows(fact: Fact, ref: Ref) -> bool:
    """Whether entries along a dimension are rows of the arguments, or of one of several batches."""
    cuts = outer(fact.cuts, ref)
    before = {cut.ref.dim for cut in cuts if cut.ref.dim < ref.dim and cut.how != "devices"}
    return len(before) == ref.dim


_PLAINLY = "Add noise in a plain call, on the sum of all devices, with a key that is secret."


def noise(
    record: Record,
    context: Context,
    equation: jex_core.JaxprEqn,
    mark: NoiseMark,
    inputs: list[Fact],
) -> list[Fact]:
    """What noise makes of each leaf: of a clipped sum, a release."""
    leaves, rest = inputs[: len(mark.leaves)], inputs[len(mark.leaves) :]
    if not mark.leaves:
        return []
    if mark.stddev == 0:
        return leaves
    is_plain = is_as_marked(equation) and len(rest) == 1 + mark.has_step
    if not is_plain or any(not fact.is_public or fact.varies & context.axes for fact in rest):
        found = "noise is mapped (vmap), is another one on each device, or has a private key"
        record.note(context, "fresh noise", found, _PLAINLY, is_decided=False)
        return [_lost(inputs, "noised", context.line)] * len(equation.outvars)
    key = rest[0].key or Key(None)
    if mark.has_step:  # else the key must be for nothing else, and counts as it is
        key = key.folded(*(Number(None, word) for word in mark.prefix), rest[1].number)
    used = record.use(context, "noise", Fact(key=key))
    if context.is_final:
        record.noises[used] = frozenset(mark.leaves if mark.has_step else ())
    drawn = made_of(rest)._replace(draws=frozenset({used}))
    rows = list[Any]()
    results = list[Fact]()
    for fact in leaves:
        if fact.kind is Kind.PRIVATE or fact.over:
            results.append(_in_vain(record, context, mark, fact))
            continue
        made = made_of([fact._replace(kind=Kind.PUBLIC), drawn])
        record.is_noised_again |= bool(fact.releases and fact.is_public)
        if fact.kind is Kind.SUM:
            rows += fact.rows
            made = made._replace(releases=made.releases | {used}, draws=fact.draws, is_noised=False)
        results.append(made)
    if rows and context.is_final:
        record.releases[used] = Release(tuple(rows), mark.stddev, context)
    return results


def _in_vain(record: Record, context: Context, mark: NoiseMark, fact: Fact) -> Fact:
    """Noise on what has no known bound."""
    is_unbounded = fact.kind is Kind.PRIVATE and fact.reason == "nonlinear"
    bound = "unbounded" if is_unbounded else "not known"
    found = (
        f"noise of standard deviation {mark.stddev:.4g} was added, but the noise multiplier is "
        f"{bound}: {REASONS.get(fact.reason, 'the sums of devices are not added up')}"
    )
    found += f" (at {fact.where})" if fact.where not in ("", context.line) else ""
    advice = "Add the noise to what filter_clipped_grad returns, before all other arithmetic."
    record.note(context, "noise", found, advice, is_unbounded)
    return _lost([fact], "noised", context.line)


REASONS = {
    "data": "private data is in it",
    "rows": "private data is in it",
    "kept": "private data of an earlier call is in it",
    "nonlinear": "a clipped sum is in it, and something nonlinear came before any noise",
    "linear": "a clipped sum is in it, through something of which no bound is known",
    "unknown": "private data is in it, through something of which nothing is known",
    "factor": "a clipped sum is in it, times a number that is no constant of the program",
    "rounded": "a clipped sum is in it that was rounded before any noise",
    "mixed": "it is made of a clipped sum of unknown sensitivity",
    "devices": "sums of several devices are in it that are not proven to be parts of one sum",
    "loop": "a loop carries a clipped sum that does not grow by the same in each turn",
    "steered": "a private value decides about it",
    "noised": "noise was added to something without a known bound",
}
"""Why a value is private."""


# Where values leave a program beside its results.


def said_of(equation: jex_core.JaxprEqn) -> tuple[str, str]:
    """What a private value does at a door, and what to do."""
    found = f"a private value goes into '{equation.primitive.name}'"
    is_check = any(
        library == "equinox" and file.endswith("_errors.py")
        for library, file, _ in written_in(equation)
    )
    if is_check:
        return f"{found}, by eqx.error_if", (
            "Whether a run stops tells of the data. Take the check out. A solver of diffrax, "
            "lineax or optimistix takes throw=False: an example whose loss is not finite then adds "
            "zero. Else set the environment variable EQX_ON_ERROR=off."
        )
    return found, (
        "What a host function or a print sees is seen without noise. Take it out, or give it "
        "public values alone."
    )


def _leaves_the_loss(
    record: Record, context: Context, equation: jex_core.JaxprEqn, inputs: list[Fact]
) -> None:
    held = inside(equation)
    if context.is_final and isinstance(held, Call):
        _Doors(record).program(held.body, [not fact.is_public for fact in inputs], context)


class _Doors(Flow[bool]):
    """Finds where private values leave the loss of an example; of others it is told nothing.

    What a value is made of decides, and nothing else: the engine keeps examples apart by itself.
    """

    nothing = False

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record

    def constant(self, value: Any) -> bool:
        self.record.constants += [value] if np.ndim(value) else []
        return False

    def joined(self, facts: Sequence[bool]) -> bool:
        return any(facts)

    def equation(
        self, context: Context, equation: jex_core.JaxprEqn, inputs: list[bool]
    ) -> list[bool]:
        if equation.primitive.name in DOORS and any(inputs) and context.is_final:
            self.record.door(context, equation)
        return [any(inputs)] * len(equation.outvars)

    def holder(
        self, context: Context, equation: jex_core.JaxprEqn, inputs: list[bool]
    ) -> list[bool]:
        """What stands in a branch that a private value chooses tells of it."""
        match inside(equation):
            case Cond() as cond if inputs[0]:
                for branch in cond.branches:
                    for inner in equations(branch):
                        if inner.primitive.name in DOORS and context.is_final:
                            self.record.door(context.at(inner), inner)
                return [True] * len(equation.outvars)
            case While():
                results = super().holder(context, equation, inputs)
                return [any(inputs) or result for result in results]
            case _:
                return super().holder(context, equation, inputs)
