"""The truth: clipped gradients example by example in float64, clipped and summed in plain numpy.

Nothing here is shared with `eqx_dp`: no vmap, no microbatches, no casts of a policy. `jax.grad` is
asked for the gradient of one example at a time with x64 on; the rest is numpy.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

# What is trained, as everywhere in Equinox: a function of a leaf, or a tree (prefix) of bools.
FilterSpec = Any
Tree = Any


class Truth(NamedTuple):
    """What `filter_value_and_clipped_grad` should say, in float64 numpy."""

    grads: Tree
    loss: np.ndarray
    grad_norm: Tree
    aux: Tree
    # Each example's own contribution to `grads`: the leaves with a leading example axis.
    contributions: Tree


def clipped_gradients(
    fun: Callable[..., Any],
    model: Tree,
    *batch: Tree,
    l2_clip_norm: Tree,
    key: Any = None,
    is_padding_example: Any = None,
    filter_spec: FilterSpec = eqx.is_inexact_array,
    has_aux: bool = False,
    keep_batch_dim: bool = False,
    rescale_to_unit_norm: bool = False,
    normalize_by: float = 1.0,
) -> Truth:
    """The sum of clipped per-example gradients, and what comes with it."""
    size = jax.tree.leaves(batch)[0].shape[0]
    padding = np.zeros(size, bool) if is_padding_example is None else np.asarray(is_padding_example)
    with jax.enable_x64(True):
        trained, frozen = _partition(_to_float64(model), filter_spec)
        structure = jax.tree.structure(trained)
        shapes = [leaf.shape for leaf in jax.tree.leaves(trained)]
        groups = _groups(l2_clip_norm, trained)
        keys = None if key is None else jax.random.split(key, size)
        rows = _to_float64(batch)
        losses, norms, auxs, parts = [], [], [], []
        for i in range(size):
            example = jax.tree.map(lambda leaf, i=i: leaf[i], rows)
            if keep_batch_dim:
                example = jax.tree.map(lambda leaf: leaf[None], example)
            example_key = None if keys is None else keys[i]
            (loss, aux), grad = _value_and_grad(fun, has_aux, trained, frozen, example, example_key)
            leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(grad)]
            aux = jax.tree.map(np.asarray, aux)
            if keep_batch_dim:
                aux = jax.tree.map(_without_batch_of_one, aux)
            if padding[i]:
                loss, leaves = 0.0, [np.zeros_like(leaf) for leaf in leaves]
                aux = jax.tree.map(np.zeros_like, aux)
            clipped, example_norms = _clip(leaves, groups, rescale_to_unit_norm)
            losses.append(float(loss))
            norms.append(example_norms)
            auxs.append(aux)
            parts.append([leaf / normalize_by for leaf in clipped])
    stacked = [
        np.stack([part[j] for part in parts]) if parts else np.zeros((0, *shape))
        for j, shape in enumerate(shapes)
    ]
    return Truth(
        grads=jax.tree.unflatten(structure, [leaf.sum(0) for leaf in stacked]),
        loss=np.array(losses),
        grad_norm=_norm_tree(l2_clip_norm, norms),
        aux=jax.tree.map(lambda *rows: np.stack(rows), *auxs) if auxs else None,
        contributions=jax.tree.unflatten(structure, stacked),
    )


def room(size: int) -> float:
    """How much shorter clipped gradients of so many slots are at most, in float32.

    It leaves room for what rounding moves: `eqx_dp/privacy/finite_precision.md`.
    """
    return 2.1 * 2.0**-24 * 2 * size * (size + 3)


@eqx.filter_jit
def _value_and_grad(
    fun: Callable[..., Any], has_aux: bool, trained: Tree, frozen: Tree, example: Tree, key: Any
) -> Any:
    def loss(trained: Tree) -> Any:
        named = {} if key is None else {"key": key}
        value = fun(eqx.combine(trained, frozen), *example, **named)
        return value if has_aux else (value, None)

    return jax.value_and_grad(loss, has_aux=True)(trained)


def _clip(
    leaves: list[np.ndarray], groups: list[tuple[float, list[int]]], rescale: bool
) -> tuple[list[np.ndarray], list[float]]:
    """One example's leaves, each group clipped to its norm; zero if any of them is not finite."""
    norms = [float(np.sqrt(sum(np.sum(leaves[j] ** 2) for j in members))) for _, members in groups]
    clipped = [np.zeros_like(leaf) for leaf in leaves]
    if all(np.isfinite(leaf).all() for leaf in leaves):
        for (clip_norm, members), norm in zip(groups, norms, strict=True):
            for j in members:
                clipped[j] = leaves[j] * _factor(clip_norm, norm, rescale)
    return clipped, norms


def _factor(clip_norm: float, norm: float, rescale: bool) -> float:
    """min(1, C / norm), divided by C where asked, with the limits at C = 0 and C = inf."""
    if norm == 0:
        return 0.0
    if not rescale:
        return 1.0 if norm <= clip_norm else clip_norm / norm
    return 1.0 / norm if norm > clip_norm else 1.0 / clip_norm


def _is_none(node: Any) -> bool:
    return node is None


def _is_number(node: Any) -> bool:
    if isinstance(node, bool):
        return False
    return isinstance(node, int | float) or (
        isinstance(node, np.generic | np.ndarray | jax.Array) and node.ndim == 0
    )


def _groups(l2_clip_norm: Tree, trained: Tree) -> list[tuple[float, list[int]]]:
    """A clip norm and the places of its leaves, for every number of the clip tree."""
    places = jax.tree.unflatten(jax.tree.structure(trained), range(len(jax.tree.leaves(trained))))
    groups = []

    def visit(clip_norm: Any, below: Tree) -> None:
        members = jax.tree.leaves(below)
        if _is_number(clip_norm):
            groups.append((float(clip_norm), members))
        else:
            assert not members, "a trained leaf without a clip norm"

    jax.tree.map(visit, l2_clip_norm, places, is_leaf=_is_none)
    return groups


def _norm_tree(l2_clip_norm: Tree, norms: list[list[float]]) -> Tree:
    columns = iter(np.array(norms).T if norms else ())
    column = lambda node: next(columns, np.zeros(0)) if _is_number(node) else None  # noqa: E731
    return jax.tree.map(column, l2_clip_norm, is_leaf=_is_none)


def _partition(model: Tree, filter_spec: FilterSpec) -> tuple[Tree, Tree]:
    """As `eqx.partition`, but that a function of a leaf selects nothing of a State."""
    if jax.tree_util.all_leaves([filter_spec]) and callable(filter_spec):  # a tree may be, too
        function = filter_spec
        selects = lambda node: not _is_state(node) and function(node)  # noqa: E731
        filter_spec = jax.tree.map(selects, model, is_leaf=_is_state)
    return eqx.partition(model, filter_spec)


def _is_state(node: Any) -> bool:
    return isinstance(node, eqx.nn.State | eqx.nn.StateIndex)


def _to_float64(tree: Tree) -> Tree:
    def wide(leaf: Any) -> Any:
        if eqx.is_array_like(leaf) and not isinstance(leaf, bool | int | float | complex):
            leaf = np.asarray(leaf)
            return leaf.astype(np.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
        return leaf

    return jax.tree.map(wide, tree)


def _without_batch_of_one(leaf: np.ndarray) -> np.ndarray:
    return leaf[0] if leaf.ndim and leaf.shape[0] == 1 else leaf


def vector(tree: Tree) -> np.ndarray:
    """All the arrays of a tree, end to end, in float64."""
    leaves = [np.asarray(leaf).astype(np.float64).ravel() for leaf in jax.tree.leaves(tree)]
    return np.concatenate(leaves) if leaves else np.zeros(0)


def relative_error(found: Tree, truth: Tree) -> float:
    """|found - truth| / |truth| of the whole vectors; structures and shapes must be the same."""
    assert jax.tree.structure(found) == jax.tree.structure(truth)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True):
        assert np.shape(one) == np.shape(other)
    difference = np.linalg.norm(vector(found) - vector(truth))
    scale = np.linalg.norm(vector(truth))
    return float(difference) if scale == 0 else float(difference / scale)
