"""The report of `check_privacy`."""

import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

from ..precision import Policy
from ..privacy import PrivacyPlan
from ..shown import some
from ..tables import Part, tabular


class Finding(NamedTuple):
    """Something that breaks a rule, or may break it.

    Attributes:
        rule: `"release"`, `"noise"`, `"side door"`, `"fresh noise"`, `"examples apart"`,
            `"padding"` or `"sampling"`.
        found: what the program does.
        where: the source line.
        advice: what to do.
        is_decided: whether it certainly breaks the rule.
    """

    rule: str
    found: str
    where: str
    advice: str
    is_decided: bool


ADVICE = {
    "release": "Noise comes first: plan.privatizer, or dp.add_noise on what filter_clipped_grad "
    "returns (the check knows no other noise). Leave other values out of the results, or name "
    "their paths in disclose= (released without noise on purpose).",
    "noise": "Give what filter_clipped_grad returns to plan.privatizer, or to dp.add_noise with "
    "the plan's noise multiplier times its sensitivity, before all other arithmetic.",
    "fresh noise": "Begin a stream once, state = dp.noise_stream(), pass each state to one draw "
    "alone, and return the last one at the place where it came in, and nowhere else. A loss's key "
    "is an argument, split or with a counter folded in, and used for nothing else.",
    "examples apart": "Give the engine the step's own batch arguments, or views of them row by "
    "row, and the mask as it came, or OR-ed (mask | more); call it is_padding_example. Name in "
    "private=, or public_rows= if it is public, what has a row for each example.",
    "padding": "Give the sampler's mask, is_padding_example=mask, and name it in private=.",
    "side door": "Give it public values alone, or decide within the loss. A solver takes "
    "throw=False; or set EQX_ON_ERROR=off.",
    "sampling": "Take plan.sampler(num_examples).",
}
"""What to do, by rule."""


class Release(NamedTuple):
    """Noise on clipped sums that no other release contains.

    Attributes:
        sensitivity: the largest L2 norm by which one example moves it, in the unit of the noise.
        stddev: the least standard deviation of the noise on an entry.
        noise_multiplier: a lower bound on noise / sensitivity, over all of its arrays.
        times: how often a call does it.
        where: the source lines of the noise.
    """

    sensitivity: float
    stddev: float
    noise_multiplier: float
    times: int
    where: tuple[str, ...]


@tabular
class PrivacyReport(NamedTuple):
    """What `check_privacy` found; its `str` is a table.

    Attributes:
        plan: what the step was checked against; None if there is no plan.
        violations: findings that break a rule.
        undecided: findings that may break one.
        releases: sums that leave the step through noise.
        disclosed: results that were disclosed by name. No plan accounts for them.
        noise_multiplier: of all releases of a step together; infinite without any, 0 if unknown.
        steps: how many steps of the plan a call takes.
        notes: assumptions of the check.
    """

    plan: PrivacyPlan | None
    violations: tuple[Finding, ...]
    undecided: tuple[Finding, ...]
    releases: tuple[Release, ...]
    disclosed: tuple[str, ...]
    noise_multiplier: float
    steps: int
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing breaks a rule, and nothing is undecided."""
        return not self.violations and not self.undecided

    def raise_if_violated(self) -> None:
        """Does nothing if `ok`.

        Raises:
            ValueError: if not; the message is the table.
        """
        if not self.ok:
            raise ValueError(f"The step is not private as planned.\n{self}")

    def to_json(self) -> str:
        """Everything in the report, as JSON. Infinite numbers are written as texts."""
        return as_json("eqx_dp.PrivacyReport", self)

    def _parts(self) -> Iterator[Part]:
        yield self._headline()
        yield from (f"note: {note}" for note in self.notes)
        for name, findings in (("violation", self.violations), ("undecided", self.undecided)):
            for finding in findings:
                yield from ("", f"{name}, {finding.rule}: {finding.found}")
                yield from (f"  at {finding.where}", f"  {finding.advice}")
        if self.disclosed:
            yield from ("", f"disclosed, without noise: {', '.join(self.disclosed)}")
        if self.releases:
            head = ("sensitivity", "noise", "noise multiplier", "times a call", "where")
            yield from ("", [head, *map(_cells, self.releases)])

    def _headline(self) -> str:
        named = ("violations", self.violations), ("undecided", self.undecided)
        counts = [f"{len(found)} {name}" for name, found in named if found]
        if self.plan is None:
            return f"{', '.join(counts) or 'no violation'}; no plan was given to check against"
        found = ", ".join(counts) or "private as planned"
        planned = f"{self.plan.noise_multiplier:.6g} planned"
        return f"{found}: noise multiplier {self.noise_multiplier:.6g}, {planned}"


def _cells(release: Release) -> tuple[str, ...]:
    *numbers, times, where = release
    return *(f"{number:.6g}" for number in numbers), str(times), some(where, 2)


def as_json(kind: str, report: Any) -> str:
    """A report, with its format and whether it is ok."""
    head = {"format": kind, "version": 1, "ok": report.ok}
    return json.dumps(head | _content(report), indent=2)


def _content(value: Any) -> Any:
    """What stands for a value in JSON: an object for a plan, a policy, and a tuple with names."""
    if isinstance(value, PrivacyPlan):
        return json.loads(value.to_json())
    if isinstance(value, Policy):
        return {"name": value.name, "text": str(value)}
    if hasattr(value, "_asdict"):
        return {name: _content(one) for name, one in value._asdict().items()}
    if isinstance(value, tuple):
        return [_content(one) for one in cast("tuple[Any, ...]", value)]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
