"""What is noted on the way through a step: clipped sums, draws, releases, findings."""

from collections.abc import Hashable, Sequence

import jax.extend.core as jex_core

from .doors import said_of
from .flow import Context
from .privacy_report import Finding
from .releases import Drawn, Noised, Source
from .terms import Turns
from .values import Nothing, Path, Private, Public, Random, Sum, Value


class Record:
    """What is found on the way through a step.

    Attributes:
        sources: the clipped sums of the engine's.
        draws: random bits, by where they are drawn.
        of_losses: keys that the engine gives to losses.
        releases: noise that is added to clipped sums, by where.
        counters: numbers that count the turns of loops, and the calls of the step.
        found: what breaks a rule, each once.
        unmasked: lines where the engine is called without a mask.
        models: numbers of arguments that came back private, and that the engine's model holds.
        shown: public and random values that leave the program beside its results, with lines.
        met: releases that private values are made of as well.
        used: draws that private values, or what the engine is given, hold; with the line.
    """

    def __init__(self) -> None:
        self.sources: dict[Hashable, Source] = {}
        self.draws: dict[Path, Drawn] = {}
        self.of_losses: dict[Path, Drawn] = {}
        self.releases: dict[Path, Noised] = {}
        self.counters: dict[Hashable, Turns] = {}
        self.found: dict[Finding, None] = {}
        self.unmasked: dict[str, None] = {}
        self.models: set[int] = set()
        self.shown: list[tuple[Public | Random, str]] = []
        self.met: frozenset[Path] = Nothing
        self.used: dict[Path, str] = {}

    def meet(self, context: Context, inputs: Sequence[Value]) -> None:
        """Notes releases and noise that go on in private values, where they are not followed."""
        if not context.is_final:
            return
        is_sum = not any(isinstance(value, Private) for value in inputs)
        for value in inputs:
            if isinstance(value, Public):
                self.met |= value.releases
                self.used.update(dict.fromkeys(value.noise, context.line))
            elif isinstance(value, Random) and not is_sum:
                self.used.update(dict.fromkeys(value.draws, context.line))

    def note(self, rule: str, found: str, where: str, advice: str, is_decided: bool = True) -> None:
        """Notes what breaks a rule."""
        self.found[Finding(rule, found, where, advice, is_decided)] = None

    def door(
        self, context: Context, equation: jex_core.JaxprEqn, inputs: Sequence[Value] = ()
    ) -> None:
        """Notes what leaves a program beside its results; without operands, that it is private."""
        if not context.is_final:
            return
        for value in inputs:
            if isinstance(value, Public | Random):
                self.shown.append((value, context.line))
        if inputs and not any(isinstance(value, Private | Sum) for value in inputs):
            return
        found, advice = said_of(equation)
        self.note("side door", found, context.line, advice)

    def steered(self, context: Context, what: str) -> None:
        """Notes what private data decides."""
        if context.is_final:
            self.note(
                "side door",
                f"private data decides {what}",
                context.line,
                "How long a step takes, and what it does, then tells of the data. Decide by public "
                "values, or compute both and select (jnp.where) inside the loss; take out checks "
                "(eqx.error_if).",
            )
