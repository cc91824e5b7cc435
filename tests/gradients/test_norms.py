"""What `norms.py`, `blocks.py` and `leaves.py` say, one formula at a time."""

import itertools
import math

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

import eqx_dp as dp
from eqx_dp import device
from eqx_dp.gradients import blocks, leaves, norms
from tests.gradients.arithmetic import Machine, U


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_powers_of_two_at_every_exponent(dtype):
    info, rng = np.finfo(dtype), np.random.default_rng(0)
    exponents, wide = np.arange(info.minexp, info.maxexp), np.arange(-3000, 3000)
    ones = rng.uniform(1, 2, len(exponents)).astype(dtype)
    x = np.append(np.ldexp(ones, exponents), np.asarray([info.tiny, 0, info.tiny / 2], dtype))

    @jax.jit
    def results(x, exponents, wide):
        powers = norms.power(wide, x.dtype), *norms.halves(2 * exponents[:-1] + 1, x.dtype)
        return norms.exponent_of(x), *norms.power_of_two(x), *powers, norms.without_subnormal(-x)

    with jax.enable_x64(True):
        found = map(np.asarray, results(x, exponents, wide))
    exponent, scale, inverse, power, one, other, kept = found
    np.testing.assert_array_equal(exponent, [*exponents, info.minexp, *[info.minexp - 1] * 2])
    np.testing.assert_array_equal(scale * inverse, np.ones(len(x)))
    assert np.all((x[:-2] >= scale[:-2]) & (x[:-2] / 4 < scale[:-2]))
    expected = np.ldexp(np.ones((), dtype), np.minimum(wide, info.maxexp - 1))
    np.testing.assert_array_equal(power, np.where(expected < info.tiny, 0, expected))
    np.testing.assert_array_equal(np.log2(one) + np.log2(other), 2 * exponents[:-1] + 1)
    assert np.all((one <= 1) & (other <= 1) | (one >= 1) & (other >= 1))
    np.testing.assert_array_equal(kept, np.where(x < info.tiny, 0, -x))


# Examples in front.
FLAT = (3, 0), (3, 1), (3, 2), (256, 65), (3, 1025), (3, 9000)
ROWS = (3, 256, 9), (3, 300, 5), (1, 2, 512, 3)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_a_term_of_a_sum_goes_through_as_many_roundings_as_is_said(platform):
    shapes, digits = FLAT + ROWS, np.random.default_rng(0).integers
    terms = [digits(0, 9, shape).astype(np.float32) for shape in shapes]
    with device._made_for(platform):
        wide = [norms.has_wide(np.dtype(x)) for x in ("float16", "float32", "float64")]
        assert wide == [platform == "cpu"] * 2 + [False]
        sums = jax.jit(lambda *terms: [norms.sum_in_blocks(x) for x in terms])(*terms)
    for x, total in zip(terms, sums, strict=True):
        shape = x.shape[1:]
        np.testing.assert_array_equal(total, x.sum(tuple(range(1, x.ndim))))
        with device._made_for(platform):
            program = jax.make_jaxpr(lambda x: norms.sum_in_blocks(x))(x)
            most = norms.roundings_in_blocks(math.prod(shape))
        steps = [e for e in dp.programs.equations(program) if e.primitive.name == "reduce_sum"]
        lengths = [math.prod(e.invars[0].aval.shape[i] for i in e.params["axes"]) for e in steps]
        by_rows = platform == "tpu" and len(shape) > 1 and shape[-2] % 256 == 0
        assert (lengths[0] == 256) == by_rows
        roundings = sum(max(n - 1, 0) for n in lengths)
        assert roundings <= most <= roundings + 1023 * by_rows


@pytest.mark.parametrize("parts", [1, 2, 7])
@pytest.mark.parametrize("size", [1, 2, 65, 5000, 100_000, 2**32])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_the_error_of_a_norm_has_room_for_what_follows(platform, size, parts):
    """Of all roundings that make a norm too small there are three left, or four."""
    dtype, u = np.dtype("float32"), mpmath.mpf(U)
    with device._made_for(platform), mpmath.workdps(60):
        of_parts = () if parts == 1 else (parts,)
        error, terms = norms.norm_error(size, dtype, *of_parts), size * parts
        if platform == "cpu":
            wide = mpmath.mpf(2) ** -53
            least = (1 - u) * (1 - 4 * wide) * (1 - wide) ** (mpmath.mpf(terms - 1) / 2)
        else:
            of_sums = map(norms.roundings_in_blocks, (terms, 3 * parts))
            least = (1 - 4 * u) ** 2 * (1 - u) ** (mpmath.mpf(2 + sum(of_sums)) / 2)
        bound = mpmath.mpf(float(np.float32(1 + error))) * (1 - u) * least
        assert bound >= 1
        left = (error - (1 / least - 1)) / u
        assert abs(left - (3 if platform == "cpu" else 4)) < 0.3 + (error / U) ** 2 * U


def test_what_rounding_is_assumed_of_products():
    float32 = np.dtype("float32")
    for dtype in (float32, np.dtype("float64")):
        u = dtype.type(norms.unit_roundoff(dtype))
        assert 1 + u == 1 < 1 + u * (1 + 2 * u)
    for platform in ("cpu", "gpu", "cuda", "rocm", "tpu", "unknown"):
        of_whole = 16 if platform in ("tpu", "unknown") else 1
        for parts, error in {(0, 0): of_whole, (1, 2): 8, (2, 2): 16, (0, 2): of_whole}.items():
            assert norms.product_roundoff(float32, platform, parts) == error * U
        with device._made_for(platform):
            assert norms.product_roundoff(float32) == of_whole * U
            narrow = ["bfloat16"], ["float16", "bfloat16"], ["float8_e5m2"], ["float32", "float16"]
            found = [norms.parts_of([jnp.dtype(x) for x in dtypes]) for dtypes in narrow]
            assert found == ([0, 0, 0, 0] if platform == "cpu" else [1, 2, 1, 0])


# Sums of sums


def test_blocks_are_small_and_hold_every_example_once():
    sizes, seen = (1, 6, 7, 8, 14, 30, 128, 129, 300), []

    def counted(its):
        seen.append(its[0].shape[0])
        return jnp.sum(its[0] * its[-1], 0)

    values = [np.random.default_rng(n).integers(0, 9, (n, 3)).astype(np.float32) for n in sizes]
    for block, limits in ((7, {"block": 7}), (blocks.BLOCK, {})):
        found = jax.jit(
            lambda its, limits=limits: [
                blocks.in_blocks(counted, [x, *[2 * x] * len(limits)], x.dtype, **limits)
                for x in its
            ]
        )(values)
        for x, total in zip(values, found, strict=True):
            np.testing.assert_array_equal(total, np.sum((1 + len(limits)) * x**2, 0))
        assert max(seen) == block == max(n for n in (7, 128) if n <= block)
        seen.clear()


def test_two_floats_hold_a_sum_and_the_first_is_all_of_it():
    """Float64 has it exactly where numbers are of about one size."""
    rng = np.random.default_rng(0)
    high, x = (rng.normal(size=5000) * 2.0 ** rng.integers(-12, 12, 5000) for _ in range(2))
    high, x = np.float32(high), np.float32(x)
    for low in (np.zeros(5000, np.float32), np.spacing(high) * np.float32(0.4)):
        exact = np.float64(high) + x + low
        first, second = (np.float64(y) for y in blocks.added((high, low), x))
        assert np.all(np.abs(first + second - exact) <= 2 * U**2 * (np.abs(high) + np.abs(x)))
        np.testing.assert_array_equal(first, np.float32(first + second))
        assert low.any() or np.array_equal(first + second, exact)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_sums_are_plain_where_that_costs_little(platform):
    """One example moves a sum of so many by 2.5e-4 of a clip norm at most; or they are wide."""
    zero = jnp.zeros(())
    for terms, num in itertools.product((1, 2, 3, 16, 100), (1, 20, 21, 131, 699, 1048, 10**6)):
        is_plain = terms == 1 or 2 * terms * num * U <= 2.5e-4
        with device._made_for(platform):
            dtypes = [x.dtype for x in blocks.nothing(zero, terms, num)]
            error = blocks.added_roundoff(terms, num, zero.dtype)
        assert dtypes == (["float64"] if platform == "cpu" else ["float32"] * 2) or is_plain
        assert dtypes == ["float32"] or not is_plain
        assert error == ((terms - 1) * U if is_plain else pytest.approx(U, rel=1e-4))
    # Three times u^2 a term (`eqx_dp/privacy/finite_precision.md`), also where terms are many.
    with device._made_for(platform):
        assert blocks.added_roundoff(2**20, 10**6, zero.dtype) >= U + 3 * 2**20 * U**2


@pytest.mark.parametrize(("terms", "num"), [(3, 5), (40, 40), (2**20, 10**6)])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_sums_are_off_by_what_is_said_in_the_worst_case(platform, terms, num):
    """One, and numbers that are dropped: beside it, or beside the second of two floats."""
    second = np.float32(0.999 * U)
    small = second if 2 * terms * num * U < 2.5e-4 else np.float32(0.49 * U**2)
    with device._made_for(platform):
        total = blocks.nothing(jnp.float32(0), terms, num)
        for x in (1, second):
            total = blocks.added(total, jnp.float32(x), terms)
        add = lambda _, total: blocks.added(total, jnp.float32(small), terms)  # noqa: E731
        total = jax.lax.fori_loop(2, terms, add, total)
        error = abs(float(np.float32(total[0])) - 1 - float(second) - (terms - 2) * float(small))
        said = blocks.added_roundoff(terms, num, small.dtype)
    assert 0.8 * said <= error <= said


# What is measured together, and what is scaled down


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_bounds_of_leaves_are_above_their_norms_and_near(platform):
    rng = np.random.default_rng(0)
    grads = [rng.normal(size=(30, *shape)).astype(np.float32) for shape in ((2,), (70, 43), ())]
    grads[2] = np.abs(grads[2])
    slices = np.abs(rng.normal(size=(30, 2, 40))).astype(np.float32)

    def bounds(slices, *grads):
        given = leaves.LeafGradient(None, leaves.of_slices(jnp.stack([slices, slices], -1)))
        formed = [leaves.LeafGradient(x) for x in grads]
        known = leaves.LeafGradient(None, (grads[2], grads[2]))
        dtype = slices.dtype
        groups = [given], formed, [*formed, given], [known] * 3, formed[:1], formed[2:], []
        return [leaves.norm_and_bound(group, 30, dtype) for group in groups]

    with device._made_for(platform):
        found = Machine(up=False)(bounds, slices, *grads)
    squares = [np.sum(np.float64(x).reshape(30, -1) ** 2, 1) for x in (slices, *grads)]
    of_given, *of_formed = squares
    exact = of_given, sum(of_formed), sum(squares), 3 * of_formed[2], *of_formed[::2], 0 * of_given
    most = 30 if platform == "cpu" else 1500
    for (norm, bound), square in zip(found, exact, strict=True):
        true = np.sqrt(square)
        assert np.all((bound >= true) & (bound <= (1 + most * U) * true))
        np.testing.assert_allclose(norm, true, rtol=most * U)


@pytest.mark.parametrize("up", [True, False])
def test_factors_are_scaled_down_to_the_limit_and_hardly_more(up):
    rng = np.random.default_rng(0)
    limits, factors = 10 ** rng.uniform(-20, 15, 4000), 10 ** rng.uniform(-15, 15, 4000)
    bounds = limits * np.append(1 + np.arange(-1000, 1000) * U, 10 ** rng.uniform(-2, 2, 2000))
    factors, bounds, limits = (x.astype(np.float32) for x in (factors, bounds, limits))
    found = np.float64(Machine(up)(leaves.within, factors, bounds, limits))
    assert np.all(found * bounds <= (1 - 15 * U) * np.float64(factors) * limits)
    assert np.all(found >= (1 - 40 * U) * factors * np.minimum(1, np.float64(limits) / bounds))
    # Not finite, a factor below the normal range, nothing at all.
    odd = np.float32([[1, 1, 1e-3, 1, 0], [np.nan, np.inf, 3e38, 0, 1], [1, 1, 1, 0, 1]])
    assert not np.any(Machine(up)(leaves.within, *odd))


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_few_gradients_are_added_one_by_one_and_others_in_blocks(platform):
    """What does not contribute may be anything, and no accelerator gets a product to round."""
    large, rng = 2**15, np.random.default_rng(0)
    for batch, shape, by_one in (
        (8, (3,), True), (9, (3,), False), (200, (2, 3), False), (9, (large - 1,), False),
        (0, (3,), False), (1, (large,), True), (64, (4, large // 4), True), (65, (large,), False),
    ):  # fmt: skip
        x, factors = rng.normal(size=(batch, *shape)), rng.uniform(size=batch)
        x, factors, there = np.float32(x), np.float32(factors), np.arange(batch) % 3 > 0
        with device._made_for(platform):
            added = jax.jit(lambda *its: leaves.weighted_sum(*its))
            program = jax.make_jaxpr(added)(x, factors, there)
            x[~there], factors[~there] = np.nan, np.inf
            found = added(x, factors, there) if math.prod(shape) < 9 else None
        names = [e.primitive.name for e in dp.programs.equations(program)]
        products = 1 + (batch > 128) if platform == "cpu" and not by_one else 0
        assert names.count("dot_general") == products
        assert ("reduce_sum" in names) == (not by_one and platform == "gpu")
        if found is not None:
            exact = np.tensordot(np.float64(factors[there]), x[there], 1)
            np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-6)
