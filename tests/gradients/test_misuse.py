"""What a newcomer does first and wrongly: the error says what was found and what to do."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Float, jaxtyped

import eqx_dp as dp
from tests import models

CASE = models.mlp()
X, LABEL = CASE.batch(8)


def clipped(loss, **options):
    return dp.filter_clipped_grad(loss, **{"l2_clip_norm": 1.0, **options})


def told(error):
    return "\n".join([str(error.value), *getattr(error.value, "__notes__", [])])


# A loss that is written for a batch


def batch_loss(model, x, label):
    logits = jax.vmap(model)(x)
    return jnp.mean(jax.vmap(models.cross_entropy)(logits, label))


def indexing_loss(model, x, label):
    return jnp.mean(x[:, 0] * model.layers[0].weight[0, 0] * label)


@jaxtyped(typechecker=beartype)
def annotated_loss(model, x: Float[Array, "batch features"], label: Array):
    return batch_loss(model, x, label)


@pytest.mark.parametrize("loss", [batch_loss, indexing_loss, annotated_loss])
def test_a_loss_written_for_a_batch_is_told_to_keep_its_axis(loss):
    with pytest.raises(ValueError, match=r"(?s)float32\[6\].*keep_batch_dim=True") as caught:
        clipped(loss)(CASE.model, X, LABEL)
    cause = caught.value.__cause__
    assert cause is not None
    assert str(cause) in str(caught.value)
    clipped(loss, keep_batch_dim=True)(CASE.model, X, LABEL)


def test_a_loss_that_is_mapped_over_examples_already():
    mapped = jax.vmap(models.mlp_loss, in_axes=(None, 0, 0))
    with pytest.raises(ValueError, match=r"keep_batch_dim=True, and let it return the mean"):
        clipped(mapped)(CASE.model, X, LABEL)


def test_a_loss_that_is_no_scalar_in_either_form_is_told_its_own_shape():
    with pytest.raises(
        ValueError, match=r"^The loss of one example must be a scalar; its shape is \(6,\)"
    ):
        clipped(lambda model, x: model * x)(jnp.ones(6), X)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_constrained_loss_with_rules_is_told_to_keep_its_axis(axis_type):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    rules, spec = dp.ShardingRules(mesh), PartitionSpec("data", None)

    def loss(model, x):
        if axis_type is AxisType.Auto:
            hidden = jax.lax.with_sharding_constraint(model * x, spec)
        else:
            hidden = jax.sharding.reshard(model * x, spec)
        return jnp.mean(hidden**2)

    with jax.set_mesh(mesh):
        arguments = rules.shard(jnp.ones(6)), rules.shard_batch(X)
        with pytest.raises(ValueError, match=r"(?s)float32\[6\].*keep_batch_dim=True"):
            clipped(loss, sharding=rules)(*arguments)
        clipped(loss, sharding=rules, keep_batch_dim=True)(*arguments)


class OwnError(Exception):
    """Of a type that nobody else knows."""


def test_an_error_of_the_loss_keeps_its_type_and_says_what_the_loss_was_given():
    def loss(model, x, label):
        raise OwnError("mine")

    with pytest.raises(OwnError, match="mine") as caught:
        clipped(loss)(CASE.model, X, LABEL)
    assert "batch argument 0 is float32[6], batch argument 1 is int32[]" in told(caught)


def test_labels_in_the_wrong_dtype_are_seen_in_the_note():
    with pytest.raises(TypeError) as caught:
        clipped(lambda model, x, label: model(x)[label])(CASE.model, X, LABEL.astype(float))
    assert "batch argument 1 is float32[]" in told(caught)


def test_a_note_names_a_few_leaves_of_many():
    with pytest.raises(OwnError) as caught:
        clipped(raises_own_error)(jnp.ones(()), [jnp.ones(2)] * 100)
    assert "and 92 more" in told(caught)
    assert len(told(caught)) < 1000


def raises_own_error(*_):
    raise OwnError


# A key among the examples


@pytest.mark.parametrize("name", ["key", "rng"])
@pytest.mark.parametrize("key", [jax.random.key(0), jax.random.PRNGKey(0)], ids=["typed", "raw"])
def test_a_key_given_by_position(key, name):
    if name == "key":
        loss = lambda model, x, label, key: models.mlp_loss(model, x, label)  # noqa: E731
    else:
        loss = lambda model, x, label, rng: models.mlp_loss(model, x, label)  # noqa: E731
    with pytest.raises(ValueError, match=r"batch argument 2 .*PRNG key.*key=key"):
        clipped(loss)(CASE.model, X, LABEL, key)


def test_one_key_an_example_is_data_like_any_other():
    loss = lambda model, x, noise: model * x * jax.random.normal(noise)  # noqa: E731
    grads = clipped(loss)(jnp.ones(()), jnp.ones(4), jax.random.split(jax.random.key(0), 4))
    assert np.isfinite(grads)


@pytest.mark.parametrize("key", [1234567, np.array([1234567, 8, 9], np.uint32)])
def test_a_seed_given_for_a_key_is_not_printed(key, unchecked):
    with pytest.raises(ValueError, match="single JAX key") as caught:
        clipped(lambda model, x, key: model * x)(jnp.ones(()), jnp.ones(2), key=key)
    assert "1234567" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


# A gradient handed in for the loss


def with_aux(model, x, label):
    return models.mlp_loss(model, x, label), x


@pytest.mark.parametrize(
    ("gradient", "has_aux"),
    [
        (eqx.filter_grad(models.mlp_loss), False),
        (eqx.filter_value_and_grad(models.mlp_loss), False),
        (eqx.filter_value_and_grad(with_aux, has_aux=True), False),
        (eqx.filter_value_and_grad(with_aux, has_aux=True), True),
        (eqx.filter_grad(with_aux, has_aux=True), True),
    ],
)
def test_a_gradient_handed_in_for_the_loss(gradient, has_aux):
    with pytest.raises(ValueError, match=r"gradient.*loss itself") as caught:
        clipped(gradient, has_aux=has_aux)(CASE.model, X, LABEL)
    assert "has_aux" not in str(caught.value)


@pytest.mark.parametrize("transform", [jax.grad, jax.value_and_grad])
def test_a_gradient_of_a_model_that_is_one_array(transform):
    loss = lambda model, x: jnp.sum(model * x)  # noqa: E731
    with pytest.raises(ValueError, match="loss itself"):
        clipped(transform(loss))(jnp.ones(6), X)


@pytest.mark.parametrize("fun", [3, "loss", (models.mlp_loss,), clipped(models.mlp_loss)])
def test_something_else_than_a_loss(fun, unchecked):
    with pytest.raises(ValueError, match="must be the loss"):
        clipped(fun)


# The batch


def test_the_model_behind_the_batch():
    with pytest.raises(ValueError, match="The model comes first"):
        clipped(models.mlp_loss)(X, CASE.model, LABEL)


def test_examples_in_a_list():
    with pytest.raises(ValueError, match="stack"):
        clipped(models.mlp_loss)(CASE.model, [[0.0] * 6] * 2, [0, 1])
    with pytest.raises(ValueError, match="Stack"):
        clipped(models.mlp_loss)(CASE.model, [X[0], X[1]], LABEL[:2])


def test_one_example_in_place_of_a_batch():
    with pytest.raises(ValueError, match=r"batch argument 1 is a scalar.*whole batch"):
        clipped(models.mlp_loss)(CASE.model, X[0], LABEL[0])


@pytest.mark.parametrize(
    "labels", [np.array(["a"] * 8), np.array([object()] * 8), np.zeros(8, "datetime64[s]")]
)
def test_arrays_that_hold_no_numbers(labels):
    with pytest.raises(ValueError, match=r"batch argument 1 is an array of .*numbers"):
        clipped(models.mlp_loss)(CASE.model, X, labels)


def test_what_stands_in_the_batch_is_not_printed():
    with pytest.raises(ValueError, match=r"batch argument 1 at name is of type str") as caught:
        clipped(models.mlp_loss)(CASE.model, X, {"name": "Alice"})
    assert "Alice" not in str(caught.value)


# Options


def test_a_filter_spec_that_is_no_prefix():
    with pytest.raises(ValueError, match=r"filter_spec is no prefix.*eqx\.tree_at"):
        clipped(models.mlp_loss, filter_spec={"layers": True})(CASE.model, X, LABEL)


@pytest.mark.parametrize("spec", [3, "layers", CASE.model])
def test_a_filter_spec_of_another_kind(spec, unchecked):
    with pytest.raises(ValueError, match=r"filter_spec must be a function") as caught:
        clipped(models.mlp_loss, filter_spec=spec)(CASE.model, X, LABEL)
    assert len(str(caught.value)) < 300


SECRET = np.full((2, 3), 0.123456)


@pytest.mark.parametrize("value", [CASE.model, SECRET, jnp.asarray(SECRET), {"a": SECRET}])
@pytest.mark.parametrize(
    "option", ["normalize_by", "microbatch_size", "policy", "sharding", "method", "l2_clip_norm"]
)
def test_no_error_prints_a_model_or_data(option, value, unchecked):
    with pytest.raises(ValueError, match=option) as caught:
        clipped(models.mlp_loss, **{option: value})
    assert "0.123" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_no_repr_prints_what_the_loss_is_bound_to():
    bound = functools.partial(models.mlp_loss, CASE.model)
    assert repr(clipped(models.mlp_loss)) == "ClippedGrad(mlp_loss, l2_norm_bound=1)"
    assert repr(clipped(bound)) == "ClippedGrad(partial, l2_norm_bound=1)"


def test_nothing_that_wants_a_clipped_gradient_prints_what_it_got(unchecked):
    wrapped = functools.partial(clipped(models.mlp_loss), CASE.model)
    plan = dp.PrivacyPlan(sampling_prob=0.1, steps=10, noise_multiplier=1.0, delta=1e-5)
    for use in (
        lambda: dp.explain(wrapped, X, LABEL),
        lambda: dp.plan_memory(wrapped, X, LABEL),
        lambda: plan.privatizer(wrapped, key=jax.random.key(0)),
    ):
        with pytest.raises(ValueError, match="partial") as caught:
            use()
        assert "Linear" not in str(caught.value)


def test_a_plan_and_a_check_print_no_array_either(unchecked):
    with pytest.raises(ValueError, match="sampling_prob") as caught:
        dp.PrivacyPlan(sampling_prob=SECRET, steps=10, noise_multiplier=1.0, delta=1e-5)
    assert "0.123" not in str(caught.value)
    bound = functools.partial(lambda held, x: x, np.full(2, 1234567, np.uint32))
    with pytest.raises(ValueError, match="Nothing to check: partial calls") as caught:
        dp.check_precision(bound, X, policy=dp.load_policy("float32"))
    assert "1234567" not in str(caught.value)
