"""Trains on MNIST with correlated noise, in the setting of the code of DP-FTRL.

Kairouz et al. (Practical and Private (Deep) Learning without Sampling or Shuffling, 2021) publish
these numbers as the defaults of their code: a small convolutional network, 3 epochs in steps of 250
images, clip norm 1. In so few epochs sampling saves little privacy. They take batches in a given
order and noise of a binary tree; here cyclic Poisson sampling and BandMF stand beside Poisson
sampling and independent noise, at the same epsilon.

Rates fall to 0. The first ones, at epsilon 1 and 3, were chosen on 10,000 training images that were
held out (`--choose`, one seed), with the other 50,000 to train on: on private data each of these
runs costs its epsilon. Of 8, 16, 24, 40 and 60 bands, 24 have the least `plan.error()` at epsilon
3: that comparison needs no data. Without `--choose` all 60,000 images are trained on, and accuracy
is that on the test images. It needs the extras `data` and `mechanisms`.

    python examples/mnist_correlated.py --epsilon 3 8 --data FOLDER
"""

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from mnist_data import load_images
from mnist_small import Convolutional, accuracy, loss

import eqx_dp as dp

DELTA, BATCH, EPOCHS, CLIP_NORM, BANDS = 1e-5, 250, 3, 1.0, 24
HELD_OUT, FIRST_CHOSEN = 10_000, 100
"""Rates are chosen on the seeds from this one on. Figures are of the seeds from 0 on."""
TRIED = [1.0, 2.0, 4.0, 8.0]
RATES = {1.0: 2.0, 3.0: 4.0}
"""First rates, by epsilon: that of the nearest one is taken. Of those tried they served best."""
KINDS = {"independent": 1, f"{BANDS} bands": BANDS}


def planned(bands: int, epsilon: float, images: int) -> dp.PrivacyPlan:
    """A plan of `EPOCHS` epochs, whose steps are a multiple of the bands."""
    steps = max(1, EPOCHS * images // BATCH // BANDS) * BANDS
    same: dict[str, Any] = {"epsilon": epsilon, "delta": DELTA, "steps": steps}
    prob = min(1.0, BATCH / images)
    if bands == 1:
        return dp.PrivacyPlan.calibrate(sampling_prob=prob, **same)
    sampling = dp.sampling.CyclicPoisson(min(1.0, prob * bands), cycle=bands)
    noise = dp.Banded.band_mf(bands, steps)
    return dp.PrivacyPlan.calibrate(sampling=sampling, noise=noise, **same)


def train(plan: dp.PrivacyPlan, rate: float, seed: int, data: list[np.ndarray]) -> float:
    """One private run; returns accuracy on the last two of `data`. Seeds are for experiments."""
    images, labels, others, their_labels = data
    optimizer = optax.sgd(optax.linear_schedule(rate, 0, plan.steps))
    step = dp.make_step(
        loss, optimizer, plan, num_examples=len(images), l2_clip_norm=CLIP_NORM, seed=2**64 + seed
    )
    first = Convolutional(jax.random.key(seed))
    model = dp.Trainer(step, (images, labels), progress=False).run(first).model
    return float(accuracy(model, jnp.asarray(others), jnp.asarray(their_labels)))


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epsilon", type=float, nargs="+", default=[3.0], help="budgets (3)")
    parser.add_argument("--seeds", type=int, default=1, help="runs at each epsilon (default 1)")
    parser.add_argument("--data", type=Path, help="folder of the four files; otherwise fetched")
    parser.add_argument("--choose", action="store_true", help="compare rates on held-out images")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> dict[tuple[float, str], np.ndarray]:
    """Returns accuracies of each epsilon and kind of noise: one a seed, or rates x seeds."""
    arguments: Any = parse_arguments(words)
    data = load_images(arguments.data)
    data[::2] = [x[:, None].astype(np.float32) / 255 for x in data[::2]]
    if arguments.choose:
        order = np.random.default_rng(0).permutation(len(data[0]))
        held_out, kept = order[:HELD_OUT], order[HELD_OUT:]
        data = [data[0][kept], data[1][kept], data[0][held_out], data[1][held_out]]
    found: dict[tuple[float, str], np.ndarray] = {}
    for epsilon in arguments.epsilon:
        for name, bands in KINDS.items():
            plan = planned(bands, epsilon, len(data[0]))
            print(f"{name}: {plan}, error of sums {plan.error():.2f}", flush=True)
            best = RATES[min(RATES, key=lambda known: abs(known - epsilon))]
            first, of_rates = FIRST_CHOSEN * arguments.choose, list[list[float]]()
            for rate in TRIED if arguments.choose else [best]:
                seeds = range(first, first + arguments.seeds)
                runs = [100 * train(plan, rate, seed, data) for seed in seeds]
                of_rates.append(runs)
                print(
                    f"  accuracy={np.mean(runs):.2f} ({min(runs):.2f} to {max(runs):.2f}) "
                    f"{rate=:g} {epsilon=:g} delta={DELTA:g}",
                    flush=True,
                )
            found[epsilon, name] = np.array(of_rates if arguments.choose else of_rates[0])
    return found


if __name__ == "__main__":
    main()
