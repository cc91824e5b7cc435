"""Two attacks on what training releases: an image from one step, and who was trained on.

**Gradient inversion.** The attacker sees what one step releases, knows the model and all other
examples of the batch, and subtracts them. What is left is the clipped gradient of one image, with
noise or without. A gradient of the first layer is an outer product with the image (and with 1 for
the bias), so the image is its first singular vector; no search is needed. `likeness` is the
absolute correlation of what is found with the image, the mean over 50 images. The network has 64
hidden units; noise is that of 60 steps with sampling probability 0.25, delta 1e-5.

**Membership inference.** The convolutional network of `examples/mnist_small.py` is trained on 1,000
images of MNIST. The attacker sees the model, 1,000 images that were trained on, and 1,000 that were
not, and guesses by the loss (Yeom et al. 2018), or by the loss minus that of a model that was
trained on 1,000 other images (Watson et al. 2022). `found at 1 %`: the share of trained images that
is found with false alarms of 1 %; `at most`: what the plan's trade-off function allows any attack.
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqx_dp as dp

from .audit import example
from .command import Part
from .page import Table

EPSILONS = (math.inf, 8.0, 3.0, 1.0)
CLIP_NORM = 0.3


class Dense(eqx.Module):
    """One hidden layer."""

    hidden: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, key: Any):
        one, other = jax.random.split(key)
        self.hidden = eqx.nn.Linear(784, 64, key=one)
        self.head = eqx.nn.Linear(64, 10, key=other)

    def __call__(self, image: Any) -> Any:
        return self.head(jnp.tanh(self.hidden(image.ravel())))


def plan_of(epsilon: float, steps: int) -> dp.PrivacyPlan:
    if math.isinf(epsilon):
        return dp.PrivacyPlan(0.25, steps, 0.0, 1e-5)
    return dp.PrivacyPlan.calibrate(epsilon=epsilon, delta=1e-5, sampling_prob=0.25, steps=steps)


def gradients(model: Dense, images: Any, labels: Any) -> list[np.ndarray]:
    """What the attacker has without noise: the first layer's gradient of each image, clipped."""
    grad_fn = dp.filter_clipped_grad(example("mnist_small").loss, l2_clip_norm=CLIP_NORM)
    compiled = eqx.filter_jit(grad_fn)
    mask = np.zeros(64, bool)
    batch = images[:64], labels[:64]
    mask[63] = True
    others = compiled(model, *batch, is_padding_example=jnp.asarray(mask)).hidden
    mask[63] = False
    found: list[np.ndarray] = []
    for i in range(63, len(images)):
        which = [*range(63), i]
        together = compiled(
            model, images[which], labels[which], is_padding_example=jnp.asarray(mask)
        ).hidden
        left = jax.tree.map(lambda a, b: np.asarray(a, np.float64) - b, together, others)
        found.append(np.concatenate([left.weight, left.bias[:, None]], axis=1))
    return found


def inverted(gradient: np.ndarray) -> np.ndarray:
    """The image that is in a gradient: its first singular vector, whose last entry is positive."""
    row = np.linalg.svd(gradient, full_matrices=False)[2][0]
    return (row[:-1] * (np.sign(row[-1]) or 1)).reshape(28, 28)


def inversion(picture: Path | None, number: int) -> Table:
    images, labels, *_ = example("mnist_small").load_images()
    images, labels = images[: 63 + number], labels[: 63 + number]
    known = gradients(Dense(jax.random.key(0)), images, labels)
    rng, rows, shown = np.random.default_rng(0), list[dict[str, str]](), [images[63:, 0]]
    for epsilon in EPSILONS:
        stddev = plan_of(epsilon, 60).noise_multiplier * CLIP_NORM
        found = [inverted(one + stddev * rng.normal(size=one.shape)) for one in known]
        pairs = zip(found, images[63:, 0], strict=True)
        like = np.mean([abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) for a, b in pairs])
        name = "no noise" if math.isinf(epsilon) else f"noise of epsilon {epsilon:g}"
        rows.append({"one step with": name, "likeness": f"{like:.3f}"})
        shown.append(np.array(found))
    if picture is not None:
        draw(shown, ["image", *(row["one step with"] for row in rows)], picture)
    return Table("Gradient inversion", rows)


def draw(shown: list[np.ndarray], names: list[str], path: Path) -> None:
    """Three images, and what is found of each."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        3, len(shown), figsize=(1.5 * len(shown), 4.6), layout="constrained"
    )
    for column, (images, name) in enumerate(zip(shown, names, strict=True)):
        for row in range(3):
            axes[row, column].imshow(images[row], cmap="gray")
            axes[row, column].set_axis_off()
        axes[0, column].set_title(name.replace(" of ", "\nof "), fontsize=9)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def trained(epsilon: float, images: Any, labels: Any, steps: int) -> tuple[Any, dp.PrivacyPlan]:
    """The convolutional network, and its plan."""
    digits, is_private = example("mnist_small"), math.isfinite(epsilon)
    plan = plan_of(epsilon, steps)
    step = dp.make_step(
        digits.loss,
        optax.sgd(3.0, momentum=0.9) if is_private else optax.adam(3e-3),
        plan,
        num_examples=len(images),
        l2_clip_norm=CLIP_NORM if is_private else math.inf,
    )
    first = digits.Convolutional(jax.random.key(0))
    return dp.Trainer(step, (images, labels), progress=False).run(first).model, plan


def membership(number: int, steps: int) -> Table:
    digits = example("mnist_small")
    images, labels, *_ = digits.load_images()
    parts = [slice(i * number, (i + 1) * number) for i in range(3)]
    losses = eqx.filter_jit(jax.vmap(digits.loss, (None, 0, 0)))
    seen = jnp.asarray(images[: 2 * number]), jnp.asarray(labels[: 2 * number])
    reference, _ = trained(math.inf, images[parts[2]], labels[parts[2]], steps)
    base, rows = np.asarray(losses(reference, *seen)), []
    for epsilon in (math.inf, 8.0, 1.0):
        model, plan = trained(epsilon, images[parts[0]], labels[parts[0]], steps)
        accuracy = float(digits.accuracy(model, images[parts[1]], labels[parts[1]]))
        own = -np.asarray(losses(model, *seen))
        most = plan.trade_off()
        row = {"epsilon": f"{epsilon:g}", "accuracy": f"{accuracy:.2f}"}
        for name, scores in (("loss", own), ("minus another's", own + base)):
            inside, outside = scores[:number], scores[number:]
            auc = np.mean(inside[:, None] > outside) + np.mean(inside[:, None] == outside) / 2
            share = np.mean(inside > np.quantile(outside, 0.99))
            row |= {f"AUC, {name}": f"{auc:.3f}", f"found at 1 %, {name}": f"{share:.3f}"}
        rows.append(row | {"at most": f"{float(most.found(0.01)):.3f}"})
        print(" | ".join(rows[-1].values()), flush=True)
    return Table("Membership inference", rows)


def tables(options: argparse.Namespace) -> Iterator[Table]:
    is_small = options.tiny or options.short
    yield inversion(options.picture, 5 if is_small else 50)
    if options.inversion:
        return
    yield membership(100 if is_small else 1_000, 5 if is_small else 60)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--picture", type=Path, help="where to draw what inversion finds")
    parser.add_argument("--inversion", action="store_true", help="the first attack alone")


PART = Part(__doc__, tables, add_options)
