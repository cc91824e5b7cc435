"""What a device holds when parameters are spread over the axis of the examples, by device count.

Nothing is timed: the figures are the compiled program's own, for virtual devices. Two examples a
device, one at a time, under scan and remat. The non-private gradient has the same rules, and
processes the examples of a device at once.
"""

import argparse
import collections
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import eqx_dp as dp
from tests.sharding.compiled import Collective, compiled

from .command import Part
from .page import MIB, Table


class Case(NamedTuple):
    """A model, and how it is spread.

    Attributes:
        title: what it is.
        model: the parameters.
        loss: of a batch.
        batch: from a number of examples to a batch.
        params: the rules for parameters.
        layer_bytes: of one layer's parameters.
    """

    title: str
    model: Any
    loss: Callable[..., Any]
    batch: Callable[[int], tuple[Any, ...]]
    params: tuple[tuple[str, P], ...]
    layer_bytes: int


def layers_loss(remat: bool, model: Any, x: Any) -> Any:
    """Eight layers under a scan, of a batch."""

    def body(x: Any, weight: Any) -> tuple[Any, None]:
        return jnp.tanh(x @ weight), None

    x, _ = jax.lax.scan(jax.checkpoint(body) if remat else body, x, model["weight"])
    return jnp.mean(jnp.sum(x**2, axis=(1, 2)))


def layers(width: int = 512, remat: bool = True) -> Case:
    return Case(
        f"8 layers {width} x {width}, 4 steps, {8 * width**2 * 4 / MIB:g} MiB",
        {"weight": jnp.ones((8, width, width)) / width},
        functools.partial(layers_loss, remat),
        lambda num_examples: (np.ones((num_examples, 4, width), np.float32),),
        (("weight", P(None, "data")),),
        width**2 * 4,
    )


CONTENDERS: dict[str, dict[str, Any]] = {
    "non-private": {},
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
    some = jax.devices()[:devices]
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=some)
    options = dict(CONTENDERS[name])
    accumulators = options.pop("accumulators", "params")
    rules = dp.ShardingRules(mesh, params=case.params, accumulators=accumulators)

    def non_private(model: Any, *batch: Any) -> Any:
        return rules.shard(eqx.filter_grad(case.loss)(model, *batch))

    options |= {"keep_batch_dim": True, "sharding": rules, "microbatch_size": 1}
    clipped = dp.filter_clipped_grad(case.loss, l2_clip_norm=1.0, **options)
    with jax.set_mesh(mesh):
        model = rules.shard(case.model)
        batch = rules.shard_batch(case.batch(of_device * devices))
        found = compiled(clipped if CONTENDERS[name] else non_private, model, *batch)
    memory = found.program.compiled.memory_analysis()
    return Held(
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.temp_size_in_bytes,
        found.collectives,
    )


COLUMNS = (
    "contender",
    "devices",
    "arguments, MiB",
    "outputs",
    "temporary",
    "together",
    "collectives in a loop",
)


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """A line a contender and number of devices."""
    case, lines = layers(64 if options.tiny else 512), list[tuple[str, ...]]()
    for devices in (2, 8) if options.short or options.tiny else (2, 4, 8):
        for name in CONTENDERS:
            found = measure(case, name, devices)
            sizes = (found.arguments, found.outputs, found.temporary, found.total)
            kinds = collections.Counter(c.name for c in found.collectives if c.in_loop)
            sent = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())) or "none"
            lines.append((name, str(devices), *(f"{size / MIB:.3f}" for size in sizes), sent))
    yield Table(case.title, COLUMNS, lines)


PART = Part(__doc__, tables)
