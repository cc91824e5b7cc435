"""Losses with a shard_map inside, over axes that the rules leave to them."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import eqx_dp as dp
from tests.sharding.losses import mesh_of

pytestmark = pytest.mark.sampled(3)

rng = np.random.default_rng(0)
WEIGHT = jnp.asarray(rng.normal(size=(4, 6)), jnp.float32)
X = rng.normal(size=(8, 4)).astype(np.float32)
AXES = {"data": 2, "model": 2, "other": 2}


def product(w, x):
    return x @ w


def in_a_scan(w, x):
    start = jax.lax.pcast(jnp.zeros(6), "model", to="varying")
    return jax.lax.scan(lambda sum, row: (sum + row[0] * row[1], None), start, (x, w))[0]


def under_remat(w, x):
    return jax.checkpoint(product)(w, x)


def with_a_derivative_of_its_own(w, x):
    zero = jnp.zeros(())  # softplus(x) is logaddexp(x, 0)
    return x @ w + zero * jax.nn.softplus(jax.lax.psum(jnp.sum(x @ w), "model"))


def with_a_constraint_on_a_third_axis(w, x):
    return x @ jax.lax.with_sharding_constraint(w, P(None, "other"))


def check(part, kind, given_mesh=False, context=jax.set_mesh):
    """The clipped gradient is that of the plain product on one device."""
    mesh = mesh_of(kind, **AXES)
    rules = dp.ShardingRules(mesh)

    def loss(w, x):
        mapped = jax.shard_map(
            lambda w, x: jax.lax.psum(part(w, x), "model"),
            mesh=mesh if given_mesh else None,
            in_specs=(P("model"), P("model")),
            out_specs=P(),
            axis_names={"model"},
        )
        return jnp.sum(jnp.tanh(mapped(w, x)) ** 2)

    on_mesh = dp.filter_clipped_grad(loss, l2_clip_norm=1.0, sharding=rules)
    with context(mesh):
        found = jax.jit(on_mesh)(rules.shard(WEIGHT), rules.shard_batch(X))
    alone = dp.filter_clipped_grad(lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2), l2_clip_norm=1.0)
    np.testing.assert_allclose(found, jax.jit(alone)(WEIGHT, X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("part", [product, in_a_scan, under_remat, with_a_derivative_of_its_own])
def test_a_shard_map_over_another_axis(part, kind):
    check(part, kind)


def test_a_constraint_in_a_shard_map():
    check(with_a_constraint_on_a_third_axis, "auto")


@pytest.mark.parametrize("context", [jax.set_mesh, contextlib.nullcontext])
def test_a_shard_map_that_is_given_its_mesh(context):
    check(product, "auto", given_mesh=True, context=context)
    with pytest.raises(ValueError, match=r"no mesh to jax\.shard_map"):
        check(product, "explicit", given_mesh=True, context=context)
