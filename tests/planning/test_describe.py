"""The declaration of a step, against counts by hand."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqx_dp as dp

POLICY = dp.parse_policy("p=bf16,c=f16,o=f32")


def model():
    linears = [eqx.nn.Linear(8, 16, use_bias=False, key=jax.random.key(i)) for i in range(2)]
    return {"a": linears[0], "b": linears[1], "n": jnp.zeros(3, jnp.int32)}


def rows(*args, **options):
    return {row.what: row for row in dp.describe(*args, **options).step}


def test_on_one_device():
    found = rows(eqx.filter_eval_shape(model), POLICY, optimizer=optax.adam(1e-3), ema=True)
    weights = 2 * 8 * 16
    expected = {
        "parameters": (("bfloat16",), 2 * weights + 12),
        "parameters, as the loss gets them": (("float16",), 2 * weights),
        "parameters, gathered": (("float16",), 0),
        "clipped sum": (("float32",), 4 * weights),
        "clipped sum, over devices": (("float32",), 0),
        "noise, largest leaf": (("float32",), 4 * 8 * 16),
        "optimizer state": (("float32",), 8 * weights + 4),
        "moving average": (("float32",), 4 * weights),
        "a checkpoint": (("bfloat16", "float32"), (2 + 8 + 4) * weights + 12 + 4),
    }
    assert {what: (row.dtypes, row.size) for what, row in found.items()} == expected


def test_on_a_mesh():
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    params = (("a.weight", P("data")), ("b.weight", P(None, "model")))
    rules = dp.ShardingRules(mesh, params=params, accumulators="examples")
    found = rows(model(), POLICY, optimizer=optax.adam(1e-3), sharding=rules)
    weight = 8 * 16
    assert found["parameters"].size == 2 * (weight // 4 + weight // 2) + 12
    assert found["parameters, gathered"].size == 2 * (weight - weight // 4)
    # `a` is spread over the axis of examples: of its copies and its sum a device has a part.
    assert found["parameters, as the loss gets them"].size == 2 * (weight // 4 + weight // 2)
    assert found["clipped sum"].size == 4 * (weight // 4 + weight // 2)
    assert found["clipped sum, over devices"].size == 4 * (weight + weight // 2)
    assert found["noise, largest leaf"].size == 4 * weight // 4
    assert found["optimizer state"].size == 8 * (weight // 4 + weight // 8) + 4
    assert found["a checkpoint"].size == (2 + 8) * 2 * weight + 12 + 4
    once = dp.ShardingRules(mesh, params=params, accumulators="params_once")
    assert rows(model(), POLICY, sharding=once)["clipped sum"].size == 4 * (weight + weight // 2)


def test_frozen_parts_and_no_optimizer():
    found = rows(model(), POLICY, filter_spec={"a": False, "b": eqx.is_inexact_array, "n": False})
    assert found["clipped sum"].size == 4 * 8 * 16
    assert found["optimizer state"].size is None
    assert "no optimizer given" in str(dp.describe(model(), POLICY))


def test_state_of_layers_is_not_trained():
    norm = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, "batch", mode="batch")
    found = rows(norm, POLICY, optimizer=optax.sgd(0.1, momentum=0.9))
    weight_and_bias = 4 * (4 + 4)
    assert found["clipped sum"].size == found["optimizer state"].size == weight_and_bias
    assert found["parameters"].size > 2 * (4 + 4)


def test_dtypes_of_rules_are_named():
    policy = dp.parse_policy("c=bf16,o=f32,module:b=f32")
    assert rows(model(), policy)["parameters, as the loss gets them"].dtypes == (
        "bfloat16",
        "float32",
    )


def test_an_optimizer_that_narrows_is_refused():
    with pytest.raises(ValueError, match=r"optimizer state.*found bfloat16; allowed: float32"):
        dp.describe(model(), POLICY, optimizer=optax.adam(1e-3, mu_dtype=jnp.bfloat16))
