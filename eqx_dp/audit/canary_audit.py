"""The result of an attack on canaries: lower bounds on epsilon, beside the plan's."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..tables import Part, tabular
from .record import save_audit


@tabular
class CanaryAudit(NamedTuple):
    """The result of an attack on canaries in one run; its `str` is a table.

    **Guarantee.** If each canary was in by a fair coin, and the scores depend on the coins only
    through what the run released, then

    - a run that is (epsilon, `delta`)-differentially private gets a `lower` above its epsilon with
      probability at most 1 - `confidence`;
    - a run whose trade-off function is at least that of a Gaussian mechanism (Dong et al. 2022)
      gets a `lower_gaussian` above the epsilon of that mechanism at `delta` with the same
      probability at most.

    Each holds for one attack at a time, not for the largest bound of several. The second bound is
    tighter where releases are Gaussian. It is compared with `upper_gaussian`, and not with `upper`:
    a run may keep (`upper`, `delta`) and still give away more than its Gaussian mechanism at other
    deltas.

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
        lower_gaussian: no Gaussian mechanism whose epsilon at `delta` is below this gives away as
            much as the run.
        upper_gaussian: epsilon at `delta` of the Gaussian mechanism of the plan's `mu()`, which
            gives away at least as much as the plan's releases, at the deltas that `trade_off` looks
            at; at least `upper`.
    """

    attack: str
    num_canaries: int
    num_in: int
    confidence: float
    delta: float
    lower: float
    upper: float
    lower_gaussian: float
    upper_gaussian: float

    @property
    def ok(self) -> bool:
        """Whether no bound is above the plan's.

        A run that keeps to its plan is not ok with probability at most 2 (1 - `confidence`).
        """
        return self.lower <= self.upper and self.lower_gaussian <= self.upper_gaussian

    def _parts(self) -> Iterator[Part]:
        found = "no more than the plan allows" if self.ok else "MORE than the plan allows"
        yield f"attack by {self.attack}: {found}"
        yield (
            f"epsilon at least {self.lower:.2f} with probability {self.confidence:g}, by the plan "
            f"at most {self.upper:.2f}"
        )
        yield (
            f"as a Gaussian mechanism: at least {self.lower_gaussian:.2f}, by the plan at most "
            f"{self.upper_gaussian:.2f}"
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
        save_audit(path, {"canaries": {self.attack: {"ok": self.ok, **self._asdict()}}})
