"""What a loss says of sharding on each kind of axes, and gradients on a mesh and without one."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import eqx_dp as dp

AXIS_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def mesh_of(kind, **axes):
    kinds = (AXIS_TYPES[kind],) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds)


class Says(NamedTuple):
    """How a loss speaks of sharding on one kind of axes; not at all with `constrained` off."""

    kind: str
    constrained: bool = True

    def constrain(self, x, spec):
        if not self.constrained:
            return x
        if self.kind == "auto":
            return jax.lax.with_sharding_constraint(x, spec)
        return jax.sharding.reshard(x, spec)

    def einsum(self, subscripts, x, y, spec):
        # On Explicit axes a contraction over a spread dimension has to say where its result goes.
        where = {} if self.kind == "auto" else {"out_sharding": spec}
        return jnp.einsum(subscripts, x, y, **where)


def assert_like_one_device(fun, model, batch, rules, padding=None, key=None, rtol=1e-4, **options):
    """Values and gradients are those without a mesh, and gradients live where they ought to.

    Without a mesh they are by one method, whose program many tests share.
    """
    options = {"l2_clip_norm": 0.7, **options}
    given = {"is_padding_example": padding, "key": key}
    plainly = options | {"method": "per_example", "microbatch_size": None}
    alone = dp.filter_value_and_clipped_grad(fun, **plainly)
    expected = eqx.filter_jit(alone)(model, *batch, **given)
    on_mesh = dp.filter_value_and_clipped_grad(fun, sharding=rules, **options)
    with jax.set_mesh(rules.mesh):
        found = eqx.filter_jit(on_mesh)(rules.shard(model), *rules.shard_batch(batch), **given)
        specs = jax.tree.leaves(rules.accumulator_specs(found[1]))
        for leaf, spec in zip(jax.tree.leaves(found[1]), specs, strict=True):
            sharding = jax.sharding.NamedSharding(rules.mesh, spec)
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


# Of a loss on eight examples with one matrix, which says something of sharding or not.
WEIGHT = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(8, 5, 4)).astype(np.float32)


def gradient(loss, mesh=None, rules=None, **options):
    """The clipped gradient, on a mesh or on one device."""
    options = {"l2_clip_norm": 1.0, "keep_batch_dim": True} | options
    if mesh is None:
        return jax.jit(dp.filter_clipped_grad(loss, **options))(WEIGHT, X)
    rules = rules or dp.ShardingRules(mesh)
    options = {"sharding": rules} | options
    with jax.set_mesh(mesh):
        model, batch = rules.shard(WEIGHT), rules.shard_batch(X)
        return jax.jit(dp.filter_clipped_grad(loss, **options))(model, batch)


def assert_like_free(make_loss, kind, **options):
    """On 4 x 2 devices the gradient is that without constraints on one device."""
    found = gradient(make_loss(Says(kind)), mesh_of(kind, data=4, model=2), **options)
    expected = gradient(make_loss(Says("auto", constrained=False)), **options)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
