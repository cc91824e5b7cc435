"""Where a run goes on: as the program that it was, or as another where that is asked for."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .files import CheckpointWarning
from .ledger import Ledger
from .metrics import set_aside
from .record import (
    changeable,
    differences,
    forbidden,
    goes_on_after,
    microbatch_of,
    part_of_array,
    program_of,
    salt_of,
)


class Start(NamedTuple):
    """From where a process goes on, as all hosts have to know it: JSON's types.

    Attributes:
        number: of the checkpoint; None for a run that begins.
        after: how many steps count as taken.
        programs: of the run, the one that goes on included.
        restored: names of the arrays that come from the checkpoint; others are new.
        microbatch_size: with which the checkpoint was made, on as many devices; else None.
    """

    number: int | None
    after: int
    programs: list[dict[str, Any]]
    restored: list[str]
    microbatch_size: int | None


def begun(ledger: Ledger, record: Mapping[str, Any]) -> Start:
    """Records a run that has no checkpoint yet."""
    set_aside(ledger.directory / "metrics.jsonl")  # of another run
    programs = [program_of(record, 0, 0)]
    ledger.write({**record, "programs": programs})
    return Start(None, 0, programs, [], None)


def resumed(
    ledger: Ledger,
    describe: Callable[[bytes], dict[str, Any]],
    number: int,
    saved: Mapping[str, Any],
    allowed: Iterable[str],
) -> tuple[Start, Callable[[], None]]:
    """How a run goes on from a checkpoint, and how to record that, before its first step.

    | this program, beside the newest of the run | the checkpoint | what happens |
    |---|---|---|
    | the same | is its own, or the one that it began from | it goes on, bit for bit |
    | the same | older, since the newer ones are damaged | counts as another |
    | another | any | refused, unless each difference is allowed |

    Another program goes on from the checkpoint with fresh noise and sample. Its steps are counted
    from the last that may have been released.

    Args:
        ledger: of the run's directory.
        describe: the record of this program, for the salt of the seed's fingerprint.
        number: of the newest checkpoint that is whole.
        saved: its record.
        allowed: the parts of a run that may have changed.

    Returns:
        From where it goes on; and what writes that down, and says it, where the program is another:
        to be called once nothing else can refuse the run.

    Raises:
        ValueError: the checkpoint belongs to another run; the plan has no steps left.
    """
    record = ledger.record()
    current = describe(salt_of(record))
    found = differences(record, current)
    if refused := forbidden(found, allowed):
        raise ValueError(_refusal(ledger, number, [x.line for x in refused], record, current))
    programs: list[dict[str, Any]] = record["programs"]
    goes_on = None if found else goes_on_after(programs, saved, number)
    after = max(number, ledger.bound(of=current)) if goes_on is None else goes_on
    if goes_on is None:
        _check_steps_left(ledger, after, current["plan"]["steps"])
        programs = [*programs, program_of(current, after, number)]

    def settle() -> None:
        if goes_on is None:
            ledger.write(current | {"programs": programs})
            _warn(ledger, number, after, [x.line for x in found])

    changed = {x.part for x in differences({**saved, "identity": {}}, {**current, "identity": {}})}
    restored = [name for name in current["arrays"] if part_of_array(name) not in changed]
    return Start(number, after, programs, restored, microbatch_of(saved)), settle


def _refusal(
    ledger: Ledger,
    number: int,
    lines: Sequence[str],
    record: Mapping[str, Any],
    current: Mapping[str, Any],
) -> str:
    was, now = ("eqx_dp {eqx_dp} and JAX {jax}".format(**x["made_by"]) for x in (record, current))
    if was != now:
        lines = [*lines, f"made by {was}, which may trace another program than {now}"]
    return (
        f"The checkpoint of step {number} in {ledger.directory} belongs to another run:"
        f"{_listed(lines)}\nResume with what the run was started with; or start another run, in "
        "another directory and WITH ANOTHER SEED; or name the parts that may change, "
        f"Trainer(..., allow_changed=(...)), of {', '.join(changeable(current['identity']))}: the "
        "run then goes on with fresh noise, and every step that it may have released counts."
    )


def _check_steps_left(ledger: Ledger, after: int, steps: int) -> None:
    if after >= steps:
        raise ValueError(
            f"The run in {ledger.directory} cannot go on as another program: {after} of the plan's "
            f"{steps} steps may have been released already, and none is left. (A process that is "
            "killed may have released all steps up to its next save; one that ends by itself "
            "leaves an exact count.) Resume with what the run was started with: the run then "
            "repeats the steps that were not saved."
        )


def _warn(ledger: Ledger, number: int, after: int, lines: Sequence[str]) -> None:
    why = (
        f"as another program:{_listed(lines)}\n"
        if lines
        else "anew, because the checkpoint that its program began from is damaged. "
    )
    lost = f"Steps {number + 1} to {after} may have been released, and count. "
    warnings.warn(
        f"The run in {ledger.directory} goes on from its checkpoint of step {number}, {why}"
        f"{lost if after > number else ''}The next is step {after + 1}, with fresh sample and "
        "noise.",
        CheckpointWarning,
        stacklevel=2,
    )


def _listed(lines: Iterable[str]) -> str:
    return "".join(f"\n  {line}" for line in lines)
