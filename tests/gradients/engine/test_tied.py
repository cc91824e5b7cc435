"""Parameters with several uses: cross terms instead of per-example gradients."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equinox import nn
from jax import lax

import eqx_dp as dp
from eqx_dp.gradients.uses import overlaps
from tests.gradients.engine import agreement, models, uses
from tests.models import Case

pytestmark = pytest.mark.sampled(4)

TOKENS, WIDTH, WORDS = 4, 6, 9


def tied(w, x, t):
    return jnp.tanh(jax.vmap(lambda t: w[t])(t) + x) @ w.T


def tied_as_layers(w, x, t):
    """As layers of `eqx.nn`: a gather inside of vmap, and a weight from the left."""
    embedding = nn.Embedding(weight=w)
    head = eqx.tree_at(
        lambda m: m.weight, nn.Linear(WIDTH, WORDS, use_bias=False, key=jax.random.key(0)), w
    )
    return jax.vmap(lambda t, x: head(jnp.tanh(embedding(t) + x)))(t, x)


def over_time_and_outside(w, x, t):
    def step(state, now):
        state = jnp.tanh(w @ state + now)
        return state, state

    return lax.scan(step, x[0], jnp.sin(x @ w))[1]


def over_slices_and_time(w, x, t):
    """A stack of two matrices, gone over twice: once plainly, once at every step."""

    def layers(x):
        return lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, w)[0]

    return lax.scan(lambda state, now: (layers(state + now),) * 2, layers(x)[0], x)[1]


def cut_in_three(w, x, t):
    q, k, v = (jax.vmap(lambda x, w=w: w @ x)(x) for w in jnp.split(w, 3))
    return jax.nn.softmax(q @ k.T) @ v


def convolved_twice(w, x, t):
    def convolve(x):
        return lax.conv(x[None], w, (1,), "SAME")[0]

    return convolve(jnp.sin(convolve(x)))


# How a parameter is used, its shape, the kinds of its uses, and whether ghost is the way there.
CASES = {
    "embedding": (tied, (WORDS, WIDTH), "lookup contraction"),
    "embedding_layers": (tied_as_layers, (WORDS, WIDTH), "lookup contraction"),
    "embedding_upright": (
        lambda w, x, t: jnp.sin(w[t]) * jnp.sin(jnp.sin(x @ w.T) @ w),
        (WORDS, WIDTH),
        "lookup contraction contraction",
    ),
    "same_way": (
        lambda w, x, t: jnp.sin(x @ w) @ w, (WIDTH, WIDTH), "contraction contraction",
    ),
    "turned": (
        lambda w, x, t: jnp.sin(x @ w) @ w.T, (WIDTH, WORDS), "contraction contraction",
    ),
    "from_both_sides": (
        lambda w, x, t: (w @ jnp.sin(x @ w).T).T, (WIDTH, WIDTH), "contraction contraction",
    ),
    "lookups": (
        lambda w, x, t: w[t] * jnp.sin(w[t[::-1]]) - w[t[0]],
        (WORDS, WIDTH),
        "lookup lookup lookup",
    ),
    "lookup_that_is_dropped": (
        lambda w, x, t: jnp.sin(w.at[3 * t].get(mode="fill", fill_value=0.0) + x) @ w.T,
        (WORDS, WIDTH),
        "lookup contraction",
    ),
    "lookups_of_rows_and_columns": (
        lambda w, x, t: jnp.sin(w[t[:2]]) @ jnp.sin(w.T[t[2:] % WIDTH][:, :WIDTH]).T,
        (WORDS, WIDTH),
        "lookup lookup",
    ),
    "lookups_of_rows_and_columns_of_a_square": (
        lambda w, x, t: jnp.sin(w[t % WIDTH]) * w.T[t[::-1] % WIDTH],
        (WIDTH, WIDTH),
        "lookup lookup",
    ),
    "time": (over_time_and_outside, (WIDTH, WIDTH), "contraction contraction"),
    "slices": (over_slices_and_time, (2, WIDTH, WIDTH), "contraction contraction"),
    "rows_apart": (cut_in_three, (3 * WIDTH, WIDTH), "contraction contraction contraction"),
    "columns_apart": (
        lambda w, x, t: (x @ w[:, :5]) @ jnp.sin(x @ w[:, 5:]).T,
        (WIDTH, 10),
        "contraction contraction",
    ),
    "apart_and_together": (
        lambda w, x, t: jnp.sin(jnp.sin(x @ w[0]) @ w[1]) @ w[0].T,
        (2, WIDTH, WIDTH),
        "contraction contraction contraction",
    ),
    "convolution": (convolved_twice, (TOKENS, TOKENS, 3), "convolution convolution"),
}  # fmt: skip


def case_of(name, cases=CASES):
    use, shape, _ = cases[name]

    def loss(model, x, t):
        y = use(model["w"], x, t)
        return jnp.sum(jnp.cos(jnp.arange(y.size)).reshape(y.shape) * y) + jnp.sum(model["b"] * x)

    def draw(rng, size):
        x = jnp.asarray(rng.normal(size=(size, TOKENS, WIDTH)), jnp.float32)
        return x, jnp.asarray(rng.integers(0, WORDS, (size, TOKENS)), jnp.int32)

    numbers = 0.5 * np.random.default_rng(7).normal(size=shape)
    model = {"b": jnp.ones(WIDTH), "w": jnp.asarray(numbers, jnp.float32)}
    return Case(name, model, loss, draw)


def costs(case):
    """The cost of every leaf, by its path."""
    return uses.costs(case)


def ghosts(case):
    """Whether every leaf's norm can be had without forming its gradient."""
    paths, found = uses.uses_of(case.loss, case.model, *case.batch(2))
    return {
        path: bool(of and overlaps(tuple(of.values())))
        for path, of in zip(paths, found.of, strict=True)
    }


@pytest.mark.sampled(12)
@agreement.EACH_METHOD
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_oracle(name, method, monkeypatch):
    case = case_of(name)
    assert ghosts(case)["['w']"]
    uses.force(monkeypatch, "factored")
    agreement.check(case, by_leaf=True, methods=[method])


@pytest.mark.slow
@agreement.EACH_METHOD
def test_a_stacked_transformer(method, monkeypatch):
    """The embedding is the head; between them a scan of checkpoints."""
    case = models.stacked_gpt()
    assert ghosts(case)[".embedding.weight"]
    uses.force(monkeypatch, "factored")
    agreement.check(case, size=4, by_leaf=True, methods=[method])
    assert costs(case)[".embedding.weight"].way == "factored"


# Uses that overlap in a way that has no name: those are added up, as they ever were.
OTHERWISE = {
    "overlap": (lambda w, x, t: (x @ w[:4].T) @ (x @ w[2:].T).T, (6, WIDTH)),
    "other_order": (
        lambda w, x, t: (x @ w) @ (x @ w.reshape(2, 3, WIDTH).transpose(1, 0, 2).reshape(6, -1)).T,
        (WIDTH, WIDTH),
    ),
    "reversed": (lambda w, x, t: jnp.sin(x @ w) @ w[::-1], (WIDTH, WIDTH)),
    "alternating": (lambda w, x, t: (x @ w[:, ::2]) @ jnp.sin(x @ w[:, 1::2]).T, (WIDTH, 6)),
    "scaled": (lambda w, x, t: jnp.sin(x @ w) * w[0], (WIDTH, WIDTH)),
    "repeated": (
        lambda w, x, t: jnp.sin(x @ w) @ jnp.broadcast_to(w[0], (WIDTH, WIDTH)), (WIDTH, WIDTH),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERWISE)
def test_other_overlaps_are_added_up(name):
    use, shape = OTHERWISE[name]
    case = case_of(name, {name: (use, shape, "")})
    cost = costs(case)["['w']"]
    assert cost.way == "formed"
    agreement.check(case, by_leaf=True)


def test_what_is_said_of_a_tied_embedding():
    case = case_of("embedding")
    (_, row) = dp.explain(
        dp.filter_clipped_grad(case.loss, l2_clip_norm=1.0), case.model, *case.batch(3)
    ).rows
    assert row.kinds == ("lookup", "contraction")
    assert row.way == "factored"
    assert row.reason == "8 steps: their inner products are cheaper than 54 entries"


def test_many_steps_are_added_up():
    """Where inner products cost more than the table has entries, the table is formed."""
    case = case_of("embedding")
    x, t = case.batch(2)
    long = Case("long", case.model, case.loss, lambda rng, size: (
        jnp.tile(x, (1, 8, 1)), jnp.tile(t, (1, 8)),
    ))  # fmt: skip
    cost = costs(long)["['w']"]
    assert cost.way == "formed"
    assert cost.reason == "64 steps: forming 54 entries is cheaper than their inner products"


def test_only_lookups_never_form_the_table():
    assert costs(case_of("lookups"))["['w']"].way == "factored"


@pytest.mark.parametrize("name", [name for name in CASES if name != "convolution"])
def test_ghost_is_chosen(name):
    """Nothing is held but what uses keep (the kernel is too small for that to pay)."""
    case = case_of(name)
    cost = costs(case)["['w']"]
    _, found = uses.uses_of(case.loss, case.model, *case.batch(2))
    held = jax.tree.leaves([(use.result, use.residuals) for use in found.of[1].values()])
    assert cost.way == "factored"
    assert cost.bytes == sum(4 * shape.size for shape in held)
