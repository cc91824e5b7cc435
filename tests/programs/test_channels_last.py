"""Programs after their convolutions are channels last: the same results, from another layout.

Entries are small whole numbers, so that results are exact in every dtype and any order.
"""

import re

import equinox as eqx
import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import source_info_util
from jax.sharding import PartitionSpec as P

import eqx_dp as dp
from eqx_dp.programs import channels_last
from tests import models
from tests.sharding.losses import mesh_of

pytestmark = [pytest.mark.optimized, pytest.mark.sampled(6)]

METHODS = ["per_example", "book_keeping", "ghost", "auto"]


def numbers(*shape, dtype=np.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(-2, 3, shape), dtype)


def convolutions(jaxpr):
    """All convolutions of a program, wherever they are; a program met twice counts twice."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if equation.primitive.name == "conv_general_dilated":
            yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                if isinstance(inner, jex_core.Jaxpr | jex_core.ClosedJaxpr):
                    yield from convolutions(inner)


def is_channels_last(equation):
    images, kernel, results = equation.params["dimension_numbers"]
    last = len(images) - 1
    return (images[:2], kernel[:2], results[:2]) == ((0, last), (last, last - 1), (0, last)) and (
        sorted(images[2:]) == list(images[2:])
        and sorted(kernel[2:]) == list(kernel[2:])
        and sorted(results[2:]) == list(results[2:])
    )


def rewritten(function, *args):
    """The program of a function, and what becomes of it: as many convolutions, all in order."""
    program = jax.make_jaxpr(function)(*args)
    found = channels_last(program)
    before, after = list(convolutions(program)), list(convolutions(found))
    assert len(before) == len(after) > 0
    assert all(map(is_channels_last, after))
    assert {equation.params["batch_group_count"] for equation in after} == {1}
    assert found.in_avals == program.in_avals
    assert found.out_avals == program.out_avals
    assert found.effects == program.effects
    return program, found


def check(function, *args):
    """Both programs give the same, one operation after the other and compiled."""
    program, found = rewritten(function, *args)
    expected = jex_core.jaxpr_as_fun(program)(*args)
    results = jex_core.jaxpr_as_fun(found)
    for given in (results(*args), jax.jit(results)(*args)):
        for one, other in zip(given, expected, strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            assert jax.typeof(one) == jax.typeof(other)
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    return found


def conv(images, kernel, strides=None, padding="SAME", **options):
    strides = strides or (1,) * (images.ndim - 2)
    return lax.conv_general_dilated(images, kernel, strides, padding, **options)


# From a layout that is known to be right: three groups of images are three times as many images.
KINDS = {
    "1-D": ((2, 3, 7), (4, 3, 3), {}),
    "2-D": ((2, 3, 7, 6), (4, 3, 3, 2), {}),
    "3-D": ((2, 3, 4, 5, 3), (4, 3, 2, 3, 2), {}),
    "no space": ((2, 3), (4, 3), {}),
    "no images": ((0, 3, 7, 6), (4, 3, 3, 2), {}),
    "strided": ((2, 3, 7, 6), (4, 3, 3, 2), {"strides": (2, 3), "padding": "VALID"}),
    "padded": ((2, 3, 7, 6), (4, 3, 3, 2), {"padding": ((2, 0), (-1, 3))}),
    "dilated images": (
        (2, 3, 7, 6),
        (4, 3, 3, 2),
        {"lhs_dilation": (2, 3), "padding": ((2, 1), (0, 3))},
    ),
    "dilated kernel": ((2, 3, 7, 6), (4, 3, 3, 2), {"rhs_dilation": (2, 3)}),
    "groups": ((2, 6, 7, 6), (4, 3, 3, 2), {"feature_group_count": 2}),
    "depthwise": ((2, 3, 7, 6), (6, 1, 3, 2), {"feature_group_count": 3}),
    "groups of images": ((6, 3, 7, 6), (9, 3, 3, 2), {"batch_group_count": 3}),
    "each image": ((3, 2, 7), (6, 2, 3), {"batch_group_count": 3, "padding": "VALID"}),
    "exchanged": (
        (2, 3, 3, 2),
        (4, 3, 7, 6),
        {"lhs_dilation": (2, 3), "padding": ((2, 3), (-1, 4))},
    ),
    "exchanged, strided": (
        (2, 3, 5, 2),
        (4, 3, 6, 4),
        {
            "lhs_dilation": (3, 2),
            "rhs_dilation": (1, 2),
            "strides": (2, 3),
            "padding": ((1, 2), (5, 6)),
        },
    ),
    "exchanged, groups": (
        (2, 6, 3, 2),
        (8, 3, 7, 6),
        {"lhs_dilation": (2, 3), "padding": ((2, 3), (4, 4)), "feature_group_count": 2},
    ),
    "exchanged, groups of images": (
        (6, 3, 3),
        (9, 3, 7),
        {"lhs_dilation": (2,), "padding": ((2, 3),), "batch_group_count": 3},
    ),
    "all": (
        (6, 3, 7, 6),
        (9, 3, 3, 2),
        {
            "batch_group_count": 3,
            "strides": (2, 1),
            "padding": ((3, 1), (0, 2)),
            "lhs_dilation": (2, 1),
            "rhs_dilation": (1, 2),
        },
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind):
    images, kernel, options = KINDS[kind]
    check(lambda x, w: conv(x, w, **options), numbers(*images), numbers(*kernel, seed=1))


LAYOUTS = [
    ("NCHW", "OIHW", "NCHW"),
    ("NHWC", "HWIO", "NHWC"),
    ("CHWN", "IHWO", "HWNC"),
    ("WNHC", "OWHI", "HCWN"),
    ("NWHC", "HWIO", "NHWC"),
    ("NHWC", "HWOI", "NHWC"),
    ("NHWC", "HWIO", "NCHW"),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids="-".join)
@pytest.mark.parametrize("kind", ["strided", "groups", "groups of images"])
def test_every_layout(layout, kind):
    images, kernel, options = KINDS[kind]
    order = lambda names, of: [of.index(name) for name in names]  # noqa: E731
    x = numbers(*images).transpose(order(layout[0], "NCHW"))
    w = numbers(*kernel, seed=1).transpose(order(layout[1], "OIHW"))
    check(lambda x, w: conv(x, w, dimension_numbers=layout, **options), x, w)


def test_groups_of_images_by_hand():
    """Group after group, each with kernels of its own."""
    x, w = numbers(6, 2, 5), numbers(9, 2, 3, seed=1)
    _, found = rewritten(lambda x, w: conv(x, w, batch_group_count=3), x, w)
    expected = [conv(x[2 * i :][:2], w[3 * i :][:3]) for i in range(3)]
    np.testing.assert_array_equal(
        jex_core.jaxpr_as_fun(found)(x, w)[0], jnp.concatenate(expected, 1)
    )


@pytest.mark.parametrize(
    ("given", "result"),
    [
        (jnp.float32, None),
        (jnp.float16, None),
        (jnp.bfloat16, None),
        (jnp.bfloat16, jnp.float32),
        (jnp.int8, jnp.int32),
        (jnp.complex64, None),
    ],
)
def test_every_dtype(given, result):
    x, w = numbers(2, 3, 5, dtype=given), numbers(4, 3, 2, dtype=given, seed=1)
    found = check(lambda x, w: conv(x, w, preferred_element_type=result), x, w)
    assert found.out_avals[0].dtype == (result or given)


def test_float64_and_precision():
    with jax.enable_x64(True):
        x, w = numbers(2, 3, 5, dtype=np.float64), numbers(4, 3, 2, dtype=np.float64, seed=1)
        found = check(lambda x, w: conv(x, w, precision="highest"), x, w)
    (equation,) = convolutions(found)
    assert set(equation.params["precision"]) == {lax.Precision.HIGHEST}


@pytest.mark.parametrize("transpose_kernel", [False, True])
def test_transposed(transpose_kernel):
    check(
        lambda x, w: lax.conv_transpose(
            x, w, (2, 1), "SAME", transpose_kernel=transpose_kernel,
            dimension_numbers=("NCHW", "OIHW", "NCHW"),
        ),
        numbers(2, 3, 4, 5),
        numbers(3, 3, 3, 2, seed=1),
    )  # fmt: skip


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("exchanged")])
def test_small_images_with_holes_become_the_kernel(kind):
    images, kernel, options = KINDS[kind]
    x, w = numbers(*images), numbers(*kernel, seed=1)
    program, found = rewritten(lambda x, w: conv(x, w, **options), x, w)
    (before,), (after,) = convolutions(program), convolutions(found)
    holes, gaps = (before.params[f"{side}_dilation"] for side in ("lhs", "rhs"))
    assert (after.params["rhs_dilation"], after.params["lhs_dilation"]) == (holes, gaps)


def test_depthwise_convolutions_stay():
    x, w = numbers(2, 3, 7, 6), numbers(3, 1, 3, 2, seed=1)
    loss = lambda x, w: jnp.sum(conv(x, w, feature_group_count=3) ** 2)  # noqa: E731
    program = jax.make_jaxpr(jax.grad(loss))(x, w)
    assert channels_last(program) is program


def test_precisions_are_exchanged_as_well():
    precision = (lax.Precision.HIGHEST, lax.Precision.DEFAULT)
    images, kernel, options = KINDS["exchanged"]
    found = check(
        lambda x, w: conv(x, w, precision=precision, **options), numbers(*images), numbers(*kernel)
    )
    (equation,) = convolutions(found)
    assert equation.params["precision"] == precision[::-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["2-D", "strided", "groups", "depthwise", "dilated kernel", "dilated images"]
)
def test_gradients_of_each_example(kind):
    images, kernel, options = KINDS[kind]

    def gradients(kernel, x):
        loss = lambda kernel, x: jnp.sum(conv(x[None], kernel, **options) ** 2)  # noqa: E731
        return jax.vmap(jax.grad(loss, argnums=(0, 1)), in_axes=(None, 0))(kernel, x)

    check(gradients, numbers(*kernel, seed=1), numbers(*images))


# Elsewhere in programs.


def same(x):
    """A convolution from an array to one of its shape."""
    return jnp.sign(conv(x, numbers(3, 3, 3, 3, seed=1)))


def with_backward_rule(x):
    @jax.custom_vjp
    def f(x):
        return same(x)

    f.defvjp(lambda x: (same(x), None), lambda _, g: (7 * same(g),))
    return f(x)


def with_derivative_rule(x):
    @jax.custom_jvp
    def f(x):
        return same(x)

    f.defjvp(lambda x, dx: (same(*x), 7 * conv(*dx, numbers(3, 3, 3, 3, seed=1))))
    return f(x)


def solved(x):
    """4 y + a little of a convolution of y; not to the end."""
    kernel = numbers(3, 3, 3, 3, seed=1) / 64
    return lax.custom_linear_solve(
        lambda y: 4 * y + conv(y, kernel),
        x,
        lambda matrix, b: b / 4 - conv(b, kernel) / 16,
        transpose_solve=lambda matrix, b: matrix(b),
    )


ELSEWHERE = {
    "jit": jax.jit(jax.jit(same)),
    "vmap": lambda x: jax.vmap(lambda x: same(x[None])[0])(x),
    "scan": lambda x: lax.scan(lambda c, y: (same(c), same(y)), x, jnp.stack([x, -x])),
    "while": lambda x: lax.while_loop(
        lambda state: jnp.sum(same(state[1]) != 9) * state[0] < 500,
        lambda state: (state[0] + 1, same(state[1])),
        (0, x),
    ),
    "fori": lambda x: lax.fori_loop(0, jnp.int32(x[0, 0, 0, 0]) + 3, lambda _, x: same(x), x),
    "cond": lambda x: lax.cond(x[0, 0, 0, 0] > 0, same, lambda x: -same(same(x)), x),
    "switch": lambda x: lax.switch(jnp.int32(2), [lambda x: x, lambda x: x, same], x),
    "remat": jax.checkpoint(same),
    "gradient of remat": jax.grad(lambda x: jnp.sum(jax.checkpoint(same)(x) * x)),
    "custom_vjp": with_backward_rule,
    "custom_jvp": with_derivative_rule,
    "custom_linear_solve": solved,
    "deep": lambda x: jax.jit(
        lambda x: lax.scan(
            lambda c, _: (lax.cond(c[0, 0, 0, 0] > 0, jax.jit(same), lambda x: x, c), None),
            x,
            length=3,
        )[0]
    )(x),
}


@pytest.mark.parametrize("where", ELSEWHERE)
def test_wherever_they_are(where):
    check(ELSEWHERE[where], numbers(2, 3, 5, 4))


@pytest.mark.parametrize("rule", [with_backward_rule, with_derivative_rule])
def test_rules_for_derivatives_stay(rule):
    x = numbers(2, 3, 5, 4)
    program, found = rewritten(rule, x)
    gradients = [
        jax.grad(lambda x, f=f: jnp.sum(f(x)[0] * x))(x)
        for f in map(jex_core.jaxpr_as_fun, (program, found))
    ]
    np.testing.assert_array_equal(*gradients)


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [False, True])
def test_on_devices(check_vma):
    mesh = mesh_of("auto", data=4)

    def gradients(x, w):
        found = jax.grad(lambda w: jnp.sum(conv(x, w) ** 2))(w)
        return found if check_vma else lax.psum(found, "data")

    check(
        jax.shard_map(
            gradients,
            mesh=mesh,
            in_specs=(P("data"), P()),
            out_specs=P(),
            check_vma=check_vma,
        ),
        numbers(8, 3, 5, 4),
        numbers(4, 3, 3, 3, seed=1),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("images", "kernel", "results"),
    [
        (P("data"), P(), P("data")),
        (P("data"), P("model"), P("data", "model")),
        (P(None, None, "data"), P(), P(None, None, "data")),
        (P(), P("model"), P(None, "model")),
    ],
)
def test_on_explicit_axes(images, kernel, results):
    """Results live where they did: each is told where, dimension by dimension."""
    mesh = mesh_of("explicit", data=4, model=2)
    with jax.set_mesh(mesh):
        x = jax.sharding.reshard(numbers(4, 3, 8, 8), images)
        w = jax.sharding.reshard(numbers(4, 3, 3, 3, seed=1), kernel)
        loss = lambda x, w: jnp.sum(conv(x, w, out_sharding=results) ** 2)  # noqa: E731
        check(lambda x, w: conv(x, w, out_sharding=results), x, w)
        check(jax.grad(loss, argnums=(0, 1)), x, w)


def test_spread_groups_of_images_stay():
    with jax.set_mesh(mesh_of("explicit", data=2)):
        x = jax.sharding.reshard(numbers(4, 3, 8), P("data"))
        function = lambda x, w: conv(x, w, batch_group_count=2, out_sharding=P("data"))  # noqa: E731
        program = jax.make_jaxpr(function)(x, numbers(4, 3, 3))
        (equation,) = convolutions(channels_last(program))
    assert equation.params["batch_group_count"] == 2
    assert is_channels_last(equation)


# What stays.


def test_a_program_without_convolutions_is_the_same_object():
    def function(x):
        def body(carry, row):
            return lax.cond(row[0] > 0, jnp.sin, lambda x: x, carry), jax.checkpoint(jnp.exp)(row)

        return lax.scan(body, x[0], x), lax.while_loop(lambda x: x.sum() < 5, lambda x: x + 1, x)

    program = jax.make_jaxpr(jax.jit(function))(numbers(3, 4))
    assert channels_last(program) is program


def test_a_program_that_is_channels_last_is_the_same_object():
    layout = ("NHWC", "HWIO", "NHWC")
    program = jax.make_jaxpr(lambda x, w: conv(x, w, dimension_numbers=layout))(
        numbers(2, 5, 4, 3), numbers(3, 2, 3, 4)
    )
    assert channels_last(program) is program


def test_what_is_beside_a_convolution_stays():
    def function(x):
        x = lax.scan(lambda c, _: (jnp.sin(c), None), x, length=3)[0]
        return jnp.cos(same(x))

    program = jax.make_jaxpr(function)(numbers(1, 3, 4, 4))
    found = channels_last(program)
    kept = [equation for equation in found.jaxpr.eqns if equation in program.jaxpr.eqns]
    assert len(kept) == len(program.jaxpr.eqns) - 1


def test_other_platforms(monkeypatch):
    program = jax.make_jaxpr(same)(numbers(1, 3, 4, 4))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert channels_last(program) is program


def test_kernels_of_blocks_are_left_alone():
    def kernel(x, result):
        result[...] = conv(x[...], jnp.ones((3, 3, 3, 3)))

    def function(x):
        struct = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pallas.pallas_call(kernel, out_shape=struct, interpret=True)(x)

    program = jax.make_jaxpr(function)(numbers(1, 3, 4, 4))
    assert list(convolutions(program))
    assert channels_last(program) is program


def test_what_is_called_twice_is_compiled_once():
    once = jax.jit(same)
    _, found = rewritten(lambda x: once(once(once(x))), numbers(1, 3, 4, 4))
    first, *others = [equation.params["jaxpr"] for equation in found.jaxpr.eqns]
    assert len(others) == 2
    assert all(other is first for other in others)


def test_callbacks_still_run_and_in_order():
    seen = []

    def function(x):
        jax.debug.callback(lambda x: seen.append(("before", float(x))), x.sum(), ordered=True)
        x = same(x)
        jax.debug.callback(lambda x: seen.append(("after", float(x))), x.sum(), ordered=True)
        return lax.scan(lambda c, _: (same(c), jax.debug.callback(seen.append, 0)), x, length=2)[0]

    x = numbers(1, 3, 4, 4)
    _, found = rewritten(function, x)
    assert found.effects
    jax.block_until_ready(jax.jit(jex_core.jaxpr_as_fun(found))(x))
    jax.effects_barrier()
    told = [("before", float(x.sum())), ("after", float(same(x).sum()))]
    assert [entry for entry in seen if entry != 0] == told
    assert len(seen) == 4


@pytest.mark.parametrize("place", [0, 1])
def test_an_operand_may_be_a_literal(place):
    x, w = numbers(2, 3, 5), numbers(4, 3, 2, seed=1)
    program = jax.make_jaxpr(conv)(x, w)
    (equation,) = program.jaxpr.eqns
    operands = list(equation.invars)
    operands[place] = jex_core.Literal(np.asarray((x, w)[place]), operands[place].aval)
    jaxpr = program.jaxpr.replace(eqns=[equation.replace(invars=operands)])
    found = channels_last(jex_core.ClosedJaxpr(jaxpr, program.consts))
    assert all(map(is_channels_last, convolutions(found)))
    np.testing.assert_array_equal(jex_core.jaxpr_as_fun(found)(x, w)[0], conv(x, w))


def test_a_result_that_nobody_wants():
    x, w = numbers(2, 3, 5), numbers(4, 3, 2, seed=1)

    def function(x, w):
        conv(x, w)
        return x

    check(function, x, w)


def test_lines_stages_and_contexts_stay():
    def function(x, w):
        with jax.named_scope("outer"), set_xla_metadata(kind="wanted"):
            return conv(x, w)

    program, found = rewritten(function, numbers(2, 3, 5), numbers(4, 3, 2))
    (old,) = program.jaxpr.eqns
    line = source_info_util.summarize(old.source_info)
    assert "test_channels_last.py" in line
    assert len(found.jaxpr.eqns) == 4
    for new in found.jaxpr.eqns:
        assert source_info_util.summarize(new.source_info) == line
        assert str(new.source_info.name_stack) == str(old.source_info.name_stack) == "outer"
        assert new.ctx is old.ctx


def wide_loss(kernel, image):
    return jnp.sum(conv(image[None].astype(jnp.float32), kernel.astype(jnp.float32)) ** 2)


def test_a_report_names_the_stage_and_the_line():
    policy = dp.load_policy("mixed_bfloat16")
    grad_fn = dp.filter_clipped_grad(
        wide_loss, l2_clip_norm=1.0, policy=policy, method="per_example", microbatch_size=2
    )

    def step(kernel, images):
        return grad_fn(kernel, images, is_padding_example=np.zeros(5, bool))

    report = dp.check_precision(step, numbers(2, 1, 3), numbers(5, 1, 6), policy=policy)
    wide = [row for row in report.violations if row.found == "float32, wider"]
    assert {row.stage for row in wide} == {"forward", "backward"}
    lines = [row.where for row in wide]
    assert any("test_channels_last.py" in line and "(conv)" in line for line in lines)


# The whole path: what is compiled for a clipped gradient.


class Grouped(eqx.Module):
    first: eqx.nn.Conv2d
    second: eqx.nn.Conv2d
    third: eqx.nn.Conv2d

    def __init__(self, key):
        self.first = eqx.nn.Conv2d(1, 4, 3, padding=1, key=key)
        self.second = eqx.nn.Conv2d(4, 6, 3, stride=2, groups=2, key=key)
        self.third = eqx.nn.Conv2d(6, 6, 2, groups=6, key=key)

    def __call__(self, image):
        for layer in (self.first, self.second):
            image = jax.nn.silu(layer(image))
        return self.third(image).sum((1, 2))[:3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "kind", "microbatch_size"),
    [
        *((method, "plain", 2) for method in METHODS),
        ("book_keeping", "grouped", None),
        *(
            pytest.param(method, kind, size, marks=pytest.mark.exhaustive)
            for method in METHODS
            for kind, size in (("plain", None), ("grouped", None), ("grouped", 2))
            if (method, kind, size) != ("book_keeping", "grouped", None)
        ),
    ],
)
def test_what_is_compiled_for_a_clipped_gradient(method, kind, microbatch_size):
    case = models.cnn()
    model = case.model if kind == "plain" else Grouped(jax.random.key(0))
    grad_fn = dp.filter_clipped_grad(
        models.cnn_loss, l2_clip_norm=1.0, method=method, microbatch_size=microbatch_size
    )
    lowered = eqx.filter_jit(grad_fn).lower(
        model, *case.batch(5), is_padding_example=jnp.zeros(5, bool)
    )
    text = lowered.compile().compiled.as_text()
    lines = [line for line in text.splitlines() if re.search(r" convolution\(", line)]
    assert len(lines) >= 3
    labels = [re.search(r"dim_labels=([^,\s]+)", line).group(1) for line in lines]
    # The third layer of the grouped model takes each channel by itself, and stays as it is.
    by_channel = {"bf01_oi01->bf01", "bf01_io01->bf01"} if kind == "grouped" else set()
    assert "b01f_01io->b01f" in labels
    assert set(labels) - by_channel == {"b01f_01io->b01f"}
    assert not any("batch_group_count" in line for line in lines)
