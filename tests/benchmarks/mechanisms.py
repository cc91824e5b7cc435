"""What other mechanisms cost a step, and what a wrong clip norm costs in accuracy.

Steps: what `make_step` makes, with Adam and a mask, of the GPT (correlated noise) and of the CNN
(clipping). All take turns in one process; the fastest turn counts, with the quartiles of the ratios
round by round in parentheses.

Accuracy: a network with one hidden layer on scikit-learn's digits, 120 steps of SGD of a quarter of
the images each, noise multiplier 4, three seeds. Updates do not grow with the clip norm.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import eqx_dp as dp

from .command import Part
from .contenders import CLIP_NORM
from .page import Table
from .rows import ROWS, Row, classification_loss, tiny
from .step import step_of, threaded
from .timing import Contender, Program, compared, mean_turn, measure

BANDS, STEPS = 4, 64
PLAN = dp.PrivacyPlan(0.125, STEPS, 1.0, 1e-5)
FIRST = (0.03, 3.0, 300.0)
IMAGES, RATE = 1_400, 2.0


def correlated(row: Row) -> dict[str, dp.Step[Any]]:
    """Steps that differ in their noise. All but the first draw as many examples, in cycles."""
    cyclic = dp.sampling.CyclicPoisson(0.5, cycle=BANDS)
    kinds = {
        "lambda_cgd, 2 draws": dp.Banded.lambda_cgd(0.5),
        f"bisr, {BANDS} draws": dp.Banded.bisr(BANDS),
        f"bisr, {BANDS - 1} draws kept": dp.Banded.bisr(BANDS, keep=True),
        f"band_mf, {BANDS - 1} steps kept": dp.Banded.band_mf(BANDS, STEPS),
    }
    found = {"independent": step_of(row, PLAN)}
    for name, noise in kinds.items():
        found[name] = step_of(row, replace(PLAN, sampling=cyclic, noise=noise))
    return found


def clipping(row: Row) -> dict[str, dp.Step[Any]]:
    """Steps that differ in their clip norm."""
    kinds = {
        "a clip norm": CLIP_NORM,
        "Quantile": dp.clipping.Quantile(),
        "AutoS": dp.clipping.AutoS(),
        "PerLayer": dp.clipping.PerLayer(CLIP_NORM),
    }
    return {name: step_of(row, PLAN, norm) for name, norm in kinds.items()}


def timed(title: str, row: Row, steps: dict[str, dp.Step[Any]], rounds: int) -> Table:
    """The time of each step, beside the first's."""
    mask = jnp.arange(row.batch_size) >= row.batch_size - 2

    def prepared(step: dp.Step[Any]) -> Program:
        def run(state: Any) -> Any:
            return step(state, *row.batch, is_padding_example=mask)

        return Program(threaded(run, step.init(row.model), [()]), temp_bytes=None)

    contenders = [Contender(name, lambda _, its=its: prepared(its)) for name, its in steps.items()]
    found = measure(contenders, rounds, turn=mean_turn(4))
    first = next(iter(found.values()))
    lines = [
        {
            "step": name,
            "ms": f"{1e3 * its.best:.2f}",
            "/ first": compared(its.seconds, first.seconds),
        }
        for name, its in found.items()
    ]
    return Table(title, lines)


def accuracy(clip_norm: Any, rate: float, steps: int, seed: int) -> float:
    """Of the images that are not trained on."""
    order = np.random.default_rng(0).permutation(1_797)
    x, y = (array[order].astype(np.float32) for array in load_digits(return_X_y=True))
    x, y = x / 16, y.astype(np.int32)
    plan, sgd = dp.PrivacyPlan(0.25, steps, 4.0, 1e-5), optax.sgd(rate)
    options: dict[str, Any] = {"l2_clip_norm": clip_norm, "num_examples": IMAGES, "seed": seed}
    step = dp.make_step(classification_loss, sgd, plan, **options)
    first = eqx.nn.MLP(64, 10, 64, 1, key=jax.random.key(seed))
    model = dp.Trainer(step, (x[:IMAGES], y[:IMAGES]), progress=False).run(first).model
    return float(jnp.mean(jnp.argmax(jax.vmap(model)(x[IMAGES:]), axis=1) == y[IMAGES:]))


def accuracies(first: Sequence[float], steps: int, seeds: int) -> Table:
    """Mean over seeds: one line a way to clip, one column a first clip norm."""
    kinds: dict[str, Any] = {
        "fixed": lambda norm: (norm, RATE / norm),
        "Quantile": lambda norm: (dp.clipping.Quantile(clip_norm=norm), RATE),
        "AutoS, which has none": lambda norm: (dp.clipping.AutoS(), RATE),
    }

    def mean(kind: Any, norm: float) -> str:
        return f"{100 * np.mean([accuracy(*kind(norm), steps, seed) for seed in range(seeds)]):.1f}"

    lines = [
        {"clip norm": name, **{f"first {norm:g}": mean(kind, norm) for norm in first}}
        for name, kind in kinds.items()
    ]
    return Table("Accuracy on digits, %", lines)


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """Two tables of steps, one of accuracy."""
    gpt, cnn = (ROWS[x](**(tiny(ROWS[x]) if options.tiny else {})) for x in ("gpt_small", "cnn"))
    yield timed("A step of the GPT", gpt, correlated(gpt), options.rounds)
    yield timed("A step of the CNN", cnn, clipping(cnn), options.rounds)
    yield accuracies(FIRST[:1], 2, 1) if options.tiny else accuracies(FIRST, 120, 3)


PART = Part(__doc__, tables, rounds=(15, 5))
