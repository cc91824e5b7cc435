"""What one example adds has, measured in float64, a norm of at most the clip norm."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_dp as dp
from eqx_dp.gradients.gram import OuterProducts, gram_norms, row_norms
from tests import models
from tests.gradients.engine import uses

pytestmark = [pytest.mark.optimized, pytest.mark.sampled(5)]

METHODS = ["per_example", "book_keeping", "ghost"]


def lengths(*usual, slow):
    """Numbers of terms: each is a program of its own, so that some are exhaustive cases."""
    return [*usual, *(pytest.param(length, marks=pytest.mark.exhaustive) for length in slow)]


def added(grads):
    """The exact norm of a gradient."""
    leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(grads)]
    return np.linalg.norm(np.concatenate(leaves))


def matrix(model, x, g):
    """The gradient is the sum over time of g_t (outer) x_t."""
    return jnp.sum(jax.vmap(lambda x: model @ x)(x) * g)


def one_at_a_time(loss, model, *batch, clip_norm, method, policy=None):
    """The norm that each example adds when it is alone."""
    grad_fn = eqx.filter_jit(
        dp.filter_value_and_clipped_grad(loss, l2_clip_norm=clip_norm, method=method, policy=policy)
    )
    results = [grad_fn(model, *(x[i : i + 1] for x in batch)) for i in range(len(batch[0]))]
    return np.array([added(grads) for _, grads in results]), np.array(
        [float(per_example.grad_norm[0]) for per_example, _ in results]
    )


def tokens(time, kind, seed=0):
    rng = np.random.default_rng(seed)
    x, g = rng.normal(size=(6, time, 8)), rng.normal(size=(6, time, 5))
    if kind == "cancelling":
        half = time // 2
        x[:, half : 2 * half] = x[:, :half]
        g[:, half : 2 * half] = -g[:, :half] * (1 + 1e-6 * rng.normal(size=(6, half, 1)))
    if kind == "aligned":
        x[:], g[:] = 0.1 + x[:, :1], 0.1 + g[:, :1]
    if kind == "one huge":
        x[:, 0, 0] = 1e15
    if kind == "tiny":
        x *= 1e-18
        g *= 1e-12
    if kind == "huge":
        x *= 1e15
        g *= 1e14
    return jnp.asarray(x, jnp.float32), jnp.asarray(g, jnp.float32)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("time", [1, 7, 256])
def test_sums_over_time(time, method):
    kinds = ["random", "cancelling", "aligned", "one huge", "tiny", "huge"]
    attacks = {kind: (tokens(time, kind), 1e-31 if kind == "tiny" else 0.1) for kind in kinds}
    share = shares(matrix, jnp.zeros((5, 8)), attacks, method=method)
    for kind in kinds:
        assert (share[kind] > 0).all(), kind
    for kind in ("random", "aligned", "one huge"):
        assert (share[kind] >= 0.9999).all(), kind


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "make", [models.mlp, pytest.param(models.cnn, marks=pytest.mark.exhaustive)]
)
def test_models_keep_within_and_near_the_clip_norm(make, method):
    case = make()
    norms, before = one_at_a_time(
        case.loss, case.model, *case.batch(6), clip_norm=0.37, method=method
    )
    assert (norms <= 0.37).all()
    assert (norms[before > 0.4] >= 0.9999 * 0.37).all()
    assert (before > 0.4).any()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("preset", ["mixed_bfloat16", "mixed_float16", "bfloat16"])
def test_narrow_policies(preset, method):
    policy = dp.load_policy(preset)
    x, g = tokens(64, "random")
    norms, _ = one_at_a_time(
        matrix, jnp.zeros((5, 8)), x, g, clip_norm=0.1, method=method, policy=policy
    )
    assert (norms <= 0.1).all()
    assert (norms >= 0.99 * 0.1).all()


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [1, 31, 4096, 100_003])
def test_long_gradients_of_equal_entries(size, method):
    """The worst case for a long sum: every rounding goes the same way."""
    x = jnp.full((2, size), 0.1) * jnp.array([[1.0], [3.0]])
    norms, before = one_at_a_time(models.dot, jnp.zeros(size), x, clip_norm=0.3, method=method)
    exact = np.linalg.norm(np.asarray(x, np.float64), axis=1)
    np.testing.assert_allclose(before, exact, rtol=5e-6)
    assert (norms <= 0.3).all()
    assert (norms[exact > 0.3] >= 0.9999 * 0.3).all()


@pytest.mark.parametrize("method", METHODS)
def test_at_the_clip_norm_itself(method):
    """Gradients whose norm is the clip norm, or off by a rounding, on either side."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(64, 33))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    x = jnp.asarray(x * (1 + np.linspace(-3e-7, 3e-7, 64))[:, None], jnp.float32)
    norms, _ = one_at_a_time(models.dot, jnp.zeros(33), x, clip_norm=1.0, method=method)
    assert (norms <= 1.0).all()


# Attacks on the norms that are found without the gradient. That way is taken whatever it costs.


@pytest.fixture
def ghost(monkeypatch):
    uses.force(monkeypatch, "factored")


def shares(loss, model, attacks, policy=None, method="book_keeping"):
    """The norm that each example adds when it is alone, by the clip norm; attack by attack."""
    programs, found = {}, {}
    for kind, (batch, clip_norm) in attacks.items():
        if clip_norm not in programs:
            grad_fn = dp.filter_clipped_grad(
                loss, l2_clip_norm=clip_norm, method=method, policy=policy
            )
            # A jit of its own: no other test's program, which may go another way, is served.
            programs[clip_norm] = jax.jit(lambda *batch, grad_fn=grad_fn: grad_fn(model, *batch))
        examples = ([x[i : i + 1] for x in batch] for i in range(len(batch[0])))
        alone = [added(programs[clip_norm](*example)) for example in examples]
        found[kind] = np.array(alone) / clip_norm
        assert (found[kind] <= 1).all(), kind
    return found


def float32(*arrays):
    return tuple(jnp.asarray(array, jnp.float32) for array in arrays)


def equal_tokens(time, size, seed=0):
    """Every entry of the sum goes through the same roundings, in every example through others."""
    rng = np.random.default_rng(seed)
    constants = rng.uniform(1, 2, (2, size, 1, 1))
    return np.broadcast_to(constants[0], (size, time, 8)), np.broadcast_to(
        constants[1], (size, time, 5)
    )


def hostile_tokens(time, kind):
    """Tokens, and the order of their gradient's norm."""
    rng = np.random.default_rng(time)
    x, g = rng.normal(size=(8, time, 8)), rng.normal(size=(8, time, 5))
    half = time // 2
    match kind:
        case "equal":
            return *equal_tokens(time, 8), 1
        case "cancelling":
            x[:, half : 2 * half] = x[:, :half]
            g[:, half : 2 * half] = -g[:, :half] * (1 + 1e-6 * rng.normal(size=(8, half, 1)))
            x[:, 2 * half :] *= 1e-6
            return x, g, 1e-6
        case "one huge":
            x[:, 0, 0] = 1e18
            return x, g, 1e18
        case "one cancelled":
            x[:, :2, 0], g[:, 1:2] = 1e12, -g[:, : min(time - 1, 1)]
        case "tiny":
            return x * 1e-18, g * 1e-12, 1e-30
        case "huge":
            return x * 1e18, g * 1e12, 1e30
        case "lopsided":
            # A pair of large products that cancel, and ordinary ones far out of scale.
            x *= 10.0 ** rng.integers(-18, 18, (8, time, 1))
            g /= np.abs(x).max(axis=-1, keepdims=True)
        case "factors that vanish":
            # A large x, and a factor x g below the normal numbers.
            return x * 1e30, g * 1e-10, 1e20
        case "subnormal":
            return x * 1e-39, g * 1e30, 1e-9
    return x, g, 1


HOSTILE = [
    "random", "equal", "cancelling", "one huge", "one cancelled", "tiny", "huge", "lopsided",
    "factors that vanish", "subnormal",
]  # fmt: skip


@pytest.mark.parametrize("time", lengths(33, slow=[1, 2, 256]))
def test_ghost_norms_under_attack(time, ghost):
    attacks = {}
    for kind in HOSTILE:
        x, g, order = hostile_tokens(time, kind)
        relative = 1e-32 if kind == "factors that vanish" else 0.1
        attacks[kind] = float32(x, g), relative * order
    share = shares(matrix, jnp.zeros((5, 8)), attacks)
    for kind in ("random", "equal", "one huge", "huge", "tiny"):
        assert (share[kind] >= (0.9999 if time < 256 else 0.999)).all(), kind


@pytest.mark.parametrize("time", lengths(7, 2048, slow=[2, 33, 100, 256]))
def test_every_rounding_the_same_way(time, ghost):
    """Many constants: some of them have all of a long sum's roundings go up."""
    attacks = {"equal": (float32(*equal_tokens(time, 200, seed=1)), 0.1)}
    share = shares(matrix, jnp.zeros((5, 8)), attacks)
    assert (share["equal"] >= (0.9999 if time <= 100 else 0.99)).all()


@pytest.mark.parametrize("time", [33, 256, 2048])
def test_bounds_hold_for_sums_term_by_term(time):
    """The order in which sums are at their worst, whichever this machine's products take."""
    x, g = (np.array(x, np.float32) for x in equal_tokens(time, 200, seed=2))
    bounds = jax.jit(
        lambda x, g: jax.lax.map(
            lambda one: gram_norms([OuterProducts(one[0][None, None], one[1][None, None])])[1][0],
            (x, g),
        )
    )(x, g)
    products = x[:, :, 0] * g[:, :, 0]
    added = np.cumsum(products, axis=1, dtype=np.float32)[:, -1].astype(np.float64)
    assert (added * np.sqrt(8 * 5) <= np.asarray(bounds, np.float64)).all()


@pytest.mark.slow
@pytest.mark.parametrize("time", lengths(256, slow=[33, 1024]))
def test_bounds_of_rows_hold_for_sums_term_by_term(time):
    """All lookups are of one row, and their values equal."""
    _, g = (np.array(x, np.float32) for x in equal_tokens(time, 200 if time < 1000 else 20, seed=3))
    rows = jnp.zeros((1, 1, time), jnp.int32)
    bounds = jax.jit(lambda g: jax.lax.map(lambda one: row_norms(rows, one[None, None])[1][0], g))(
        g
    )
    added = np.cumsum(g[:, :, 0], axis=1, dtype=np.float32)[:, -1].astype(np.float64)
    assert (added * np.sqrt(5) <= np.asarray(bounds, np.float64)).all()


@pytest.mark.parametrize(
    "preset",
    ["mixed_bfloat16", "bfloat16", pytest.param("mixed_float16", marks=pytest.mark.exhaustive)],
)
def test_ghost_norms_in_narrow_policies(preset, ghost):
    attacks = {}
    for kind in ("random", "equal", "cancelling", "one huge"):
        x, g, order = hostile_tokens(33, kind)
        attacks[kind] = float32(np.clip(x, -1e3, 1e3), g), 0.1 * min(order, 1)
    share = shares(matrix, jnp.zeros((5, 8)), attacks, policy=dp.load_policy(preset))
    for kind in ("random", "equal", "one huge"):
        assert (share[kind] >= 0.9999).all(), kind


@pytest.mark.slow
def test_ghost_norms_of_wide_tokens(ghost):
    """Ordinary data of an ordinary width is clipped to the clip norm, within 1e-4."""
    tokens = np.random.default_rng(0).normal(size=(2, 2, 128, 256))
    share = shares(matrix, jnp.zeros((256, 256)), {"random": (float32(*tokens), 1.0)})
    assert (share["random"] >= 0.9999).all()


def looked_up(table, rows, g):
    return jnp.sum(table[rows] * g)


@pytest.mark.slow
@pytest.mark.parametrize("time", lengths(256, slow=[1, 2, 33]))
def test_lookups_under_attack(time, ghost):
    """Of one row again and again, and of several; the values of one row cancel."""
    attacks = {}
    for spread in (1, 7):
        rows = np.random.default_rng(0).integers(0, spread, (8, time))
        for kind in ("random", "equal", "cancelling", "one huge", "huge", "tiny"):
            _, g, order = hostile_tokens(time, kind)
            if kind == "one huge":
                g[:, 0, 0] = order
            if kind in ("huge", "tiny"):
                g = g * (order / np.abs(g).max())
            if kind == "cancelling":
                rows = rows.copy()
                rows[:, time // 2 : time // 2 * 2] = rows[:, : time // 2]
            attacks[kind, spread] = (jnp.asarray(rows), *float32(g)), 1e-3 * order
    share = shares(looked_up, jnp.zeros((9, 5)), attacks)
    for (kind, spread), norms in share.items():
        # Of one row, looked up 256 times, next to nothing may be left.
        nearly = 0.9999 if time < 256 or spread > 1 else 0.999
        assert kind == "cancelling" or (norms >= nearly).all(), kind


def tied(table, rows, g, x, h):
    return jnp.sum(table[rows] * g) + jnp.sum((x @ table.T) * h)


@pytest.mark.slow
@pytest.mark.parametrize("time", lengths(33, slow=[1, 256]))
def test_tied_weights_under_attack(time, ghost):
    """A table that is looked up, and contracted with what takes the same entries back."""
    rng = np.random.default_rng(time)
    rows = rng.integers(0, 9, (8, time))
    g, x, h = (rng.normal(size=(8, time, n)) for n in (5, 5, 9))
    back = g * (1 + 1e-6 * rng.normal(size=(8, time, 1))), -np.eye(9)[rows]
    scale = 10.0 ** rng.integers(-18, 18, (8, time, 1))
    attacks = {
        "random": ((g, x, h), 0.1),
        "cancelling": ((g, *back), 1e-7),
        "lopsided": ((g, x * scale, h / scale), 0.1),
        "huge": ((g * 1e30, x * 1e10, h * 1e20), 1e29),
    }
    attacks = {
        kind: ((jnp.asarray(rows), *float32(*batch)), clip_norm)
        for kind, (batch, clip_norm) in attacks.items()
    }
    share = shares(tied, jnp.zeros((9, 5)), attacks)
    for kind in ("random", "lopsided", "huge"):
        assert (share[kind] >= (0.9999 if time < 256 else 0.999)).all(), kind
