"""Time and memory of the noise, against one plain draw of as many normal numbers.

    python -m tests.benchmarks.noise --markdown table.md

With `XLA_FLAGS=--xla_force_host_platform_device_count=8` in front, on a mesh of eight virtual
devices.
"""

import argparse
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from rich.console import Console

import eqx_dp as dp
from tests.benchmarks.timing import interleaved, ratios

from . import report
from .rows import ROWS, TINY
from .whole_steps import Run, threaded

GOAL = 1.3


def trees(is_tiny: bool) -> dict[str, Any]:
    """Gradients, by what they are: leaves of a whole model, or as many entries divided evenly."""
    mlp, gpt = (ROWS[name](**TINY[name] if is_tiny else {}) for name in ("mlp", "gpt_small"))
    of_mlp, of_gpt = (jax.tree.map(jnp.zeros_like, row.split()[0]) for row in (mlp, gpt))
    pieces = 4 if is_tiny else 200
    # Eight devices divide each piece.
    entries = max(1, num_entries(of_mlp) // (8 * pieces)) * 8 * pieces
    return {
        "one leaf": jnp.zeros(entries),
        "MLP": of_mlp,
        "GPT": of_gpt,
        "small leaves": [jnp.zeros(entries // pieces) for _ in range(pieces)],
    }


def num_entries(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


class Place(NamedTuple):
    """Where noise is drawn: on one device, or spread over those of a mesh."""

    name: str
    rules: dp.ShardingRules | None


def places() -> list[Place]:
    """The one device; or a mesh of all, over which sums are spread or copied."""
    count = len(jax.devices())
    if count == 1:
        return [Place("one device", None)]
    mesh = Mesh(np.asarray(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    return [
        Place(f"spread over {count}", dp.ShardingRules(mesh, accumulators="examples")),
        Place(f"copied on {count}", dp.ShardingRules(mesh)),
    ]


class Prepared(NamedTuple):
    """A compiled program, ready to run, and the temporary bytes that it takes of a device."""

    run: Run
    temp_bytes: int


def plain_draw(tree: Any, place: Place) -> Prepared:
    """As many normal numbers as the tree has entries; spread over devices, as many as they divide.

    Where noise is copied on all devices, each draws all of it.
    """
    key, count, sharding = jax.random.key(0), num_entries(tree), None
    if place.rules is not None:
        is_spread = place.rules.accumulators == "examples"
        spec = place.rules.example_spec if is_spread else PartitionSpec()
        count += -count % place.rules.num_shards
        sharding = NamedSharding(place.rules.mesh, spec)
        key = jax.device_put(key, NamedSharding(place.rules.mesh, PartitionSpec()))
    draw = jax.jit(lambda key: jax.random.normal(key, (count,)), out_shardings=sharding)
    compiled = draw.lower(key).compile()
    return Prepared(lambda: compiled(key), compiled.memory_analysis().temp_size_in_bytes)


def noise(tree: Any, place: Place) -> Prepared:
    """The update of our privatizer; gradients and state are donated, as they are within a step."""
    privatizer = dp.gaussian_privatizer(stddev=1.0, key=1, sharding=place.rules)
    state = jax.tree.map(jnp.copy, (tree, privatizer.init(tree)))
    if place.rules is not None:
        replicated = NamedSharding(place.rules.mesh, PartitionSpec())
        state = place.rules.shard_accumulators(state[0]), jax.device_put(state[1], replicated)
    add = jax.jit(
        lambda state: privatizer.update(*state),
        donate_argnums=0,
        out_shardings=jax.tree.map(lambda leaf: leaf.sharding, state),
    )
    compiled = add.lower(state).compile()
    return Prepared(threaded(compiled, state, [()]), compiled.memory_analysis().temp_size_in_bytes)


def table(place: Place, is_tiny: bool, rounds: int, tell: Callable[[str], None]) -> report.Cells:
    """A line a tree."""
    programs: dict[tuple[str, str], Prepared] = {}
    for name, tree in trees(is_tiny).items():
        tell(f"{place.name}: compiling noise for {name}")
        programs[name, "draw"], programs[name, "noise"] = (
            plain_draw(tree, place),
            noise(tree, place),
        )
    tell(f"{place.name}: timing {len(programs)} programs in {rounds} rounds")
    seconds = interleaved({name: program.run for name, program in programs.items()}, rounds)
    lines: list[tuple[str, ...]] = []
    for name, tree in trees(is_tiny).items():
        draw, noisy = ((name, kind) for kind in ("draw", "noise"))
        lines.append(
            (
                name,
                str(len(jax.tree.leaves(tree))),
                str(num_entries(tree)),
                f"{1e3 * np.median(seconds[draw]):.2f}",
                f"{1e3 * np.median(seconds[noisy]):.2f}",
                report.with_quartiles(ratios(seconds[noisy], seconds[draw])),
                f"{4 * num_entries(tree) / 2**20:.2f}",
                f"{programs[draw].temp_bytes / 2**20:.2f}",
                f"{programs[noisy].temp_bytes / 2**20:.2f}",
            )
        )
    note = f"goal: at most {GOAL} x the plain draw, however many leaves there are"
    return report.Cells(f"Noise, {place.name}", _COLUMNS, lines, note)


_COLUMNS = (
    "gradients",
    "leaves",
    "entries",
    "plain draw, ms",
    "noise, ms",
    "noise / draw (quartiles)",
    "gradients, MiB",
    "temp. of draw, MiB a device",
    "temp. of noise, MiB a device",
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.noise",
        description="Time and memory of the noise against one plain draw of as many numbers.",
    )
    parser.add_argument("--rounds", type=int, default=15, help="rounds (default: 15)")
    parser.add_argument("--tiny", action="store_true", help="only to see that everything works")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    options = parser.parse_args(argv)
    console = Console(width=160)
    tables: list[report.Cells] = []
    with console.status("") as status:
        for place in places():
            tables.append(table(place, options.tiny, options.rounds, status.update))
            console.print(report.for_terminal(tables[-1]))
    if options.markdown is not None:
        command = ["python", "-m", "tests.benchmarks.noise", "--rounds", str(options.rounds)]
        flags = f"XLA_FLAGS={os.environ['XLA_FLAGS']} " if os.environ.get("XLA_FLAGS") else ""
        report.write_markdown(
            options.markdown,
            flags + shlex.join(command + ["--tiny"] * options.tiny),
            tables,
            "What noise costs",
            "One jitted update of `gaussian_privatizer`, gradients and state donated, against "
            "`jax.random.normal` of as many numbers. All take turns in one process; times are "
            "compared round by round, with the quartiles of the rounds' ratios. Temporary memory "
            "is the compiled program's. Virtual devices share the machine's cores. Where noise is "
            "copied, every device draws all of it, in the plain draw as well.",
        )


if __name__ == "__main__":
    main()
