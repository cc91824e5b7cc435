"""What a private gradient of adapters could save at most: what the time is spent on.

    python -m tests.benchmarks.lora --markdown tests/benchmarks/results/lora.md

The base is frozen, so that gradients of its matrices are never computed, privately or not. What is
left is the forward pass, the backward pass through activations down to the first adapter, and the
adapters' own thin products. Whoever computes the gradient of the first adapter pays for the first
two; the table says what part of jax_privacy's time they are.
"""

import argparse
import functools
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import optax
from rich.console import Console

from eqx_dp.programs import matmul_flops

from . import report
from .contenders import (
    AUTO,
    IN_PARTS,
    JAX_PRIVACY,
    OPTAX,
    Contender,
    Gradient,
    Program,
    compiled,
    non_private,
    of_jax_privacy,
    of_optax,
    ours,
)
from .measure import Result, measure, ratio
from .rows import TINY, Row, gpt_lora

FORWARD, FIRST = "forward pass", "down to the first adapter"
SIZES = (None, 1, 2, 4)


def forward(row: Row, microbatch_size: int | None) -> Gradient:
    """The summed loss alone."""
    return optax.microbatching.microbatch(row.total_of_parts(), row.batch_argnums, microbatch_size)


def of_first_adapter(row: Row) -> Row:
    """Only one thin matrix is trained: what leads to its gradient is all that it costs."""
    nothing = jax.tree.map(lambda _: False, row.model)
    return row._replace(
        filter_spec=eqx.tree_at(lambda model: model.blocks[0].qkv.up, nothing, True)
    )


class Part(NamedTuple):
    """What is timed: a gradient, and of which of the model's leaves."""

    make: Callable[[Row, int | None], Gradient]
    of: Callable[[Row], Row] = lambda row: row

    def compiled(self, row: Row, microbatch_size: int | None) -> Program:
        return compiled(self.make, self.of(row), microbatch_size)

    def flops(self, row: Row) -> int:
        """Of all matrix products for a batch, all of it at once."""
        row = self.of(row)
        params, frozen, _ = row.split()
        gradient = self.make(row, row.batch_size)
        return matmul_flops(jax.make_jaxpr(gradient)(params, frozen, *row.batch))


PARTS = {
    FORWARD: Part(forward),
    FIRST: Part(non_private, of_first_adapter),
    IN_PARTS: Part(non_private),
    AUTO: Part(functools.partial(ours, "auto")),
    JAX_PRIVACY: Part(of_jax_privacy),
    OPTAX: Part(of_optax),
}


def contenders() -> list[Contender]:
    return [
        Contender(name, part.compiled, microbatched=name != AUTO, tried=SIZES)
        for name, part in PARTS.items()
    ]


COLUMNS = (
    "what",
    "microbatch",
    "ms",
    "time / jax_privacy (quartiles)",
    "jax_privacy / this",
    "GFLOP of products",
)


def table(row: Row, results: list[Result]) -> report.Cells:
    found = {result.contender: result for result in results}
    peer = found[JAX_PRIVACY]
    lines = [
        (
            name,
            "-" if result.microbatch_size is None else str(result.microbatch_size),
            f"{report.milliseconds(result):.1f}",
            report.with_quartiles(ratio(result, peer)),
            f"{ratio(peer, result).median:.2f}",
            f"{PARTS[name].flops(row) / 1e9:.2f}",
        )
        for name, result in found.items()
    ]
    least, own = (f"{ratio(peer, found[name]).median:.2f} x" for name in (FIRST, AUTO))
    note = (
        f"The gradient of one thin matrix, without privacy, is {least} as fast as jax_privacy's "
        f"best: a private gradient of all adapters has all of that work to do. auto is {own} as "
        "fast."
    )
    return report.Cells(row.title, COLUMNS, lines, note)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.lora",
        description="What the time of adapters' private gradients is spent on.",
    )
    parser.add_argument("--repeats", type=int, default=7, help="rounds of measurement (default: 7)")
    parser.add_argument("--tiny", action="store_true", help="only to see that everything works")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    options = parser.parse_args(argv)
    console = Console(width=140)
    sizes: dict[str, Any] = TINY["gpt_lora"] if options.tiny else {}
    row = gpt_lora(**sizes)
    with console.status("") as status:
        found = table(row, measure(row, contenders(), options.repeats, status.update))
    console.print(report.for_terminal(found))
    if options.markdown is not None:
        command = ["python", "-m", "tests.benchmarks.lora", "--repeats", str(options.repeats)]
        report.write_markdown(
            options.markdown,
            shlex.join(command + ["--tiny"] * options.tiny),
            [found],
            "Adapters on a frozen base: what can be saved",
            "Each runs at the microbatch size that is best for it, in turns in one process; times "
            "are compared round by round. `forward pass` is the loss alone. `down to the first "
            "adapter` is the gradient, without privacy, of the first adapter's last matrix: the "
            "forward pass and the backward pass through activations, which every gradient of all "
            "adapters needs. Products are counted on the traced gradient of the batch.",
        )


if __name__ == "__main__":
    main()
