"""A device's part of a parameter: what is done to the part is done to the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import eqx_dp as dp
from eqx_dp.isolation import run_apart
from eqx_dp.sharding import Shard, axes_of, cut_of, rearranged, whole
from tests.sharding.losses import mesh_of

REARRANGED = {
    "cast": (lambda x: x.astype(jnp.bfloat16), (4, 8), P(None, "data"), True),
    "transposed": (lambda x: x.transpose(2, 0, 1), (4, 6, 3), P("data"), True),
    "named": (lambda x: checkpoint_name(x, "x"), (4, 8), P("model", "data"), True),
    "reshaped": (lambda x: x.reshape(4, 2, 3), (8, 3), P("data"), False),
    "not rearranged": (jnp.sin, (8,), P("data"), False),
}


@pytest.mark.parametrize("name", REARRANGED)
def test_a_part_is_rearranged_as_the_whole_is(name):
    function, shape, spec, stays = REARRANGED[name]
    mesh = mesh_of("auto", data=4, model=2)
    rules = dp.ShardingRules(mesh, examples=("data", "model"))
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    (equation,) = (e for e in jax.make_jaxpr(function)(x).jaxpr.eqns if e.primitive.name != "jit")
    cut = cut_of(rules, spec, len(shape))

    def run(part):
        found = rearranged(equation, [Shard(part, cut)])
        assert (found is not None) == stays
        if found is None:
            return function(whole(Shard(part, cut)))
        assert found.shape == function(x).shape
        assert found.part.size == part.size
        return whole(found)

    mapped = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=P(), check_vma=False)
    found, expected = jax.jit(mapped)(x), function(x)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("what", ["parameter", "examples"])
def test_a_parameter_may_be_gathered_where_examples_are_kept_apart(what):
    """It carries nothing of an example; a gather of examples does."""
    mesh = mesh_of("auto", data=8)
    loss = jax.make_jaxpr(lambda x: x)(jnp.ones(3)).jaxpr

    def run(weight, x):
        def of_batch(x):
            gathered = jax.lax.all_gather(weight if what == "parameter" else x, "data")
            return x * jnp.sum(gathered)

        return run_apart(of_batch, loss, x)

    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data"), check_vma=False
    )
    args = jnp.ones(8), jnp.ones((16, 3))
    if what == "parameter":
        np.testing.assert_array_equal(jax.jit(mapped)(*args), 8)
    else:
        with pytest.raises(ValueError, match=r"Examples meet .* by 'all_gather' over the axis"):
            jax.jit(mapped)(*args)


@pytest.mark.parametrize(
    "spec",
    [P("data", "model"), P("model", "data"), P(("data", "model")), P(None, ("model", "data"))],
    ids=str,
)
def test_what_is_gathered_is_the_whole_on_any_other_axis(spec):
    """Along a dimension that is cut over both axes, parts of parts must not be put together."""
    rules = dp.ShardingRules(mesh_of("auto", data=4, model=2))
    cut = cut_of(rules, spec, 2)
    x = jnp.arange(16 * 8.0).reshape(16, 8)
    over_data = P(*("data" if "data" in axes_of(entry) else None for entry in spec))

    def on_device(part):
        return cut.gathered(part), cut.scattered(x)

    run = jax.shard_map(
        on_device,
        mesh=rules.mesh,
        in_specs=over_data,
        out_specs=(P(), over_data),
        axis_names={"data"},
        check_vma=False,
    )
    with jax.set_mesh(rules.mesh):
        there = jax.device_put(x, jax.sharding.NamedSharding(rules.mesh, spec))
        gathered, scattered = jax.jit(run)(there)
    assert np.array_equal(gathered, x)
    assert np.array_equal(scattered, 4 * x)


def test_a_part_shows_its_shape_and_not_its_numbers():
    cut = cut_of(dp.ShardingRules(mesh_of("auto", data=8)), P("data"), 1)
    assert "12345" not in repr(Shard(np.array([12345.0]), cut))
