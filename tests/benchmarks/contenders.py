"""Who is measured: each way to a gradient, made ready to run on a row."""

import functools
import importlib.util
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax_privacy
import optax

import eqx_dp as dp
from eqx_dp.gradients import METHODS

from .rows import Row

CLIP_NORM, LEARNING_RATE = 1.0, 1e-3
NON_PRIVATE, AUTO, JAX_PRIVACY = "non-private", "eqx_dp auto", "jax_privacy"
BOOK_KEEPING, GHOST, PER_EXAMPLE = (
    f"eqx_dp {method}" for method in ("book_keeping", "ghost", "per_example")
)
OPTAX = "optax"
# What a whole batch at once costs more than its parts is no merit of those who take it in parts.
IN_PARTS = "non-private in parts"


class Program(NamedTuple):
    """A gradient of one row, ready to run.

    Attributes:
        run: computes the gradient and returns when it is there.
        leaves: the arrays of what `run` returned, in the order of the trained leaves.
        compile_seconds: tracing, lowering and compiling; None where nothing is compiled.
        temp_bytes: temporary memory of the compiled program; None where there is none.
    """

    run: Callable[[], Any]
    leaves: Callable[[Any], list[Any]] = jax.tree.leaves
    compile_seconds: float | None = None
    temp_bytes: int | None = None


class Contender(NamedTuple):
    """A way to a gradient, and at which microbatch sizes it is to be tried.

    Attributes:
        name: what it is called.
        prepare: from a row and a microbatch size to what is run.
        microbatched: whether several sizes are tried.
        tried: which, where it is not all powers of two that divide the batch.
    """

    name: str
    prepare: Callable[[Row, int | None], Program]
    microbatched: bool
    tried: tuple[int | None, ...] | None = None

    def sizes(self, row: Row) -> list[int | None]:
        """Microbatch sizes to choose the best of; None is the whole batch at once.

        Powers of two that divide the batch, as some of the libraries ask for.
        """
        if not self.microbatched:
            return [None]
        if self.tried is not None:
            return list(self.tried)
        powers = [2**i for i in range(row.batch_size.bit_length())]
        return [None, *(n for n in powers if n < row.batch_size and row.batch_size % n == 0)]


# A gradient takes (params, frozen, *batch) with examples in front of the arrays of a batch.
Gradient = Callable[..., Any]


def non_private(row: Row, microbatch_size: int | None) -> Gradient:
    """The gradient of the summed loss, as it is written without privacy."""
    grad = jax.grad(row.total_of_parts())
    return optax.microbatching.microbatch(grad, row.batch_argnums, microbatch_size)


def ours(method: str, row: Row, microbatch_size: int | None) -> Gradient:
    _, _, static = row.split()
    clipped = dp.filter_clipped_grad(
        row.loss,
        l2_clip_norm=CLIP_NORM,
        filter_spec=row.filter_spec,
        microbatch_size=microbatch_size,
        method=method,
    )
    return lambda params, frozen, *batch: clipped(eqx.combine(params, frozen, static), *batch)


def of_jax_privacy(row: Row, microbatch_size: int | None, normalize_by: float = 1.0) -> Gradient:
    return jax_privacy.clipped_grad(
        row.loss_of_parts(),
        l2_clip_norm=CLIP_NORM,
        batch_argnums=row.batch_argnums,
        keep_batch_dim=False,
        microbatch_size=microbatch_size,
        normalize_by=normalize_by,
    )


def of_optax(row: Row, microbatch_size: int | None) -> Gradient:
    """Gradients of a microbatch side by side, clipped and summed, then summed up."""
    grads = jax.vmap(jax.grad(row.loss_of_parts()), row.axes)

    def clipped(*args: Any) -> Any:
        return optax.per_example_global_norm_clip(grads(*args), CLIP_NORM)[0]

    return optax.microbatching.microbatch(clipped, row.batch_argnums, microbatch_size)


def compiled(
    make: Callable[[Row, int | None], Gradient], row: Row, microbatch_size: int | None
) -> Program:
    """Compiles a gradient for a row, from cold caches: nobody profits from the one before."""
    params, frozen, _ = row.split()
    arguments = (params, frozen, *row.batch)
    jax.clear_caches()
    start = time.perf_counter()
    program = jax.jit(make(row, microbatch_size)).lower(*arguments).compile()
    compile_seconds = time.perf_counter() - start
    memory = program.memory_analysis()
    return Program(
        run=lambda: jax.block_until_ready(program(*arguments)),
        compile_seconds=compile_seconds,
        temp_bytes=None if memory is None else memory.temp_size_in_bytes,
    )


def _of_jax(
    name: str, make: Callable[[Row, int | None], Gradient], *, microbatched: bool
) -> Contender:
    return Contender(name, functools.partial(compiled, make), microbatched)


def in_jax() -> list[Contender]:
    """Everyone who runs in JAX. `auto` finds its microbatch size itself."""
    # Ghost is there for its memory, which is that of the whole batch.
    methods = [
        _of_jax(f"eqx_dp {method}", functools.partial(ours, method), microbatched=method != "ghost")
        for method in METHODS
    ]
    return [
        _of_jax(NON_PRIVATE, non_private, microbatched=False),
        _of_jax(IN_PARTS, non_private, microbatched=True),
        _of_jax(AUTO, functools.partial(ours, "auto"), microbatched=False),
        *methods,
        _of_jax(JAX_PRIVACY, of_jax_privacy, microbatched=True),
        _of_jax(OPTAX, of_optax, microbatched=True),
    ]


def opacus_is_installed() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "opacus"))


def in_torch() -> list[Contender]:
    """Opacus, and PyTorch without privacy to tell their costs apart; nobody if not installed."""
    if not opacus_is_installed():
        return []
    from . import peers_opacus

    return [
        Contender("torch non-private", peers_opacus.non_private, False),
        Contender("opacus hooks", functools.partial(peers_opacus.private, "hooks"), True),
        Contender("opacus ghost", functools.partial(peers_opacus.private, "ghost"), True),
    ]
