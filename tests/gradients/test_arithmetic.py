"""The bounds hold for the arithmetic of accelerators, which this machine has not: see `arithmetic`.

The engine's own formulas are imported here: thousands of gradients go through one of them at once,
and platforms that are not there are asked for. Whole gradients come last.
"""

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_dp as dp
from eqx_dp import device
from eqx_dp.gradients import clip, leaves, norms
from eqx_dp.gradients.clip import clip_factors
from eqx_dp.gradients.clipping import Clipping, Quantile
from eqx_dp.gradients.gram import OuterProducts, gram_norms, row_norms, sum_of_products
from tests.gradients.arithmetic import Machine, U
from tests.tiers import METHODS, curated

pytestmark = pytest.mark.optimized

TINY = float(np.finfo(np.float32).tiny)
PLATFORMS = {"cuda": U, "tpu": 16 * U}


# Factors


def shares_of_numbers(machine, clip_norm, sizes, kind="clipped", drift=0.0, far=31 * U):
    """What gradients of one number add at most, by the limit (or a lower bound).

    Factors are zero or normal: below the normal range a number has few digits, and machines differ
    on whether it is zero. They are compared with the formula in float64: they are hardly smaller.
    """
    sizes = np.append(np.float32(0), np.asarray(sizes, np.float32))
    unit = {"clipped": None, "smooth": 1.0}.get(kind, 0.7)
    given = jnp.float32(clip_norm) if kind == "traced" else clip_norm

    def factors(bounds):
        there, is_smooth = jnp.ones(len(bounds), bool), kind == "smooth"
        return clip_factors(bounds, given, unit, there, drift, is_smooth)

    found, wide = np.float64(machine(factors, sizes)), np.float64(sizes)
    most = (unit or clip_norm) / (1 + drift)
    denominators = {"clipped": np.maximum(wide, most), "smooth": wide + clip_norm}
    denominator = denominators.get(kind, np.maximum(wide, clip_norm))
    exact = np.where(denominator > 0, most / np.maximum(denominator, 1e-300), 0)
    is_normal = exact > 2.01 * TINY
    assert (np.abs(found - exact) <= far * exact)[is_normal].all()
    assert ((found == 0) | (found >= TINY)).all()
    assert (found[exact < 1.99 * TINY] == 0).all()
    weighted = np.float64(np.float32(wide * found * (1 + machine.product)))
    shrunk = np.float64(np.float32(weighted / 3)) * (1 + 4 * U)  # normalize_by=3
    return shrunk * 3 / most


def hostile_sizes(clip_norm, kind="clipped"):
    """Beside the clip norm, at all magnitudes, and where factors leave the normal range."""
    rng, around = np.random.default_rng(0), 1 + np.linspace(-40, 40, 4001) * U
    last = (clip_norm if kind == "clipped" else 1.0) / TINY
    ends = np.concatenate([last * around, last / 2 * around, np.geomspace(1e20, 3e38, 2000)])
    anywhere = 10 ** rng.uniform(-30, 38, 6000)
    # Below a power of two times C a quotient has the largest unit in the last place.
    near = np.ravel(clip_norm * 2.0 ** np.arange(8)[:, None] * around)
    sizes = np.concatenate([near, anywhere, ends])
    return sizes[sizes < 3.4e38]


@pytest.mark.parametrize("kind", ["clipped", "rescaled", "traced", "smooth"])
@pytest.mark.parametrize(
    ("clip_norm", "drift"),
    [(1.0, 0.0), (0.1, 0.01), (5e-7, 0.0), (1e-10, 0.0), (3e-30, 0.3), (7e20, 0.0)],
)
@pytest.mark.parametrize("up", [True, False], ids=["too large", "too small"])
def test_quotients_two_units_off(up, clip_norm, drift, kind):
    sizes = hostile_sizes(clip_norm, kind)
    assert shares_of_numbers(Machine(up), clip_norm, sizes, kind, drift).max() <= 1
    assert kind == "clipped" or shares_of_numbers(Machine(up), 0, sizes, kind).max() <= 1


def test_products_of_passes():
    """Of a TPU, whose error counts once more in the weighted sum."""
    rough = Machine(product=PLATFORMS["tpu"])
    sizes = hostile_sizes(1.0)
    assert shares_of_numbers(rough, 1.0, sizes).max() > 1
    with device._made_for("tpu"):
        assert shares_of_numbers(rough, 1.0, sizes, far=64 * U).max() <= 1


@pytest.mark.parametrize("scale", [2.0**-20, 0.125, 1.0, 2.0**20])
def test_a_loss_scale_makes_no_factor_infinite(scale):
    """Of a gradient below the normal range, which this machine keeps, or of zero."""
    traced = SimpleNamespace(clipping=Clipping((0.0,), None, True), accumulate_dtype="float32")
    sizes = np.float32([0, 1e-45, 1e-39, 2.5e-39, 1e-35, 1])

    def factors(sizes):
        scales, there = jnp.full(len(sizes), scale), jnp.zeros(len(sizes), bool)
        return clip.clip(traced, [(sizes, sizes)], sizes, scales, there).factors[0]

    found = np.float64(Machine(up=True)(factors, sizes))
    assert np.isfinite(found).all()
    assert 0.999 < np.max(found * sizes) <= 1


def test_clip_norms_are_rounded_down_and_counts_leave_room_for_drift():
    for value in [*10 ** np.random.default_rng(0).uniform(-30, 30, 200), 0.5, 0.0]:
        rounded = clip._round_down(value, np.dtype("float32"))
        assert rounded == np.float32(rounded) <= value
        assert np.nextafter(np.float32(rounded), np.float32(np.inf)) > value
    norm, there = jnp.asarray([0.5, 2.0, 0.5, 0.0]), np.array([True, True, False, True])
    for weight, drift in ((0.5, 0.01), (0.3, 0.0)):
        clipping = Clipping((0.7,), None, False, Quantile(weight=weight), drift)
        (counts,) = clip._counts(clipping, [norm], there)
        half = weight / 2 / (1 + drift)
        np.testing.assert_allclose(counts, [half, -half, 0, half], rtol=4 * U)
        assert np.max(np.abs(np.float64(counts))) <= half


# Norms and bounds


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_norms_at_any_scale_on_accelerators(platform):
    """There an array is read once; each of three ranges of its entries has a scale."""
    scales = np.append(10.0 ** np.arange(-36, 34, 3), [0, 0.99 * 2.0**-40, 0.99 * 2.0**40])
    rng = np.random.default_rng(4)
    x = rng.normal(size=(len(scales), 256, 300)) * rng.choice([1, 1e-9], (256, 300))
    x[-2:] = 1  # all just below the limits of a range
    x = np.float32(x * scales[:, None, None])
    x[np.abs(x) < TINY] = 0
    exact = np.sqrt(np.sum(np.float64(x) ** 2, (1, 2)) + np.sum(np.float64(x[:, 0]) ** 2, 1))
    x[2, 0, 0], x[3, 9, 3] = np.nan, -np.inf
    with device._made_for(platform):
        found = np.float64(jax.jit(lambda x: norms.norms(x, x[:, 0]))(x))
        most = norms.norm_error(x[0].size, np.dtype("float32"), 2) * exact
    np.testing.assert_equal(found[2:4], [np.nan, np.inf])
    assert np.delete(np.abs(found - exact) <= most, (2, 3)).all()


def hostile_products(kind, time=9, examples=20):
    rng = np.random.default_rng(3)
    x, g = rng.normal(size=(examples, 1, time, 6)), rng.normal(size=(examples, 1, time, 4))
    half = time // 2
    match kind:
        case "cancelling":
            x[:, :, half : 2 * half] = x[:, :, :half]
            g[:, :, half : 2 * half] = -g[:, :, :half] * (1 + 1e-6 * rng.normal(size=(half, 1)))
            x[:, :, 2 * half :] *= 1e-6
        case "equal":
            x[:], g[:] = x[:, :, :1], g[:, :, :1]
        case _:
            pass
    return np.float32(x), np.float32(g)


def share_of_gram(kind, product):
    """The weighted sum of one example, as far off as it may be, by its bound."""
    x, g = hostile_products(kind)
    worst = 0.0
    for seed, up in ((0, True), (1, False), (2, True)):
        machine = Machine(up, product, seed)
        _, bounds = machine(lambda x, g: gram_norms([OuterProducts(x, g)]), x, g)
        for one in range(len(x)):
            added = machine(
                lambda x, g: sum_of_products(x, g, jnp.ones((1, 1)), jnp.ones(1, bool)),
                x[one : one + 1],
                g[one : one + 1],
            )
            worst = max(worst, np.linalg.norm(np.float64(added)) / float(bounds[one]))
    return worst


@pytest.mark.parametrize("kind", curated(["random", "cancelling", "equal"], ["cancelling"]))
@pytest.mark.parametrize("platform", PLATFORMS)
def test_bounds_of_sums_of_products(platform, kind):
    with device._made_for(platform):
        assert share_of_gram(kind, PLATFORMS[platform]) <= 1


def test_every_contraction_asks_for_the_precision_of_the_bound():
    """TensorFloat-32 is what a GPU takes where nothing is asked for."""
    asked = []
    x, g = hostile_products("random", examples=3)
    ones = jnp.ones(3)
    for function, operands in (
        (lambda x, g: gram_norms([OuterProducts(x, g)]), (x, g)),
        (lambda x, g: sum_of_products(x, g, ones[:, None], ones > 0), (x, g)),
        (lambda x: leaves.weighted_sum(jnp.tile(x, (30, 1, 1, 1)), jnp.ones(90), jnp.ones(90) > 0),
         (x,)),
    ):  # fmt: skip
        program = jax.make_jaxpr(function)(*operands)
        asked += [e for e in dp.programs.equations(program) if e.primitive.name == "dot_general"]
    assert asked
    for equation in asked:
        assert set(equation.params["precision"]) == {norms.PRECISION}


@pytest.mark.parametrize(("spread", "time"), [(1, 9), (3, 9), (3, 1)])
def test_bounds_of_lookups(spread, time):
    _, values = hostile_products("cancelling", time)
    rows = np.random.default_rng(4).integers(0, spread, values.shape[:3])

    for seed in range(3):
        _, bounds, sums = Machine(seed=seed)(row_norms, rows, values)
        added = np.linalg.norm(np.float64(sums).reshape(len(rows), -1), axis=1)
        assert (added * (1 + U) <= bounds).all()


@pytest.mark.parametrize("time", curated([33, 256, 2048], [33, 256]))
def test_bounds_hold_for_sums_term_by_term(time):
    """The order in which sums are at their worst: every rounding goes the same way."""
    constants = np.random.default_rng(2).uniform(1, 2, (2, 40, 1, 1)).astype(np.float32)
    x, g = (np.broadcast_to(c, (40, time, n)) for c, n in zip(constants, (8, 5), strict=True))

    def bound(x, g):
        return gram_norms([OuterProducts(x[None, None], g[None, None])])[1][0]

    bounds = jax.jit(lambda x, g: jax.lax.map(lambda one: bound(*one), (x, g)))(x, g)
    terms = x[:, :, 0] * g[:, :, 0]
    added = np.cumsum(terms, axis=1, dtype=np.float32)[:, -1].astype(np.float64)
    assert (added * np.sqrt(8 * 5) <= np.asarray(bounds, np.float64)).all()


# The whole engine, one example alone


def matrix(model, x, g):
    return jnp.sum(jax.vmap(lambda x: model["w"] @ x)(x) * g) + jnp.sum(model["b"] * g)


def images(model, x, g):
    """Two of them, whose gradients cancel but for their last digits."""
    x, g = (jnp.swapaxes(side.reshape(2, -1, side.shape[-1]), 1, 2) for side in (x, g))
    return jnp.sum(jax.lax.conv_general_dilated(x, model["k"], (1,), "SAME") * g)


def gathered(model, x, g):
    """One row of eight that counts: its cotangent is a sum of eight, in any order."""
    y = x @ model["w"].T
    return jnp.sum(y[jnp.zeros(8, int)] * g)


LOSSES = {
    "gathered": (gathered, {"w": jnp.zeros((4, 6))}),
    "matrix": (matrix, {"w": jnp.zeros((4, 6)), "b": jnp.zeros(4)}),
    "convolution": (images, {"k": jnp.zeros((4, 6, 3))}),
    "no bias": (lambda model, x, g: jnp.sum((x @ model.T) * g), jnp.zeros((4, 6))),
}


def engine(loss, method, clip_norm, policy=None):
    """The clipped gradient of examples."""
    function, model = LOSSES[loss]
    options = {"l2_clip_norm": clip_norm, "policy": policy and dp.load_policy(policy)}
    grad_fn = dp.filter_clipped_grad(function, method=method, **options)
    return lambda x, g: grad_fn(model, x, g)


def share_of_engine(loss, method, x, g, clip_norm, policy=None, **machine):
    """The most that one example adds, by the clip norm."""
    program = jax.make_jaxpr(engine(loss, method, clip_norm, policy))(x[:1], g[:1])
    worst = 0.0
    for seed in range(3):
        on_machine = Machine(seed=seed, **machine)
        for one in range(len(x)):
            grads = on_machine.run(program, [x[one : one + 1], g[one : one + 1]])
            total = np.concatenate([np.float64(leaf).ravel() for leaf in grads])
            worst = max(worst, np.linalg.norm(total) / clip_norm)
    return worst


def cancelling():
    """Terms that cancel to what is left of 1."""
    return (side[:, 0] for side in hostile_products("cancelling", time=8, examples=4))


@pytest.mark.parametrize(
    ("up", "method", "loss"),
    curated(
        itertools.product([True, False], METHODS, ["matrix", "convolution"]),
        [(False, "book_keeping", "convolution"), (False, "ghost", "matrix")],
    ),
)
def test_one_example_adds_at_most_the_clip_norm(up, method, loss):
    assert 0 < share_of_engine(loss, method, *cancelling(), clip_norm=1e-6, up=up) <= 1


@pytest.mark.parametrize("method", METHODS)
def test_scatters_that_never_add_in_the_same_order(method):
    """Ghost's second pass finds other cotangents than the first."""
    share = share_of_engine("gathered", method, *cancelling(), clip_norm=1e-6, wanders=True)
    assert 0 < share <= 1


@pytest.mark.parametrize("method", ["book_keeping", "ghost"])
def test_lookups_that_cancel_move_no_row(method):
    """Of an example that adds nothing, beside others that look up the same row."""
    g = np.abs(hostile_products("random", time=40, examples=4)[1][:, 0])
    g[0, 20:] = -g[0, :20]
    grad_fn = dp.filter_clipped_grad(
        lambda table, g: jnp.sum(table[jnp.zeros(40, int)] * g),
        l2_clip_norm=1e-6, method=method, microbatch_size=4,
    )  # fmt: skip
    program = jax.make_jaxpr(
        lambda g, mask: grad_fn(jnp.zeros((2, 4)), g, is_padding_example=mask)
    )(g, np.zeros(4, bool))
    for seed in range(3):
        machine = Machine(seed=seed, wanders=True)
        sums = [np.float64(machine.run(program, [g, np.arange(4) < n])[0]) for n in (0, 1)]
        assert np.linalg.norm(sums[0] - sums[1]) < 0.005e-6


@pytest.mark.parametrize("method", METHODS)
def test_weights_of_outer_products_are_zero_or_normal(method):
    """A factor may be normal, and no longer once x has been divided by a tiny power of two."""
    rng = np.random.default_rng(1)
    x, g = (rng.uniform(1, 2, (10, 1, n)).astype(np.float32) for n in (6, 4))
    x, g = x * np.float32(2.0**-124), g * np.float32(2.0**126)
    assert share_of_engine("no bias", method, x, g, clip_norm=2.0**-20) <= 1
