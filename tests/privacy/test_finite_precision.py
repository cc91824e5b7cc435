"""The constants of `eqx_dp/privacy/finite_precision.md`."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import eqx_dp as dp
from eqx_dp.privacy import finite_precision
from eqx_dp.privacy.finite_precision import MOST_EPSILON, PRECISION_EPSILON, entries_covered
from eqx_dp.privacy.grid import grid_of
from tests.test_examples import load

PLAN = dp.PrivacyPlan(0.01, 1000, 0.8136, 1e-5)


@pytest.mark.parametrize("stddev", [1.0, 1.3, 1.999, 2.0**-20, 3e7])
def test_a_standard_deviation_has_32_to_64_cells(stddev):
    assert 32 <= stddev / grid_of(stddev) < 64
    assert math.frexp(grid_of(stddev))[0] == 0.5


@pytest.mark.parametrize("cells", [32, 45.3, 64])
def test_relative_errors_of_cells(cells):
    """From the densities at the sides of cells, at every radius up to the largest."""
    r = np.arange(0.5 / cells, 18.9, 1 / cells)
    mass = r * np.exp(-(r**2) / 2) / cells
    moved = cells * 2.0**-51 * (2 * r + 1)
    # Two sides a coordinate; the corner that is nearest to the origin has the largest density.
    eta = 4 * moved * np.exp(r * np.sqrt(0.5) / cells) + 2.0**-43
    assert np.sum(mass) == pytest.approx(1, abs=1e-3)
    assert np.sum(mass * eta**2) <= 2 * finite_precision.mean_square_error()
    assert eta.max() <= 1e-11
    assert 2 * (MOST_EPSILON + math.log(1e5 / 1e-300)) / (PRECISION_EPSILON / 2) * eta.max() < 0.001


def test_beyond_the_last_octave_and_boxes_of_bits():
    assert 2.0**-256 < 1e-77
    sides, octaves, eighths = 4, 3, 8
    lost = sides * octaves * eighths * (2**68 + 2**64 + 1) * 2.0 ** -(1 + 135)
    assert lost / (2.0**-3 / (2 * math.pi * 64**2)) < 2.0**-43


@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-8, 1e-12])
def test_the_share_of_delta_is_enough(delta):
    e, length = PRECISION_EPSILON / 2, MOST_EPSILON + math.log(1e5 / delta)
    n = entries_covered(delta)
    assert n == pytest.approx(e**2 / (2 * length * finite_precision.mean_square_error()))
    rate = 2 * length / e
    bound = math.exp(0.51 * n * rate**2 * finite_precision.mean_square_error() - rate * e)
    assert bound <= math.exp(-0.98 * length) * (1 + 1e-9)
    t = bound + n * 1e-77
    share = finite_precision.PRECISION_SHARE * delta
    assert math.expm1(e) * delta + (1 + math.exp(MOST_EPSILON + e)) * t < share
    assert 1.6e13 < n < 2.3e13


def test_more_entries_than_are_paid_for_are_refused():
    grad_fn = dp.filter_clipped_grad(lambda w, x: jnp.sum(w) * x, l2_clip_norm=1.0)
    privatizer = dp.PrivacyPlan(0.01, 10**6, 5.0, 1e-5).privatizer(grad_fn, key=5)
    most = int(entries_covered(1e-5) / 10**6)
    shapes, more = (
        {"w": jax.ShapeDtypeStruct((size,), jnp.float32), "frozen": None}
        for size in (most, most + 1)
    )
    privatizer.init(shapes)
    for ask in (privatizer.init, lambda x: privatizer.update(x, privatizer.init(None))):
        with pytest.raises(ValueError, match=r"has paid for the finite precision of .*e\+07"):
            ask(more)


# The attacks of examples/finite_precision.py.


@pytest.mark.slow
@pytest.mark.optimized
def test_jax_gives_the_example_away_and_certified_noise_does_not():
    attacks, draws, models = load("finite_precision"), 4 * 10**7, 120
    old, new = (attacks.attack(certified, draws, models) for certified in (False, True))
    sigma = PLAN.noise_multiplier

    def is_likely(count, total, probability):
        low, high = stats.binom(total, probability).interval(1 - 1e-5)
        return low <= count <= high

    # The tail: of JAX's normals, what is beyond the largest is there with the example alone.
    assert old.beyond[0] == 0
    assert is_likely(old.beyond[1], draws, stats.norm.sf((attacks.LARGEST - 1) / sigma))
    # Of certified noise both are what a Gaussian gives, of sums that are rounded to the grid.
    edge = (math.floor(attacks.LARGEST / grid_of(sigma)) + 0.5) * grid_of(sigma)
    for example, count in enumerate(new.beyond):
        assert is_likely(count, draws, stats.norm.sf((edge - example) / sigma))
    # The grid (Mironov 2012).
    assert old.impossible > 0.5
    assert new.impossible < 1e-3  # values that are rare without the example, too
    # The model: one of nine gives it away.
    assert old.models[0] == 0
    assert is_likely(old.models[1], models, 0.11)
    for count in new.models:
        beyond = -math.expm1(attacks.ENTRIES * math.log1p(-stats.norm.sf(edge / sigma)))
        assert is_likely(count, models, beyond + 0.005)


@pytest.mark.slow
def test_true_delta_of_what_jax_draws():
    """The figures of `examples/guides/mechanisms.md`: ends of float32 normals, and deltas."""
    attacks = load("finite_precision")
    drawn = attacks.all_of_jax() / np.float32(PLAN.noise_multiplier)
    assert -5.43 < drawn.min() < -5.4
    assert 5.22 < drawn.max() <= 5.2202 == attacks.LARGEST / PLAN.noise_multiplier
    found = [attacks.delta_of_jax(10**power) for power in (0, 4, 5, 6, 7)]
    assert found == pytest.approx([3.3e-4, 0.012, 0.11, 0.675, 0.999], rel=0.05)
