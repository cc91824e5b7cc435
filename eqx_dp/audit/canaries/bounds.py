"""From scores of canaries to lower bounds on epsilon, by jax_privacy's auditing."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from jaxtyping import Bool, Shaped

from ...extras import extra
from ...files import finite_or_none
from ...privacy import PrivacyPlan
from ...shown import shown
from ...tables import Part, tabular

GUESSES = (1 / 32, 1 / 16, 1 / 8, 3 / 8)
"""Shares of the canaries that are guessed to be in, of which the best counts."""

# Of the canaries are split into halves, to choose a threshold and to bound with it.
_SPLITS = 20

_ASSUMES = {
    "one run": "nothing",
    "one run, Gaussian": "the run's trade-off curve is a Gaussian mechanism's",
    "rates": "the scores of canaries are independent",
}


class CanaryBound(NamedTuple):
    """A lower bound on epsilon.

    Attributes:
        method: "one run" (Steinke et al. 2023), "one run, Gaussian" (Mahloujifar et al. 2024), or
            "rates" of true and false positives (Clopper and Pearson 1934; Nasr et al. 2021).
        epsilon: the run is not (less than epsilon, delta)-differentially private.
        assumes: what it needs beside fair coins.
    """

    method: str
    epsilon: float
    assumes: str


@tabular
class CanaryAudit(NamedTuple):
    """What an attack on canaries found in one run; its `str` is a table.

    **Guarantee.** If each canary was in by a fair coin, and the scores depend on the coins only
    through what the run released, then a run that is (epsilon, `delta`)-differentially private gets
    a `lower` above its epsilon with probability at most 1 - `confidence`. Each other bound in
    `bounds` has the same guarantee where what it assumes holds. It holds for one bound of one
    attack at a time, not for the largest of several.

    A bound below the plan's epsilon does not show that the run keeps to its plan: a better attack,
    or more canaries, may find more.

    Attributes:
        attack: what computed the scores.
        num_canaries: in or out.
        num_in: how many were in.
        confidence: of each bound.
        delta: the plan's.
        upper: the plan's epsilon, for all its steps; infinite without noise.
        bounds: lower bounds.
    """

    attack: str
    num_canaries: int
    num_in: int
    confidence: float
    delta: float
    upper: float
    bounds: tuple[CanaryBound, ...]

    @property
    def lower(self) -> float:
        """The bound that assumes nothing ("one run")."""
        return self.bounds[0].epsilon

    @property
    def exceeds_plan(self) -> bool:
        """Whether the run gives away more than the plan says, by the bound that assumes nothing."""
        return self.lower > self.upper

    def _parts(self) -> Iterator[Part]:
        found = "MORE than the plan allows" if self.exceeds_plan else "no more than the plan allows"
        rows = [(bound.method, f"{bound.epsilon:.2f}", bound.assumes) for bound in self.bounds]
        yield f"attack by {self.attack}: {found}"
        yield (
            f"{self.num_canaries} canaries, {self.num_in} in; delta {self.delta:g}; each bound "
            f"holds with probability {self.confidence:g}"
        )
        yield ""
        yield [
            ("bound", "epsilon", "assumes"),
            ("plan", f"<= {self.upper:.2f}", "the run follows it"),
            *((method, f">= {text}", assumes) for method, text, assumes in rows),
        ]

    def to_json(self) -> str:
        """Writes everything as a JSON object; an infinite `upper` as null."""
        return json.dumps(self._as_dict(), indent=2, allow_nan=False)

    def save(self, path: str | Path) -> None:
        """Adds this to a JSON file, such as `audit.json` in a run's directory.

        It stands under the key "canaries" and there under the name of its attack, in place of an
        earlier one by that name. Everything else in the file stays.

        Args:
            path: of the file; it is made if it is not there.

        Raises:
            ValueError: the file is there and holds no JSON object, or no object at "canaries".
                It is left as it is.
        """
        path = Path(path)
        content = _object(_read(path) if path.exists() else {}, path)
        attacks = _object(content.setdefault("canaries", {}), path)
        attacks[self.attack] = self._as_dict()
        path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", "utf-8")

    def _as_dict(self) -> dict[str, Any]:
        bounds = [bound._asdict() for bound in self.bounds]
        more = {"lower": self.lower, "exceeds_plan": self.exceeds_plan}
        return self._asdict() | {"upper": finite_or_none(self.upper), "bounds": bounds} | more


def audited(
    scores: Shaped[np.ndarray, "..."],
    is_in: Bool[np.ndarray, " canaries"],
    plan: PrivacyPlan,
    attack: str,
    confidence: float,
    guesses: tuple[float, ...],
) -> CanaryAudit:
    """Checks scores, and bounds epsilon by them; see `Canaries.audit`."""
    scores = _checked(scores, is_in)
    if not 0.5 < confidence < 1:
        raise ValueError(f"confidence must be above 0.5 and below 1; found {shown(confidence)}.")
    if not guesses or not all(0 < share <= 1 for share in guesses):
        raise ValueError(f"guesses must be above 0 and at most 1; found {shown(guesses)}.")
    auditing = extra("jax_privacy.auditing", name="audit")
    auditor = auditing.CanaryScoreAuditor(scores[is_in], scores[~is_in])
    significance, falling = 1 - confidence, np.sort(scores)[::-1]
    # How many are guessed is fixed beforehand, and the threshold is read from all scores alike, so
    # that only the choice among `guesses` is paid for (a union bound).
    thresholds = {float(falling[max(1, int(share * len(scores))) - 1]) for share in guesses}

    def best(bound: Any) -> float:
        one = functools.partial(bound, significance / len(guesses), plan.delta)
        return max(float(one(threshold_strategy=auditing.Explicit(at))) for at in thresholds)

    found = {
        "one run": best(auditor.epsilon_one_run),
        "one run, Gaussian": best(auditor.epsilon_one_run_fdp),
        "rates": float(
            auditor.epsilon_clopper_pearson(
                significance,
                plan.delta,
                threshold_strategy=auditing.MultiSplit(num_samples=_SPLITS, seed=0),
            )
        ),
    }
    bounds = tuple(CanaryBound(name, found[name], _ASSUMES[name]) for name in found)
    return CanaryAudit(
        attack, len(is_in), int(is_in.sum()), confidence, plan.delta, plan.epsilon(), bounds
    )


def _checked(
    scores: Shaped[np.ndarray, "..."], is_in: Bool[np.ndarray, " canaries"]
) -> Shaped[np.ndarray, " canaries"]:
    if scores.shape != is_in.shape or scores.dtype.kind not in "biuf":
        raise ValueError(
            f"scores must be {len(is_in)} numbers, one for each canary; found {shown(scores)}."
        )
    scores = scores.astype(np.float64)
    if missing := int(np.isnan(scores).sum()):
        raise ValueError(
            f"scores must be numbers; found NaN for {missing} of {len(is_in)} canaries. Take minus "
            "infinity where an attack cannot tell."
        )
    return scores


def _read(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} holds no JSON ({error}). Name another file.") from None


def _object(found: object, path: Path) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ValueError(
            f"{path} must hold a JSON object, with an object at 'canaries'; found "
            f"{type(found).__name__}. Name another file."
        )
    return cast("dict[str, Any]", found)
