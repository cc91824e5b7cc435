"""Adapts a public GPT to private text with LoRA: only the adapters cost memory and noise.

The base model is that of `gpt.py`, trained without privacy on public text: the documentation
topics that every Python installation carries. It then learns to write Python from the sources of
the standard library, privately, one example being a window of 32 characters. The base stays as it
is, bit for bit. Beside each linear layer of a block stands a product of two thin matrices (Hu et
al. 2021), and `filter_spec` says that these alone are trained: clipped, noised, and given a state
of the optimizer.

The table that is printed holds a step that trains all parameters against the step that is taken, as
the compiler sees them. Both models are checkpointed in `out/lora`; a run that was interrupted
goes on, with fresh noise, when it is started again.

    python examples/lora.py --epsilon 3
"""

import argparse
import math
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from gpt import (
    DELTA,
    GPT,
    documents_of_sources,
    documents_of_topics,
    loss,
    make_evaluation,
    make_optimizer,
    split,
    spread,
    windows,
    written,
)
from jaxtyping import Array, Float, PRNGKeyArray, PyTree
from rich.console import Console
from rich.table import Table

import eqx_dp as dp

CLIP_NORM = 0.5
MICROBATCH = 32
EVALUATED = 512  # windows of held-out text


class LoRA(eqx.Module):
    """A linear layer that is left alone, and beside it a product of rank `rank`."""

    base: eqx.nn.Linear
    down: Float[Array, "*blocks rank inputs"]
    up: Float[Array, "*blocks outputs rank"]

    def __init__(self, base: eqx.nn.Linear, rank: int, key: PRNGKeyArray):
        *blocks, outputs, inputs = base.weight.shape
        self.base = base
        self.down = jax.random.normal(key, (*blocks, rank, inputs)) / math.sqrt(inputs)
        self.up = jnp.zeros((*blocks, outputs, rank))  # nothing is changed at first

    def __call__(self, x: Float[Array, " inputs"]) -> Float[Array, " outputs"]:
        return self.base(x) + self.up @ (self.down @ x)


def linears(model: GPT) -> list[Any]:
    blocks = model.blocks
    return [blocks.attend, blocks.merge, blocks.up, blocks.down]


def adapted(model: GPT, rank: int, key: PRNGKeyArray) -> GPT:
    """The model with an adapter beside each linear layer of its blocks."""
    layers = linears(model)
    keys = jax.random.split(key, len(layers))
    return eqx.tree_at(
        linears, model, [LoRA(layer, rank, key) for layer, key in zip(layers, keys, strict=True)]
    )


def only_adapters(model: GPT) -> PyTree[bool]:
    """What is trained: a tree for `filter_spec`."""
    nothing = jax.tree.map(lambda _: False, model)
    return eqx.tree_at(
        lambda tree: [part for layer in linears(tree) for part in (layer.down, layer.up)],
        nothing,
        replace_fn=lambda _: True,
    )


def make_step(
    plan: dp.PrivacyPlan,
    num_examples: int,
    filter_spec: PyTree[Any] = eqx.is_inexact_array,
    *,
    policy: dp.Policy,
    rate: float,
) -> dp.Step[GPT]:
    return dp.make_step(
        loss,
        make_optimizer(rate, plan.steps),
        plan,
        num_examples=num_examples,
        l2_clip_norm=CLIP_NORM if plan.noise_multiplier > 0 else math.inf,
        policy=policy,
        filter_spec=filter_spec,
        method="per_example",
        microbatch_size=MICROBATCH,
    )


# What a step costs.


class Cost(NamedTuple):
    """What a step holds beside the model, in numbers and bytes."""

    name: str
    trained: int  # numbers; as many normals are drawn for the noise
    per_example: int  # bytes of the gradients of one microbatch
    optimizer: int  # bytes of its state
    temporary: int  # bytes that the compiled step needs while it runs


def cost_of(
    name: str, step: dp.Step[GPT], model: GPT, filter_spec: PyTree[Any], batch: int
) -> Cost:
    """Compiles a step for a batch of a size and reads off what it costs; nothing is run."""
    state = step.init(model)
    trained = sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(model, filter_spec)))
    policy = step.grad_fn.policy
    accumulator = jnp.float32 if policy is None else policy.accumulate_dtype
    text = np.zeros((batch, len(model.position)), np.uint8)
    mask = np.zeros(batch, bool)
    memory: Any = step.lower(state, text, is_padding_example=mask).compile().memory_analysis()
    return Cost(
        name,
        trained,
        MICROBATCH * trained * jnp.dtype(accumulator).itemsize,
        sum(leaf.nbytes for leaf in jax.tree.leaves(eqx.filter(state.opt_state, eqx.is_array))),
        memory.temp_size_in_bytes,
    )


def show(costs: list[Cost]) -> None:
    table = Table(title=f"A private step, microbatches of {MICROBATCH}")
    table.add_column("")
    for name in ("parameters trained, noise numbers", "per-example gradients", "optimizer"):
        table.add_column(name, justify="right")
    table.add_column("all temporary memory, compiled", justify="right")
    for cost in costs:
        sizes = (cost.per_example, cost.optimizer, cost.temporary)
        table.add_row(
            cost.name, f"{cost.trained:,}", *(f"{size / 2**20:.2f} MiB" for size in sizes)
        )
    Console().print(table)


# Training.


def train_base(arguments: Any, policy: dp.Policy, key: PRNGKeyArray) -> GPT:
    """Trains on public text; without noise and clipping it is ordinary training."""
    text, held_out = (windows(part, arguments.length) for part in split(documents_of_topics()))
    plan = dp.PrivacyPlan(min(1.0, arguments.batch / len(text)), arguments.base_steps, 0.0, DELTA)
    step = make_step(plan, len(text), policy=policy, rate=arguments.rate)
    trainer = dp.Trainer(
        step,
        text,
        directory=arguments.out / "base",
        evaluate=make_evaluation(step, spread(held_out, EVALUATED)),
    )
    print(f"Training the base on {len(text)} windows of public text")
    return trainer.run(GPT(arguments.length, arguments.width, arguments.depth, key)).model


def adapt(arguments: Any, policy: dp.Policy, base: GPT, key: PRNGKeyArray) -> GPT:
    """Trains adapters on private text; says what that costs and what it brings."""
    documents = split(documents_of_sources())
    text, held_out = (windows(part, arguments.length) for part in documents)
    plan = dp.PrivacyPlan.calibrate(
        epsilon=arguments.epsilon,
        delta=DELTA,
        sampling_prob=arguments.batch / len(text),
        steps=arguments.steps,
    )
    model = adapted(base, arguments.rank, key)
    options: Any = {"policy": policy, "rate": arguments.rate}
    specs = {"all parameters": (base, eqx.is_inexact_array), "LoRA": (model, only_adapters(model))}
    steps = {name: make_step(plan, len(text), spec, **options) for name, (_, spec) in specs.items()}
    show([cost_of(name, steps[name], *specs[name], arguments.batch) for name in specs])

    step = steps["LoRA"]
    evaluate = make_evaluation(step, spread(held_out, EVALUATED))
    before = float(evaluate(model)["validation_loss"])
    print(f"Adapting on {len(text)} windows of private text\nplan:   {plan}")
    trainer = dp.Trainer(step, text, directory=arguments.out / "adapted", evaluate=evaluate)
    model = trainer.run(model).model
    after = float(evaluate(model)["validation_loss"])
    print(f"\n{written(model, 'def ', key)}\n")
    print(f"validation_loss={before:.3f}->{after:.3f} epsilon={plan.epsilon():.2f} delta={DELTA:g}")
    return model


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epsilon", type=float, default=3.0, help="privacy budget (default 3)")
    parser.add_argument("--steps", type=int, default=100, help="private steps (default 100)")
    parser.add_argument("--base-steps", type=int, default=150, help="public ones (default 150)")
    parser.add_argument("--rank", type=int, default=4, help="of the adapters (default 4)")
    parser.add_argument("--batch", type=int, default=256, help="expected size (default 256)")
    parser.add_argument("--rate", type=float, default=1e-2, help="learning rate (default 0.01)")
    parser.add_argument("--width", type=int, default=48, help="of the model (default 48)")
    parser.add_argument("--depth", type=int, default=2, help="blocks (default 2)")
    parser.add_argument("--length", type=int, default=32, help="of a window (default 32)")
    parser.add_argument("--policy", default="mixed_bfloat16", help="a preset, or a .toml file")
    parser.add_argument("--out", type=Path, default=Path("out/lora"), help="folder")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> tuple[GPT, GPT]:
    arguments: Any = parse_arguments(words)
    policy = dp.load_policy(arguments.policy)
    base_key, adapter_key = jax.random.split(jax.random.key(0))
    base = train_base(arguments, policy, base_key)
    return base, adapt(arguments, policy, base, adapter_key)


if __name__ == "__main__":
    main()
