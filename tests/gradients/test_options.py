"""Every option of the clipped gradient, by every method, against the float64 oracle."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import models, oracle
from tests.gradients import jitted
from tests.tiers import by_method

TOLERANCE = 1e-5
PADDING = np.array([False, True, False, False, True])
KEY = jax.random.key(3)


def with_aux(model, x, label):
    logits = model(x)
    aux = {"logits": logits, "right": jnp.argmax(logits) == label, "label": label}
    return models.cross_entropy(logits, label), aux


def of_a_batch(model, x, label):
    """For a whole batch: mean loss, with something of every rank on the side."""
    assert x.ndim == 2
    logits = jax.vmap(model)(x)
    losses = jax.vmap(models.cross_entropy)(logits, label)
    aux = {"losses": losses, "logits": logits, "mean": losses.mean(), "column": logits.T}
    return losses.mean(), aux


def with_its_key(model, x, label, *, key):
    return models.dropout_loss(model, x, label, key=key), jax.random.key_data(key)


def with_a_key_or_without(model, x, label, key=None):
    return models.mlp_loss(model, x, label), jnp.asarray(key is None)


def drawing_for_a_batch(model, x, label, *, key):
    """The key is not mapped: it is that of a batch of one."""
    return models.dropout_loss(model, x[0], label[0], key=key)


def by_layer(case):
    """The activation, the sizes and so on stand in the clip tree as they do in the model."""
    return eqx.tree_at(lambda m: m.layers, case.model, (0.1, jnp.array(0.71), 5.0))


# A case, what the gradient is made with, and what it is called with.
MLP, LINEAR = models.mlp(), models.linear_regression()
RESCALED = {"rescale_to_unit_norm": True, "normalize_by": 12.5, "microbatch_size": 2}
OPTIONS = {
    "no options": (LINEAR, {}, {}),
    "microbatches of one": (LINEAR, {"microbatch_size": 1}, {}),
    "clip norm 0": (LINEAR, {"l2_clip_norm": 0.0, "normalize_by": 3}, {}),
    "clip norm inf": (LINEAR, {"l2_clip_norm": np.inf}, {}),
    "rescaled": (LINEAR, {"l2_clip_norm": 0.4, **RESCALED}, {}),
    "rescaled, clip norm 0": (LINEAR, {"l2_clip_norm": 0.0, **RESCALED}, {}),
    "clip norm of a group": (
        LINEAR._replace(filter_spec={"weight": True, "bias": False}),
        {"l2_clip_norm": {"weight": 0.3, "bias": None}}, {},
    ),
    "clip norms of layers": (MLP, {"l2_clip_norm": by_layer(MLP), "normalize_by": 2.0}, {}),
    "clip norms of layers, rescaled": (MLP, {"l2_clip_norm": by_layer(MLP), **RESCALED}, {}),
    "padding": (MLP, {}, {"is_padding_example": PADDING}),
    "frozen": (models.frozen_mlp(), {}, {"is_padding_example": PADDING}),
    "key": (models.dropout(), {"microbatch_size": 3}, {"key": KEY}),
    "raw key, seen": (models.dropout()._replace(loss=with_its_key), {"has_aux": True},
        {"key": jax.random.PRNGKey(5)}),
    "no key for one that may be left out": (MLP._replace(loss=with_a_key_or_without),
        {"has_aux": True}, {}),
    "key that may be left out": (MLP._replace(loss=with_a_key_or_without),
        {"has_aux": True}, {"key": KEY}),
    "key of a batch": (models.dropout()._replace(loss=drawing_for_a_batch),
        {"keep_batch_dim": True, "microbatch_size": 2}, {"key": KEY}),
    "key and padding": (models.dropout(), {}, {"key": KEY, "is_padding_example": PADDING}),
    "aux": (MLP._replace(loss=with_aux), {"has_aux": True, "microbatch_size": 2},
        {"is_padding_example": PADDING}),
    "batch": (MLP._replace(loss=of_a_batch),
        {"has_aux": True, "keep_batch_dim": True, "microbatch_size": 3}, {}),
}  # fmt: skip


# By book-keeping in the slow tier: at once by another method, or with another option.
ELSEWHERE = ("key", "aux", "clip norms of layers", "clip norms of layers, rescaled", "padding")


@pytest.mark.parametrize(
    ("name", "method"),
    by_method(
        OPTIONS,
        book_keeping=[name for name in OPTIONS if name not in ELSEWHERE],
        ghost=("clip norms of layers, rescaled", "aux"),
        every=4,
    ),
)
def test_agrees_with_the_oracle(name, method):
    case, options, given = OPTIONS[name]
    options = {"l2_clip_norm": 0.3, "filter_spec": case.filter_spec, **options}
    grad_fn = jitted.value_and_grad(case.loss, method=method, **options)
    per_example, grads = grad_fn(case.model, *case.batch(5), **given)
    options.pop("microbatch_size", None)
    truth = oracle.clipped_gradients(case.loss, case.model, *case.batch(5), **options, **given)
    assert oracle.relative_error(grads, truth.grads) < TOLERANCE
    for found, expected in zip(per_example, truth[1:4], strict=True):
        assert oracle.relative_error(found, expected) < TOLERANCE
    assert [leaf.dtype for leaf in jax.tree.leaves(per_example.aux)] == [
        leaf.dtype if leaf.dtype != np.float64 else np.float32
        for leaf in jax.tree.leaves(truth.aux)
    ]
