"""Finds the dimensions that carry examples: they differ between batches of one and of two."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax.extend.core as jex_core

from .constraints import demanding

Trace: TypeAlias = Callable[[], Sequence[jex_core.Jaxpr]]


class BatchOfTwo:
    """Maps equations of programs traced on a batch of one to those on a batch of two.

    A program is traced on a batch of two when one of its equations is asked for.
    """

    def __init__(self, examples: Sequence[str]):
        self._examples = examples
        # Equations are compared by identity, so added ones must stay alive.
        self._added: dict[int, tuple[list[jex_core.JaxprEqn], Trace]] = {}
        self._partners: dict[int, list[jex_core.JaxprEqn]] = {}

    def add(self, one: jex_core.Jaxpr, trace: Trace) -> None:
        """Adds a program on a batch of one.

        `trace` gives the programs on a batch of two, one for each place of this program.
        """
        ours = list(demanding(one, self._examples))
        self._added.update((id(equation), (ours, trace)) for equation in ours)

    def partners(self, equation: jex_core.JaxprEqn) -> list[jex_core.JaxprEqn]:
        """The equations on a batch of two at the places of this one on a batch of one.

        There are several if a jitted function is called at several places: on a batch of one they
        share its equations, on a batch of two they may not.

        Raises:
            ValueError: the programs differ in more than lengths.
        """
        if id(equation) not in self._partners:
            ours, trace = self._added[id(equation)]
            for two in trace():
                theirs = list(demanding(two, self._examples))
                if [one.primitive for one in ours] != [its.primitive for its in theirs]:
                    raise ValueError(
                        "The loss constrains shardings in one way for a batch of one example and "
                        "in another for a batch of two, so it is unknown which dimensions carry "
                        "examples. The constraints must not depend on the length of the batch."
                    )
                for one, its in zip(ours, theirs, strict=True):
                    self._partners.setdefault(id(one), []).append(its)
        return self._partners[id(equation)]
