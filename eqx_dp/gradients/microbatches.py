"""A batch processed a microbatch at a time, its results put together again."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from ..precision import stage

_Sums = TypeVar("_Sums")
_PerExample = TypeVar("_PerExample")


def over_microbatches(
    step: Callable[[list[Array], Bool[Array, " microbatch"]], tuple[_Sums, _PerExample]],
    examples: list[Array],
    is_padding_example: Bool[Array, " batch"] | None,
    num_examples: int,
    microbatch_size: int | None,
    agree: Callable[[Bool[Array, " microbatches"]], Bool[Array, " microbatches"]] = lambda x: x,
) -> tuple[_Sums, _PerExample]:
    """Runs ``step`` on one microbatch after the other.

    The last microbatch is filled up with padding. A microbatch that is all padding is not computed.

    Args:
        step: from a microbatch and its padding mask to ``(sums, per_example)``: trees of arrays, of
            which the first are to be added up, the second joined along their leading axis.
        examples: the batch, examples in front.
        is_padding_example: True where a slot holds no real example; None if there is no such slot.
        num_examples: the length of the batch.
        microbatch_size: examples in a microbatch; None for the whole batch at once.
        agree: from which microbatches are all padding here to which are to be skipped.

    Returns:
        The sums, and the per-example values, which are zero in padding slots.

        ===========================  ======================================================
        batch                        result
        ===========================  ======================================================
        empty                        zero sums, per-example values of length zero
        all padding                  zero sums, zero per-example values, nothing computed
        not a multiple of the size   as if filled up with padding, and the filling cut off
        ===========================  ======================================================
    """
    if num_examples == 0:
        return _of_no_examples(step, examples)
    size = min(microbatch_size or num_examples, num_examples)
    filling = -num_examples % size
    count = (num_examples + filling) // size
    may_be_padding = is_padding_example is not None or filling > 0
    if is_padding_example is None:
        is_padding_example = jnp.zeros(num_examples, bool)
    padding = jnp.concatenate([is_padding_example, jnp.ones(filling, bool)]).reshape(count, size)
    skip = agree(jnp.all(padding, axis=1)) if may_be_padding else None
    run = _skipping_padding(step)
    if size == num_examples:
        return run(examples, padding[0], None if skip is None else skip[0])

    def split(leaf: Array) -> Array:
        return leaf.reshape(count, size, *leaf.shape[1:])

    # The filling repeats the last example: its shape and dtype are right, its values are ignored.
    filled = [jnp.concatenate([x, jnp.repeat(x[-1:], filling, axis=0)]) for x in examples]
    microbatches = [split(x) for x in filled], padding, skip

    sums_shape, _ = jax.eval_shape(step, *jax.tree.map(lambda x: x[0], microbatches[:2]))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums_shape)

    def body(
        total: _Sums, microbatch: tuple[list[Array], Array, Array | None]
    ) -> tuple[_Sums, _PerExample]:
        sums, per_example = run(*microbatch)
        with stage("microbatches"):
            return jax.tree.map(jnp.add, total, sums), per_example

    total, stacked = jax.lax.scan(body, zeros, microbatches)
    return total, jax.tree.map(
        lambda x: x.reshape(count * size, *x.shape[2:])[:num_examples],
        stacked,
    )


def _of_no_examples(
    step: Callable[[list[Array], Array], tuple[_Sums, _PerExample]], examples: list[Array]
) -> tuple[_Sums, _PerExample]:
    """Zero sums, and per-example values of length zero, of the shapes that one example gives."""
    one = [jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) for x in examples]
    sums, per_example = jax.eval_shape(step, one, jax.ShapeDtypeStruct((1,), bool))
    return (
        jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums),
        jax.tree.map(lambda x: jnp.zeros_like(x)[:0], per_example),
    )


def _skipping_padding(
    step: Callable[[list[Array], Array], tuple[_Sums, _PerExample]],
) -> Callable[[list[Array], Array, Array | None], tuple[_Sums, _PerExample]]:
    """Wraps ``step`` so that padding slots report zeros and a microbatch of padding is skipped."""

    def masked(examples: list[Array], is_padding: Array) -> tuple[_Sums, _PerExample]:
        sums, per_example = step(examples, is_padding)
        return sums, jax.tree.map(lambda x: _blank_where(is_padding, x), per_example)

    def skipped(examples: list[Array], is_padding: Array) -> Any:
        return jax.tree.map(jnp.zeros_like, jax.eval_shape(step, examples, is_padding))

    def run(
        examples: list[Array], is_padding: Array, skip: Array | None
    ) -> tuple[_Sums, _PerExample]:
        if skip is None:  # there is no padding
            return step(examples, is_padding)
        return jax.lax.cond(skip, skipped, masked, examples, is_padding)

    return run


def _blank_where(mask: Bool[Array, " batch"], values: Array) -> Array:
    mask = mask.reshape(-1, *[1] * (values.ndim - 1))
    return jnp.where(mask, jnp.zeros_like(values), values)
