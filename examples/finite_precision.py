"""Attacks the noise of private training where real numbers and float32 differ.

The plan says epsilon 3 at delta 1e-5. Three attacks ask whether one example was there:

- the tail: an output that noise alone cannot reach;
- the grid: an output whose low bits noise alone cannot have;
- the model: after one step of SGD with the example, is there such an entry among a million?

Each attack is made on noise that `jax.random.normal` draws in float32, as most libraries use it,
and on the certified noise of eqx_dp. An attack is certain where it names the example: without the
example its answer is never "there".

    python examples/finite_precision.py
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from matplotlib import pyplot as plt
from rich.console import Console
from rich.progress import track
from rich.table import Table

import eqx_dp as dp

PLAN = dp.PrivacyPlan(sampling_prob=0.01, steps=1000, noise_multiplier=0.8136, delta=1e-5)
# No float32 normal of JAX is larger, times the standard deviation.
LARGEST = 5.2202 * PLAN.noise_multiplier
ENTRIES = 10**6  # of the model, over which the example's gradient is spread
AT_ONCE = 4 * 10**6


def loss(model: Any, x: Any) -> Any:
    """Its gradient is the example."""
    return jnp.sum(model * x)


def privatizer(certified: bool, seed: int) -> optax.GradientTransformation:
    """The plan's own, or float32 normals of JAX in its place."""
    if certified:
        grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=1.0)
        return PLAN.privatizer(grad_fn, key=seed + 2**64)

    def init(params: Any) -> Any:
        del params
        return jax.random.key(seed)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        own, after = jax.random.split(state)
        return updates + PLAN.noise_multiplier * jax.random.normal(own, updates.shape), after

    return optax.GradientTransformation(init, update)


def outputs(certified: bool, example: float, draws: int) -> np.ndarray:
    """What one coordinate's sum is released as, many times."""
    noise = privatizer(certified, seed=0)

    @jax.jit
    def release(state: Any) -> Any:
        return noise.update(jnp.full(min(draws, AT_ONCE), example, jnp.float32), state)

    state, found = noise.init(jnp.zeros(())), list[np.ndarray]()
    for _ in range(-(-draws // AT_ONCE)):
        noisy, state = release(state)
        found.append(np.asarray(noisy))
    return np.concatenate(found)


def all_of_jax() -> np.ndarray:
    """Every float32 normal that JAX can draw: it makes one of 23 random bits."""
    bits = np.arange(2**23, dtype=np.uint32) | np.float32(1).view(np.uint32)
    lowest = np.nextafter(np.float32(-1), np.float32(0))
    uniform = (bits.view(np.float32) - np.float32(1)) * (np.float32(1) - lowest) + lowest
    normal = np.float32(np.sqrt(2)) * jax.lax.erf_inv(jnp.maximum(uniform, lowest))
    return np.asarray(jnp.asarray(PLAN.noise_multiplier, jnp.float32) * normal)


def delta_of_jax(entries: int) -> float:
    """The true delta of the plan with JAX's normals, for every epsilon, is at least this.

    It is the probability that an output is beyond the largest normal, with an example whose
    gradient is spread over so many entries.
    """
    noise = all_of_jax()
    beyond = np.mean(noise + np.float32(1 / np.sqrt(entries)) > noise.max())
    of_step = PLAN.sampling_prob * -np.expm1(entries * np.log1p(-beyond))
    return float(-np.expm1(PLAN.steps * np.log1p(-of_step)))


def models_beyond(certified: bool, has_example: bool, models: int) -> int:
    """Of many models released after one step, how many hold an entry beyond the largest normal."""
    optimizer = optax.chain(privatizer(certified, seed=1), optax.sgd(1.0))
    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=1.0)
    batch = jnp.full((1, ENTRIES), 1 / np.sqrt(ENTRIES), jnp.float32)

    @eqx.filter_jit
    def step(state: Any) -> Any:
        model = jnp.zeros(ENTRIES)
        grads = grad_fn(model, batch, is_padding_example=np.array([not has_example]))
        updates, state = optimizer.update(grads, state)
        return jnp.max(-eqx.apply_updates(model, updates)), state

    state, found = optimizer.init(jnp.zeros(ENTRIES)), 0
    for _ in range(models):
        largest, state = step(state)
        found += float(largest) > LARGEST
    return found


class Result(NamedTuple):
    """What the attacks found, without the example and with it."""

    name: str
    tails: list[np.ndarray]
    beyond: list[int]
    impossible: float
    models: list[int]


def attack(certified: bool, draws: int, models: int) -> Result:
    alone, there = (outputs(certified, example, draws) for example in (0.0, 1.0))
    possible = np.unique(alone) if certified else all_of_jax()
    return Result(
        "certified" if certified else "jax.random.normal",
        [x[x > 0.7 * LARGEST] for x in (alone, there)],
        [int(np.sum(x > LARGEST)) for x in (alone, there)],
        float(np.mean(~np.isin(there[:AT_ONCE], possible))),
        [models_beyond(certified, has_example, models) for has_example in (False, True)],
    )


def tabulate(results: list[Result], draws: int, models: int) -> Table:
    table = Table(title="Without the example -> with it")
    for name in ("noise", f"beyond the tail, of {draws:.0e}", "impossible low bits"):
        table.add_column(name)
    table.add_column(f"models beyond the tail, of {models}")
    for result in results:
        tail, beyond = (f"{a} -> {b}" for a, b in (result.beyond, result.models))
        table.add_row(result.name, tail, f"0 -> {result.impossible:.2%}", beyond)
    return table


def draw(results: list[Result], path: Path) -> None:
    matplotlib.use("agg")
    figure, panels = plt.subplots(1, 2, sharey=True, figsize=(9, 3.6), layout="constrained")
    bins = np.linspace(0.7 * LARGEST, 1.2 * LARGEST, 41)
    for panel, result in zip(panels, results, strict=True):
        for tail, name in zip(result.tails, ("without the example", "with it"), strict=True):
            panel.hist(tail, bins, histtype="step", label=name)
        panel.axvline(LARGEST, linestyle=":", color="gray")
        panel.set(title=f"{result.name} noise", xlabel="released sum of one coordinate")
        panel.set_yscale("log")
    panels[0].set_ylabel("releases")
    panels[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--draws", type=int, default=4 * 10**7, help="releases of one coordinate")
    parser.add_argument("--models", type=int, default=120, help="models of a million parameters")
    parser.add_argument("--out", type=Path, default=Path("out/finite_precision.png"))
    asked: Any = parser.parse_args()
    found = [
        attack(certified, asked.draws, asked.models)
        for certified in track((False, True), "attacking")
    ]
    Console().print(tabulate(found, asked.draws, asked.models))
    print(f"true delta with JAX's normals is at least {delta_of_jax(ENTRIES):.3f}")
    draw(found, asked.out)
    print(f"picture: {asked.out}")
    old, new = found
    print(f"jax {old.impossible:.2f} {old.models} certified {new.impossible:.6f} {new.models}")


if __name__ == "__main__":
    main()
