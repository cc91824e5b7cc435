"""check_precision finds each kind of violation wherever in a program it happens.

The steps are a few lines with the engine's marks, so that every kind can go through everything that
JAX's programs are made of; the engine's own are in test_precision.py.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import eqx_dp as dp
from eqx_dp.precision import stage
from tests.sharding.losses import mesh_of

MIXED = dp.load_policy("mixed_bfloat16")
BF16, F32 = jnp.bfloat16, jnp.float32
X = jax.ShapeDtypeStruct((4, 3), F32)
KEY = jax.eval_shape(lambda: jax.random.key(0))


def with_backward_rule(f):
    wrapped = jax.custom_vjp(f)
    wrapped.defvjp(lambda x: (f(x), x), lambda x, g: jax.vjp(f, x)[1](g))
    return wrapped


def with_derivative_rule(f):
    wrapped = jax.custom_jvp(f)
    wrapped.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
    return wrapped


def on_devices(f):
    mesh = mesh_of("auto", data=8)
    return jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)


def deep(f):
    body = jax.checkpoint(jax.jit(f))
    return jax.jit(lambda x: lax.scan(lambda c, _: (body(c), None), x, length=2)[0])


# From a function of an array, to one of the same shape and dtype, to one that does it elsewhere.
ELSEWHERE = {
    "jit": lambda f: jax.jit(jax.jit(f)),
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, length=2)[0],
    # What came in first is met in the second step only.
    "second step": lambda f: (
        lambda x: lax.scan(lambda c, _: ((f(c[1]), c[0]), None), (x, x), length=2)[0][0]
    ),
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
elsewhere = pytest.mark.parametrize("elsewhere", ELSEWHERE.values(), ids=ELSEWHERE)


def stages(step, *args):
    """The stages at which a step does not run as declared."""
    report = dp.check_precision(step, *args, policy=MIXED)
    assert all("test_precision_flow.py" in row.where for row in report.violations)
    return {row.stage for row in report.violations}


def summed(x):
    with stage("sum"):
        return jnp.sum(x, 0)


@elsewhere
def test_a_sum_cast_down(elsewhere):
    def of(dtype):
        def step(x, key):
            total = elsewhere(lambda g: (1.5 * g).astype(dtype).astype(F32))(summed(x))
            return total + jax.random.normal(key, total.shape)

        return stages(step, X, KEY)

    assert of(F32) == set()
    assert of(BF16) == {"between clip and noise"}


@elsewhere
def test_noise_drawn_narrow(elsewhere):
    def of(dtype):
        def step(x, key):
            noise = lambda z: z + jax.random.normal(key, z.shape, dtype).astype(F32)  # noqa: E731
            return summed(x) + elsewhere(noise)(jnp.zeros(3))

        def added_there(x, key):
            noise = lambda z: z + jax.random.normal(key, z.shape, dtype).astype(F32)  # noqa: E731
            return elsewhere(noise)(summed(x))

        return stages(step, X, KEY) | stages(added_there, X, KEY)

    assert of(F32) == set()
    assert of(BF16) == {"noise draw"}


@elsewhere
def test_noise_added_narrow(elsewhere):
    def of(dtype):
        def step(x, key):
            noise = jax.random.normal(key, (3,)).astype(dtype)
            return elsewhere(lambda g: (g.astype(dtype) + noise).astype(F32))(summed(x))

        return stages(step, X, KEY)

    assert of(F32) == set()
    assert of(BF16) == {"between clip and noise", "noise draw", "noise addition"}


@elsewhere
def test_a_loss_that_ran_wider_or_narrower(elsewhere):
    def of(dtype, declared):
        def forward(x):
            weight = jnp.ones((3, 3), dtype)
            with stage("loss"):
                return elsewhere(lambda x: (x.astype(dtype) @ weight).astype(F32))(x)

        def step(x, key):
            return forward(x) + jax.random.normal(key, x.shape)

        x = jax.ShapeDtypeStruct((3, 3), F32)
        report = dp.check_precision(step, x, KEY, policy=dp.load_policy(declared))
        return {(row.stage, row.found) for row in report.violations}

    assert of(BF16, "mixed_bfloat16") == of(F32, "float32") == set()
    assert of(F32, "mixed_bfloat16") == {("forward", "float32, wider")}
    assert of(BF16, "float32") == {("forward", "bfloat16, narrower")}


@pytest.mark.parametrize("kind", ["jit", "remat", "custom_jvp", "custom_vjp", "cond", "shard_map"])
def test_microbatches_accumulated_narrow(kind):
    def of(dtype, loop):
        def step(x, key):
            def add(total, microbatch):
                return ELSEWHERE[kind](lambda t: (t + summed(microbatch)).astype(dtype))(total)

            total = loop(add, jnp.zeros(3, dtype), x.reshape(2, 2, 3))
            return total.astype(F32) + jax.random.normal(key, (3,))

        return stages(step, X, KEY)

    for loop in (by_scan, by_while):
        assert of(F32, loop) == set()
        assert of(BF16, loop) == {"between clip and noise"}


def by_scan(add, start, microbatches):
    return lax.scan(lambda total, m: (add(total, m), None), start, microbatches)[0]


def by_while(add, start, microbatches):
    one = lambda c: (c[0] + 1, add(c[1], microbatches[c[0]]))  # noqa: E731
    return lax.while_loop(lambda c: c[0] < jnp.sum(c[1]), one, (0, start))[1]


@pytest.mark.parametrize("reduce", [lax.psum, lax.pmean, lax.psum_scatter, lax.all_gather])
@pytest.mark.parametrize("kind", ["jit", "second step", "remat", "custom_jvp", "cond", "while"])
def test_an_all_reduce_in_bfloat16(kind, reduce):
    def of(dtype):
        def everywhere(x):
            def all_reduced(g):
                reduced = reduce(jnp.broadcast_to(g.astype(dtype), (8, 3)), "data")
                return jnp.sum(reduced.reshape(-1, 3), 0).astype(F32)

            return ELSEWHERE[kind](all_reduced)(summed(x))

        def step(x, key):
            mapped = jax.shard_map(
                everywhere,
                mesh=mesh_of("auto", data=8),
                in_specs=P("data"),
                out_specs=P(),
                check_vma=False,
            )
            return mapped(x) + jax.random.normal(key, (3,))

        return stages(step, jax.ShapeDtypeStruct((16, 3), F32), KEY)

    assert of(F32) == set()
    devices = set() if reduce is lax.all_gather else {"sum over devices"}
    assert of(BF16) == {"between clip and noise"} | devices


@elsewhere
def test_a_clip_norm_computed_narrow(elsewhere):
    def of(dtype):
        def step(x, key):
            with stage("norm"):
                squares = elsewhere(lambda x: (x.astype(dtype) ** 2).astype(F32))(x)
            return summed(squares) + jax.random.normal(key, (3,))

        return stages(step, X, KEY)

    assert of(F32) == set()
    assert of(BF16) == {"clip norm"}


def stochastically_rounded(g):
    bits = jax.random.bits(jax.random.key(0), g.shape) & jnp.uint32(0xFFFF)
    rounded = lax.bitcast_convert_type(g, jnp.uint32) + bits
    rounded = lax.bitcast_convert_type(rounded & jnp.uint32(0xFFFF0000), F32)
    return rounded.astype(BF16).astype(F32)


@pytest.mark.parametrize(
    ("narrow", "name"),
    [
        (lambda g: lax.reduce_precision(g, 8, 7), "reduce_precision(8, 7)"),
        (lambda g: jnp.round(g * 100).astype(jnp.int8).astype(F32) / 100, "int8"),
        (lambda g: (g * 2**9).astype(jnp.int32).astype(F32), "int32"),
        (lambda g: g.astype(jnp.float16).astype(F32), "float16"),
        (lambda g: lax.bitcast_convert_type(g, BF16)[..., 1].astype(F32), "bfloat16"),
    ],
)
def test_other_ways_to_round_a_sum(narrow, name):
    assert between(narrow) == {("between clip and noise", "float32", name)}


def test_a_sum_rounded_by_random_bits():
    """The bits that are added to the sum's own are no noise."""
    assert {row[2] for row in between(stochastically_rounded)} == {
        "uint32",
        "bfloat16",
    }


def between(change):
    def step(x, key):
        return change(summed(x)) + jax.random.normal(key, (3,))

    report = dp.check_precision(step, X, KEY, policy=MIXED)
    return {(row.stage, row.declared, row.found) for row in report.violations}


def test_no_alarm_on_integers_and_truth_values_that_say_where_a_sum_is_what():
    assert between(lambda g: jnp.where((g > 0) & jnp.isfinite(g), g, 0.0)) == set()
    assert between(lambda g: g[jnp.argsort(g)][jnp.arange(3) % 2]) == set()


# Facts of one operand are no facts of another.


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

    def of(dtype):
        def step(x, key):
            return added(summed(x), jax.random.normal(key, (3,), dtype).astype(F32))

        return stages(step, X, KEY)

    assert of(F32) == set()
    assert of(BF16) == {"noise draw"}


def test_noise_on_a_part_is_not_noise_on_all():
    def step(x, key):
        total = summed(x)
        total = total.at[:2].add(jax.random.normal(key, (2,)))
        return total.astype(BF16)

    assert stages(step, X, KEY) == {"between clip and noise"}


def test_a_sum_over_examples_by_scatter_is_counted_whole():
    def step(x, index, key):
        with stage("sum"):
            total = jnp.zeros(5).at[index].add(x)
        return total + jax.random.normal(key, (5,))

    index = jax.ShapeDtypeStruct((4,), jnp.int32)
    report = dp.check_precision(step, jax.ShapeDtypeStruct((4,), F32), index, KEY, policy=MIXED)
    (row,) = [use for use in report.summary if use.kind == "sum over examples"]
    assert (row.amount, row.times, row.dtype) == (5, 1, "float32")
