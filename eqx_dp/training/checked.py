"""What the checks say of a run's step, in `checks.json`, once a process begins or resumes the run.

    {"precision": {"ok": true, "violations": [], ...}, "privacy": {"ok": true, ...}}

It depends on the program of the step and on no data. It is null for what was not checked: the
precision of a step without a policy, the privacy of one without noise. A check never stops a run:
a step that does not keep to what is declared has a warning, and so has a check that fails.
"""

import json
import warnings
from collections.abc import Callable
from typing import Any

from ..checks import PrecisionReport, PrivacyReport, check_precision, check_privacy
from ..expected import RunPath
from .directory import CHECKS
from .files import going_on, write_json
from .hosts import is_first_host
from .step import Step


def checks_of(step: Step[Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """What each check says of a step, as JSON's types; nothing is said on hosts after the first.

    The step is read as it was traced, if it was lowered for the same arguments before.
    """
    if not is_first_host():
        return {}
    policy, has_noise = step.policy, step.plan.noise_multiplier > 0

    def precision() -> PrecisionReport | None:
        return None if policy is None else check_precision(step, *args, policy=policy, **kwargs)

    def privacy() -> PrivacyReport | None:
        return check_privacy(step, *args, **kwargs) if has_noise else None

    return {"precision": _said("precision", precision), "privacy": _said("privacy", privacy)}


def write_checks(directory: RunPath, found: dict[str, Any]) -> None:
    """Writes what the checks said beside the run; a warning if that cannot be."""
    if found:
        with going_on(f"{directory / CHECKS} cannot be written"):
            write_json(directory / CHECKS, found)


def _said(
    name: str, check: Callable[[], PrecisionReport | PrivacyReport | None]
) -> dict[str, Any] | None:
    try:
        report = check()
        if report is None:
            return None
        found = json.loads(report.to_json())
    except Exception as error:  # whatever it is, the step itself was traced and may run
        _warn(f"The {name} of this run's step could not be checked: {type(error).__name__}")
        return None
    if report.violations:
        _warn(
            f"This run's step does not keep to its {name}: check_{name} found "
            f"{len(report.violations)} violation(s). See {CHECKS} in its directory"
        )
    return found


def _warn(said: str) -> None:
    warnings.warn(f"{said}. The run goes on.", stacklevel=2)
