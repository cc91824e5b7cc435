"""Primitives that are known by their names alone, held against the JAX that is installed."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from eqx_dp.programs import SUMS_OF_DEVICES
from tests.sharding.losses import mesh_of


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_sum_over_devices_is_known_by_the_name_that_jax_gives_it(check_vma):
    total, mesh = (lambda x: jax.lax.psum(x, "data")), mesh_of("auto", data=8)
    options = {"in_specs": P("data"), "out_specs": P(), "check_vma": check_vma}
    mapped = jax.shard_map(total, mesh=mesh, **options)
    (equation,) = jax.make_jaxpr(mapped)(jnp.ones(8)).jaxpr.eqns
    *_, last = equation.params["jaxpr"].eqns
    assert last.primitive.name in SUMS_OF_DEVICES
