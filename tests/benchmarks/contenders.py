"""Who is measured: each way to a clipped gradient, made ready to run on a row."""

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax_privacy
import optax

import eqx_dp as dp

from .rows import Row
from .timing import Contender, Program

CLIP_NORM, LEARNING_RATE = 1.0, 1e-3
NON_PRIVATE, IN_PARTS = "non-private", "non-private in parts"
AUTO, BOOK_KEEPING, GHOST, PER_EXAMPLE = (
    f"eqx_dp {method}" for method in ("auto", "book_keeping", "ghost", "per_example")
)
JAX_PRIVACY, OPTAX, OPACUS = "jax_privacy", "optax", "opacus"

# A gradient takes (params, frozen, *batch) with examples in front of the arrays of a batch.
Gradient = Callable[..., Any]


def non_private(row: Row, microbatch_size: int | None) -> Gradient:
    """The gradient of the summed loss, as it is written without privacy."""
    grad = jax.grad(row.total_of_parts())
    return optax.microbatching.microbatch(grad, row.batch_argnums, microbatch_size)


def ours(method: str, row: Row, microbatch_size: int | None) -> Gradient:
    """The engine's, by one method."""
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
    """jax_privacy's."""
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


GRADIENTS: dict[str, Callable[[Row, int | None], Gradient]] = {
    NON_PRIVATE: non_private,
    IN_PARTS: non_private,
    AUTO: functools.partial(ours, "auto"),
    BOOK_KEEPING: functools.partial(ours, "book_keeping"),
    GHOST: functools.partial(ours, "ghost"),
    PER_EXAMPLE: functools.partial(ours, "per_example"),
    JAX_PRIVACY: of_jax_privacy,
    OPTAX: of_optax,
}


def compiled(name: str, row: Row, microbatch_size: int | None) -> Program:
    """Compiles a gradient for a row, from cold caches: nobody profits from the one before."""
    params, frozen, _ = row.split()
    arguments = (params, frozen, *row.batch)
    jax.clear_caches()
    program = jax.jit(GRADIENTS[name](row, microbatch_size)).lower(*arguments).compile()
    memory = program.memory_analysis()
    return Program(
        run=lambda: jax.block_until_ready(program(*arguments)),
        temp_bytes=None if memory is None else memory.temp_size_in_bytes,
    )


def in_jax(row: Row, sizes: Sequence[int | None]) -> list[Contender]:
    """Who is measured of those in JAX. `auto` finds its microbatch size itself."""
    tried: dict[str, Sequence[int | None]] = {
        NON_PRIVATE: (None,),
        IN_PARTS: sizes[1:] or sizes,
        AUTO: (None,),
        GHOST: (None,),
        JAX_PRIVACY: sizes,
        OPTAX: sizes,
    }
    return [
        Contender(name, functools.partial(compiled, name, row), its) for name, its in tried.items()
    ]


def few(row: Row) -> list[int | None]:
    """Few microbatch sizes: the whole batch, one by one, and 8."""
    return [None, *(size for size in (1, 8) if size < row.batch_size)]


def powers_of_two(row: Row) -> list[int | None]:
    """The whole batch, and powers of two that divide it, as some of the libraries ask for."""
    powers = [2**i for i in range(row.batch_size.bit_length())]
    return [None, *(n for n in powers if n < row.batch_size and row.batch_size % n == 0)]


def in_torch(row: Row, sizes: Sequence[int | None]) -> list[Contender]:
    """Opacus, where it is installed and the row has a twin in PyTorch."""
    if not opacus_is_installed():
        return []
    from . import peers_opacus

    if not peers_opacus.has_twin(row):
        return []
    return [
        Contender(f"{OPACUS} {mode}", functools.partial(peers_opacus.private, mode, row), sizes)
        for mode in peers_opacus.MODES
    ]


def opacus_is_installed() -> bool:
    """Whether the extra `peers` is."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "opacus"))
