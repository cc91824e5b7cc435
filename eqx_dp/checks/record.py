"""The record of a walk through a step."""

from collections.abc import Hashable, Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from ..programs import UNSEEN, Context, equations, named, programs_of, written_in
from .arguments import Argument
from .facts import Fact
from .privacy_report import ADVICE, Finding
from .streams import Key, Stream, Use, loops_of
from .sums import Release, Source


class Record:
    """The record of a walk through a step.

    Attributes:
        arguments: the step's arrays.
        found: findings, each once.
        sources: clipped sums.
        releases: noise on clipped sums, by place.
        drawn: states of streams that gave a noise, or that a loop took on: where, and the line.
        uses: the uses of keys.
        trained: arguments that are part of a model.
        constants: arrays that the step closes over.
        unmasked: lines of engine calls without a private mask, and whether there is none at all.
        assumed: what was taken for granted, for the notes.
    """

    def __init__(self, arguments: Sequence[Argument]) -> None:
        self.arguments = arguments
        self.found: dict[Finding, None] = {}
        self.sources: dict[Hashable, Source] = {}
        self.releases: dict[Hashable, Release] = {}
        self.drawn: dict[tuple[int, Hashable], tuple[Hashable, str]] = {}
        self.uses: dict[Use, None] = {}
        self.trained: set[int] = set()
        self.constants: list[Any] = []
        self.unmasked: dict[str, bool] = {}
        self.assumed: dict[str, None] = {}

    def note(self, context: Context, rule: str, found: str, is_decided: bool = False) -> None:
        """Notes a finding, once what loops carry is settled."""
        if context.is_final:
            self.add(rule, found, context.line, is_decided)

    def add(self, rule: str, found: str, where: str, is_decided: bool = False) -> None:
        """Notes a finding, with what to do."""
        self.found[Finding(rule, found, where, ADVICE[rule], is_decided)] = None

    def door(self, context: Context, equation: JaxprEqn, is_decided: bool = False) -> None:
        """Notes a private value at a side door."""
        found = f"a private value goes into '{equation.primitive.name}'"
        found += ", by eqx.error_if" if is_error_if(equation) else ""
        self.note(context, "side door", found, is_decided)

    def draw(self, context: Context, token: Stream) -> None:
        """Notes that noise, or a loop, uses a state of a stream up."""
        state = token.root, token.at
        path, line = self.drawn.setdefault(state, (context.path, context.line))
        if path != context.path or loops_of(context) != token.loops:
            found = f"one state of a stream gives this noise and that at {line}, in another turn "
            self.note(context, "fresh noise", f"{found}or place", True)

    def use(self, fact: Fact, line: str, of_loss: Hashable = None) -> None:
        """Notes a use of a key, if a value is one."""
        if isinstance(fact.token, Key):
            self.uses[Use(fact.token, fact.turns, line, of_loss)] = None


# Where values leave a program beside its results.

DOORS = UNSEEN | named("debug_callback debug_print swap addupdate")
"""Primitives through which a value leaves the program, or goes where it is not followed."""

OWN_MEMORY = named("swap addupdate")  # of a kernel


def is_door(equation: JaxprEqn) -> bool:
    """Whether a value leaves through an equation, or through a program that it holds."""
    inner = {one.primitive.name for body in programs_of(equation) for one in equations(body)}
    return equation.primitive.name in DOORS or bool(inner & (DOORS - OWN_MEMORY))


def is_error_if(equation: JaxprEqn) -> bool:
    """Whether a callback is that of `eqx.error_if`, which returns what it is given."""
    written = written_in(equation)
    return any(lib == "equinox" and file.endswith("_errors.py") for lib, file, _ in written)
