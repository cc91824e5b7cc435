"""Every device draws its own part of the noise, and the bits are those of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import eqx_dp as dp
from tests.sharding.compiled import collectives
from tests.sharding.losses import mesh_of
from tests.tiers import curated

ZEROS = {"v": jnp.zeros((64, 48)), "w": jnp.zeros((64, 48)), "b": jnp.zeros(9)}
ALONE = dp.gaussian_privatizer(stddev=1.0, key=5)


PLACED = [(AxisType.Auto, P(None, "data")), (AxisType.Explicit, P("data"))]


@pytest.mark.parametrize(("kind", "spec"), curated(PLACED, PLACED[:1]))
def test_with_rules(kind, spec):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    rules = dp.ShardingRules(mesh, examples=("data",), params=(("w", spec), ("v", spec)))
    noise = dp.gaussian_privatizer(stddev=1.0, key=5, sharding=rules)
    expected, _ = ALONE.update(ZEROS, ALONE.init(ZEROS))
    with jax.set_mesh(mesh):
        spread = rules.shard_accumulators(ZEROS)
        program = jax.jit(noise.update).lower(spread, noise.init(spread)).compile()
        found, _ = jax.jit(noise.update)(spread, noise.init(spread))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert not found["w"].sharding.is_fully_replicated
    assert collectives(program.as_text()) == []
    assert program.memory_analysis().temp_size_in_bytes < ZEROS["w"].nbytes


@pytest.mark.parametrize("spec", [P("data"), P(None, "data")])
def test_without_rules(spec):
    gradients = jnp.zeros((64, 16, 3, 3))
    expected, _ = ALONE.update(gradients, ALONE.init(gradients))
    spread = jax.device_put(gradients, NamedSharding(mesh_of("auto", data=4), spec))
    update = jax.jit(ALONE.update)
    found, _ = update(spread, ALONE.init(gradients))
    np.testing.assert_array_equal(found, expected)
    assert found.sharding.is_equivalent_to(spread.sharding, 4)
    assert collectives(update.lower(spread, ALONE.init(gradients)).compile().as_text()) == []


def test_in_a_shard_map():
    def noisy(g, state):
        return dp.add_noise(g, state, 1.0)[0]

    places = {"mesh": mesh_of("auto", data=8), "in_specs": (P(), P()), "out_specs": P()}
    inside = jax.jit(jax.shard_map(noisy, check_vma=False, **places))
    given = jnp.zeros(5), dp.noise_stream(1)
    np.testing.assert_array_equal(inside(*given), noisy(*given))
    places |= {"in_specs": (P("data"), P()), "out_specs": P("data")}
    with pytest.raises(ValueError, match="splits a gradient over data: all parts would get the"):
        jax.shard_map(noisy, **places)(jnp.zeros(8), given[1])


def test_a_wide_leaf_is_one_kernel_without_memory_beside_it():
    gradients = jnp.zeros((300, 400))
    update = jax.jit(ALONE.update, donate_argnums=0)
    program = update.lower(gradients, ALONE.init(gradients)).compile()
    assert program.memory_analysis().temp_size_in_bytes < 0.1 * gradients.nbytes
