"""One whole private step, as users run it, against an ordinary one and against peers.

`ordinary`: without privacy, on exactly the expected number of examples, whole or in microbatches,
whichever is faster. `ours`: what `make_step` makes, on batches of the plan's own sampler, which
have slots for padding. jax_privacy takes the same batches, Opacus their real examples, each at the
fastest of a few microbatch sizes. All take turns in one process; a turn is the mean over all
batches. A time is that of the fastest turn, and a ratio that of two such times, with the quartiles
of the ratios round by round in parentheses.

The parts of our step are programs of their own, in units of the ordinary step: `gradient` without
mask on the expected number of examples, `padding` what mask and padding add to it, `noise`,
`optimizer`. Each alone finds its arrays in the caches. `caches` is what gradient, noise and
optimizer take more if they follow one another, as in a step, and `rest` what the whole step takes
beyond that, or less where the compiler saves by seeing them together.
"""

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
import optax
from jaxtyping import Array

import eqx_dp as dp

from . import contenders
from .clipped_gradients import fastest, times
from .command import Part
from .contenders import CLIP_NORM, JAX_PRIVACY, LEARNING_RATE, OPACUS, opacus_is_installed
from .page import Table
from .rows import ROWS, Row, tiny
from .timing import Contender, Program, Result, Run, mean_turn, measure

OPTIMIZER = optax.adam(LEARNING_RATE)
SAMPLING_PROB, DELTA = 1 / 64, 1e-6
# Expected batches that take a reasonable time on two cores, and with `--short`.
EXPECTED: dict[str, tuple[int, ...]] = {
    "mlp": (64, 256, 1024),
    "cnn": (64, 256, 1024),
    "gpt_small": (32, 64),
    "mlp_8M": (64,),
    "gpt_stacked": (64,),
    "gpt_lora": (64,),
}
SHORT: dict[str, tuple[int, ...]] = {
    "mlp": (64, 256),
    "mlp_8M": (64,),
    "cnn": (64, 256),
    "gpt_small": (64,),
}
_WINDOWS = 20  # of as many batches as are asked for, to choose from
_OF_JAX_PRIVACY = (1, 2, 4, 8, 16, 32, 64)
_OF_OPACUS: dict[str, tuple[int | None, ...]] = {"hooks": (8, 32, 64), "ghost": (None, 32)}
# Peers are slow: each takes a few steps at each microbatch size, to find the fastest.
_SEARCH_STEPS = 2


class Case(NamedTuple):
    """A row and batches that a plan draws, as large in expectation as the row's own batch.

    Attributes:
        row: all examples of its batch are real.
        step: ours.
        batches: `(x, y, is_padding_example)`, on the device.
    """

    row: Row
    step: dp.Step[Any]
    batches: list[tuple[Array, Array, Array]]


def case_of(row: Row, num_batches: int, noise_multiplier: float = 1.0) -> Case:
    """Draws a plan's batches from a data set in which the row's examples repeat themselves."""
    plan = dp.PrivacyPlan(SAMPLING_PROB, _WINDOWS * num_batches, noise_multiplier, DELTA)
    step = step_of(row, plan)
    batches: list[tuple[Array, Array, Array]] = []
    for indices, mask in typical(step.sampler(), num_batches, row.batch_size):
        x, y = (array[indices % row.batch_size] for array in row.batch)
        batches.append((x, y, jnp.asarray(mask)))
    return Case(row, step, batches)


def step_of(row: Row, plan: dp.PrivacyPlan, clip_norm: Any = CLIP_NORM) -> dp.Step[Any]:
    """What `make_step` makes of a row, for batches as large as the row's in expectation."""
    return dp.make_step(
        row.loss,
        OPTIMIZER,
        plan,
        num_examples=round(row.batch_size / plan.sampling_prob),
        seed=7,
        l2_clip_norm=clip_norm,
        filter_spec=row.filter_spec,
    )


def typical(sampler: dp.PoissonSampler, num_batches: int, expected: int) -> list[Any]:
    """Batches in a row whose mean number of examples is about what is expected.

    A few batches may hold several percent more or less, which would favour one of the contenders.
    """
    windows = [
        [sampler.batch(first + number) for number in range(num_batches)]
        for first in range(0, _WINDOWS * num_batches, num_batches)
    ]

    def surplus(batches: list[Any]) -> float:
        return abs(sum(np.sum(~mask) for _, mask in batches) - num_batches * expected)

    return min(windows, key=surplus)


# Steps. Each is jitted, with its state donated from step to step, and takes the next of its batches
# at each run.


def threaded(step: Callable[..., Any], state: Any, batches: Sequence[tuple[Any, ...]]) -> Run:
    """Runs a step on the state that it returned before and on the next of the batches."""
    kept, coming = [state], itertools.cycle(batches)

    def run() -> Any:
        kept[0] = step(kept[0], *next(coming))
        return kept[0]

    return run


def ours(case: Case) -> Run:
    def step(state: Any, x: Array, y: Array, mask: Array) -> Any:
        return case.step(state, x, y, is_padding_example=mask)

    return threaded(step, case.step.init(case.row.model), case.batches)


def ordinary(case: Case, microbatch_size: int | None) -> Run:
    """A step without privacy, on as many examples as a batch is expected to hold."""
    params, frozen, _ = case.row.split()
    gradient = contenders.non_private(case.row, microbatch_size)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, frozen: Any, x: Array, y: Array) -> Any:
        sums = gradient(state[0], frozen, x, y)
        return updated(OPTIMIZER, state, jax.tree.map(lambda g: g / len(x), sums))

    return threaded(step, first_state(OPTIMIZER, params), [(frozen, *case.row.batch)])


def of_jax_privacy(case: Case, microbatch_size: int) -> Run:
    """The same step as ours out of jax_privacy's gradient and noise."""
    params, frozen, _ = case.row.split()
    gradient: Any = contenders.of_jax_privacy(case.row, microbatch_size, case.row.batch_size)
    noise = jax_privacy.noise_addition.gaussian_privatizer(
        stddev=case.step.plan.noise_multiplier * gradient.sensitivity(), prng_key=jax.random.key(0)
    )
    optimizer = optax.chain(noise, OPTIMIZER)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, frozen: Any, x: Array, y: Array, mask: Array) -> Any:
        grads = gradient(state[0], frozen, x, y, is_padding_example=mask)
        return updated(optimizer, state, grads)

    batches = [(frozen, *_filled_up(batch, microbatch_size)) for batch in case.batches]
    return threaded(step, first_state(optimizer, params), batches)


def _filled_up(batch: tuple[Array, Array, Array], size: int) -> tuple[Array, ...]:
    """The batch with as much padding behind it as the size asks for, which has to divide it."""
    x, y, mask = batch
    more = -len(mask) % size
    x, y = (jnp.concatenate([array, jnp.repeat(array[-1:], more, axis=0)]) for array in (x, y))
    return x, y, jnp.concatenate([mask, jnp.ones(more, bool)])


def first_state(optimizer: optax.GradientTransformation, params: Any) -> tuple[Any, Any]:
    """Parameters that may be donated, and the optimizer's state."""
    params = jax.tree.map(jnp.copy, params)
    return params, optimizer.init(params)


def updated(optimizer: optax.GradientTransformation, state: Any, grads: Any) -> tuple[Any, Any]:
    params, opt_state = state
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return eqx.apply_updates(params, updates), opt_state


def parts(case: Case) -> dict[str, Run]:
    """What our step is made of, each a program of its own.

    "gradient" is that of the expected batch without mask or padding; "padded gradient" is the
    step's own, on the plan's batches. "in sequence" is gradient, noise and optimizer one after
    another, each with what the one before returns.
    """
    row = case.row
    params, frozen, static = row.split()
    plain = dp.filter_clipped_grad(
        row.loss, l2_clip_norm=CLIP_NORM, filter_spec=row.filter_spec, normalize_by=row.batch_size
    )

    def compiled(grad_fn: Callable[..., Any]) -> Callable[..., Any]:
        def gradient(params: Any, frozen: Any, x: Array, y: Array, mask: Any) -> Any:
            return grad_fn(eqx.combine(params, frozen, static), x, y, is_padding_example=mask)

        return jax.jit(gradient)

    def over(batches: Sequence[tuple[Any, ...]], gradient: Callable[..., Any]) -> Run:
        coming = itertools.cycle(batches)
        return lambda: gradient(params, frozen, *next(coming))

    gradient = compiled(case.step.grad_fn)
    noise = case.step.plan.privatizer(case.step.grad_fn, key=3)
    noisy = jax.jit(lambda state: noise.update(*state), donate_argnums=0)
    optimizer = jax.jit(functools.partial(updated, OPTIMIZER), donate_argnums=0)

    def taken(state: Any, *batch: Array) -> Any:
        trained, noise_state = state
        grads = jax.block_until_ready(gradient(trained[0], frozen, *batch))
        grads, noise_state = jax.block_until_ready(noisy((grads, noise_state)))
        return optimizer(trained, grads), noise_state

    start = first_state(OPTIMIZER, params), noise.init(params)
    return {
        "in sequence": threaded(taken, start, case.batches),
        "gradient": over([(*row.batch, None)], compiled(plain)),
        "padded gradient": over(case.batches, gradient),
        "noise": threaded(noisy, first_state(noise, params), [()]),
        "optimizer": threaded(optimizer, first_state(OPTIMIZER, params), [(params,)]),
    }


def peers(case: Case) -> list[Contender]:
    """An ordinary step, jax_privacy, and Opacus where it can take part."""
    row = case.row
    fitting = [n for n in contenders.powers_of_two(row) if n is None or n >= 4]
    sizes = [size for size in _OF_JAX_PRIVACY if size <= row.batch_size]
    return [
        Contender("ordinary", lambda size: Program(ordinary(case, size)), fitting),
        Contender(JAX_PRIVACY, lambda size: Program(of_jax_privacy(case, size or 1)), sizes),
        *of_opacus(case),
    ]


def of_opacus(case: Case) -> list[Contender]:
    if not opacus_is_installed():
        return []
    from . import peers_opacus

    if not peers_opacus.has_twin(case.row):
        return []
    real = [
        (np.asarray(x)[~np.asarray(m)], np.asarray(y)[~np.asarray(m)]) for x, y, m in case.batches
    ]
    noise = case.step.plan.noise_multiplier

    def prepare(mode: str, size: int | None) -> Program:
        return peers_opacus.step(mode, case.row, real, noise, size)

    return [
        Contender(f"{OPACUS} {mode}", functools.partial(prepare, mode), sizes)
        for mode, sizes in _OF_OPACUS.items()
    ]


def measured(case: Case, rounds: int) -> dict[str, Result]:
    """All contenders and our parts, in rounds that all share."""
    own = {"ours": ours(case), **parts(case)}
    programs = [Contender(name, lambda _, run=run: Program(run)) for name, run in own.items()]
    turn, search = mean_turn(len(case.batches)), mean_turn(_SEARCH_STEPS)
    return measure([*programs, *peers(case)], rounds, turn, search)


def line(case: Case, found: dict[str, Result]) -> dict[str, str]:
    """A row of the table."""
    own, plain, peer = (found[name] for name in ("ours", "ordinary", JAX_PRIVACY))
    at = {name: result.best / plain.best for name, result in found.items()}
    alone = at["padded gradient"] + at["noise"] + at["optimizer"]
    opacus = fastest(found, [name for name in found if name.startswith(OPACUS)])
    return {
        "model": case.row.title,
        "slots": str(len(case.batches[0][2])),
        "ordinary, ms (microbatch)": f"{1e3 * plain.best:.1f} ({plain.at})",
        "ours, ms": f"{1e3 * own.best:.1f}",
        "ours / ordinary": times(own, plain),
        "gradient": f"{at['gradient']:.2f}",
        "padding": f"{at['padded gradient'] - at['gradient']:.2f}",
        "noise": f"{at['noise']:.2f}",
        "optimizer": f"{at['optimizer']:.2f}",
        "caches": f"{at['in sequence'] - alone:.2f}",
        "rest": f"{at['ours'] - at['in sequence']:.2f}",
        "jax_privacy / ours (microbatch)": f"{times(peer, own)} ({peer.at})",
        "Opacus / ours": times(opacus, own),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which rows, of what size."""
    parser.add_argument("--rows", nargs="+", choices=EXPECTED, help="which models")
    parser.add_argument("--expected", nargs="+", type=int, help="expected batches, for all rows")
    parser.add_argument("--batches", type=int, help="batches a turn (20; 10 with --short)")


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """One table, a line a model and expected batch."""
    chosen = SHORT if options.short else EXPECTED
    num_batches = options.batches or (10 if options.short else 20)
    lines: list[dict[str, str]] = []
    for name in options.rows or chosen:
        sizes = tiny(ROWS[name]) if options.tiny else {}
        expected = (sizes["batch"],) if options.tiny else chosen.get(name, EXPECTED[name])
        for batch in options.expected or expected:
            case = case_of(ROWS[name](**{**sizes, "batch": batch}), num_batches)
            lines.append(line(case, measured(case, options.rounds)))
            print("  ".join(lines[-1].values()), flush=True)
    yield Table("Steps with Adam, float32, clip norm 1", lines)


PART = Part(__doc__, tables, add_options)
