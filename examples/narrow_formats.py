"""What narrow formats cost, for two pictures of mixed_precision.py.

Two private trainings: scikit-learn's digits by a convolutional network (digits.py), and Python's
documentation by a small character GPT (gpt.py). Each is run in six formats. A seed stands for the
same initial model and the same samples in all of them. The noise of two policies is independent, so
that a difference smaller than that of two seeds means nothing.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import digits
import equinox as eqx
import gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from precision_sensitivity import Sensitivity, sensitivity
from rich.progress import Progress
from rich.table import Table

import eqx_dp as dp

LENGTH, WIDTH, DEPTH, WINDOWS = 32, 32, 1, 512  # of the GPT, and what it is evaluated on
GPT_BATCH = 128
MEASURED = 64  # public examples, for the errors of layers
STORED = "params=bfloat16,compute=bfloat16,output=float32,accumulate=float32,noise=float32"
NARROW = ("mixed_float8", "mixed_bfloat16")  # policies that are measured layer by layer
MARKERS = "osD^vP*X"


class Task(NamedTuple):
    """A private training.

    Attributes:
        name: for titles.
        model: made from a key.
        loss: of one example.
        accuracy: of one example, or the share of its characters that are right.
        private: arrays with examples in front.
        held_out: the same, taken to be public.
        optimizer: made from the number of steps.
        clip_norm: of one example's gradient.
        plan: from a budget and a number of steps; the GPT takes twice as many.
        ends: the first and the last module that multiplies matrices.
        layers: the modules that are measured one by one.
    """

    name: str
    model: Callable[[PRNGKeyArray], Any]
    loss: Callable[..., Array]
    accuracy: Callable[..., Array]
    private: tuple[np.ndarray, ...]
    held_out: tuple[np.ndarray, ...]
    optimizer: Callable[[int], optax.GradientTransformation]
    clip_norm: float
    plan: Callable[[float, int], dp.PrivacyPlan]
    ends: tuple[str, str]
    layers: tuple[str, ...]


class Outcome(NamedTuple):
    """What a run ends with: held-out accuracy and loss, and the model."""

    accuracy: float
    loss: float
    model: Any


def digits_task() -> Task:
    images, labels, held_out, held_out_labels = digits.load_images()

    def is_right(model: digits.Digits, image: Array, label: Array) -> Bool[Array, ""]:
        return jnp.argmax(model(image)) == label

    return Task(
        "digits, convolutional network",
        digits.Digits,
        digits.loss,
        is_right,
        (images, labels),
        (held_out, held_out_labels),
        lambda steps: optax.sgd(optax.cosine_decay_schedule(0.5, steps), momentum=0.9),
        digits.CLIP_NORM,
        lambda epsilon, steps: dp.PrivacyPlan.calibrate(
            epsilon=epsilon, delta=digits.DELTA, sampling_prob=digits.SAMPLING_PROB, steps=steps
        ),
        ("conv1", "linear"),
        ("conv1", "norm1", "conv2", "norm2", "linear"),
    )


def gpt_task() -> Task:
    documents = gpt.documents_of_topics() + gpt.documents_of_sources()
    private, held_out = (gpt.windows(part, LENGTH) for part in gpt.split(documents))

    def share_right(model: gpt.GPT, text: Array) -> Float[Array, ""]:
        text = text.astype(jnp.int32)
        return jnp.mean(jnp.argmax(model(text), axis=-1) == text)

    return Task(
        "Python's documentation, character GPT",
        lambda key: gpt.GPT(LENGTH, WIDTH, DEPTH, key),
        gpt.loss,
        share_right,
        (private,),
        (gpt.spread(held_out, WINDOWS),),
        lambda steps: gpt.make_optimizer(6e-3, steps),
        gpt.CLIP_NORM,
        lambda epsilon, steps: dp.PrivacyPlan.calibrate(
            epsilon=epsilon,
            delta=gpt.DELTA,
            sampling_prob=GPT_BATCH / len(private),
            steps=2 * steps,
        ),
        ("blocks.attend", "head"),
        (
            *("blocks.norm1", "blocks.attend", "blocks.merge", "blocks.norm2"),
            *("blocks.up", "blocks.down", "norm", "head"),
        ),
    )


TASKS = (digits_task, gpt_task)


def formats(task: Task) -> dict[str, dp.Policy]:
    """The six formats; the fourth keeps the task's first and last products in bfloat16."""
    narrow = dp.load_policy("mixed_float8")
    ends = tuple(dp.ModuleRule(path, "bfloat16", "wide") for path in task.ends)
    return {
        "float32": dp.load_policy("float32"),
        "mixed_bfloat16": dp.load_policy("mixed_bfloat16"),
        "mixed_float8": narrow,
        "mixed_float8, first and last wide": dataclasses.replace(narrow, modules=ends),
        "bfloat16 storage, to nearest": dp.parse_policy(STORED),
        "bfloat16 storage, stochastic": dp.parse_policy(f"{STORED},rounding=stochastic"),
    }


def training(
    task: Task, plan: dp.PrivacyPlan, policy: dp.Policy
) -> Callable[[int, Callable[[], None]], Outcome]:
    """What runs a plan from a seed; a second argument is called at each step.

    Every seed has the same program: the key of the noise is in the optimizer's state.
    """
    count = len(task.private[0])
    grad_fn = dp.filter_clipped_grad(
        task.loss,
        l2_clip_norm=task.clip_norm,
        policy=policy,
        normalize_by=plan.sampling_prob * count,
    )

    def optimizer(seed: int) -> optax.GradientTransformation:
        return optax.chain(plan.privatizer(grad_fn, key=seed), task.optimizer(plan.steps))

    update = optimizer(0).update

    @eqx.filter_jit
    def step(
        model: Any, opt_state: optax.OptState, batch: PyTree[Any], is_padding: Any, key: Any
    ) -> tuple[Any, optax.OptState]:
        grads = grad_fn(model, *batch, is_padding_example=is_padding)
        updates, opt_state = update(grads, opt_state)
        return dp.apply_updates(model, updates, policy, key=key), opt_state

    def run(seed: int, told: Callable[[], None]) -> Outcome:
        model = policy.cast_to_param(task.model(jax.random.key(seed)))
        # Wide, as gradients are, whatever parameters are stored in.
        opt_state = optimizer(seed).init(policy.cast_to_accumulate(grad_fn.trainable(model)))
        sampler, root = plan.sampler(count, seed=seed), jax.random.key(seed + 1)
        for t in range(plan.steps):
            batch, is_padding = sampler.take(t, *task.private)
            key = jax.random.fold_in(root, t)
            model, opt_state = step(model, opt_state, batch, is_padding, key)
            told()
        return evaluated(task, model)

    return run


@eqx.filter_jit
def means(task_of: tuple[Any, ...], model: Any, held_out: PyTree[Any]) -> list[Array]:
    over = (None, *[0] * len(held_out))
    return [jnp.mean(jax.vmap(of, over)(model, *held_out)) for of in task_of]


def evaluated(task: Task, model: Any) -> Outcome:
    """In float32, whatever a model was trained in: the parameters are what is compared."""
    wide = dp.load_policy("float32").cast_to_compute(model)
    accuracy, loss = means((task.accuracy, task.loss), wide, task.held_out)
    return Outcome(float(accuracy), float(loss), model)


def brief(name: str) -> str:
    """A task's name for a table: the model alone."""
    return name.rpartition(", ")[2]


# Accuracy by format.


def measure_formats(epsilon: float, steps: int, seeds: int) -> dict[str, dict[str, list[Outcome]]]:
    """What runs end with, one for each seed, by task and format."""
    found: dict[str, dict[str, list[Outcome]]] = {}
    for make in TASKS:
        task = make()
        plan, policies = task.plan(epsilon, steps), formats(task)
        with Progress() as progress:
            bar = progress.add_task("training", total=plan.steps * seeds * len(policies))
            for name, policy in policies.items():
                progress.update(bar, description=f"{task.name}: {name}")
                run, told = training(task, plan, policy), functools.partial(progress.advance, bar)
                found.setdefault(task.name, {})[name] = [run(seed, told) for seed in range(seeds)]
    return found


def draw_formats(found: dict[str, dict[str, list[Outcome]]], epsilon: float) -> Figure:
    figure, panels = plt.subplots(1, len(found), figsize=(8, 3.6), sharey=True)
    for axes, (task, by_format) in zip(panels, found.items(), strict=True):
        names = [name.replace(", ", ",\n") for name in by_format]
        runs = np.array([[run.accuracy for run in runs] for runs in by_format.values()])
        for seed, marker in zip(range(runs.shape[1]), MARKERS * runs.shape[1], strict=False):
            axes.plot(runs[:, seed], names, marker, ms=5, alpha=0.7, label=f"seed {seed}")
        axes.plot(runs.mean(axis=1), names, "k|", ms=16, label="mean")
        axes.set_title(task, fontsize=10)
        axes.set_xlabel(f"held-out accuracy at epsilon {epsilon:g}")
        axes.grid(alpha=0.3)
        axes.margins(0.15)
    panels[0].invert_yaxis()
    panels[0].legend(fontsize=8, loc="lower right")
    return figure


def tabulate_formats(found: dict[str, dict[str, list[Outcome]]], epsilon: float) -> Table:
    heads = [f"{brief(task)}: {what}" for task in found for what in ("accuracy", "loss")]
    table = Table("format", *heads, title=f"Held out, at epsilon {epsilon:g}: mean (range)")
    for name in next(iter(found.values())):
        cells: list[str] = []
        for by_format in found.values():
            runs = by_format[name]
            for values in ([run.accuracy for run in runs], [run.loss for run in runs]):
                span = f"{min(values):.3f}-{max(values):.3f}"
                cells.append(f"{statistics.mean(values):.3f} ({span})")
        table.add_row(name, *cells)
    return table


# Layers.


def measure_layers(epsilon: float, steps: int) -> dict[str, Sensitivity]:
    """What narrow layers cost, by task, at the end of a float32 run, on held-out examples."""
    found: dict[str, Sensitivity] = {}
    for make in TASKS:
        task = make()
        policy = dp.load_policy("float32")
        model = training(task, task.plan(epsilon, steps), policy)(0, lambda: None).model
        public = [x[:MEASURED] for x in task.held_out]
        with jax.enable_x64(True):  # the reference is float64
            found[task.name] = sensitivity(
                task.loss,
                model,
                public,
                task.layers,
                NARROW,
                clip_norm=task.clip_norm,
                tolerance=0.05,
            )
    return found


def draw_layers(found: dict[str, Sensitivity]) -> Figure:
    figure, panels = plt.subplots(1, len(found), figsize=(8, 3.8))
    colours = ("#c8553d", "#2a6f97")
    for axes, (task, measured) in zip(panels, found.items(), strict=True):
        for index, ((name, errors), colour) in enumerate(
            zip(measured.alone.items(), colours, strict=True)
        ):
            ratios = [-20 * np.log10(error) for error in errors.values()]
            places = np.arange(len(errors)) + 0.4 * (index - 0.5)
            axes.barh(places, ratios, 0.38, color=colour, label=name)
            axes.set_yticks(range(len(errors)), [*errors], fontsize=8)
        axes.invert_yaxis()
        axes.set_title(task, fontsize=10)
        axes.set_xlabel("signal-to-noise of the clipped sum (dB)\nif only this layer is narrow")
        axes.grid(alpha=0.3, axis="x")
    panels[0].legend(fontsize=8)
    return figure


def tabulate_layers(found: dict[str, Sensitivity]) -> Table:
    heads = ("model", "layer", *NARROW, "recommended")
    table = Table(*heads, title="Relative error of the clipped sum, against float64")
    for task, measured in found.items():
        for layer in next(iter(measured.alone.values())):
            cells = [f"{measured.alone[name][layer]:.1e}" for name in NARROW]
            wide = "float32" if layer in measured.kept_wide else "narrow"
            table.add_row(brief(task), layer, *cells, wide)
        cells = [f"{measured.everywhere[name]:.1e}" for name in NARROW]
        table.add_row(brief(task), "all together", *cells, f"{measured.error:.1e}")
    return table
