"""Leaves that are not trained come back None and cost nothing."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_dp as dp
from tests import models, oracle
from tests.gradients import jitted

DEPTH = 3
CASE = models.mlp(DEPTH)
BATCH = CASE.batch(4)


def trained_from(first):
    """A filter spec under which the layers from `first` on are trained."""
    layers = tuple(
        jax.tree.map(lambda _, trained=i >= first: trained, layer)
        for i, layer in enumerate(CASE.model.layers)
    )
    spec = jax.tree.map(lambda _: False, CASE.model)
    return eqx.tree_at(lambda m: m.layers, spec, layers)


def program(filter_spec, microbatch_size=None):
    grad_fn = dp.filter_clipped_grad(
        CASE.loss, l2_clip_norm=1.0, filter_spec=filter_spec, microbatch_size=microbatch_size
    )
    return lambda model, *batch: eqx.filter(grad_fn(model, *batch), eqx.is_array)


def constant_program(filter_spec):
    """The same gradients, the frozen layers being constants of the loss: what nothing costs."""
    trained, frozen = eqx.partition(CASE.model, filter_spec)

    def loss(trained, *example):
        return CASE.loss(eqx.combine(trained, frozen), *example)

    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=1.0)
    return lambda model, *batch: grad_fn(trained, *batch)


def matmuls(fun):
    """How many matrix products the traced and pruned program holds."""
    arrays, static = eqx.partition(CASE.model, eqx.is_array)
    closed = jax.make_jaxpr(lambda arrays, *batch: fun(eqx.combine(arrays, static), *batch))(
        arrays, *BATCH
    )
    return _count(closed.jaxpr)


def _count(jaxpr):
    total = 0
    for equation in jaxpr.eqns:
        total += equation.primitive.name == "dot_general"
        for parameter in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda node: hasattr(node, "eqns")
        ):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                total += _count(inner)
    return total


def flops(fun):
    arrays, static = eqx.partition(CASE.model, eqx.is_array)
    compiled = (
        jax.jit(lambda arrays, *batch: fun(eqx.combine(arrays, static), *batch))
        .lower(arrays, *BATCH)
        .compile()
    )
    return compiled.cost_analysis()["flops"]


def expected_matmuls(first):
    """Forward through every layer, backward to the first trained one, a sum for each weight."""
    layers, trained = DEPTH + 1, DEPTH + 1 - first
    to_weights, to_inputs = trained, trained - 1
    return layers + to_weights + to_inputs


@pytest.mark.parametrize("first", range(DEPTH + 1))
def test_frozen_layers_cost_what_constants_cost(first):
    spec = trained_from(first)
    assert matmuls(constant_program(spec)) == expected_matmuls(first)
    assert matmuls(program(spec)) == matmuls(constant_program(spec))


def test_the_compiled_program_costs_what_constants_cost():
    spec = trained_from(2)
    assert flops(program(spec)) == pytest.approx(flops(constant_program(spec)), rel=0.02)
    assert flops(program(spec)) < 0.8 * flops(program(trained_from(0)))


def test_frozen_layers_cost_nothing_in_microbatches():
    for first in range(DEPTH + 1):
        microbatched = program(trained_from(first), microbatch_size=2)
        assert matmuls(microbatched) == expected_matmuls(first)


def test_the_gradients_are_those_of_the_trained_leaves():
    first = 2
    spec = trained_from(first)
    grads = jitted.grad(CASE.loss, l2_clip_norm=0.5, filter_spec=spec)(CASE.model, *BATCH)
    truth = oracle.clipped_gradients(
        CASE.loss, CASE.model, *BATCH, l2_clip_norm=0.5, filter_spec=spec
    )
    assert oracle.relative_error(grads, truth.grads) < 1e-5
    assert [layer.weight is None for layer in grads.layers] == [i < first for i in range(DEPTH + 1)]


def test_frozen_leaves_do_not_count_in_the_norm():
    x = {"a": jnp.array([[3.0]]), "b": jnp.array([[4.0]])}
    model = jax.tree.map(lambda leaf: jnp.zeros(1), x)
    for spec, norm in (({"a": True, "b": False}, 3.0), ({"a": True, "b": True}, 5.0)):
        per_example, _ = jitted.value_and_grad(models.dot, l2_clip_norm=1.0, filter_spec=spec)(
            model, x
        )
        np.testing.assert_allclose(per_example.grad_norm, [norm])


def test_a_frozen_leaf_may_be_anything():
    model = {
        "w": jnp.ones(2),
        "table": jnp.arange(2),
        "name": "text",
        "fun": jnp.sin,
        "nothing": None,
        "number": 2.0,
    }

    def loss(model, x):
        scale = model["fun"](model["number"]) * (model["name"] == "text")
        return jnp.sum(model["w"] * x * model["table"]) * scale

    grads = jitted.grad(loss, l2_clip_norm=np.inf)(model, jnp.ones((3, 2)))
    np.testing.assert_allclose(grads.pop("w"), [0.0, 3 * np.sin(2.0)], rtol=1e-6)
    assert set(grads.values()) == {None}
