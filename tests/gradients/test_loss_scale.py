"""A loss scale of each example's own, chosen from that example alone."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_dp as dp
from tests.gradients import jitted
from tests.sharding.losses import mesh_of

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


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", ["1024", "per_example"])
@pytest.mark.parametrize("clip_norm", [1e-20, 1e-6, 1e-2])
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
def test_leaves_that_no_site_describes_and_sites_in_scans(fun, model):
    policy = dp.parse_policy(f"{FLOAT16},loss_scale=per_example")
    found = jitted.grad(fun, l2_clip_norm=1e-3, policy=policy)(model, X, Y, WEIGHTS)
    expected = jitted.grad(fun, l2_clip_norm=1e-3)(model, X, Y, WEIGHTS)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5)


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
