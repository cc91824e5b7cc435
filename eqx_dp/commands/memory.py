"""`eqx-dp memory`: what a private step of a small model needs of a device, before it runs."""

import argparse
import dataclasses
import re
from typing import Any

import equinox as eqx
import jax
import optax

from ..gradients import MethodName, filter_clipped_grad
from ..planning import MemoryPlan, TransformerShape, plan_memory, plan_microbatch
from ..planning.memory import told
from ..precision import available_policies, load_policy
from ..privacy import gaussian_privatizer
from ..sharding import ShardingRules
from .command import Command, positive
from .models import WORKLOADS, Workload, add_workload_arguments
from .output import Table, add_output_arguments, check_output, show
from .working import working

_METHODS: tuple[MethodName, ...] = ("book_keeping", "ghost", "per_example")
_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {f"{unit}I": 2 ** (10 * power) for power, unit in enumerate("KMGT", 1)}
_UNITS = {**_DECIMAL, **_BINARY}


def memory(text: str) -> int:
    """Bytes, as an argument's type: `32GB`, `80GiB`, `500000000`."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?I?)B?", text.strip().upper())
    size = int(float(found[1]) * _UNITS[found[2]]) if found and found[2] in _UNITS else 0
    if size < 1:
        raise argparse.ArgumentTypeError(
            f"found {text!r}; allowed: a size such as 32GB (10^9 bytes) or 80GiB (2^30 bytes)"
        )
    return size


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload_arguments(parser, "examples, of all devices")
    parser.add_argument(
        "--policy", choices=available_policies(), default="float32", help="(default: float32)"
    )
    parser.add_argument("--method", nargs="+", choices=_METHODS, default=_METHODS)
    parser.add_argument(
        "--microbatch", type=positive, nargs="+", help="examples at once on a device (default: all)"
    )
    parser.add_argument(
        "--devices", type=positive, default=1, help="that examples are spread over (default: 1)"
    )
    parser.add_argument("--memory", type=memory, help="of a device, such as 32GB")
    add_output_arguments(parser, plot=False)


def _run(arguments: argparse.Namespace) -> None:
    check_output(arguments)
    make, batch, width = WORKLOADS[arguments.model]
    batch, width = arguments.batch or batch, arguments.width or width
    rules = _rules(arguments.devices)
    if rules is not None:
        rules.check_examples(batch)
    own = batch // arguments.devices
    sizes = arguments.microbatch or [own]
    if max(sizes) > own:
        raise ValueError(
            f"--microbatch: found {max(sizes)}; allowed: at most {own}, a device's part"
        )
    with jax.enable_x64(arguments.policy == "float64"):
        # Model and batch are shapes.
        workload = eqx.filter_eval_shape(lambda: make(batch, width))
        show(_table(workload, arguments, rules, sizes), arguments)


def _rules(devices: int) -> ShardingRules | None:
    """Examples spread over so many devices, sums and optimizer too."""
    if devices == 1:
        return None
    if jax.device_count() < devices:
        # Virtual ones will do: nothing is run. This is before JAX has started its own, or fails.
        raise ValueError(
            f"--devices: found {devices}; allowed: at most {jax.device_count()}, those there are. "
            f"Virtual ones: JAX_NUM_CPU_DEVICES={devices} eqx-dp memory ..."
        )
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    return ShardingRules(mesh, accumulators="examples")


def _table(
    workload: Workload,
    arguments: argparse.Namespace,
    rules: ShardingRules | None,
    sizes: list[int],
) -> Table:
    policy, methods, memory = load_policy(arguments.policy), arguments.method, arguments.memory
    grad_fn = filter_clipped_grad(workload.loss, l2_clip_norm=1.0, policy=policy, sharding=rules)
    model: Any = policy.cast_to_param(workload.model)
    noise = gaussian_privatizer(stddev=1.0, key=jax.random.key(0), policy=policy, sharding=rules)
    step: dict[str, Any] = {
        "optimizer": optax.chain(noise, optax.adam(1e-3)),
        "device_memory": memory,
    }
    shape = None
    if arguments.model == "gpt":
        length, width = model.positions.shape
        shape = TransformerShape(model.blocks[0].attention.num_heads, width, length)

    def planned(method: MethodName, size: int) -> MemoryPlan:
        here: dict[str, Any] = {"microbatch_size": size, "transformer": shape} | step
        return plan_memory(grad_fn, model, *workload.batch, method=method, **here)

    def largest(method: MethodName) -> int | str:
        try:
            return plan_microbatch(grad_fn, model, *workload.batch, method=method, **step)
        except ValueError as error:  # not even one example fits
            return str(error)

    of_size = [(method, size) for method in methods for size in sizes]
    of_memory = methods if memory else ()
    plans: list[MemoryPlan] = []
    found: dict[str, int | str] = {}
    with working(len(of_size) + len(of_memory)) as begin:
        for method, size in of_size:
            begin(f"compiling {method}, microbatch {size}")
            plans.append(planned(method, size))
        for method in of_memory:
            begin(f"compiling {method}, for the largest microbatch that fits")
            found[method] = largest(method)
    return _shown(workload.title, arguments, plans, found)


def _shown(
    title: str,
    arguments: argparse.Namespace,
    plans: list[MemoryPlan],
    largest: dict[str, int | str],
) -> Table:
    heads = (
        *("method", "microbatch", "parameters", "gradients", "optimizer", "batch"),
        *("per example", "noise", "sum of parts", "compiled"),
        *(("textbook",) if plans[0].textbook else ()),
        *(("fits",) if arguments.memory else ()),
    )
    notes = [
        "bytes of one device; the parts are told from shapes, 'compiled' is what the compiler says"
    ]
    if plans[0].textbook:
        notes.append("textbook: activations are M_model B T^2 / (4 N D^2), B examples at once")
    for method, size in largest.items():
        found = f"microbatches of up to {size} fit" if isinstance(size, int) else size
        notes.append(f"{method}, {told(arguments.memory)}: {found}")
    data = {
        "model": title,
        "policy": arguments.policy,
        "devices": arguments.devices,
        "device_memory": arguments.memory,
        "plans": [plan.to_dict() for plan in plans],
        "largest_microbatch": {
            method: size if isinstance(size, int) else None for method, size in largest.items()
        },
    }
    devices = f"{arguments.devices} device{'s' if arguments.devices > 1 else ''}"
    title = f"{title}, {arguments.policy}, {devices}"
    return Table(title, heads, [_cells(plan) for plan in plans], notes, data, [])


def _cells(plan: MemoryPlan) -> tuple[str, ...]:
    sizes = [*dataclasses.astuple(plan.parts), plan.parts.total]
    sizes.append(None if plan.compiled is None else plan.compiled.total)
    if plan.textbook is not None:
        sizes.append(plan.textbook)
    cells = ["-" if size is None else told(size) for size in sizes]
    if plan.device_memory is not None:
        cells.append("yes" if plan.fits(plan.device_memory) else "no")
    return (plan.method, str(plan.microbatch_size), *cells)


COMMAND = Command(
    "memory",
    "the memory that a private step needs",
    "Says what a private step (clipped gradient, noise, Adam) of a small model needs of a device, "
    "in parts and as compiled, for each method and microbatch. Nothing is run.",
    _add_arguments,
    _run,
    former="plan",
)
