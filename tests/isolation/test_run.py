"""What keeps examples apart is run as it is; what could let them meet is refused.

Each function takes one example of shape (3, 4). Whether examples meet in the batch that it is
mapped over is also tried: one of them is changed, and the others' results have to stay as they are,
bit for bit.
"""

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_batching import custom_vmap, sequential_vmap
from jax.experimental import hijax, io_callback, pallas
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import AxisType, PartitionSpec

from eqx_dp.isolation import of_one, run_apart
from eqx_dp.isolation.steering import may_be_trusted
from tests.isolation.test_primitives import NO_LOSS, changed_others
from tests.tiers import curated

EXAMPLES = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3, 4)), jnp.float32)


def conv(x, kernel, **options):
    return lax.conv_general_dilated(x, kernel, (1,), "VALID", **options)


def gradient_of_kernel(x, groups=1):
    kernel = jnp.ones((2, 3 // groups, 2)) if groups == 1 else jnp.ones((3, 1, 2))
    loss = lambda kernel: jnp.sum(conv(x[None], kernel, feature_group_count=groups) ** 2)  # noqa: E731
    return jax.grad(loss)(kernel)


def scanned(x):
    def body(carry, row):
        return jnp.tanh(carry + row), carry * row

    return lax.scan(body, jnp.zeros(4), x)


def kernel(x, weights):
    def multiply(x, weights, result):
        result[...] = x[...] * weights[...] + x[...].sum()

    struct = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pallas.pallas_call(multiply, out_shape=struct, interpret=True)(x, weights)


def until_small(x):
    return lax.while_loop(lambda y: jnp.max(y) > 0.1, lambda y: y / 2, x)


def on_two_devices(function):
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    specs = {"in_specs": PartitionSpec("model"), "out_specs": PartitionSpec("model")}
    return jax.shard_map(function, mesh=mesh, check_vma=False, **specs)


def on_host(function, **options):
    twice = lambda a: np.asarray(a) * 2  # noqa: E731
    return lambda x: function(twice, jax.ShapeDtypeStruct(x.shape, x.dtype), x, **options)


def shown(x):
    jax.debug.callback(lambda total: None, x.sum())
    return x * 2


APART = {
    "product": lambda x: (x @ x.T, x @ jnp.ones((4, 2)), jnp.ones((2, 3)) @ x),
    "kernel's gradient": gradient_of_kernel,
    "grouped kernel's gradient": lambda x: gradient_of_kernel(x, 3),
    "scan": scanned,
    "scan's gradient": jax.grad(lambda x: scanned(x)[0].sum()),
    "while": until_small,
    "cond": lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
    "checkpoint": jax.grad(jax.checkpoint(lambda x: jnp.sin(x).sum())),
    "callback, one by one": on_host(jax.pure_callback, vmap_method="sequential"),
    "solve": lambda x: lax.custom_linear_solve(
        lambda y: 2.0 * y, x, lambda _, b: b / 2, symmetric=True
    ),
    "collective of its own": jax.vmap(lambda r: r - lax.pmean(r, "rows"), axis_name="rows"),
    "collective of its own devices": lambda x: on_two_devices(lambda y: lax.psum(y, "model"))(
        x[:2]
    ),
    "shown while it runs": shown,
    "of parameters alone": lambda x: x * lax.while_loop(lambda i: i < 3, lambda i: i + 1, 0),
    "kernel": lambda x: kernel(x, jnp.arange(4.0)),
}


@pytest.mark.parametrize("name", curated(APART, [*APART][::4]))
def test_what_keeps_examples_apart_is_run(name):
    # Convolutions are rewritten, and may add up in another order: of whole numbers, to the same.
    examples = jnp.round(4 * EXAMPLES) if "kernel's gradient" in name else EXAMPLES
    results = run_apart(APART[name], NO_LOSS, examples)
    mapped = jax.vmap(APART[name])
    jax.tree.map(np.testing.assert_array_equal, results, mapped(examples))
    assert not changed_others(mapped, examples, [0.25 - 1.5 * examples[2]])


# What is refused, wherever it hides


@custom_vmap
def by_hand(x):
    return jnp.sin(x)


@by_hand.def_vmap
def _(size, is_mapped, x):
    return jnp.sin(x) + x.sum(0), True


@sequential_vmap
def one_after_the_other(x):
    return jnp.sin(x)


def doubled_by_a_kernel(x, **options):
    def multiply(x, result, *kept):
        result[...] = x[...] * 2

    struct = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pallas.pallas_call(multiply, out_shape=struct, interpret=True, **options)(x)


SCRATCH = {"scratch_shapes": [pallas.ANY((3, 4), jnp.float32)]}
WHOLE = {"in_specs": [pallas.BlockSpec(memory_space=pallas.ANY)]}


def drawn(impl, draw):
    key_of = lambda x: jax.random.key((x[0, 0] * 1000).astype(int), impl=impl)  # noqa: E731
    return lambda x: x + draw(key_of(x))


def bits(key):
    return jax.random.normal(key, (3, 4))


KEPT = jax.new_ref(jnp.zeros(()))


def remembered(x):
    KEPT[...] = x.sum()
    return x * KEPT[...]


def forgotten(x):
    """Written, and read by nobody here."""
    KEPT[...] = x.sum()
    return x


def local_reference(x):
    own = jax.new_ref(x)
    own[...] += 1
    return jax.freeze(own)


def own_primitive(name, rule):
    """A primitive of the user's, which JAX maps by the user's rule, with the name of JAX's."""
    primitive = Primitive(name)
    primitive.def_impl(jnp.sin)
    primitive.def_abstract_eval(lambda x: x)
    batching.primitive_batchers[primitive] = rule
    mlir.register_lowering(primitive, mlir.lower_fun(jnp.sin, multiple_results=False))
    return primitive.bind


own_sin = own_primitive("sin", lambda values, dims: (values[0], dims[0]))
own_log2 = own_primitive("log2", lambda values, dims: (values[0].sum(dims[0]), None))


REFUSED = {
    "psum": lambda x: lax.psum(x, "examples"),
    "pmax": lambda x: x - lax.pmax(x, "examples"),
    "all_gather": lambda x: lax.all_gather(x, "examples").sum(0),
    "ppermute": lambda x: lax.ppermute(x, "examples", [(i, (i + 1) % 4) for i in range(4)]),
    "reduce_scatter": lambda x: lax.psum_scatter(jnp.stack([x] * 4), "examples"),
    "all_to_all": lambda x: lax.all_to_all(jnp.stack([x] * 4), "examples", 0, 0),
    "custom_vmap_call": lambda x: by_hand(x),
    "custom_vmap_call, one after the other": lambda x: one_after_the_other(x),
    "pure_callback": on_host(jax.pure_callback, vmap_method="broadcast_all"),
    "pure_callback, expanded": on_host(jax.pure_callback, vmap_method="expand_dims"),
    "io_callback": on_host(io_callback),
    "random_bits": drawn("rbg", bits),
    "random_bits, unsafe": drawn("unsafe_rbg", bits),
    "random_split": drawn("unsafe_rbg", lambda key: bits(jax.random.split(key)[0])),
    "rng_bit_generator": lambda x: x + lax.rng_bit_generator(
        x[0].astype(jnp.uint32), (3, 4))[1].astype(float),
    "swap": remembered,
    "swap, read by nobody": forgotten,
    "new_ref": local_reference,
    "pallas_call": lambda x: doubled_by_a_kernel(x, **SCRATCH),
    "pallas_call, whole arrays": lambda x: doubled_by_a_kernel(x, **WHOLE),
    "sin": lambda x: own_sin(x),
    "regularized_incomplete_beta": lambda x: lax.betainc(abs(x), abs(x) + 1, jax.nn.sigmoid(x)),
    "log2, left unmapped": lambda x: own_log2(x),
    "noinline": lambda x: eqxi.noinline(jnp.sin)(x),
    "unvmap_max": lambda x: x * eqxi.unvmap_max(x[0, 0].astype(int)),
    "unvmap_any": lambda x: jnp.where(eqxi.unvmap_any(x[0, 0] > 1), 0.0, x),
    "unvmap_all": lambda x: lax.cond(eqxi.unvmap_all(x[0, 0] > 1), jnp.sin, jnp.cos, x),
}  # fmt: skip


def with_rule(function, rule):
    """The identity, with the function in a derivative rule, differentiated."""
    if rule == "jvp":
        same = jax.custom_jvp(lambda x: x)
        same.defjvp(lambda x, t: (x[0], t[0] * lax.stop_gradient(function(x[0]))))
        return jax.grad(lambda x: same(x).sum())
    same = jax.custom_vjp(lambda x: x)
    if rule == "forward":
        same.defvjp(lambda x: (x, function(x)), lambda kept, g: (g * kept,))
    else:
        same.defvjp(lambda x: (x, x), lambda kept, g: (g * function(kept),))
    return jax.grad(lambda x: same(x).sum())


HIDDEN = {
    "jit": jax.jit,
    "remat": lambda f: jax.grad(lambda x: jnp.sum(jax.checkpoint(lambda y: f(y) * y)(x))),
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
    "while": lambda f: lambda x: lax.while_loop(
        lambda s: s[0] < 2, lambda s: (s[0] + 1, f(s[1])), (0, x))[1],
    "how long a while runs": lambda f: lambda x: lax.while_loop(
        lambda s: f(s).max() > 5, lambda s: s / 2, x),
    "cond": lambda f: lambda x: lax.cond(x[0, 0] > 0, f, jnp.cos, x),
    "which branch": lambda f: lambda x: lax.cond(f(x).max() > 0, jnp.sin, jnp.cos, x),
    "inner vmap": lambda f: lambda x: jax.vmap(lambda _: f(x))(jnp.arange(2.0)),
    "jvp rule": lambda f: with_rule(f, "jvp"),
    "forward rule": lambda f: with_rule(f, "forward"),
    "backward rule": lambda f: with_rule(f, "backward"),
    "shard_map": lambda f: lambda x: jnp.sum(on_two_devices(lambda y: f(y[0])[None])(
        jnp.stack([x, x])), 0),
    "linear solve": lambda f: lambda x: lax.custom_linear_solve(
        lambda y: 2.0 * y, x, lambda _, b: f(b), symmetric=True),
}  # fmt: skip
KINDS = ["psum", "custom_vmap_call", "io_callback", "unvmap_max", "random_bits", "new_ref"]


def mapped_run(function):
    """The results for all examples, each of which is run apart, with the axis bound outside."""
    within = lambda x: run_apart(function, NO_LOSS, x[None])[0]  # noqa: E731
    return jax.vmap(within, axis_name="examples")(EXAMPLES)


def refuse(function, primitive):
    """It is refused by name and line."""
    with pytest.raises(ValueError, match=r"may depend on other examples") as caught:
        mapped_run(function)
    assert f"'{primitive}'" in str(caught.value)
    assert "test_run.py" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("name", "function"), REFUSED.items(), ids=REFUSED)
def test_what_could_let_examples_meet_is_refused(name, function):
    refuse(function, name.split(",")[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", HIDDEN)
def test_it_is_refused_wherever_it_hides(place, kind):
    function = HIDDEN[place](REFUSED[kind])
    try:
        jax.make_jaxpr(jax.vmap(function, axis_name="examples"))(EXAMPLES)
    except Exception:
        return  # JAX itself refuses it
    refuse(function, kind)


def test_the_advice_says_what_to_do():
    for name, advice in {
        "psum": "GroupNorm",
        "custom_vmap_call": "without the rule",
        "io_callback": "jax.debug.callback",
        "pure_callback": "sequential",
        "random_bits": "threefry",
        "swap": "jax.new_ref",
        "pallas_call": "blocks only",
        "unvmap_max": "EQX_ON_ERROR",
        "regularized_incomplete_beta": "jax.lax.while_loop",
        "sin": "not known",
    }.items():
        assert advice in refuse(REFUSED[name], name)


def test_what_depends_on_no_example_may_do_anything():
    key = jax.random.key(0, impl="rbg")

    def function(x):
        total = lax.psum(jnp.arange(4.0), "examples") + jax.random.normal(key, (4,))
        return x * (total + eqxi.unvmap_max(jnp.arange(4)))

    expected = EXAMPLES * (4 * jnp.arange(4.0) + jax.random.normal(key, (4,)) + 3)
    np.testing.assert_allclose(mapped_run(function), expected, rtol=1e-6)


def test_mixing_that_nothing_comes_of_is_no_matter():
    def function(x):
        jax.debug.callback(lambda total: None, lax.psum(x, "examples"))
        return x * 2

    np.testing.assert_array_equal(mapped_run(function), EXAMPLES * 2)


def test_what_another_function_on_the_host_has_seen_is_not_read():
    """It takes nothing of an example itself, and a compiled function around it takes nothing."""
    seen = []

    def function(x):
        jax.debug.callback(seen.append, x.sum())
        return x * jax.jit(lambda: io_callback(lambda: seen[-1], x[0, 0]))()

    with pytest.raises(ValueError, match="'io_callback'"):
        run_apart(function, NO_LOSS, EXAMPLES)


def test_a_batching_rule_that_a_primitive_brings_along_is_not_used():
    """A rule by which an example would get the sum of all."""

    class Doubled(getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive):
        def __init__(self, aval):
            self.in_avals, self.out_aval, self.params = (aval,), aval, {}
            super().__init__()

        def expand(self, x):
            return x * 2

        def batch(self, axis, args, dims):
            return args[0].sum(0), None

    doubled = lambda x: jax.jit(Doubled(jax.typeof(x)))(x)  # noqa: E731
    np.testing.assert_array_equal(run_apart(doubled, NO_LOSS, EXAMPLES), EXAMPLES * 2)


def test_with_a_reduction_of_the_users_own_none_is_trusted():
    """Within derivative rules, which run later, it could pass for one of Equinox."""
    trusted = lambda f: may_be_trusted(jax.make_jaxpr(f)(EXAMPLES[0, 0]).jaxpr)  # noqa: E731
    loop = lambda x: eqxi.while_loop(  # noqa: E731
        lambda s: s[0] < 3, lambda s: s * 2, x, kind="checkpointed", max_steps=4)  # fmt: skip
    assert trusted(loop)
    assert not trusted(lambda x: loop(x) + eqxi.unvmap_max(x[0].astype(int)))


# The engine's own sums


summed = of_one(lambda x: (x.sum((1, 2)), x.sum(0)))


def test_a_sum_by_the_engine_stands_by_itself():
    own, total = run_apart(summed, NO_LOSS, EXAMPLES, out_axes=(0, None))
    np.testing.assert_allclose(own, EXAMPLES.sum((1, 2)), rtol=1e-6)
    np.testing.assert_allclose(total, EXAMPLES.sum(0), rtol=1e-6)


def test_a_sum_by_the_engine_does_not_come_back_nor_hide_what_met_before():
    for function, where in {
        lambda x: x * summed(x)[1]: "mul",
        lambda x: summed(by_hand(x))[0]: "custom_vmap_call",
    }.items():
        with pytest.raises(ValueError, match=f"'{where}'"):
            run_apart(function, NO_LOSS, EXAMPLES)
