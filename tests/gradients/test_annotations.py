"""Models whose shapes and dtypes are annotated and checked while the loss is traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError, install_import_hook

import eqx_dp as dp
from tests.gradients import jitted

with install_import_hook("tests.gradients.annotated_model", "beartype.beartype"):
    from tests.gradients.annotated_model import Head, Model, loss

MODEL = Model(jnp.eye(4) / 2, Head(jnp.ones((2, 4)) / 3))
X = np.random.default_rng(0).normal(size=(3, 5, 4)).astype(np.float32)
Y = np.ones((3, 2), np.float32)


@pytest.mark.parametrize("method", ["book_keeping", "per_example"])
def test_annotations_see_one_example(method):
    options = {"l2_clip_norm": 0.5, "microbatch_size": 2}
    found = jitted.grad(loss, method=method, **options)(MODEL, X, Y)
    plain = jitted.grad(
        lambda w, x, y: jnp.sum((jnp.mean(jnp.tanh(x @ w[0]) @ w[1].T, 0) - y) ** 2), **options
    )((MODEL.body, MODEL.head.weight), X, Y)
    for a, b in zip(jax.tree.leaves(found), plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_dtype_that_contradicts_the_policy_names_the_rule_that_settles_it():
    policy = "params=float32,compute=bfloat16,output=float32"
    with pytest.raises(TypeCheckError) as caught:
        jitted.grad(loss, l2_clip_norm=1.0, policy=dp.parse_policy(policy))(MODEL, X, Y)
    message = "\n".join([str(caught.value), *caught.value.__notes__])
    for part in ("bf16[4]", "Float32", "computes in bfloat16", "module:head=float32"):
        assert part in message
    settled = dp.parse_policy(f"{policy},module:head=float32")
    grads = jitted.grad(loss, l2_clip_norm=1.0, policy=settled)(MODEL, X, Y)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(grads))
