"""Two attacks on what training releases: an image from one step, and who was trained on.

**Gradient inversion.** The attacker sees what one step releases, knows the model and all other
examples of the batch, and subtracts them. What is left is the clipped gradient of one image, with
noise or without. A gradient of the first layer is an outer product with the image (and with 1 for
the bias), so the image is its first singular vector; no search is needed. `likeness` is the
absolute correlation of what is found with the image, the mean over 50 images. The network has 64
hidden units; noise is that of 60 steps with sampling probability 0.25, delta 1e-5.

**Membership inference.** The convolutional network of `examples/mnist_small.py` is trained 8 times
with each epsilon, each time on a random half of 400 images of MNIST (sampling probability 0.25, 80
steps, delta 1e-5). The attacker knows all images, has 7 of the models and what they were trained
on, and guesses from the loss of the eighth whether it was trained on an image, by the likelihood
ratio of the 7 (LiRA, Carlini et al., arXiv 2112.03570). Each model is the eighth once. `found at
1 %`: the share of trained images that is found with false alarms of 1 %; `advantage`: the largest
difference of the two shares; `at most`: what the plan's trade-off function allows any attack. Some
1,600 images are in and as many out: chance alone gives `found` 0.010 +- 0.004, `advantage` 0.03.
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
from eqx_dp.audit import canaries

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


def runs_of(epsilon: float, number: int, runs: int, steps: int) -> tuple[Any, Any, float, Any]:
    """Trains on random halves of some images.

    Returns:
        For each run and image, whether it was trained on, and the loss; the mean accuracy on other
        images; the plan.
    """
    digits, is_private = example("mnist_small"), math.isfinite(epsilon)
    images, labels, *held_out = digits.load_images()
    plan = plan_of(epsilon, steps)
    nothing, candidates = (images[:0], labels[:0]), (images[:number], labels[:number])
    planted = [canaries.plant(nothing, candidates, seed=run) for run in range(runs)]
    step = dp.make_step(
        planted[0].loss(digits.loss),
        optax.sgd(1.0, momentum=0.9) if is_private else optax.adam(3e-3),
        plan,
        num_examples=number,
        l2_clip_norm=CLIP_NORM if is_private else math.inf,
    )
    first, losses, accuracies = digits.Convolutional(jax.random.key(0)), [], []
    for one in planted:
        model = dp.Trainer(step, one.data, progress=False).run(first).model
        losses.append(-one.loss_scores(digits.loss, model))
        accuracies.append(float(digits.accuracy(model, *held_out)))
    is_in = np.array([one.is_in for one in planted])
    return is_in, np.array(losses), float(np.mean(accuracies)), plan


def likelihood_ratios(is_in: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """LiRA's score of each run and image, from the losses of all other runs.

    The logit of an image's probability is taken to be Gaussian, with a mean of its own if it is in
    and another if it is out, and with the spread of all images.
    """
    losses = np.maximum(losses, 1e-7)
    logits = -losses - np.log(-np.expm1(-losses))
    scores = np.zeros_like(logits)
    for run in range(len(logits)):
        others = np.arange(len(logits)) != run
        for side, sign in ((True, 1), (False, -1)):
            known = np.where(is_in[others] == side, logits[others], np.nan)
            usable = np.isfinite(known).sum(0) > 1
            mean = np.full(len(usable), np.nanmean(known))
            mean[usable] = np.nanmean(known[:, usable], 0)
            spread = np.nanstd(known - mean)
            scores[run] += sign * (-np.log(spread) - (logits[run] - mean) ** 2 / (2 * spread**2))
    return scores


def found(scores: np.ndarray, is_in: np.ndarray) -> tuple[float, float]:
    """The share of what is in that is found at 1 % of false alarms, and the advantage."""
    inside, outside = np.sort(scores[is_in]), np.sort(scores[~is_in])
    values = np.concatenate([inside, outside])
    above = [1 - np.searchsorted(side, values, "right") / len(side) for side in (inside, outside)]
    return float(np.mean(inside > np.quantile(outside, 0.99))), float(np.max(above[0] - above[1]))


def membership(number: int, runs: int, steps: int) -> Table:
    rows: list[dict[str, str]] = []
    for epsilon in (math.inf, 8.0, 1.0):
        is_in, losses, accuracy, plan = runs_of(epsilon, number, runs, steps)
        share, advantage = found(likelihood_ratios(is_in, losses), is_in)
        most = plan.trade_off()
        row = {"epsilon": f"{epsilon:g}", "accuracy": f"{accuracy:.2f}"}
        row |= {"found at 1 %": f"{share:.3f}", "at most": f"{float(most.found(0.01)):.3f}"}
        row |= {"advantage": f"{advantage:.3f}"}
        row["advantage, at most"] = f"{most.advantage:.3f}"
        rows.append(row)
        print(" | ".join(row.values()), flush=True)
    return Table("Membership inference", rows)


def tables(options: argparse.Namespace) -> Iterator[Table]:
    is_small = options.tiny or options.short
    yield inversion(options.picture, 5 if is_small else 50)
    if options.inversion:
        return
    yield membership(*((100, 4, 5) if is_small else (400, 8, 80)))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--picture", type=Path, help="where to draw what inversion finds")
    parser.add_argument("--inversion", action="store_true", help="the first attack alone")


PART = Part(__doc__, tables, add_options)
