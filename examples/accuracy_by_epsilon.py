"""Measures what accuracy to expect at what epsilon, on the data of three examples.

Trains the networks of `digits.py`, `mnist_small.py` and `names.py` from several seeds, at several
epsilons and without noise, and draws the picture of the guide "Choosing epsilon, delta, batch size,
clip norm, learning rate".

    python examples/accuracy_by_epsilon.py --out examples/pictures/accuracy_by_epsilon.png
"""

import argparse
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import digits
import matplotlib
import mnist_small
import names
import numpy as np
from matplotlib import pyplot as plt
from rich.console import Console
from rich.table import Table

import eqx_dp as dp

EXAMPLES: dict[str, ModuleType] = {"digits": digits, "mnist_small": mnist_small, "names": names}
TITLES = {
    "digits": "digits, 8 x 8: 1,437 images",
    "mnist_small": "MNIST, 28 x 28: 4,000 images",
    "names": "surnames of 12 languages: 10,000",
}
EPSILONS = (0.5, 1.0, 3.0, 8.0, math.inf)

Accuracies = dict[float, list[float]]  # by epsilon, one for each seed


def make_plan(example: ModuleType, epsilon: float, steps: int | None) -> dp.PrivacyPlan:
    """The example's plan at an epsilon; without noise where epsilon is infinite."""
    sampling_prob, steps = float(example.SAMPLING_PROB), int(steps or example.STEPS)
    if math.isinf(epsilon):
        return dp.PrivacyPlan(sampling_prob, steps, noise_multiplier=0.0, delta=digits.DELTA)
    return dp.PrivacyPlan.calibrate(
        epsilon=epsilon, delta=digits.DELTA, sampling_prob=sampling_prob, steps=steps
    )


def measure(name: str, seeds: int, steps: int | None, policy: dp.Policy) -> Accuracies:
    """Held-out accuracy of the last step."""
    found: Accuracies = {}
    for epsilon in EPSILONS:
        plan = make_plan(EXAMPLES[name], epsilon, steps)
        for seed in range(seeds):
            *_, (_, accuracy, _) = EXAMPLES[name].train(plan, policy, seed)
            found.setdefault(epsilon, []).append(accuracy)
        print(f"{name}, epsilon {epsilon:g}: {np.mean(found[epsilon]):.3f}", flush=True)
    return found


def draw(measured: dict[str, Accuracies], path: Path) -> None:
    """Draws accuracy against epsilon; dotted, what the same network reaches without noise."""
    matplotlib.use("agg")
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for number, (name, found) in enumerate(measured.items()):
        epsilons = [epsilon for epsilon in found if math.isfinite(epsilon)]
        means, lowest, highest = (
            [float(of(found[epsilon])) for epsilon in epsilons] for of in (np.mean, min, max)
        )
        axes.plot(epsilons, means, marker="o", color=f"C{number}", label=TITLES[name])
        axes.fill_between(epsilons, lowest, highest, color=f"C{number}", alpha=0.2)
        axes.axhline(float(np.mean(found[math.inf])), color=f"C{number}", linestyle=":")
    axes.set(
        xscale="log",
        xlabel=f"epsilon (delta = {digits.DELTA:g})",
        ylabel="held-out accuracy",
        title="What to expect; dotted: clipped, without noise",
    )
    axes.set_xticks(ticks := [epsilon for epsilon in EPSILONS if math.isfinite(epsilon)])
    axes.set_xticklabels([f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def table(measured: dict[str, Accuracies]) -> Table:
    shown = Table("data", *(f"epsilon {epsilon:g}" for epsilon in EPSILONS))
    for name, found in measured.items():
        shown.add_row(TITLES[name], *(f"{np.mean(found[epsilon]):.3f}" for epsilon in EPSILONS))
    return shown


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=EXAMPLES, action="append", help="one of the examples")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each (default 3)")
    parser.add_argument("--steps", type=int, help="training steps (default: the example's)")
    parser.add_argument("--policy", default="float32", help="a preset, or a .toml file")
    out = Path("out/accuracy_by_epsilon.png")
    parser.add_argument("--out", type=Path, default=out, help="the picture")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    arguments: Any = parse_arguments(words)
    policy = dp.load_policy(arguments.policy)
    measured = {
        name: measure(name, arguments.seeds, arguments.steps, policy)
        for name in arguments.only or EXAMPLES
    }
    draw(measured, arguments.out)
    Console().print(table(measured))
    print(f"picture: {arguments.out}")


if __name__ == "__main__":
    main()
