"""What one example adds keeps to the clip norm where parameters alone make weights and terms.

A term of parameters alone is the same for every example: an example's own gradient may all but
cancel it, and either may be as large or small as numbers go.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_dp as dp
from tests.gradients.engine import uses
from tests.gradients.test_clip_holds import added, float32

pytestmark = [pytest.mark.optimized, pytest.mark.sampled(8)]

SIZE, OUT, IN = 6, 5, 8
METHODS = pytest.mark.parametrize(
    "method", ["book_keeping", pytest.param("ghost", marks=pytest.mark.exhaustive)]
)
WAYS = pytest.mark.parametrize(
    "way", ["chosen", pytest.param("factored", marks=pytest.mark.exhaustive)]
)
SPREAD = (10.0 ** np.random.default_rng(8).integers(-18, 18, (OUT, IN))).astype(np.float32)
MASK = (np.random.default_rng(9).uniform(size=(OUT, IN)) > 0.4).astype(np.float32)


def product(w, x, g):
    """Its gradient with respect to the matrix is the sum over time of g_t (outer) x_t."""
    return jnp.sum((x @ w.T) * g)


def penalised(w, x, g, h):
    return product(w, x, g) + h * jnp.sum(w**2) / 2


def penalised_in_full(w, x, g, h):
    return product(w, x, g) + jnp.sum(w**2) / 2


def penalised_under_a_root(w, x, g, h):
    return product(w, x, g) + h * jnp.sqrt(jnp.sum(w**2) + 1e-30)


def penalised_over_time(w, x, g, h):
    def step(total, now):
        x, g = now
        return total + jnp.vdot(w @ x, g) + h * jnp.sum(w**2) / 16, None

    return jax.lax.scan(step, jnp.zeros((), x.dtype), (x, g))[0]


def penalised_twice(w, x, g, h):
    return penalised(w, x, g, h) + jnp.sum(jnp.abs(w)) + 1e-3 * jnp.sum((w.T @ w) ** 2)


LOSSES = {
    "penalty by data": penalised,
    "penalty": penalised_in_full,
    "penalty over time": penalised_over_time,
    "norm": penalised_under_a_root,
    "several": penalised_twice,
    "mask": lambda w, x, g, h: product(w * MASK, x, g) + h * jnp.sum((w * MASK) ** 2) / 2,
    "where": lambda w, x, g, h: product(jnp.where(MASK > 0, w, 0), x, g),
    "scaled": lambda w, x, g, h: product(w * SPREAD, x, g),
    "exp": lambda w, x, g, h: product(jnp.exp(w), x, g) + h * jnp.sum(jnp.exp(w)),
    "with itself": lambda w, x, g, h: product(w, x, g) + product(-w, jnp.sin(x),
        g) + h * jnp.sum(w),
    "beside itself": lambda w, x, g, h: (
        product(jnp.concatenate([w, w]), x, jnp.concatenate([g, -g], -1)) + product(w, x, g)
    ),
    "normalised": lambda w, x, g, h: product(w / jnp.sqrt(jnp.sum(w**2) + 1e-30), x, g),
    "centred": lambda w, x, g, h: product(w - jnp.mean(w, 0), x, g),
    "softmax": lambda w, x, g, h: product(jax.nn.softmax(w, 0), x, g) + h * jnp.sum(w),
    "differences": lambda w, x, g, h: product(jnp.diff(w, axis=0, prepend=0), x, g),
    "parts of sums": lambda w, x, g, h: product(w + 1e4 * jnp.sum(w), x, g) - 1e4 * h * jnp.sum(w),
    "stopped": lambda w, x, g, h: product(w - jax.lax.stop_gradient(2 * w), x, g),
    "chosen": lambda w, x, g, h: jax.lax.cond(h > 0, penalised, penalised_twice, w, x, g, h),
    "complex": lambda w, x, g, h: jnp.sum(jnp.real((x + 1j * x) @ jax.lax.complex(w, h * w).T) * g),
}  # fmt: skip


def cancelling(w, noise):
    """Tokens whose gradient is the matrix's negative, but for noise."""
    left, values, right = np.linalg.svd(w, full_matrices=False)
    x = np.broadcast_to(right, (SIZE, OUT, IN)).copy()
    g = np.broadcast_to(-(left * values).T, (SIZE, OUT, OUT)).copy()
    rng = np.random.default_rng(0)
    return x * (1 + noise * rng.normal(size=(SIZE, OUT, 1))), g, np.ones(SIZE)


def attack(kind):
    """A matrix and a batch."""
    rng = np.random.default_rng(1)
    w = rng.normal(size=(OUT, IN))
    x, g = rng.normal(size=(SIZE, OUT, IN)), rng.normal(size=(SIZE, OUT, OUT))
    h = rng.normal(size=SIZE)
    match kind:
        case "cancelling":
            x, g, h = cancelling(w, 1e-6)
        case "cancelling to the last digit":
            x, g, h = cancelling(w.astype(np.float32), 0)
        case "cancelling, huge":
            w = w * 1e15
            x, g, h = cancelling(w, 1e-7)
        case "cancelling, tiny":
            w = w * 1e-18
            x, g, h = cancelling(w, 1e-7)
        case "huge parameters":
            w = w * 1e17
        case "tiny parameters":
            w, g = w * 1e-30, g * 1e-20
        case "subnormal parameters":
            w = w * 1e-39
        case "all sizes":
            w = w * 10.0 ** rng.integers(-18, 16, w.shape)
        case "huge data":
            x, g = x * 1e15, g * 1e14
        case "tiny data":
            x, g, h = x * 1e-8, g * 1e-8, h * 1e-16
        case "huge weights of a term":
            h = h * 10.0 ** rng.integers(-25, 25, h.shape)
        case "aligned":
            # Weights that are centred, or add up to one, leave next to nothing of it.
            g = 1e6 + 1e-3 * g
        case "aligned, cancelling":
            x[:, 1::2], g[:, 1::2] = x[:, :-1:2], -1e6 + 1e-2 * g[:, :-1:2]
            g[:, ::2] = 1e6
        case "zeros":
            x, h = 0 * x, 0 * h
    return w, x, g, h


ATTACKS = (
    "ordinary", "cancelling", "cancelling to the last digit", "cancelling, huge",
    "cancelling, tiny", "huge parameters", "tiny parameters", "subnormal parameters", "all sizes",
    "huge data", "tiny data", "huge weights of a term", "zeros",
    "aligned", "aligned, cancelling",
)  # fmt: skip


def unit_shares(loss, kinds, method, policy=None):
    """What each example adds when it is alone and its gradient is brought to norm one."""
    grad_fn = dp.filter_clipped_grad(
        loss, l2_clip_norm=1e-20, rescale_to_unit_norm=True, method=method, policy=policy
    )
    program = jax.jit(lambda *arrays: grad_fn(*arrays))
    found = {}
    for kind in kinds:
        w, *batch = float32(*attack(kind))
        alone = [program(w, *(x[i : i + 1] for x in batch)) for i in range(SIZE)]
        found[kind] = np.array([added(grads) for grads in alone])
        assert (found[kind] <= 1).all(), (kind, found[kind])
    return found


@pytest.mark.sampled(48)
@METHODS
@WAYS
@pytest.mark.parametrize("name", LOSSES)
def test_hostile_numbers(name, way, method, monkeypatch):
    if way != "chosen":
        uses.force(monkeypatch, way)
    share = unit_shares(LOSSES[name], ATTACKS, method)
    assert (share["ordinary"] >= 0.9999).all()


@pytest.mark.sampled(48)
@METHODS
@pytest.mark.parametrize("name", ["penalty by data", "several", "mask", "exp", "normalised"])
@pytest.mark.parametrize("preset", ["mixed_bfloat16", "bfloat16", "mixed_float16"])
def test_narrow_policies(preset, name, method):
    kinds = ("ordinary", "cancelling", "cancelling to the last digit")
    unit_shares(LOSSES[name], kinds, method, dp.load_policy(preset))
