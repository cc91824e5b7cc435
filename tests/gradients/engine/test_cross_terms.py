"""Norms by inner products of parameters with several uses: a fuzz of programs."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from eqx_dp.gradients.cross_terms import overlaps
from eqx_dp.gradients.leaves import LeafForm, leaf_gradient, norm_and_bound
from eqx_dp.gradients.program import Program
from eqx_dp.gradients.taps import Uses
from tests.gradients.engine.cross_programs import FORMS, CrossProgram, batch_of, drawn, fitted
from tests.gradients.engine.kinds import CONTRIBUTES, FACTORS, met_at_uses
from tests.gradients.engine.uses import traced

NUM_EXAMPLES = len(FACTORS)
AT_ONCE = 10


class Traced(NamedTuple):
    """A program, and what the engine finds in it; whether some of its uses are of the same part."""

    source: CrossProgram
    program: Program
    found: Uses
    do_overlap: bool

    @property
    def form(self) -> LeafForm:
        shape, uses = FORMS[self.source.form].shape, tuple(self.found.of[0].values())
        return LeafForm(shape, uses, "inner_products", np.dtype(np.float32))


def loss(source: CrossProgram, copies: list[Array], x: Array, t: Array, cotangent: Array) -> Array:
    y = source(copies, x, t)
    return jnp.sum(y * fitted(cotangent, y.shape[1]))


def programs(seed: int) -> Iterator[Traced]:
    """Programs of several uses whose norm needs no gradient."""
    rng, known = np.random.default_rng(seed), set[CrossProgram]()
    one = tuple(
        jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in narrow(batch_of(0, NUM_EXAMPLES))
    )
    while True:
        source = drawn(rng)
        form = FORMS[source.form]

        def of_one(w: Array, *example: Array, source: CrossProgram = source) -> Array:
            return loss(source, [w] * len(source.uses), *example)

        program, found = traced(of_one, jnp.zeros(form.shape, np.float32), True, one)
        sets = overlaps(tuple(found.of[0].values()), form.shape)
        if found.whole or sets is None or source in known:
            continue
        known.add(source)
        yield Traced(source, program, found, max(map(len, sets)) > 1)


def narrow(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(np.float32) if x.dtype == np.float64 else x, tree)


def by_inner_products(one: Traced, w: Array, batch: tuple[Array, ...]) -> Any:
    """Norms, bounds, what each example adds alone, and a weighted sum."""
    _, met = met_at_uses(one.program, one.found, w, list(batch))
    leaf = leaf_gradient(one.form, met)
    alone = jnp.ones((NUM_EXAMPLES, NUM_EXAMPLES), w.dtype), jnp.eye(NUM_EXAMPLES, dtype=bool)
    weights = jnp.concatenate([alone[0], jnp.asarray(FACTORS, w.dtype)[None]])
    masks = jnp.concatenate([alone[1], jnp.asarray(CONTRIBUTES)[None]])
    sums = jax.vmap(leaf.sum)(weights, masks)
    return *norm_and_bound([leaf], NUM_EXAMPLES, one.form.dtype), sums[:-1], sums[-1]


def one_by_one(one: Traced, w: Array, batch: tuple[Array, ...]) -> Array:
    """The gradient of every example at every use, by JAX and in float64."""
    copies = [w] * len(one.source.uses)
    of_one = jax.grad(functools.partial(loss, one.source))
    return jax.lax.map(lambda example: jnp.stack(of_one(copies, *example)), batch)


def check(chunk: list[Traced], seed: int) -> None:
    rng = np.random.default_rng(seed)
    parameters = [0.7 * rng.normal(size=one.form.shape) for one in chunk]
    # What float32 can hold, so that both see the same numbers.
    wide = jax.tree.map(
        lambda x: narrow(x).astype(x.dtype), (parameters, batch_of(seed, NUM_EXAMPLES))
    )

    @jax.jit
    def everything(wide: Any, narrow: Any) -> Any:
        return [
            (by_inner_products(one, *here, narrow[1]), one_by_one(one, *there, wide[1]))
            for one, here, there in zip(chunk, zip(narrow[0]), zip(wide[0]), strict=True)
        ]

    with jax.enable_x64(True):
        results = everything(wide, narrow(wide))
    for one, (found, of_uses) in zip(chunk, results, strict=True):
        compare(one, *map(np.asarray, found), np.asarray(of_uses))


def compare(
    one: Traced,
    norms: np.ndarray,
    bounds: np.ndarray,
    added: np.ndarray,
    total: np.ndarray,
    of_uses: np.ndarray,
) -> None:
    """Holds what the engine says against the gradients of every example at every use."""
    source, truth = one.source, of_uses.sum(axis=1)
    true_norms = lengths(truth)
    # Whether the norm is that of uses that have nothing to do with each other.
    apart = np.sqrt(np.sum(lengths(of_uses, 2) ** 2, axis=1))
    assert (abs(apart / true_norms - 1) > (1e-3 if one.do_overlap else 1e-9)).any() == (
        one.do_overlap
    ), source
    gross = np.sum(lengths(of_uses, 2), axis=1)
    added_norms = lengths(added)
    assert (abs(added_norms - norms) <= 2e-6 * gross).all(), source
    assert (added_norms <= bounds.astype(np.float64)).all(), source
    assert (bounds <= added_norms + 1e-4 * gross).all(), source
    # The forward pass is rounded, too, and some programs amplify that.
    assert (lengths(added - truth) <= 1e-4 * gross).all(), source
    weighted = np.tensordot(np.where(CONTRIBUTES, FACTORS, 0), added, axes=1)
    assert lengths(total[None] - weighted) <= 2e-6 * np.sum(FACTORS * gross), source


def lengths(x: np.ndarray, axes: int = 1) -> np.ndarray:
    return np.linalg.norm(x.astype(np.float64).reshape(*x.shape[:axes], -1), axis=-1)


def _tier(seed: int) -> Any:
    if seed < 10:
        return pytest.mark.exhaustive if seed > 0 else ()
    return pytest.mark.exhaustive


@pytest.mark.slow
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=_tier(seed)) for seed in range(30)])
def test_programs(seed: int) -> None:
    found = programs(seed)
    chunk = [next(found) for _ in range(AT_ONCE)]
    assert sum(one.do_overlap for one in chunk) >= AT_ONCE / 2
    check(chunk, seed)
