"""Where inner products of steps stop being faster than forming gradients, and who is chosen.

    python -m tests.benchmarks.crossover --markdown tests/benchmarks/results/crossover.md

Book-keeping finds the norm of each example's gradient of a matrix in one of two ways. Inner
products of all pairs of T steps cost in proportion to T^2. Forming the gradient costs its entries,
however long a sequence is. Each way is forced on one linear layer, and on language models with a
head of their own and with the embedding as head; beside them stand the formula's choice and `auto`.
"""

import argparse
import functools
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from equinox import nn
from jaxtyping import Array
from rich.console import Console

import eqx_dp as dp
from tests.gradients.engine.uses import force

from . import report
from .client_rows.language import gpt_tied, gpt_untied
from .contenders import AUTO, BOOK_KEEPING, CLIP_NORM, Contender, Program, compiled, ours
from .measure import measure, ratio
from .rows import Row

LENGTHS = (16, 64, 128, 256, 1024)
WIDTHS = (256, 1024)
LONG = (256, 512, 1024)
# Tokens of a batch of the language models: as many at every length.
TOKENS = 2048
# A choice is called right where it costs at most so many times the better way.
NEARLY = 1.1
INNER, FORMED = "factored", "formed"


def linear(length: int, width: int, batch: int = 4) -> Row:
    """One linear layer, which every step of an example goes through."""
    keys = jax.random.split(jax.random.key(1))
    x, y = (jax.random.normal(key, (batch, length, width)) for key in keys)
    model = nn.Linear(width, width, use_bias=False, key=jax.random.key(0))
    title = f"linear {width} x {width}, T={length}, batch {batch}"
    return Row("linear", title, model, _squared_error, (x, y))


def _squared_error(model: nn.Linear, x: Array, y: Array) -> Array:
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def rows(is_tiny: bool) -> Iterator[Row]:
    if is_tiny:
        yield linear(4, 8)
        yield gpt_tied(2, 4, 8, 1, 11)
        return
    yield from (linear(length, width) for width in WIDTHS for length in LENGTHS)
    for make in (gpt_untied, gpt_tied):
        yield from (make(batch=TOKENS // length, length=length) for length in LONG)


def contenders() -> list[Contender]:
    """Both ways for every leaf that has the choice, the formula's, and `auto`."""
    makes: dict[str, Callable[[Row, int | None], Program]] = {
        INNER: functools.partial(_forced, INNER),
        FORMED: functools.partial(_forced, FORMED),
        BOOK_KEEPING: functools.partial(compiled, functools.partial(ours, "book_keeping")),
        AUTO: functools.partial(compiled, functools.partial(ours, "auto")),
    }
    return [Contender(name, make, microbatched=False) for name, make in makes.items()]


def _forced(way: str, row: Row, microbatch_size: int | None) -> Program:
    with pytest.MonkeyPatch.context() as patch:
        force(patch, way)
        return compiled(functools.partial(ours, "book_keeping"), row, microbatch_size)


def chosen(row: Row) -> Counter[str]:
    """How many leaves go which way by the formula."""
    grad_fn = dp.filter_clipped_grad(row.loss, l2_clip_norm=CLIP_NORM, method="book_keeping")
    return Counter(leaf.way for leaf in dp.explain(grad_fn, row.model, *row.batch).rows)


COLUMNS = (
    "row",
    "inner products, ms",
    "forming, ms",
    "forming / inner products",
    "formula, ms",
    "leaves by inner products, formed",
    "formula / better way",
    "auto / better way",
)


def line(row: Row, repeats: int, tell: Callable[[str], None]) -> tuple[str, ...]:
    found = {one.contender: one for one in measure(row, contenders(), repeats, tell)}
    better = min((found[INNER], found[FORMED]), key=report.milliseconds)
    formula, auto = (ratio(found[name], better).median for name in (BOOK_KEEPING, AUTO))
    ways = chosen(row)
    return (
        row.title,
        f"{report.milliseconds(found[INNER]):.2f}",
        f"{report.milliseconds(found[FORMED]):.2f}",
        report.with_quartiles(ratio(found[FORMED], found[INNER])),
        f"{report.milliseconds(found[BOOK_KEEPING]):.2f}",
        f"{ways[INNER]}, {ways[FORMED]}",
        f"{formula:.2f}" + " !" * (formula > NEARLY),
        f"{auto:.2f}" + " !" * (auto > NEARLY),
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.crossover",
        description="Inner products of steps against forming gradients.",
    )
    parser.add_argument("--repeats", type=int, default=5, help="rounds of measurement (default: 5)")
    parser.add_argument("--tiny", action="store_true", help="only to see that everything works")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    options = parser.parse_args(argv)
    console = Console(width=180)
    with console.status("") as status:
        lines = [line(row, options.repeats, status.update) for row in rows(options.tiny)]
    note = f"`!` is behind what takes more than {NEARLY:g} x the better of the two ways."
    table = report.Cells("Inner products or forming", COLUMNS, lines, note)
    console.print(report.for_terminal(table))
    if options.markdown is not None:
        command = ["python", "-m", "tests.benchmarks.crossover", "--repeats", str(options.repeats)]
        report.write_markdown(
            options.markdown,
            shlex.join(command + ["--tiny"] * options.tiny),
            [table],
            "Inner products of steps, or gradients formed example by example",
            "Clipped gradients of one batch by book-keeping, the whole batch at once. Each way is "
            "forced on every leaf that has the choice; the formula chooses for each leaf. All take "
            "turns in one process; times are compared round by round, with the quartiles of the "
            "rounds' ratios.",
        )


if __name__ == "__main__":
    main()
