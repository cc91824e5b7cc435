"""What every method of the engine is given for a microbatch, and what it gives back."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ..clip import Clipping, clip_factors, combined_norms, norm_error
from ..cost import LeafCost, leaf_cost
from ..leaves import LeafGradient
from ..program import Program
from ..taps import Survey


class Task(NamedTuple):
    """What stays the same from microbatch to microbatch.

    Attributes:
        program: the loss of one example.
        found: the uses of every trainable leaf.
        params: the trainable leaves, in the compute dtype.
        frozen: the other arrays of the model.
        clipping: the clip norms.
        groups: for each trainable leaf the index of its clip norm.
        accumulate_dtype: dtype of norms, factors and sums.
        loss_scale: a power of two that multiplies the loss before the backward pass.
    """

    program: Program
    found: Survey
    params: list[Array]
    frozen: list[Array]
    clipping: Clipping
    groups: list[int]
    accumulate_dtype: np.dtype[Any]
    loss_scale: float

    def costs(self) -> list[LeafCost]:
        """How each leaf is treated, and what that costs for one example."""
        return [leaf_cost(self.found, leaf, param) for leaf, param in enumerate(self.params)]


class ClippedSum(NamedTuple):
    """What a method makes of a microbatch.

    Attributes:
        grads: for each trainable leaf the sum of clipped gradients, in the accumulate dtype.
        loss: one loss an example.
        grad_norms: for each clip norm one norm an example, before clipping.
        aux: the leaves of aux, examples in front.
    """

    grads: list[Float[Array, "..."]]
    loss: Float[Array, " batch"]
    grad_norms: list[Float[Array, " batch"]]
    aux: list[Array]


Method: TypeAlias = Callable[[Task, list[Array], Bool[Array, " batch"]], ClippedSum]
"""``method(task, examples, is_padding_example)``; the leaves of examples have examples in front."""


def clip_and_sum(
    task: Task,
    leaves: list[LeafGradient],
    loss: Float[Array, " batch"],
    aux: list[Array],
    is_padding_example: Bool[Array, " batch"],
) -> ClippedSum:
    """Clips every example's gradient, group by group, and sums.

    Guarantee: an example adds a gradient whose norm, group by group, measured exactly, is at most
    the clip norm (``clip_factors`` has the proof, from the bounds that ``leaves`` gives), and
    exactly zero if it is padding or if its loss or the norm of its gradient in any group is not
    finite. (In float32 for clip norms from 1e-30: nearer to the end of the range products lose
    digits to underflow, which no relative bound makes up for.)
    """
    clipping, dtype = task.clipping, task.accumulate_dtype

    def by_group(values: list[Array]) -> list[Float[Array, " batch"]]:
        return [
            combined_norms(
                [value for value, its in zip(values, task.groups, strict=True) if its == group],
                loss.shape,
                dtype,
            )
            for group in range(len(clipping.clip_norms))
        ]

    norms = by_group([leaf.norm for leaf in leaves])
    error = norm_error(len(leaves), dtype)
    bounds = [bound * (1 + error) for bound in by_group([leaf.bound for leaf in leaves])]
    contributes = jnp.isfinite(loss) & ~is_padding_example
    for norm in norms:
        contributes &= jnp.isfinite(norm)
    factors = [
        clip_factors(bound, clip_norm, clipping.rescale_to_unit_norm)
        for bound, clip_norm in zip(bounds, clipping.clip_norms, strict=True)
    ]
    sums = [
        leaf.sum(factors[group], contributes)
        for leaf, group in zip(leaves, task.groups, strict=True)
    ]
    return ClippedSum(sums, loss, norms, aux)
