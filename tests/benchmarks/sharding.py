"""What a device does for clipped gradients of a loss that constrains shardings, by device count.

Nothing is timed: the figures are the compiled program's own, for virtual devices. The constraint
puts activations on the axis that examples are spread over; `unconstrained` is the same loss without
it.
"""

import argparse
import collections
import functools
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import eqx_dp as dp
from tests.sharding.compiled import Compiled, compiled

from .command import Part
from .contenders import CLIP_NORM
from .page import MIB, Table

SIZES, EXAMPLES = (256, 512, 16), 1024


class Perceptron(eqx.Module):
    """One hidden layer, whose activations are constrained to the axis of the examples, or not."""

    first: jax.Array
    second: jax.Array
    is_constrained: bool = eqx.field(static=True)

    def __init__(self, is_constrained: bool) -> None:
        keys = jax.random.split(jax.random.key(0))
        self.first = jax.random.normal(keys[0], SIZES[:2]) / SIZES[0] ** 0.5
        self.second = jax.random.normal(keys[1], SIZES[1:]) / SIZES[1] ** 0.5
        self.is_constrained = is_constrained

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = jnp.tanh(x @ self.first)
        if self.is_constrained:
            hidden = jax.lax.with_sharding_constraint(hidden, P("data"))
        return hidden @ self.second


def loss(model: Perceptron, x: jax.Array, y: jax.Array) -> jax.Array:
    """Of a batch."""
    return jnp.mean((model(x) - y) ** 2)


def non_private(rules: dp.ShardingRules) -> Callable[..., Any]:
    del rules
    return eqx.filter_grad(loss)


def ours(rules: dp.ShardingRules, method: str = "auto") -> Callable[..., Any]:
    # All at once: the compiler counts the operations of a loop over microbatches once.
    options: Any = {"sharding": rules, "method": method, "microbatch_size": EXAMPLES}
    return dp.filter_clipped_grad(loss, l2_clip_norm=CLIP_NORM, keep_batch_dim=True, **options)


def of_jax_privacy(rules: dp.ShardingRules) -> Callable[..., Any]:
    del rules

    def clipped(model: Any, *batch: Any) -> Any:
        params, static = eqx.partition(model, eqx.is_inexact_array)
        return jax_privacy.clipped_grad(
            lambda params, *batch: loss(eqx.combine(params, static), *batch),
            l2_clip_norm=CLIP_NORM,
            batch_argnums=(1, 2),
        )(params, *batch)

    return clipped


CONTENDERS: dict[str, tuple[Callable[..., Any], bool]] = {
    "non-private": (non_private, True),
    "eqx_dp auto, unconstrained": (ours, False),
    "eqx_dp auto": (ours, True),
    "eqx_dp ghost": (functools.partial(ours, method="ghost"), True),
    "jax_privacy, unconstrained": (of_jax_privacy, False),
    "jax_privacy": (of_jax_privacy, True),
}


def measure(name: str, num_devices: int) -> Compiled:
    """Compiles one contender's gradient for some devices."""
    make, is_constrained = CONTENDERS[name]
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("data",), axis_types=(AxisType.Auto,))
    rules = dp.ShardingRules(mesh)
    batch = tuple(np.ones((EXAMPLES, size), np.float32) for size in (SIZES[0], SIZES[-1]))
    with jax.set_mesh(mesh):
        model = rules.shard(Perceptron(is_constrained))
        return compiled(make(rules), model, *rules.shard_batch(batch))


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """A line a contender and number of devices, ratios to the non-private gradient."""
    lines: list[dict[str, str]] = []
    for num_devices in (1, 8) if options.short or options.tiny else (1, 2, 4, 8):
        base = measure("non-private", num_devices)
        for name in CONTENDERS:
            found = measure(name, num_devices)
            kinds = collections.Counter(c.name for c in found.collectives)
            lines.append(
                {
                    "contender": name,
                    "devices": str(num_devices),
                    "MFLOP a device": f"{found.flops / 1e6:.2f}",
                    "x non-private": f"{found.flops / base.flops:.2f}",
                    "temp. MiB a device": f"{found.temporary_bytes / MIB:.2f}",
                    "collectives": ", ".join(f"{n} {kind}" for kind, n in kinds.items()) or "none",
                }
            )
    yield Table(f"MLP {'-'.join(map(str, SIZES))}, batch {EXAMPLES}", lines)


PART = Part(__doc__, tables)
