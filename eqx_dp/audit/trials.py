"""Data sets that differ in one slot, among other examples that are as given, hostile, or none."""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias

import jax
import numpy as np
from jaxtyping import Bool

from .hostile import GIVEN, HOSTILE_NEIGHBORS, ZEROS, Example, hostile_examples

Others: TypeAlias = Literal["as given", "hostile", "none"]
"""What the other slots hold; none: they are padding."""

_MOST_SLOTS = 8


class Trial(NamedTuple):
    """One data set.

    Attributes:
        others: what the other slots hold.
        example: the name of what the slot holds.
        slot: the slot in which neighbors differ.
        examples: all of them.
        mask: True where a slot is padding; None for a function without a mask.
    """

    others: Others
    example: str
    slot: int
    examples: Sequence[Example]
    mask: Bool[np.ndarray, " slots"] | None

    @property
    def where(self) -> str:
        """For people."""
        return f"slot {self.slot}: {self.example}; others {self.others}"


class Trials(NamedTuple):
    """Makes the data sets of one audit.

    Attributes:
        given: the examples as they were given.
        hostile: each of them, hostile in a way of its own.
        mask: as it was given, or None.
        slot: in which neighbors differ.
        candidates: what the slot may hold, by name.
    """

    given: Sequence[Example]
    hostile: Sequence[Example]
    mask: Bool[np.ndarray, " slots"] | None
    slot: int
    candidates: dict[str, Example]

    @classmethod
    def of(
        cls, given: Sequence[Example], mask: Bool[np.ndarray, " slots"] | None, *, last: bool
    ) -> "Trials":
        """The trials on a batch; `last` takes the last slot, which may then be left out."""
        real = [i for i in range(len(given)) if mask is None or not mask[i]]
        slot = real[-1] if last else real[len(real) // 2]
        others = [given[i] for i in real if i != slot]
        return cls(given, _hostile(given), mask, slot, hostile_examples(given[slot], others))

    @property
    def contexts(self) -> tuple[Others, ...]:
        """What the other slots may hold."""
        return ("as given", "hostile") if self.mask is None else ("as given", "hostile", "none")

    @property
    def other_slots(self) -> list[int]:
        """Some other slots with a real example, evenly spread."""
        real = [i for i in range(len(self.given)) if self.mask is None or not self.mask[i]]
        real.remove(self.slot)
        return real[:: -(-len(real) // _MOST_SLOTS) or 1]

    def present(self, others: Others, name: str = GIVEN) -> Trial:
        """With a candidate in the slot."""
        return self._trial(others, name, self.slot, self.candidates[name], is_padding=False)

    def masked(self, others: Others, name: str) -> Trial:
        """The same, and the slot is padding."""
        example = self.candidates[name]
        return self._trial(others, f"padding, {name}", self.slot, example, is_padding=True)

    def absent(self, others: Others, slot: int | None = None) -> Trial:
        """Without the example: zeros and padding, as `PoissonSampler.take` has it; or cut off."""
        slot = self.slot if slot is None else slot
        zeros = jax.tree.map(np.zeros_like, self.given[slot])
        trial = self._trial(others, f"padding, {ZEROS}", slot, zeros, is_padding=True)
        if self.mask is not None:
            return trial
        left = [example for i, example in enumerate(trial.examples) if i != slot]
        return trial._replace(example="left out", examples=left)

    def _trial(
        self, others: Others, name: str, slot: int, example: Example, *, is_padding: bool
    ) -> Trial:
        examples = list(self.hostile if others == "hostile" else self.given)
        examples[slot] = example
        if self.mask is None:
            return Trial(others, name, slot, examples, None)
        mask = np.ones_like(self.mask) if others == "none" else self.mask.copy()
        mask[slot] = is_padding
        return Trial(others, name, slot, examples, mask)


def _hostile(given: Iterable[Example]) -> list[Example]:
    found: list[Example] = []
    for index, example in enumerate(given):
        candidates = hostile_examples(example, ())
        name = HOSTILE_NEIGHBORS[index % len(HOSTILE_NEIGHBORS)]
        found.append(candidates.get(name, example))
    return found
