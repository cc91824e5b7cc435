"""Trains one network with independent and with correlated noise, at the same epsilon.

Both plans take as many steps, of as many images of digits. With correlated noise each step takes
back part of the noise of the steps before. Sums of gradients then have less noise (root mean square
8.5 clip norms in place of 10.5 at epsilon 8), and single gradients have more (3.2 in place of 0.9).
On this network the second counts for more: the loss is 0.150 in place of 0.146.

    python examples/correlated_noise.py
"""

import argparse
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits

import eqx_dp as dp

SAMPLING_PROB, DELTA, RATE = 1 / 16, 1e-5, 1.0
BANDS = 8


def plans(epsilon: float, steps: int) -> dict[str, dp.PrivacyPlan]:
    """Poisson sampling with independent noise, and BandMF with cyclic Poisson sampling."""
    same: dict[str, Any] = {"epsilon": epsilon, "delta": DELTA, "steps": steps}
    cyclic = dp.sampling.CyclicPoisson(SAMPLING_PROB * BANDS, cycle=BANDS)
    banded = dp.Banded.band_mf(BANDS, steps)
    return {
        "independent": dp.PrivacyPlan.calibrate(sampling_prob=SAMPLING_PROB, **same),
        f"{BANDS} bands": dp.PrivacyPlan.calibrate(sampling=cyclic, noise=banded, **same),
    }


def loss(model: Any, x: Any, y: Any) -> Any:
    """The cross-entropy of one image."""
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y)


@eqx.filter_jit
def mean_loss(model: Any, x: Any, y: Any) -> Any:
    return jnp.mean(jax.vmap(loss, (None, 0, 0))(model, x, y))


def train(plan: dp.PrivacyPlan, seed: int) -> list[float]:
    """The mean loss of all images after every eighth step. Seeds are for experiments alone."""
    x, y = load_digits(return_X_y=True)
    x, y = (x / 16).astype(np.float32), y.astype(np.int32)
    options: dict[str, Any] = {"num_examples": len(x), "l2_clip_norm": 1.0, "seed": 2**64 + seed}
    step = dp.make_step(loss, optax.sgd(RATE), plan, **options)
    model = eqx.nn.MLP(64, 10, 64, 1, jnp.tanh, key=jax.random.key(seed))
    state, sampler, found = step.init(model), step.sampler(), list[float]()
    for t in range(plan.steps):
        (images, labels), is_padding_example = sampler.take(t, x, y)
        state = step(state, images, labels, is_padding_example=is_padding_example)
        if t % 8 == 7:
            found.append(float(mean_loss(state.model, x, y)))
    return found


def draw(found: dict[str, np.ndarray], epsilon: float, path: Path) -> None:
    """Draws the mean of all seeds, and their range."""
    matplotlib.use("agg")
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, losses in found.items():
        steps = 8 * np.arange(1, losses.shape[1] + 1)
        axes.plot(steps, losses.mean(axis=0), label=name)
        axes.fill_between(steps, losses.min(axis=0), losses.max(axis=0), alpha=0.2)
    axes.set(xlabel="step", ylabel="mean loss", yscale="log")
    axes.set_title(f"Noise of digits at epsilon {epsilon:g}, delta {DELTA:g}")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epsilon", type=float, default=8.0, help="of both (default 8)")
    parser.add_argument("--steps", type=int, default=256, help="a multiple of 8 (default 256)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each (default 3)")
    out = Path("out/correlated_noise.png")
    parser.add_argument("--out", type=Path, default=out, help="the picture")
    arguments: Any = parser.parse_args(words)
    found = dict[str, np.ndarray]()
    for name, plan in plans(arguments.epsilon, arguments.steps).items():
        found[name] = np.array([train(plan, seed) for seed in range(arguments.seeds)])
        last = ", ".join(f"{of_seed[-1]:.3f}" for of_seed in found[name])
        print(
            f"{name}: epsilon {plan.epsilon():.2f}, loss {found[name][:, -1].mean():.3f} ({last})"
        )
    draw(found, arguments.epsilon, arguments.out)
    print(f"picture: {arguments.out}")


if __name__ == "__main__":
    main()
