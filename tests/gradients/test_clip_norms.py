"""Clip norms, one or a tree of them, and the sensitivity that noise is calibrated against."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting import NeighboringRelation

import eqx_dp as dp
from tests import models, oracle

pytestmark = pytest.mark.optimized

BOTH = pytest.mark.parametrize(
    "make", [dp.filter_clipped_grad, dp.filter_value_and_clipped_grad], ids=["grad", "value_and"]
)


# What the bound says


@BOTH
@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({"l2_clip_norm": 0.7}, 0.7),
        ({"l2_clip_norm": 2}, 2.0),
        ({"l2_clip_norm": 0.0}, 0.0),
        ({"l2_clip_norm": np.inf}, np.inf),
        ({"l2_clip_norm": np.float32(0.5)}, 0.5),
        ({"l2_clip_norm": jnp.array(0.5)}, 0.5),
        ({"l2_clip_norm": 0.7, "normalize_by": 4.0}, 0.175),
        ({"l2_clip_norm": 0.7, "rescale_to_unit_norm": True}, 1.0),
        ({"l2_clip_norm": 0.0, "rescale_to_unit_norm": True}, 1.0),
        ({"l2_clip_norm": 0.7, "rescale_to_unit_norm": True, "normalize_by": 4.0}, 0.25),
        ({"l2_clip_norm": {"a": 3.0, "b": (np.array(4.0), None)}}, 5.0),
        ({"l2_clip_norm": {"a": 3.0, "b": 4.0}, "normalize_by": 10}, 0.5),
        ({"l2_clip_norm": {"a": 3.0, "b": 4.0}, "rescale_to_unit_norm": True}, 2**0.5),
        ({"l2_clip_norm": {"a": 3.0, "b": "frozen", "c": abs}}, 3.0),
    ],
    ids=str,
)
def test_bound_and_sensitivity(make, options, bound):
    grad_fn = make(models.dot, **options)
    assert grad_fn.l2_norm_bound == pytest.approx(bound, rel=1e-12)
    expected = {
        NeighboringRelation.ADD_OR_REMOVE_ONE: bound,
        NeighboringRelation.REPLACE_ONE: 2 * bound,
        NeighboringRelation.REPLACE_SPECIAL: bound,
    }
    assert set(expected) == set(NeighboringRelation)
    for relation, sensitivity in expected.items():
        assert grad_fn.sensitivity(relation) == pytest.approx(sensitivity, rel=1e-12)


@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("clip_norm", [0.5, {"weight": 0.3, "bias": 0.4}], ids=str)
def test_worst_examples_reach_the_sensitivity_and_do_not_pass_it(clip_norm, rescale):
    """Gradients far beyond every clip norm: adding one moves the sum by the bound exactly."""
    options = {"rescale_to_unit_norm": rescale, "normalize_by": 3.0}
    grad_fn = dp.filter_clipped_grad(models.dot, l2_clip_norm=clip_norm, **options)
    model = {"weight": jnp.zeros(5), "bias": jnp.zeros(())}
    x = {"weight": jnp.full((2, 5), 1e6), "bias": jnp.full(2, 1e6)}
    run = eqx.filter_jit(grad_fn)
    opposite = jax.tree.map(lambda leaf: leaf.at[1].multiply(-1), x)

    def total(x, padding):
        return oracle.vector(run(model, x, is_padding_example=np.array(padding)))

    added = np.linalg.norm(total(x, [False, False]) - total(x, [False, True]))
    replaced = np.linalg.norm(total(x, [False, False]) - total(opposite, [False, False]))
    add, replace = NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_ONE
    assert added == pytest.approx(grad_fn.sensitivity(add), rel=5e-6)
    assert replaced == pytest.approx(grad_fn.sensitivity(replace), rel=5e-6)


# Refused


@BOTH
@pytest.mark.parametrize("bad", [-1.0, -1e-30, np.nan, -np.inf, jnp.array(-1.0)], ids=str)
def test_negative_and_nan_clip_norms_are_refused(make, bad):
    with pytest.raises(ValueError, match=r"l2_clip_norm.*(-|nan)"):
        make(models.dot, l2_clip_norm=bad)
    with pytest.raises(ValueError, match=r"(?s)l2_clip_norm\.(.*\.)?b"):
        make(models.dot, l2_clip_norm={"a": 1.0, "b": bad})


@BOTH
@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_senseless_normalize_by_is_refused(make, bad):
    with pytest.raises(ValueError, match="normalize_by"):
        make(models.dot, l2_clip_norm=1.0, normalize_by=bad)


TINY = {"l2_clip_norm": 1e-20, "normalize_by": 1e17}


@pytest.mark.parametrize(
    ("options", "examples", "entries"),
    [
        ({"l2_clip_norm": 1e37}, 96, 2),
        ({"l2_clip_norm": {"a": 1e37, "b": 1.0}}, 96, 2),
        ({"l2_clip_norm": dp.clipping.PerLayer(1e37)}, 96, 2),
        ({"l2_clip_norm": 1e35, "normalize_by": 1e-5}, 96, 2),
        ({"l2_clip_norm": 1.0, "policy": "accumulate=float16,unsafe=true"}, 2**15, 2),
        (TINY, 8, 65_025),
        ({"l2_clip_norm": 1e-29}, 10**6, 2),
    ],
    ids=str,
)
def test_sums_that_could_overflow_or_vanish_before_the_noise_are_refused(
    options, examples, entries
):
    """And others not: of fewer examples, of rescaled gradients."""
    if "policy" in options:
        options = {**options, "policy": dp.parse_policy(options["policy"])}

    def arrays(*front):
        shapes = {"a": (*front, entries), "b": front}
        return {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}

    def call(examples, **changed):
        grad_fn = dp.filter_clipped_grad(models.dot, **{**options, **changed})
        jax.eval_shape(grad_fn, arrays(), arrays(examples))

    with pytest.raises(ValueError, match="before the noise"):
        call(examples)
    call(1, normalize_by=1.0)
    call(8, rescale_to_unit_norm=True, normalize_by=1.0)


def test_each_step_of_a_factored_leaf_may_lose_numbers():
    def call(method):
        loss = lambda w, x: jnp.sum(jnp.sin(x @ w))  # noqa: E731
        grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=1e-27, method=method)
        jax.eval_shape(grad_fn, jnp.ones((40, 40)), jnp.ones((2, 3, 40)))

    call("per_example")
    with pytest.raises(ValueError, match=r"to 4.3e\+37 is allowed for 2 examples, 1600 entries"):
        call("book_keeping")


@pytest.mark.parametrize(
    ("clip", "path"),
    [
        ({}, "a"),
        ({"a": 1.0}, "b"),
        ({"a": 1.0, "b": 1.0, "c": 1.0}, "c"),
        ({"a": {"deep": 1.0}, "b": 1.0}, "a"),
        ({"a": 1.0, "b": (1.0, 1.0, 1.0)}, "b"),
        ({"a": 1.0, "b": None}, "b"),
        ({"a": 1.0, "b": (1.0, "two")}, "b"),
    ],
    ids=str,
)
def test_a_clip_tree_that_is_no_prefix_names_the_place(clip, path):
    model = {"a": jnp.zeros(2), "b": (jnp.zeros(2), jnp.zeros(2))}
    x = jax.tree.map(lambda leaf: leaf[None], model)
    with pytest.raises(ValueError, match=rf"(?s)l2_clip_norm.*\b{path}\b"):
        dp.filter_clipped_grad(models.dot, l2_clip_norm=clip)(model, x)
