"""What `neighbours` found, and how it is printed and kept."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dp_accounting import NeighboringRelation

from ..files import finite_or_none, read_json, write_json
from ..tables import Part, tabular


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
        others: what the other slots hold: "as given", "hostile", or "none".
        example: what the slot holds in which the two differ.
        direction: "add", "remove", "zero out", or "replace".
        slot: which slot.
        movement: how far what is released moves / sensitivity; infinite if it is not finite.
    """

    others: str
    example: str
    direction: str
    slot: int
    movement: float


@tabular
class NeighboursReport(NamedTuple):
    """What `neighbours` found; its `str` is a table.

    The movements are made of the examples that the audit was given: **not private** if those are.

    Attributes:
        sensitivity: the bound that movements are divided by, in the unit of what is released.
        neighboring_relation: what neighbors are.
        largest: the largest movement / sensitivity.
        rounding: how far `largest` may exceed 1 by rounding alone.
        pairs: a row for each pair of data sets.
        violations: a row for each rule that does not hold.
        notes: what the audit could not see.
    """

    sensitivity: float
    neighboring_relation: NeighboringRelation
    largest: float
    rounding: float
    pairs: tuple[Pair, ...]
    violations: tuple[Violation, ...]
    notes: tuple[str, ...]

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
            raise ValueError(f"Neighboring data sets tell themselves apart.\n{self}")

    def _parts(self) -> Iterator[Part]:
        count = len(self.violations)
        found = "no violation" if self.ok else f"{count} violation{'s' * (count != 1)}"
        yield f"{found} on {len(self.pairs)} pairs of {self.neighboring_relation.name} neighbors"
        yield (
            f"largest movement: {self.largest:.6g} of the sensitivity {self.sensitivity:.6g} "
            f"(rounding allowed: {self.rounding:.1g})"
        )
        yield from (f"note: {note}" for note in self.notes)
        for rule, what, where, advice in self.violations:
            yield from ("", f"{rule}: {what}", f"  where: {where}", f"  what to do: {advice}")
        head = ("example", "largest movement / sensitivity", "others", "direction", "slot")
        largest: dict[str, Pair] = {}
        for pair in self.pairs:
            if pair.movement > largest.get(pair.example, pair._replace(movement=-1.0)).movement:
                largest[pair.example] = pair
        rows = sorted(largest.values(), key=lambda pair: -pair.movement)
        cells = [(p.example, f"{p.movement:.6f}", p.others, p.direction, str(p.slot)) for p in rows]
        yield ""
        yield [head, *cells]

    def to_json(self) -> str:
        """The report as a JSON object with one key, "neighbours"; null stands for infinity."""
        return json.dumps({"neighbours": self._content()}, indent=2, allow_nan=False)

    def save(self, path: str | Path) -> None:
        """Writes the report to a file that `eqx-dp report` reads.

        Args:
            path: a JSON file, or the directory of a run: then `audit.json` in it. What else the
                file holds, such as the report of canaries, stays.

        Raises:
            ValueError: there is such a file, and it holds no JSON object.
        """
        file = Path(path) / "audit.json" if Path(path).is_dir() else Path(path)
        before = read_json(file) if file.exists() else {}
        write_json(file, {**before, "neighbours": self._content()})

    def _content(self) -> dict[str, Any]:
        pairs = [x._asdict() | {"movement": finite_or_none(x.movement)} for x in self.pairs]
        return {
            "ok": self.ok,
            "sensitivity": self.sensitivity,
            "neighboring_relation": self.neighboring_relation.name,
            "largest": finite_or_none(self.largest),
            "rounding": finite_or_none(self.rounding),
            "violations": [violation._asdict() for violation in self.violations],
            "notes": list(self.notes),
            "pairs": pairs,
        }
