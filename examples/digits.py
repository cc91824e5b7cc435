"""Trains a convolutional network on scikit-learn's handwritten digits with differential privacy.

1,797 real 8 x 8 images come with scikit-learn; nothing is downloaded. 1,437 of them are the private
training set. The other 360 are taken to be public: accuracy on them is shown while training runs,
at no cost in privacy.

    python examples/digits.py --epsilon 3 --policy mixed_bfloat16
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray
from matplotlib import pyplot as plt
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import eqx_dp as dp

DELTA = 1e-5
SAMPLING_PROB = 0.3
STEPS = 100
CLIP_NORM = 1.0
EVALUATIONS = 10


class Digits(eqx.Module):
    """Two convolutions with group norm, and a linear layer: 5,290 parameters."""

    conv1: eqx.nn.Conv2d
    norm1: eqx.nn.GroupNorm
    conv2: eqx.nn.Conv2d
    norm2: eqx.nn.GroupNorm
    linear: eqx.nn.Linear

    def __init__(self, key: PRNGKeyArray):
        key1, key2, key3 = jax.random.split(key, 3)
        self.conv1 = eqx.nn.Conv2d(1, 16, 3, padding=1, key=key1)
        self.norm1 = eqx.nn.GroupNorm(4, 16)
        self.conv2 = eqx.nn.Conv2d(16, 16, 3, padding=1, key=key2)
        self.norm2 = eqx.nn.GroupNorm(4, 16)
        self.linear = eqx.nn.Linear(16 * 4 * 4, 10, key=key3)

    def __call__(self, image: Float[Array, "1 8 8"]) -> Float[Array, " 10"]:
        hidden = jnp.tanh(self.norm1(self.conv1(image)))
        hidden = hidden.reshape(16, 4, 2, 4, 2).mean(axis=(2, 4))
        hidden = jnp.tanh(self.norm2(self.conv2(hidden)))
        return self.linear(hidden.ravel())


def loss(model: Digits, image: Float[Array, "1 8 8"], label: Int[Array, ""]) -> Float[Array, ""]:
    """Cross-entropy of one example."""
    return optax.softmax_cross_entropy_with_integer_labels(model(image), label)


@eqx.filter_jit
def accuracy(
    model: Digits,
    images: Float[Array | np.ndarray, "n 1 8 8"],
    labels: Int[Array | np.ndarray, " n"],
) -> Float[Array, ""]:
    """The share of images that are recognised."""
    return jnp.mean(jnp.argmax(jax.vmap(model)(jnp.asarray(images)), axis=1) == labels)


def load_images() -> list[np.ndarray]:
    """Images and labels, private ones and held-out ones."""
    images, labels = map(np.asarray, load_digits(return_X_y=True))
    images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    images, held_out, labels, held_out_labels = map(
        np.asarray, train_test_split(images, labels, test_size=360, random_state=0, stratify=labels)
    )
    return [images, labels, held_out, held_out_labels]


def train(
    plan: dp.PrivacyPlan, policy: dp.Policy, seed: int | None = None
) -> Iterator[tuple[int, float | None, float | None]]:
    """Runs the plan; yields the steps done, and now and then held-out accuracy and epsilon.

    Without a seed samples and noise are fresh. The first model is public in any case.
    """
    images, labels, held_out, held_out_labels = load_images()
    model = policy.cast_to_param(Digits(jax.random.key(seed or 0)))

    grad_fn = dp.filter_clipped_grad(
        loss,
        l2_clip_norm=CLIP_NORM,
        policy=policy,
        normalize_by=plan.sampling_prob * len(images),
    )
    optimizer = optax.chain(
        plan.privatizer(grad_fn, key=seed),
        optax.sgd(optax.cosine_decay_schedule(0.5, plan.steps), momentum=0.9),
    )
    # Wide, as gradients are, whatever parameters are stored in.
    params = policy.cast_to_accumulate(eqx.filter(model, eqx.is_inexact_array))
    opt_state = optimizer.init(params)
    sampler = plan.sampler(len(images), seed=seed)

    @eqx.filter_jit
    def step(
        model: Digits,
        opt_state: optax.OptState,
        images: Float[Array | np.ndarray, "batch 1 8 8"],
        labels: Int[Array | np.ndarray, " batch"],
        is_padding_example: Bool[np.ndarray, " batch"],
    ) -> tuple[Digits, optax.OptState]:
        grads = grad_fn(model, images, labels, is_padding_example=is_padding_example)
        updates, opt_state = optimizer.update(grads, opt_state)
        return policy.cast_to_param(eqx.apply_updates(model, updates)), opt_state

    for done in range(1, plan.steps + 1):
        (drawn, their_labels), is_padding = sampler.take(done - 1, images, labels)
        model, opt_state = step(model, opt_state, drawn, their_labels, is_padding)
        if done % max(1, plan.steps // EVALUATIONS) == 0 or done == plan.steps:
            inputs = policy.cast_to_compute((model, held_out))
            yield done, float(accuracy(*inputs, held_out_labels)), plan.epsilon(done)
        else:
            yield done, None, None


def plot(history: list[tuple[float, float]], path: Path, data: str) -> None:
    """Draws held-out accuracy against the privacy spent for it."""
    matplotlib.use("agg")
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.plot(*zip(*history, strict=True), marker="o")
    axes.set(
        xlabel=f"epsilon (delta = {DELTA:g})",
        ylabel="held-out accuracy",
        title=f"Private training on {data}",
    )
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epsilon", type=float, default=3.0, help="privacy budget (default 3)")
    parser.add_argument("--policy", default="mixed_bfloat16", help="a preset, or a .toml file")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps (default 100)")
    parser.add_argument("--seed", type=int, help="repeats a run: never for data that are private")
    parser.add_argument("--out", type=Path, default=Path("out/digits.png"), help="the picture")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    arguments: Any = parse_arguments(words)
    policy = dp.load_policy(arguments.policy)
    plan = dp.PrivacyPlan.calibrate(
        epsilon=arguments.epsilon, delta=DELTA, sampling_prob=SAMPLING_PROB, steps=arguments.steps
    )
    print(f"policy: {policy}\nplan:   {plan}")

    history: list[tuple[float, float]] = []
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[status]}"),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=plan.steps, status="compiling")
        for done, held_out_accuracy, epsilon in train(plan, policy, arguments.seed):
            progress.update(task, completed=done)
            if held_out_accuracy is not None and epsilon is not None:
                history.append((epsilon, held_out_accuracy))
                status = f"held-out accuracy {held_out_accuracy:.3f}  epsilon {epsilon:.2f}"
                progress.update(task, status=status)

    plot(history, arguments.out, "scikit-learn's digits")
    print(f"picture: {arguments.out}")
    epsilon, held_out_accuracy = history[-1]
    print(f"accuracy={held_out_accuracy:.2f} epsilon={epsilon:.2f} delta={plan.delta:g}")


if __name__ == "__main__":
    main()
