"""Reads a checkpoint with GPT-2's names and shapes, and fine-tunes it privately with LoRA.

Without `--checkpoint` the example writes one itself: a tiny GPT-2, trained on public text (the
documentation topics of Python). The private text is the standard library's sources, in windows of
32 characters; one window is one example. The adapters are saved with their privacy statement.
What changes for a real checkpoint is in the guide "Fine-tune a pretrained model".

    python examples/finetune_gpt2.py --epsilon 3
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from gpt import VOCABULARY, documents_of_sources, documents_of_topics, loss, split, windows
from gpt2 import GPT2, Conv1D, load_by_name, names_of
from jaxtyping import Array, Float, PRNGKeyArray, PyTree, UInt8
from safetensors import safe_open
from safetensors.flax import save_file

import eqx_dp as dp

DELTA, CLIP_NORM, RANK, RATE = 1e-6, 0.5, 4, 1e-2


class LoRA(eqx.Module):
    """A layer that is left alone, and beside it a product of two thin matrices."""

    base: Conv1D
    down: Float[Array, "inputs rank"]
    up: Float[Array, "rank outputs"]

    def __init__(self, base: Conv1D, key: PRNGKeyArray):
        inputs, outputs = base.weight.shape
        self.base = base
        self.down = jax.random.normal(key, (inputs, RANK)) / math.sqrt(inputs)
        self.up = jnp.zeros((RANK, outputs))  # nothing is changed at first

    def __call__(self, x: Float[Array, "time inputs"]) -> Float[Array, "time outputs"]:
        return self.base(x) + x @ self.down @ self.up


def train(
    model: GPT2,
    text: UInt8[np.ndarray, "n length"],
    plan: dp.PrivacyPlan,
    spec: PyTree[Any],
    **run: Any,
) -> GPT2:
    """Runs a plan; without noise it is ordinary training."""
    step: dp.Step[GPT2] = dp.make_step(
        loss,
        optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1e-2, plan.steps // 10, plan.steps)),
        plan,
        num_examples=len(text),
        l2_clip_norm=CLIP_NORM if plan.noise_multiplier > 0 else math.inf,
        filter_spec=spec,
    )
    return dp.Trainer(step, text, progress=False, **run).run(model).model


def adapted(model: GPT2, key: PRNGKeyArray) -> tuple[GPT2, PyTree[bool]]:
    """The model with an adapter beside every product, and what is trained of it."""

    def is_product(node: Any) -> bool:
        return isinstance(node, Conv1D)

    nodes, structure = jax.tree.flatten(model, is_leaf=is_product)
    keys = jax.random.split(key, len(nodes))
    pairs = zip(nodes, keys, strict=True)
    nodes = [LoRA(node, key) if is_product(node) else node for node, key in pairs]
    adapters = [
        eqx.tree_at(
            lambda lora: (lora.down, lora.up), jax.tree.map(lambda _: False, node), (True,) * 2
        )
        if isinstance(node, LoRA)
        else False
        for node in nodes
    ]
    return jax.tree.unflatten(structure, nodes), jax.tree.unflatten(structure, adapters)


def write_checkpoint(file: Path, model: GPT2, steps: int, length: int) -> None:
    """Trains a tiny model on public text, and writes its arrays under GPT-2's names."""
    text = windows(documents_of_topics(), length)
    model = train(model, text, dp.PrivacyPlan(0.02, steps, 0.0, DELTA), eqx.is_inexact_array)
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(names_of(model), file)


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--checkpoint", type=Path, help="a file with GPT-2's names and shapes")
    parser.add_argument("--epsilon", type=float, default=3.0, help="privacy budget (default 3)")
    parser.add_argument("--steps", type=int, default=100, help="private steps (default 100)")
    parser.add_argument("--prob", type=float, default=0.01, help="sampling probability")
    parser.add_argument("--base-steps", type=int, default=300, help="public ones (default 300)")
    parser.add_argument("--width", type=int, default=48, help="of the model (default 48)")
    parser.add_argument("--depth", type=int, default=2, help="blocks (default 2)")
    parser.add_argument("--heads", type=int, default=4, help="of a block (default 4)")
    parser.add_argument("--length", type=int, default=32, help="of a window (default 32)")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="tokens (ASCII: 128)")
    parser.add_argument("--out", type=Path, default=Path("out/gpt2"), help="folder")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> tuple[float, float]:
    """Returns the held-out loss before and after fine-tuning."""
    arguments: Any = parse_arguments(words)
    shape = (arguments.length, arguments.width, arguments.depth, arguments.heads)
    base_key, adapter_key = jax.random.split(jax.random.key(0))
    base = GPT2(arguments.vocabulary, *shape, base_key)
    file = arguments.checkpoint or arguments.out / "public.safetensors"
    if arguments.checkpoint is None:
        write_checkpoint(file, base, arguments.base_steps, arguments.length)
    base = load_by_name(file, base)

    text, held_out = (windows(part, arguments.length) for part in split(documents_of_sources()))
    held_out = jnp.asarray(held_out[:: max(1, len(held_out) // 512)])
    measure = eqx.filter_jit(lambda model: jnp.mean(jax.vmap(loss, (None, 0))(model, held_out)))
    plan = dp.PrivacyPlan.calibrate(
        epsilon=arguments.epsilon, delta=DELTA, sampling_prob=arguments.prob, steps=arguments.steps
    )
    model, adapters = adapted(base, adapter_key)
    run, saved = arguments.out / "run", arguments.out / "adapters.safetensors"
    before, model = float(measure(model)), train(model, text, plan, adapters, directory=run)
    dp.save_model(saved, eqx.filter(model, adapters), privacy=run)
    with safe_open(saved, "numpy") as opened:
        statement = json.loads(opened.metadata()["privacy"])
    after = float(measure(model))
    print(f"{saved}: epsilon {statement['epsilon']:.2f}, {len(text)} private windows")
    print(f"validation_loss={before:.3f}->{after:.3f} epsilon={plan.epsilon():.2f} delta={DELTA:g}")
    return before, after


if __name__ == "__main__":
    main()
