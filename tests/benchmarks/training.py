"""Steps a second of trainers with one and with several steps a call, against a bare loop.

python -m tests.benchmarks.training --markdown table.md
"""

import argparse
import runpy
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

import eqx_dp as dp
from eqx_dp.timing import ratios

from . import report
from .contenders import CLIP_NORM
from .rows import ROWS, TINY, Row, mlp
from .whole_steps import DELTA, OPTIMIZER, SAMPLING_PROB

GOAL = 0.95


class Setting(NamedTuple):
    """A row, and how many steps a turn takes: more than a second's worth, on two cores."""

    row: Callable[..., Row]
    sizes: dict[str, int]
    steps: int


def small(batch: int = 64, inputs: int = 64, width: int = 128, depth: int = 2) -> Row:
    """An MLP whose step takes a millisecond or less, so that what happens beside it shows."""
    return mlp(batch, inputs, width, depth)._replace(name="small")


def digits(batch: int = 64) -> Row:
    """The network and the images of `examples/digits.py`."""
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "digits.py"))
    images, labels, *_ = example["load_images"]()
    model = example["Digits"](jax.random.key(0))
    title = f"network of examples/digits.py, batch {batch}"
    return Row("digits", title, model, example["loss"], (images[:batch], labels[:batch]))


NUMBERS = (1, 8, 32)
"""Steps a call."""

# Turns that all of these numbers divide.
SETTINGS = {
    "small": Setting(small, {}, 1024),
    "digits": Setting(digits, {}, 128),
    "mlp": Setting(ROWS["mlp"], {"batch": 64}, 192),
    "cnn": Setting(ROWS["cnn"], {"batch": 64}, 64),
    "gpt_small": Setting(ROWS["gpt_small"], {"batch": 32}, 32),
}


class Turns:
    """Lets threads run in turns: one at any time, in the order of their names."""

    def __init__(self, names: Sequence[int]):
        self._waiting, self._changed = list(names), threading.Condition()

    def wait(self, name: int) -> None:
        """Returns when it is its turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting[0] == name)

    def end(self, name: int, *, comes_back: bool) -> None:
        """Ends its turn."""
        with self._changed:
            self._waiting.remove(name)
            self._waiting += [name] * comes_back
            self._changed.notify_all()


class Clock:
    """Stops a trainer every so many steps, and lets others take the same steps meanwhile.

    It is the trainer's `evaluate`, which is called after every turn of so many steps. The trainer's
    time is that from the end of one call to where the next finds the model computed. The first turn
    compiles, and does not count. Meanwhile other trainers take their turns and, for the trainer of
    one step a call, a bare loop.

    Attributes:
        trainer: seconds of the trainer's turns.
        bare: seconds of the bare loop's turns.
    """

    def __init__(
        self,
        step: dp.Step[Any],
        model: Any,
        data: tuple[np.ndarray, ...],
        turn: int,
        number: int = 1,
        turns: Turns | None = None,
    ):
        self.trainer: list[float] = []
        self.bare: list[float] = []
        self._number, self._turns = number, turns
        self._step, self._data, self._turn = step, data, turn
        self._sampler = step.sampler(model, *data)
        self._state = step.init(model)
        self._start: float | None = None
        self._done = 0

    def __call__(self, model: Any) -> dict[str, float]:
        jax.block_until_ready(model)
        now = time.perf_counter()
        bare = self._bare_turn() if self._number == 1 else None
        if self._start is not None:
            self.trainer.append(now - self._start)
            self.bare += [] if bare is None else [bare]
        if self._turns is not None:
            self._turns.end(self._number, comes_back=True)
            self._turns.wait(self._number)
        self._start = time.perf_counter()
        return {}

    def _bare_turn(self) -> float:
        batches = [
            self._step.place(self._sampler.take(number, *self._data))
            for number in range(self._done, self._done + self._turn)
        ]
        jax.block_until_ready(batches)
        self._done += self._turn
        return self._loop(batches)

    def _loop(self, batches: list[Any]) -> float:
        """What a user writes who has all batches at hand."""
        start, state = time.perf_counter(), self._state
        for examples, mask in batches:
            state = self._step(state, *examples, is_padding_example=mask)
        self._state = jax.block_until_ready(state)
        return time.perf_counter() - start


def measured(
    row: Row, turn: int, rounds: int, numbers: Sequence[int] = NUMBERS
) -> dict[int, Clock]:
    """Runs a trainer for each number of steps a call, and a bare loop over the same batches."""
    num_examples = round(row.batch_size / SAMPLING_PROB)
    indices = np.arange(num_examples) % row.batch_size
    data = tuple(np.asarray(array)[indices] for array in row.batch)
    steps, turns = (rounds + 1) * turn, Turns(numbers)

    def run(number: int) -> Clock:
        turns.wait(number)
        try:
            step = dp.make_step(
                row.loss,
                OPTIMIZER,
                dp.PrivacyPlan(SAMPLING_PROB, steps, 1.0, DELTA),
                num_examples=num_examples,
                seed=7,
                l2_clip_norm=CLIP_NORM,
                filter_spec=row.filter_spec,
            )
            clock = Clock(step, row.model, data, turn, number, turns)
            trainer = dp.Trainer(
                *(step, data),
                progress=False,
                evaluate=clock,
                evaluate_every=turn,
                steps_per_call=number,
            )
            trainer.run(row.model)
            return clock
        finally:
            turns.end(number, comes_back=False)

    with ThreadPoolExecutor(len(numbers)) as threads:
        return dict(zip(numbers, threads.map(run, numbers), strict=True))


def line(row: Row, turn: int, found: dict[int, Clock]) -> tuple[str, ...]:
    """A line of the table; ratios are those of steps a second."""
    single = found[1]
    return (
        row.name,
        str(row.batch_size),
        f"{1e3 * np.median(single.bare) / turn:.2f}",
        f"{turn / np.median(single.bare):.1f}",
        *(f"{turn / np.median(clock.trainer):.1f}" for clock in found.values()),
        *(report.with_quartiles(ratios(single.bare, clock.trainer)) for clock in found.values()),
    )


def _of(number: int) -> str:
    return "trainer" if number == 1 else f"{number} a call"


_COLUMNS = (
    "row",
    "expected",
    "ms a step of the loop",
    "loop, steps/s",
    *(f"{_of(number)}, steps/s" for number in NUMBERS),
    *(f"{_of(number)} / loop (quartiles)" for number in NUMBERS),
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.training",
        description="Steps a second of trainers, with one and several steps a call, against a "
        "bare loop over the same step.",
    )
    parser.add_argument("--rows", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--rounds", type=int, default=7, help="rounds (default: 7)")
    parser.add_argument("--tiny", action="store_true", help="only to see that everything works")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    options = parser.parse_args(argv)
    console = Console(width=140)
    lines: list[tuple[str, ...]] = []
    with console.status("") as status:
        for name in options.rows:
            make, sizes, turn = SETTINGS[name]
            tiny = {} if name == "digits" else TINY.get(name, TINY["mlp"])
            row = make(**(tiny if options.tiny else sizes))
            turn = 2 if options.tiny else turn
            status.update(f"{row.title}: {options.rounds} rounds of {turn} steps")
            lines.append(line(row, turn, measured(row, turn, options.rounds)))
    note = f"goal: a trainer has at least {GOAL} of the loop's steps a second on every row"
    cells = report.Cells("Trainer and bare loop", _COLUMNS, lines, note)
    console.print(report.for_terminal(cells))
    if options.markdown is not None:
        command = ["python", "-m", "tests.benchmarks.training", "--rows", *options.rows]
        command += ["--rounds", str(options.rounds)] + ["--tiny"] * options.tiny
        report.write_markdown(
            options.markdown,
            shlex.join(command),
            [cells],
            "What a trainer costs beside its steps",
            "`Trainer` without a directory, progress or callbacks, on numpy arrays, with one step "
            "a call and with several (`steps_per_call`), against a loop over the same step on "
            "batches that are drawn and placed beforehand. All take the same batches, in turns, in "
            "one process; compiling is left out. Rates are compared turn by turn, with the "
            "quartiles of the turns' ratios.",
        )


if __name__ == "__main__":
    main()
