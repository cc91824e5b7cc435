"""A batch processed a microbatch at a time, its results put together again.

`blocks.py` says how their sums are added up.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ..precision import stage
from .blocks import added, nothing

_Sums = TypeVar("_Sums")
_PerExample = TypeVar("_PerExample")


def over_microbatches(
    step: Callable[[list[Array], Bool[Array, " microbatch"]], tuple[_Sums, _PerExample]],
    examples: list[Array],
    is_padding_example: Bool[Array, " batch"] | None,
    num_examples: int,
    microbatch_size: int | None,
    agree: Callable[[Int[Array, ""]], Int[Array, ""]] | None = None,
) -> tuple[_Sums, _PerExample]:
    """Runs `step` on one microbatch after the other.

    Real examples are dealt into the first microbatches, and only the microbatches that hold one are
    computed. The slots left over in the last of them hold a copy of the first real example: what
    they add is selected away, but a loss may stop the run (`equinox.error_if`), loop for long, or
    meet numbers that are not finite, on whatever data a slot holds. A copy of a real example
    triggers nothing that the example itself does not.

    Args:
        step: from a microbatch and its padding mask to `(sums, per_example)`: trees of arrays, of
            which the first are to be added up, the second joined along their leading axis.
        examples: the batch, examples in front.
        is_padding_example: True where a slot holds no real example; None if there is no such slot.
        num_examples: the length of the batch.
        microbatch_size: examples in a microbatch; None for the whole batch at once.
        agree: from how many microbatches hold a real example here to how many are to be computed,
            which is no less. None where these are the same.

    Returns:
        The sums, and the per-example values, which are zero in padding slots.

        | batch | result |
        |---|---|
        | empty | zero sums, per-example values of length zero |
        | all padding | zero sums, zero per-example values, nothing computed |
        | not a multiple of the size | as if filled up with padding, and the filling cut off |

        (With a mask the number of microbatches is not known when the loop is compiled, so that the
        result can be differentiated forwards alone; without one backwards as well.)

        (Where `agree` asks for a microbatch and there is no real example at all, slots hold zeros:
        what stops a run, or takes long, on zeros says nothing of any example. Random keys stay.)
    """
    if num_examples == 0:
        return _of_no_examples(step, examples)
    size = min(microbatch_size or num_examples, num_examples)
    if is_padding_example is None and size == num_examples:
        return step(examples, jnp.zeros(num_examples, bool))
    order: Any = None
    num_real: Any = num_examples
    if is_padding_example is not None:  # real examples come first
        order = jnp.argsort(is_padding_example, stable=True)
        num_real = jnp.sum(~is_padding_example)
    count = -(-num_examples // size)
    step = jax.jit(step, inline=True)  # traced once, for shapes and for the loop
    shapes = jax.eval_shape(step, [x[:size] for x in examples], jnp.zeros(size, bool))
    sums, of_one = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    totals = jax.tree.map(lambda x: nothing(x, count, num_examples), sums)
    slots = jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), of_one)

    def body(index: Any, found: tuple[Any, _PerExample]) -> tuple[Any, _PerExample]:
        totals, slots = found
        rank = index * size + jnp.arange(size)
        is_padding = rank >= num_real
        slot = jnp.where(is_padding, 0, rank)
        slot = slot if order is None else order[slot]
        chosen = [x[slot] for x in examples]
        if agree is not None and order is not None:
            chosen = [_zero_unless(num_real > 0, x) for x in chosen]
        sums, values = step(chosen, is_padding)
        with stage("microbatches"):
            totals = jax.tree.map(lambda x, so_far: added(so_far, x, count), sums, totals)

        def without_padding(x: Array) -> Array:
            return jnp.where(is_padding.reshape(-1, *[1] * (x.ndim - 1)), jnp.zeros_like(x), x)

        values = jax.tree.map(without_padding, values)
        return totals, jax.tree.map(lambda x, its: x.at[index].set(its), slots, values)

    trips = -(-num_real // size)
    trips = trips if order is None or agree is None else agree(trips)
    totals, slots = jax.lax.fori_loop(0, trips, body, (totals, slots))
    as_given = slice(num_examples) if order is None else jnp.argsort(order)
    totals = jax.tree.map(lambda x, total: total[0].astype(x.dtype), sums, totals)
    return totals, jax.tree.map(lambda x: x.reshape(count * size, *x.shape[2:])[as_given], slots)


def _of_no_examples(
    step: Callable[[list[Array], Array], tuple[_Sums, _PerExample]], examples: list[Array]
) -> tuple[_Sums, _PerExample]:
    """Zero sums, and per-example values of length zero, of the shapes that one example gives."""
    one = [jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) for x in examples]
    sums, per_example = jax.eval_shape(step, one, jax.ShapeDtypeStruct((1,), bool))
    sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)
    return sums, jax.tree.map(lambda x: jnp.zeros_like(x)[:0], per_example)


def _zero_unless(there_are: Bool[Array, ""], x: Array) -> Array:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return x if is_key else jnp.where(there_are, x, jnp.zeros_like(x))
