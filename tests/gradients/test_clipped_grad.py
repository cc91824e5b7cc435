"""The sum of clipped per-example gradients agrees with the float64 oracle, whatever the options."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_dp as dp
from tests import models, oracle
from tests.gradients import jitted

# float32 all the way: a few hundred roundings of 6e-8.
TOLERANCE = 1e-5


def key_for(case, seed=0):
    return jax.random.key(seed) if case.takes_key else None


def median_norm(case, batch):
    truth = oracle.clipped_gradients(
        case.loss, case.model, *batch,
        l2_clip_norm=np.inf, key=key_for(case), filter_spec=case.filter_spec,
    )  # fmt: skip
    return float(np.median(truth.grad_norm))


def assert_agrees(case, batch, grad_options, call_options=None, tolerance=TOLERANCE):
    call_options = {} if call_options is None else call_options
    grad_fn = jitted.value_and_grad(case.loss, **grad_options)
    per_example, grads = grad_fn(case.model, *batch, **call_options)
    truth = oracle.clipped_gradients(
        case.loss, case.model, *batch, **_only_what_matters(grad_options), **call_options
    )
    assert oracle.relative_error(grads, truth.grads) < tolerance
    assert oracle.relative_error(per_example.loss, truth.loss) < tolerance
    assert oracle.relative_error(per_example.grad_norm, truth.grad_norm) < tolerance
    assert oracle.relative_error(per_example.aux, truth.aux) < tolerance
    return truth


def _only_what_matters(grad_options):
    return {k: v for k, v in grad_options.items() if k not in ("microbatch_size", "method")}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("case", "microbatch_size"),
    [(models.mlp(), None), *((case, 3) for case in models.all_cases())],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_every_model_agrees_with_the_oracle(case, microbatch_size):
    batch = case.batch(7)
    clip_norm = median_norm(case, batch)
    padding = np.array([False, False, True, False, False, False, True])
    truth = assert_agrees(
        case,
        batch,
        {
            "l2_clip_norm": clip_norm,
            "filter_spec": case.filter_spec,
            "microbatch_size": microbatch_size,
        },
        {"key": key_for(case), "is_padding_example": padding},
    )
    # Some are clipped, some are not: else the test would say little.
    assert 0 < np.sum(truth.grad_norm > clip_norm) < 5


@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("clip_norm", [0.0, 0.4, np.inf])
def test_rescaling_and_normalizing(clip_norm, rescale):
    case = models.linear_regression()
    options = {
        "l2_clip_norm": clip_norm,
        "rescale_to_unit_norm": rescale,
        "normalize_by": 12.5,
        "microbatch_size": 2,
    }
    assert_agrees(case, case.batch(5), options)


@pytest.mark.parametrize("microbatch_size", [1, 4, 5, 100])
def test_microbatches_need_not_divide_the_batch(microbatch_size):
    case = models.linear_regression()
    options = {"l2_clip_norm": 1.0, "microbatch_size": microbatch_size}
    assert_agrees(case, case.batch(5), options)


@pytest.mark.parametrize("method", ["auto", "per_example"])
def test_methods_agree(method):
    case = models.linear_regression()
    assert_agrees(case, case.batch(5), {"l2_clip_norm": 1.0, "method": method})


def test_one_example():
    case = models.linear_regression()
    assert_agrees(case, case.batch(1), {"l2_clip_norm": 0.1})


# What comes back


def test_plain_returns_the_same_gradients_as_value_and():
    case = models.linear_regression()
    batch = case.batch(4)
    grads = jitted.grad(case.loss, l2_clip_norm=0.5)(case.model, *batch)
    _, same = jitted.value_and_grad(case.loss, l2_clip_norm=0.5)(case.model, *batch)
    assert jax.tree.structure(grads) == jax.tree.structure(same)
    np.testing.assert_array_equal(oracle.vector(grads), oracle.vector(same))


def test_gradients_have_the_models_tree_with_none_where_not_trained():
    case = models.frozen_mlp()
    grads = jitted.grad(case.loss, l2_clip_norm=1.0, filter_spec=case.filter_spec)(
        case.model, *case.batch(3)
    )
    trained = eqx.filter(case.model, case.filter_spec)
    assert jax.tree.structure(grads) == jax.tree.structure(trained)
    assert grads.layers[0].weight is None
    assert grads.layers[1].bias is None
    assert grads.layers[0].bias.shape == (8,)
    assert eqx.apply_updates(case.model, grads).layers[1] == case.model.layers[1]


def test_per_example_is_a_named_tuple_of_loss_norm_and_aux():
    case = models.mlp()
    per_example, _ = jitted.value_and_grad(case.loss, l2_clip_norm=1.0)(case.model, *case.batch(3))
    assert isinstance(per_example, dp.PerExample)
    assert per_example._fields == ("loss", "grad_norm", "aux")
    assert per_example.aux is None
    assert per_example.loss.shape == per_example.grad_norm.shape == (3,)


def test_norms_are_those_before_clipping():
    x = jnp.array([[3.0, 4.0], [6.0, 8.0]])
    grad_fn = jitted.value_and_grad(models.dot, l2_clip_norm=1.0)
    per_example, grads = grad_fn(jnp.zeros(2), x)
    np.testing.assert_allclose(per_example.grad_norm, [5.0, 10.0], rtol=1e-6)
    np.testing.assert_allclose(grads, [1.2, 1.6], rtol=5e-6)


def loss_with_aux(model, x, label):
    logits = model(x)
    aux = {"logits": logits, "right": jnp.argmax(logits) == label, "label": label}
    return models.cross_entropy(logits, label), aux


def test_aux_is_stacked_per_example_and_zero_where_padding():
    case = models.mlp()
    x, _ = case.batch(5)
    label = jnp.array([1, 2, 1, 2, 1])
    padding = np.array([False, True, False, True, True])
    grad_fn = jitted.grad(loss_with_aux, l2_clip_norm=1.0, has_aux=True, microbatch_size=2)
    grads, aux = grad_fn(case.model, x, label, is_padding_example=padding)
    truth = oracle.clipped_gradients(
        loss_with_aux, case.model, x, label,
        l2_clip_norm=1.0, has_aux=True, is_padding_example=padding,
    )  # fmt: skip
    assert oracle.relative_error(grads, truth.grads) < TOLERANCE
    np.testing.assert_allclose(aux["logits"], truth.aux["logits"], rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(aux["right"], truth.aux["right"])
    np.testing.assert_array_equal(aux["label"], [1, 0, 1, 0, 0])
    assert aux["right"].dtype == bool
    assert aux["label"].dtype == label.dtype


def test_value_and_grad_carries_aux_too():
    case = models.mlp()
    grad_fn = jitted.value_and_grad(loss_with_aux, l2_clip_norm=1.0, has_aux=True)
    per_example, _ = grad_fn(case.model, *case.batch(3))
    logits = jax.vmap(case.model)(case.batch(3)[0])
    np.testing.assert_allclose(per_example.aux["logits"], logits, rtol=1e-5)


# Losses written for a batch


def batch_loss(model, x, label):
    """For a whole batch: mean loss, with something of every rank on the side."""
    assert x.ndim == 2
    logits = jax.vmap(model)(x)
    losses = jax.vmap(models.cross_entropy)(logits, label)
    aux = {"losses": losses, "logits": logits, "mean": losses.mean(), "column": logits.T}
    return losses.mean(), aux


def test_keep_batch_dim_gives_batches_of_one():
    case = models.mlp()
    x, label = case.batch(4)
    options = {"l2_clip_norm": 0.5, "has_aux": True, "keep_batch_dim": True}
    grad_fn = jitted.value_and_grad(batch_loss, microbatch_size=3, **options)
    per_example, grads = grad_fn(case.model, x, label)
    truth = oracle.clipped_gradients(batch_loss, case.model, x, label, **options)
    assert oracle.relative_error(grads, truth.grads) < TOLERANCE
    assert oracle.relative_error(per_example, dp.PerExample(*truth[1:4])) < TOLERANCE
    # An axis of length one at the front is taken away; one elsewhere, or longer, stays.
    shapes = jax.tree.map(jnp.shape, per_example.aux)
    assert shapes == {"losses": (4,), "logits": (4, 3), "mean": (4,), "column": (4, 3, 1)}


def test_keep_batch_dim_says_the_same_as_a_loss_of_one_example():
    case = models.mlp()
    batch = case.batch(4)
    one = jitted.grad(case.loss, l2_clip_norm=0.5)(case.model, *batch)
    many = jitted.grad(lambda *args: batch_loss(*args)[0], l2_clip_norm=0.5, keep_batch_dim=True)(
        case.model, *batch
    )
    assert oracle.relative_error(one, many) < TOLERANCE


# Keys


def draws(model, x, *, key):
    """The gradient of an example is its input times a number drawn from its key."""
    number = jax.random.uniform(key, (), jnp.float32)
    return models.dot(model, x) * number, (jax.random.key_data(key), number)


@pytest.mark.parametrize("microbatch_size", [None, 2])
@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_example_i_gets_the_ith_key(make_key, microbatch_size):
    key = make_key(5)
    grad_fn = jitted.grad(draws, l2_clip_norm=np.inf, has_aux=True, microbatch_size=microbatch_size)
    x = jnp.arange(1.0, 6.0)
    grads, (seen, numbers) = grad_fn(jnp.zeros(()), x, key=key)
    np.testing.assert_array_equal(seen, jax.random.key_data(jax.random.split(key, 5)))
    np.testing.assert_allclose(grads, np.sum(numbers * x), rtol=1e-6)


def test_a_batch_of_one_still_gets_one_key():
    def loss(model, x, *, key):
        return draws(model, x, key=key)

    key = jax.random.key(5)
    grad_fn = jitted.grad(loss, l2_clip_norm=np.inf, has_aux=True, keep_batch_dim=True)
    _, (seen, _) = grad_fn(jnp.zeros(()), jnp.ones(3), key=key)
    np.testing.assert_array_equal(seen, jax.random.key_data(jax.random.split(key, 3)))


def test_a_key_that_may_be_left_out_may_be_left_out():
    def loss(model, x, *, key=None):
        assert key is None
        return models.dot(model, x)

    grads = jitted.grad(loss, l2_clip_norm=np.inf)(jnp.zeros(()), jnp.ones(3))
    np.testing.assert_allclose(grads, 3.0)


def test_a_key_that_may_be_left_out_is_used_when_given():
    def loss(model, x, key=None):
        assert key is not None
        return draws(model, x, key=key)

    grad_fn = jitted.grad(loss, l2_clip_norm=np.inf, has_aux=True)
    key = jax.random.key(5)
    _, (seen, _) = grad_fn(jnp.zeros(()), jnp.ones(3), key=key)
    np.testing.assert_array_equal(seen, jax.random.key_data(jax.random.split(key, 3)))


# Examples never meet


def test_what_one_example_reports_does_not_depend_on_another():
    case = models.mlp()
    x, label = case.batch(4)
    grad_fn = jitted.value_and_grad(case.loss, l2_clip_norm=1.0, microbatch_size=2)
    before, _ = grad_fn(case.model, x, label)
    after, _ = grad_fn(case.model, x.at[1].multiply(2), label)
    same = np.array([True, False, True, True])
    np.testing.assert_array_equal(before.loss == after.loss, same)
    np.testing.assert_array_equal(before.grad_norm == after.grad_norm, same)
