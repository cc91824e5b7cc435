"""The numbers are those of `jax.random.normal`, bit for bit, and cost one kernel and no memory."""

import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from scipy import special

import eqx_dp as dp
from eqx_dp.privacy import normals
from eqx_dp.privacy.normals import normal
from eqx_dp.privacy.random_bits import positions, threefry2x32
from tests.sharding.compiled import collectives
from tests.sharding.losses import mesh_of

pytestmark = [pytest.mark.optimized, pytest.mark.sampled(5)]

KEY = jax.random.key(20240607, impl="threefry2x32")


def assert_same_bits(found, expected):
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()


def asks_jax(key, shape, dtype=jnp.float32):
    """Whether JAX draws the bits, and not what is written out here."""
    return "random_bits" in str(jax.make_jaxpr(lambda key: normal(key, shape, dtype))(key))


# The generator.


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((2**32 - 1,) * 2, (2**32 - 1,) * 2, (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_known_answers_of_threefry2x32(key, counter, expected):
    """The vectors of 20 rounds that come with Random123 (kat_vectors)."""
    found = threefry2x32(tuple(map(jnp.uint32, key)), tuple(map(jnp.uint32, counter)))
    assert tuple(map(int, found)) == expected


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (1, 4), (3, 1, 2), (2, 1, 3, 1, 2)])
def test_places_count_row_by_row(shape):
    expected = np.arange(np.prod(shape), dtype=np.uint32).reshape(shape)
    assert_same_bits(positions(shape), expected)


@pytest.mark.parametrize("shape", [(2**32,), (2**16, 2**16), (1, 2**31, 1, 2), (2**30, 2, 2)])
def test_places_of_as_many_entries_as_32_bits_count(shape):
    """At both ends and in the middle: what is computed is those entries, not the whole array."""
    rng = np.random.default_rng(0)
    entries = [[0] * len(shape), [length - 1 for length in shape]]
    entries += [[int(rng.integers(length)) for length in shape] for _ in range(3)]

    @jax.jit
    def found():
        slices = [tuple(slice(i, i + 1) for i in entry) for entry in entries]
        return jnp.concatenate([positions(shape)[entry].ravel() for entry in slices])

    assert found.lower().compile().memory_analysis().temp_size_in_bytes < 2**20
    np.testing.assert_array_equal(found(), np.ravel_multi_index(np.transpose(entries), shape))


# The numbers.


@pytest.mark.parametrize(
    "shape",
    [
        (),
        (0,),
        (3, 0, 2),
        (1,),
        (1, 1, 1),
        (7,),
        (100_003,),
        (501, 3),
        (5, 1, 3),
        (2, 3, 4, 5),
        (3, 2, 1, 4, 2),
    ],
)
@pytest.mark.parametrize(
    "make_key", [jax.random.key, pytest.param(jax.random.PRNGKey, marks=pytest.mark.exhaustive)]
)
def test_the_numbers_of_jax(shape, make_key):
    key = make_key(3)
    expected = jax.random.normal(key, shape, jnp.float32)
    assert not asks_jax(key, shape)
    assert_same_bits(normal(key, shape, jnp.float32), expected)
    assert_same_bits(jax.jit(lambda key: normal(key, shape, jnp.float32))(key), expected)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=5).map(tuple), st.integers(0, 2**64 - 1))
def test_the_numbers_of_jax_for_any_shape_and_key(shape, words):
    key = jax.random.wrap_key_data(jnp.asarray([words >> 32, words % 2**32], jnp.uint32))
    found, expected = (draw(key, shape, jnp.float32) for draw in (normal, jax.random.normal))
    assert_same_bits(found, expected)


def normals_by_hand(bits):
    """In float64, but for u, which is between -1 + 2^-24 and 1 in steps of 2^-22."""
    uniform = 2 * (np.asarray(bits) >> 9) / 2**23 - 1 + 2**-24
    return np.sqrt(2) * special.erfinv(np.float64(np.float32(uniform)))


def test_the_numbers_by_hand():
    """Threefry in numpy's integers of 64 bits, the rest in float64."""
    words = [0x01234567, 0x89ABCDEF]
    schedule = [*words, words[0] ^ words[1] ^ 0x1BD11BDA]
    x = np.full(1000, schedule[0], np.uint64)
    y = (np.arange(1000, dtype=np.uint64) + np.uint64(schedule[1])) % 2**32
    for turn in range(20):
        distance = [13, 15, 26, 6, 17, 29, 16, 24][turn % 8]
        x = (x + y) % 2**32
        y = ((y << distance) % 2**32 | y >> (32 - distance)) ^ x
        if turn % 4 == 3:
            block = turn // 4 + 1
            x = (x + schedule[block % 3]) % 2**32
            y = (y + schedule[(block + 1) % 3] + block) % 2**32
    expected = normals_by_hand(x ^ y)
    key = jax.random.wrap_key_data(jnp.asarray(words, jnp.uint32), impl="threefry2x32")
    found = normal(key, (1000,), jnp.float32)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bits", [0, 2**9 - 1, 2**31, 2**32 - 2**9, 2**32 - 1])
def test_no_bits_give_what_is_not_a_number(bits):
    found = float(normals._normal_of_bits(jnp.uint32(bits)))
    np.testing.assert_allclose(found, normals_by_hand(bits), rtol=1e-5, atol=1e-6)
    assert abs(found) < 5.5


def test_keys_under_vmap():
    keys = jax.random.split(KEY, 3)
    found = jax.vmap(lambda key: normal(key, (4, 5), jnp.float32))(keys)
    assert_same_bits(found, jnp.stack([normal(key, (4, 5), jnp.float32) for key in keys]))


def test_shapes_before_there_are_numbers():
    found = jax.eval_shape(lambda key: normal(key, (3, 4), jnp.float32), KEY)
    assert (found.shape, found.dtype) == ((3, 4), jnp.float32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes_are_drawn_by_jax(dtype):
    with jax.enable_x64(True):
        assert asks_jax(KEY, (5, 3), dtype)
        assert_same_bits(normal(KEY, (5, 3), dtype), jax.random.normal(KEY, (5, 3), dtype))


@pytest.mark.parametrize("implementation", ["rbg", "unsafe_rbg"])
def test_other_generators_are_left_to_jax(implementation):
    key = jax.random.key(0, impl=implementation)
    assert asks_jax(key, (5, 3))
    found, expected = (draw(key, (5, 3), jnp.float32) for draw in (normal, jax.random.normal))
    assert_same_bits(found, expected)


def test_counters_that_depend_on_the_whole_shape_are_left_to_jax():
    with jax.threefry_partitionable(False):
        assert asks_jax(KEY, (5, 3))
        found = normal(KEY, (5, 3), jnp.float32)
        assert_same_bits(found, jax.random.normal(KEY, (5, 3), jnp.float32))
    assert not asks_jax(KEY, (5, 3))
    assert not np.isin(found, normal(KEY, (5, 3), jnp.float32)).all()


@pytest.mark.parametrize(
    ("shape", "expected"), [((2**16, 2**16), False), ((2**16 + 1, 2**16), True)]
)
def test_more_entries_than_32_bits_count_are_left_to_jax(shape, expected):
    assert asks_jax(KEY, shape) == expected


# Leaves whose rows are short, or vectors of odd length, and others.
SLOW = [(2051,), (1025, 2), (700, 3), (16, 32, 3, 3), (1, 4097), (50, 41)]
FAST = [(2048,), (2047,), (2056,), (300, 33), (64, 64, 8), ()]


@pytest.mark.parametrize("shape", [*SLOW, *FAST])
def test_the_numbers_of_jax_on_one_device(shape):
    expected = jax.random.normal(KEY, shape, jnp.float32)
    assert_same_bits(normal(KEY, shape, jnp.float32), expected)
    drawn = jax.jit(lambda key: normal(key, shape, jnp.float32))
    assert_same_bits(drawn(KEY), expected)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.integers(1, 5), st.integers(1, 40), st.integers(50, 90))
def test_the_numbers_of_jax_for_short_rows(last, middle, first):
    shape = (first, middle, last)
    found = normal(KEY, shape, jnp.float32)
    assert_same_bits(found, jax.random.normal(KEY, shape, jnp.float32))


@pytest.mark.slow
def test_short_rows_under_vmap():
    keys = jax.random.split(KEY, 2)
    found = jax.vmap(lambda key: normal(key, (900, 3), jnp.float32))(keys)
    assert_same_bits(found, jnp.stack([jax.random.normal(key, (900, 3)) for key in keys]))


@pytest.mark.slow
@pytest.mark.parametrize("spec", [P("data"), P(None, "data")])
def test_short_rows_that_are_spread_without_rules(spec):
    mesh = mesh_of("auto", data=4)
    noise = dp.gaussian_privatizer(stddev=1.0, key=KEY)
    gradients = jnp.zeros((64, 16, 3, 3))
    expected, _ = noise.update(gradients, noise.init(gradients))
    spread = jax.device_put(gradients, NamedSharding(mesh, spec))
    update = jax.jit(noise.update)
    found, _ = update(spread, noise.init(gradients))
    np.testing.assert_array_equal(found, expected)
    assert found.sharding.is_equivalent_to(spread.sharding, 4)
    assert collectives(update.lower(spread, noise.init(gradients)).compile().as_text()) == []


# What they cost.


def draws(text):
    """Of each kernel of a compiled program, how often threefry is written out in it."""
    found, computation = {}, ""
    for line in text.splitlines():
        header = re.match(r"(?:ENTRY )?%?(\S+) \(.*\) -> .* \{$", line)
        computation = header.group(1) if header else computation
        found[computation] = found.get(computation, 0) + (" shift-left(" in line)
    return [count / 20 for count in found.values() if count >= 20]


LEAVES = {
    "a": jnp.ones((256, 50)),
    "b": [jnp.ones(64), jnp.ones((256, 50)), None],
    "c": jnp.ones((3, 3, 32, 32)),
}
SHORT_ROWS = {"kernel": jnp.ones((32, 32, 3, 3)), "odd": jnp.ones(9001)}
NUM_LEAVES = len(jax.tree.leaves(LEAVES))
LAMB = optax.lamb(1e-3)


def privatizer():
    return dp.gaussian_privatizer(stddev=1.3, key=KEY)


def test_noise_is_drawn_in_one_kernel_a_leaf_and_held_nowhere():
    update = functools.partial(jax.jit, donate_argnums=0)(privatizer().update)
    program = update.lower(LEAVES, privatizer().init(LEAVES)).compile()
    assert draws(program.as_text()) == [1] * NUM_LEAVES
    # Keys, and what the loops that make them carry.
    assert program.memory_analysis().temp_size_in_bytes < 0.1 * LEAVES["c"].nbytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [optax.adam(1e-3), optax.adamw(1e-3), optax.sgd(1e-3), optax.sgd(1e-3, 0.9), LAMB],
    ids=["adam", "adamw", "sgd", "momentum", "lamb"],
)
def test_noise_is_drawn_once_however_many_operations_read_it(optimizer):
    chained = optax.chain(privatizer(), optimizer)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, gradients):
        updates, state = chained.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    program = step.lower(LEAVES, chained.init(LEAVES), LEAVES).compile()
    assert draws(program.as_text()) == [1] * NUM_LEAVES
    if optimizer is not LAMB:  # which needs norms of what it would do
        # The noisy sums: the gradients themselves are not given away here.
        sums = sum(leaf.nbytes for leaf in jax.tree.leaves(LEAVES))
        assert program.memory_analysis().temp_size_in_bytes < 1.1 * sums


def test_noise_of_short_rows_is_drawn_once():
    chained = optax.chain(privatizer(), optax.adam(1e-3))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, gradients):
        updates, state = chained.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    program = step.lower(SHORT_ROWS, chained.init(SHORT_ROWS), SHORT_ROWS).compile()
    assert draws(program.as_text()) == [1, 1]
    # The noise in rows, and the noisy sums.
    sums = sum(leaf.nbytes for leaf in jax.tree.leaves(SHORT_ROWS))
    assert program.memory_analysis().temp_size_in_bytes < 2.3 * sums


@pytest.mark.slow
def test_noise_is_drawn_once_in_a_made_step():
    model = eqx.nn.MLP(6, 3, 8, 2, key=jax.random.key(0))
    plan = dp.PrivacyPlan(sampling_prob=0.1, steps=3, noise_multiplier=1.0, delta=1e-6)
    step = dp.make_step(
        lambda model, x, y: jnp.sum((model(x) - y) ** 2),
        optax.adam(1e-3),
        plan,
        num_examples=100,
        seed=5,
        l2_clip_norm=1.0,
    )
    batch = jnp.ones((16, 6)), jnp.ones((16, 3))
    lowered = step.lower(step.init(model), *batch, is_padding_example=np.zeros(16, bool))
    assert draws(lowered.compile().as_text()) == [1] * 6


@pytest.mark.slow
def test_holding_a_sum_together_changes_no_bit():
    """What keeps XLA from drawing twice is a division by one: for every kind of number."""
    values = [0.0, -0.0, 1 / 3, -1e38, 1e-38, 1e-45, np.inf, -np.inf, np.nan]
    gradients = jnp.asarray([*values, *(-x for x in values)], jnp.float32)
    noise = privatizer()
    key = dp.privacy.fold_text(KEY, "eqx_dp noise")
    key = dp.privacy.fold_text(jax.random.fold_in(key, 0), f"{gradients.shape} ")
    drawn = np.float32(1.3) * jax.random.normal(key, gradients.shape)
    found, _ = noise.update(gradients, noise.init(gradients))
    np.testing.assert_array_equal(found, gradients + drawn)


# On several devices.


MESHES = [
    ({"data": 1}, P("data")),
    ({"data": 2}, P("data")),
    ({"data": 8}, P("data")),
    ({"data": 2, "model": 4}, P("model", "data")),
    ({"data": 2, "model": 4}, P(None, ("data", "model"))),
]


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize(("axes", "spec"), MESHES)
def test_every_device_draws_its_own_part(kind, axes, spec):
    shape = (64, 48)
    mesh = mesh_of(kind, **axes)
    sharding = NamedSharding(mesh, spec)

    @jax.jit
    def drawn(key):
        if kind == "explicit":
            return normal(key, shape, jnp.float32, out_sharding=sharding)
        return jax.lax.with_sharding_constraint(normal(key, shape, jnp.float32), sharding)

    with jax.set_mesh(mesh):
        program = drawn.lower(KEY).compile().as_text()
        found = drawn(KEY)
    assert found.sharding.is_equivalent_to(sharding, 2)
    assert_same_bits(found, jax.random.normal(KEY, shape))
    assert collectives(program) == []
    part = "{},{}".format(*sharding.shard_shape(shape))
    assert set(re.findall(r"f32\[(\S+)\]\S* log-plus-one\(", program)) == {part}


@pytest.mark.slow
def test_a_mesh_with_axes_of_both_kinds():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto, AxisType.Explicit))
    rules = dp.ShardingRules(mesh, examples=("a",), params=(("w", P("a", "b")),))
    noise = dp.gaussian_privatizer(stddev=1.0, key=KEY, sharding=rules)
    alone = dp.gaussian_privatizer(stddev=1.0, key=KEY)
    zeros = {"w": jnp.zeros((8, 12))}
    expected, _ = alone.update(zeros, alone.init(zeros))
    with jax.set_mesh(mesh):
        spread = rules.shard_accumulators(zeros)
        found, _ = jax.jit(noise.update)(spread, noise.init(spread))
    np.testing.assert_array_equal(found["w"], expected["w"])
