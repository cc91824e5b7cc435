"""Whether a loss that is written for a batch has a gradient on a batch of one."""

import warnings
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp

from ..programs import UNSEEN, equations, named
from ..trees import is_key

# Larger programs would take time and memory; others might never end, or do something.
_NOT_RUN = UNSEEN | named("while debug_callback debug_print")


def warn_if_zero(gradient: jex_core.ClosedJaxpr) -> None:
    """Warns if a gradient is zero for made-up parameters and rows: only noise would train.

    A loss that compares rows (a contrastive loss, for instance) is constant on a batch of one. All
    numbers are fixed and public: nothing depends on data. Nothing is computed for more than 2^24
    numbers, nor for programs with loops of unknown length or host functions.

    Args:
        gradient: the gradient of the loss of one example, as a program.
    """
    avals, names = gradient.in_avals, {one.primitive.name for one in equations(gradient)}
    if names & _NOT_RUN or sum(x.size for x in avals) > 2**24:
        return
    made_up = [jax.random.key(0) if is_key(x) else _numbers(x) for x in avals]
    if not any(map(jnp.any, jax.jit(jex_core.jaxpr_as_fun(gradient))(*made_up))):
        warnings.warn(
            "The gradient of this loss is zero on a made-up row. A loss that compares rows trains "
            "on noise alone with keep_batch_dim: make a group of rows one example instead.",
            stacklevel=3,
        )


def _numbers(x: Any) -> Any:
    count = jnp.arange(1.0, x.size + 1).reshape(x.shape)  # whole numbers vary: 0 may mean padding
    return (jnp.sin(count) if jnp.issubdtype(x.dtype, jnp.inexact) else count % 3).astype(x.dtype)
