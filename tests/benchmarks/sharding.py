"""What a device does for clipped gradients of a loss that constrains shardings, by device count.

    python -m tests.benchmarks.sharding --markdown table.md

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
import jax_privacy
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from rich.console import Console

import eqx_dp as dp
from tests.sharding import losses
from tests.sharding.compiled import Compiled, compiled
from tests.sharding.losses import Says, mesh_of

from . import report

DEVICES = (1, 2, 4, 8)
CLIP_NORM = 1.0


class Case(NamedTuple):
    """A model and a loss on a batch, with and without constraints.

    Attributes:
        title: what it is.
        make: from how it speaks of sharding to the model.
        loss: the loss of a batch.
        batch: from a number of examples to a batch.
        num_examples: of the whole batch, for strong scaling; an eighth of it a device, for weak.
    """

    title: str
    make: Callable[[Says], Any]
    loss: Callable[..., Any]
    batch: Callable[[int], tuple[Any, ...]]
    num_examples: int


class Perceptron(eqx.Module):
    """One hidden layer, whose activations are constrained."""

    first: jax.Array
    second: jax.Array
    says: Says = eqx.field(static=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.says.constrain(jnp.tanh(x @ self.first), P("data")) @ self.second


def perceptron() -> Case:
    keys = jax.random.split(jax.random.key(0))
    first = jax.random.normal(keys[0], (256, 512)) / 16
    second = jax.random.normal(keys[1], (512, 16)) / 22

    def batch(num_examples: int) -> tuple[Any, ...]:
        rng = np.random.default_rng(0)
        return tuple(rng.normal(size=(num_examples, n)).astype(np.float32) for n in (256, 16))

    return Case(
        "256-512-16, batch 1024",
        lambda says: Perceptron(first, second, says),
        lambda model, x, y: jnp.mean((model(x) - y) ** 2),
        batch,
        1024,
    )


def gpt() -> Case:
    title = (
        f"GPT T={losses.LENGTH}, d={losses.WIDTH}, V={losses.VOCABULARY}, under scan and remat, "
        "batch 64"
    )
    return Case(
        title,
        functools.partial(losses.GPT, is_stacked=True),
        losses.language_loss,
        losses.tokens,
        64,
    )


CASES = {"perceptron": perceptron, "gpt": gpt}


def non_private(case: Case, rules: dp.ShardingRules) -> Callable[..., Any]:
    del rules
    return eqx.filter_grad(case.loss)


def ours(case: Case, rules: dp.ShardingRules, method: str = "auto") -> Callable[..., Any]:
    return dp.filter_clipped_grad(
        case.loss, l2_clip_norm=CLIP_NORM, keep_batch_dim=True, sharding=rules, method=method
    )


def of_jax_privacy(case: Case, rules: dp.ShardingRules) -> Callable[..., Any]:
    del rules

    def clipped(model: Any, *batch: Any) -> Any:
        params, static = eqx.partition(model, eqx.is_inexact_array)
        return jax_privacy.clipped_grad(
            lambda params, *batch: case.loss(eqx.combine(params, static), *batch),
            l2_clip_norm=CLIP_NORM,
            batch_argnums=tuple(range(1, 1 + len(batch))),
        )(params, *batch)

    return clipped


CONTENDERS: dict[str, tuple[Callable[..., Any], bool]] = {
    "non-private": (non_private, False),
    "eqx_dp auto, constrained": (ours, True),
    "eqx_dp auto, unconstrained": (ours, False),
    "eqx_dp ghost, constrained": (functools.partial(ours, method="ghost"), True),
    "jax_privacy, unconstrained": (of_jax_privacy, False),
    "jax_privacy, constrained": (of_jax_privacy, True),
}


def mesh_of_some(num_devices: int) -> Mesh:
    """A mesh of the first devices; the model axis, of which the GPT speaks, has length one."""
    return Mesh(
        np.asarray(jax.devices()[:num_devices]).reshape(num_devices, 1),
        ("data", "model"),
        axis_types=mesh_of("auto", data=1, model=1).axis_types,
    )


def measure(case: Case, name: str, num_devices: int, num_examples: int) -> Compiled:
    """Compiles one contender's gradient for some devices."""
    make, is_constrained = CONTENDERS[name]
    mesh = mesh_of_some(num_devices)
    rules = dp.ShardingRules(mesh)
    with jax.set_mesh(mesh):
        model = rules.shard(case.make(Says("auto", is_constrained)))
        batch = rules.shard_batch(case.batch(num_examples))
        return compiled(make(case, rules), model, *batch)


def scaling(
    case: Case, is_weak: bool, devices: Sequence[int], tell: Callable[[str], None]
) -> report.Cells:
    """A line a contender and number of devices, ratios to the non-private gradient."""
    rows: list[tuple[str, ...]] = []
    for num_devices in devices:
        num_examples = case.num_examples * num_devices // 8 if is_weak else case.num_examples
        base = None
        for name in CONTENDERS:
            tell(f"{case.title}: {name}, {num_devices} devices")
            found = measure(case, name, num_devices, num_examples)
            base = base or found
            told = collections.Counter(c.name for c in found.collectives)
            rows.append(
                (
                    name,
                    str(num_devices),
                    str(num_examples),
                    f"{found.flops / 1e6:.2f}",
                    f"{found.flops / base.flops:.2f}",
                    f"{found.bytes_accessed / 2**20:.2f}",
                    f"{found.temporary_bytes / 2**20:.2f}",
                    f"{found.temporary_bytes / max(1, base.temporary_bytes):.2f}",
                    ", ".join(f"{n} {kind}" for kind, n in sorted(told.items())) or "none",
                    "yes" if any(c.in_loop for c in found.collectives) else "no",
                )
            )
    kind = "weak scaling" if is_weak else "strong scaling"
    return report.Cells(f"{case.title}: {kind}", _COLUMNS, rows)


_COLUMNS = (
    "contender",
    "devices",
    "examples",
    "MFLOP a device",
    "/ non-private",
    "MiB accessed",
    "temp. MiB",
    "/ non-private",
    "collectives",
    "in a loop",
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.sharding",
        description="FLOPs, bytes, temporary memory and collectives a device.",
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--devices", nargs="+", type=int, choices=DEVICES, default=list(DEVICES))
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    options = parser.parse_args(argv)
    console = Console(width=180)
    tables: list[report.Cells] = []
    with console.status("") as status:
        for name in options.cases:
            for is_weak in (False, True):
                tables.append(scaling(CASES[name](), is_weak, options.devices, status.update))
                console.print(report.for_terminal(tables[-1]))
    if options.markdown is not None:
        command = ["python", "-m", "tests.benchmarks.sharding", "--cases", *options.cases]
        report.write_markdown(
            options.markdown,
            shlex.join(command),
            tables,
            "What a device does for clipped gradients of a loss that constrains shardings",
            "Virtual devices; figures are the compiled program's own, a loop's body counted once. "
            "The constraint puts activations on the axis that examples are spread over. Weak "
            "scaling keeps the examples of a device, strong scaling those of the batch.",
        )


if __name__ == "__main__":
    # Before JAX looks for devices.
    jax.config.update("jax_num_cpu_devices", max(DEVICES))
    main()
