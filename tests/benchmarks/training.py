"""Steps a second of a trainer, against a bare loop.

python -m tests.benchmarks.training --markdown table.md
"""

import argparse
import runpy
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

import eqx_dp as dp
from tests.benchmarks.timing import ratios

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


SETTINGS = {
    "small": Setting(small, {}, 1024),
    "digits": Setting(digits, {}, 128),
    "mlp": Setting(ROWS["mlp"], {"batch": 64}, 192),
    "cnn": Setting(ROWS["cnn"], {"batch": 64}, 64),
    "gpt_small": Setting(ROWS["gpt_small"], {"batch": 32}, 32),
}


class Clock:
    """Stops a trainer every so many steps, and lets a bare loop take the same steps meanwhile.

    It is the trainer's `evaluate`, which is called after every turn of so many steps. The trainer's
    time is that from the end of one call to where the next finds the model computed. The first turn
    compiles, and does not count.

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
    ):
        self.trainer: list[float] = []
        self.bare: list[float] = []
        self._step, self._data, self._turn = step, data, turn
        self._sampler = step.sampler()
        self._state = step.init(model)
        self._start: float | None = None
        self._done = 0

    def __call__(self, model: Any) -> dict[str, float]:
        jax.block_until_ready(model)
        now = time.perf_counter()
        bare = self._bare_turn()
        if self._start is not None:
            self.trainer.append(now - self._start)
            self.bare.append(bare)
        self._start = time.perf_counter()
        return {}

    def _bare_turn(self) -> float:
        batches = [
            self._step.shard_batch(self._sampler.take(number, *self._data))
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


def measured(row: Row, turn: int, rounds: int) -> Clock:
    """Runs a trainer, and a bare loop over the same batches."""
    num_examples = round(row.batch_size / SAMPLING_PROB)
    indices = np.arange(num_examples) % row.batch_size
    data = tuple(np.asarray(array)[indices] for array in row.batch)
    step = dp.make_step(
        row.loss,
        OPTIMIZER,
        dp.PrivacyPlan(SAMPLING_PROB, (rounds + 1) * turn, 1.0, DELTA),
        num_examples=num_examples,
        seed=7,
        l2_clip_norm=CLIP_NORM,
        filter_spec=row.filter_spec,
    )
    clock = Clock(step, row.model, data, turn)
    dp.Trainer(step, data, progress=False, evaluate=clock, evaluate_every=turn).run(row.model)
    return clock


def line(row: Row, turn: int, found: Clock) -> tuple[str, ...]:
    """A line of the table; ratios are those of steps a second."""
    return (
        row.name,
        str(row.batch_size),
        f"{1e3 * np.median(found.bare) / turn:.2f}",
        f"{turn / np.median(found.bare):.1f}",
        f"{turn / np.median(found.trainer):.1f}",
        report.with_quartiles(ratios(found.bare, found.trainer)),
    )


_COLUMNS = (
    "row",
    "expected",
    "ms a step of the loop",
    "loop, steps/s",
    "trainer, steps/s",
    "trainer / loop (quartiles)",
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.training",
        description="Steps a second of a trainer, against a bare loop over the same step.",
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
            "`Trainer` without a directory, progress or callbacks, on numpy arrays, against a loop "
            "over the same step on batches that are drawn and placed beforehand. Both take the "
            "same batches, in turns, in one process; compiling is left out. Rates are compared "
            "turn by turn, with the quartiles of the turns' ratios.",
        )


if __name__ == "__main__":
    main()
