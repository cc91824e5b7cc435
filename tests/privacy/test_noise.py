import functools
import math
from fractions import Fraction

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from eqx_dp import privacy
from eqx_dp.precision import parse_policy
from eqx_dp.privacy import add_noise, gaussian, gaussian_privatizer, key_from_secret, noise_stream
from eqx_dp.privacy.grid import grid_of
from tests.tiers import curated

KEY = key_from_secret(20240607)
LAST = 2**32 - 1


def state_at(step, high=0):
    """Of a privatizer, after so many draws."""
    words = jnp.asarray(step, jnp.uint32), jnp.asarray(high, jnp.uint32)
    return privacy.GaussianPrivatizerState(privacy.NoiseStream(KEY, words))


def noise_of(privatizer, grads, step=0, high=0):
    """What one update adds to the gradients, on the host."""
    noisy, _ = privatizer.update(grads, state_at(step, high))
    return jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), noisy, grads)


def policy(accumulate="float32", noise="float32", unsafe=False):
    text = f"params=float32,compute=bfloat16,output=float32,accumulate={accumulate},noise={noise}"
    return parse_policy(text + (",unsafe=true" if unsafe else ""))


def share_of_equal(one, other):
    """Of two draws of the same noise, 1; of independent ones, about 1 %: noise is on a grid."""
    size = min(np.size(one), np.size(other))
    return np.mean(np.ravel(one)[:size] == np.ravel(other)[:size])


# The noise as a distribution.


@pytest.fixture
def alone(monkeypatch):
    """One device, whose pairs of entries are drawn together."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    return monkeypatch


@pytest.mark.optimized
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("draws", "stddev"),
    curated([(1, 1.0), (50, 1.0), (250, 1.0), (1, 1.999e-3)], [(1, 1.0)], every=2),
)
def test_noise_is_normal(draws, stddev):
    """By its cells: Kolmogorov-Smirnov, chi-squared, variance, tails. Slow: of 2 x 10^8."""
    privatizer, grid = gaussian_privatizer(stddev=stddev, key=KEY), grid_of(stddev)
    zeros, reach = jnp.zeros(4 * 10**6), stddev / grid
    last = int(7 * reach)

    @jax.jit
    def cells(step):
        noise, _ = privatizer.update(zeros, state_at(step))
        found = noise / np.float32(grid)
        return jnp.clip(found, -last, last).astype(jnp.int32) + last, jnp.all(found % 1 == 0)

    counts = np.zeros(2 * last + 1, int)
    for step in range(draws):
        found, is_on_grid = cells(jnp.asarray(step, jnp.int32))
        assert is_on_grid
        counts += np.bincount(found, minlength=counts.size)
    total = counts.sum()
    edges = (np.arange(-last, last) + 0.5) / reach
    below, above = stats.norm.cdf(edges), stats.norm.sf(edges)
    distance = np.abs(np.cumsum(counts)[:-1] / total - below).max()
    assert distance < 1.95 / math.sqrt(total)  # p = 1e-3
    share = np.where(
        np.arange(counts.size) <= last,
        np.diff(below, prepend=0, append=1),
        -np.diff(above, prepend=1, append=0),
    )
    is_many = share * total >= 10
    chi2 = np.sum((counts - share * total)[is_many] ** 2 / (share * total)[is_many])
    assert 1e-4 < stats.chi2.sf(chi2, is_many.sum() - 1) < 1 - 1e-4
    square = np.sum(counts * (np.arange(-last, last + 1) / reach) ** 2) / total
    assert abs(square - 1 - 1 / (12 * reach**2)) < 4 * math.sqrt(2 / total)
    for beyond in (3, 4, 4.5, 5, 5.5, 6):
        place = int(np.searchsorted(edges, beyond))
        for count, tail in (
            (counts[place + 1 :].sum(), above[place]),
            (counts[: counts.size - place - 1].sum(), below[edges.size - place - 1]),
        ):
            low, high = stats.binom(total, tail).interval(1 - 1e-5)
            assert low <= count <= high


def test_leaves_and_steps_are_independent():
    # Leaves of one size and of several: a key used twice repeats values in the longer one, too.
    sizes = {"a": 2000, "b": 2000, "c": 3000, "d": 1}
    grads = {name: jnp.zeros(size) for name, size in sizes.items()}
    privatizer = gaussian_privatizer(stddev=1.0, key=KEY)
    draws = [
        noise
        for at in ((0, 0), (1, 0), (2, 0), (0, 1), (1, 1))
        for noise in jax.tree.leaves(noise_of(privatizer, grads, *at))
    ]
    for i, one in enumerate(draws):
        for other in draws[:i]:
            assert one.size == 1 or other.size == 1 or share_of_equal(one, other) < 0.03
    long_draws = np.stack([draw[:2000] for draw in draws if draw.size >= 2000])
    correlations = np.corrcoef(long_draws) - np.eye(len(long_draws))
    assert np.abs(correlations).max() < 5 / math.sqrt(2000)

    # At every lag.
    first, second = (noise_of(privatizer, jnp.zeros(2**16), step) for step in (0, 1))
    spectrum = np.fft.rfft(first) * np.conj(np.fft.rfft(second))
    assert np.abs(np.fft.irfft(spectrum)).max() < 6 * math.sqrt(2**16)


# The noise as a function of key, step and leaf.


COUNTERS = [((0, 0), (1, 0)), ((LAST, 6), (0, 7)), ((LAST, LAST), (0, 0))]


@pytest.mark.parametrize(("start", "after"), COUNTERS)
def test_steps_follow_from_the_state_alone(start, after):
    """Of a privatizer, and of `add_noise`: they draw alike."""
    privatizer = gaussian_privatizer(stddev=1.0)
    grads = {"w": jnp.ones((3, 4)), "b": jnp.ones(4)}
    noisy, state = privatizer.update(grads, state_at(*start))
    assert (*map(int, state.stream.counter),) == after
    assert state.stream.key == KEY
    drawn = jax.jit(functools.partial(add_noise, stddev=1.0))
    again, stream = drawn(grads, state_at(*start).stream)
    assert eqx.tree_equal((noisy, state.stream), (again, stream))


def test_noise_stays_what_it_is():
    # An experiment with a key of its own repeats under a later release. If this fails, the
    # way from (key, counter, leaf, position) to a number has changed.
    grads = {"w": jnp.zeros((2, 2)), "b": [jnp.zeros(())]}
    noise = noise_of(gaussian_privatizer(stddev=1.0, key=KEY), grads, step=3)
    np.testing.assert_array_equal(noise["w"], [[-0.28125, -0.03125], [0.75, 0.0625]])
    assert noise["b"][0] == -1.09375


class Same(str):
    """A key of a dictionary that reads like every other of its kind."""

    __slots__ = ()

    def __repr__(self):
        return "same"


@pytest.mark.parametrize("kind", [str, Same])
def test_one_privatizer_in_two_groups_gives_each_leaf_its_own_noise(kind):
    privatizer = gaussian_privatizer(stddev=1.0, key=KEY)
    a, b = kind("a"), kind("b")
    grads = {a: jnp.zeros(2000), b: jnp.zeros(2000)}
    parts = {"one": privatizer, "two": privatizer}
    masks = [{a: True, b: False}, {a: False, b: True}]
    for divided in (
        optax.partition(parts, {a: "one", b: "two"}),
        optax.chain(*(optax.masked(privatizer, mask) for mask in masks)),
    ):
        noise, _ = divided.update(grads, divided.init(grads), grads)
        assert share_of_equal(noise[a], noise[b]) < 0.03


# Secrets, and what tells runs apart.

SECRETS = [
    (2**200 + 1, key_from_secret(2**200 + 1, "noise"), True),
    *((5, other, False) for other in (6, b"\5", 5 + 2**64)),
    (b"a" * 32, b"a" * 31 + b"b", False),
]


@pytest.mark.parametrize(("one", "other", "is_same"), SECRETS)
def test_noise_by_secret(one, other, is_same):
    privatizers = [gaussian_privatizer(stddev=1.0, key=key) for key in (one, other)]
    noises = [each.update(jnp.zeros(1000), each.init(None))[0] for each in privatizers]
    assert abs(np.std(noises[1]) - 1) < 0.1
    assert share_of_equal(*noises) == 1 if is_same else share_of_equal(*noises) < 0.04
    streams = [add_noise(jnp.zeros(1000), noise_stream(key), 1.0)[0] for key in (one, other)]
    assert share_of_equal(*streams) == 1 if is_same else share_of_equal(*streams) < 0.04
    assert share_of_equal(streams[0], noises[0]) < 0.04  # one secret for both is no accident


@pytest.mark.parametrize("show", [repr, str])
def test_the_key_is_not_shown(show):
    state = gaussian_privatizer(stddev=1.0, key=KEY).init(None)
    text = show((state, state.stream, optax.EmptyState()))
    assert "(GaussianPrivatizerState(<secret>), NoiseStream(<secret>), " in text


# Dtypes.


@pytest.mark.parametrize(
    ("chosen", "gradient", "result"),
    [
        (None, "float32", "float32"),
        (("float32", "float64"), "float32", "float64"),
        pytest.param(("float32", "float32"), "float64", "float64", marks=pytest.mark.slow),
        (("float32", "bfloat16", True), "float32", "float32"),
        pytest.param(("float32", "float32", True), "bfloat16", "float32", marks=pytest.mark.slow),
        (("bfloat16", "bfloat16", True), "bfloat16", "bfloat16"),
    ],
)
def test_dtypes(chosen, gradient, result):
    """Drawn on a grid, at least in float32; the sum is rounded to the result's dtype."""
    with jax.enable_x64(True):
        given = None if chosen is None else policy(*chosen)
        privatizer = gaussian_privatizer(stddev=1.0, key=KEY, policy=given)
        noisy, _ = privatizer.update(jnp.zeros(4000, gradient), privatizer.init(None))
        assert noisy.dtype == result
        plain = gaussian_privatizer(stddev=1.0, key=KEY)
        expected, _ = plain.update(jnp.zeros(4000), plain.init(None))
        assert bool(jnp.all(expected * 32 == jnp.round(expected * 32)))
        np.testing.assert_array_equal(noisy, expected.astype(result))


def test_nothing_of_a_wide_gradient_is_lost():
    with jax.enable_x64(True):
        grads = jnp.asarray([1.0 + 2.0**-40])
        privatizer = gaussian_privatizer(stddev=2.0**-56, key=KEY, policy=policy())
        noisy, _ = privatizer.update(grads, privatizer.init(grads))
        assert noisy[0] == grads[0]


@pytest.mark.parametrize("size", curated([1, 5], [5]))
def test_any_sum_is_split_into_the_grid_and_the_rest(size):
    """Against exact fractions: the noise of a sum is that of zero, drawn around what is left."""
    stddev, grid = 1.3, Fraction(grid_of(1.3))
    privatizer = gaussian_privatizer(stddev=stddev, key=KEY)
    sums = [0.0, -0.0, 1e-45, 0.4999 * grid_of(1.3), 1 / 3, -7.7, 2.0**23, 1e9, -1e30, 3e38]
    draws = noise_of(privatizer, jnp.zeros(size)).astype(np.float64)
    for start in sums:
        noisy, _ = privatizer.update(jnp.full(size, start), state_at(0))
        exact = Fraction(float(np.float32(start)))
        for found, drawn in zip(np.asarray(noisy), draws, strict=True):
            # The draw around zero is within half a grid of the real number that is added.
            least, most = (exact + Fraction(drawn) + half * grid for half in (-1, 1))
            assert np.float32(float(least)) <= found <= np.float32(float(most))
            assert Fraction(float(found)) % grid == 0
    # What is beyond whole cells decides how many draws it lifts to the next one.
    starts = jnp.zeros(4000), jnp.full(4000, 0.7 * grid_of(1.3))
    draws, lifted = (privatizer.update(x, privatizer.init(None))[0] for x in starts)
    assert abs(np.mean(np.asarray(lifted - draws)) / grid_of(1.3) - 0.7) < 0.05


@pytest.mark.parametrize(("dtype", "stddev"), [("float32", 1), ("float32", 2e30), ("float64", 1)])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so_and_stays_alone(value, dtype, stddev):
    with jax.enable_x64(True):
        privatizer = gaussian_privatizer(stddev=stddev, key=KEY, policy=policy())
        noise = noise_of(privatizer, jnp.zeros(3, dtype))
        noisy, _ = privatizer.update(jnp.asarray([0.0, value, 0.0], dtype), state_at(0))
    np.testing.assert_array_equal(np.asarray(noisy), [noise[0], value, noise[2]])


@pytest.mark.parametrize("sign", [1, -1])
def test_float64_sums_beyond_the_range_are_the_last_in_it(sign):
    """So the same noise moves two of them no further apart than they are."""
    within = [1.5 * 2.0**61, np.nextafter(2.0**62, 0)]
    sums = sign * grid_of(1.0) * np.array([*within, 2.0**62, 2.0**70, 1e300])
    with jax.enable_x64(True):
        privatizer = gaussian_privatizer(stddev=1.0, key=KEY, policy=policy())
        noisy = [privatizer.update(jnp.full(9, x), state_at(0))[0] for x in sums]
    np.testing.assert_allclose(noisy[:2], np.full((9, 2), sums[:2]).T, rtol=1e-15)
    np.testing.assert_array_equal(noisy[2:], [noisy[1]] * 3)


@pytest.mark.parametrize(
    ("chosen", "dtype", "declared"),
    [
        (None, "bfloat16", "float32"),
        (("float32", "float32"), "float16", "float32"),
        (("float32", "float32"), "float8_e4m3fn", "float32"),
        (("float64", "float64"), "float32", "float64"),
    ],
)
def test_gradient_narrower_than_accumulate_dtype_is_refused(chosen, dtype, declared):
    with jax.enable_x64(True):
        given = None if chosen is None else policy(*chosen)
        privatizer = gaussian_privatizer(stddev=0.0, key=KEY, policy=given)
        grads = {"layers": [jnp.ones(3, declared), jnp.ones(3, dtype)]}
        reason = rf"layers\.1.*{dtype}, narrower than the accumulate dtype {declared}"
        with pytest.raises(ValueError, match=reason):
            privatizer.update(grads, privatizer.init(grads))


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
    assert next_state == state
    assert "random_bits" not in drawing


def test_edges_of_a_gradient():
    privatizer = gaussian_privatizer(stddev=1.0, key=KEY)
    grads = {"none": None, "empty": jnp.zeros((0, 3)), "scalar": jnp.zeros(())}
    noisy, _ = privatizer.update(grads, privatizer.init(grads))
    assert noisy["none"] is None
    assert noisy["scalar"] != 0
    assert privatizer.update({}, privatizer.init({}))[0] == {}


NOT_FINITE = r"stddev must be a finite number; found .*clip norm"
ONE_KEY = r"key must be the secret itself.* one key of ChaCha.*found"


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("stddev", (math.nan, -math.inf, np.float32("nan"), 10**400), NOT_FINITE),
        ("stddev", (-1e-9,), r"stddev must be at least 0 .*found -1"),
        ("stddev", (True, "1", None, np.ones(3)), "must be a real number"),
        ("stddev", (jnp.ones(()),), r"before the step is compiled.*JAX array.*float\(stddev\)"),
        ("key", (jax.random.split(KEY, 1), jax.random.key(0), jax.random.PRNGKey(0)), ONE_KEY),
        ("key", (-987654321, b"", True, "987654321", 987654321.0, [987654321]), "^key must "),
    ],
)
def test_refused_and_not_shown(name, values, reason):
    for value in values:
        with pytest.raises(ValueError, match=reason) as error:
            gaussian_privatizer(**({"stddev": 1.0, "key": KEY} | {name: value}))
        assert "987654321" not in str(error.value)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("state", [KEY, jax.random.PRNGKey(0), 7, None])
def test_noise_takes_a_stream_and_no_key(state):
    with pytest.raises(ValueError, match=r"noisy, state = dp\.add_noise\(tree, state, stddev\)"):
        add_noise(jnp.zeros(3), state, 1.0)


@pytest.mark.parametrize("stddev", [1e-40, 1e-30, 2e37, 1e39])
def test_stddev_that_the_noise_dtype_cannot_hold_is_refused(stddev):
    privatizer = gaussian_privatizer(stddev=stddev, key=KEY)
    with pytest.raises(ValueError, match="beyond the normal range of the noise dtype float32"):
        privatizer.update(jnp.zeros(3), privatizer.init(None))


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
    assert jax.eval_shape(privatizer.init, grads).stream.key.shape == ()
    quiet = gaussian_privatizer(stddev=0.0)
    np.testing.assert_array_equal(quiet.update(grads, quiet.init(grads))[0], grads)


def test_a_leaf_of_more_than_2_to_the_32_entries():
    """Each block is encrypted for four bytes of position and the rest in the leaf's name."""
    rows, columns, name = 2**18, 2**17 + 1, np.uint32(3)
    half = rows * columns // 2  # a multiple of 64
    positions = [0, 1, 2**33, half, rows * columns - 1]

    @jax.jit
    def of_some():
        every = gaussian._places((rows, columns), name)
        return [[x[i // columns, i % columns] for x in every] for i in positions]

    with jax.enable_x64(True):
        for i, (low, own, is_second) in zip(positions, of_some(), strict=True):
            assert bool(is_second) == (i >= half)
            assert int(low) + (int(own) >> 20 << 32) == i % half
            assert int(own) % 2**20 == 3
    privatizer = gaussian_privatizer(stddev=1.0, key=KEY)
    shape = jax.ShapeDtypeStruct((rows, columns), jnp.float32)
    assert jax.eval_shape(privatizer.update, shape, privatizer.init(None))[0].shape == shape.shape


@pytest.mark.parametrize("platforms", [("tpu",), ("METAL",), ("cpu", "cuda", "rocm", "tpu")])
def test_no_platform_is_refused(platforms):
    noisy = jax.jit(functools.partial(add_noise, stddev=1.0))
    noisy.trace(jnp.zeros(3), noise_stream()).lower(lowering_platforms=platforms)


@pytest.mark.parametrize("size", curated([0, 1, 2, 5, 64], [5]))
def test_pairs_that_are_drawn_together_are_those_of_each_entry(size, alone):
    """On one CPU, and wherever an entry draws its pair by itself."""
    grads = {"a": jnp.linspace(-9, 9, size), "b": jnp.ones((3, 5)), "c": jnp.full(70_001, jnp.inf)}
    grads |= {"d": jnp.zeros(70_001), "e": jnp.zeros((3, 5)), "f": jnp.ones(70_001)}
    privatizer = gaussian_privatizer(stddev=0.3, key=KEY)
    together, _ = privatizer.update(grads, privatizer.init(None))
    alone.setattr(jax, "device_count", lambda: 8)
    each, _ = jax.jit(privatizer.update)(grads, privatizer.init(None))
    assert eqx.tree_equal(together, each)


# In company.


def test_donated_state_does_not_take_the_callers_key_along():
    privatizer = gaussian_privatizer(stddev=1.0, key=(key := jnp.copy(KEY)))
    donating = functools.partial(jax.jit, donate_argnums=1)(privatizer.update)
    first, _ = donating(jnp.zeros(3), privatizer.init(None))
    again, _ = donating(jnp.zeros(3), privatizer.init(None))
    np.testing.assert_array_equal(first, again)
    jax.random.normal(key)


@pytest.mark.slow
def test_small_leaves_are_noised_as_alone():
    """In one kernel with others, whatever their number, sizes and dtypes."""
    privatizer = gaussian_privatizer(stddev=1.0, key=KEY)
    grads = [jnp.zeros((3, 4)), jnp.ones(70_000), jnp.ones(()), jnp.ones(9)]
    together = noise_of(privatizer, grads)
    for place, gradient in enumerate(grads):
        alone = noise_of(privatizer, [jnp.zeros((0,))] * place + [gradient])
        np.testing.assert_array_equal(alone[place], together[place])


AROUND = [jax.vmap, lambda f: jax.jit(jax.vmap(f)), lambda f: jax.vmap(jax.jit(f))]


@pytest.mark.parametrize("around", curated(AROUND, AROUND[1:2]))
@pytest.mark.parametrize("secret", curated([None, 7], [None]))
def test_an_ensemble_gets_no_key_for_all_its_models(around, secret):
    grads, keys = jnp.ones((2, 1000)), jax.random.split(KEY, 2)
    noise = gaussian_privatizer(stddev=1.0, key=secret)
    state = noise.init(grads[0])
    for init in (noise.init, lambda _: noise.init(grads[0])):  # mapped, or nothing is
        with pytest.raises(ValueError, match="init is under vmap: 2 models would get one key"):
            around(init)(grads)
    with pytest.raises(ValueError, match=r"noise.* is under vmap: 2 models would get one key"):
        around(lambda x: noise.update(x, state)[0])(grads)
    # A sweep of what follows one noisy sum needs no other noise.
    assert share_of_equal(*around(lambda x: x * noise.update(grads[0], state)[0])(jnp.ones(2))) == 1
    states = around(lambda key: gaussian_privatizer(stddev=1.0, key=key).init(None))(keys)
    assert share_of_equal(*around(lambda x, state: noise.update(x, state)[0])(grads, states)) < 0.04


@pytest.mark.parametrize("key", [2**200 + 1, KEY])
def test_a_compiled_init_holds_no_secret(key):
    privatizer = gaussian_privatizer(stddev=1.0, key=key)
    traced = jax.jit(privatizer.init).trace(jnp.zeros(3))
    secret = key_from_secret(key, "noise") if isinstance(key, int) else key
    keys = secret, privatizer.init(jnp.zeros(3)).stream.key
    words = np.concatenate([*map(jax.random.key_data, keys)])
    texts = str(traced.jaxpr), traced.lower().as_text(), traced.lower().compile().as_text()
    assert not any(str(word) in text for word in words if word for text in texts)
    inits = privatizer.init, jax.jit(privatizer.init)
    noises = [privatizer.update(jnp.zeros(9), init(jnp.zeros(9)))[0] for init in inits]
    np.testing.assert_array_equal(*noises)
