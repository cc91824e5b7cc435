"""Steps a second of a trainer, against a bare loop over the same step, and against a scan.

`Trainer` without a directory, progress or callbacks, on numpy arrays. The loop and a scan of eight
steps a call run over the same step, on batches that are drawn and placed beforehand. All take the
same batches, in turns, in one process; compiling is left out. The fastest turn counts, with the
quartiles of the ratios turn by turn in parentheses.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import eqx_dp as dp

from .command import Part
from .page import Table
from .rows import ROWS, Row, mlp, tiny
from .step import DELTA, SAMPLING_PROB, step_of
from .timing import compared

SCANNED = 8  # steps in one call


def small(batch: int = 64, inputs: int = 64, width: int = 128, depth: int = 2) -> Row:
    """An MLP whose step takes a millisecond or less, so that what happens beside it shows."""
    return mlp(batch, inputs, width, depth)


# Rows, and how many steps a turn takes: more than a second's worth, on two cores.
TURNS: dict[str, tuple[Callable[..., Row], int]] = {
    "small": (small, 1024),
    "mlp": (ROWS["mlp"], 192),
    "cnn": (ROWS["cnn"], 64),
    "gpt_small": (ROWS["gpt_small"], 32),
}


class Clock:
    """Stops a trainer every so many steps; a bare loop and a scan then take the same steps.

    It is the trainer's `evaluate`, which is called after every turn of so many steps. The trainer's
    time is that from the end of one call to where the next finds the model computed. The first call
    comes before any step. The first turn compiles, and does not count.

    Attributes:
        seconds: of the turns of each, by name.
        states: of the bare loop and of the scan.
    """

    def __init__(self, step: dp.Step[Any], row: Row, data: tuple[np.ndarray, ...], turn: int):
        self.seconds: dict[str, list[float]] = {"trainer": [], "loop": [], "scan": []}
        self.states = {"loop": step.init(row.model), "scan": step.init(row.model)}
        self._step, self._data, self._turn = step, data, turn
        self._sampler = step.sampler()
        self._start: float | None = None
        self._done = -turn

    def __call__(self, model: Any) -> dict[str, float]:
        jax.block_until_ready(model)
        of_trainer = time.perf_counter() - (self._start or 0)
        steps = range(self._done, self._done + self._turn)
        self._done += self._turn
        if self._done == 0:
            return {}
        batches = [
            self._step.shard_batch(self._sampler.take(i, *self._data, peek=True)) for i in steps
        ]
        found = {"trainer": of_trainer, "loop": self._timed("loop", self._loop, batches)}
        grouped = [batches[i : i + SCANNED] for i in range(0, len(batches), SCANNED)]
        stacked = [jax.tree.map(lambda *x: jnp.stack(x), *group) for group in grouped]
        found["scan"] = self._timed("scan", self._scan, stacked)
        if self._start is not None:
            for name, seconds in found.items():
                self.seconds[name].append(seconds)
        self._start = time.perf_counter()
        return {}

    def _timed(self, name: str, run: Callable[[Any, Any], Any], batches: list[Any]) -> float:
        jax.block_until_ready(batches)
        start = time.perf_counter()
        state = self.states[name]
        for examples, mask in batches:
            state = run(state, (examples, mask))
        self.states[name] = jax.block_until_ready(state)
        return time.perf_counter() - start

    def _loop(self, state: Any, batch: Any) -> Any:
        examples, mask = batch
        return self._step(state, *examples, is_padding_example=mask)

    @eqx.filter_jit
    def _scan(self, state: Any, batches: Any) -> Any:
        arrays, rest = eqx.partition(state, eqx.is_array)

        def one(arrays: Any, batch: Any) -> tuple[Any, None]:
            return eqx.filter(self._loop(eqx.combine(arrays, rest), batch), eqx.is_array), None

        return eqx.combine(jax.lax.scan(one, arrays, batches)[0], rest)


def measured(row: Row, turn: int, rounds: int) -> Clock:
    """Runs a trainer, and the others over the same batches."""
    num_examples = round(row.batch_size / SAMPLING_PROB)
    indices = np.arange(num_examples) % row.batch_size
    data = tuple(np.asarray(array)[indices] for array in row.batch)
    step = step_of(row, dp.PrivacyPlan(SAMPLING_PROB, (rounds + 1) * turn, 1.0, DELTA))
    clock = Clock(step, row, data, turn)
    dp.Trainer(step, data, progress=False, evaluate=clock, evaluate_every=turn).run(row.model)
    return clock


def line(row: Row, turn: int, seconds: dict[str, list[float]]) -> dict[str, str]:
    """A row of the table; ratios are those of steps a second."""
    loop, trainer, scan = (seconds[name] for name in ("loop", "trainer", "scan"))
    return {
        "model": row.title,
        "ms a step of the loop": f"{1e3 * min(loop) / turn:.2f}",
        "loop, steps/s": f"{turn / min(loop):.1f}",
        "trainer, steps/s": f"{turn / min(trainer):.1f}",
        "trainer / loop": compared(loop, trainer),
        f"scan of {SCANNED} / loop": compared(loop, scan),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which rows."""
    parser.add_argument("--rows", nargs="+", choices=TURNS, help="which models")


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """One table, a line a model."""
    lines: list[dict[str, str]] = []
    for name in options.rows or TURNS:
        make, turn = TURNS[name]
        row = make(**(tiny(make) if options.tiny else {}))
        turn = SCANNED if options.tiny else turn
        lines.append(line(row, turn, measured(row, turn, options.rounds).seconds))
    note = "Aim: a trainer takes at least 0.95 as many steps a second as the loop."
    yield Table("Trainer, bare loop, scan", lines, note)


PART = Part(__doc__, tables, add_options)
