"""What one run gives away of planted canaries, beside the epsilon that its plan says.

Each run trains with canaries, each in or out by a fair coin, by `make_step` and `Trainer`. Two
attacks guess which were in. The gradient attack is the worst case that epsilon covers: every canary
is a gradient of the clip norm along a parameter of its own. The loss attack sees the losses of the
trained model: canaries are random images with random labels, or random characters. Bounds hold with
95 % confidence. `one run` is the bound of Steinke et al. (2023), over the plan's epsilon. `f-DP` is
that of Mahloujifar et al. (arXiv 2410.22235), over the epsilon of the Gaussian mechanism that gives
away as much as the plan. A share above 1 is a violation; of a correct run it is well below 1 with
3,000 canaries. `noise / 4` adds a quarter of the noise that its plan says.

The models are those of `examples/mnist_small.py` (a convolutional network, on images of MNIST) and
`examples/gpt.py` (a GPT with 2 blocks, on Python's documentation).
"""

import argparse
import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import eqx_dp as dp
from eqx_dp.audit import canaries

from .command import Part
from .mutants import ROOT
from .page import Table

DELTA, SAMPLING_PROB, CLIP_NORM = 1e-5, 0.1, 0.5
EPSILONS = (1.0, 3.0, 8.0)


class Trained(NamedTuple):
    """A model of the examples, with data.

    Attributes:
        model: before training.
        loss: of one example.
        data: sources of examples.
        unlike: as many sources, of random examples.
    """

    model: Any
    loss: Callable[..., Any]
    data: tuple[np.ndarray, ...]
    unlike: tuple[np.ndarray, ...]


def images(count: int, planted: int) -> Trained:
    """The convolutional network on images of MNIST."""
    digits = example("mnist_small")
    pixels, labels, *_ = digits.load_images()
    rng = np.random.default_rng(0)
    noise = rng.integers(2, size=(planted, 1, 28, 28)).astype(np.float32)
    unlike = noise, rng.integers(10, size=planted).astype(labels.dtype)
    model = digits.Convolutional(jax.random.key(0))
    return Trained(model, digits.loss, (pixels[:count], labels[:count]), unlike)


def text(count: int, planted: int) -> Trained:
    """The GPT on windows of Python's documentation."""
    gpt = example("gpt")
    windows = gpt.windows(gpt.documents_of_topics(), 32)
    unlike = np.random.default_rng(0).integers(32, 127, size=(planted, 32)).astype(windows.dtype)
    model = gpt.GPT(32, 48, 2, jax.random.key(0))
    return Trained(model, gpt.loss, (windows[:: len(windows) // count][:count],), (unlike,))


MODELS = {"images, 26,010 parameters": images, "text, 69,600 parameters": text}


def audits(
    trained: Trained, epsilon: float, share: float, steps: int, gradients: int
) -> Iterator[canaries.CanaryAudit]:
    """Trains once with both kinds of canaries, and attacks the model."""
    claimed = dp.PrivacyPlan.calibrate(
        epsilon=epsilon, delta=DELTA, sampling_prob=SAMPLING_PROB, steps=steps
    )
    used = dataclasses.replace(claimed, noise_multiplier=share * claimed.noise_multiplier)
    planted = canaries.plant(trained.data, trained.unlike, seed=0)
    marked = canaries.plant_gradients(planted.data, gradients, norm=CLIP_NORM, seed=0)
    step = dp.make_step(
        marked.loss(planted.loss(trained.loss)),
        optax.sgd(1.0),
        used,
        num_examples=marked.num_examples,
        l2_clip_norm=CLIP_NORM,
    )
    after = dp.Trainer(step, marked.data, progress=False).run(marked.model(trained.model)).model
    yield marked.audit(marked.scores(after), claimed, attack="gradient")
    losses = planted.loss_scores(trained.loss, after.model, trained.model)
    yield planted.audit(losses, claimed, attack="loss")


def tables(options: argparse.Namespace) -> Iterator[Table]:
    count, gradients, unlike, steps = 2_000, 3_000, 300, 50
    if options.short or options.tiny:
        count, gradients, unlike, steps = 400, 400, 40, 3 if options.tiny else 20
    rows: list[dict[str, str]] = []
    for name, made in MODELS.items():
        if options.only and not any(part in name for part in options.only):
            continue
        trained = made(count, unlike)
        runs = [(epsilon, 1.0) for epsilon in EPSILONS] + [(3.0, 0.25)]
        for epsilon, share in runs[-1:] if options.tiny else runs:
            for audit in audits(trained, epsilon, share, steps, gradients):
                said = f"{epsilon:g}" if share == 1 else f"{epsilon:g}, noise / {1 / share:g}"
                rows.append({"model": name, "epsilon": said, "attack": audit.attack} | cells(audit))
                print(" ".join(rows[-1].values()), flush=True)
    counts = f"{count} examples, {gradients} gradients and {unlike} examples as canaries"
    yield Table("Audited over stated", rows, f"{counts}, {steps} steps, delta {DELTA:g}.")


def cells(audit: canaries.CanaryAudit) -> dict[str, str]:
    """Bounds, and their shares of what the plan says."""
    return {
        "one run: at least": f"{audit.lower:.2f}",
        "over stated": f"{audit.lower / audit.upper:.2f}",
        "f-DP: at least": f"{audit.lower_gaussian:.2f}",
        "over Gaussian": f"{audit.lower_gaussian / audit.upper_gaussian:.2f}",
        "found": "no" if audit.ok else "yes",
    }


def example(name: str) -> Any:
    """A module of `examples/`."""
    if str(ROOT / "examples") not in sys.path:
        sys.path.insert(0, str(ROOT / "examples"))
    return importlib.import_module(name)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="*", help="models whose name holds one of these")


PART = Part(__doc__, tables, add_options)
