"""What a device holds when parameters are spread over the axis of the examples, by device count.

    python -m tests.benchmarks.fully_sharded --markdown table.md

Nothing is timed: the figures are the compiled program's own, for virtual devices.
"""

import argparse
import collections
import functools
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from rich.console import Console

import eqx_dp as dp
from tests.sharding import losses
from tests.sharding.compiled import Collective, compiled

from . import report

DEVICES = (2, 4, 8)
MEBIBYTE = 2**20


class Case(NamedTuple):
    """A model under scan and remat, and how it is spread.

    Attributes:
        title: what it is.
        make: makes the model.
        loss: of a batch.
        batch: from a number of examples to a batch.
        params: the rules for parameters.
        layer_bytes: of one layer's parameters.
    """

    title: str
    make: Callable[[], Any]
    loss: Callable[..., Any]
    batch: Callable[[int], tuple[Any, ...]]
    params: tuple[tuple[str, P], ...]
    layer_bytes: int


def layers_loss(remat, model, x):
    """Eight layers, of a batch."""

    def body(x, weight):
        return jnp.tanh(x @ weight), None

    x, _ = jax.lax.scan(jax.checkpoint(body) if remat else body, x, model["weight"])
    return jnp.mean(jnp.sum(x**2, axis=(1, 2)))


def layers(width: int = 512, remat: bool = True) -> Case:
    return Case(
        f"8 layers {width} x {width}, 4 steps, {8 * width**2 * 4 / MEBIBYTE:g} MiB",
        lambda: {"weight": jnp.ones((8, width, width)) / width},
        functools.partial(layers_loss, remat),
        lambda num_examples: (np.ones((num_examples, 4, width), np.float32),),
        (("weight", P(None, "data")),),
        width**2 * 4,
    )


def gpt() -> Case:
    says = losses.Says("auto", constrained=False)
    return Case(
        f"GPT of 8 blocks, T={losses.LENGTH}, d={losses.WIDTH}, V={losses.VOCABULARY}",
        lambda: losses.GPT(says, is_stacked=True, depth=8),
        losses.language_loss,
        losses.tokens,
        (
            ("blocks.out", P(None, None, None, "data")),
            ("blocks.**", P(None, "data")),
            ("embedding", P("data")),
            ("head", P("data")),
        ),
        12 * losses.WIDTH**2 * 4,
    )


CASES: dict[str, Callable[[], Case]] = {"layers": layers, "gpt": gpt}

CONTENDERS = {
    "non-private": None,
    "ghost": {"method": "ghost"},
    "ghost, sums once a step": {"method": "ghost", "accumulators": "params_once"},
    "book_keeping": {"method": "book_keeping"},
    "per_example": {"method": "per_example"},
}


class Held(NamedTuple):
    """Bytes of a device, and what devices send."""

    arguments: int
    outputs: int
    temporary: int
    collectives: list[Collective]

    @property
    def total(self) -> int:
        return self.arguments + self.outputs + self.temporary


def measure(case: Case, name: str, devices: int, of_device: int = 2) -> Held:
    """Compiles one contender's gradient, one example at a time on each device."""
    mesh = jax.make_mesh(
        (devices,),
        ("data",),
        axis_types=(losses.AXIS_TYPES["auto"],),
        devices=jax.devices()[:devices],
    )
    options = dict(CONTENDERS[name] or {})
    accumulators = options.pop("accumulators", "params")
    rules = dp.ShardingRules(mesh, params=case.params, accumulators=accumulators)

    def non_private(model, *batch):
        return rules.shard(eqx.filter_grad(case.loss)(model, *batch))

    clipped = dp.filter_clipped_grad(
        case.loss,
        l2_clip_norm=1.0,
        keep_batch_dim=True,
        sharding=rules,
        microbatch_size=1,
        **options,
    )
    with jax.set_mesh(mesh):
        model = rules.shard(case.make())
        batch = rules.shard_batch(case.batch(of_device * devices))
        found = compiled(non_private if CONTENDERS[name] is None else clipped, model, *batch)
    memory = found.program.compiled.memory_analysis()
    return Held(
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.temp_size_in_bytes,
        found.collectives,
    )


def table(case: Case, devices: Sequence[int], tell: Callable[[str], None]) -> report.Cells:
    """A line a contender and number of devices."""
    rows: list[tuple[str, ...]] = []
    for num_devices in devices:
        for name in CONTENDERS:
            tell(f"{case.title}: {name}, {num_devices} devices")
            found = measure(case, name, num_devices)
            sizes = (found.arguments, found.outputs, found.temporary, found.total)
            told = collections.Counter(c.name for c in found.collectives if c.in_loop)
            rows.append(
                (
                    name,
                    str(num_devices),
                    *(f"{size / MEBIBYTE:.3f}" for size in sizes),
                    ", ".join(f"{n} {kind}" for kind, n in sorted(told.items())) or "none",
                )
            )
    return report.Cells(case.title, _COLUMNS, rows)


_COLUMNS = (
    "contender",
    "devices",
    "arguments MiB",
    "outputs MiB",
    "temp. MiB",
    "together",
    "collectives in a loop",
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.fully_sharded",
        description="Bytes of a device when parameters are spread over the examples' axis.",
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--devices", nargs="+", type=int, choices=DEVICES, default=list(DEVICES))
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    options = parser.parse_args(argv)
    console = Console(width=160)
    tables: list[report.Cells] = []
    with console.status("") as status:
        for name in options.cases:
            tables.append(table(CASES[name](), options.devices, status.update))
            console.print(report.for_terminal(tables[-1]))
    if options.markdown is not None:
        command = ["python", "-m", "tests.benchmarks.fully_sharded", "--cases", *options.cases]
        report.write_markdown(
            options.markdown,
            shlex.join(command),
            tables,
            "What a device holds when parameters are spread over the examples' axis",
            "Virtual devices; figures are the compiled program's own. Two examples a device, one "
            "at a time, under scan and remat. The non-private gradient has the same rules, and "
            "processes the examples of a device at once.",
        )


if __name__ == "__main__":
    # Before JAX looks for devices.
    jax.config.update("jax_num_cpu_devices", max(DEVICES))
    main()
