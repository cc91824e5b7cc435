"""Runs a function on neighboring data sets, and compares what comes out."""

import dataclasses
import math
from collections.abc import Sequence
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from dp_accounting import NeighboringRelation

from ..paths import matches
from .arguments import Arguments
from .findings import Findings, Rule
from .hostile import GIVEN
from .neighbours_report import Pair
from .subject import Observation, Subject
from .trials import Others, Trial, Trials

Arrays: TypeAlias = Sequence[np.ndarray]
Seen: TypeAlias = dict[Others, Observation]

_ZERO_OUT = {NeighboringRelation.REPLACE_SPECIAL: "zero out"}
# How far an example's contribution may differ from the one that it makes alone: where other slots
# are padding, examples are computed at other places of a microbatch, and round otherwise.
_SAME_FACTOR, _SAME_SHARE = 1 / 4, 1 / 64
# An optimizer that takes the sign of an entry moves it with one of the two.
_LOUD = (-4096.0, 4096.0)


def difference(one: Arrays, other: Arrays) -> list[np.ndarray]:
    """Entry by entry, in float64."""
    with np.errstate(all="ignore"):
        return [np.asarray(a.astype(np.float64) - b) for a, b in zip(one, other, strict=True)]


def norm(arrays: Arrays) -> float:
    """The L2 norm of all arrays together, in float64; infinite if an entry is not finite."""
    with np.errstate(all="ignore"):
        square = sum(float(np.sum(np.square(x, dtype=np.float64))) for x in arrays)
    return math.sqrt(square) if math.isfinite(square) else math.inf


@dataclasses.dataclass
class Comparisons:
    """The pairs of one audit, and what was found on them.

    Attributes:
        subject: what is audited.
        arguments: how it is called.
        trials: the data sets.
        sensitivity: how far what is released may move.
        relation: what neighbors are.
        disclosed: patterns of the paths of results that may depend on data.
        base: what came out on the examples as they were given.
        findings: violations.
        pairs: every pair, with its movement.
        rounding: how far the largest movement may exceed 1.
    """

    subject: Subject
    arguments: Arguments
    trials: Trials
    sensitivity: float
    relation: NeighboringRelation
    disclosed: Sequence[str]
    base: Observation
    findings: Findings
    pairs: list[Pair] = dataclasses.field(default_factory=list[Pair])
    rounding: float = 0.0
    _moved: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    _sizes: set[int] = dataclasses.field(default_factory=set[int])
    _released: dict[tuple[int, bytes], tuple[str, Observation]] = dataclasses.field(
        default_factory=dict[tuple[int, bytes], tuple[str, Observation]]
    )

    def compare(self) -> None:
        """Runs all data sets."""
        trials = self.trials
        self._sizes.add(len(trials.given))
        self._replayed()
        start = self._seen({others: trials.present(others) for others in trials.contexts})
        absent: Seen = {}
        if trials.mask is not None or self._adds_and_removes:
            absent = self._seen({others: trials.absent(others) for others in trials.contexts})
        before: list[tuple[str, Seen]] = []
        for name in trials.candidates:
            present = self._seen({o: trials.present(o, name) for o in trials.contexts})
            for others, seen in present.items():
                self._rows_apart(trials.present(others, name), seen, start.get(others))
                if self._adds_and_removes:
                    self._moves("add", trials.present(others, name), absent.get(others), seen)
                if trials.mask is not None:
                    self._padded(others, name, seen, absent.get(others))
            if not self._adds_and_removes:
                self._replaced(name, present, before)
                before.append((name, present))
            self._adds_the_same(name, present, start, absent)
        self._other_slots()
        self._outputs_without_noise()

    def _seen(self, trials: dict[Others, Trial]) -> Seen:
        """What comes out on data sets; without those on which nothing does."""
        found: Seen = {}
        for others, trial in trials.items():
            seen = self._run(trial)
            if seen is not None:
                found[others] = seen
        return found

    @property
    def largest(self) -> float:
        """The largest movement / sensitivity."""
        return max((pair.movement for pair in self.pairs), default=0.0)

    @property
    def _adds_and_removes(self) -> bool:
        return self.relation != NeighboringRelation.REPLACE_ONE

    def _run(self, trial: Trial) -> Observation | None:
        """What comes out on a data set; None if nothing that can be compared does."""
        args, kwargs = self.arguments.on(trial.examples, trial.mask)
        try:
            seen = self.subject.observed(args, kwargs)
        except Exception as error:  # whatever it is, it came with the data
            kind = type(error).__name__
            self.findings.add("stopped", kind, f"the call raised {kind}", trial.where)
            return None
        size = len(trial.examples)
        if size in self._sizes and seen.compilations:
            found = f"compiled {seen.compilations} more programs"
            self._found("compilations", found, trial, size=float(seen.compilations))
        self._sizes.add(size)
        if seen.form != self.base.form:
            self._found("form", "what is released has another shape or dtype", trial)
            return None
        self._unchanged(trial, seen)
        return seen

    def _unchanged(self, trial: Trial, seen: Observation) -> None:
        """Holds what must not change against the first call."""
        if not _same(seen.noise, self.base.noise):
            self._found("noise", "the noise changes with the data", trial)
        size = len(trial.examples)
        first, like = self._released.setdefault((size, seen.digest), (trial.where, seen))
        for path, (dtype, shape, digest) in seen.outputs.items():
            if any(matches(pattern, path) for pattern in self.disclosed):
                continue
            before = self.base.outputs.get(path, ("", (), b""))
            if size == len(self.trials.given) and before[:2] != (dtype, shape):
                self._found("form", f"result {path or '(all)'}: another shape or dtype", trial)
            elif before[2] != digest:
                self._moved.setdefault(path, trial.where)
            if path in seen.counters and seen.counters[path] != self.base.counters.get(path):
                self._found("counters", f"result {path} changes with the data", trial)
            if path in like.outputs and like.outputs[path][2] != digest:
                found = f"result {path or '(all)'} differs although what is released is the same"
                self._found("beside the noise", found, trial, f"; as released on {first}")

    def _found(
        self, rule: Rule, found: str, trial: Trial, more: str = "", *, size: float = 0.0
    ) -> None:
        self.findings.add(rule, found, found, trial.where + more, size)

    def _replayed(self) -> None:
        """The same call twice; without this, no difference would mean anything."""
        trial = self.trials.present("as given")
        again = self._run(trial)
        if again is not None and again.digest != self.base.digest:
            found = "two calls with the same arguments release different values"
            self._found("noise", found, trial)

    def _allowed(self, one: Arrays, other: Arrays) -> float:
        """A bound on the rounding of a movement, in units of the sensitivity.

        A sum of n contributions, each of at most the sensitivity S, rounds at most n + 1 times in
        every entry, and once more where noise has been added: with unit roundoff u it is off by at
        most u (n (n + 1) S + its norm) (Higham 2002, section 4.2). A movement is the difference of
        two.
        """
        n = len(self.trials.given)
        roundoff = max((float(jnp.finfo(x.dtype).eps) / 2 for x in one), default=0.0)
        norms = sum(size for size in map(norm, (one, other)) if math.isfinite(size))
        return roundoff * (2 * n * (n + 1) + norms / self.sensitivity)

    def _moves(
        self, direction: str, trial: Trial, before: Observation | None, after: Observation | None
    ) -> None:
        """Notes how far what is released moves between two data sets."""
        if before is None or after is None:
            return
        movement = norm(difference(before.released, after.released)) / self.sensitivity
        allowed = self._allowed(before.released, after.released)
        self.rounding = max(self.rounding, allowed)
        direction = _ZERO_OUT.get(self.relation, direction) if direction == "remove" else direction
        pair = Pair(trial.others, trial.example, direction, trial.slot, movement)
        self.pairs.append(pair)
        where = f"{direction}, {trial.where}"
        if not math.isfinite(movement):
            found = "what is released is not finite, or moves without bound"
            self.findings.add("movement", "not finite", found, where)
        elif movement > 1 + allowed:
            found = f"one example moves what is released by {movement:.6g} times the sensitivity"
            self.findings.add("movement", "too far", found, where, movement)

    def _padded(
        self, others: Others, name: str, present: Observation, absent: Observation | None
    ) -> None:
        """The slot is made padding, and keeps what it holds."""
        trial = self.trials.masked(others, name)
        masked = self._run(trial)
        if masked is None or absent is None:
            return
        if self._adds_and_removes:
            self._moves("remove", self.trials.present(others, name), present, masked)
        if masked.digest != absent.digest:
            size = norm(difference(masked.released, absent.released)) / self.sensitivity
            found = f"what a padding slot holds changes what is released by {size:.3g} times the "
            self.findings.add("padding", "content", f"{found}sensitivity", trial.where, size)
        for path, rows in masked.rows.items():
            padding = rows[trial.mask]
            if np.any(padding != np.zeros((), padding.dtype)):
                self._found("padding", f"{path}: values of a padding slot are not zero", trial)
            if others == "as given" and name == GIVEN:
                self._in_order(path, trial, rows, self.base.rows[path])

    def _in_order(self, path: str, trial: Trial, rows: np.ndarray, before: np.ndarray) -> None:
        """Values of other examples stay in their slots, up to rounding."""
        kept = ~np.asarray(trial.mask)
        one, other = rows[kept].astype(np.float64), before[kept].astype(np.float64)
        finite = np.abs(other[np.isfinite(other)])
        room = max(finite, default=0.0) / 32 if finite.ndim == 1 else 0.0
        if not np.allclose(one, other, rtol=1 / 32, atol=room, equal_nan=True):
            found = f"{path}: values of other examples change when one becomes padding"
            self._found("examples apart", found, trial)

    def _rows_apart(self, trial: Trial, seen: Observation, start: Observation | None) -> None:
        """Values of other examples are the same bits, whatever the slot holds."""
        for path, rows in seen.rows.items():
            before = rows if start is None else start.rows[path]
            if not _same([np.delete(rows, trial.slot, 0)], [np.delete(before, trial.slot, 0)]):
                self._found("examples apart", f"{path}: values of others change with one", trial)

    def _adds_the_same(self, name: str, present: Seen, start: Seen, absent: Seen) -> None:
        """What an example adds is the same, whatever the others are.

        Beside hostile others it is compared by what changes when the example takes the place of the
        one that was given: the mask is the same, and so is every rounding but that of the sum.
        """
        given = present.get("as given")
        origins: dict[Others, Seen] = {"hostile": start, "none": absent}
        for others, origin in origins.items():
            seen = present.get(others)
            if given is None or seen is None or not {"as given", others} <= origin.keys():
                continue
            here = difference(seen.released, origin[others].released)
            there = difference(given.released, origin["as given"].released)
            room = 4 * self._allowed(seen.released, given.released)
            if others == "none":
                largest = max(norm(here), norm(there)) / self.sensitivity
                room += _SAME_FACTOR * largest + _SAME_SHARE
            size = norm(difference(here, there)) / self.sensitivity
            if math.isfinite(size) and size > room:
                found = f"what an example adds depends on the others, by {size:.3g} times the "
                where = self.trials.present(others, name).where
                self.findings.add("examples apart", "adds", f"{found}sensitivity", where, size)

    def _replaced(self, name: str, present: Seen, before: list[tuple[str, Seen]]) -> None:
        """A candidate in the place of each of those before it."""
        for other, seen in before:
            for others, after in present.items():
                trial = self.trials.present(others, name)
                trial = trial._replace(example=f"{other} -> {name}")
                self._moves("replace", trial, seen.get(others), after)

    def _other_slots(self) -> None:
        """Each of the examples that were given is left out, or is another one."""
        for slot in self.trials.other_slots if self.trials.mask is not None else ():
            trial = self.trials.absent("as given", slot)._replace(example=GIVEN)
            without = self._run(trial)
            if self._adds_and_removes:
                self._moves("remove", trial, self.base, without)

    def _outputs_without_noise(self) -> None:
        """Every result that moves with the data moves with the noise."""
        if not self.base.noise:
            return
        trial = self.trials.present("as given")
        call = self.arguments.on(trial.examples, trial.mask)
        loud = [self.subject.observed(*call, gain=gain) for gain in _LOUD]
        for path, where in self._moved.items():
            before = self.base.outputs[path]
            if path not in self.base.counters and all(x.outputs[path] == before for x in loud):
                found = f"result {path or '(all)'} changes with the data, and not with the noise"
                self.findings.add("beside the noise", found, found, where)


def _same(one: Arrays, other: Arrays) -> bool:
    """Bit for bit."""
    return [x.tobytes() for x in one] == [x.tobytes() for x in other]
