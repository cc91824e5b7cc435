"""The gradients of a batch, from what is held of its forward and backward pass."""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ...sharding import whole
from ..computed_once import computed_once
from ..leaves import (
    LeafForm,
    LeafGradient,
    leaf_gradient,
    no_gradient,
    per_example_gradients,
)
from ..penalties import formed_penalties, penalised
from ..pulled_back import entry_by_entry, pulled_back
from ..scattering import scattering_of
from ..taps import Address, Uses
from .contract import TracedLoss


class Held(NamedTuple):
    """What is held of a batch, examples in front of every array.

    Attributes:
        residuals: of each use.
        cotangents: of each use's result.
        grads: each example's gradient with respect to the roots that are `whole`.
    """

    residuals: dict[Address, Any]
    cotangents: dict[Address, Any]
    grads: dict[int, Array]

    def met(self, uses: Iterable[Address]) -> list[tuple[Any, Array]]:
        """What some uses met."""
        return [(self.residuals[at], self.cotangents[at]) for at in uses]

    def of_roots(self, roots: Iterable[int], uses: Uses) -> "Held":
        """What is held of some roots."""
        its = [at for root in roots for at in uses.of[root]]
        residuals, cotangents = ({at: of[at] for at in its} for of in self[:2])
        return Held(residuals, cotangents, {i: self.grads[i] for i in roots if i in self.grads})


def held_gradient(
    traced: TracedLoss, index: int, held: Held, num_examples: int, is_scattered: bool = False
) -> LeafGradient:
    """The gradient of one target, in the form that its way gives, from what is held for a batch.

    Args:
        traced: the loss.
        index: which target.
        held: what is held.
        num_examples: the batch.
        is_scattered: whether the sum of a stacked parameter may go to devices slice by slice.
    """
    target, dtype, outside = traced.targets[index], traced.accumulate_dtype, traced.outside
    assert outside is not None
    first = target.roots[0]
    shape, uses = traced.root(first).shape, traced.uses.of[first]
    form = LeafForm(shape, tuple(uses.values()), target.way, dtype)
    if target.relation == "entrywise":
        entries = traced.split.derived[first - len(traced.params)].entries
        assert entries is not None
        of_leaf, derivative = traced.params[target.leaves[0]].shape, outside.derivatives[index]
        return entry_by_entry(form, entries.layout, of_leaf, derivative, held.met(uses))
    if target.relation in ("penalised", "through"):
        return _through(traced, index, held, num_examples)
    if target.way == "whole":
        return LeafGradient(held.grads[first].astype(dtype))
    if target.way == "unused":
        return no_gradient(shape, dtype)
    scattering = None
    if (
        is_scattered
        and target.relation == "itself"
        and len(uses) == 1
        and first < len(traced.params)
    ):
        (use,) = uses.values()
        scattering = scattering_of(use, shape, traced.cut(first)) if use.slices else None
    return leaf_gradient(form, held.met(uses), scattering)


def _through(traced: TracedLoss, index: int, held: Held, num_examples: int) -> LeafGradient:
    """The same of a parameter that penalties, or other values, are derived from."""
    target, dtype, outside = traced.targets[index], traced.accumulate_dtype, traced.outside
    assert outside is not None
    (leaf,), penalties = target.leaves, outside.penalties.get(index)
    roots = [root for root in target.roots if root not in target.penalties]
    is_formed = target.way != "inner_products"

    def form(held: Held) -> tuple[Array, Array | None]:
        found = [_formed(traced, root, held) for root in target.penalties]
        heights = jnp.zeros((num_examples, 0), dtype)
        if found:
            heights = jnp.stack([x.reshape(num_examples).astype(dtype) for x in found], axis=1)
        if not is_formed:
            return heights, None
        formed = {root: _formed(traced, root, held) for root in roots}
        own = [formed.pop(leaf).astype(dtype)] if leaf in formed else []
        if penalties is not None:
            own += formed_penalties(heights, penalties)
        if formed:
            function = traced.split.of_leaves([leaf], list(formed), outside.shared)
            own.append(
                pulled_back(function, whole(traced.params[leaf]), list(formed.values()), dtype)
            )
        return heights, functools.reduce(jnp.add, own)

    its = held.of_roots(target.roots, traced.uses)
    # Heights alone are nothing but cotangents, which are there.
    heights, grads = (
        computed_once(form, its, jax.tree.leaves(its[1:])[0]) if is_formed else form(its)
    )
    if grads is not None:
        return LeafGradient(grads)
    assert penalties is not None
    uses = traced.uses.of[leaf]
    way = LeafForm(traced.root(leaf).shape, tuple(uses.values()), target.way, dtype)
    return penalised(way, held.met(uses), heights, penalties)


def _formed(traced: TracedLoss, root: int, held: Held) -> Array:
    """Each example's gradient with respect to a root."""
    if root in held.grads:
        return held.grads[root]
    uses, shape = traced.uses.of[root], traced.root(root).shape
    form = LeafForm(shape, tuple(uses.values()), "kept", traced.accumulate_dtype)
    return per_example_gradients(form, held.met(uses))
