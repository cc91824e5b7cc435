"""A loss scale of each example's own, chosen from that example alone."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_dp as dp
from eqx_dp.gradients.magnitudes import pulled_back
from tests.gradients import jitted
from tests.sharding.losses import mesh_of

pytestmark = pytest.mark.sampled(5)

METHODS = ["book_keeping", "ghost", "per_example"]
FLOAT16 = "params=float32,compute=float16,output=float32"
MODEL = eqx.nn.MLP(8, 4, 16, 2, key=jax.random.key(0))
rng = np.random.default_rng(0)
X = rng.normal(size=(5, 8)).astype(np.float32)
Y = rng.normal(size=(5, 4)).astype(np.float32)
# Gradients from 1e-8, which float16 loses on the way back, to 1e4, where a scale overflows.
WEIGHTS = np.array([[1e-4, 1e-4], [3e-4, 1e-3], [1, 1], [50, 1], [100, 100]], np.float32)


def loss(model, x, y, weights):
    return weights[0] * (weights[1] * jnp.sum((model(x) - y) ** 2))


def gradients(policy, method="book_keeping", **options):
    """Each example's own gradient, flat, and its norm."""
    grad_fn = jitted.value_and_grad(
        loss, l2_clip_norm=np.inf, method=method, policy=policy, **options
    )
    found = []
    for i in range(len(X)):
        one = slice(i, i + 1)
        _, grads = grad_fn(MODEL, X[one], Y[one], WEIGHTS[one])
        leaves = jax.tree.leaves(grads)
        found.append(np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in leaves]))
    return found


def errors(policy, method="book_keeping"):
    return [
        np.linalg.norm(a - b) / np.linalg.norm(b)
        for a, b in zip(gradients(policy, method), gradients(None), strict=True)
    ]


def test_without_a_scale_small_gradients_are_lost():
    first, *_, last = errors(dp.parse_policy(FLOAT16))
    assert first > 0.1
    assert last < 5e-3


def test_with_one_scale_for_all_large_gradients_are_lost():
    *_, last = errors(dp.parse_policy(f"{FLOAT16},loss_scale=32768"))
    assert last == 1  # not finite, so it adds zero


@pytest.mark.parametrize("method", METHODS)
def test_with_a_scale_of_its_own_every_example_is_right(method):
    found = errors(dp.parse_policy(f"{FLOAT16},loss_scale=per_example"), method)
    assert max(found) < 5e-3


@pytest.mark.parametrize("method", METHODS)
def test_it_depends_on_the_example_alone(method):
    """An example adds the same, whatever the others are."""
    policy = dp.parse_policy(f"{FLOAT16},loss_scale=per_example")
    grad_fn = jitted.grad(loss, l2_clip_norm=1e-3, method=method, policy=policy)
    others_are_padding = np.array([False, True, True, True, True])
    outcomes = []
    for factor in (1.0, 1e4):
        weights = WEIGHTS.copy()
        weights[1:] *= factor
        alone = grad_fn(MODEL, X, Y, weights, is_padding_example=others_are_padding)
        outcomes.append(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(alone)]))
    np.testing.assert_array_equal(*outcomes)


def test_clipping_and_values_are_those_of_float32():
    policy = dp.parse_policy(f"{FLOAT16},loss_scale=per_example")
    options = {"l2_clip_norm": 1e-2}
    values, grads = jitted.value_and_grad(loss, policy=policy, **options)(MODEL, X, Y, WEIGHTS)
    wide_values, wide = jitted.value_and_grad(loss, **options)(MODEL, X, Y, WEIGHTS)
    np.testing.assert_allclose(values.grad_norm, wide_values.grad_norm, rtol=5e-3)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(wide), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.optimized
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", ["1024", "per_example"])
@pytest.mark.parametrize(
    "clip_norm",
    [1e-20, *(pytest.param(norm, marks=pytest.mark.exhaustive) for norm in (1e-6, 1e-2))],
)
def test_the_clip_holds(method, scale, clip_norm):
    """Measured in float64: undoing the scale with the factor takes nothing from the guarantee."""
    policy = dp.parse_policy(f"{FLOAT16},loss_scale={scale}")
    grad_fn = jitted.grad(loss, l2_clip_norm=clip_norm, method=method, policy=policy)
    for i in range(len(X)):
        one = slice(i, i + 1)
        leaves = jax.tree.leaves(grad_fn(MODEL, X[one], Y[one], WEIGHTS[one]))
        norm = np.sqrt(sum(np.sum(np.square(np.float64(leaf))) for leaf in leaves))
        assert norm <= clip_norm


def test_of_a_model_that_is_paired_with_its_policy():
    policy = dp.parse_policy(f"{FLOAT16},loss_scale=per_example,module:MLP=float16")
    paired = dp.apply_policy(MODEL, policy)
    found = jitted.grad(loss, l2_clip_norm=1e-3)(paired, X, Y, WEIGHTS)
    expected = jitted.grad(loss, l2_clip_norm=1e-3)(MODEL, X, Y, WEIGHTS)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_an_example_that_is_not_finite_adds_zero(poison):
    policy = dp.parse_policy(f"{FLOAT16},loss_scale=per_example")
    grad_fn = jitted.grad(loss, l2_clip_norm=1.0, policy=policy)
    poisoned = X.copy()
    poisoned[2, 0] = poison
    found = grad_fn(MODEL, poisoned, Y, WEIGHTS, is_padding_example=np.zeros(5, bool))
    expected = grad_fn(MODEL, X, Y, WEIGHTS, is_padding_example=np.arange(5) == 2)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_gradient_of_zero_stays_zero():
    policy = dp.parse_policy(f"{FLOAT16},loss_scale=per_example")
    grads = jitted.grad(loss, l2_clip_norm=1.0, policy=policy)(MODEL, X, Y, 0 * WEIGHTS)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(grads))


def whole_loss(model, x, y, weights):
    return loss(jax.tree.map(lambda w: jnp.sin(w) if eqx.is_array(w) else w, model), x, y, weights)


def scanned_loss(weight, x, y, weights):
    def body(h, w):
        return jnp.tanh(w @ h), None

    h, _ = jax.lax.scan(jax.checkpoint(body), x[:4], weight)
    return weights[0] * (weights[1] * jnp.sum((h - y) ** 2))


STACKED = jnp.asarray(rng.normal(size=(3, 4, 4)), jnp.float32)


@pytest.mark.parametrize(
    ("fun", "model"), [(whole_loss, MODEL), (scanned_loss, STACKED)], ids=["whole", "scan"]
)
def test_leaves_that_no_use_describes_and_uses_in_scans(fun, model):
    policy = dp.parse_policy(f"{FLOAT16},loss_scale=per_example")
    found = jitted.grad(fun, l2_clip_norm=1e-3, policy=policy)(model, X, Y, WEIGHTS)
    expected = jitted.grad(fun, l2_clip_norm=1e-3)(model, X, Y, WEIGHTS)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5)


def pooled_loss(model, x, y):
    """The mean over 256 positions makes its cotangent 256 times larger than that at the layers."""
    z = model(x).mean((1, 2))
    return jnp.sum((z.astype(jnp.float32) - y) ** 2)


def averaged_loss(model, x, y):
    """The same, over 4,096 positions."""
    return 5 * jnp.sum(jnp.mean(jax.vmap(model)(x), 0).astype(jnp.float32) * y)


def tempered_loss(model, x, y):
    """A factor in float16 behind the last layer."""
    return 5 * jnp.sum((model(x) * 1e-3).astype(jnp.float32) * y)


def summed_loss(model, x, y):
    """The gradient of a weight is a sum over 512 positions."""
    return jnp.sum(jax.vmap(model)(x).astype(jnp.float32) * y)


def tiny_loss(model, x, y):
    return 1e-12 * jnp.sum(model(x).astype(jnp.float32) * y)


def elementwise_loss(model, x, y):
    weight, bias = model.weight[0], model.bias[0]
    return jnp.sum((x * weight + bias).astype(jnp.float32) * y[0])


def recurrent_loss(model, x, y):
    """One weight at every step, the gradient of the sum of all states."""

    @jax.checkpoint
    def step(h, x):
        h = h + model(x)
        return h, jnp.mean(h)

    _, means = jax.lax.scan(step, jnp.zeros(4, x.dtype), x)
    return jnp.sum(means.astype(jnp.float32)) * 40 * y[0]


CONV = eqx.nn.Sequential(
    [
        eqx.nn.Conv2d(1, 4, 3, key=jax.random.key(0)),
        eqx.nn.Lambda(jax.nn.relu),
        eqx.nn.Conv2d(4, 2, 1, key=jax.random.key(1)),
    ]
)
LINEAR = eqx.nn.Linear(6, 4, key=jax.random.key(0))
TARGETS = np.array([[0.5, 0.5], [3, -3], [5, 5], [10, 2]], np.float32)
ONES = np.ones((2, 4), np.float32)


def normal(*shape):
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


BETWEEN_SITES = {
    "pooled": (pooled_loss, CONV, normal(4, 1, 18, 18), TARGETS),
    "averaged": (averaged_loss, LINEAR, normal(2, 4096, 6), ONES),
    "tempered": (tempered_loss, LINEAR, normal(2, 6), ONES),
    "summed": (summed_loss, LINEAR, 30 * abs(normal(2, 512, 6)), ONES),
    "elementwise": (elementwise_loss, LINEAR, 3 * abs(normal(2, 512, 6)), ONES),
    "recurrent": (recurrent_loss, LINEAR, abs(normal(2, 96, 6)), ONES),
    "tiny": (tiny_loss, LINEAR, normal(2, 6), ONES),
}


@functools.cache
def gradients_in_float32(case):
    fun, model, *batch = BETWEEN_SITES[case]
    mapped = eqx.filter_vmap(eqx.filter_grad(fun), in_axes=(None, 0, 0))
    found = eqx.filter_jit(mapped)(model, *batch)
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(found)]
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)


@pytest.mark.parametrize(
    ("case", "method"),
    [
        *((case, method) for case in ("pooled", "averaged", "tiny") for method in METHODS),
        ("tempered", "book_keeping"),
        *((case, "per_example") for case in ("summed", "elementwise", "recurrent")),
    ],
)
def test_all_that_is_float16_on_the_way_back_is_seen(case, method):
    fun, model, *batch = BETWEEN_SITES[case]
    policy = dp.parse_policy(f"{FLOAT16},loss_scale=per_example")
    narrow = jitted.value_and_grad(fun, l2_clip_norm=np.inf, method=method, policy=policy)
    for i, expected in enumerate(gradients_in_float32(case)):
        values, grads = narrow(model, *(part[i : i + 1] for part in batch))
        found = [np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(grads)]
        norm = np.linalg.norm(expected)
        assert np.linalg.norm(np.concatenate(found) - expected) < 5e-3 * norm
        np.testing.assert_allclose(values.grad_norm, norm, rtol=5e-3)


@jax.custom_vjp
def looping(x):
    return x


def looping_backward(steps, g):
    def body(state):
        return state[0] + 1, state[1] * 64 / 64

    return (jax.lax.while_loop(lambda state: state[0] < steps, body, (0, g))[1],)


looping.defvjp(lambda x: (x, jnp.int32(1)), looping_backward)

UP_AND_DOWN = {
    "plain": lambda x: x / 64 * 64,
    "jit": jax.jit(lambda x: x / 64 * 64),
    "remat": jax.checkpoint(lambda x: jnp.sin(1000 * x) * 0 + x / 64 * 64),
    "scan": lambda x: jax.lax.scan(lambda h, _: (h / 64 * 64, None), x, None, length=2)[0],
    "cond": lambda x: jax.lax.cond(x > 0, lambda x: x / 64 * 64, lambda x: x * 1e4, x),
    "while": looping,
}


@pytest.mark.parametrize("through", UP_AND_DOWN)
def test_magnitudes_inside_of_programs_are_seen(through):
    """Going back, 3 becomes 192 and 3 again; what is computed again (1,000) is not multiplied."""

    def run(x):
        return UP_AND_DOWN[through](x.astype(jnp.bfloat16)).astype(jnp.float32)

    _, pullback = jax.vjp(run, jnp.float32(1))
    (gradient,), found = pulled_back(pullback, jnp.float32(3))
    assert (gradient, found.narrow, found.wide) == (3, 192, 3)


def test_float32_values_of_the_backward_pass_stay_finite():
    """Near the loss cotangents are 2^123 times as large as at the layer: both cannot be large."""

    def fun(model, x, exponents):
        large, small = jnp.exp2(exponents.astype(jnp.float32))
        return large * jnp.sum(small * model(x).astype(jnp.float32))

    policy = dp.parse_policy(f"{FLOAT16},loss_scale=per_example")
    x, exponents = X[:, :6], np.array([100, -123])
    values, _ = jitted.value_and_grad(fun, l2_clip_norm=1.0, policy=policy)(
        LINEAR, x, np.tile(exponents, (5, 1))
    )
    expected = 2.0**-23 * np.sqrt(4 * np.sum(x.astype(np.float64) ** 2, 1) + 4)
    np.testing.assert_allclose(values.grad_norm, expected, rtol=5e-3)


@pytest.mark.slow
def test_on_several_devices():
    mesh = mesh_of("auto", data=8)
    policy = dp.parse_policy(f"{FLOAT16},loss_scale=per_example")
    batch = [np.concatenate([part, part[:3]]) for part in (X, Y, WEIGHTS)]
    rules = dp.ShardingRules(mesh)
    found = jitted.grad(loss, l2_clip_norm=1e-2, policy=policy, sharding=rules)(MODEL, *batch)
    expected = jitted.grad(loss, l2_clip_norm=1e-2, policy=policy)(MODEL, *batch)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["none", "static", "per_example"])
def test_a_policy_says_it(kind, tmp_path):
    scale = dp.LossScale(kind, 8 if kind == "static" else 1)
    policy = dp.Policy("float32", "float16", "float32", loss_scale=scale)
    assert dp.parse_policy(str(policy)) == policy
    value = "value = 8" if kind == "static" else ""
    path = tmp_path / "policy.toml"
    dtypes = "\n".join(
        f'{name} = "float32"' for name in ("params", "output", "accumulate", "noise")
    )
    path.write_text(
        f'[dtypes]\ncompute = "float16"\n{dtypes}\n[loss_scale]\nkind = "{kind}"\n{value}\n'
    )
    assert dp.load_policy(path) == policy


def test_a_scale_of_its_own_has_no_value():
    with pytest.raises(ValueError, match=r"loss_scale.value.*per_example"):
        dp.LossScale("per_example", 8)
