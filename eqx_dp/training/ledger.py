"""The ledger: how many steps each start of a run may have released; and the public statement.

    ledger/3f6c0a2b9d417e85.json   one file a start; no other start writes to it
    privacy.json                   what follows from plan and ledger, for everybody

**Protocol.** Before a block of steps a start writes its own file: the steps that it has taken, plus
those of the block. Then it reads all files. If their sum exceeds the plan's steps, it withdraws the
block, and takes none of its steps. At a clean end it writes the exact number. It holds the folder
open, and looks before it writes, at each checkpoint and before each epsilon that it shows: if the
path leads to another folder, or a file that it has seen is gone or says fewer steps, it ends.

**Guarantee.** All starts together take at most the plan's steps. Proof: of all blocks that were not
withdrawn, let B be the one whose file was written last. Its start read the files afterwards, and
each of them then held at least the steps that its start takes in all: blocks that count were
written before, and an exact number replaces a larger one only when its steps are taken. Their sum
was at most the plan's steps. The proof assumes that every later reading, on all hosts, sees a
written file, and that nobody removes or edits files. There are no locks.

| case | what happens |
|---|---|
| the directory or the folder is moved while a start runs | the start ends; its block counts |
| a copy of the directory is put in its place | the same; in an object store nothing shows |
| a file is removed, or says fewer steps | every start that knows of it ends |
| a start's own file is removed | the start ends, and writes it again; not in an object store |
| ledgers of copies of a run are put together | no step is left; epsilon is that of the sum |
| the plan accounts for one start, and two have steps | epsilon is infinite |

**A process that is killed** leaves the announced block in its file. All its steps count, so the sum
is never below what was released.
"""
# pyright: reportPrivateUsage=false
# (a step keeps for a Trainer what is of no use to users)

import json
import math
import os
import secrets
import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from platform import python_version
from typing import Any

import jax

from ..expected import RunPath
from ..files import is_remote, read_json, write_json
from ..privacy import PrivacyPlan, epsilon_beyond
from .hosts import from_first_host, is_first_host
from .step import Step

LEDGER, PRIVACY, CHECKS, METRICS = "ledger", "privacy.json", "checks.json", "metrics.jsonl"
_FORMAT, _STATEMENT, _VERSION = "eqx_dp.ledger", "eqx_dp.privacy", 1
_COUNTS = ("start", "num_examples", "steps")
_FACTS = ("plan", "ended", "policy", "unsafe", "randomness", "noise", "made_by")


class CheckpointWarning(UserWarning):
    """A run continues, although something in its directory was damaged, changed, or not written."""


class CheckpointError(Exception):
    """The directory of a run, or every checkpoint in it, cannot be used."""


def versions() -> dict[str, str]:
    """The versions of the libraries of a run."""
    names = ("eqx-dp", "jax", "equinox", "optax", "dp-accounting")
    return {name.replace("-", "_"): version(name) for name in names} | {"python": python_version()}


def entries_in(directory: RunPath) -> dict[str, dict[str, Any]]:
    """The entries of all starts that took a step, by the name of their file.

    Raises:
        CheckpointError: a file is damaged, or of another release; two are of different runs.
    """
    folder = directory / LEDGER
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    found = {name: _entry(folder / name) for name in names if name.endswith(".json")}
    found = {name: entry for name, entry in found.items() if entry["steps"] or not entry["ended"]}
    first = next(iter(found.values()), {})
    for fact in ("plan", "num_examples"):
        if any(entry[fact] != first[fact] for entry in found.values()):
            raise CheckpointError(
                f"The files in {folder} disagree about the {fact}: one of them was edited, or is "
                "of another run. Restore it from a backup."
            )
    return found


def statement(
    plan: PrivacyPlan,
    entries: Mapping[str, Mapping[str, Any]],
    epsilon: Callable[[int], float] | None = None,
) -> dict[str, Any]:
    """The public statement: what may have been released, what epsilon covers, and what it does not.

    It depends on the plan and the ledger, and not on the data.

    Args:
        plan: of the run.
        entries: of the ledger.
        epsilon: of a number of steps, by default by `epsilon_beyond`.
    """
    starts = sorted(entries.values(), key=lambda entry: entry["start"])
    steps = sum(entry["steps"] for entry in starts)
    is_accounted = len(starts) < 2 or not plan.mechanism().is_one_start
    figure = (epsilon or partial(epsilon_beyond, plan))(steps) if is_accounted else math.inf
    is_seeded = any(entry["randomness"] == "seeded" for entry in starts)
    is_unsafe = any(entry["unsafe"] for entry in starts)
    is_certified = all(entry["noise"] == "certified" for entry in starts)
    relation = f"{plan.neighboring_relation.name} (of {'users' if plan.unit else 'examples'})"
    covers = (
        f"The models of all {steps} steps that may have been released, seen together, are "
        f"(epsilon, delta)-differentially private for data sets that are neighbors by {relation}, "
        "if batches stay secret" + (" and so does the seed." if is_seeded else ".")
        if math.isfinite(figure)
        else "No privacy is guaranteed: epsilon is infinite."
    )
    does_not_cover = [
        "how long steps take",
        "choices that were made by looking at private data (hyperparameters, when to stop)",
        "steps that a directory restored from an older backup does not know of",
        "other releases from the same data, such as a model that training began with",
        *(["who owns which row, where rows of several people are users"] if plan.unit else []),
        *(["other runs with the same seed, whose noise is the same"] if is_seeded else []),
        *(["sums or noise in narrow dtypes: the policy is unsafe"] if is_unsafe else []),
        # Of an earlier release; all noise is certified now.
        *([] if is_certified else ["that noise is not certified: it is no exact Gaussian"]),
    ]
    more: dict[str, float] = {}
    # Beyond the plan's steps epsilon alone is stated.
    if math.isfinite(figure) and steps <= plan.steps:
        attack = plan.trade_off(steps)
        more = {"advantage": attack.advantage, "mu": attack.mu, "mu_distance": attack.distance}
    return {
        "format": _STATEMENT,
        "version": _VERSION,
        "epsilon": figure if math.isfinite(figure) else str(figure),
        "delta": plan.delta,
        **more,
        "steps_released": steps,
        "plan": json.loads(plan.to_json()),
        "num_examples": starts[-1]["num_examples"],
        "policy": starts[-1]["policy"],
        "randomness": "seeded" if is_seeded else "fresh",
        "noise": "certified" if is_certified else "not certified",
        "covers": covers,
        "does_not_cover": does_not_cover,
    }


class Tally:
    """Counts the steps of a start without a directory; `Ledger` extends it.

    `others` are the steps that all other starts may have released, when this one announced its
    block; `seen` the same, when the files were last read; `taken` those that this start has taken.
    """

    others = seen = taken = 0

    @property
    def released(self) -> int:
        """The released steps, if no other start takes one meanwhile."""
        return self.others + self.taken

    def announce(self, steps: int, epsilon: Callable[[int], float]) -> None:
        """Records durably, before they are taken, that so many more steps may be released.

        Args:
            steps: of the block.
            epsilon: of a number of steps, for the public statement.

        Raises:
            CheckpointError: the record cannot be written, or another start has taken the rest.
        """

    def look(self) -> None:
        """Reads what other starts have announced meanwhile."""

    def end(self, epsilon: Callable[[int], float] | None = None) -> None:
        """Records the exact number of steps. If that fails, it warns, and more steps count."""

    def record(self) -> dict[str, Any]:
        """The counts that a checkpoint keeps: the sum, and a lower bound for every start."""
        return {}


class Ledger(Tally):
    """The ledger of a directory, for one start. The first host alone reads and writes.

    Args:
        directory: of the run.
        step: the step of the start.

    Attributes:
        start: the number of this start, from 0.

    Raises:
        CheckpointError: a file is damaged; the run in the directory has another plan or another
            number of examples.
    """

    def __init__(self, directory: RunPath, step: Step[Any]):
        self._directory, self._plan, policy = directory, step.plan, step.grad_fn.policy
        self._file = directory / LEDGER / f"{secrets.token_hex(8)}.json"
        self._entry: dict[str, Any] = {
            "format": _FORMAT,
            "version": _VERSION,
            "start": 0,
            "plan": json.loads(step.plan.to_json()),
            "num_examples": step._num_examples,
            "steps": 0,
            "ended": False,
            "policy": None if policy is None else str(policy),
            "unsafe": policy is not None and policy.unsafe,
            "randomness": "fresh" if step._seed is None else "seeded",
            "noise": "certified",
            "made_by": versions()
            | {"platform": jax.default_backend(), "devices": jax.device_count()}
            | {"hosts": jax.process_count()},
        }
        self._known, self._counted = dict[str, int](), step.plan.mechanism().counted
        self._held: int | None = None
        self.others, self.start, _ = from_first_host(self._opened)
        self._entry["start"], self.seen = self.start, self.others

    def announce(self, steps: int, epsilon: Callable[[int], float]) -> None:
        """As for a `Tally`, on disk."""
        self.others = self.seen = from_first_host(lambda: self._announced(steps, epsilon))

    def look(self) -> None:
        """As for a `Tally`, on disk; all hosts call it together."""
        self.seen = from_first_host(lambda: self._read_others()[0])

    def end(self, epsilon: Callable[[int], float] | None = None) -> None:
        """As for a `Tally`, on disk. The statement is written in any case: it may be an old one."""
        if not is_first_host():
            return
        if self._held is not None:  # in the same folder, the file is written again if it is gone
            self._known.pop(self._file.name, None)
        try:
            if self._entry["steps"] or self._entry["ended"]:
                self._write(self.taken, ended=True)
            self._state(epsilon)
        except (OSError, CheckpointError) as error:
            warnings.warn(
                f"{self._file} cannot be written ({getattr(error, 'strerror', error)}): steps that "
                "this start had announced and not taken count as released.",
                CheckpointWarning,
                stacklevel=3,
            )

    def record(self) -> dict[str, Any]:
        """As for a `Tally`: `released`, and `ledger`, steps by the names of files."""
        from_first_host(lambda: bool(self._entries()))
        return {"released": self.released, "ledger": self._known | {self._file.name: self.taken}}

    def check(self, record: Mapping[str, Any]) -> None:
        """Refuses a ledger that counts fewer steps than a checkpoint.

        Raises:
            CheckpointError: a file is missing, or says fewer steps; it is named.
        """
        self._known |= record["ledger"]
        from_first_host(lambda: bool(self._entries()))

    # Only the first host does this.

    def _opened(self) -> tuple[int, int, bool]:
        """Holds the folder from now on, so that no other can pass for it; reads the files."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        if not is_remote(self._file):  # an object store has no folders to hold
            self._held = os.open(self._file.parent, os.O_RDONLY)
            weakref.finalize(self, os.close, self._held)
        return self._read_others()

    def _entries(self) -> dict[str, dict[str, Any]]:
        """All entries; refuses another folder, and one that counts fewer steps than is known."""
        folder, lost, found = self._file.parent, "", entries_in(self._directory)
        for name, steps in self._known.items():
            known = found[name]["steps"] if name in found else 0
            is_there = name in found or (folder / name).exists()
            if known < steps or not is_there:
                lost = f"{folder / name} " + (f"says {known} steps" if is_there else "is missing")
                lost += f", and {steps} steps of that start are known"
        if self._held is not None and not (
            folder.is_dir() and os.path.samestat(os.fstat(self._held), os.stat(folder))
        ):
            lost = f"{folder} was moved, removed or replaced while this start ran"
        if lost:
            raise CheckpointError(
                f"{lost}: epsilon would be too small. Restore it from a backup, or go on where it "
                "is now; or start another run, in another directory."
            )
        for name, entry in found.items():
            ended = entry["steps"] if entry["ended"] else 0  # otherwise it could decrease
            self._known[name] = max(ended, self._known.get(name, 0))
        return found

    def _read_others(self) -> tuple[int, int, bool]:
        """Steps of all other starts, the next start's number, and whether one has this secret."""
        entries = self._entries()
        entries.pop(self._file.name, None)
        for name, entry in entries.items():
            for fact in ("plan", "num_examples"):
                there, here = entry[fact], self._entry[fact]
                if there != here:
                    if isinstance(there, dict):  # of two plans, what differs
                        names = [x for x in {**there, **here} if there.get(x) != here.get(x)]
                        there, here = ({x: its.get(x) for x in names} for its in (there, here))
                    raise ValueError(
                        f"The run in {self._directory} has another {fact} ({name}): {there} there, "
                        f"{here} here. Go on with that, or in another directory: epsilon is of one."
                    )
        numbers = [entry["start"] for entry in entries.values()]
        seeded = [x["start"] for x in entries.values() if x["randomness"] == "seeded"]
        is_repeated = self._entry["randomness"] == "seeded" and self._entry["start"] in seeded
        return sum(x["steps"] for x in entries.values()), max(numbers, default=-1) + 1, is_repeated

    def _announced(self, steps: int, epsilon: Callable[[int], float]) -> int:
        try:
            self._write(self.taken + steps)
            others, _, is_repeated = self._read_others()
            excess = others + self._counted(self.taken + steps) - self._plan.steps
            is_second = self._plan.mechanism().is_one_start and others > 0
            if excess <= 0 and not is_repeated and not is_second:
                self._state(epsilon)
                return others
            self._write(self.taken, ended=True)
        except OSError as error:
            raise CheckpointError(
                f"It cannot be noted in {self._directory} that {steps} more steps are taken "
                f"({error.strerror}), so none of them is. Make room, or make the directory "
                "writable, and start again to continue from the last checkpoint."
            ) from None
        if is_second:
            raise CheckpointError(
                f"Another start in {self._directory} has announced steps, and the plan accounts "
                f"for one start alone: {self._plan.sampling} draws for a whole run. Go on with "
                "another plan in another directory; or plan with dp.sampling.CyclicPoisson or "
                "Poisson, whose runs may start again."
            )
        left = max(0, self._plan.steps - others - self.taken)
        reason = "it has announced steps as well" if excess > 0 else "both have one seed"
        raise CheckpointError(
            f"Another start in {self._directory} is under way, and {reason}: {left} of "
            f"{self._plan.steps} steps are left. This start was about to take {steps}, and took "
            "none of them. If steps are left, start again when the other one has ended."
        )

    def _write(self, steps: int, *, ended: bool = False) -> None:
        self._entries()
        self._entry |= {"steps": self._counted(steps), "ended": ended}
        write_json(self._file, self._entry)
        self._known[self._file.name] = self._entry["steps"]

    def _state(self, epsilon: Callable[[int], float] | None = None) -> None:
        """Writes the statement, and writes it again if another start announced meanwhile."""
        before, entries = None, self._entries()
        while entries and entries != before:
            said = statement(self._plan, entries, epsilon)
            before, entries = entries, self._entries()
            if entries == before:  # while epsilon was computed, which takes time
                write_json(self._directory / PRIVACY, said)
                entries = self._entries()


def _entry(file: RunPath) -> dict[str, Any]:
    try:
        found = read_json(file)
        if (found.get("format"), found.get("version")) != (_FORMAT, _VERSION):
            raise ValueError(f"it is not of format {_FORMAT}, version {_VERSION}")
        wrong = [name for name in _COUNTS if type(found.get(name)) is not int or found[name] < 0]
        wrong += [name for name in _FACTS if name not in found]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is missing, or wrong")
        return found
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} cannot be used: {error}. It says how many steps a start of this run may have "
            "released. Restore it from a backup; or start another run, in another directory."
        ) from None
