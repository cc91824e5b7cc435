"""The result of an attack on canaries: a lower bound on epsilon, beside the plan's."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..files import finite_or_none
from ..tables import Part, tabular
from .record import save_audit


@tabular
class CanaryAudit(NamedTuple):
    """The result of an attack on canaries in one run; its `str` is a table.

    **Guarantee.** If each canary was in by a fair coin, and the scores depend on the coins only
    through what the run released, then a run that is (epsilon, `delta`)-differentially private gets
    a `lower` above its epsilon with probability at most 1 - `confidence`. It holds for one attack
    at a time, not for the largest bound of several.

    A bound below the plan's epsilon does not show that the run keeps to its plan: a better attack,
    or more canaries, may find more.

    Attributes:
        attack: what computed the scores.
        num_canaries: in or out.
        num_in: how many were in.
        confidence: of the bound.
        delta: the plan's.
        lower: the run is not (less than `lower`, `delta`)-differentially private.
        upper: the plan's epsilon, for all its steps; infinite without noise.
    """

    attack: str
    num_canaries: int
    num_in: int
    confidence: float
    delta: float
    lower: float
    upper: float

    @property
    def ok(self) -> bool:
        """Whether the bound is not above the plan's epsilon."""
        return self.lower <= self.upper

    def _parts(self) -> Iterator[Part]:
        found = "no more than the plan allows" if self.ok else "MORE than the plan allows"
        yield f"attack by {self.attack}: {found}"
        yield (
            f"epsilon at least {self.lower:.2f} with probability {self.confidence:g}, by the plan "
            f"at most {self.upper:.2f}"
        )
        yield f"{self.num_canaries} canaries, {self.num_in} in; delta {self.delta:g}"

    def save(self, path: str | Path) -> None:
        """Writes this to a JSON file that `eqx-dp report` reads; null stands for infinity.

        It is at the key "canaries", by the name of its attack. Everything else in the file stays.

        Args:
            path: a JSON file, or the directory of a run: then `audit.json` in it.

        Raises:
            ValueError: the file is there and holds no JSON object, or none at "canaries".
        """
        found = {"ok": self.ok, **self._asdict(), "upper": finite_or_none(self.upper)}
        save_audit(path, {"canaries": {self.attack: found}})
