"""Two processes with two devices each do what one with four does."""

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import eqx_dp as dp
from tests.sharding import fully_sharded_net
from tests.sharding.losses import mesh_of
from tests.training.fire import Place
from tests.training.processes import Fleet

pytestmark = pytest.mark.slow

PLAN = dp.PrivacyPlan(sampling_prob=0.2, steps=3, noise_multiplier=0.5, delta=1e-5)


def arrays(tree, mesh):
    """The arrays of a tree as a whole, on each host."""
    whole = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))
    leaves = jax.tree.leaves(eqx.filter(tree, eqx.is_array))
    return [np.asarray(whole(leaf).addressable_data(0)) for leaf in leaves]


def fully_sharded(place=None, channel=None):
    """Clipped gradients of parameters that are spread over all devices, by every method.

    The second host has no example at all.
    """
    host, hosts = jax.process_index(), jax.process_count()
    rules = fully_sharded_net.rules_of(axes={"data": 4})
    own, found = slice(host * 8 // hosts, (host + 1) * 8 // hosts), []
    with jax.set_mesh(rules.mesh):
        model = rules.shard(fully_sharded_net.net())
        data = *fully_sharded_net.batch_of(8), np.arange(8) > 2
        *examples, mask = rules.shard_batch([x[own] for x in data])
        for method in ("ghost", "book_keeping", "per_example"):
            options = {"sharding": rules, "method": method, "microbatch_size": 1}
            grad_fn = dp.filter_clipped_grad(fully_sharded_net.loss, l2_clip_norm=0.7, **options)
            grads = eqx.filter_jit(grad_fn)(model, *examples, is_padding_example=mask)
            found += arrays(grads, rules.mesh)
    return found


def shards_across_hosts(place, channel):
    """What is said of a mesh whose second axis goes from one host to the other."""
    devices = np.array(jax.devices()).reshape(2, -1).T
    with pytest.raises(ValueError, match="axes model go over devices of several") as error:
        dp.ShardingRules(Mesh(devices, ("data", "model"))).local_shards()
    return str(error.value)


def parts_by_themselves(place, channel):
    """Every way of a step, with parts that nobody put together, and with the whole."""
    rules = dp.ShardingRules(mesh_of("auto", data=4))
    options = {"num_examples": 64, "l2_clip_norm": 1.0, "sharding": rules}
    step = dp.make_step(lambda w, x: jax.numpy.sum(w * x), optax.sgd(0.1), PLAN, **options)
    state = step.init(jax.numpy.ones(2))
    eager = lambda w, x, mask: step.grad_fn(w, x, is_padding_example=mask)  # noqa: E731
    jitted = eqx.filter_jit(eager)
    ways = {  # of 8 rows on each of two hosts, 4 would enter; to pad 6 would lead there
        "engine": (8, lambda *batch: eager(state.model, *batch)),
        "traced": (6, lambda *batch: jitted(state.model, *batch)),
        "check": (8, lambda *batch: dp.check_privacy(jitted, state.model, *batch, private=(1, 2))),
        "step": (8, lambda x, mask: step(state, x, is_padding_example=mask)),
    }
    for size, way in ways.values():
        with pytest.raises(ValueError, match=r"rules\.shard_batch"):
            way(np.ones((size, 2), np.float32), np.zeros(size, bool))
        part = jax.numpy.ones((2, 2)), jax.numpy.zeros(2, bool)
        way(*rules.shard_batch(part))  # together they are right
    return [*ways]


@pytest.fixture
def on_two_hosts(tmp_path):
    """Runs a function on two hosts; what each of them returns."""
    with Fleet(tmp_path / "cache") as fleet:

        def run(function, devices):
            started = fleet.hosts(2, function, Place(tmp_path / "run"), devices=devices)
            assert not any(one.until_step(1) for one in started)  # each waits until it is heard
            assert [one.result() for one in started] == [0, 0], [one.found for one in started]
            return [one.found[0] for one in started]

        yield run


def test_two_hosts_share_parameters(on_two_hosts):
    """Collectives within loops, one host with less to do than the other: two devices each."""
    alone, both = fully_sharded(), on_two_hosts(fully_sharded, devices=2)
    assert len(alone) == 21
    for found in both:
        for a, expected in zip(found, alone, strict=True):
            assert np.any(expected != 0)
            np.testing.assert_allclose(a, expected, rtol=1e-4, atol=1e-5)


def test_an_example_that_two_hosts_would_share_is_refused(on_two_hosts):
    assert len(set(on_two_hosts(shards_across_hosts, devices=2))) == 1


def test_parts_that_were_not_put_together_are_refused(on_two_hosts):
    ways = ["engine", "traced", "check", "step"]
    assert on_two_hosts(parts_by_themselves, devices=2) == [ways] * 2
