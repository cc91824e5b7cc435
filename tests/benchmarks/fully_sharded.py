"""What a device holds when parameters are spread over the axis of the examples, by device count.

Nothing is timed: the figures are the compiled program's own, for virtual devices. Two examples a
device, one at a time, under scan and remat. The non-private gradient has the same rules, and
processes the examples of a device at once.
"""

import argparse
import collections
from collections.abc import Iterator
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


class Layers(NamedTuple):
    """Eight layers under a scan.

    Attributes:
        width: of each.
        remat: whether each is computed again on the way back.
    """

    width: int = 512
    remat: bool = True

    @property
    def layer_bytes(self) -> int:
        return self.width**2 * 4

    def loss(self, model: Any, x: Any) -> Any:
        """Of a batch."""

        def body(x: Any, weight: Any) -> tuple[Any, None]:
            return jnp.tanh(x @ weight), None

        x, _ = jax.lax.scan(jax.checkpoint(body) if self.remat else body, x, model["weight"])
        return jnp.mean(jnp.sum(x**2, axis=(1, 2)))


layers = Layers
PARAMS = (("weight", P(None, "data")),)
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


def measure(case: Layers, name: str, devices: int, of_device: int = 2) -> Held:
    """Compiles one contender's gradient, one example at a time on each device."""
    some = jax.devices()[:devices]
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=some)
    options = dict(CONTENDERS[name])
    accumulators = options.pop("accumulators", "params")
    rules = dp.ShardingRules(mesh, params=PARAMS, accumulators=accumulators)

    def non_private(model: Any, *batch: Any) -> Any:
        return rules.shard(eqx.filter_grad(case.loss)(model, *batch))

    options |= {"keep_batch_dim": True, "sharding": rules, "microbatch_size": 1}
    clipped = dp.filter_clipped_grad(case.loss, l2_clip_norm=1.0, **options)
    with jax.set_mesh(mesh):
        model = rules.shard({"weight": jnp.ones((8, case.width, case.width)) / case.width})
        x = rules.shard_batch(np.ones((of_device * devices, 4, case.width), np.float32))
        found = compiled(clipped if CONTENDERS[name] else non_private, model, x)
    memory = found.program.compiled.memory_analysis()
    return Held(
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.temp_size_in_bytes,
        found.collectives,
    )


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """A line a contender and number of devices."""
    case, lines = Layers(64 if options.tiny else 512), list[dict[str, str]]()
    for devices in (2, 8) if options.short or options.tiny else (2, 4, 8):
        for name in CONTENDERS:
            found = measure(case, name, devices)
            kinds = collections.Counter(c.name for c in found.collectives if c.in_loop)
            lines.append(
                {
                    "contender": name,
                    "devices": str(devices),
                    "arguments, MiB": f"{found.arguments / MIB:.3f}",
                    "outputs": f"{found.outputs / MIB:.3f}",
                    "temporary": f"{found.temporary / MIB:.3f}",
                    "together": f"{found.total / MIB:.3f}",
                    "collectives in a loop": ", ".join(f"{n} {x}" for x, n in kinds.items()),
                }
            )
    size = f"8 layers {case.width} x {case.width}, 4 steps, {8 * case.layer_bytes / MIB:g} MiB"
    yield Table(size, lines)


PART = Part(__doc__, tables)
