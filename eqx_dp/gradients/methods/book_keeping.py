"""Book-keeping: one backward pass, through activations only.

Bu et al., "Differentially Private Optimization on Large Model at Small Cost", 2023. The cotangent
of every use of a parameter is read off taps; from it and from what the parameter met there follow
the norm of each example's gradient and the weighted sum of all.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from ..cost import choose_way
from ..leaves import LeafGradient, from_per_example, leaf_gradient
from ..taps import Place, Survey, evaluate, survey
from .contract import ClippedSum, Task, clip_and_sum


def clipped_sum(
    task: Task, examples: list[Array], is_padding_example: Bool[Array, " batch"]
) -> ClippedSum:
    """Sums clipped gradients from the inputs and the cotangents of every site.

    Guarantee: as that of the method ``per_example``.
    """
    one = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in examples]
    found = survey(task.program, task.params, task.frozen, one)
    loss, aux, kept, cotangents, grads = jax.vmap(lambda example: _backward(task, found, example))(
        examples
    )
    leaves = [
        _leaf(task, found, leaf, kept, cotangents, grads, loss.shape[0])
        for leaf in range(len(task.params))
    ]
    return clip_and_sum(task, leaves, loss, aux, is_padding_example)


def _backward(
    task: Task, found: Survey, example: list[Array]
) -> tuple[Array, list[Array], dict[Place, Any], dict[Place, Array], dict[int, Array]]:
    """One example's loss, aux, what its sites keep, their cotangents, and gradients of the rest."""

    def run(
        taps: dict[Place, Array], whole: dict[int, Array]
    ) -> tuple[Array, tuple[list[Array], dict[Place, Any]]]:
        params = [whole.get(leaf, value) for leaf, value in enumerate(task.params)]
        loss, aux, kept = evaluate(task.program, found, params, task.frozen, example, taps)
        return loss, (aux, kept)

    taps = {place: jnp.zeros(s.tap.shape, s.tap.dtype) for place, s in found.sites.items()}
    whole = {leaf: task.params[leaf] for leaf in found.whole}
    loss, pullback, (aux, kept) = jax.vjp(run, taps, whole, has_aux=True)
    cotangents, grads = pullback(jnp.full_like(loss, task.loss_scale))
    return loss, aux, kept, cotangents, grads


def _leaf(
    task: Task,
    found: Survey,
    leaf: int,
    kept: dict[Place, Any],
    cotangents: dict[Place, Array],
    grads: dict[int, Array],
    num_examples: int,
) -> LeafGradient:
    if leaf in found.whole:
        return from_per_example(grads[leaf].astype(task.accumulate_dtype) / task.loss_scale)
    parameter = jax.ShapeDtypeStruct(task.params[leaf].shape, task.accumulate_dtype)
    places = found.of(leaf)
    if not places:
        return from_per_example(jnp.zeros((num_examples, *parameter.shape), parameter.dtype))
    way = choose_way([site for _, site in places], num_examples)
    sites = [
        (site, kept[p], cotangents[p].astype(task.accumulate_dtype) / task.loss_scale)
        for p, site in places
    ]
    return leaf_gradient(parameter, sites, way, task.accumulate_dtype)
