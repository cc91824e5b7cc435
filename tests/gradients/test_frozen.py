"""Leaves that are not trained come back None; that they do not count is in `test_options.py`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_dp as dp
from tests import models
from tests.gradients import jitted


def test_a_frozen_leaf_may_be_anything():
    model = {"w": jnp.ones(2), "table": jnp.arange(2), "name": "text"}
    model |= {"fun": jnp.sin, "nothing": None, "number": 2.0}

    def loss(model, x):
        scale = model["fun"](model["number"]) * (model["name"] == "text")
        return jnp.sum(model["w"] * x * model["table"]) * scale

    grads = jitted.grad(loss, l2_clip_norm=np.inf)(model, jnp.ones((3, 2)))
    np.testing.assert_allclose(grads.pop("w"), [0.0, 3 * np.sin(2.0)], rtol=1e-6)
    assert set(grads.values()) == {None}


@pytest.mark.parametrize("method", ["book_keeping", "ghost", "per_example"])
def test_a_leaf_that_the_loss_does_not_use_changes_nothing(method):
    """Whatever is in it, and it is not held for each example."""
    entries, x = 100_000, jnp.arange(48.0).reshape(16, 3)
    model = {"used": jnp.ones((3, 2)), "unused": jnp.full(entries, jnp.nan)}
    loss = lambda model, x: jnp.sum(jnp.tanh(x @ model["used"]))  # noqa: E731
    grad_fn = dp.filter_value_and_clipped_grad(loss, l2_clip_norm=1.0, method=method)
    program = jax.jit(grad_fn).lower(model, x).compile()
    # The sum itself, and with microbatches the total that it is added to.
    assert program.memory_analysis().temp_size_in_bytes < 3 * 4 * entries
    per_example, grads = program(model, x)
    assert not jnp.any(grads["unused"])
    alone, expected = jax.jit(grad_fn)({"used": model["used"], "unused": jnp.ones(1)}, x)
    assert jnp.array_equal(grads["used"], expected["used"])
    assert jnp.array_equal(per_example.grad_norm, alone.grad_norm)


def test_true_above_a_module_means_its_floating_point_arrays():
    model = {"a": models.mlp().model, "b": jnp.arange(2)}  # the activation function stays
    options = {"l2_clip_norm": 1.0, "filter_spec": {"a": True, "b": False}}
    grads = jitted.grad(lambda m, x: jnp.sum(m["a"](x)), **options)(model, jnp.ones((2, 6)))
    trained = eqx.filter(model["a"], eqx.is_array)
    assert jax.tree.structure(grads) == jax.tree.structure({"a": trained, "b": None})
