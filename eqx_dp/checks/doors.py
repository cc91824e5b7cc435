"""Where values leave a program beside its results: host functions, prints, errors."""

from collections.abc import Callable, Sequence

import jax.extend.core as jex_core

from ..programs import UNSEEN, Cond, While, equations, inside, named, written_in
from .flow import Context, Flow

DOORS = UNSEEN | named("debug_callback debug_print swap addupdate")
"""Primitives by which a value leaves a program, or goes where it is not followed."""


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


class Doors(Flow[bool]):
    """Finds where private values leave the loss of an example; of others it is told nothing.

    What a value is made of decides, and nothing else: the engine keeps examples apart by itself.

    Attributes:
        found: is called with the context and the equation of each.
    """

    nothing = False

    def __init__(self, found: Callable[[Context, jex_core.JaxprEqn], None]):
        super().__init__()
        self.found = found

    def joined(self, facts: Sequence[bool]) -> bool:
        """Whether any is private."""
        return any(facts)

    def equation(
        self, context: Context, equation: jex_core.JaxprEqn, inputs: list[bool]
    ) -> list[bool]:
        """Whether results are private: if an operand is."""
        if equation.primitive.name in DOORS and any(inputs) and context.is_final:
            self.found(context, equation)
        return [any(inputs)] * len(equation.outvars)

    def holder(
        self, context: Context, equation: jex_core.JaxprEqn, inputs: list[bool]
    ) -> list[bool]:
        """The same; what stands in a branch that a private value chooses tells of it."""
        match inside(equation):
            case Cond() as cond if inputs[0]:
                for branch in cond.branches:
                    for inner in equations(branch):
                        if inner.primitive.name in DOORS and context.is_final:
                            self.found(context.at(inner), inner)
                return [True] * len(equation.outvars)
            case While():
                results = super().holder(context, equation, inputs)
                return [any(inputs) or result for result in results]
            case _:
                return super().holder(context, equation, inputs)
