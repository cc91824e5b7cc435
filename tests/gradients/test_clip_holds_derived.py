"""As `test_clip_holds`, where parameters reach data as masked, scaled or penalised values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_dp as dp
from eqx_dp.gradients.linear_maps import LinearMap, Step, size_of
from eqx_dp.gradients.mapped_products import mapped_products
from eqx_dp.gradients.weighted_products import weighted_products
from tests.gradients.engine import uses
from tests.gradients.test_clip_holds import added, float32, hostile_tokens, lengths, shares

pytestmark = [pytest.mark.optimized, pytest.mark.sampled(6)]

SIZE = 8


@pytest.fixture(autouse=True)
def inner_products(monkeypatch):
    uses.force(monkeypatch, "inner_products")


def weighted(weights):
    """The gradient is the weights, entry by entry, times one outer product."""

    def loss(model, x, g):
        return jnp.sum(((weights * model) @ x) * g)

    return loss


def vectors(kind, weights):
    """One example's sides, and the order of the norm of their weighted product."""
    rng = np.random.default_rng(3)
    x, g = rng.normal(size=(SIZE, 8)), rng.normal(size=(SIZE, 5))
    match kind:
        case "huge":
            x, g = x * 1e18, g * 1e12
        case "tiny":
            x, g = x * 1e-18, g * 1e-12
        case "lopsided":
            x, g = (
                x * 10.0 ** rng.integers(-9, 9, x.shape),
                g * 10.0 ** rng.integers(-9, 9, g.shape),
            )
        case "huge and tiny":
            x, g = x * 1e30, g * 1e-30
        case "huge where weights are zero":
            x[:, 0] = 1e25
        case "subnormal":
            x, g = x * 1e-39, g * 1e30
    exact = np.linalg.norm(weights * g[:, :, None] * x[:, None, :], axis=(1, 2))
    return *float32(x, g), 0.1 * exact.min()


WEIGHTS = {
    "mask": lambda rng: rng.random((5, 8)) > 0.4,
    "numbers": lambda rng: rng.normal(size=(5, 8)),
    "far apart": lambda rng: 10.0 ** rng.integers(-15, 15, (5, 8)),
    "huge": lambda rng: 1e30 * rng.normal(size=(5, 8)),
}
VECTORS = (
    "random", "huge", "tiny", "lopsided", "huge and tiny", "huge where weights are zero",
    "subnormal",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["book_keeping", pytest.param("ghost", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("name", WEIGHTS)
def test_weighted_products(name, method):
    weights = np.array(WEIGHTS[name](np.random.default_rng(1)), np.float32)
    weights[:, 0] = 0
    kinds = [kind for kind in VECTORS if (kind, name) not in (("huge", "huge"), ("tiny", "tiny"))]
    attacks = {}
    for kind in kinds:
        x, g, clip_norm = vectors(kind, weights)
        attacks[kind] = (x, g), float(np.clip(clip_norm, 1e-20, 1e30))
    share = shares(weighted(weights), jnp.zeros((5, 8)), attacks, method=method)
    for kind in ("random", "huge and tiny"):
        assert (share[kind] >= 0.9999).all(), kind


@pytest.mark.slow
def test_wide_weighted_products():
    """The bound of an ordinary layer is near its norm."""
    rng = np.random.default_rng(0)
    weights = rng.random((300, 700)) > 0.5
    x, g = rng.normal(size=(2, 700)), rng.normal(size=(2, 300))
    share = shares(weighted(weights), jnp.zeros((300, 700)), {"random": (float32(x, g), 1.0)})
    assert (share["random"] >= 0.9999).all()


def test_bounds_of_weighted_products_hold_for_sums_term_by_term():
    """The order in which sums are at their worst, whichever this machine's products take."""
    size = 1024
    weights = np.sqrt(1 + np.linspace(2**-16, 2**-14, 64)).astype(np.float32)
    squares = np.square(weights)
    worst = np.cumsum(np.tile(squares[:, None], size), axis=1, dtype=np.float32)[:, -1]
    each = np.argmax(size * squares.astype(np.float64) / worst)
    norm, bound, _ = jax.jit(weighted_products)(
        jnp.ones((1, 1, size)), jnp.ones((1, 1, 1)), jnp.full((1, 1, size), weights[each])
    )
    lost = size * np.float64(squares[each]) / worst[each]
    assert lost > 1 + 1e-5
    assert np.float64(bound[0] / norm[0]) ** 2 >= lost


def normed(model, x, g):
    """One product with a matrix whose rows have length one each."""
    return jnp.sum((model / jnp.linalg.norm(model, axis=1, keepdims=True) @ x) * g)


def weight_normed(model, x, g):
    """The same, with lengths that are parameters, too."""
    return normed(model["v"], x, g * model["g"])


MAPPED = (
    "random",
    "huge",
    "tiny",
    "lopsided",
    "huge and tiny",
    "subnormal",
    "along",
    "nearly along",
)


def mapped_vectors(model, kind):
    """One example's sides, and the order of the norm of what the map makes of their product."""
    if "along" not in kind:
        return vectors(kind, np.ones_like(model))
    rng = np.random.default_rng(5)
    # Of a matrix of one row, nearly nothing is left.
    x = np.broadcast_to(model[0], (SIZE, model.shape[1])) * rng.uniform(1, 2, (SIZE, 1))
    if kind == "nearly along":
        x = x * (1 + 1e-6 * rng.normal(size=x.shape))
    g = rng.normal(size=(SIZE, 1)) * np.eye(len(model))[0]
    return *float32(x, g), 1e-8


@pytest.mark.sampled(4)
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e12, 1e-12])
@pytest.mark.parametrize(
    "method", ["book_keeping", pytest.param("ghost", marks=pytest.mark.exhaustive)]
)
def test_mapped_products(scale, method):
    """A norm of rows takes off what lies along them; what it does not is off by rounding."""
    rng = np.random.default_rng(4)
    model = np.asarray(scale * rng.normal(size=(5, 8)), np.float32)
    attacks = {}
    for kind in MAPPED:
        x, g, clip_norm = mapped_vectors(model / scale, kind)
        attacks[kind] = (x, g), float(np.clip(clip_norm / scale, 1e-20, 1e25))
    share = shares(normed, jnp.asarray(model), attacks, method=method)
    for kind in ("random", "huge and tiny"):
        # With rows of 1e-12 there are numbers of 1e24 on the way.
        assert (share[kind] >= (0.9999 if scale > 1e-12 else 0)).all(), kind


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "method", ["book_keeping", pytest.param("ghost", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("width", [8, pytest.param(1500, marks=pytest.mark.slow)])
def test_weight_norm(width, method):
    """The bound of an ordinary layer is near its norm."""
    rng = np.random.default_rng(0)
    model = {"v": rng.normal(size=(10, width)), "g": rng.normal(size=10)}
    model = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), model)
    x, g = rng.normal(size=(4, width)), rng.normal(size=(4, 10))
    share = shares(weight_normed, model, {"random": (float32(x, g), 0.1)}, method=method)
    assert (share["random"] >= 0.9998).all()


def test_maps_that_nearly_take_all_back():
    """What is left of a wide product is beyond the digits of inner products."""
    rng = np.random.default_rng(8)
    model = np.asarray(rng.normal(size=(1, 1000)), np.float32)
    for order in (1e-3, 1e-4):
        x = model * (1 + order * rng.normal(size=(SIZE, 1000)))
        batch = float32(x, rng.normal(size=(SIZE, 1)))
        shares(normed, jnp.asarray(model), {order: (batch, 1e-7)})


@pytest.mark.slow
def test_bounds_of_mapped_products_hold_for_sums_term_by_term():
    """As of weighted products: a map that multiplies by the same number everywhere."""
    size, shape = 1024, (1, 1024)
    weights = np.sqrt(1 + np.linspace(2**-16, 2**-14, 64)).astype(np.float32)
    squares = np.square(weights)
    worst = np.cumsum(np.tile(squares[:, None], size), axis=1, dtype=np.float32)[:, -1]
    each = np.argmax(size * squares.astype(np.float64) / worst)
    times = LinearMap((Step("times", (0,)),), 1, [jnp.full(shape, weights[each])])
    x, g = jnp.ones(shape), jnp.ones((1, 1))
    sizes = size_of(times, shape, np.dtype(np.float32))
    norm, bound, _ = mapped_products(x, g, (1, 0), shape, times, sizes)
    lost = size * np.float64(squares[each]) / worst[each]
    assert lost > 1 + 1e-5
    assert np.float64(bound[0] / norm[0]) ** 2 >= lost


def penalised(model, x, g, height):
    """The gradient is the sum over time of g_t (outer) x_t, and height times twice the model."""
    return jnp.sum((x @ model.T) * g) + height * jnp.sum(model**2)


PENALISED = ("random", "cancelling", "cancelled by the penalty", "one huge", "tiny", "huge",
             "huge penalty", "lopsided")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["book_keeping", pytest.param("ghost", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("time", lengths(1, 33, slow=[256]))
def test_penalties(time, method):
    rng = np.random.default_rng(2)
    model = rng.normal(size=(5, 8))
    attacks = {}
    for kind in PENALISED:
        x, g, order = hostile_tokens(time, kind)
        height = 0.3 * order * rng.normal(size=SIZE)
        match kind:
            case "cancelled by the penalty":
                # Rows of the model, one after the other: the penalty takes back what they add.
                x, g = np.zeros((SIZE, time, 8)), np.zeros((SIZE, time, 5))
                for t in range(min(time, 5)):
                    x[:, t], g[:, t, t] = 2 * model[t], 1
                height = -(1 + 1e-6 * rng.normal(size=SIZE))
                order = 1e-6
            case "huge penalty":
                height, order = height * 1e18, 1e18
        attacks[kind] = float32(x, g, height), 0.1 * order
    share = shares(penalised, jnp.asarray(model, jnp.float32), attacks, method=method)
    for kind in ("random", "huge", "huge penalty"):
        assert (share[kind] >= (0.9999 if time < 256 else 0.999)).all(), kind


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "method", ["book_keeping", pytest.param("ghost", marks=pytest.mark.exhaustive)]
)
def test_penalties_that_nearly_take_each_other_back(method):
    """What is left is beyond the digits of inner products: without room for these it is missed."""
    rng = np.random.default_rng(1)
    noise, model = rng.normal(size=(2, 5, 8))
    x, g = rng.normal(size=(SIZE, 1, 8)), 1e-6 * rng.normal(size=(SIZE, 1, 5))
    for order in (1e-4, 2e-4):
        nearly = 1 + order * noise

        def loss(model, x, g, height, nearly=nearly):
            return penalised(model, x, g, height) - height * jnp.sum(nearly * model**2)

        batch = float32(x, g, 1 + rng.random(SIZE))
        shares(loss, jnp.asarray(model, jnp.float32), {order: (batch, 1e-12)}, method=method)


@pytest.mark.slow
def test_a_penalty_that_nearly_takes_back_an_outer_product():
    """The same of one outer product, whose norm the inner product has to reach."""
    rng = np.random.default_rng(6)
    g, x, noise = rng.normal(size=5), rng.normal(size=8), rng.normal(size=(5, 8))
    for order in (1e-4, 2e-4):
        model = np.outer(g, x) * (1 + order * noise)
        heights = -0.5 * (1 + 1e-5 * rng.normal(size=SIZE))
        scales = 10.0 ** rng.integers(-3, 4, (SIZE, 1, 1))
        batch = float32(x * scales, g / scales, heights)
        shares(penalised, jnp.asarray(model, jnp.float32), {order: (batch, 1e-12)})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("preset", ["mixed_bfloat16", "mixed_float16"])
def test_narrow_policies(preset):
    policy = dp.load_policy(preset)
    model = np.random.default_rng(2).normal(size=(5, 8))
    x, g, _ = hostile_tokens(33, "random")
    height = np.random.default_rng(4).normal(size=SIZE)
    attacks = {"random": (float32(x, g, height), 0.1)}
    share = shares(penalised, jnp.asarray(model, jnp.float32), attacks, policy=policy)
    assert (share["random"] >= 0.9999).all()
    weights = np.asarray(np.random.default_rng(1).normal(size=(5, 8)), np.float32)
    attacks = {"random": (float32(x[:, 0], g[:, 0]), 0.1)}
    share = shares(weighted(weights), jnp.zeros((5, 8)), attacks, policy=policy)
    assert (share["random"] >= 0.9999).all()


def centred(model, x, g):
    """What the examples give is nearly the same in each column, and centring takes that off."""
    return jnp.sum((x @ (model - model.mean(0)).T) * g)


def scaled_and_itself(model, x, g):
    """The same gradient twice, of which one takes the other back."""
    return jnp.sum((x @ (2.3 * model).T) * g) - jnp.sum(((2.3 * x) @ model.T) * g)


def cancelling(time):
    rng = np.random.default_rng(0)
    x, noise = rng.normal(size=(3, time, 40)), rng.normal(size=(3, time, 6))
    model = jnp.asarray(rng.normal(size=(6, 40)), jnp.float32)
    return model, float32(x, 1e6 + 1e-3 * noise), float32(x[:, :1], noise[:, :1])


@pytest.mark.parametrize("method", ["per_example", "book_keeping", "ghost"])
def test_what_goes_through_values_is_computed_once(method):
    model, *batches = cancelling(7)
    for loss, batch in zip((centred, scaled_and_itself), batches, strict=True):
        shares(loss, model, {"cancelling": (batch, 1e-9)}, method=method)


@pytest.mark.parametrize("method", ["per_example", "book_keeping", "ghost"])
def test_models_side_by_side(method):
    """Of a conditional on many models no selection is left, which loops could be fused with."""
    model, *batches = cancelling(7)
    for loss, batch in zip((centred, scaled_and_itself), batches, strict=True):
        grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=1e-9, method=method)
        grads_of = jax.jit(jax.vmap(lambda *args, call=grad_fn: call(*args), (0, None, None)))
        for i in range(len(batch[0])):
            grads = grads_of(jnp.stack([model, 1.1 * model]), *(x[i : i + 1] for x in batch))
            assert all(added(of_one) <= 1e-9 for of_one in grads)
