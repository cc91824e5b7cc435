"""The gradients of a batch, from what is held of its forward and backward pass."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ...precision import stage
from ...sharding import whole
from ..computed_once import computed_once
from ..formed_maps import follow_formed, formed_order
from ..layouts import layout_of
from ..leaves import (
    LeafForm,
    LeafGradient,
    leaf_gradient,
    no_gradient,
    per_example_gradients,
)
from ..linear_maps import LinearMap, transposed_derivative
from ..mapped import mapped, one_value
from ..penalties import formed_penalties, penalised
from ..pulled_back import entry_by_entry, pulled_back
from ..scattering import scattering_of
from ..taps import Address, Uses
from ..targets import Target
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
        of_leaf, derivative = traced.params[target.leaves[0]].shape, outside.derivatives[index]()
        return entry_by_entry(form, entries.layout, of_leaf, derivative, held.met(uses))
    if target.relation == "mapped":
        return mapped(form, outside.maps[index], held.met(uses))
    if target.relation == "penalised" and target.way == "inner_products":
        return _penalised(traced, index, held, num_examples)
    if target.relation in ("penalised", "through"):
        return _through(traced, [index], held, num_examples)[0]
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


def through_values(
    traced: TracedLoss, held: Held, loss: Float[Array, " batch"]
) -> dict[int, LeafGradient]:
    """The gradients of all targets that go through values, by index.

    Those that go through the same values are found together: the gradients with respect to these
    are formed once.
    """
    alike = dict[frozenset[int], list[int]]()
    for index, target in enumerate(traced.targets):
        if target.relation == "through":
            alike.setdefault(_values(traced, target), []).append(index)
    found = [(its, _through(traced, its, held, len(loss), loss)) for its in alike.values()]
    return {index: leaf for its, all_of in found for index, leaf in zip(its, all_of, strict=True)}


def _through(
    traced: TracedLoss,
    indices: Sequence[int],
    held: Held,
    num_examples: int,
    some: Array | None = None,
) -> list[LeafGradient]:
    """The same of parameters that penalties, or the same other values, are derived from."""
    dtype, outside = traced.accumulate_dtype, traced.outside
    assert outside is not None
    targets = [traced.targets[index] for index in indices]
    values = sorted(_values(traced, targets[0]))
    maps = _maps(traced, targets, values)
    if maps is not None:
        return _formed_maps(traced, targets, values[0], maps, held, some)

    def form(held: Held) -> list[Array]:
        parts: list[list[Array]] = []
        for index, target in zip(indices, targets, strict=True):
            (leaf,) = target.leaves
            own = [_formed(traced, leaf, held).astype(dtype)] if leaf in target.roots else []
            if target.penalties:
                heights = _heights(traced, target, held, num_examples)
                own += formed_penalties(heights, outside.penalties[index]())
            parts.append(own)
        if values:
            leaves = [target.leaves[0] for target in targets]
            function = traced.split.of_leaves(leaves, values, outside.shared)
            grads = [_formed(traced, root, held) for root in values]
            params = [whole(traced.params[leaf]) for leaf in leaves]
            found = pulled_back(function, params, grads, dtype)
            parts = [[*own, one] for own, one in zip(parts, found, strict=True)]
        return [functools.reduce(jnp.add, its) for its in parts]

    roots = sorted({root for target in targets for root in target.roots})
    its = held.of_roots(roots, traced.uses)
    return [LeafGradient(x) for x in computed_once(form, its, _some(its) if some is None else some)]


def _maps(
    traced: TracedLoss, targets: Sequence[Target], values: Sequence[int]
) -> list[LinearMap] | None:
    """From the gradient with respect to one value to those of parameters; None if unknown."""
    outside = traced.outside
    if outside is None or len(values) != 1 or any(len(target.roots) > 1 for target in targets):
        return None
    (root,) = values
    uses = tuple(traced.uses.of[root].values())
    if len(uses) != 1 or formed_order(uses[0].matrices, traced.root(root).shape) is None:
        return None
    maps: list[LinearMap] = []
    for target in targets:
        (leaf,) = target.leaves
        function = one_value(traced.split, leaf, root, outside.shared)
        linear = transposed_derivative(
            function, whole(traced.params[leaf]), traced.accumulate_dtype
        )
        if linear is None:
            return None
        maps.append(linear)
    return maps


def _formed_maps(
    traced: TracedLoss,
    targets: Sequence[Target],
    root: int,
    maps: Sequence[LinearMap],
    held: Held,
    some: Array | None,
) -> list[LeafGradient]:
    """Each example's gradients, by known maps of that with respect to one value."""
    shape, uses = traced.root(root).shape, traced.uses.of[root]
    (use,), dtype = uses.values(), traced.accumulate_dtype
    order = formed_order(use.matrices, shape)
    assert order is not None
    as_formed = tuple(shape[axis] for axis in order)
    its = use._replace(matrices=layout_of(as_formed))
    form = LeafForm(as_formed, (its,), "kept", dtype)

    def found(held: Held) -> list[Array]:
        with stage("loss"):  # what is left of the backward pass
            return _a_few_at_once(of_some, held.met(uses), form)

    def of_some(met: list[tuple[Any, Array]]) -> list[Array]:
        grads = per_example_gradients(form, met)
        return [follow_formed(linear, grads, shape, order) for linear in maps]

    of_root = held.of_roots([root], traced.uses)
    grads = computed_once(found, of_root, _some(of_root) if some is None else some)
    back = functools.partial(jnp.transpose, axes=np.argsort(order).tolist())
    return [
        LeafGradient(one, back) if one.ndim - 1 == len(order) else LeafGradient(one)
        for one in grads
    ]


def _a_few_at_once(function: Callable[[Any], list[Array]], met: Any, form: LeafForm) -> list[Array]:
    """A function of what examples meet, of so many at once that gradients stay in the cache."""
    batch = len(jax.tree.leaves(met)[0])
    most = max(1, _CACHED // max(1, math.prod(form.shape)))
    several = max(n for n in range(1, batch + 1) if batch % n == 0 and n <= most)
    if several == batch:
        return function(met)
    parts = jax.tree.map(lambda x: x.reshape(batch // several, several, *x.shape[1:]), met)
    found = jax.lax.map(function, parts)
    return [x.reshape(batch, *x.shape[2:]) for x in found]


_CACHED = 2**17
"""Entries."""


def _some(held: Held) -> Array:
    """An array of what is held. The loss is better, where it is there: it is small."""
    return jax.tree.leaves(held[1:])[0]


def _values(traced: TracedLoss, target: Target) -> frozenset[int]:
    """The values that a target goes through."""
    others = {*target.leaves, *target.penalties}
    return frozenset(root for root in target.roots if root not in others)


def _heights(traced: TracedLoss, target: Target, held: Held, num_examples: int) -> Array:
    """The gradients with respect to a target's penalties."""
    found = [_formed(traced, root, held) for root in target.penalties]
    flat = [x.reshape(num_examples).astype(traced.accumulate_dtype) for x in found]
    return jnp.stack(flat, axis=1)


def _penalised(traced: TracedLoss, index: int, held: Held, num_examples: int) -> LeafGradient:
    """The gradient of a parameter that penalties depend on, from inner products."""
    target, dtype, outside = traced.targets[index], traced.accumulate_dtype, traced.outside
    assert outside is not None
    (leaf,) = target.leaves
    uses = traced.uses.of[leaf]
    form = LeafForm(traced.root(leaf).shape, tuple(uses.values()), target.way, dtype)
    # Heights alone are nothing but cotangents, which are there.
    heights = _heights(traced, target, held.of_roots(target.roots, traced.uses), num_examples)
    return penalised(form, held.met(uses), heights, outside.penalties[index]())


def _formed(traced: TracedLoss, root: int, held: Held) -> Array:
    """Each example's gradient with respect to a root."""
    if root in held.grads:
        return held.grads[root]
    uses, shape = traced.uses.of[root], traced.root(root).shape
    form = LeafForm(shape, tuple(uses.values()), "kept", traced.accumulate_dtype)
    return per_example_gradients(form, held.met(uses))
