"""check_precision finds each kind of violation wherever in a program it happens.

The steps are a few lines with the engine's marks, so that every kind can go through everything that
JAX's programs are made of; the engine's own are in test_precision.py.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.lax import DotAlgorithm, DotAlgorithmPreset
from jax.random import normal
from jax.sharding import PartitionSpec as P

import eqx_dp as dp
from eqx_dp.precision import stage
from tests.sharding.losses import mesh_of

MIXED = dp.load_policy("mixed_bfloat16")
BF16, F32 = jnp.bfloat16, jnp.float32
X, LEAF, SQUARE = (jax.ShapeDtypeStruct(shape, F32) for shape in ((4, 3), (3,), (3, 3)))
KEY = jax.eval_shape(lambda: jax.random.key(0))


def found(step, *args, policy=MIXED, **named):
    """What a step's report finds; every line is one of this file."""
    report = dp.check_precision(step, *args, policy=policy, **named)
    assert all("test_precision_flow.py:" in row.where for row in report.violations)
    return {(row.stage, row.declared, row.found) for row in report.violations}


def stages(step, *args, **named):
    return {row[0] for row in found(step, *args, **named)}


def summed(x):
    with stage("sum"):
        return jnp.sum(x, 0)


def between(change):
    """What is found of a step that changes the sum before it adds noise."""
    return found(lambda x, key: change(summed(x)) + normal(key, (3,)), X, KEY)


def of_noise(change):
    """What is found of a step that changes the noise before it adds it."""
    return found(lambda x, key: summed(x) + change(normal(key, (3,))), X, KEY)


SUM, NOISE = ("between clip and noise", "float32"), ("noise draw", "float32")


# Each kind of violation, in each part that programs are made of.


def with_backward_rule(f):
    wrapped = jax.custom_vjp(f)
    wrapped.defvjp(lambda x: (f(x), x), lambda x, g: jax.vjp(f, x)[1](g))
    return wrapped


def with_derivative_rule(f):
    wrapped = jax.custom_jvp(f)
    wrapped.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
    return wrapped


def on_devices(f, spec=None):
    options = {"mesh": mesh_of("auto", data=8), "check_vma": False}
    return jax.shard_map(f, in_specs=P(spec), out_specs=P(), **options)


def deep(f):
    body = jax.checkpoint(jax.jit(f))
    return jax.jit(lambda x: lax.scan(lambda c, _: (body(c), None), x, length=2)[0])


def in_the_second_step(f):
    """What came in first is met in the second step only."""
    return lambda x: lax.scan(lambda c, _: ((f(c[1]), c[0]), None), (x, x), length=2)[0][0]


# From a function of an array, to one of the same shape and dtype, to one that does it elsewhere.
ELSEWHERE = {
    "jit": lambda f: jax.jit(jax.jit(f)),
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, length=2)[0],
    "second step": in_the_second_step,
    "scanned over": lambda f: lambda x: lax.scan(lambda c, y: (c, f(y)), 0, x[None])[1][0],
    "remat": jax.checkpoint,
    "vmap": jax.vmap,
    "custom_vjp": with_backward_rule,
    "custom_jvp": with_derivative_rule,
    "cond": lambda f: lambda x: lax.cond(jnp.max(x) > 0, f, lambda x: x, x),
    "while": lambda f: lambda x: lax.while_loop(lambda x: jnp.max(x) > 0, f, x),
    "fori": lambda f: lambda x: lax.fori_loop(0, 2, lambda _, x: f(x), x),
    "shard_map": on_devices,
    "all of them": deep,
}


def sum_cast(elsewhere, dtype, x, key):
    total = elsewhere(lambda g: (1.5 * g).astype(dtype).astype(F32))(summed(x))
    return total + normal(key, total.shape)


def noise_drawn_and_added(elsewhere, dtype, x, key):
    return elsewhere(lambda g: g + normal(key, g.shape, dtype).astype(F32))(summed(x))


def noise_added(elsewhere, dtype, x, key):
    noise = normal(key, (3,)).astype(dtype)
    return elsewhere(lambda g: (g.astype(dtype) + noise).astype(F32))(summed(x))


def norm_computed(elsewhere, dtype, x, key):
    with stage("norm"):
        squares = elsewhere(lambda x: (x.astype(dtype) ** 2).astype(F32))(x)
    return summed(squares) + normal(key, (3,))


KINDS = {
    sum_cast: {"between clip and noise"},
    noise_drawn_and_added: {"noise draw"},
    noise_added: {"between clip and noise", "noise draw", "noise addition"},
    norm_computed: {"clip norm"},
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("place", ELSEWHERE)
def test_it_is_found_wherever_it_happens(place, kind):
    step = lambda dtype: lambda x, key: kind(ELSEWHERE[place], dtype, x, key)  # noqa: E731
    assert stages(step(F32), X, KEY) == set()
    assert stages(step(BF16), X, KEY) == KINDS[kind]


@pytest.mark.parametrize("place", ELSEWHERE)
def test_a_loss_that_ran_wider_or_narrower(place):
    def of(dtype, declared):
        def step(x, key):
            weight = jnp.ones((3, 3), dtype)
            with stage("loss"):
                x = ELSEWHERE[place](lambda x: (x.astype(dtype) @ weight).astype(F32))(x)
            return x + normal(key, x.shape)

        return {(row[0], row[2]) for row in found(step, SQUARE, KEY, policy=declared)}

    wide = dp.load_policy("float32")
    assert of(BF16, MIXED) == of(F32, wide) == set()
    assert of(F32, MIXED) == {("forward", "float32, wider")}
    assert of(BF16, wide) == {("forward", "bfloat16, narrower")}


def by_scan(add, start, microbatches):
    return lax.scan(lambda total, m: (add(total, m), None), start, microbatches)[0]


def by_while(add, start, microbatches):
    one = lambda c: (c[0] + 1, add(c[1], microbatches[c[0]]))  # noqa: E731
    return lax.while_loop(lambda c: c[0] < jnp.sum(c[1]), one, (0, start))[1]


@pytest.mark.parametrize("loop", [by_scan, by_while])
@pytest.mark.parametrize("place", ["jit", "remat", "custom_jvp", "custom_vjp", "cond", "shard_map"])
def test_microbatches_accumulated_narrow(place, loop):
    def step(x, key, dtype):
        def add(total, microbatch):
            return ELSEWHERE[place](lambda t: (t + summed(microbatch)).astype(dtype))(total)

        total = loop(add, jnp.zeros(3, dtype), x.reshape(2, 2, 3))
        return total.astype(F32) + normal(key, (3,))

    assert stages(step, X, KEY, dtype=F32) == set()
    assert stages(step, X, KEY, dtype=BF16) == {"between clip and noise"}


@pytest.mark.parametrize("reduce", [lax.psum, lax.pmean, lax.psum_scatter, lax.all_gather])
@pytest.mark.parametrize("place", ["jit", "second step", "cond", "while"])
def test_an_all_reduce_in_bfloat16(place, reduce):
    def step(x, key, dtype):
        def all_reduced(g):
            reduced = reduce(jnp.broadcast_to(g.astype(dtype), (8, 3)), "data")
            return jnp.sum(reduced.reshape(-1, 3), 0).astype(F32)

        everywhere = on_devices(lambda x: ELSEWHERE[place](all_reduced)(summed(x)), "data")
        return everywhere(x) + normal(key, (3,))

    spread = jax.ShapeDtypeStruct((16, 3), F32)
    assert stages(step, spread, KEY, dtype=F32) == set()
    devices = set() if reduce is lax.all_gather else {"sum over devices"}
    assert stages(step, spread, KEY, dtype=BF16) == {"between clip and noise"} | devices


# Ways to lose digits of a sum, or of its noise.


def stochastically_rounded(g):
    """The bits that are added to the sum's own are no noise."""
    bits = jax.random.bits(jax.random.key(0), g.shape) & jnp.uint32(0xFFFF)
    rounded = lax.bitcast_convert_type(g, jnp.uint32) + bits
    rounded = lax.bitcast_convert_type(rounded & jnp.uint32(0xFFFF0000), F32)
    return rounded.astype(BF16).astype(F32)


def convolution(precision):
    kernel, options = jnp.ones((1, 1, 1)), {"precision": precision}
    conv = lax.conv_general_dilated
    return lambda g: conv(g[None, None], kernel, (1,), "SAME", **options)[0, 0]


@pytest.mark.parametrize(
    ("narrow", "names"),
    [
        (lambda g: lax.reduce_precision(g, 8, 7), {"reduce_precision(8, 7)"}),
        (lambda g: jnp.round(g * 100).astype(jnp.int8).astype(F32) / 100, {"int8"}),
        (lambda g: (g * 2**9).astype(jnp.int32).astype(F32), {"int32"}),
        (lambda g: g.astype(jnp.float16).astype(F32), {"float16"}),
        (lambda g: lax.bitcast_convert_type(g, BF16)[..., 1].astype(F32), {"bfloat16"}),
        (stochastically_rounded, {"uint32", "bfloat16"}),
        (convolution("highest"), set()),
        (convolution(None), {"float32 at precision default (bfloat16 on accelerators)"}),
        # Where a sum is what, integers and truth values may say.
        (lambda g: jnp.where((g > 0) & jnp.isfinite(g), g, 0.0), set()),
        (lambda g: g[jnp.argsort(g)][jnp.arange(3) % 2], set()),
    ],
)
def test_ways_to_round_a_sum(narrow, names):
    assert between(narrow) == {(*SUM, name) for name in names}


def by_stage(key, dtype):
    with stage("draw"):
        return normal(key, (3,), F32).astype(dtype).astype(F32)


def of_bits(key, dtype):
    uniform = (jax.random.bits(key, (3,), dtype).astype(F32) + 0.5) / 2.0 ** (8 * dtype(0).nbytes)
    return jax.scipy.stats.norm.ppf(uniform)


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda key: 2.0 * normal(key, (3,)), None),
        (lambda key: normal(key, (3,), BF16).astype(F32), "bfloat16"),
        (lambda key: (normal(key, (3,)).astype(BF16) * 2).astype(F32), "bfloat16"),
        (lambda key: by_stage(key, BF16), "bfloat16"),
        (lambda key: of_bits(key, jnp.uint16), "16 random bits a number"),
    ],
)
def test_ways_to_draw_noise(draw, name):
    rows = found(lambda x, key: summed(x) + draw(key), X, KEY)
    assert {row[:2] for row in rows} == ({NOISE} if name else set())
    assert name is None or (*NOISE, name) in rows


def product(precision, preferred=None, matrix=None):
    def apply(g):
        left, numbers = jnp.eye(3) if matrix is None else matrix, (((1,), (0,)), ((), ()))
        options = {"precision": precision, "preferred_element_type": preferred}
        return lax.dot_general(left, g, numbers, **options).astype(F32)

    return apply


DEFAULT = "float32 at precision default (bfloat16 on accelerators)"
HIGH = "float32 at precision high (TensorFloat32 on accelerators)"
ALGORITHM = "product by an algorithm, of which no more is known"
PRODUCTS = {
    None: DEFAULT,
    "high": HIGH,
    ("highest", "high"): HIGH,
    DotAlgorithmPreset.F32_F32_F32: ALGORITHM,
    DotAlgorithm(F32, F32, F32): ALGORITHM,
    "highest": None,
}


@pytest.mark.parametrize(("precision", "name"), PRODUCTS.items(), ids=str)
def test_products_that_round_their_operands(precision, name):
    def over_examples(x, key):
        with stage("sum"):
            total = product(precision, matrix=jnp.ones((3, 4)))(x)[0]
        return total + normal(key, (3,))

    assert between(product(precision)) == ({(*SUM, name)} if name else set())
    assert of_noise(product(precision)) == ({(*NOISE, name)} if name else set())
    whole = {("sum over examples", "float32", name)} if name else set()
    assert found(over_examples, X, KEY) == whole


def test_the_default_precision_of_products_counts():
    with jax.default_matmul_precision("highest"):
        assert between(lambda g: jnp.eye(3) @ g) == set()


# What nothing is known of, and facts that are no facts of another value.

FOREIGN = {
    "pure_callback": lambda g: jax.pure_callback(lambda g: g, LEAF, g),
    "io_callback": lambda g: io_callback(lambda g: g, LEAF, g),
    "ffi_call": lambda g: jax.ffi.ffi_call("somewhere", LEAF)(g),
}


@pytest.mark.parametrize(("name", "foreign"), FOREIGN.items(), ids=FOREIGN)
def test_what_comes_out_of_a_callback(name, foreign):
    what = f"result of {name}, of which nothing is known"
    assert between(foreign) == {(*SUM, what)}
    assert of_noise(foreign) == {(*NOISE, what)}
    # After the noise, all is post-processing.
    assert found(lambda x, key: foreign(summed(x) + normal(key, (3,))), X, KEY) == set()


def test_no_alarm_on_callbacks_that_return_nothing():
    def looked_at(g):
        jax.debug.print("{}", g)
        io_callback(lambda g: None, None, g)
        return g

    assert between(looked_at) == of_noise(looked_at) == set()


def in_a_branch(total, noise):
    plus, minus = (lambda t, z: t + z), (lambda t, z: t - z)
    return lax.cond(jnp.max(noise) > 0, plus, minus, total, noise)


def in_a_loop(total, noise):
    """What is carried first is noise alone."""
    step = lambda c: (c[0], c[0] + c[1], c[2] + 1)  # noqa: E731
    return lax.while_loop(lambda c: c[2] < jnp.max(c[0]), step, (noise, total, 0))[1]


@pytest.mark.parametrize("added", [in_a_branch, in_a_loop])
def test_noise_that_comes_in_beside_the_sum(added):
    """Were a program told that all it is given is a clipped sum, noise would be none."""
    step = lambda x, key, dtype: added(summed(x), normal(key, (3,), dtype).astype(F32))  # noqa: E731
    assert stages(step, X, KEY, dtype=F32) == set()
    assert stages(step, X, KEY, dtype=BF16) == {"noise draw"}


def test_noise_on_a_part_is_not_noise_on_all():
    step = lambda x, key: summed(x).at[:2].add(normal(key, (2,))).astype(BF16)  # noqa: E731
    assert stages(step, X, KEY) == {"between clip and noise"}
