"""Whole training steps of a row, ready to run one after the other, and the parts of ours.

Each is jitted, with its state donated from step to step, and takes the next of its batches at each
run.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
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
from .contenders import CLIP_NORM, LEARNING_RATE, Contender, Program, opacus_is_installed
from .rows import Row

OPTIMIZER = optax.adam(LEARNING_RATE)
SAMPLING_PROB, DELTA = 1 / 64, 1e-6
_WINDOWS = 20  # of as many batches as are asked for, to choose from
_OF_JAX_PRIVACY = (1, 2, 4, 8, 16, 32, 64)
_OF_OPACUS: dict[str, tuple[int | None, ...]] = {"hooks": (8, 32, 64), "ghost": (None, 32)}

Run = Callable[[], Any]


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

    @property
    def slots(self) -> int:
        return len(self.batches[0][2])

    @property
    def real(self) -> float:
        """How many examples a batch holds, on the mean."""
        return float(np.mean([np.sum(~np.asarray(mask)) for *_, mask in self.batches]))

    @property
    def microbatch_size(self) -> int | None:
        """The engine's choice; None for the whole batch."""
        *batch, mask = self.batches[0]
        found = dp.explain(self.step.grad_fn, self.row.model, *batch, is_padding_example=mask)
        return found.microbatch_size


def case_of(row: Row, num_batches: int, noise_multiplier: float = 1.0) -> Case:
    """Draws a plan's batches from a data set in which the row's examples repeat themselves."""
    plan = dp.PrivacyPlan(SAMPLING_PROB, _WINDOWS * num_batches, noise_multiplier, DELTA)
    step = dp.make_step(
        row.loss,
        OPTIMIZER,
        plan,
        num_examples=round(row.batch_size / SAMPLING_PROB),
        seed=7,
        l2_clip_norm=CLIP_NORM,
        filter_spec=row.filter_spec,
    )
    batches = []
    for indices, mask in typical(step.sampler(), num_batches, row.batch_size):
        x, y = (array[indices % row.batch_size] for array in row.batch)
        batches.append((x, y, jnp.asarray(mask)))
    return Case(row, step, batches)


def typical(sampler: dp.PoissonSampler, num_batches: int, expected: int) -> list[Any]:
    """Batches in a row whose mean number of examples is about what is expected.

    A few batches may hold several percent more or less, which would be luck of whom they are given.
    """
    windows = [
        [sampler.batch(first + number) for number in range(num_batches)]
        for first in range(0, _WINDOWS * num_batches, num_batches)
    ]

    def surplus(batches: list[Any]) -> float:
        return abs(sum(np.sum(~mask) for _, mask in batches) - num_batches * expected)

    return min(windows, key=surplus)


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
        stddev=case.step.plan.noise_multiplier * gradient.sensitivity(),
        prng_key=jax.random.key(0),
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

    The gradient is that of the expected batch without mask or padding; "gradient with padding" is
    the step's own, on the plan's batches.
    """
    row, plan = case.row, case.step.plan
    params, frozen, static = row.split()
    plain = dp.filter_clipped_grad(
        row.loss,
        l2_clip_norm=CLIP_NORM,
        filter_spec=row.filter_spec,
        normalize_by=row.batch_size,
    )

    def over(batches: list[Any], grad_fn: Callable[..., Any]) -> Run:
        @jax.jit
        def gradient(params: Any, frozen: Any, batch: Any, mask: Any) -> Any:
            model = eqx.combine(params, frozen, static)
            return grad_fn(model, *batch, is_padding_example=mask)

        coming = itertools.cycle(batches)
        return lambda: gradient(params, frozen, *next(coming))

    noise = plan.privatizer(case.step.grad_fn, key=3)
    noisy = jax.jit(lambda state: noise.update(*state), donate_argnums=0)
    optimizer = jax.jit(functools.partial(updated, OPTIMIZER), donate_argnums=0)
    return {
        "gradient": over([(row.batch, None)], plain),
        "gradient with padding": over([((x, y), m) for x, y, m in case.batches], case.step.grad_fn),
        "noise": threaded(noisy, first_state(noise, params), [()]),
        "optimizer": threaded(optimizer, first_state(OPTIMIZER, params), [(params,)]),
    }


def ordinary_contender(case: Case) -> Contender:
    powers = [2**i for i in range(2, case.row.batch_size.bit_length())]
    fitting = [n for n in powers if n < case.row.batch_size and case.row.batch_size % n == 0]
    return Contender(
        "ordinary", lambda _, size: Program(ordinary(case, size)), True, (None, *fitting)
    )


def peers(case: Case) -> list[Contender]:
    """jax_privacy, and Opacus where it is installed and the model has a twin in PyTorch."""
    sizes = tuple(size for size in _OF_JAX_PRIVACY if size <= case.row.batch_size)
    in_jax = Contender(
        contenders.JAX_PRIVACY,
        lambda _, size: Program(of_jax_privacy(case, size or 1)),
        True,
        sizes,
    )
    return [in_jax, *(of_opacus(case) if case.row.has_torch_twin else [])]


def of_opacus(case: Case) -> list[Contender]:
    if not opacus_is_installed():
        return []
    from . import peers_opacus

    real = [
        (np.asarray(x)[~np.asarray(m)], np.asarray(y)[~np.asarray(m)]) for x, y, m in case.batches
    ]

    def prepare(mode: str, row: Row, size: int | None) -> Program:
        return peers_opacus.step(mode, row, real, case.step.plan.noise_multiplier, size)

    return [
        Contender(f"opacus {mode}", functools.partial(prepare, mode), True, sizes)
        for mode, sizes in _OF_OPACUS.items()
    ]
