"""Which way a leaf goes, on both sides of where inner products of steps stop being cheaper."""

import types

import jax
import jax.numpy as jnp
import pytest

import eqx_dp as dp
from eqx_dp.gradients.clip import few
from eqx_dp.gradients.cost import LeafCost


def way(loss, matrix, *example):
    """The way of a matrix, from shapes alone."""
    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=1.0)
    shapes = [jax.ShapeDtypeStruct((4, *shape), dtype) for shape, dtype in example]
    (row,) = dp.explain(grad_fn, jax.ShapeDtypeStruct(matrix, jnp.float32), *shapes).rows
    return row.way


def of_layer(features, steps):
    return way(
        lambda w, x: jnp.sum(jnp.sin(x @ w)),
        (features, features),
        ((steps, features), jnp.float32),
    )


def of_tied_head(words, features, steps):
    """A table that is looked up in, and is the head as well."""

    def loss(w, tokens):
        return jnp.sum(jax.nn.logsumexp(jnp.tanh(jnp.cumsum(w[tokens], 0)) @ w.T, -1))

    return way(loss, (words, features), ((steps,), jnp.int32))


def of_head(words, features, steps):
    def loss(w, hidden):
        return jnp.sum(jax.nn.logsumexp(hidden @ w.T, -1))

    return way(loss, (words, features), ((steps, features), jnp.float32))


# Timed side by side on two CPU cores, up to 8 examples at once: the way that took less time. Where
# they differed by less than a seventh neither is asked for.
@pytest.mark.parametrize(
    ("features", "short", "long"),
    [(64, (1, 2, 4), (32, 64, 128)), (256, (1, 16), (64, 128, 512)), (1024, (1, 16, 64), (256,))],
)
def test_a_layer_at_the_steps_that_were_measured(features, short, long):
    assert {of_layer(features, steps) for steps in short} == {"inner_products"}
    assert {of_layer(features, steps) for steps in long} == {"kept"}


@pytest.mark.parametrize(
    ("words", "features", "steps"),
    [(1024, 128, 64), (1024, 128, 256), (4096, 64, 32), (4096, 64, 256), (8192, 128, 64)],
)
def test_a_tied_head_at_the_steps_that_were_measured(words, features, steps):
    assert of_tied_head(words, features, steps) == "kept"


@pytest.mark.parametrize("of_steps", [of_head, of_tied_head])
def test_long_sequences_on_both_sides(of_steps):
    """What inner products cost grows with the square of the steps, as long as a vocabulary is."""
    for words, features in ((1024, 256), (50257, 768)):
        ways = [of_steps(words, features, steps) for steps in (2, 4, 256, 512, 1024)]
        assert ways == ["inner_products"] * 2 + ["kept"] * 3


def test_on_another_platform_what_is_moved_counts_more(monkeypatch):
    device = types.SimpleNamespace(platform="gpu", memory_stats=dict)
    on_cpu = [of_layer(1024, steps) for steps in (64, 128, 256)]
    assert on_cpu == ["inner_products", "kept", "kept"]
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert [of_layer(1024, steps) for steps in (128, 256)] == ["inner_products", "kept"]


def test_numbers_that_are_moved():
    size, met = 2**14, 70
    inner = LeafCost(("contraction",), "inner_products", 0, 0, 4 * met, "")
    kept = LeafCost(("contraction",), "kept", 0, 0, 4 * (met + size), "", 10)
    whole = LeafCost((), "whole", 0, 0, 4 * size, "")
    unused = LeafCost((), "unused", 0, 0, 0, "")
    # Of a few at once, or up to 4 MiB, no copies are made that count.
    for at_once, copies in ((1, 4), (few(size), 4), (few(size) + 1, 4), (64, 4), (65, 12)):
        assert inner.moved(size, at_once) == 11 * met
        assert kept.moved(size, at_once) == met + copies * size
        assert whole.moved(size, at_once) == copies * size
        assert kept.differentiated(size).moved(size, at_once) == (copies + 3) * size
        assert unused.moved(size, at_once) == unused.differentiated(size).moved(size, at_once) == 0
    large = few(2**20)
    assert few(size) < large
    assert kept.moved(2**20, large) < 4.1 * 2**20 < 11 * 2**20 < kept.moved(2**20, large + 1)


@pytest.mark.parametrize(
    ("loss", "copies"),
    [
        pytest.param(lambda w, x: jnp.sum(w[0] @ x), 1, id="as it is"),
        pytest.param(
            lambda w, x: jnp.sum(jax.lax.scan(lambda h, w: (jnp.tanh(w @ h), None), x, w)[0]),
            2,
            id="stacked by a scan",
        ),
        pytest.param(
            lambda w, x: jnp.sum((w / jnp.linalg.norm(w))[0] @ x), 2, id="through another value"
        ),
        pytest.param(lambda w, x: jnp.sum(jnp.tanh(w)[0] @ x), 1, id="entry by entry"),
    ],
)
def test_gradients_that_are_there_twice(loss, copies):
    """Where they are differentiated example by example: so compiled programs hold them."""
    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=1.0)
    batch = (jnp.zeros((4, 5)),)
    (cost,) = grad_fn.prepare(jnp.ones((3, 5, 5)), batch, None, None).traced.costs
    assert cost.copies == copies
    assert cost.differentiated(75).bytes == 4 * 75 * copies


def test_a_recurrent_matrix_is_not_added_up_at_every_step_of_every_example():
    """By the scan's own backward pass, where book-keeping adds up once."""

    def loss(w, x):
        return jnp.sum(jax.lax.scan(lambda h, x: (jnp.tanh(w @ h + x), None), x[0], x)[0])

    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=1.0)
    found = dp.explain(grad_fn, jnp.zeros((64, 64)), jnp.zeros((64, 200, 64)))
    assert found.method == "book_keeping"
    assert [row.way for row in found.rows] == ["kept"]
