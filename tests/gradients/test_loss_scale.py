"""A loss scale that the policy states."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_dp as dp
from tests.gradients import jitted

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
@pytest.mark.parametrize("scale", ["1024", "0.125"])
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


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_an_example_that_is_not_finite_adds_zero(poison):
    policy = dp.parse_policy(f"{FLOAT16},loss_scale=1024")
    grad_fn = jitted.grad(loss, l2_clip_norm=1.0, policy=policy)
    poisoned = X.copy()
    poisoned[2, 0] = poison
    found = grad_fn(MODEL, poisoned, Y, WEIGHTS, is_padding_example=np.zeros(5, bool))
    expected = grad_fn(MODEL, X, Y, WEIGHTS, is_padding_example=np.arange(5) == 2)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_gradient_of_zero_stays_zero():
    policy = dp.parse_policy(f"{FLOAT16},loss_scale=1024")
    grads = jitted.grad(loss, l2_clip_norm=1.0, policy=policy)(MODEL, X, Y, 0 * WEIGHTS)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize("kind", ["none", "static"])
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
