"""Losses as others write them, by every method, against the float64 oracle and the clip norm.

Each table of cases is one loss, and each of its cases has a clip norm of its own. A batch holds
ordinary examples, one of zeros, one that is not finite, and padding.
"""

import functools
import itertools
import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax

import eqx_dp as dp
from eqx_dp.gradients import taps
from eqx_dp.gradients.blocks import BLOCK
from eqx_dp.gradients.kind import Kind, MatrixAxes, shape_of
from tests import models, oracle
from tests.gradients import jitted
from tests.gradients.cases import branches, layers, networks, uses, weights
from tests.gradients.cases.tables import Table, joined, of_leaf
from tests.tiers import by_method, curated

SHARED: Table = {case.name: lambda name, case=case: case for case in models.all_cases()[:-1]}
TABLES: dict[str, Table] = {
    **uses.FACTORED,
    **uses.FORMED,
    "layers": layers.LINEAR,
    "convolution layers": layers.CONVOLUTIONS,
    "other layers": layers.OTHERS,
    "shared models": SHARED,
    "derived weights": weights.DERIVED,
    "derived weights, met otherwise": weights.MET,
    "terms": weights.TERMS,
    "branches": branches.BRANCHES,
    "rules": branches.RULES,
    "other losses": branches.OTHERS,
    "networks": networks.NETWORKS,
    "differential equations": networks.EQUATIONS,
}
SIZE, ZEROS, BROKEN = 5, 2, 3
PADDING = np.arange(SIZE) == 4
TOLERANCE = 2e-5


class Known(NamedTuple):
    """A table as one case, and what is true of it.

    Attributes:
        case: all of it.
        batch: with outcasts.
        clip_norm: of each case the median norm: some examples are clipped, some are not.
        plain: what is true without clipping.
        truth: what is true with it.
        lost: the examples that are not finite.
    """

    case: models.Case
    batch: Any
    clip_norm: dict[str, float]
    plain: oracle.Truth
    truth: oracle.Truth
    lost: np.ndarray


@functools.cache
def known(name: str) -> Known:
    return known_of(TABLES[name])


def known_of(table: Table) -> Known:
    case = joined(table)

    def spoiled(x: Any) -> Any:
        x = np.array(x)
        if jnp.issubdtype(x.dtype, jnp.floating):
            x[ZEROS], x[BROKEN] = 0, np.nan
        return jnp.asarray(x)

    batch = jax.tree.map(spoiled, case.batch(SIZE))

    def truth_at(clip_norm: dict[str, float], padding: np.ndarray) -> oracle.Truth:
        options = {"l2_clip_norm": clip_norm, "filter_spec": case.filter_spec}
        given = {"is_padding_example": padding, **options}
        return oracle.clipped_gradients(case.loss, case.model, *batch, **given)

    plain = truth_at(dict.fromkeys(table, np.inf), PADDING)
    lost = ~np.isfinite(np.stack([plain.loss, *plain.grad_norm.values()])).all(0)
    assert not lost[:2].any(), {name: norms[:2] for name, norms in plain.grad_norm.items()}
    # A gradient that is zero but for rounding (a bias before a softmax) is not to be blown up.
    clip_norm = {
        name: max(float(np.median(norms[~PADDING & ~lost])), 1e-3)
        for name, norms in plain.grad_norm.items()
    }
    return Known(case, batch, clip_norm, plain, truth_at(clip_norm, PADDING | lost), lost)


def check(its: Known, method: str, microbatch_size: int | None = None) -> Any:
    """Sums, norms and losses are the oracle's, and no example adds more than the clip norm."""
    case, batch, clip_norm, plain, truth, lost = its
    options = {"filter_spec": case.filter_spec, "microbatch_size": microbatch_size}
    grad_fn = dp.filter_value_and_clipped_grad(
        case.loss, l2_clip_norm=clip_norm, method=method, **options
    )
    compiled = eqx.filter_jit(grad_fn)
    found, grads = compiled(case.model, *batch, is_padding_example=PADDING)
    near(found.loss, plain.loss, "loss")
    for name in clip_norm:
        error = oracle.relative_error(grads[name], truth.grads[name])
        assert error < TOLERANCE, (name, error)
        near(found.grad_norm[name], plain.grad_norm[name], name)
    for i in np.flatnonzero(~lost & ~PADDING):
        _, alone = compiled(case.model, *batch, is_padding_example=np.arange(SIZE) != i)
        for name, clip in clip_norm.items():
            added, norm = np.linalg.norm(oracle.vector(alone[name])), plain.grad_norm[name][i]
            assert added <= clip, (name, added / clip)
            assert added >= 0.9999 * min(clip, norm), (name, added / clip)
    for nobody in (np.arange(SIZE) != BROKEN, np.ones(SIZE, bool)):
        _, nothing = compiled(case.model, *batch, is_padding_example=nobody)
        assert not oracle.vector(nothing).any() or not lost[BROKEN]
    return grad_fn


def near(found: Any, expected: np.ndarray, name: str) -> None:
    """What is finite in truth is found; padding reports zero.

    A loop that data ends stops at once for NaN, but goes on for others of the batch: then the
    example with NaN, whose loss is finite in truth, may get NaN, and adds nothing.
    """
    is_finite = np.isfinite(expected)
    is_finite[BROKEN] = False
    assert not np.asarray(found)[PADDING].any(), name
    its, truth = np.asarray(found)[is_finite], expected[is_finite]
    error = TOLERANCE * np.max(np.abs(truth))
    np.testing.assert_allclose(its, truth, rtol=TOLERANCE, atol=error, err_msg=name)


CURATED = [name for name in uses.FACTORED if not name.startswith("more ")]
LATER = [name for name in TABLES if name not in CURATED]
FACTORING = ["book_keeping", "ghost"]


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("name", "method"),
    [
        *by_method(CURATED, book_keeping=(), every=6),
        *curated(itertools.product(LATER, FACTORING), (), every=10),
    ],
)
def test_in_microbatches(name, method):
    check(known(name), method, microbatch_size=2)


@pytest.mark.parametrize(("name", "method"), by_method(CURATED, book_keeping=(), every=6))
def test_sums_in_blocks(name, method):
    """More examples at once than one contraction adds up."""
    case = joined(TABLES[name])
    batch = case.batch(2 * BLOCK + 3)
    options = {"l2_clip_norm": math.inf, "method": method}
    whole, in_parts = (
        jitted.grad(case.loss, microbatch_size=size, **options)(case.model, *batch)
        for size in (None, BLOCK - 1)
    )
    assert oracle.relative_error(whole, in_parts) < TOLERANCE


@pytest.mark.parametrize("name", [*uses.FACTORED, *uses.FORMED])
def test_which_leaves_are_factored(name):
    """Else the tables of uses would say nothing of norms that are found without the gradient."""
    case, way = joined(TABLES[name]), "factored" if name in uses.FACTORED else "formed"
    grad_fn = dp.filter_clipped_grad(case.loss, l2_clip_norm=1.0, method="book_keeping")
    rows = dp.explain(grad_fn, case.model, *case.batch(SIZE)).rows
    assert {row.path: row.way for row in rows} == {row.path: way for row in rows}


class Scale(Kind):
    """A kind of the tests' own, as a norm layer has: an entry for an entry of the data."""

    name = "scale"
    terms = 1

    @classmethod
    def claims(cls, equation: Any, operand: int) -> bool:
        left, *others = map(shape_of, equation.invars)
        return equation.primitive.name == "mul" and others == [left] and operand < 2

    @property
    def matrix_axes(self) -> MatrixAxes:
        return MatrixAxes(self.shape, tuple(range(len(self.shape))), (), ())

    def factors(self, residual: Any, cotangent: Any, dtype: Any) -> tuple[Any, Any]:
        return residual.astype(dtype).reshape(-1, 1, 1), cotangent.astype(dtype).reshape(-1, 1, 1)


@pytest.mark.parametrize("method", FACTORING)
def test_a_kind_is_one_class_and_one_entry(monkeypatch, method):
    monkeypatch.setattr(taps, "KINDS", (*taps.KINDS, Scale))
    scaled = known_of({"scale": of_leaf(lambda w, x: jnp.sin(w.T * x), (3, 4), (4, 3))})
    (row,) = dp.explain(check(scaled, method), scaled.case.model, *scaled.batch).rows
    assert (row.uses, row.way) == (("scale",), "factored")


SMALL = st.integers(1, 3)


@st.composite
def convolutions(draw):
    rank = draw(st.integers(1, 2))

    def each(numbers):
        return tuple(draw(numbers) for _ in range(rank))

    options = {
        "window_strides": each(SMALL),
        "padding": tuple((draw(st.integers(-1, 3)), draw(st.integers(-1, 3))) for _ in range(rank)),
        "lhs_dilation": each(SMALL),
        "rhs_dilation": each(SMALL),
        "feature_group_count": draw(SMALL),
    }
    groups = options["feature_group_count"]
    channels, outputs = draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    image = (draw(st.integers(1, 2)), groups * channels, *each(st.integers(2, 5)))
    kernel = (outputs, channels, *each(SMALL))
    return image, kernel, options


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(convolutions())
def test_options_of_convolutions(convolution):
    image, kernel, options = convolution

    def use(w, x):
        return lax.conv_general_dilated(x, w, **options)

    assume(jax.eval_shape(use, np.zeros(kernel), np.zeros(image)).size > 0)
    check(known_of({"convolution": of_leaf(use, kernel, image)}), "book_keeping")
