"""What one example adds has, measured in float64, a norm of at most the clip norm.

Each example is alone in its batch and its gradient is brought to norm one, so that one program
serves numbers of any scale. Terms cancel among each other and with terms of parameters alone, and
numbers are as large or small as they go.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqx_dp as dp
from tests import models, oracle
from tests.tiers import METHODS, by_method

pytestmark = pytest.mark.optimized

SIZE = 4


def product(w, x, g, *_):
    """Its gradient with respect to the matrix is the sum over time of g_t (outer) x_t."""
    return jnp.sum((x @ w.T) * g)


def over_time(w, x, g, h, r):
    def step(total, now):
        x, g = now
        return total + jnp.vdot(w @ x, g) + h * jnp.sum(w**2) / 16, None

    return lax.scan(step, jnp.zeros((), x.dtype), (x, g))[0]


def convolved(w, x, g, h, r):
    """Windows of four, whose gradients overlap."""
    kernel = w.reshape(len(w), -1, 4)
    return jnp.sum(lax.conv(x.T[None, : kernel.shape[1]], kernel, (1,), "SAME")[0] * g.T)


def looked_up(w, x, g, h, r):
    return jnp.sum(w[r] * x * g[:, :1])


def penalised(w, x, g, h, r):
    return product(w, x, g) + h * jnp.sum(w**2) / 2


def penalised_twice(w, x, g, h, r):
    return penalised(w, x, g, h, r) + jnp.sum(jnp.abs(w)) + 1e-3 * jnp.sum((w.T @ w) ** 2)


MASK = np.random.default_rng(9).uniform(size=(5, 8)) > 0.4
SPREAD = (10.0 ** np.random.default_rng(8).integers(-18, 18, (5, 8))).astype(np.float32)

# The loss, the number of tokens, and the shape of the matrix.
USES = {
    "one token": (product, 1, (5, 8)),
    "tokens": (product, 16, (64, 48)),
    "many tokens": (product, 192, (1504, 1520)),
    "few entries": (product, 64, (5, 8)),
    "over time": (over_time, 6, (5, 8)),
    "convolution": (convolved, 7, (5, 8)),
    "lookups": (looked_up, 40, (5, 8)),
    "lookups of one row": (lambda w, x, g, h, r: looked_up(w, x, g, h, 0 * r), 40, (5, 8)),
    "tied": (lambda w, *its: looked_up(w, *its) + product(w, *its), 6, (5, 8)),
}
DERIVED = {
    "penalty": penalised,
    "norm": lambda w, x, g, h, r: product(w, x, g) + h * jnp.sqrt(jnp.sum(w**2) + 1e-30),
    "several": penalised_twice,
    "mask": lambda w, *its: penalised(w * MASK, *its),
    "scaled": lambda w, *its: product(w * SPREAD, *its),
    "exp": lambda w, *its: penalised(jnp.exp(w), *its),
    "with itself": lambda w, x, g, h, r: product(w, x, g) - product(w, jnp.sin(x), g),
    "beside itself": lambda w, x, g, h, r: (
        product(jnp.concatenate([w, w]), x, jnp.concatenate([g, -g], -1)) + product(w, x, g)
    ),
    "normalised": lambda w, *its: product(w / jnp.sqrt(jnp.sum(w**2) + 1e-30), *its),
    "centred": lambda w, *its: product(w - jnp.mean(w, 0), *its),
    "softmax": lambda w, x, g, h, r: product(jax.nn.softmax(w, 0), x, g) + h * jnp.sum(w),
    "differences": lambda w, *its: product(jnp.diff(w, axis=0, prepend=0), *its),
    "parts of sums": lambda w, x, g, h, r: (
        product(w + 1e4 * jnp.sum(w), x, g) - 1e4 * h * jnp.sum(w)
    ),
    "stopped": lambda w, *its: product(w - lax.stop_gradient(2 * w), *its),
    "chosen": lambda w, x, g, h, r: lax.cond(h > 0, penalised, penalised_twice, w, x, g, h, r),
    "complex": lambda w, x, g, h, r: jnp.sum(
        jnp.real((x + 1j * x) @ lax.complex(w, h * w).T) * g
    ),
}  # fmt: skip
LOSSES = {**USES, **{name: (loss, 5, (5, 8)) for name, loss in DERIVED.items()}}


# What the matrix, the tokens, their cotangents and the terms are multiplied by.
SCALES = {
    "ordinary": (1, 1, 1, 1),
    "factors that vanish": (1, 1e30, 1e-10, 1),
    "subnormal": (1, 1e-39, 1e30, 1),
    "huge": (1, 1e15, 1e14, 1),
    "tiny": (1, 1e-10, 1e-8, 1e-18),
    "no tokens": (1, 0, 1, 0),
    "huge parameters": (1e17, 1, 1, 1),
    "tiny parameters": (1e-30, 1, 1e-20, 1),
    "subnormal parameters": (1e-39, 1, 1, 1),
}


def attack(kind, time, shape):
    """A matrix and a batch."""
    rng = np.random.default_rng(time)
    out, inside = shape
    w = rng.normal(size=shape)
    x, g = rng.normal(size=(SIZE, time, inside)), rng.normal(size=(SIZE, time, out))
    h, r = rng.normal(size=SIZE), rng.integers(0, min(out, 7), (SIZE, time))
    half = time // 2
    match kind:
        case "tokens cancel":
            x[:, half : 2 * half], r[:, half : 2 * half] = x[:, :half], r[:, :half]
            g[:, half : 2 * half] = -g[:, :half] * (1 + 1e-6 * rng.normal(size=(SIZE, half, 1)))
            x[:, 2 * half :] *= 1e-6
        case "one pair of tokens cancels":
            x[:, :2, 0], g[:, 1:2] = 1e12, -g[:, : min(time - 1, 1)]
        case "equal tokens":
            # Every entry goes through the same roundings, in every example through others.
            x[:], g[:] = rng.uniform(1, 2, (2, SIZE, 1, 1))
        case "one huge":
            x[:, 0, 0] = 1e18
        case "one huge token":
            x[:, 0] *= 1e15
        case "lopsided":
            x *= 10.0 ** rng.integers(-18, 18, (SIZE, time, 1))
            g /= np.abs(x).max(axis=-1, keepdims=True)
        case "huge terms":
            h = h * 10.0 ** rng.integers(-25, 25, h.shape)
        case "parameters of all sizes":
            w = w * 10.0 ** rng.integers(-18, 16, w.shape)
        case "all but a constant":
            # Weights that are centred, or add up to one, leave next to nothing of it.
            g = 1e6 + 1e-3 * g
        case _ if kind.startswith("the term cancels"):
            x, g, h, w = against(w, x, g, float(kind.split()[-1]))
        case _:
            w, x, g, h = (a * scale for a, scale in zip((w, x, g, h), SCALES[kind], strict=True))
    return w, x, g, h, r


@functools.cache
def decomposed(time, shape):
    """The singular vectors and values of `attack`'s matrix, before it is scaled."""
    w = np.random.default_rng(time).normal(size=shape).astype(np.float32)
    return np.linalg.svd(w, full_matrices=False)


def against(w, x, g, scale):
    """Tokens whose gradient is the matrix's negative, but for a few digits: a penalty cancels."""
    w = (scale * w).astype(np.float32)
    left, values, right = decomposed(x.shape[1], w.shape)
    count = min(len(values), x.shape[1])
    noise = 1e-6 * np.random.default_rng(0).normal(size=(SIZE, count, 1)) if scale == 1 else 0
    x[:, :count] = right[:count] * (1 + noise)
    g[:, :count] = -(left * (scale * values)).T[:count]
    g[:, count:] = 0
    return x, g, np.ones(SIZE), w


ATTACKS = [
    *SCALES, "tokens cancel", "one pair of tokens cancels", "equal tokens", "one huge",
    "one huge token", "lopsided", "huge terms", "parameters of all sizes", "all but a constant",
    "the term cancels 1", "the term cancels 2", "the term cancels 1e15", "the term cancels 1e-18",
]  # fmt: skip


def shares(use, method, attacks=ATTACKS, policy=None):
    """What each example adds when it is alone and its gradient is brought to norm one."""
    loss, time, shape = use
    options = {"rescale_to_unit_norm": True, "method": method, "policy": policy}
    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=1e-20, **options)
    program, found = jax.jit(lambda *arrays: grad_fn(*arrays)), {}
    for kind in attacks:
        with np.errstate(over="ignore", under="ignore"):
            w, *floats, r = (np.asarray(x, np.float32) for x in attack(kind, time, shape))
        batch = (*floats, r.astype(np.int32))
        alone = [program(w, *(x[i : i + 1] for x in batch)) for i in range(SIZE)]
        found[kind] = np.array([np.linalg.norm(oracle.vector(grads)) for grads in alone])
        assert (found[kind] <= 1).all(), (kind, found[kind] - 1)
    return found


@pytest.mark.parametrize(
    ("name", "method"),
    by_method(USES, book_keeping=[x for x in USES if x != "many tokens"], per_example=("tokens",)),
)
def test_uses(name, method):
    share = shares(LOSSES[name], method)
    nearly = 0.999 if name == "many tokens" else 0.9999
    for kind in ("ordinary", "huge", "tiny"):
        assert (share[kind] >= nearly).all(), kind


@pytest.mark.parametrize("name", ["tokens", "one token", "lookups", "tied"])
def test_these_are_found_without_the_gradient(name):
    loss, time, shape = LOSSES[name]
    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=1.0, method="book_keeping")
    w, *batch = attack("ordinary", time, shape)
    assert dp.explain(grad_fn, jnp.float32(w), *batch).rows[0].way == "factored"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["book_keeping", "ghost"])
@pytest.mark.parametrize("name", DERIVED)
def test_derived_weights_and_terms(name, method):
    assert (shares(LOSSES[name], method)["ordinary"] >= 0.9999).all()


def composition(seed):
    """Two losses of one matrix, drawn at random, of which the second sees it bent."""
    names = [name for name, (*_, shape) in LOSSES.items() if shape == (5, 8)]
    one, other = (LOSSES[name] for name in np.random.default_rng(seed).choice(names, 2))
    bend = (jnp.sin, jax.checkpoint(jnp.tanh), jnp.abs, lambda w: 1e15 * w)[seed % 4]
    return lambda w, *its: one[0](w, *its) + other[0](bend(w), *its), *one[1:]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(8))
def test_compositions(seed, method):
    shares(composition(seed), method)


PRESETS = ["mixed_bfloat16", "mixed_float16", "bfloat16", "mixed_float8"]


@pytest.mark.parametrize(("preset", "method"), by_method(PRESETS, book_keeping=("mixed_bfloat16",)))
def test_narrow_policies(preset, method):
    attacks = ["ordinary", "tokens cancel", "equal tokens", "the term cancels 1"]
    share = shares(LOSSES["tokens"], method, attacks, dp.load_policy(preset))
    assert (share["ordinary"] >= 0.9999).all()


@pytest.mark.parametrize("method", METHODS)
def test_at_the_clip_norm_itself(method):
    """Gradients whose norm is the clip norm, or off by a rounding, on either side."""
    x = np.random.default_rng(3).normal(size=(64, 33))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    x = np.float32(x * (1 + np.linspace(-3e-7, 3e-7, 64))[:, None])
    grad_fn = jax.jit(dp.filter_clipped_grad(models.dot, l2_clip_norm=1.0, method=method))
    for row in x:
        assert 0.9999 <= np.linalg.norm(np.float64(grad_fn(jnp.zeros(33), row[None]))) <= 1
