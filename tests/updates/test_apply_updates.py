"""`apply_updates` against sums in float64, and what its bits depend on."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import eqx_dp as dp
from eqx_dp.privacy import key_from_secret

BF16 = jnp.bfloat16
NEAREST = dp.parse_policy("p=bf16,c=bf16,o=f32")
STOCHASTIC = dp.parse_policy("p=bf16,c=bf16,o=f32,rounding=stochastic")
WIDE = dp.parse_policy("p=f32,c=bf16,o=f32,rounding=stochastic")
KEY = key_from_secret(1, "rounding")


def updated(leaf, update, policy=STOCHASTIC, key=KEY):
    return dp.apply_updates({"w": leaf}, {"w": update}, policy, key=key)["w"]


def test_small_updates_add_up():
    """1,000 updates of 1/2,000: lost one by one to the nearest, right on average at random."""
    start = jnp.ones(4_096, BF16)
    update = jnp.full(start.shape, 2.0**-11)

    def train(policy):
        def step(t, leaf):
            return updated(leaf, update, policy, jax.random.fold_in(KEY, t))

        return np.asarray(jax.lax.fori_loop(0, 512, step, start)).astype(np.float64)

    assert (train(NEAREST) == 1).all()
    found = train(STOCHASTIC)
    assert found.mean() == pytest.approx(1.25, abs=5 * found.std() / np.sqrt(found.size))
    assert found.std() < 0.05


@pytest.mark.optimized
def test_without_rounding_at_random_it_is_the_sum_rounded_once():
    leaf = jax.random.normal(jax.random.key(0), (100,)).astype(BF16)
    update = jax.random.normal(jax.random.key(1), (100,))
    for policy in (None, NEAREST):
        found = updated(leaf, update, policy, key=None)
        assert found.dtype == BF16
        np.testing.assert_array_equal(found, (leaf.astype(jnp.float32) + update).astype(BF16))


@pytest.mark.optimized
def test_updates_are_added_in_the_accumulate_dtype():
    """A narrow update is widened before it is added, so that the sum is rounded once."""
    leaf, update = jnp.full(1000, 1, BF16), jnp.full(1000, 2.0**-9, BF16)
    found = updated(leaf, update)
    assert 0 < (np.asarray(found) != 1).mean() < 1
    assert updated(leaf.astype(jnp.float32), update, WIDE, None)[0] == 1 + 2.0**-9


def test_edges():
    """NaN in the update and in the leaf; infinite; beyond the largest number."""
    leaf = np.repeat([1.0, np.nan, 1.0, 3.38953139e38], 64)
    update = np.repeat([np.nan, 1.0, -np.inf, 3e38], 64)
    found = updated(jnp.asarray(leaf, BF16), jnp.asarray(update, jnp.float32))
    expected = np.repeat([np.nan, np.nan, -np.inf, np.inf], 64)
    np.testing.assert_array_equal(np.asarray(found).astype(np.float64), expected)


def test_float32_storage_and_what_is_not_trained_need_no_key():
    leaf, update = jnp.linspace(0, 1, 8), jnp.full(8, 1e-6)
    np.testing.assert_array_equal(updated(leaf, update, WIDE, None), leaf + update)
    model = {"n": jnp.arange(3), "f": jax.nn.relu, "w": None, "e": jnp.zeros(0, BF16)}
    updates = {"n": None, "f": None, "w": None, "e": jnp.zeros(0)}
    after = dp.apply_updates(model, updates, STOCHASTIC, key=KEY)
    np.testing.assert_array_equal(after["n"], model["n"])
    assert after["f"] is jax.nn.relu
    assert after["e"].dtype == BF16


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("key", "allowed"),
    [
        (None, "a key of the step.*stochastic"),
        (0, "one typed key of the step"),
        (jax.random.split(KEY, 2), "one typed key"),
        (jax.random.PRNGKey(0), "one typed key"),
    ],
)
def test_a_key_is_asked_for(key, allowed):
    with pytest.raises(ValueError, match=rf"key: found .*; allowed: {allowed}"):
        updated(jnp.ones(3, BF16), jnp.ones(3), key=key)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("updates", "named"),
    [
        ({"a": jnp.ones((3, 1)), "b": None}, "updates at a: found .*(3, 1).*(3,)"),
        ({"a": jnp.ones(3), "b": jnp.ones(())}, "updates at b"),
        ({"a": jnp.ones(3)}, "updates: found a tree that is not the model's"),
    ],
    ids=["another shape", "for what is no array", "another tree"],
)
def test_updates_of_another_model_are_refused(updates, named):
    """A sum of arrays of two shapes would be a parameter of a third one."""
    with pytest.raises(ValueError, match=named.replace("(", r"\(").replace(")", r"\)")):
        dp.apply_updates({"a": jnp.ones(3), "b": jax.nn.relu}, updates)


@pytest.mark.slow
def test_a_paired_model_brings_its_policy():
    linear = eqx.nn.Linear(3, 2, key=jax.random.key(0))
    model = STOCHASTIC.cast_to_param(linear)
    updates = jax.tree.map(lambda x: jnp.full(x.shape, 1e-3), model)
    expected = dp.apply_updates(model, updates, STOCHASTIC, key=KEY)
    paired = dp.apply_policy(model, STOCHASTIC)
    updates = jax.tree.map(lambda x: jnp.full(x.shape, 1e-3), paired)
    found = dp.apply_updates(paired, updates, key=KEY)
    np.testing.assert_array_equal(found.weight, expected.weight)
    with pytest.raises(ValueError, match="polic"):
        dp.apply_updates(dp.apply_policy(model, NEAREST), updates, STOCHASTIC, key=KEY)


def test_bits_follow_from_key_and_path_alone():
    leaf, update = jnp.ones(1000, BF16), jnp.full(1000, 2.0**-9)
    both = dp.apply_updates({"a": leaf, "b": leaf}, {"a": update, "b": update}, STOCHASTIC, key=KEY)
    alone = dp.apply_updates({"b": leaf}, {"b": update}, STOCHASTIC, key=KEY)
    np.testing.assert_array_equal(both["b"], alone["b"])
    assert (both["a"] != both["b"]).any()
    later = dp.apply_updates({"b": leaf}, {"b": update}, STOCHASTIC, key=jax.random.fold_in(KEY, 1))
    assert (later["b"] != alone["b"]).any()


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_the_same_on_eight_devices(axis_type):
    leaf = jnp.ones((16, 33), BF16)
    update = jnp.linspace(0, 2.0**-8, leaf.size).reshape(leaf.shape)
    expected = jax.jit(updated)(leaf, update)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        spread = jax.device_put((leaf, update), NamedSharding(mesh, P("data")))
        found = jax.jit(updated)(*spread)
        assert not found.sharding.is_fully_replicated
    np.testing.assert_array_equal(found, expected)


def test_rounding_is_no_part_of_the_noise():
    """The same key gives noise and rounding streams that are not each other's."""
    bits = jax.random.bits(KEY, (1000,), jnp.uint32)
    leaf, update = jnp.ones(1000, BF16), jnp.full(1000, 2.0**-8)
    up = np.asarray(updated(leaf, update)) != 1
    assert 0.3 < np.mean(up == (np.asarray(bits) < 2**31)) < 0.7
