"""Book-keeping: one backward pass, through activations only.

Bu et al., "Differentially Private Optimization on Large Model at Small Cost", 2023. The cotangent
of every use of a parameter is read off taps; from it and from what the parameter met there follow
the norm of each example's gradient and the weighted sum of all.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from ..leaves import LeafGradient, Way, from_per_example, leaf_gradient
from ..taps import Place, evaluate
from .contract import ClippedSum, Task, clip_and_sum


def clipped_sum(
    task: Task, examples: list[Array], is_padding_example: Bool[Array, " batch"]
) -> ClippedSum:
    """Sums clipped gradients from the inputs and the cotangents of every site.

    Guarantee: as that of the method ``per_example``.
    """
    loss, aux, kept, cotangents, grads = jax.vmap(lambda example: _backward(task, example))(
        examples
    )
    leaves = [
        _leaf(task, leaf, cost.way, kept, cotangents, grads, loss.shape[0])
        for leaf, cost in enumerate(task.costs())
    ]
    return clip_and_sum(task, leaves, loss, aux, is_padding_example)


def _backward(
    task: Task, example: list[Array]
) -> tuple[Array, list[Array], dict[Place, Any], dict[Place, Array], dict[int, Array]]:
    """One example's loss, aux, what its sites keep, their cotangents, and gradients of the rest."""

    def run(
        taps: dict[Place, Array], whole: dict[int, Array]
    ) -> tuple[Array, tuple[list[Array], dict[Place, Any]]]:
        params = [whole.get(leaf, value) for leaf, value in enumerate(task.params)]
        loss, aux, kept = evaluate(task.program, task.found, params, task.frozen, example, taps)
        return loss, (aux, kept)

    taps = {place: jnp.zeros(s.tap.shape, s.tap.dtype) for place, s in task.found.sites.items()}
    whole = {leaf: task.params[leaf] for leaf in task.found.whole}
    loss, pullback, (aux, kept) = jax.vjp(run, taps, whole, has_aux=True)
    cotangents, grads = pullback(jnp.full_like(loss, task.loss_scale))
    return loss, aux, kept, cotangents, grads


def _leaf(
    task: Task,
    leaf: int,
    way: Way,
    kept: dict[Place, Any],
    cotangents: dict[Place, Array],
    grads: dict[int, Array],
    num_examples: int,
) -> LeafGradient:
    """The gradient of one leaf, in the form that its way gives."""
    dtype = task.accumulate_dtype
    parameter = jax.eval_shape(lambda x: x.astype(dtype), task.params[leaf])
    if way == "whole":
        return from_per_example(grads[leaf].astype(dtype) / task.loss_scale)
    if way == "unused":
        return from_per_example(jnp.zeros((num_examples, *parameter.shape), dtype))
    sites = [
        (site, kept[place], cotangents[place].astype(dtype) / task.loss_scale)
        for place, site in task.found.of(leaf)
    ]
    return leaf_gradient(parameter, sites, way, dtype)
