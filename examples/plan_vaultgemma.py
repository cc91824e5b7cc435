"""A private run of VaultGemma's size, planned: epsilon, batches, microbatches, and hours.

VaultGemma is the largest model that was published with its private training from scratch: 1B
parameters, sequences of 1,024 tokens. Its report ("VaultGemma: A Differentially Private Gemma
Model", Google, 2025) gives the sampling probability, the noise multiplier, the number of steps and
delta below, an expected batch of 518,000 sequences, and epsilon at most 2.0. It was trained on
2,048 TPU v6e.

Here the model is the GPT of `plan_gpt.py`, of as many parameters. Nothing is computed but the plan
and, from shapes, the floating-point operations of a step. A device's FLOP/s are its data sheet's
for dense products in bfloat16 (989e12: NVIDIA H100 SXM; 918e12: Cloud TPU v6e), times what part of
that is reached.

    python examples/plan_vaultgemma.py
    python examples/plan_vaultgemma.py --size 27B --devices 512 4096
"""

import argparse
from typing import NamedTuple

import jax
import plan_gpt

import eqx_dp as dp

PLAN = dp.PrivacyPlan(sampling_prob=4.08e-5, steps=100_000, noise_multiplier=0.614, delta=1.1e-10)
EXPECTED = 518_000
PEAK = {"H100": 989e12, "TPU v6e": 918e12}  # FLOP/s


class Row(NamedTuple):
    """A run on so many devices.

    Attributes:
        devices: how many.
        slots: for examples, on each of them.
        method: of the engine.
        hours: by kind of device.
    """

    devices: int
    slots: int
    method: str
    hours: dict[str, float]


def num_examples() -> int:
    """The data set of which a sample has the expected size."""
    return round(EXPECTED / PLAN.sampling_prob)


def slots_of(devices: int) -> int:
    """How many examples a device has room for: hosts of up to eight devices share one draw."""
    on_host = min(devices, 8)
    sampler = PLAN.sampler(
        num_examples(), seed=0, hosts=devices // on_host, devices=on_host, shared=True
    )
    return sampler.capacity // on_host


def flops_of_step(sizes: plan_gpt.Sizes, method: str) -> float:
    """Of the expected batch: the loss and its gradient, as `dp.explain` counts them.

    Where a device holds parts of parameters, the method ghost goes forward and back twice. Norms,
    sums and noise are about a percent more, and are left out.
    """
    task = plan_gpt.make_task(sizes, 1, plan_gpt.Mesh(2))
    found = dp.explain(plan_gpt.clipped_grad(task), task.model, *task.batch)
    passes = 2 if method == "ghost" else 1
    return EXPECTED * passes * found.flops / found.num_examples


def main(arguments: list[str] | None = None) -> list[Row]:
    options = parse(arguments)
    epsilon, rows = PLAN.epsilon(), list[Row]()
    print(
        f"epsilon {epsilon:.2f} (published: at most 2.0) at delta {PLAN.delta:g}\n"
        f"{num_examples():,} examples; {EXPECTED:,} are expected in a batch, of {PLAN.steps:,} "
        "steps\n"
    )
    flops = {name: flops_of_step(plan_gpt.SIZES[options.size], name) for name in options.methods}
    line = "{:>8} {:>8} {:>13}   {:<13} {:>10}" + " {:>12}" * len(PEAK)
    hours = [f"h, {kind}" for kind in PEAK]
    print(line.format("devices", "slots", "microbatches", "method", "FLOP/step", *hours))
    for devices in options.devices:
        slots = slots_of(devices)
        for method, of_step in flops.items():
            each = of_step * PLAN.steps / devices / options.utilization / 3600
            rows.append(
                Row(devices, slots, method, {kind: each / peak for kind, peak in PEAK.items()})
            )
            count = -(-slots // options.microbatch)
            taken = [f"{value:,.0f}" for value in rows[-1].hours.values()]
            print(line.format(devices, slots, count, method, f"{of_step:.2e}", *taken))
    print(f"\nslots are a device's; at {options.utilization:.0%} of the peak")
    return rows


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=plan_gpt.SIZES, default="1B", help="of the model")
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 64, 256, 2048])
    parser.add_argument("--methods", nargs="+", default=["ghost", "book_keeping"])
    parser.add_argument("--microbatch", type=int, default=1, help="examples at once on a device")
    parser.add_argument("--utilization", type=float, default=0.4, help="of the peak FLOP/s")
    options = parser.parse_args(arguments)
    if min(options.devices) < 1 or any(n > 8 and n % 8 for n in options.devices):
        parser.error("--devices must be at most 8, or a multiple of 8")
    if options.microbatch < 1 or not 0 < options.utilization <= 1:
        parser.error("--microbatch must be at least 1, and --utilization in (0, 1]")
    return options


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)  # before JAX starts its devices
    main()
