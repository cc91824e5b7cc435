"""The record of a walk through a step, and the words of its findings."""

from collections.abc import Hashable
from typing import Any

from jax.extend.core import JaxprEqn

from ..programs import UNSEEN, equations, named, programs_of, written_in
from .facts import Fact, Kind
from .flow import Context
from .privacy_report import Finding, finding
from .streams import Key, Streams, Use
from .sums import Release, Source


class Record:
    """The record of a walk through a step.

    Attributes:
        found: findings, each once.
        sources: clipped sums.
        releases: noise on clipped sums, by place.
        streams: states of streams that were used.
        uses: the uses of keys.
        constants: arrays that the step closes over.
        unmasked: lines of engine calls without a private mask, and whether there is none at all.
        assumed: what was taken for granted, for the notes.
        is_noised_again: whether noise was added to what is a release already.
    """

    def __init__(self) -> None:
        self.found: dict[Finding, None] = {}
        self.sources: dict[Hashable, Source] = {}
        self.releases: dict[Hashable, Release] = {}
        self.streams = Streams()
        self.uses: dict[Use, None] = {}
        self.constants: list[Any] = []
        self.unmasked: dict[str, bool] = {}
        self.assumed: dict[str, None] = {}
        self.is_noised_again = False

    def note(self, context: Context, rule: str, found: str, is_decided: bool = True) -> None:
        """Notes a finding, once what loops carry is settled."""
        if context.is_final:
            self.found[finding(rule, found, context.line, is_decided)] = None

    def use(self, what: str, fact: Fact, line: str, is_fresh: bool = True) -> None:
        """Notes what a key is used for, if a value is one."""
        if isinstance(fact.token, Key):
            self.uses[Use(what, fact.token, line, is_fresh)] = None

    def door(self, context: Context, equation: JaxprEqn, is_decided: bool = True) -> None:
        """Notes a private value at a side door."""
        found = f"a private value goes into '{equation.primitive.name}'"
        found += ", by eqx.error_if" if is_error_if(equation) else ""
        self.note(context, "side door", found, is_decided)


REASONS = {
    "data": "private data is in it",
    "rows": "private data is in it",
    "kept": "private data of an earlier call is in it",
    "secret": "the key of a noise, or noise that is kept, is in it: anyone with that can subtract \
the noise",
    "nonlinear": "a clipped sum is in it, and something nonlinear came before any noise",
    "linear": "a clipped sum is in it, through something of which no bound is known",
    "unknown": "private data is in it, through something of which nothing is known",
    "factor": "a clipped sum is in it, times a number that is no constant of the program",
    "rounded": "a clipped sum is in it that was rounded before any noise",
    "mixed": "it is made of a clipped sum of unknown sensitivity",
    "devices": "it comes from a shard_map by hand: use sharding= of filter_clipped_grad instead",
    "host": "a host function returns it, which may be of any data",
    "loop": "a loop carries a clipped sum, or stacks several",
    "steered": "a private value decides about it",
    "noised": "noise was added to something without a known bound",
}
"""Why a value is private."""

_DECIDED = ("", "data", "rows", "nonlinear", "kept", "secret", "steered")


def is_by_hand(fact: Fact) -> bool:
    """Whether there is noise in it that the check does not know, or that is added in other ways."""
    is_of_sums = fact.reach.reason not in ("data", "rows", "kept", "secret", "steered")
    return fact.reach.is_drawn or (fact.reach.is_noised and is_of_sums)


def is_proven(fact: Fact) -> bool:
    """Whether what leaves is a violation: a clipped sum, or private for a proven reason."""
    is_private = fact.reach.kind is not Kind.PUBLIC and fact.reach.reason in _DECIDED
    return is_private and not is_by_hand(fact)


# Where values leave a program beside its results.

DOORS = UNSEEN | named("debug_callback debug_print swap addupdate")
"""Primitives through which a value leaves the program, or goes where it is not followed."""

_OWN_MEMORY = named("swap addupdate")  # of a kernel


def is_door(equation: JaxprEqn) -> bool:
    """Whether a value leaves through an equation, or through a program that it holds."""
    inner = {one.primitive.name for body in programs_of(equation) for one in equations(body)}
    return equation.primitive.name in DOORS or bool(inner & (DOORS - _OWN_MEMORY))


def is_error_if(equation: JaxprEqn) -> bool:
    """Whether a callback is that of `eqx.error_if`, which returns what it is given."""
    written = written_in(equation)
    return any(lib == "equinox" and file.endswith("_errors.py") for lib, file, _ in written)
