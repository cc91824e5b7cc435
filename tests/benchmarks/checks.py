"""`check_privacy` against steps that are made at random, and what they truly give away.

A step is composed from operations on rows, indices, masks, sums, noise and results, some of them
meant to leak (`tests/benchmarks/generated/`). The truth is found without the check, by replay on
neighboring data with the noise coupled (`replay.py` there). Reported are leaks that are called
"private as planned", honest steps that are called violations, and how many honest steps of the
language that the check certifies are undecided. A step is the same for the same seed: `--seed 3000
--steps 1000` goes on where `--steps 3000` ended, and with `--log` seeds that the file has are not
judged again. `--replayed LOG` takes from the log of another check what replay found. A step is
first checked without the arithmetic of engine and noise (`generated/shortened.py`); if it is
certified, it is checked again as it is.
"""

import argparse
import collections
import json
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqx_dp as dp

from .command import Part
from .generated.data import TABLE, neighboring
from .generated.grammar import Program, made
from .generated.replay import DISCLOSED, FROZEN, PUBLIC, Truth, truth
from .generated.shortened import shortened
from .page import Table

_NUMBERS = {"steps": 10, "noise_multiplier": 1.0, "delta": 1e-5}
PLANS = {
    "poisson": dp.PrivacyPlan(sampling_prob=0.25, **_NUMBERS),
    "fixed": dp.PrivacyPlan(
        **_NUMBERS,
        sampling=dp.sampling.FixedSize(8, TABLE),
        neighboring_relation=dp.NeighboringRelation.REPLACE_ONE,
    ),
    "users": dp.PrivacyPlan(
        sampling_prob=0.25, **_NUMBERS, unit=dp.Users(np.arange(2 * TABLE) // 2, per_step=2)
    ),
}
"""What the steps are checked against."""

LEAK, ACCUSED, UNDECIDED = "leak called fine", "honest called violation", "honest undecided"


class Judged(NamedTuple):
    """A step, what the check said, and what is true.

    Attributes:
        seed: the step's.
        said: "certified", "undecided", "violation", or "refused": the step cannot be traced.
        kind: "honest": all its operations are, and the check should know them; "far": honest, but
            the check need not know them; "leak": one is meant to leak.
        finding: `LEAK`, `ACCUSED` or `UNDECIDED`; empty if all is well.
        detail: what replay or the check found.
        replayed: what replay found, where it was asked; it holds for every check.
    """

    seed: int
    said: str
    kind: str
    finding: str = ""
    detail: str = ""
    replayed: Any = None


def judged(seed: int, replayed: Any = None) -> Judged:
    """Makes a step, asks the check, and finds the truth where it matters, if it is not known."""
    program = made(seed)
    plan = PLANS[program.plan]
    kinds = {kind for kind, _ in program.used}
    kind = "leak" if "leak" in kinds else "far" if "far" in kinds else "honest"
    try:
        with shortened():
            report = checked(program, plan)
        report = checked(program, plan) if report.ok else report
    except Exception as error:  # the engine and the noise refuse in many ways
        said, detail = "refused", f"{type(error).__name__}: {error}"
        found = UNDECIDED if kind == "honest" else ""
        return Judged(seed, said, kind, found, detail, replayed)
    said = "certified" if report.ok else "violation" if report.violations else "undecided"
    wrong = [f"{one.rule}: {one.found}" for one in (*report.violations, *report.undecided)]
    detail = "; ".join(wrong)
    is_accused = said == "violation" and kind != "leak"
    if said != "certified" and not is_accused:
        found = UNDECIDED if kind == "honest" else ""
        return Judged(seed, said, kind, found, detail, replayed)
    replayed = replayed or truth(program, plan)
    multiplier = report.noise_multiplier if report.ok else plan.noise_multiplier
    is_leak = Truth(*replayed).breaks(multiplier)
    found = LEAK if is_leak and report.ok else ACCUSED if is_accused and not is_leak else ""
    return Judged(seed, said, kind, found, is_leak or detail, replayed)


def checked(program: Program, plan: dp.PrivacyPlan) -> Any:
    """The report of `check_privacy` on a step."""
    data = neighboring(program.layout, np.random.default_rng(program.seed), np.float32).base
    closed = {name: jnp.asarray(data.pop(name)) for name in ("DATA", "LABELS") if name in data}
    names = {"dp": dp, "jax": jax, "jnp": jnp, "eqx": eqx, "optax": optax, "plan": plan}
    names |= {"FROZEN": jnp.asarray(FROZEN, jnp.float32), **closed}
    exec(compile(program.source, f"step_{program.seed}", "exec"), names)
    model = {"b": jnp.float32(0.3), "w": jnp.array([0.4, -0.7, 0.9])}
    public = jnp.asarray(PUBLIC, jnp.float32)
    state = names["initial"](model)
    if "key" in data:
        data["key"] = jax.random.wrap_key_data(jnp.asarray(data["key"]))
    batch = [
        jax.tree.map(lambda v: jnp.asarray(v) if isinstance(v, np.ndarray) else v, value)
        for value in data.values()
    ]
    disclose = (f"2.{DISCLOSED}",) if f"metrics['{DISCLOSED}']" in program.source else ()
    options = {"sampler": plan.sampler(TABLE)} if closed else {}
    return dp.check_privacy(
        names["step"],
        model,
        state,
        public,
        *batch,
        private=program.private,
        plan=plan,
        disclose=disclose,
        **options,
    )


def tables(options: argparse.Namespace) -> Iterator[Table]:
    known = {one.seed: one for one in _read(options.log)}
    replayed = {one.seed: one.replayed for one in _read(options.replayed) if one.replayed}
    steps = options.steps or (3 if options.tiny else 100 if options.short else 1000)
    wanted = range(options.seed, options.seed + steps)
    start, found = time.monotonic(), list[Judged]()
    warnings.simplefilter("ignore")
    for i, seed in enumerate(wanted):
        if seed not in known:
            known[seed] = judged(seed, replayed.get(seed))
            if options.log:
                with options.log.open("a") as file:
                    file.write(json.dumps(known[seed]._asdict()) + "\n")
        found.append(known[seed])
        if known[seed].finding in (LEAK, ACCUSED):
            print(f"\n{described(known[seed])}", flush=True)
        if i % 100 == 99:
            print(f"{i + 1} steps, {time.monotonic() - start:.0f} s", flush=True)
        if i % 1000 == 999:
            jax.clear_caches()
    yield table(found)


def described(one: Judged) -> str:
    """A finding, with the step."""
    program = made(one.seed)
    used = "\n".join(f"  {kind}: {operation}" for kind, operation in program.used)
    head = f"seed {one.seed}: {one.finding} ({program.layout}). {one.detail}"
    return f"{head}\n{used}\n{program.source}"


def table(found: list[Judged]) -> Table:
    """The numbers by kind of step and by what was said."""
    counts = collections.Counter((one.kind, one.said) for one in found)
    findings = collections.Counter(one.finding for one in found)
    rows = [
        {"steps": kind}
        | {
            said: str(counts[kind, said])
            for said in ("certified", "undecided", "violation", "refused")
        }
        for kind in ("honest", "far", "leak")
    ]
    note = ", ".join(f"{name}: {findings[name]}" for name in (LEAK, ACCUSED, UNDECIDED))
    return Table(f"{len(found)} steps", rows, note)


def _read(path: Path | None) -> list[Judged]:
    lines = path.read_text().splitlines() if path and path.exists() else []
    return [Judged(**json.loads(line)) for line in lines]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, help="how many steps are made: 1,000")
    parser.add_argument("--seed", type=int, default=0, help="the first step's")
    parser.add_argument(
        "--log", type=Path, help="a file of JSON lines to append to, and to go on from"
    )
    parser.add_argument(
        "--replayed", type=Path, help="the log of another check: what replay found holds for all"
    )


PART = Part(__doc__, tables, add_options)
