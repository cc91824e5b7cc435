"""Every option of the clipped gradient, by the methods that work on uses."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_dp as dp
from tests import models as shared
from tests import oracle
from tests.gradients.engine import models, uses

pytestmark = pytest.mark.sampled(6)

TOLERANCES = {"mixed_bfloat16": 3e-2, "mixed_float16": 4e-3, "bfloat16": 4e-2}


METHODS = pytest.mark.parametrize("method", ["book_keeping", "ghost"])


def run(
    case,
    *batch,
    method="book_keeping",
    l2_clip_norm=0.3,
    key=None,
    is_padding_example=None,
    loss=None,
    **options,
):
    grad_fn = dp.filter_value_and_clipped_grad(
        loss or case.loss,
        l2_clip_norm=l2_clip_norm,
        filter_spec=case.filter_spec,
        method=method,
        **options,
    )
    named = {"key": key, "is_padding_example": is_padding_example}
    given = {name: value for name, value in named.items() if value is not None}
    return uses.freshly_jitted(grad_fn, case.model)(*batch, **given)


def truth_of(case, *batch, l2_clip_norm=0.3, loss=None, **options):
    return oracle.clipped_gradients(
        loss or case.loss,
        case.model,
        *batch,
        l2_clip_norm=l2_clip_norm,
        filter_spec=case.filter_spec,
        **options,
    )


def agree(found, truth, tolerance=1e-5):
    per_example, grads = found
    assert oracle.relative_error(grads, truth.grads) < tolerance
    assert oracle.relative_error(per_example.loss, truth.loss) < tolerance
    assert oracle.relative_error(per_example.grad_norm, truth.grad_norm) < tolerance


@METHODS
@pytest.mark.parametrize("make", [models.gru, shared.cnn], ids=["gru", "cnn"])
def test_microbatches_and_padding(make, method):
    case = make()
    batch = case.batch(5)
    padding = np.array([False, True, False, False, True])
    found = run(case, *batch, method=method, microbatch_size=2, is_padding_example=padding)
    agree(found, truth_of(case, *batch, is_padding_example=padding))


POLICIES = [
    (models.stacked_gpt, "mixed_bfloat16", "book_keeping"),
    (shared.cnn, "mixed_float16", "book_keeping"),
    (models.gru, "bfloat16", "book_keeping"),
    (shared.cnn, "mixed_float16", "ghost"),
    pytest.param(models.stacked_gpt, "mixed_bfloat16", "ghost", marks=pytest.mark.exhaustive),
    pytest.param(models.gru, "bfloat16", "ghost", marks=pytest.mark.exhaustive),
]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "preset", "method"), POLICIES)
def test_policies(make, preset, method):
    case = make()
    batch = case.batch(4)
    found = run(case, *batch, method=method, policy=dp.load_policy(preset))
    agree(found, truth_of(case, *batch), TOLERANCES[preset])
    assert {leaf.dtype for leaf in jax.tree.leaves(found[1])} == {jnp.dtype(jnp.float32)}
    # The control: the policy is really at work.
    assert oracle.relative_error(found[1], truth_of(case, *batch).grads) > 1e-5


def test_float64():
    with jax.enable_x64(True):
        case = shared.cnn.__wrapped__()  # one that no other test is given
        batch = case.batch(3)
        per_example, grads = run(case, *batch, policy=dp.load_policy("float64"))
        truth = truth_of(case, *batch)
        assert oracle.relative_error(grads, truth.grads) < 1e-7
        assert oracle.relative_error(per_example.grad_norm, truth.grad_norm) < 1e-7


@METHODS
@pytest.mark.parametrize("rescale", [False, True])
def test_a_tree_of_clip_norms(rescale, method):
    case = shared.mlp()
    batch = case.batch(4)
    nothing = jax.tree.map(lambda _: None, case.model)
    clip_norms = eqx.tree_at(
        lambda m: m.layers, nothing, (0.1, 0.3, 0.2), is_leaf=lambda x: x is None
    )
    options = {"l2_clip_norm": clip_norms, "rescale_to_unit_norm": rescale, "normalize_by": 3.0}
    found = run(case, *batch, method=method, **options)
    agree(found, truth_of(case, *batch, **options))


@METHODS
def test_keys(method):
    case = shared.dropout()
    batch, key = case.batch(4), jax.random.key(3)
    found = run(case, *batch, method=method, key=key, microbatch_size=3)
    agree(found, truth_of(case, *batch, key=key))


@METHODS
def test_aux(method):
    def loss(model, x, label):
        logits = model(x)
        return shared.cross_entropy(logits, label), {"logits": logits, "label": label}

    case = shared.mlp()
    batch = case.batch(4)
    found = run(case, *batch, method=method, loss=loss, has_aux=True)
    truth = truth_of(case, *batch, loss=loss, has_aux=True)
    agree(found, truth)
    assert oracle.relative_error(found[0].aux, truth.aux) < 1e-5


@METHODS
@pytest.mark.parametrize("make", [shared.cnn, models.gru], ids=["cnn", "gru"])
def test_a_loss_written_for_a_batch(make, method):
    case = make()

    def loss(model, *batch):
        return jnp.mean(jax.vmap(case.loss, (None, *[0] * len(batch)))(model, *batch))

    batch = case.batch(3)
    found = run(case, *batch, method=method, loss=loss, keep_batch_dim=True)
    agree(found, truth_of(case, *batch))


@METHODS
@pytest.mark.parametrize(
    "make",
    [shared.linear_regression, shared.cnn, models.gru],
    ids=["linear", "cnn", "gru"],
)
def test_an_empty_batch(make, method):
    case = make()
    per_example, grads = run(case, *jax.tree.map(lambda x: x[:0], case.batch(1)), method=method)
    assert per_example.loss.shape == per_example.grad_norm.shape == (0,)
    assert jax.tree.map(jnp.shape, grads) == jax.tree.map(
        jnp.shape, eqx.filter(case.model, case.filter_spec)
    )
    assert not oracle.vector(grads).any()


# What is not finite


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize(
    ("make", "way", "method"),
    [
        (models.vision_transformer, "factored", "book_keeping"),
        (models.gru, "factored", "book_keeping"),
        (shared.cnn, "formed", "book_keeping"),
        (models.vision_transformer, "factored", "ghost"),
        (models.gru, "formed", "ghost"),
        pytest.param(shared.cnn, "formed", "ghost", marks=pytest.mark.exhaustive),
    ],
)
def test_not_finite_is_padding_bit_for_bit(make, way, method, monkeypatch):
    """In the input, in the loss, or only in the gradient of one example."""
    uses.force(monkeypatch, way)
    case = make()

    def loss(model, *rest):
        *example, scale, offset = rest
        # A scale of zero makes a finite loss whose gradient is not: the root's slope at zero.
        return (
            case.loss(model, *example)
            + offset
            + jnp.sqrt(jnp.abs(scale * jnp.sum(jax.tree.leaves(model)[-1])))
        )

    batch = case.batch(3)
    grad_fn = dp.filter_value_and_clipped_grad(loss, l2_clip_norm=0.3, method=method)
    call = uses.freshly_jitted(grad_fn, case.model)
    ones, zeros = jnp.ones(3), jnp.zeros(3)
    padding = jnp.array([False, True, False])
    nothing = jnp.zeros(3, bool)
    _, expected = call(*batch, ones, zeros, is_padding_example=padding)
    broken = {
        "loss": (*batch, ones, zeros.at[1].set(jnp.nan)),
        "infinite loss": (*batch, ones, zeros.at[1].set(jnp.inf)),
        "gradient": (*batch, ones.at[1].set(0.0), zeros),
        "input": (*batch, ones.at[1].set(jnp.inf), zeros),
    }
    if make is not models.gru:
        image, label = batch
        for value in (jnp.nan, -jnp.inf):
            broken[f"image {value}"] = (image.at[1, 0, 1].set(value), label, ones, zeros)
    for name, arguments in broken.items():
        per_example, grads = call(*arguments, is_padding_example=nothing)
        finite = np.isfinite(per_example.grad_norm[1]) and np.isfinite(per_example.loss[1])
        assert not finite, name
        assert bits(grads) == bits(expected), name
        assert np.isfinite(oracle.vector(grads)).all()


# Scales


@METHODS
def test_what_all_examples_share(method):
    """A use that meets no data of the example: positions looked up by number, a shared product."""

    def loss(model, x):
        positions = model["table"][jnp.arange(3)] * model["frozen"]
        return jnp.sum(jnp.sin(positions + model["shift"]) * x)

    rng = np.random.default_rng(0)
    model = {"table": rng.normal(size=(4, 2)), "shift": rng.normal(size=(3, 2)), "frozen": 2.0}
    model = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), model)
    case = shared.Case(
        "shared",
        model,
        loss,
        lambda rng, size: (jnp.asarray(rng.normal(size=(size, 3, 2)), jnp.float32),),
        {"table": True, "shift": True, "frozen": False},
    )
    batch = case.batch(4)
    agree(run(case, *batch, method=method), truth_of(case, *batch))


def tokens_by_weight(model, x, g):
    """The gradient is the sum over tokens of x_t g_t: a contraction with any scale."""
    return jnp.sum((x @ model["dense"]) * g) + jnp.sum(model["table"][jnp.arange(4) % 3] * g[:4])


@METHODS
@pytest.mark.parametrize("way", ["factored", "formed"])
def test_scales_of_the_gradient(way, method, monkeypatch):
    uses.force(monkeypatch, way)
    rng = np.random.default_rng(0)
    model = {"dense": jnp.zeros((5, 3)), "table": jnp.zeros((3, 3))}
    x, g = rng.normal(size=(2, 6, 5)), rng.normal(size=(2, 6, 3))
    grad_fn = dp.filter_value_and_clipped_grad(tokens_by_weight, l2_clip_norm=1.0, method=method)
    call = uses.freshly_jitted(grad_fn, model)
    for scale in (1e-30, 1e-15, 1.0, 1e15, 1e30):
        batch = jnp.asarray(x, jnp.float32), jnp.asarray(scale * g, jnp.float32)
        truth = oracle.clipped_gradients(tokens_by_weight, model, *batch, l2_clip_norm=1.0)
        per_example, grads = call(*batch)
        np.testing.assert_allclose(per_example.grad_norm, truth.grad_norm, rtol=1e-5)
        assert oracle.relative_error(grads, truth.grads) < 1e-4
