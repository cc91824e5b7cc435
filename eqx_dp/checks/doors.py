"""Where values leave a program beside its results: host functions, prints, errors."""

from collections.abc import Callable, Sequence

import jax.extend.core as jex_core

from ..programs import Cond, While, equations, inside, named
from .flow import Context, Flow

DOORS = named(
    """debug_callback debug_print pure_callback io_callback buffer_callback ffi_call
    tpu_custom_call triton_kernel_call call_exported swap addupdate"""
)
"""Primitives by which a value leaves a program, or goes where it is not followed."""


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
