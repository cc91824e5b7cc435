"""Norms by inner products against float64, for every number of blocks, side and kind of use.

The formulas are internal: a bound that is too low by a rounding shows in no clipped gradient.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_dp as dp
from eqx_dp.gradients import gram
from eqx_dp.gradients.gram import OneHot, OuterProducts, gram_norms
from eqx_dp.gradients.norms import unit_roundoff

pytestmark = pytest.mark.optimized

FLOAT32 = np.dtype("float32")
U = unit_roundoff(FLOAT32)
norms_of = eqx.filter_jit(lambda uses: gram_norms(uses, dtype=FLOAT32))


def drawn(time, features, seed, groups=2):
    found = np.random.default_rng(seed).normal(size=(2, groups, time, features))
    return jnp.asarray(found, jnp.float32)


def rows_of(time, seed, groups=2):
    rows = np.random.default_rng(seed).integers(0, 5, (2, groups, time))
    return OneHot(jnp.asarray(rows))


def exact(uses):
    """The norms of the sums of outer products, and the sums of the norms of these."""
    whole, gross = 0, 0
    for use in uses:
        dense = (jax.nn.one_hot(x.rows, 5) if isinstance(x, OneHot) else x for x in use.sides)
        sides = [np.asarray(x, np.float64) for x in dense]
        whole = whole + np.einsum("bgtk,bgtp->bgkp", *sides)
        lengths = [np.linalg.norm(side, axis=-1) for side in sides]
        gross = gross + (lengths[0] * lengths[1]).sum(-1)
    return np.sqrt((whole**2).sum((1, 2, 3))), np.linalg.norm(gross, axis=-1)


X, G = drawn(5, 65, 0), drawn(5, 70, 1)
USES = {
    "one block": [OuterProducts(drawn(5, 3, 0), drawn(5, 4, 1))],
    "one term": [OuterProducts(drawn(1, 3, 0), drawn(1, 4, 1))],
    "a rest, and blocks": [OuterProducts(drawn(5, 200, 0), drawn(5, 129, 1))],
    "many blocks": [OuterProducts(drawn(3, 64 * 33 + 5, 0), drawn(3, 4, 1))],
    "blocks in a loop": [OuterProducts(drawn(600, 200, 0, 1), drawn(600, 65, 1, 1))],
    "lookups": [OuterProducts(rows_of(7, 0), drawn(7, 200, 1))],
    "two": [OuterProducts(X, G), OuterProducts(drawn(4, 65, 2), drawn(4, 70, 3))],
    "two, one transposed": [
        OuterProducts(X, G),
        OuterProducts(drawn(4, 70, 2), drawn(4, 65, 3), transposed=True),
    ],
    "two, one cancels": [OuterProducts(X, G), OuterProducts(X, -G)],
    "a lookup and its products": [
        OuterProducts(rows_of(7, 0), drawn(7, 70, 1)),
        OuterProducts(drawn(4, 70, 2), drawn(4, 5, 3), transposed=True),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", USES)
def test_norms_of_sums_of_outer_products(name):
    """The bound is above the norm, and near it unless terms cancel."""
    uses = USES[name]
    norm, gross = exact(uses)
    found, bound = map(np.float64, norms_of(uses))
    np.testing.assert_allclose(found**2, norm**2, atol=100 * U * gross.max() ** 2)
    assert np.all(bound >= norm * (1 + 4 * U))
    assert np.all(bound >= gram.least_share(FLOAT32) * gross)
    if "cancels" not in name:
        time = sum(use.time for use in uses)
        assert np.all(bound <= norm * (1 + 60 * U * math.sqrt(time) * gross / norm))


@pytest.mark.parametrize("name", ["a rest, and blocks", "two, one transposed", "lookups"])
def test_a_power_of_two_scales_norm_and_bound(name):
    """Each side of the products by itself: every term of the bound has a factor of both."""
    plain = norms_of(USES[name])
    for of_x, of_g in ((1.0, 8.0), (0.25, 1.0), (4.0, 0.5)):
        scaled = [
            use._replace(x=use.x if isinstance(use.x, OneHot) else use.x * of_x, g=use.g * of_g)
            for use in USES[name]
        ]
        factor = of_g * (1 if name == "lookups" else of_x)
        for one, other in zip(plain, norms_of(scaled), strict=True):
            np.testing.assert_array_equal(np.asarray(one) * factor, other)


@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e18])
@pytest.mark.parametrize("features", [1, 3, 300])
def test_the_norm_of_one_term(features, scale):
    x, g = scale * drawn(1, features, 0), drawn(1, 7, 1)
    norm, _ = exact([OuterProducts(x, g)])
    found, bound, unit, power = map(np.float64, jax.jit(gram.one_term)(x, g))
    np.testing.assert_allclose(found, norm, rtol=20 * U)
    assert np.all(bound >= norm * (1 + 4 * U))
    assert np.all(bound <= norm * (1 + 60 * U))
    np.testing.assert_array_equal(unit * power[..., None, None], x)
    lengths = np.linalg.norm(unit, axis=(2, 3))
    assert np.all((lengths > 0.25) & (lengths < 4))


@pytest.mark.parametrize("parts", [0, 1])
def test_roundings_of_an_inner_product_are_those_of_its_program(parts):
    """A term is multiplied and added within its block, and goes through one addition for each."""
    for features in (1, 63, 64, 65, 200, 2048, 2049, 5000, 70_000):
        x = jax.ShapeDtypeStruct((1, 1, 2, features), jnp.float32)
        program = jax.make_jaxpr(lambda x: gram._inner_products(x, x, FLOAT32, parts))(x)
        found = dp.programs.equations(program)
        products = (one for one in found if one.primitive.name == "dot_general")
        sizes = [one.invars[0].aval.shape[-1] for one in products]
        assert sum(sizes) == features
        assert len(sizes) <= 32
        assert min(features, 64) <= max(sizes)
        most = max(size + len(sizes) - max(i, 1) for i, size in enumerate(sizes))
        assert gram._roundings(jnp.zeros((1, 1, 1, features)), parts) == most
