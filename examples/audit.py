"""Attacks its own private training: is epsilon what the plan says?

The network of `digits.py` is trained on scikit-learn's digits with canaries among them, each in or
out by a fair coin. Whoever sees the trained model then guesses which were in; the right guesses
give a lower bound on epsilon, to hold beside the plan's upper bound. Three runs keep to their plan,
of epsilon 1, 3 and 10. Four say epsilon 1 or 3 and do not keep to it: two add a quarter of the
noise, two none.

The gradient attack is the worst case that epsilon is about: each canary is a gradient of its own.
The loss attack sees only the losses of canaries that are images, and so finds less.

    python examples/audit.py
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import digits
import jax
import matplotlib
import numpy as np
import optax
from matplotlib import pyplot as plt
from rich.console import Console
from rich.progress import track
from rich.table import Table

import eqx_dp as dp
from eqx_dp.audit import canaries

DELTA = 1e-5
SAMPLING_PROB = 0.1
CLIP_NORM = 1.0
LEARNING_RATE = 1.0
CONFIDENCE = 0.95


class Case(NamedTuple):
    """A run: the epsilon that it says, and the share of the noise that it really adds."""

    name: str
    epsilon: float
    share: float


CASES = (
    Case("epsilon 1", 1.0, 1.0),
    Case("epsilon 3", 3.0, 1.0),
    Case("epsilon 10", 10.0, 1.0),
    Case("says 1, noise / 4", 1.0, 0.25),
    Case("says 3, noise / 4", 3.0, 0.25),
    Case("says 1, no noise", 1.0, 0.0),
    Case("says 3, no noise", 3.0, 0.0),
)


class Result(NamedTuple):
    """What two attacks found in one run, and the share of held-out images that are recognised."""

    case: Case
    loss: canaries.CanaryAudit
    gradient: canaries.CanaryAudit
    accuracy: float

    def attacks_that_find_it(self) -> list[str]:
        """The attacks whose lower bound is above the epsilon that the run says."""
        return [audit.attack for audit in (self.loss, self.gradient) if not audit.ok]


def random_images(number: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images of random black and white pixels with random labels, unlike any digit."""
    rng = np.random.default_rng(seed)
    images = rng.integers(2, size=(number, 1, 8, 8)).astype(np.float32)
    return images, rng.integers(10, size=number)


def attack(case: Case, steps: int, num_gradients: int, num_images: int, seed: int) -> Result:
    """Trains with canaries, and bounds epsilon by what the trained model says of them."""
    claimed = dp.PrivacyPlan.calibrate(
        epsilon=case.epsilon, delta=DELTA, sampling_prob=SAMPLING_PROB, steps=steps
    )
    # As a bug would have it: less noise than the plan, whose epsilon is shown, accounts for.
    used = dataclasses.replace(claimed, noise_multiplier=case.share * claimed.noise_multiplier)

    images, labels, held_out, held_out_labels = digits.load_images()
    planted = canaries.plant((images, labels), random_images(num_images, seed), seed=seed)
    marked = canaries.plant_gradients(planted.data, num_gradients, norm=CLIP_NORM, seed=seed)
    step = dp.make_step(
        marked.loss(planted.loss(digits.loss)),
        optax.sgd(LEARNING_RATE, momentum=0.9),
        used,
        num_examples=marked.num_examples,
        seed=seed,
        l2_clip_norm=CLIP_NORM,
    )
    start = digits.Digits(jax.random.key(seed))
    trained = dp.Trainer(step, marked.data, progress=False).run(marked.model(start)).model

    losses = planted.loss_scores(digits.loss, trained.model, start)
    marks = marked.scores(trained)
    return Result(
        case,
        planted.audit(losses, claimed, attack="loss", confidence=CONFIDENCE),
        marked.audit(marks, claimed, attack="gradient", confidence=CONFIDENCE),
        float(digits.accuracy(trained.model, held_out, held_out_labels)),
    )


def tabulate(results: list[Result]) -> Table:
    """A row for each run."""
    title = f"Epsilon (delta {DELTA:g}): plan, and lower bounds by two attacks ({CONFIDENCE:.0%})"
    table = Table(title=title)
    for head in ("run", "plan ≤", "loss ≥", "gradient ≥", "found by", "accuracy"):
        table.add_column(head, no_wrap=True)
    for result in results:
        table.add_row(
            result.case.name,
            f"{result.gradient.upper:.2f}",
            f"{result.loss.lower:.2f}",
            f"{result.gradient.lower:.2f}",
            ", ".join(result.attacks_that_find_it()) or "-",
            f"{result.accuracy:.2f}",
        )
    return table


def draw(results: list[Result], path: Path) -> None:
    """Draws the plan's upper bound and the lower bounds of each run."""
    matplotlib.use("agg")
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for place, result in enumerate(results):
        is_found = bool(result.attacks_that_find_it())
        axes.axvspan(place - 0.5, place + 0.5, color="#c8553d", alpha=0.12 * is_found, lw=0)
    places = range(len(results))
    upper = [result.gradient.upper for result in results]
    axes.bar(places, upper, width=0.6, color="#2a6f97", alpha=0.3, label="plan: at most")
    for name, marker, colour in (("gradient", "^", "#c8553d"), ("loss", "o", "#444444")):
        lower = [getattr(result, name).lower for result in results]
        axes.plot(
            places, lower, marker, color=colour, label=f"{name} attack: at least ({CONFIDENCE:.0%})"
        )
    axes.set_xticks(places, [result.case.name.replace(", ", ",\n") for result in results])
    axes.set(
        ylabel=f"epsilon (delta = {DELTA:g})",
        title="What each run says, and what attacks find (red: more than it says)",
    )
    axes.grid(alpha=0.3, axis="y")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="training steps (default 200)")
    parser.add_argument(
        "--gradients", type=int, default=3_000, help="gradients as canaries (default 3000)"
    )
    parser.add_argument("--images", type=int, default=500, help="images as canaries (default 500)")
    parser.add_argument("--seed", type=int, default=0, help="repeats an audit")
    parser.add_argument("--out", type=Path, default=Path("out/audit.png"), help="the picture")
    return parser.parse_args()


def main() -> None:
    arguments: Any = parse_arguments()
    sizes = (arguments.steps, arguments.gradients, arguments.images, arguments.seed)
    results = [attack(case, *sizes) for case in track(CASES, "training and attacking")]
    Console().print(tabulate(results))
    draw(results, arguments.out)
    print(f"picture: {arguments.out}")
    found = [result.case.name for result in results if result.attacks_that_find_it()]
    print("give away more than they say: " + ("; ".join(found) or "none"))


if __name__ == "__main__":
    main()
