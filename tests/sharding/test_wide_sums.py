"""Large batches on several devices: their sums are added in float64, which costs no clip norm."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_dp as dp
from tests.sharding.losses import mesh_of
from tests.tiers import curated

SLOTS = 2**14
MODEL = {"w": jnp.zeros((8, 3))}
X = np.random.default_rng(0).normal(size=(SLOTS, 8, 3)).astype(np.float32)


def loss(model, x):
    return jnp.sum(jnp.sin(model["w"]) * x)


def gradient(devices, slots=SLOTS, accumulators="params"):
    """The function, and its arguments on a mesh."""
    rules = dp.ShardingRules(mesh_of("auto", data=devices), accumulators=accumulators)
    options = {"l2_clip_norm": 0.5, "microbatch_size": 64, "sharding": rules}
    arguments = rules.shard(MODEL), *rules.shard_batch((X[:slots],))
    return jax.jit(dp.filter_clipped_grad(loss, **options)), arguments


@pytest.mark.optimized
@pytest.mark.parametrize("accumulators", curated(["params", "examples"], ["examples"]))
@pytest.mark.parametrize(("slots", "dtype"), [(SLOTS, "f64"), (512, "f32")])
def test_where_float32_would_cost_one_percent(slots, dtype, accumulators):
    grad_fn, arguments = gradient(8, slots, accumulators)
    name = {"params": "all_reduce", "examples": "reduce_scatter"}[accumulators]
    pattern = r'"stablehlo\.(all_reduce|reduce_scatter)".*?\) -> tensor<[\dx]*(\w+)>'
    text = grad_fn.lower(*arguments).as_text()
    assert set(re.findall(pattern, text, re.DOTALL)) == {(name, dtype)}
    exact = np.float64(X[:slots])
    norms = np.linalg.norm(exact.reshape(slots, -1), axis=1)
    exact = np.tensordot(np.minimum(1, 0.5 / norms), exact, 1)
    found = np.float64(grad_fn(*arguments)["w"])
    # All examples are clipped alike: the sum is shorter by what is left for rounding, and exact.
    ratio = np.linalg.norm(found) / np.linalg.norm(exact)
    np.testing.assert_allclose(found, ratio * exact, atol=2e-6 * np.linalg.norm(exact))
    assert 0.99 < ratio < 1


def test_the_check_of_precision_allows_it():
    grad_fn, arguments = gradient(8)
    policy = dp.load_policy("float32")
    privatizer = dp.gaussian_privatizer(stddev=1.0, key=1)

    def step(model, x):
        noisy, _ = privatizer.update(grad_fn(model, x), privatizer.init(model))
        return jax.tree.map(jnp.add, model, noisy)

    dp.check_precision(step, *arguments, policy=policy).raise_if_violated()
