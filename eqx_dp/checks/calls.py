"""A step called again and again: what it makes of what its earlier calls have left."""

import functools
from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import jax.extend.core as jex_core

from ..programs import users_line
from . import numbers, rows
from .arguments import Argument
from .flow import Context
from .freshness import Calls
from .privacy_flow import PrivacyFlow
from .record import Record
from .releases import Noised
from .terms import Affine, Key, Root, Turns
from .values import Path, Private, Public, Sum, Value


class TracedStep(NamedTuple):
    """A traced step, with what is known of its arguments and results.

    Attributes:
        program: the step.
        arguments: its arrays.
        is_private: which of them hold private data.
        names: dotted paths of the results.
        returns: for each result, the arguments that it may be in the next call.
        in_state: whether a result may be part of a state.
    """

    program: jex_core.ClosedJaxpr
    arguments: list[Argument]
    is_private: list[bool]
    names: list[str]
    returns: list[list[int]]
    in_state: list[bool]


class StepCall(NamedTuple):
    """What was found of a call of a step, of which arguments are as earlier calls left them.

    Attributes:
        flow: through the step.
        results: of the call.
        before: the results of the call before.
        keys: what keys among the arguments become.
    """

    flow: PrivacyFlow
    results: list[Value]
    before: list[Value]
    keys: Calls

    @property
    def record(self) -> Record:
        """What was noted on the way."""
        return self.flow.record

    @property
    def releases(self) -> dict[Path, Noised]:
        """Those that leave the step, beside its results too, or that private values hold."""
        values = (*self.results, *(value for value, _ in self.record.shown))
        public = (value.releases for value in values if isinstance(value, Public))
        leaving = self.record.met.union(*public)
        return {path: one for path, one in self.record.releases.items() if path in leaving}

    @property
    def hiding(self) -> set[Path]:
        """The draws of the noise of these."""
        return {draw for release in self.releases.values() for draw in release.draws}


def calls_of(step: TracedStep) -> Iterator[StepCall]:
    """Call after call, until nothing new comes back."""
    back: frozenset[int] = frozenset()
    fixed: frozenset[int] = frozenset()
    counters: dict[Hashable, Turns] = {}
    before: list[Value] | None = None
    while True:
        flow = PrivacyFlow()
        flow.record.counters.update(counters)
        inputs = [
            _input(i, argument, step.is_private[i], i in back, i in fixed)
            for i, argument in enumerate(step.arguments)
        ]
        line_of = functools.partial(users_line, within="check_privacy")
        results = flow.program(step.program, inputs, Context(line_of=line_of))
        keys, now, counting = _next_call(step, inputs, results)
        if now != fixed or counting != counters:
            fixed, counters = now, counting
            continue
        yield StepCall(flow, results, before or results, keys)
        kept = {
            i
            for value, at in zip(results, step.returns, strict=True)
            if isinstance(value, Private | Sum)
            for i in at
            if not step.is_private[i]
        }
        if kept <= back:
            return
        before, back = results, back | kept


def _input(i: int, argument: Argument, is_private: bool, is_back: bool, is_fixed: bool) -> Value:
    if is_private:
        return Private(rows.of_argument(argument.shape))
    if is_back:
        where = f"argument {argument.names[-1]}, from an earlier call"
        return Private(reason="kept", where=where, arguments=frozenset({i}))
    return numbers.argument(argument.names[-1], argument.shape, argument.is_key, not is_fixed)


def _next_call(
    step: TracedStep, inputs: list[Value], results: list[Value]
) -> tuple[Calls, frozenset[int], dict[Hashable, Turns]]:
    """What keys and counters among the arguments are in the next call."""
    after: defaultdict[int, list[Value]] = defaultdict(list)
    for value, at in zip(results, step.returns, strict=True):
        for i in at:
            after[i].append(value)
    steps: dict[Hashable, tuple[Any, ...]] = {}
    fixed, given, counting = set[int](), set[Hashable](), dict[Hashable, Turns]()
    for i, value in enumerate(inputs):
        term = value.term if isinstance(value, Public) else None
        root = term.root if isinstance(term, Key) else term
        if not isinstance(root, Root):
            continue
        if not after[i]:
            given.add(root.name)
            continue
        terms = [new.term if isinstance(new, Public) else None for new in after[i]]
        if all(new == term for new in terms):
            fixed.add(i)
        elif isinstance(terms[0], Affine) and terms[0][:2] == (root, 1):
            counting[root.name] = Turns("calls", None, terms[0].offset, None)
        elif isinstance(terms[0], Key) and terms[0].root.name == root.name:
            steps[root.name] = terms[0].path
    return Calls(steps, frozenset(given)), frozenset(fixed), counting
