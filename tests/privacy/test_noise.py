import functools
import math
from fractions import Fraction

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from scipy import stats

from eqx_dp.precision import parse_policy
from eqx_dp.privacy import (
    GaussianPrivatizerState,
    add_noise,
    gaussian_privatizer,
    key_from_secret,
)
from eqx_dp.privacy.chacha import GENERATORS
from eqx_dp.privacy.gaussian import grid_of
from eqx_dp.sharding import checked_rules

KEY = jax.random.key(20240607)


def noise_of(privatizer, grads, step=0, key=KEY):
    """What one update adds to the gradients, on the host."""
    state = GaussianPrivatizerState(key, jnp.asarray(step, jnp.int32))
    noisy, _ = privatizer.update(grads, state)
    return jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), noisy, grads)


def policy(accumulate="float32", noise="float32", unsafe=False):
    text = f"params=float32,compute=bfloat16,output=float32,accumulate={accumulate},noise={noise}"
    return parse_policy(text + (",unsafe=true" if unsafe else ""))


def share_of_equal(one, other):
    """Of two draws of the same noise, 1; of independent ones, about 1 %: noise is on a grid."""
    size = min(np.size(one), np.size(other))
    return np.mean(np.ravel(one)[:size] == np.ravel(other)[:size])


# The noise as a distribution.


def p_value_of_cells(noise, stddev):
    """Pearson's test of how often each value of the grid is taken, of 10 and more expected."""
    cells = np.asarray(noise, np.float64) / grid_of(stddev)
    assert (cells == np.round(cells)).all()
    reach = stddev / grid_of(stddev)
    last = int(5 * reach)
    found = np.bincount(np.clip(cells.astype(int), -last, last) + last, minlength=2 * last + 1)
    edges = (np.arange(-last, last) + 0.5) / reach
    below = np.concatenate([[0], stats.norm.cdf(edges), [1]])
    above = np.concatenate([[1], stats.norm.sf(edges), [0]])
    share = np.where(below[1:] < 0.5, np.diff(below), -np.diff(above))
    expected = share * cells.size
    is_many = expected >= 10
    chi2 = np.sum((found[is_many] - expected[is_many]) ** 2 / expected[is_many])
    return stats.chi2.sf(chi2, is_many.sum() - 1)


@pytest.mark.parametrize("stddev", [1.0, 2.5, 1e-3, 1.999])
def test_noise_is_normal(stddev):
    noise = noise_of(gaussian_privatizer(stddev=stddev, key=KEY), jnp.zeros(10**6))
    assert p_value_of_cells(noise, stddev) > 1e-3
    low, high = stats.chi2.interval(1 - 1e-6, df=noise.size)
    variance = stddev**2 + grid_of(stddev) ** 2 / 12
    assert low < np.sum(noise.astype(np.float64) ** 2) / variance < high


@pytest.mark.parametrize("start", [3.0, 1 / 3, -1e-3, 1e6])
def test_noise_is_added_to_the_gradient(start):
    grads = jnp.full(10**5, start)
    noisy, _ = gaussian_privatizer(stddev=2.0, key=KEY).update(
        grads, GaussianPrivatizerState(KEY, jnp.zeros((), jnp.int32))
    )
    found = np.sort(np.asarray(noisy, np.float64))
    values, below = np.unique(found, return_index=True)
    # What is at most a value is at most the edge above it, of a sum that was not rounded.
    at_most = np.append(below[1:], found.size) / found.size
    exact = stats.norm.cdf((values + grid_of(2.0) / 2 - float(np.float32(start))) / 2.0)
    assert np.abs(at_most - exact).max() < 1.95 / math.sqrt(found.size)  # p = 1e-3


@pytest.mark.parametrize(
    ("draws", "beyond"),
    [(1, (3, 4, 4.5)), pytest.param(250, (4, 5, 5.5, 6), marks=pytest.mark.slow)],
)
def test_tails_are_those_of_a_normal(draws, beyond):
    """In the slow tier of 10^9 numbers, as a compiled step draws them."""
    privatizer = gaussian_privatizer(stddev=1.0, key=KEY)
    zeros = jnp.zeros(4 * 10**6)

    @jax.jit
    def counted(step):
        noise, _ = privatizer.update(zeros, GaussianPrivatizerState(KEY, step))
        tails = [jnp.sum(sign * noise >= limit) for limit in beyond for sign in (1, -1)]
        return jnp.stack([*tails, jnp.sum(noise > 0)])

    found = sum(np.asarray(counted(jnp.asarray(step, jnp.int32)), int) for step in range(draws))
    edges = [limit - grid_of(1.0) / 2 for limit in beyond for _ in (1, -1)]
    for count, edge in zip(found, [*edges, grid_of(1.0) / 2], strict=True):
        expected = stats.binom(draws * zeros.size, stats.norm.sf(edge))
        low, high = expected.interval(1 - 1e-5)
        assert low <= count <= high


def test_leaves_and_steps_are_independent():
    # Leaves of one size and of several: a key used twice repeats values in the longer one, too.
    grads = {
        name: jnp.zeros(size) for name, size in zip("abcd", [2000, 2000, 3000, 1], strict=True)
    }
    privatizer = gaussian_privatizer(stddev=1.0, key=KEY)
    draws = [
        noise for step in range(4) for noise in jax.tree.leaves(noise_of(privatizer, grads, step))
    ]
    for i, one in enumerate(draws):
        for other in draws[:i]:
            assert one.size == 1 or other.size == 1 or share_of_equal(one, other) < 0.03
    long_draws = np.stack([draw[:2000] for draw in draws if draw.size >= 2000])
    correlations = np.corrcoef(long_draws) - np.eye(len(long_draws))
    assert np.abs(correlations).max() < 5 / math.sqrt(2000)


def test_steps_are_uncorrelated_at_every_lag():
    privatizer = gaussian_privatizer(stddev=1.0, key=KEY)
    first, second = (noise_of(privatizer, jnp.zeros(2**16), step) for step in (0, 1))
    spectrum = np.fft.rfft(first) * np.conj(np.fft.rfft(second))
    correlations = np.fft.irfft(spectrum) / 2**16
    assert np.abs(correlations).max() < 6 / math.sqrt(2**16)


# The noise as a function of key, step and leaf.


def test_steps_follow_from_the_state_alone():
    privatizer = gaussian_privatizer(stddev=1.0, key=KEY)
    grads = {"w": jnp.ones((3, 4)), "b": jnp.ones(4)}
    state = privatizer.init(grads)
    assert state.step == 0
    for step in range(3):
        resumed = GaussianPrivatizerState(KEY, jnp.asarray(step, jnp.int32))
        noisy, next_state = privatizer.update(grads, state)
        again, _ = privatizer.update(grads, resumed)
        assert eqx.tree_equal(noisy, again)
        assert next_state.step == step + 1
        assert next_state.key == state.key
        state = next_state


def test_noise_of_a_leaf_depends_on_its_path_and_shape_alone():
    privatizer = gaussian_privatizer(stddev=1.0, key=KEY)
    small = noise_of(privatizer, {"b": jnp.zeros(5), "c": jnp.zeros(6)})
    large = noise_of(
        privatizer, {"a": jnp.zeros((7, 7)), "b": jnp.zeros(5), "c": jnp.zeros((6, 1))}
    )
    np.testing.assert_array_equal(small["b"], large["b"])
    assert not np.array_equal(small["c"], large["c"].ravel())


def test_noise_stays_what_it_is():
    # An experiment with a key of its own repeats under a later release. If this fails, either the
    # way from (key, step, path, shape) to a number has changed, or what it does to a key of JAX's.
    grads = {"w": jnp.zeros((2, 2)), "b": [jnp.zeros(())]}
    noise = noise_of(gaussian_privatizer(stddev=1.0, key=KEY), grads, step=3)
    np.testing.assert_array_equal(noise["w"], [[1.5, -0.5625], [1.4375, -1.0625]])
    assert noise["b"][0] == -0.46875


def grouped(name, privatizer):
    """One privatizer for two groups of leaves, by one of optax's ways to divide a tree."""
    labels = {"a": "one", "b": "two"}
    is_one, is_two = (
        {leaf: label == group for leaf, label in labels.items()} for group in ("one", "two")
    )
    return {
        "multi_transform": lambda: optax.multi_transform(
            {"one": privatizer, "two": privatizer}, labels
        ),
        "partition": lambda: optax.partition({"one": privatizer, "two": privatizer}, labels),
        "masked": lambda: optax.chain(
            optax.masked(privatizer, is_one), optax.masked(privatizer, is_two)
        ),
    }[name]()


@pytest.mark.parametrize("name", ["multi_transform", "partition", "masked"])
def test_one_privatizer_in_two_groups_gives_each_leaf_its_own_noise(name):
    privatizer = gaussian_privatizer(stddev=1.0, key=KEY)
    grads = {"a": jnp.zeros(2000), "b": jnp.zeros(2000)}
    divided = grouped(name, privatizer)
    noise, _ = divided.update(grads, divided.init(grads), grads)
    assert share_of_equal(noise["a"], noise["b"]) < 0.03
    assert abs(np.corrcoef(noise["a"], noise["b"])[0, 1]) < 5 / math.sqrt(2000)
    # And it is what the tree would have got in one piece.
    whole = noise_of(privatizer, grads)
    np.testing.assert_array_equal(noise["a"], whole["a"])
    np.testing.assert_array_equal(noise["b"], whole["b"])


class Same:
    """A key of a dictionary that reads like every other of its kind."""

    def __init__(self, rank):
        self.rank = rank

    def __lt__(self, other):
        return self.rank < other.rank

    def __repr__(self):
        return "same"


def test_leaves_that_cannot_be_told_apart_are_refused():
    privatizer = gaussian_privatizer(stddev=1.0, key=KEY)
    grads = {Same(1): jnp.zeros(3), Same(2): jnp.zeros(3)}
    with pytest.raises(ValueError, match=r"several gradients have the path \[same\]"):
        privatizer.update(grads, privatizer.init(grads))


# Secrets, and what tells runs apart.


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"key": 5}, {"key": 6}),
        ({"key": 5}, {"key": b"\5"}),
        ({"key": 5}, {"key": 5 + 2**32}),
        ({"key": 5}, {"key": 5 + 2**64}),
        ({"key": b"a" * 32}, {"key": b"a" * 31 + b"b"}),
    ],
)
def test_another_secret_is_other_noise(one, other):
    grads = jnp.zeros(1000)
    noise = []
    for arguments in (one, other):
        privatizer = gaussian_privatizer(**({"stddev": 1.0, "key": KEY} | arguments))
        noise.append(privatizer.update(grads, privatizer.init(grads))[0])
        again = gaussian_privatizer(**({"stddev": 1.0, "key": KEY} | arguments))
        np.testing.assert_array_equal(noise[-1], again.update(grads, again.init(grads))[0])
    assert share_of_equal(*noise) < 0.04


def test_a_secret_is_the_key_that_it_makes():
    secret = 2**200 + 1
    made = gaussian_privatizer(stddev=1.0, key=key_from_secret(secret, "noise"))
    given_ = gaussian_privatizer(stddev=1.0, key=secret)
    grads = jnp.zeros(10)
    np.testing.assert_array_equal(
        *(privatizer.update(grads, privatizer.init(grads))[0] for privatizer in (made, given_))
    )


@pytest.mark.parametrize("show", [repr, str])
def test_the_key_is_not_shown(show):
    state = gaussian_privatizer(stddev=1.0, key=jax.random.key(987654321)).init(None)
    text = show((state, optax.EmptyState()))
    assert "GaussianPrivatizerState(key=<secret>, step=0)" in text
    assert "987654321" not in text


def test_another_key_is_other_noise():
    privatizer = gaussian_privatizer(stddev=1.0, key=KEY)
    one = noise_of(privatizer, jnp.zeros(1000))
    other = noise_of(privatizer, jnp.zeros(1000), key=jax.random.key(1))
    assert share_of_equal(one, other) < 0.04


def test_legacy_keys_do_as_well():
    legacy, typed = jax.random.PRNGKey(5), jax.random.key(5)
    grads = jnp.zeros(10)
    noisy = [
        privatizer.update(grads, privatizer.init(grads))[0]
        for privatizer in (gaussian_privatizer(stddev=1.0, key=key) for key in (legacy, typed))
    ]
    np.testing.assert_array_equal(*noisy)


# Dtypes.


@pytest.mark.parametrize(
    ("given_policy", "gradient", "drawn", "result"),
    [
        (None, "float32", "float32", "float32"),
        (None, "float64", "float64", "float64"),
        (("float32", "float32"), "float32", "float32", "float32"),
        (("float32", "float64"), "float32", "float64", "float64"),
        (("float32", "float32"), "float64", "float32", "float64"),
        (("float64", "float64"), "float64", "float64", "float64"),
        (("float32", "bfloat16", True), "float32", "bfloat16", "float32"),
        (("float32", "float32", True), "bfloat16", "float32", "float32"),
        (("bfloat16", "bfloat16", True), "bfloat16", "bfloat16", "bfloat16"),
        (("bfloat16", "float16", True), "bfloat16", "float16", "float32"),
    ],
)
def test_jax_draws_in_the_noise_dtype_and_adds_in_the_wider(given_policy, gradient, drawn, result):
    with jax.enable_x64(True):
        chosen = None if given_policy is None else policy(*given_policy)
        privatizer = gaussian_privatizer(stddev=1.0, key=KEY, policy=chosen, certified=False)
        grads = jnp.zeros(4000, gradient)
        noisy, _ = privatizer.update(grads, privatizer.init(grads))
        assert noisy.dtype == result
        # Every value is one of the dtype it was drawn in, and not of one half as precise.
        assert bool(jnp.all(noisy == noisy.astype(drawn)))
        half = {"float64": "float32", "float32": "bfloat16"}.get(drawn)
        if half:
            assert jnp.mean(noisy == noisy.astype(half)) < 0.1

        # The certified noise is in float64, and the result in the same dtype.
        certified = gaussian_privatizer(stddev=1.0, key=KEY, policy=chosen)
        known, _ = certified.update(grads, certified.init(grads))
        assert known.dtype == result
        is_on_grid = bool(jnp.all(known * 32 == jnp.round(known * 32)))
        assert is_on_grid == (jnp.finfo(drawn).nmant >= 23)


def test_nothing_of_a_wide_gradient_is_lost():
    with jax.enable_x64(True):
        grads = jnp.asarray([1.0 + 2.0**-40])
        privatizer = gaussian_privatizer(stddev=2.0**-60, key=KEY, policy=policy())
        noisy, _ = privatizer.update(grads, privatizer.init(grads))
        assert noisy[0] == grads[0]


@pytest.mark.parametrize("size", [1, 5])
def test_any_sum_is_split_into_the_grid_and_the_rest(size):
    """Against exact fractions: the noise of a sum is that of zero, drawn around what is left."""
    stddev, grid = 1.3, Fraction(grid_of(1.3))
    privatizer = gaussian_privatizer(stddev=stddev, key=KEY)
    sums = [0.0, -0.0, 1e-45, 0.4999 * grid_of(1.3), 1 / 3, -7.7, 2.0**23, 1e9, -1e30, 3e38]
    draws = noise_of(privatizer, jnp.zeros(size)).astype(np.float64)
    for start in sums:
        noisy, _ = privatizer.update(jnp.full(size, start), privatizer.init(None))
        exact = Fraction(float(np.float32(start)))
        for found, drawn in zip(np.asarray(noisy), draws, strict=True):
            # The draw around zero is within half a grid of the real number that is added.
            least, most = (exact + Fraction(drawn) + half * grid for half in (-1, 1))
            assert np.float32(float(least)) <= found <= np.float32(float(most))
            assert Fraction(float(found)) % grid == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so_and_stays_alone(value):
    noise = noise_of(privatizer := gaussian_privatizer(stddev=1.0, key=KEY), jnp.zeros(3))
    noisy, _ = privatizer.update(jnp.asarray([0.0, value, 0.0]), privatizer.init(None))
    assert np.isfinite(np.asarray(noisy)).tolist() == [True, False, True]
    assert (noisy[0], noisy[2]) == (noise[0], noise[2])


@pytest.mark.parametrize("chosen", [None, policy()])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn])
def test_gradient_narrower_than_accumulate_dtype_is_refused(chosen, dtype):
    privatizer = gaussian_privatizer(stddev=0.0, key=KEY, policy=chosen)
    grads = {"layers": [jnp.ones(3), jnp.ones(3, dtype)]}
    with pytest.raises(ValueError, match=r"layers\.1.*narrower than .*float32") as error:
        privatizer.update(grads, privatizer.init(grads))
    assert jnp.dtype(dtype).name in str(error.value)


def test_float32_is_narrow_where_float64_is_declared():
    with jax.enable_x64(True):
        privatizer = gaussian_privatizer(stddev=1.0, key=KEY, policy=policy("float64", "float64"))
        with pytest.raises(ValueError, match="float32, narrower than the accumulate dtype float64"):
            privatizer.update(jnp.ones(3, jnp.float32), privatizer.init(None))


@pytest.mark.parametrize(
    "leaf",
    [jnp.ones(3, jnp.int32), jnp.ones(3, bool), jnp.ones(3, jnp.complex64), jax.nn.relu, 1.0],
)
@pytest.mark.parametrize("stddev", [0.0, 1.0])
def test_other_leaves_are_refused(leaf, stddev):
    privatizer = gaussian_privatizer(stddev=stddev, key=KEY)
    with pytest.raises(ValueError, match=r"the gradient at w\.1"):
        privatizer.update({"w": (None, leaf)}, privatizer.init(None))


def test_a_whole_model_is_refused_before_the_next_optimizer_fails_on_its_functions():
    model = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    optimizer = optax.chain(gaussian_privatizer(stddev=1.0, key=KEY), optax.adam(1e-3))
    with pytest.raises(ValueError, match=r"at activation\. Give it .*trainable\(model\)"):
        optimizer.init(model)
    optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    optimizer.init(eqx.filter_eval_shape(lambda: eqx.filter(model, eqx.is_inexact_array)))


# Standard deviation 0, and others at the edge.


def test_no_noise_returns_the_gradient_bit_for_bit():
    grads = jnp.asarray([0.0, -0.0, 1e-45, jnp.nan, jnp.inf, 1 / 3], jnp.float32)
    with jax.enable_x64(True):
        privatizer = gaussian_privatizer(stddev=0, key=KEY, policy=policy("float32", "float64"))
        state = privatizer.init(grads)
        same, next_state = privatizer.update(grads, state)
        drawing = str(jax.make_jaxpr(privatizer.update)(grads, state))
    assert same.dtype == grads.dtype
    assert np.asarray(same).tobytes() == np.asarray(grads).tobytes()
    assert next_state.step == 1
    assert "random_bits" not in drawing


def test_edges_of_a_gradient():
    privatizer = gaussian_privatizer(stddev=1.0, key=KEY)
    grads = {
        "none": None,
        "empty": jnp.zeros((0, 3)),
        "scalar": jnp.zeros(()),
        "nan": jnp.nan * jnp.ones(1),
    }
    noisy, _ = privatizer.update(grads, privatizer.init(grads))
    assert noisy["none"] is None
    assert noisy["empty"].shape == (0, 3)
    assert noisy["scalar"].shape == ()
    assert noisy["scalar"] != 0
    assert np.isnan(noisy["nan"]).all()
    assert privatizer.update({}, privatizer.init({}))[0] == {}


@pytest.mark.parametrize("stddev", [math.nan, math.inf, -math.inf, np.float32("nan"), 10**400])
def test_stddev_that_is_not_finite_is_refused(stddev):
    with pytest.raises(ValueError, match=r"stddev must be a finite number; found .*clip norm"):
        gaussian_privatizer(stddev=stddev, key=KEY)


@pytest.mark.parametrize("stddev", [-1, -1e-9])
def test_negative_stddev_is_refused(stddev):
    with pytest.raises(ValueError, match=r"stddev must be at least 0 .*found -1"):
        gaussian_privatizer(stddev=stddev, key=KEY)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("stddev", [True, "1", None, 1j, np.ones(3)])
def test_stddev_that_is_no_number_is_refused(stddev):
    with pytest.raises(ValueError, match="stddev must be a real number"):
        gaussian_privatizer(stddev=stddev, key=KEY)


def test_traced_stddev_is_refused():
    with pytest.raises(ValueError, match=r"known before the step is compiled.*float\(stddev\)"):
        jax.jit(lambda stddev: gaussian_privatizer(stddev=stddev, key=KEY).init(None))(1.0)
    with pytest.raises(ValueError, match="JAX array"):
        gaussian_privatizer(stddev=jnp.ones(()), key=KEY)


@pytest.mark.parametrize("stddev", [1e-40, 1e39])
def test_stddev_that_the_noise_dtype_cannot_hold_is_refused(stddev):
    privatizer = gaussian_privatizer(stddev=stddev, key=KEY)
    with pytest.raises(ValueError, match="beyond the normal range of the noise dtype float32"):
        privatizer.update(jnp.zeros(3), privatizer.init(None))


@pytest.mark.parametrize("stddev", [np.float32(2), np.float64(2), np.int64(2), 2, 2.0])
def test_any_real_number_will_do(stddev):
    expected = noise_of(gaussian_privatizer(stddev=2.0, key=KEY), jnp.zeros(5))
    found = noise_of(gaussian_privatizer(stddev=stddev, key=KEY), jnp.zeros(5))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "key",
    [
        jax.random.split(jax.random.key(0), 3),
        jax.random.split(jax.random.key(0), 1),
        jax.random.split(jax.random.PRNGKey(0), 2),
        jnp.zeros(3, jnp.uint32),
        jnp.zeros(2, jnp.float32),
        jnp.zeros((), jnp.int32),
    ],
)
def test_what_is_not_one_key_is_refused(key):
    with pytest.raises(ValueError, match=r"key must be one key.*found"):
        gaussian_privatizer(stddev=1.0, key=key)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("key", [-987654321, b"", True, "987654321", 987654321.0, [987654321]])
def test_what_is_no_secret_is_refused_and_not_shown(key):
    with pytest.raises(ValueError, match=r"^key must ") as error:
        gaussian_privatizer(stddev=1.0, key=key)
    assert "987654321" not in str(error.value)


def test_without_a_key_every_init_is_fresh():
    """Also a compiled one, at each of its calls."""
    privatizer, grads, noises = gaussian_privatizer(stddev=1.0), jnp.zeros(1000), []
    compiled = jax.jit(privatizer.init)
    inits = (privatizer.init, privatizer.init, compiled, compiled)
    for state in [init(grads) for init in inits]:
        first, state = privatizer.update(grads, state)
        noises += [first, privatizer.update(grads, state)[0]]
    for i, one in enumerate(noises):
        assert all(share_of_equal(one, other) < 0.04 for other in noises[:i])
    assert jax.eval_shape(privatizer.init, grads).step.shape == ()
    quiet = gaussian_privatizer(stddev=0.0)
    np.testing.assert_array_equal(quiet.update(grads, quiet.init(grads))[0], grads)


def test_sharding_that_is_no_rules():
    with pytest.raises(ValueError, match=r"sharding must be a dp\.ShardingRules.*found"):
        checked_rules("data")
    with pytest.raises((ValueError, TypeCheckError), match="sharding"):
        gaussian_privatizer(stddev=1.0, key=KEY, sharding="data")


@pytest.mark.parametrize("implementation", ["rbg", "unsafe_rbg", "threefry2x32"])
def test_keys_of_other_generators_make_a_key_of_the_cipher(implementation):
    key = jax.random.key(0, impl=implementation)
    words = jax.random.bits(key, (8,), jnp.uint32)
    own = jax.random.wrap_key_data(words, impl=GENERATORS[12])
    privatizer = gaussian_privatizer(stddev=1.0, key=key)
    one, other = (noise_of(privatizer, jnp.zeros(100), key=given) for given in (key, own))
    np.testing.assert_array_equal(one, other)


def test_20_rounds_are_other_noise():
    keys = [key_from_secret(3, "noise", rounds=rounds) for rounds in (12, 20)]
    words = [jax.random.key_data(key).tolist() for key in keys]
    assert words[0] == words[1]
    privatizer = gaussian_privatizer(stddev=1.0, key=KEY)
    noises = [noise_of(privatizer, jnp.zeros(1000), key=key) for key in keys]
    assert share_of_equal(*noises) < 0.04
    assert abs(np.std(noises[1]) - 1) < 0.1


def test_what_no_counter_can_number_is_refused():
    privatizer = gaussian_privatizer(stddev=1.0, key=KEY)
    with pytest.raises(ValueError, match="at most 2\\*\\*32 in one array"):
        jax.eval_shape(
            privatizer.update,
            jax.ShapeDtypeStruct((2**17, 2**16), jnp.float32),
            privatizer.init(None),
        )


def test_a_tpu_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(ValueError, match=r"certified noise needs float64.*certified=False"):
        add_noise(jnp.zeros(3), KEY, 1.0)
    add_noise(jnp.zeros(3), KEY, 1.0, certified=False)


# In company.


@pytest.mark.parametrize("jit", [jax.jit, eqx.filter_jit])
def test_compiled_as_not_compiled(jit):
    privatizer = gaussian_privatizer(stddev=1.5, key=KEY)
    grads = {"w": jnp.ones((3, 4)), "b": None}
    state = privatizer.init(grads)
    plain, compiled = privatizer.update(grads, state), jit(privatizer.update)(grads, state)
    np.testing.assert_array_equal(compiled[0]["w"], plain[0]["w"])
    assert compiled[0]["b"] is None
    assert compiled[1] == plain[1]


def test_chain_adds_noise_before_the_optimizer():
    grads = {"w": jnp.ones(50)}
    privatizer = gaussian_privatizer(stddev=1.0, key=KEY)
    chained = optax.chain(privatizer, optax.sgd(0.5))

    @jax.jit
    def step(state, _):
        updates, state = chained.update(grads, state, grads)
        return state, updates

    # The state keeps its structure and dtypes, or the scan would refuse it.
    state, updates = jax.lax.scan(step, chained.init(grads), None, length=3)
    for t in range(3):
        noise = noise_of(privatizer, grads, t)["w"]
        np.testing.assert_allclose(updates["w"][t], -0.5 * (1 + noise), rtol=1e-5, atol=1e-6)
    assert state[0].step == 3


def test_state_has_a_shape_before_it_exists():
    privatizer = gaussian_privatizer(stddev=1.0, key=KEY)
    grads = {"w": jax.ShapeDtypeStruct((3,), jnp.float32)}
    state = jax.eval_shape(privatizer.init, grads)
    assert (state.step.shape, state.step.dtype) == ((), jnp.int32)
    assert (state.key.shape, state.key.dtype) == (KEY.shape, KEY.dtype)


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_donated_state_does_not_take_the_callers_key_along(make_key):
    key = make_key(3)
    privatizer = gaussian_privatizer(stddev=1.0, key=key)
    donating = functools.partial(jax.jit, donate_argnums=1)(privatizer.update)
    first, _ = donating(jnp.zeros(3), privatizer.init(None))
    again, _ = donating(jnp.zeros(3), privatizer.init(None))
    np.testing.assert_array_equal(first, again)
    jax.random.normal(key)


shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
trees = st.recursive(
    shapes.map(jnp.ones) | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=5,
)


@settings(max_examples=20, deadline=None)
@given(trees)
def test_any_tree_keeps_its_structure_and_shapes(grads):
    privatizer = gaussian_privatizer(stddev=1.0, key=KEY)
    noisy, _ = jax.eval_shape(privatizer.update, grads, privatizer.init(grads))
    assert jax.tree.structure(noisy) == jax.tree.structure(grads)
    assert [leaf.shape for leaf in jax.tree.leaves(noisy)] == [
        leaf.shape for leaf in jax.tree.leaves(grads)
    ]


def test_small_leaves_are_noised_as_alone():
    """In one kernel with others, whatever their number and dtypes."""
    privatizer = gaussian_privatizer(stddev=1.0, key=KEY)
    grads = {"a": jnp.zeros((3, 4)), "b": jnp.ones(70_000), "c": jnp.ones(()), "d": jnp.ones(9)}
    together = noise_of(privatizer, grads)
    for name, gradient in grads.items():
        alone = noise_of(privatizer, {name: gradient})
        np.testing.assert_array_equal(alone[name], together[name])


def test_noise_shares_no_key_with_examples():
    """split(key, n)[i] is fold_in(key, i): one key for both must not make noise of examples."""
    root = jax.random.key(7)
    privatizer = gaussian_privatizer(stddev=1.0, key=root)
    gradients = [jnp.zeros(4)] * 3
    noisy, _ = privatizer.update(gradients, privatizer.init(gradients))
    keys = jax.random.split(jax.random.fold_in(root, 0), 3)
    drawn = jax.vmap(lambda key: jax.random.normal(key, 4))(keys)
    assert not np.isclose(np.stack(noisy), np.asarray(drawn), atol=1 / 64).all(axis=1).any()


@pytest.mark.parametrize("around", [jax.vmap, lambda f: jax.jit(jax.vmap(f))])
def test_an_ensemble_gets_no_key_for_all_its_models(around):
    with pytest.raises(ValueError, match="init is under vmap: 2 models would get one key"):
        around(gaussian_privatizer(stddev=1.0).init)(jnp.ones((2, 3)))
    assert around(gaussian_privatizer(stddev=1.0, key=7).init)(jnp.ones((2, 3))) is not None
