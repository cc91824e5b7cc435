"""Calls of the engine and the noise in a traced step, read from their marks."""

import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from ..gradients import Mark
from ..privacy import NoiseMark
from ..programs import (
    UNSEEN,
    Call,
    Cond,
    While,
    equations,
    inside,
    is_as_marked,
    named,
    programs_of,
    written_in,
)
from .facts import PAST, Fact, Kind, Path, Ref, Term, made_of
from .flow import Context, Flow
from .keys import Key, Number, Use
from .privacy_report import Finding
from .sums import Release, Source

DOORS = UNSEEN | named("debug_callback debug_print swap addupdate")
"""Primitives through which a value leaves the program, or goes where it is not followed."""

_OWN_MEMORY = named("swap addupdate")  # of a kernel


def is_door(equation: JaxprEqn) -> bool:
    """Whether a value leaves through an equation, or through a program that it holds."""
    inner = {one.primitive.name for body in programs_of(equation) for one in equations(body)}
    return equation.primitive.name in DOORS or bool(inner & (DOORS - _OWN_MEMORY))


class Record:
    """The record of a walk through a step.

    Attributes:
        found: findings, each once.
        sources: clipped sums.
        releases: noise on clipped sums.
        uses: the uses of random numbers.
        constants: arrays that the step closes over.
        unmasked: lines of engine calls without a mask.
        is_noised_again: whether noise was added to what is a release already.
    """

    def __init__(self) -> None:
        self.found: dict[Finding, None] = {}
        self.sources: dict[Hashable, Source] = {}
        self.releases: dict[Path, Release] = {}
        self.uses: dict[Path, Use] = {}
        self.constants: list[Any] = []
        self.unmasked: dict[str, None] = {}
        self.is_noised_again = False

    def note(
        self, context: Context, rule: str, found: str, advice: str, is_decided: bool = True
    ) -> None:
        """Notes a finding, once what loops carry is settled."""
        if context.is_final:
            self.found[Finding(rule, found, context.line, advice, is_decided)] = None

    def use(self, context: Context, what: str, key: Key, at: Hashable = 0) -> Path:
        """Notes what a key is used for."""
        path = (*context.path, at)
        if context.is_final:
            self.uses[path] = Use(what, key, context)
        return path

    def door(self, context: Context, equation: JaxprEqn) -> None:
        """Notes a private value at a side door."""
        self.note(context, "side door", *said_of(equation))


_APART = (
    "Let the engine make microbatches, work and draw within the loss of an example, use constants "
    "that are the same for all, and name public arrays with a row for each example in public_rows=."
)


def engine_call(
    record: Record, context: Context, equation: JaxprEqn, mark: Mark, inputs: list[Fact]
) -> list[Fact]:
    """What a call's results are: clipped sums, and values of single examples."""
    count = len(equation.outvars)
    unknown = [_lost(inputs, "mixed", context.line)] * count
    if not is_as_marked(equation) or (len(inputs), count) != (mark.num_operands, mark.num_results):
        found = "the clipped gradient is mapped (vmap) or differentiated"
        advice = "Its sensitivity is only known of a plain call. Loop over calls instead."
        record.note(context, "release", found, advice, is_decided=False)
        return unknown
    end = mark.num_shared + mark.num_batched
    shared, batch = inputs[: mark.num_shared], inputs[mark.num_shared : end]
    keys, mask = inputs[end : end + mark.has_keys], inputs[end + mark.has_keys :]
    is_public = all(fact.is_public for fact in inputs)
    for i, fact in enumerate(inputs):
        if fact.key is not None:
            is_of_slots = not is_public and mark.has_keys and i == end
            record.use(context, "slots" if is_of_slots else "loss", fact.key, i)
    held = inside(equation)
    if context.is_final and isinstance(held, Call):
        _Doors(record).program(held.body, [not fact.is_public for fact in inputs], context)
    if is_public:
        return [made_of(inputs)] * count
    lost = [fact for fact in (*shared, *keys) if not fact.is_public]
    if lost:
        found = "private data is in the model or in the loss's key: noise multiplier unbounded"
        advice = "Add noise to every clipped sum before it reaches anything that the loss reads."
        is_decided = any(fact.reason in ("", *DECIDED) for fact in lost)
        record.note(context, "release", found, advice, is_decided)
        return unknown
    is_masked = any(not fact.is_public for fact in mask)
    own, meet, is_decided = _rows([*batch, *mask], bool(keys), is_masked)
    if own is None or meet:
        record.note(context, "examples apart", meet, _APART, is_decided)
        return unknown
    if not is_masked and context.is_final:
        record.unmasked[context.line] = None
    for group, bound in enumerate(mark.bounds):
        record.sources[context.path, group] = Source(bound, frozenset(own.loops))
        if math.isinf(bound):
            found = "a clipped sum has no finite clip norm: the noise multiplier is unbounded"
            record.note(context, "noise", found, "Set a finite l2_clip_norm.")
    rows = (frozenset({Term(((context.path, g), i), 1.0)}) for i, g in enumerate(mark.groups))
    sums = [Fact(Kind.SUM, rows=(row,), is_exact=True, over=own.axes) for row in rows]
    values = Fact(Kind.PRIVATE, refs=(own,), reason="data", where=context.line)
    return [*sums, *[values] * (count - len(sums))]


def _lost(inputs: list[Fact], reason: str, where: str) -> Fact:
    """Of what a finding tells already."""
    return made_of(inputs)._replace(kind=Kind.PRIVATE, reason=reason, where=where)


def _rows(examples: list[Fact], has_keys: bool, is_masked: bool) -> tuple[Ref | None, str, bool]:
    """Which rows the engine's examples are; else how examples meet, and whether for certain."""
    own: Ref | None = None
    for fact in (fact for fact in examples if 0 not in fact.even):
        ref = fact.refs[0] if fact.refs else None
        if fact.is_public:
            return None, "an array that is not private has other values for other slots", False
        if ref is None or len(ref.loops) != ref.dim:
            return None, "rows are not proven to be apart before filter_clipped_grad clips", False
        if own not in (None, ref):
            return None, "arguments of filter_clipped_grad hold other rows", True
        own = ref
    if own is not None and own.axes and has_keys:
        return None, "slots of several devices draw the same random numbers in the loss", False
    if own is not None and own.dim and not is_masked:
        return None, "which dimension holds examples is not clear without a private mask", False
    return own, "", False


# What a stream folds into its key before its counter: no number that `fold_in` takes.
_STREAM = Number(None, 2**40)


def noise(
    record: Record, context: Context, equation: JaxprEqn, mark: NoiseMark, inputs: list[Fact]
) -> list[Fact]:
    """What noise makes of each leaf: of a clipped sum, a release."""
    size = mark.num_leaves
    leaves, stream, past = inputs[:size], inputs[size : size + 3], inputs[size + 3 :]
    if not size:
        return stream
    count = 2 * size * mark.correlation.kept
    kept = [PAST._replace(past=(*context.path, place)) for place in range(count)]
    is_plain = is_as_marked(equation) and len(equation.outvars) == size + 3 + count == len(inputs)
    is_own = [x.is_public or x.past == (*context.path, i) for i, x in enumerate(past)]
    if not (is_plain and all(is_own) and all(fact.is_public for fact in stream)):
        found = (
            "noise is mapped, is another one on each device, or its stream or state is not its own"
        )
        advice = "Add noise in a plain call, on the sum of all devices; return its state as it is."
        record.note(context, "fresh noise", found, advice, is_decided=False)
        lost = len(equation.outvars) - count
        return [_lost(inputs, "noised", context.line)] * lost + kept
    key, number = stream[0].key or Key(None), stream[1].number
    grown = Fact(number=number and number.plus(1))
    used = record.use(context, "noise", key.folded(_STREAM, number))
    record.is_noised_again |= any(fact.is_public and fact.is_random for fact in leaves)
    found = [
        _in_vain(record, context, mark, fact)
        if fact.kind is Kind.PRIVATE or fact.over
        else Fact(is_random=True)
        for fact in leaves
    ]
    sums = [fact for fact in leaves if fact.kind is Kind.SUM and not fact.over]
    if sums and context.is_final:
        rows = tuple(row for fact in sums for row in fact.rows)
        is_exact = all(fact.is_exact for fact in sums)
        batches = {record.sources[term.leaf[0]].loops for row in rows for term in row}
        loops = batches.pop() if len(batches) == 1 else frozenset[Hashable]()
        record.releases[used] = Release(
            rows, mark.stddev, mark.correlation, is_exact, loops, context, mark.is_certified
        )
    return [*found, Fact(key=stream[0].key), grown, Fact(), *kept]


def _in_vain(record: Record, context: Context, mark: NoiseMark, fact: Fact) -> Fact:
    """Noise on what has no known bound."""
    is_unbounded = fact.reason == "nonlinear"
    bound = "unbounded" if is_unbounded else "not known"
    found = (
        f"noise of standard deviation {mark.stddev:.4g} was added, but the noise multiplier is "
        f"{bound}: {REASONS[fact.reason or 'devices']}"
    )
    found += f" (at {fact.where})" if fact.where not in ("", context.line) else ""
    advice = "Add the noise to what filter_clipped_grad returns, before all other arithmetic."
    record.note(context, "noise", found, advice, is_unbounded)
    return _lost([fact], "noised", context.line)


REASONS = {
    "data": "private data is in it",
    "rows": "private data is in it",
    "kept": "private data of an earlier call is in it",
    "past": "noise that a privatizer keeps is in it: anyone with that can subtract the noise",
    "nonlinear": "a clipped sum is in it, and something nonlinear came before any noise",
    "linear": "a clipped sum is in it, through something of which no bound is known",
    "unknown": "private data is in it, through something of which nothing is known",
    "factor": "a clipped sum is in it, times a number that is no constant of the program",
    "rounded": "a clipped sum is in it that was rounded before any noise",
    "mixed": "it is made of a clipped sum of unknown sensitivity",
    "devices": "it may be another value on each device, or sums of devices that are not added up",
    "host": "a host function returns it, which may be of any data",
    "loop": "a loop carries a clipped sum, or stacks several",
    "steered": "a private value decides about it",
    "noised": "noise was added to something without a known bound",
}
"""Why a value is private."""

DECIDED = ("data", "rows", "nonlinear", "kept", "past", "steered")
"""Reasons for which what leaves is a violation."""


# Where values leave a program beside its results.


def said_of(equation: JaxprEqn) -> tuple[str, str]:
    """What a private value does at a door, and what to do."""
    found = f"a private value goes into '{equation.primitive.name}'"
    if is_error_if(equation):
        return f"{found}, by eqx.error_if", (
            "Whether a run stops tells of the data. Take the check out. A solver of diffrax, "
            "lineax or optimistix takes throw=False; or set EQX_ON_ERROR=off in the environment."
        )
    return found, (
        "What a host function or a print sees is seen without noise. Take it out, or give it "
        "public values alone."
    )


def is_error_if(equation: JaxprEqn) -> bool:
    """Whether a callback is that of `eqx.error_if`, which returns what it is given."""
    written = written_in(equation)
    return any(lib == "equinox" and file.endswith("_errors.py") for lib, file, _ in written)


class _Doors(Flow[bool]):
    """Finds where private values leave the loss of an example, and notes what it closes over.

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

    def equation(self, context: Context, equation: JaxprEqn, inputs: list[bool]) -> list[bool]:
        if any(inputs) and is_door(equation):
            self.record.door(context, equation)
        return [any(inputs)] * len(equation.outvars)

    def steered(self, context: Context, by: bool, results: list[bool]) -> list[bool]:
        return [by or result for result in results]

    def holder(self, context: Context, equation: JaxprEqn, inputs: list[bool]) -> list[bool]:
        """What stands in a branch or a loop that a private value steers tells of it."""
        held = inside(equation)
        if (isinstance(held, Cond) and inputs[0]) or (isinstance(held, While) and any(inputs)):
            is_loop = isinstance(held, While)
            for inner in (one for body in programs_of(equation) for one in equations(body)):
                # A solver's check of what is public stops a run or does not, however often.
                if inner.primitive.name in DOORS and not (is_loop and is_error_if(inner)):
                    self.record.door(context.at(inner), inner)
        return super().holder(context, equation, inputs)
