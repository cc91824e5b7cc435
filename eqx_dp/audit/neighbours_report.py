"""The report of `neighbours`."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dp_accounting import NeighboringRelation

from ..tables import Part, tabular
from .record import save_audit

_NEAR = 0.5


class Violation(NamedTuple):
    """One rule that does not hold.

    Attributes:
        rule: its name, as `neighbours` explains it.
        found: what was found, at its worst.
        where: the data set on which it was found.
        advice: what to do.
    """

    rule: str
    found: str
    where: str
    advice: str


class Pair(NamedTuple):
    """Two neighboring data sets.

    Attributes:
        others: what the other slots hold: "as given", "hostile", or "padding".
        example: what the slot holds in which the two differ.
        slot: which slot.
        movement: how far what is released moves / sensitivity; infinite if it is not finite.
    """

    others: str
    example: str
    slot: int
    movement: float


@tabular
class NeighboursReport(NamedTuple):
    """What `neighbours` found; its `str` is a table.

    The movements depend on the examples that the audit was given: **not private** if those are.

    Attributes:
        sensitivity: the bound that movements are divided by, in the unit of what is released.
        neighboring_relation: what neighbors are.
        rounding: how far a movement may exceed 1 by rounding alone.
        pairs: a row for each pair of data sets.
        violations: a row for each rule that does not hold.
    """

    sensitivity: float
    neighboring_relation: NeighboringRelation
    rounding: float
    pairs: tuple[Pair, ...]
    violations: tuple[Violation, ...]

    @property
    def largest(self) -> float:
        """The largest movement / sensitivity."""
        return max((pair.movement for pair in self.pairs), default=0.0)

    @property
    def ok(self) -> bool:
        """Whether no violation was found."""
        return not self.violations

    def raise_if_violated(self) -> None:
        """Does nothing if no violation was found.

        Raises:
            ValueError: if one was; the message is the table.
        """
        if not self.ok:
            raise ValueError(f"Neighboring data sets can be told apart.\n{self}")

    def _parts(self) -> Iterator[Part]:
        found = "no violation" if self.ok else f"violations: {len(self.violations)}"
        yield f"{found} on {len(self.pairs)} pairs of {self.neighboring_relation.name} neighbors"
        yield f"largest movement: {self.largest:.6g} of the sensitivity {self.sensitivity:.6g}"
        if self.largest < _NEAR:
            yield "note: no example came near the bound: give a smaller clip norm, larger examples"
        for rule, what, where, advice in self.violations:
            yield from ("", f"{rule}: {what}", f"  where: {where}", f"  what to do: {advice}")
        worst: dict[str, Pair] = {}
        for pair in sorted(self.pairs, key=lambda pair: -pair.movement):
            worst.setdefault(pair.example, pair)
        cells = [(p.example, f"{p.movement:.6f}", p.others, str(p.slot)) for p in worst.values()]
        yield ""
        yield [("example", "largest movement / sensitivity", "others", "slot"), *cells]

    def save(self, path: str | Path) -> None:
        """Writes the report to a JSON file that `eqx-dp report` reads; null stands for infinity.

        Args:
            path: a JSON file, or the directory of a run: then `audit.json` in it. What else the
                file holds, such as the report of canaries, stays.

        Raises:
            ValueError: there is such a file, and it holds no JSON object.
        """
        found = {"ok": self.ok, "largest": self.largest, **self._asdict()}
        found["neighboring_relation"] = self.neighboring_relation.name
        found["violations"] = [violation._asdict() for violation in self.violations]
        found["pairs"] = [pair._asdict() for pair in self.pairs]
        save_audit(path, {"neighbours": found})
