"""Large batches on several devices: their sums are added in float64, which costs no clip norm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_dp as dp
from tests.sharding.losses import mesh_of

SLOTS = 2**14
MODEL = {"w": jnp.zeros(5)}
X = jax.random.normal(jax.random.key(0), (SLOTS, 5))


def loss(model, x):
    return jnp.sum(jnp.sin(model["w"]) * x)


def gradient(devices, slots=SLOTS):
    sharding = dp.ShardingRules(mesh_of("auto", data=devices))
    options = {"l2_clip_norm": 0.5, "microbatch_size": 64, "sharding": sharding}
    return jax.jit(dp.filter_clipped_grad(loss, **options)), (MODEL, X[:slots])


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("devices", "slots", "is_wide"), [(1, SLOTS, False), (8, SLOTS, True), (8, 512, False)]
)
def test_where_float32_would_cost_one_percent(devices, slots, is_wide):
    grad_fn, arguments = gradient(devices, slots)
    assert ("f64[" in str(jax.make_jaxpr(grad_fn)(*arguments)).replace(" ", "")) >= is_wide
    text = grad_fn.lower(*arguments).as_text()
    reductions = text[text.find("all_reduce") :] if devices > 1 else ""
    assert ("f64" in reductions[:600]) == is_wide
    exact = np.float64(arguments[1])
    exact *= np.minimum(1, 0.5 / np.linalg.norm(exact, axis=1))[:, None]
    found = np.float64(grad_fn(*arguments)["w"])
    norm = np.linalg.norm(exact.sum(0))
    assert norm * (1 - 0.02) < np.linalg.norm(found) <= norm * (1 + 1e-6)


def test_the_check_of_precision_allows_it():
    grad_fn, arguments = gradient(8)
    policy = dp.load_policy("float32")
    privatizer = dp.gaussian_privatizer(stddev=1.0, key=jax.random.key(1))

    def step(model, x):
        noisy, _ = privatizer.update(grad_fn(model, x), privatizer.init(model))
        return jax.tree.map(jnp.add, model, noisy)

    dp.check_precision(step, *arguments, policy=policy).raise_if_violated()
