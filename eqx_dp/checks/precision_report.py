"""What `check_precision` found, and how it is printed."""

import json
from collections.abc import Iterator
from typing import NamedTuple

from ..precision import Policy
from ..tables import Part, tabular

_FORMAT = "eqx_dp.PrecisionReport"
_VERSION = 1


class Violation(NamedTuple):
    """One thing that runs otherwise than declared.

    Attributes:
        stage: where in the step.
        declared: what the policy says.
        found: what the program does.
        where: the source line.
    """

    stage: str
    declared: str
    found: str
    where: str


class Operation(NamedTuple):
    """What the program does at one stage in one dtype.

    Attributes:
        kind: `"contraction"`, `"sum over examples"`, `"collective"`, `"draw"`, `"noise addition"`.
        stage: where in the step; under a module rule, with the rule's pattern.
        dtype: of the operands; of the result of a sum.
        amount: FLOPs of contractions, else numbers.
        times: how often an equation of this kind runs.
        where: the source line; empty for contractions, which are added up.
    """

    kind: str
    stage: str
    dtype: str
    amount: int
    times: int
    where: str

    def cells(self) -> tuple[str, ...]:
        """A row of the table."""
        unit = "FLOPs" if self.kind == "contraction" else "numbers"
        amount = f"{self.amount:.3g} {unit}"
        return self.kind, self.stage, self.dtype, amount, str(self.times), self.where


@tabular
class PrecisionReport(NamedTuple):
    """What `check_precision` found; its `str` is a table.

    Attributes:
        policy: what the step was checked against.
        violations: a row for each thing that runs otherwise than declared, with its stage, what was
            declared, what was found, and the source line.
        summary: what runs in which dtype: FLOPs of contractions, every sum over examples, every
            collective, every draw that feeds the noise, every addition of noise. What runs under
            a module rule has a row of its own.
        notes: what the check could not see, or what the policy gives away.
    """

    policy: Policy
    violations: tuple[Violation, ...]
    summary: tuple[Operation, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether everything runs as declared."""
        return not self.violations

    def raise_if_violated(self) -> None:
        """Does nothing if everything runs as declared.

        Raises:
            ValueError: if something does not; the message is the table.
        """
        if not self.ok:
            raise ValueError(f"The step does not keep to its policy.\n{self}")

    def to_json(self) -> str:
        """Writes the report as JSON.

        The keys are those of the attributes, and `ok`; the policy is its name and its text, and a
        row is an object.
        """
        found = {
            "format": _FORMAT,
            "version": _VERSION,
            "ok": self.ok,
            "policy": {"name": self.policy.name, "text": str(self.policy)},
            "violations": [row._asdict() for row in self.violations],
            "summary": [row._asdict() for row in self.summary],
            "notes": self.notes,
        }
        return json.dumps(found, indent=2)

    def _parts(self) -> Iterator[Part]:
        count = len(self.violations)
        found = "as declared" if self.ok else f"{count} violation{'s' * (count != 1)}"
        name = self.policy.name or "the policy"
        yield f"{found}: {name} ({self.policy})"
        yield from (f"note: {note}" for note in self.notes)
        if self.violations:
            yield ""
            yield [("stage", "declared", "found", "where"), *self.violations]
        head = ("what", "stage", "dtype", "amount", "times", "where")
        yield ""
        yield [head, *(row.cells() for row in self.summary)]
