"""Which dimensions carry examples: what differs between a batch of one and a batch of two."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax.extend.core as jex_core

from .constraints import demanding

Trace: TypeAlias = Callable[[], Sequence[jex_core.Jaxpr]]


class BatchOfTwo:
    """For equations of programs traced on a batch of one, those of the same on a batch of two.

    A program is traced on a batch of two when one of its equations is asked for.
    """

    def __init__(self, examples: Sequence[str]):
        self._examples = examples
        # Equations are told apart by identity, so those that were added must not go away.
        self._added: dict[int, tuple[list[jex_core.JaxprEqn], Trace]] = {}
        self._partners: dict[int, list[jex_core.JaxprEqn]] = {}

    def add(self, one: jex_core.Jaxpr, trace: Trace) -> None:
        """Adds a program on a batch of one.

        `trace` gives those on a batch of two, one for each place where this one stands.
        """
        ours = list(demanding(one, self._examples))
        self._added.update((id(equation), (ours, trace)) for equation in ours)

    def partners(self, equation: jex_core.JaxprEqn) -> list[jex_core.JaxprEqn]:
        """The equations on a batch of two that stand where this one stands on a batch of one.

        They are several where a jitted function is called at several places: its equations are one
        and the same at all of them on a batch of one, though not on that of two.

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
