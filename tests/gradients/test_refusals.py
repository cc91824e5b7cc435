"""What is refused, and that the message says what was found, where, and what to do instead."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import TypeCheckError

import eqx_dp as dp
from tests import models
from tests.gradients import jitted

pytestmark = pytest.mark.filterwarnings("ignore:When `eqx.nn.BatchNorm")


def clipped(loss, **options):
    return dp.filter_clipped_grad(loss, **{"l2_clip_norm": 1.0, **options})


# The loss


def test_a_loss_that_is_not_scalar():
    with pytest.raises(ValueError, match=r"(?s)scalar.*\(3,\)"):
        clipped(lambda model, x: model * x)(jnp.ones(3), jnp.ones((2, 3)))


def test_a_loss_of_a_batch_of_one_that_is_not_reduced():
    with pytest.raises(ValueError, match=r"(?s)scalar.*\(1,\)"):
        clipped(lambda model, x: model * x, keep_batch_dim=True)(jnp.ones(()), jnp.ones(2))


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64, bool])
def test_a_loss_that_is_no_float(dtype):
    with pytest.raises(ValueError, match=rf"(?s)loss.*{jnp.dtype(dtype).name}"):
        clipped(lambda model, x: (model * x).astype(dtype))(jnp.ones(()), jnp.ones(2))


@pytest.mark.parametrize("found", [None, "loss"])
def test_a_loss_that_is_no_array(found):
    with pytest.raises(ValueError, match="loss"):
        clipped(lambda model, x: found)(jnp.ones(()), jnp.ones(2))


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, x: model * x,
        lambda model, x: (model * x, 1, 2),
        lambda model, x: (model * x,),
    ],
)
def test_has_aux_wants_a_pair(loss):
    with pytest.raises(ValueError, match="has_aux"):
        clipped(loss, has_aux=True)(jnp.ones(()), jnp.ones(2))


def test_a_pair_wants_has_aux():
    with pytest.raises(ValueError, match="has_aux"):
        clipped(lambda model, x: (model * x, x))(jnp.ones(()), jnp.ones(2))


# The batch


def test_batch_arguments_whose_leading_axes_differ():
    case = models.mlp()
    x, label = case.batch(4)
    with pytest.raises(ValueError, match=r"(?s)\b4\b.*\b3\b|\b3\b.*\b4\b"):
        clipped(case.loss)(case.model, x, label[:3])


def test_the_places_of_differing_leading_axes_are_named():
    x = {"image": jnp.ones(4), "mask": jnp.ones(5)}
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        clipped(lambda model, x: model * x["image"])(jnp.ones(()), x)
    for word in ("image", "mask", "4", "5"):
        assert word in str(caught.value)


def test_no_batch_argument():
    with pytest.raises(ValueError, match="batch"):
        clipped(lambda model: model**2)(jnp.ones(()))


@pytest.mark.parametrize("empty", [None, (), {}])
def test_a_batch_argument_without_arrays(empty):
    with pytest.raises(ValueError, match="batch"):
        clipped(lambda model, x: model**2)(jnp.ones(()), empty)


@pytest.mark.parametrize("scalar", [jnp.ones(()), np.float32(1.0)])
def test_a_scalar_in_the_batch(scalar):
    with pytest.raises(ValueError, match=r"(?s)temperature.*axis"):
        clipped(lambda model, x: model * x["x"])(
            jnp.ones(()), {"x": jnp.ones(2), "temperature": scalar}
        )


@pytest.mark.parametrize("leaf", [1.5, 3, True, "text", abs], ids=repr)
def test_a_leaf_of_the_batch_that_is_no_array(leaf):
    with pytest.raises(ValueError, match="other"):
        clipped(lambda model, x: model * x["x"])(jnp.ones(()), {"x": jnp.ones(2), "other": leaf})


def test_a_padding_mask_of_another_length():
    with pytest.raises(ValueError, match=r"is_padding_example.*\(2,\).*\(3,\)"):
        clipped(models.dot)(jnp.ones(()), jnp.ones(2), is_padding_example=np.zeros(3, bool))


@pytest.mark.parametrize("mask", [np.zeros((2, 1), bool), jnp.ones(2)])
def test_a_padding_mask_of_another_kind(mask):
    # With the annotations checked, as they are here, these do not get as far as the ValueError.
    with pytest.raises((ValueError, TypeCheckError), match="is_padding_example"):
        clipped(models.dot)(jnp.ones(()), jnp.ones(2), is_padding_example=mask)


# The model


def test_nothing_trainable():
    for model in ({"a": jnp.arange(3), "b": "text"}, {}, None):
        with pytest.raises(ValueError, match="filter_spec"):
            clipped(lambda model, x: x)(model, jnp.ones(2))
    with pytest.raises(ValueError, match="filter_spec"):
        clipped(models.dot, filter_spec=lambda _: False)(jnp.ones(()), jnp.ones(2))


@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.int32, bool])
def test_trainable_leaves_that_are_no_floats(dtype):
    def loss(model, x):
        return jnp.sum(jnp.abs(model["odd"])) * x * model["w"]

    model = {"w": jnp.ones(()), "odd": jnp.ones(2, dtype)}
    with pytest.raises(ValueError, match=rf"(?s)odd.*{jnp.dtype(dtype).name}"):
        clipped(loss, filter_spec=lambda _: True)(model, jnp.ones(2))


def test_a_complex_leaf_is_trainable_by_default_and_refused():
    def loss(model, x):
        return jnp.abs(model["odd"]) * x

    with pytest.raises(ValueError, match=r"(?s)odd.*complex64"):
        clipped(loss)({"odd": jnp.ones((), jnp.complex64)}, jnp.ones(2))


def test_a_complex_leaf_may_be_frozen():
    def loss(model, x):
        return jnp.abs(model["odd"]) * x * model["w"]

    model = {"odd": jnp.asarray(3 + 4j, jnp.complex64), "w": jnp.ones(())}
    grads = clipped(loss, filter_spec={"odd": False, "w": True}, l2_clip_norm=np.inf)(
        model, jnp.ones(2)
    )
    assert grads["odd"] is None
    np.testing.assert_allclose(grads["w"], 10.0)


# Options


@pytest.mark.parametrize("size", [0, -1])
def test_microbatch_size_below_one(size):
    with pytest.raises(ValueError, match=rf"microbatch_size.*{size}"):
        clipped(models.dot, microbatch_size=size)


def test_an_unknown_method_is_answered_with_the_known_ones(unchecked):
    with pytest.raises(ValueError, match=r"auto.*per_example.*magic"):
        clipped(models.dot, method="magic")


# Keys


def test_a_key_is_missing():
    with pytest.raises(ValueError, match="key"):
        clipped(lambda model, x, *, key: model * x)(jnp.ones(()), jnp.ones(2))


def test_a_key_for_a_loss_that_takes_none():
    with pytest.raises(ValueError, match="key"):
        clipped(models.dot)(jnp.ones(()), jnp.ones(2), key=jax.random.key(0))


# Losses in which examples meet


def batch_norm_loss(model, x, state):
    hidden, _ = model(x, state)
    return jnp.sum(hidden**2)


ONE = jnp.ones(3)


def batch_norm(mode):
    return eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, axis_name="batch", mode=mode)


def assert_speaks_of_batch_norm(message):
    assert "BatchNorm" in message
    assert "mix" in message
    assert "GroupNorm" in message or "LayerNorm" in message


@pytest.mark.parametrize("mode", ["ema", "batch"])
def test_batch_norm_is_refused(mode):
    model, state = batch_norm(mode)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        clipped(lambda model, x: batch_norm_loss(model, x, state))(model, jnp.ones((4, 3)))
    assert_speaks_of_batch_norm(str(caught.value))


def test_batch_norm_is_refused_under_an_enclosing_vmap():
    model, state = batch_norm("batch")
    grad_fn = clipped(lambda model, x: batch_norm_loss(model, x, state))
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        jax.vmap(lambda x: arrays_of(grad_fn(model, x)), axis_name="batch")(jnp.ones((2, 4, 3)))
    assert_speaks_of_batch_norm(str(caught.value))


def arrays_of(grads):
    return eqx.filter(grads, eqx.is_array)


def test_batch_norm_in_a_loss_written_for_a_batch_is_refused():
    """The axis is bound inside the loss, so no axis is missing; the statistics are a batch's."""
    model, state = batch_norm("batch")

    def loss(model, x):
        hidden, _ = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
            x, state
        )
        return jnp.sum(hidden**2)

    with pytest.raises(ValueError) as caught:  # noqa: PT011
        clipped(loss, keep_batch_dim=True)(model, jnp.ones((4, 3)))
    assert_speaks_of_batch_norm(str(caught.value))


@pytest.mark.parametrize("mode", ["ema", "batch"])
def test_batch_norm_at_inference_mixes_nothing(mode):
    model, state = batch_norm(mode)
    _, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
        jnp.asarray(np.random.default_rng(0).normal(size=(9, 3)), jnp.float32), state
    )
    model = eqx.nn.inference_mode(model)
    grads = jitted.grad(lambda model, x: batch_norm_loss(model, x, state), l2_clip_norm=np.inf)(
        model, jnp.ones((4, 3))
    )
    alone = eqx.filter_jit(eqx.filter_grad(lambda model: 4 * batch_norm_loss(model, ONE, state)))(
        model
    )
    np.testing.assert_allclose(grads.weight, alone.weight, rtol=1e-5)
    np.testing.assert_allclose(grads.bias, alone.bias, rtol=1e-5)


def mixing_loss(model, x):
    return jax.lax.psum(model * x, "batch")


def test_a_collective_over_an_axis_that_nobody_binds():
    with pytest.raises(ValueError, match=r"(?s)batch"):
        clipped(mixing_loss)(jnp.ones(()), jnp.ones(2))


def test_a_collective_over_the_axis_of_an_enclosing_vmap():
    grad_fn = clipped(mixing_loss)
    with pytest.raises(ValueError, match=r"(?s)psum.*batch|batch.*psum"):
        jax.vmap(lambda x: grad_fn(jnp.ones(()), x), axis_name="batch")(jnp.ones((3, 2)))


def on_one_device(fun):
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("batch")
    return jax.shard_map(fun, mesh=mesh, in_specs=spec, out_specs=spec)


def varying(model):
    return jax.lax.pcast(model, "batch", to="varying")


def test_a_collective_over_the_axis_of_an_enclosing_shard_map():
    grad_fn = clipped(mixing_loss)
    with pytest.raises(ValueError, match=r"(?s)psum.*batch|batch.*psum"):
        on_one_device(lambda x: grad_fn(varying(jnp.ones(())), x)[None])(jnp.ones(4))


def test_a_model_that_is_the_same_on_all_devices_of_an_enclosing_shard_map():
    """Its gradient would be summed over devices before it is clipped."""
    grad_fn = clipped(lambda model, x: model * x)
    with pytest.raises(ValueError, match=r"(?s)batch.*check_vma=False"):
        on_one_device(lambda x: grad_fn(jnp.ones(()), x)[None])(jnp.ones(4))


def test_a_loss_may_know_where_it_runs():
    grad_fn = clipped(lambda m, x: m * x * (1 + jax.lax.axis_index("batch")), l2_clip_norm=np.inf)
    grads = on_one_device(lambda x: grad_fn(varying(jnp.ones(())), x)[None])(jnp.ones(4))
    np.testing.assert_array_equal(grads, [4.0])


def test_a_collective_hidden_in_scan_and_cond_is_found_too():
    def loss(model, x):
        def body(total, _):
            return jax.lax.cond(
                total > 0, lambda t: jax.lax.pmean(t, "batch"), jnp.sin, total
            ), None

        return jax.lax.scan(jax.checkpoint(body), model * x, None, length=2)[0]

    grad_fn = clipped(loss)
    with pytest.raises(ValueError, match="batch"):
        jax.vmap(lambda x: grad_fn(jnp.ones(()), x), axis_name="batch")(jnp.ones((3, 2)))


def test_a_collective_over_an_axis_of_the_loss_itself_mixes_nothing():
    def loss(model, tokens):
        centred = jax.vmap(lambda t: t - jax.lax.pmean(t, "tokens"), axis_name="tokens")(tokens)
        return jnp.sum(model * centred**2)

    tokens = jnp.arange(6.0).reshape(2, 3)
    grads = clipped(loss, l2_clip_norm=np.inf)(jnp.ones(()), tokens)
    np.testing.assert_allclose(grads, 4.0)
    grad_fn = clipped(loss, l2_clip_norm=np.inf)
    outer = jax.vmap(lambda x: grad_fn(jnp.ones(()), x), axis_name="batch")(tokens[None])
    np.testing.assert_allclose(outer, [4.0])


def test_an_error_of_the_loss_itself_comes_through_as_it_is():
    def loss(model, x):
        return model * x * undefined_name

    with pytest.raises(NameError, match="undefined_name"):
        clipped(loss)(jnp.ones(()), jnp.ones(2))
