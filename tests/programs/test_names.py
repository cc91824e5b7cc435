"""The list of names that JAX gives no object for is held against the JAX that is installed."""

import gc

import equinox.internal
import jax.experimental.buffer_callback
import jax.experimental.pallas.tpu
import jax.export
import jax.extend.core as jex_core
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from eqx_dp.programs import PLACEMENTS, SUMS_OF_DEVICES, named
from eqx_dp.programs.inside import HOLDERS
from eqx_dp.programs.names import WITHOUT_OBJECT
from tests.sharding.losses import mesh_of

MODULES = (equinox.internal, jax.experimental.buffer_callback, jax.export)
MODULES += (jax.experimental.pallas.tpu,)  # whose import makes primitives

OF_OTHERS = {"triton_kernel_call"}  # of jax-triton
SINCE_JAX_0_11 = {"log2", "one_minus_square"}


def test_every_name_without_an_object_is_that_of_a_primitive():
    assert all(MODULES)
    made = {x.name for x in gc.get_objects() if isinstance(x, jex_core.Primitive)}
    assert WITHOUT_OBJECT - made - OF_OTHERS <= SINCE_JAX_0_11
    assert made >= frozenset(HOLDERS) | PLACEMENTS
    if jax.__version_info__ >= (0, 11):
        assert made >= SINCE_JAX_0_11


def test_a_name_that_jax_does_not_know_fails():
    assert named("add scatter-add unvmap_any") == {"add", "scatter-add", "unvmap_any"}
    with pytest.raises(ImportError, match="'scatter_add'"):
        named("add scatter_add")


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_sum_over_devices_is_known_by_the_name_that_jax_gives_it(check_vma):
    mapped = jax.shard_map(
        lambda x: jax.lax.psum(x, "data"),
        mesh=mesh_of("auto", data=8),
        in_specs=P("data"),
        out_specs=P(),
        check_vma=check_vma,
    )
    (equation,) = jax.make_jaxpr(mapped)(jnp.ones(8)).jaxpr.eqns
    *_, last = equation.params["jaxpr"].eqns
    assert last.primitive.name in SUMS_OF_DEVICES
