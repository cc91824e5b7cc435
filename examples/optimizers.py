"""Compares optimizers that know of noise with those that do not.

Logistic regression on made-up data, whose features differ in size by a factor of 30: the smaller a
feature, the smaller its gradients, and the larger the weight to be found. Every optimizer gets the
same samples and the same noise, and the rate that is best for it.

    python examples/optimizers.py
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float
from rich.console import Console
from rich.table import Table

import eqx_dp as dp
from eqx_dp import optimizers

FEATURES, EXAMPLES, STEPS, SAMPLING_PROB, DELTA = 20, 1_000, 300, 0.5, 1e-5
SCALES = np.logspace(0, -1.5, FEATURES, dtype=np.float32)
EXPECTED_BATCH = SAMPLING_PROB * EXAMPLES


class Contender(NamedTuple):
    """An optimizer, made from a rate and the standard deviation of the noise.

    Attributes:
        make: makes it.
        rates: of these the best counts.
        clip_norm: of the gradients, or of the scaled ones.
    """

    make: Callable[[Any, float], optax.GradientTransformation]
    rates: tuple[float, ...]
    clip_norm: float = 1.0


SGD_RATES, ADAM_RATES = (1.0, 3.0, 10.0, 20.0, 30.0), (0.02, 0.05, 0.1, 0.2, 0.3)
CONTENDERS = {
    "sgd": Contender(lambda rate, _: optax.sgd(rate), SGD_RATES),
    "disk(sgd)": Contender(lambda rate, _: optimizers.disk(optax.sgd(rate), 0.1), SGD_RATES),
    "adam": Contender(lambda rate, _: optax.adam(rate), ADAM_RATES),
    "disk(adam)": Contender(lambda rate, _: optimizers.disk(optax.adam(rate), 0.3), ADAM_RATES),
    "adam_corrected": Contender(optimizers.adam_corrected, ADAM_RATES),
    "adam_scaled": Contender(lambda rate, _: optimizers.adam_scaled(rate, 0.1), ADAM_RATES, 10.0),
}


def loss(w: Array, x: Array, y: Array) -> Array:
    """Of one example, whose label is 0 or 1."""
    return jnp.logaddexp(0, x @ w) - y * (x @ w)


def make_data(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Features, and labels that are drawn by the logistic model of some weights."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(EXAMPLES, FEATURES)).astype(np.float32) * SCALES
    w = 0.7 * rng.normal(size=FEATURES) / SCALES
    return x, (x @ w > rng.logistic(size=EXAMPLES)).astype(np.float32)


def absences(plan: dp.PrivacyPlan, seed: int) -> Bool[np.ndarray, "steps examples"]:
    """Which examples a step leaves out. Data are few: every batch has a slot for each example."""
    found = np.ones((plan.steps, EXAMPLES), bool)
    sampler = plan.sampler(EXAMPLES, seed=2**40 + seed)
    for step in range(plan.steps):
        indices, is_padding_example = sampler.batch(step)
        found[step, indices[~is_padding_example]] = False
    return found


def train(
    contender: Contender,
    plan: dp.PrivacyPlan,
    rate: Float[Array, ""],
    data: tuple[Array, Array],
    is_absent: Bool[Array, "steps examples"],
    noise: Any,
) -> Float[Array, ""]:
    """The mean loss of all examples after the last step."""
    is_scaled = contender.clip_norm > 1
    grad_fn = dp.filter_clipped_grad(
        optimizers.scaled_loss(loss) if is_scaled else loss,
        l2_clip_norm=contender.clip_norm,
        normalize_by=EXPECTED_BATCH,
        filter_spec=optimizers.Scaled(True, False) if is_scaled else True,
    )
    stddev = plan.noise_multiplier * grad_fn.sensitivity(plan.neighboring_relation)
    optimizer = contender.make(rate, stddev)

    def step(now: tuple[Any, Any, Any], is_padding_example: Array) -> tuple[Any, None]:
        model, state, noise = now
        grads = grad_fn(model, *data, is_padding_example=is_padding_example)
        grads, noise = dp.add_noise(grads, noise, stddev)
        updates, state = optimizer.update(grads, state, grad_fn.trainable(model))
        model = eqx.apply_updates(model, updates)
        return (optimizers.rescaled(model, state) if is_scaled else model, state, noise), None

    w = jnp.zeros(FEATURES)
    model: Any = optimizers.Scaled(w) if is_scaled else w
    state = optimizer.init(grad_fn.trainable(model))
    model = optimizers.rescaled(model, state) if is_scaled else model
    (model, state, _), _ = jax.lax.scan(step, (model, state, noise), is_absent)
    if isinstance(state, optimizers.DiskState):
        model = optimizers.disk_iterate(model, state)
    return jax.vmap(loss, (None, 0, 0))(model.model if is_scaled else model, *data).mean()


def compare(plan: dp.PrivacyPlan, seeds: int) -> dict[str, tuple[float, float]]:
    """By optimizer the loss at its best rate, the mean over seeds, and that rate."""
    its = [(make_data(seed), absences(plan, seed)) for seed in range(seeds)]
    data, is_absent = jax.tree.map(lambda *of_seeds: jnp.stack(of_seeds), *its)
    streams = [dp.noise_stream(2**41 + seed) for seed in range(seeds)]
    noise, found = jax.tree.map(lambda *of: jnp.stack(of), *streams), dict[str, Any]()
    for name, contender in CONTENDERS.items():
        run = jax.jit(jax.vmap(partial(train, contender, plan), (None, 0, 0, 0)))
        losses = [float(run(rate, data, is_absent, noise).mean()) for rate in contender.rates]
        found[name] = min(zip(losses, contender.rates, strict=True))
    return found


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=16, help="runs of each (default 16)")
    parser.add_argument("--noise", type=float, nargs="*", default=(4.0, 12.0), help="multipliers")
    arguments: Any = parser.parse_args(words)
    plans = [dp.PrivacyPlan(SAMPLING_PROB, STEPS, noise, DELTA) for noise in arguments.noise]
    found = [compare(plan, arguments.seeds) for plan in plans]
    shown = Table("loss (rate)", *(f"epsilon {plan.epsilon():.1f}" for plan in plans))
    for name in CONTENDERS:
        shown.add_row(name, *(f"{its[name][0]:.4f} ({its[name][1]:g})" for its in found))
    Console().print(shown)


if __name__ == "__main__":
    main()
