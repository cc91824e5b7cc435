"""Which stages of private training may be narrow, in six pictures from real runs.

1. `sums.png`: the error of a running sum of clipped gradients, by accumulate dtype.
2. `noise.png`: Gaussian noise, its histogram and its tails, by noise dtype.
3. `accuracy.png`: held-out accuracy on scikit-learn's digits at equal epsilon, by policy.
4. `cost.png`: time and memory of a private step of the same training, by policy.
5. `formats.png`: held-out accuracy of two trainings (digits, a character GPT) at equal epsilon, in
   six formats: 8 bits with and without wide ends, storage in bfloat16 with both roundings.
6. `layers.png`: signal-to-noise of the clipped sum, against float64, if one layer is narrow.

The third adds to the presets a policy of bfloat16 sums and noise, which has to call itself unsafe.
Whatever its accuracy, its epsilon is not one: one example can move such sums by more than the clip
norm.

    python examples/mixed_precision.py --only noise --only accuracy --out out

The last two take longer, as a CPU emulates 8 bits. They are drawn when they are asked for:

    python examples/mixed_precision.py --only formats --only layers --out out
"""

import argparse
import itertools
import os
import random
import statistics
import textwrap
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import digits
import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import narrow_formats
import numpy as np
from jaxtyping import Array, Float, PyTree
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress, track
from rich.table import Table
from scipy.special import erfc

import eqx_dp as dp

COLOURS = {"bfloat16": "#c8553d", "float16": "#e0a030", "float32": "#2a6f97"}
DTYPES = tuple(COLOURS)
LENGTH, SIZES = 1_000, tuple(2**power for power in range(1, 13))
SHARED = {"independent directions": 0.0, "half of each in common": 0.5}
DRAWS = 2_000_000
UNSAFE = "unsafe: bfloat16 sums and noise; no epsilon"
UNSAFE_DTYPES = (
    "params=float32,compute=bfloat16,output=float32,accumulate=bfloat16,noise=bfloat16,unsafe=true"
)
ROUNDS = 7


# 1. Sums.


def clipped_gradients(shared: float) -> Float[np.ndarray, "examples length"]:
    """Vectors of norm one, in float32; `shared` of each is a direction that all have."""
    generator = np.random.default_rng(0)
    own, common = generator.normal(size=(SIZES[-1], LENGTH)), generator.normal(size=LENGTH)
    own /= np.linalg.norm(own, axis=1, keepdims=True)
    mixed = (1 - shared) * own + shared * common / np.linalg.norm(common)
    return (mixed / np.linalg.norm(mixed, axis=1, keepdims=True)).astype(np.float32)


def running_sums(
    vectors: Float[np.ndarray, "examples length"], dtype: str
) -> Float[np.ndarray, "sizes length"]:
    """The sum after each of `SIZES`: one vector is added at a time, as microbatches are."""

    @jax.jit
    def add(total: Array, vectors: Array, start: int, stop: int) -> Array:
        return jax.lax.fori_loop(start, stop, lambda i, total: total + vectors[i], total)

    total, narrow, sums = jnp.zeros(LENGTH, dtype), jnp.asarray(vectors, dtype), list[Array]()
    for start, stop in itertools.pairwise((0, *SIZES)):
        total = add(total, narrow, start, stop)
        sums.append(total)
    return np.array(sums, np.float64)


def measure_sums() -> dict[str, dict[str, list[float]]]:
    """Relative errors against float64, at each of `SIZES`; by how alike vectors are, by dtype."""
    found: dict[str, dict[str, list[float]]] = {}
    for title, shared in SHARED.items():
        vectors = clipped_gradients(shared)
        exact = np.cumsum(vectors, axis=0, dtype=np.float64)[np.subtract(SIZES, 1)]
        errors = {dtype: running_sums(vectors, dtype) - exact for dtype in DTYPES}
        norms = np.linalg.norm(exact, axis=1)
        found[title] = {
            dtype: list(np.linalg.norm(error, axis=1) / norms) for dtype, error in errors.items()
        }
    return found


def draw_sums(errors: dict[str, dict[str, list[float]]]) -> Figure:
    figure, panels = plt.subplots(1, len(errors), figsize=(8, 3.4), sharey=True)
    for axes, (title, by_dtype) in zip(panels, errors.items(), strict=True):
        for dtype, values in by_dtype.items():
            axes.plot(SIZES, values, marker="o", markersize=3, color=COLOURS[dtype], label=dtype)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(title=f"unit vectors, {title}", xlabel="batch size (examples)")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("relative error of the running sum")
    panels[0].legend(
        title="accumulate dtype", loc="lower left", bbox_to_anchor=(0.02, 0.19), fontsize=9
    )
    return figure


def tabulate_sums(errors: dict[str, dict[str, list[float]]]) -> Table:
    table = Table("accumulate", *errors, title=f"Error of a sum of {SIZES[-1]} unit vectors")
    for dtype in DTYPES:
        table.add_row(dtype, *(f"{by_dtype[dtype][-1]:.1e}" for by_dtype in errors.values()))
    return table


# 2. Noise.


def measure_noise() -> dict[str, Float[np.ndarray, " draws"]]:
    """Standard normal draws, by the dtype that they are drawn in."""
    key = jax.random.key(0)
    return {
        dtype: np.asarray(jax.random.normal(key, (DRAWS,), jnp.dtype(dtype)), np.float64)
        for dtype in DTYPES
    }


def exact_tail(bounds: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """The probability that a standard normal is further than that from zero."""
    return np.asarray(erfc(bounds / np.sqrt(2)))


def draw_noise(draws: dict[str, Float[np.ndarray, " draws"]]) -> Figure:
    figure, (bulk, tails) = plt.subplots(1, 2, figsize=(8, 3.6))
    edges, bounds = np.linspace(-3.5, 3.5, 281), np.linspace(0, 5.6, 561)
    for dtype, values in draws.items():
        style: dict[str, Any] = {"color": COLOURS[dtype], "label": dtype}
        heights, _ = np.histogram(values, edges)
        heights = heights / (DRAWS * np.diff(edges))
        bulk.stairs(heights, edges, fill=dtype == "bfloat16", **style)
        tails.step(bounds, tail(values, bounds), where="post", **style)
        tails.plot(np.max(np.abs(values)), 1 / DRAWS, "o", ms=4, color=COLOURS[dtype])
    middles = (edges[1:] + edges[:-1]) / 2
    bulk.plot(middles, np.exp(-(middles**2) / 2) / np.sqrt(2 * np.pi), "k--", lw=1)
    bulk.set(title="bulk: histogram with bins of 0.025", xlabel="z", ylabel="density")
    tails.plot(bounds, exact_tail(bounds), "k--", lw=1, label="exact")
    tails.set(
        title="tails; a dot is the largest draw",
        xlabel="t (standard deviations)",
        ylabel="P(|z| > t)",
        yscale="log",
        ylim=(0.5 / DRAWS, 1.5),
    )
    tails.grid(alpha=0.3)
    tails.legend(title="noise dtype", fontsize=9, loc="upper right")
    return figure


def tail(
    values: Float[np.ndarray, " draws"], bounds: Float[np.ndarray, " n"]
) -> Float[np.ndarray, " n"]:
    """The share of draws beyond; NaN where a few are, whose number is luck; tiny where none is."""
    sizes = np.sort(np.abs(values))
    beyond = len(sizes) - np.searchsorted(sizes, bounds, side="right")
    return np.select([beyond == 0, beyond < 10], [1e-12, np.nan], beyond / len(sizes))


def tabulate_noise(draws: dict[str, Float[np.ndarray, " draws"]]) -> Table:
    exact = float(exact_tail(np.array([4.0]))[0])
    tail = f"P(|z| > 4); exact {exact:.1e}"
    table = Table("noise", "distinct values", "largest", tail, title=f"{DRAWS:,} normals")
    for dtype, values in draws.items():
        sizes = np.abs(values)
        cells = (f"{len(np.unique(values)):,}", f"{sizes.max():.2f}", f"{np.mean(sizes > 4):.1e}")
        table.add_row(dtype, *cells)
    return table


# 3. Accuracy.


def load_policies(names: list[str]) -> dict[str, dp.Policy]:
    """The policies of that name or file; without any the presets, and one that is unsafe."""
    if names:
        return {name: dp.load_policy(name) for name in names}
    has_float64 = jax.config.read("jax_enable_x64")
    presets = [name for name in dp.available_policies() if has_float64 or name != "float64"]
    # What the others are held against comes first.
    presets.sort(key=lambda name: (name != "float32", "mixed" not in name))
    policies = {name: dp.load_policy(name) for name in presets}
    return policies | {UNSAFE: dp.parse_policy(UNSAFE_DTYPES)}


def measure_accuracy(
    policies: dict[str, dp.Policy], plan: dp.PrivacyPlan, seeds: int
) -> dict[str, list[float]]:
    """Held-out accuracy at the end of the plan, one for each seed, by policy.

    A seed stands for the same initial model, samples and noise key under all policies.
    """
    found: dict[str, list[float]] = {name: [] for name in policies}
    with Progress() as progress:
        task = progress.add_task("training", total=plan.steps * seeds * len(policies))
        for name, policy in policies.items():
            for seed in range(seeds):
                last = float("nan")
                for _, accuracy, _ in digits.train(plan, policy, seed):
                    last = last if accuracy is None else accuracy
                    progress.update(task, advance=1, description=f"training {name}")
                found[name].append(last)
    return found


def draw_accuracy(accuracies: dict[str, list[float]], plan: dp.PrivacyPlan) -> Figure:
    figure, axes = plt.subplots(figsize=(8, 3.4))
    names, runs = wrapped(accuracies), np.array(list(accuracies.values()))
    for seed, markers in zip(range(runs.shape[1]), "osD^vP*X" * runs.shape[1], strict=False):
        axes.plot(names, runs[:, seed], marker=markers, lw=0.8, ms=6, label=f"seed {seed}")
    low = min(0.85, float(runs.min()) - 0.01)
    axes.set(
        title=f"Private training on scikit-learn's digits, epsilon {plan.epsilon():.2f}, "
        f"delta {plan.delta:g}, {plan.steps} steps",
        ylabel="held-out accuracy",
        ylim=(low, min(1.0, float(runs.max()) + 0.02)),
    )
    axes.grid(alpha=0.3, axis="y")
    axes.margins(x=0.1)
    axes.legend(fontsize=9, loc="lower left", ncols=min(runs.shape[1], 5))
    return figure


def wrapped(names: Iterable[str]) -> list[str]:
    """For the axis of a picture."""
    return [textwrap.fill(name, 22) for name in names]


def tabulate_accuracy(accuracies: dict[str, list[float]], plan: dp.PrivacyPlan) -> Table:
    title = f"Held-out accuracy at epsilon {plan.epsilon():.2f}"
    table = Table("policy", "lowest", "mean", "highest", title=title)
    for name, runs in accuracies.items():
        values = (min(runs), statistics.mean(runs), max(runs))
        table.add_row(name, *(f"{value:.3f}" for value in values))
    return table


# 4. Time and memory.


class Cost(NamedTuple):
    """What a policy's step costs.

    Attributes:
        seconds: in each round.
        temporary_bytes: held beside what the step is given and gives back; NaN where unknown.
    """

    seconds: list[float]
    temporary_bytes: float


class Step(NamedTuple):
    """A compiled private step, and what it holds for the time that it takes."""

    run: Callable[[], Any]
    temporary_bytes: float


def compile_step(policy: dp.Policy) -> Step:
    """Clipped gradients, noise and update of the digits model, on as many as a plan samples."""
    images, labels, *_ = digits.load_images()
    number = round(digits.SAMPLING_PROB * len(images))
    model = policy.cast_to_param(digits.Digits(jax.random.key(0)))
    grad_fn = dp.filter_clipped_grad(
        digits.loss, l2_clip_norm=digits.CLIP_NORM, policy=policy, normalize_by=number
    )
    privatizer = dp.gaussian_privatizer(stddev=4 * grad_fn.l2_norm_bound, policy=policy)
    arrays, rest = eqx.partition(model, eqx.is_array)

    def step(
        arrays: PyTree[Array], state: PyTree[Array], images: Array, labels: Array
    ) -> PyTree[Array]:
        model = eqx.combine(arrays, rest)
        updates, state = privatizer.update(grad_fn(model, images, labels), state)
        return policy.cast_to_param(eqx.apply_updates(arrays, updates)), state

    batch = (jnp.asarray(images[:number]), jnp.asarray(labels[:number]))
    arguments = (arrays, privatizer.init(arrays), *batch)
    program = jax.jit(step).lower(*arguments).compile()
    memory = program.memory_analysis()
    temporary = float("nan") if memory is None else float(memory.temp_size_in_bytes)
    return Step(lambda: program(*arguments), temporary)


def measure_cost(policies: dict[str, dp.Policy]) -> dict[str, Cost]:
    """All take turns, in a new order every round, so that what slows a round down slows all."""
    steps = {
        name: compile_step(policy)
        for name, policy in track(policies.items(), "compiling", transient=True)
    }
    shuffled, order = random.Random(0), list(steps)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in track(range(ROUNDS), "timing"):
        shuffled.shuffle(order)
        for name in order:
            seconds[name].append(median_seconds(steps[name].run))
    return {name: Cost(seconds[name], steps[name].temporary_bytes) for name in steps}


def median_seconds(run: Callable[[], Any], runs: int = 5) -> float:
    """Of a few runs, after one that drives out of the caches what was there before."""
    taken: list[float] = []
    for _ in range(1 + runs):
        start = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def time_ratios(costs: dict[str, Cost]) -> dict[str, Float[np.ndarray, " 3"]]:
    """Quartiles of the rounds' ratios to the first policy."""
    reference = next(iter(costs.values())).seconds
    return {
        name: np.quantile(np.divide(cost.seconds, reference), (0.25, 0.5, 0.75))
        for name, cost in costs.items()
    }


def draw_cost(costs: dict[str, Cost]) -> Figure:
    names, ratios = wrapped(costs), np.array(list(time_ratios(costs).values()))
    figure, (times, memory) = plt.subplots(1, 2, figsize=(8, 0.9 + 0.5 * len(names)), sharey=True)
    spread = np.abs(ratios[:, (0, 2)] - ratios[:, 1:2]).T
    bars = times.barh(names, ratios[:, 1], xerr=spread, color="#2a6f97", ecolor="#333333")
    times.bar_label(bars, fmt="%.2f", label_type="center", color="white")
    times.set_xlabel(f"time of a step / {names[0]} (lines: quartiles)")
    mebibytes = [cost.temporary_bytes / 2**20 for cost in costs.values()]
    bars = memory.barh(names, mebibytes, color="#5c8a5a")
    memory.bar_label(bars, fmt="%.1f", label_type="center", color="white")
    memory.set_xlabel("temporary memory of a step (MiB)")
    times.invert_yaxis()
    figure.suptitle(f"A private step of the digits model, on {device_name()}", fontsize=11)
    return figure


def tabulate_cost(costs: dict[str, Cost]) -> Table:
    first, ratios = next(iter(costs)), time_ratios(costs)
    heads = ("policy", "ms", f"time / {first} (quartiles)", "temporary MiB")
    table = Table(*heads, title=f"A private step, on {device_name()}")
    for name, cost in costs.items():
        low, middle, high = ratios[name]
        cells = (
            f"{1e3 * statistics.median(cost.seconds):.3g}",
            f"{middle:.2f} ({low:.2f}-{high:.2f})",
            f"{cost.temporary_bytes / 2**20:.1f}",
        )
        table.add_row(name, *cells)
    return table


def device_name() -> str:
    device: Any = jax.devices()[0]
    return f"{os.cpu_count()} CPU cores" if device.platform == "cpu" else str(device.device_kind)


# All of them.


def save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.set_layout_engine("constrained")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder (default out)")
    parser.add_argument(
        "--only",
        action="append",
        choices=PICTURES,
        help="this picture; repeatable (default 1 to 4)",
    )
    parser.add_argument(
        "--policy", action="append", help="a preset or a .toml file, in place of all; repeatable"
    )
    parser.add_argument("--epsilon", type=float, default=3.0, help="privacy budget (default 3)")
    parser.add_argument("--steps", type=int, default=100, help="training steps (default 100)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each policy (default 3)")
    return parser.parse_args()


def sums(arguments: Any) -> tuple[Figure, Table]:
    del arguments
    errors = measure_sums()
    return draw_sums(errors), tabulate_sums(errors)


def noise(arguments: Any) -> tuple[Figure, Table]:
    del arguments
    draws = measure_noise()
    return draw_noise(draws), tabulate_noise(draws)


def accuracy(arguments: Any) -> tuple[Figure, Table]:
    plan = dp.PrivacyPlan.calibrate(
        epsilon=arguments.epsilon,
        delta=digits.DELTA,
        sampling_prob=digits.SAMPLING_PROB,
        steps=arguments.steps,
    )
    accuracies = measure_accuracy(load_policies(arguments.policy or []), plan, arguments.seeds)
    return draw_accuracy(accuracies, plan), tabulate_accuracy(accuracies, plan)


def cost(arguments: Any) -> tuple[Figure, Table]:
    costs = measure_cost(load_policies(arguments.policy or []))
    return draw_cost(costs), tabulate_cost(costs)


def formats(arguments: Any) -> tuple[Figure, Table]:
    epsilon, steps = arguments.epsilon, arguments.steps
    found = narrow_formats.measure_formats(epsilon, steps, arguments.seeds)
    return (
        narrow_formats.draw_formats(found, epsilon),
        narrow_formats.tabulate_formats(found, epsilon),
    )


def layers(arguments: Any) -> tuple[Figure, Table]:
    found = narrow_formats.measure_layers(arguments.epsilon, arguments.steps)
    return narrow_formats.draw_layers(found), narrow_formats.tabulate_layers(found)


PICTURES: dict[str, Callable[[Any], tuple[Figure, Table]]] = {
    "sums": sums,
    "noise": noise,
    "accuracy": accuracy,
    "cost": cost,
    "formats": formats,
    "layers": layers,
}
UNASKED = ("sums", "noise", "accuracy", "cost")


def main() -> None:
    arguments: Any = parse_arguments()
    matplotlib.use("agg")
    tables: list[Table] = []
    for name in arguments.only or UNASKED:
        figure, table = PICTURES[name](arguments)
        tables.append(table)
        print(f"picture: {save(figure, arguments.out / f'{name}.png')}")
    console = Console()
    for table in tables:
        table.title_justify = "left"
        console.print(table)


if __name__ == "__main__":
    main()
