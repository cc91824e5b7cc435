"""What keeps examples apart is run as it is; what lets them meet is refused.

Each function takes a batch of four examples of shape (3, 4). Whether its examples meet is also
tried: one of them is changed, and the others' results have to stay as they are, bit for bit.
"""

import functools

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
import pytest
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental import pallas
from jax.sharding import AxisType, PartitionSpec

from eqx_dp.isolation import run_apart

pytestmark = pytest.mark.sampled(5)

NO_LOSS = jax.make_jaxpr(lambda: 0.0)().jaxpr
KERNEL = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 2)), jnp.float32)
EXAMPLES = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3, 4)), jnp.float32)


def conv(x, kernel, **options):
    return lax.conv_general_dilated(x, kernel, (1,), "VALID", **options)


def square(x):
    return x[:, :3] @ x[:, :3].T + 3 * jnp.eye(3)


def mapped(function):
    """What vmap makes of a function of one example."""
    return jax.vmap(function)


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


@functools.partial(custom_vmap)
def apart_by_hand(x):
    return jnp.sin(x)


@apart_by_hand.def_vmap
def _(size, is_mapped, x):
    return jnp.sin(x), True


APART = {
    "elementwise": mapped(lambda x: jnp.exp(x) * jnp.arange(4.0) + x),
    "reduction": mapped(lambda x: (x.sum(), x.max(0), x.prod(1), jnp.argmax(x, 1), x.all())),
    "running": mapped(lambda x: (jnp.cumsum(x, 0), lax.cumlogsumexp(x, 1), lax.cummax(x, 0))),
    "sort": mapped(lambda x: (jnp.sort(x, 0), jnp.argsort(x, 1), lax.top_k(x, 2))),
    "rearranged": mapped(lambda x: (x.T, x[::-1], x.reshape(2, 6), jnp.roll(x, 1), x[None])),
    "joined": mapped(lambda x: (jnp.stack([x, x]), jnp.concatenate([x, x], 1), jnp.tile(x, 2))),
    "cut": mapped(lambda x: (x[1:], x[:, ::2], jnp.split(x, 2, 1), jnp.pad(x, 1))),
    "windows": mapped(lambda x: (lax.reduce_window(x, 0.0, lax.add, (2, 1), (1, 1), "SAME"),)),
    "pooling": mapped(
        jax.grad(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (1, 1), "VALID").sum())
    ),
    "indexed": mapped(lambda x: x[jnp.argsort(x[:, 0]), 1]),
    "table": mapped(lambda x: jnp.ones((5, 2))[x.astype(int) % 5]),
    "written": mapped(lambda x: x.at[jnp.argmax(x, 0), :2].set(0.0)),
    "added": mapped(lambda x: jnp.zeros((5, 4)).at[x[:, 0].astype(int) % 5].add(x)),
    "shared rows": mapped(lambda x: x.at[1].multiply(2.0)),
    "dynamic": mapped(lambda x: lax.dynamic_update_slice(x, x[:1], (x[0, 0].astype(int), 0))),
    "product": mapped(lambda x: (x @ x.T, x @ jnp.ones((4, 2)), jnp.ones((2, 3)) @ x)),
    "contraction": mapped(lambda x: jnp.einsum("ab,ac,bd->cd", x, x, jnp.ones((4, 2)))),
    "convolution": mapped(lambda x: conv(x[None], KERNEL)),
    "both convolved": mapped(lambda x: conv(x[None], x[None, :, :2])),
    "kernel's gradient": mapped(gradient_of_kernel),
    "grouped kernel's gradient": mapped(lambda x: gradient_of_kernel(x, 3)),
    "matrices": mapped(
        lambda x: (
            jnp.linalg.cholesky(square(x)),
            jnp.linalg.eigh(square(x)),
            jnp.linalg.inv(square(x)),
            jnp.linalg.qr(x),
            jnp.linalg.svd(x, compute_uv=False),
            jsp.linalg.lu(square(x)),
        )
    ),
    "fft": mapped(lambda x: (jnp.fft.fft(x), jnp.fft.rfft2(x))),
    "bits": mapped(lambda x: lax.bitcast_convert_type(x, jnp.uint8)),
    "random": mapped(lambda x: jax.random.normal(jax.random.key(x[0, 0].astype(int)), (2,))),
    "random choices": mapped(
        lambda x: jax.random.permutation(
            jax.random.fold_in(jax.random.key(0), x[0, 0].astype(int)), x
        )
    ),
    "scan": mapped(scanned),
    "scan's gradient": mapped(jax.grad(lambda x: scanned(x)[0].sum())),
    "while": mapped(until_small),
    "nested while": jax.vmap(mapped(until_small)),
    "cond": mapped(lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x)),
    "checkpoint": mapped(jax.grad(jax.checkpoint(lambda x: jnp.sin(x).sum()))),
    "one by one": lambda x: lax.map(lambda one: one @ one.T, x),
    "callback, one by one": mapped(
        lambda x: jax.pure_callback(
            lambda a: np.asarray(a) * 2,
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            x,
            vmap_method="sequential",
        )
    ),
    "a batching rule that keeps apart": mapped(apart_by_hand),
    "ragged product": mapped(
        lambda x: lax.ragged_dot(
            x, x[0, 0] * jnp.ones((2, 4, 2)), (x[0, 0] > 0) + jnp.asarray([1, 2])
        )
    ),
    "solve": mapped(
        lambda x: lax.custom_linear_solve(lambda y: 2.0 * y, x, lambda _, b: b / 2, symmetric=True)
    ),
    "collective of its own": mapped(
        lambda x: jax.vmap(lambda row: row - lax.pmean(row, "rows"), axis_name="rows")(x)
    ),
    "collective of its own, over as many": lambda x: jax.vmap(
        lambda column: lax.psum(column, "columns"), in_axes=2, out_axes=None, axis_name="columns"
    )(x[:, :2]),
    "triangular solve": mapped(
        lambda x: (
            jsp.linalg.solve_triangular(LOWER, x, lower=True),
            jsp.linalg.solve_triangular(LOWER, x[:, 0], lower=True, trans=1),
            jsp.linalg.solve_triangular(square(x), x, lower=True),
            jsp.linalg.cho_solve((LOWER, True), x),
            jnp.linalg.solve(LOWER, x[:, 0]),
        )
    ),
    "tridiagonal solve": mapped(
        lambda x: lax.linalg.tridiagonal_solve(
            jnp.ones(3), 4 + jnp.arange(3.0), jnp.ones(3).at[2].set(0), x
        )
    ),
    "grouped convolution, kernel alone": mapped(
        lambda x: conv(jnp.ones((1, 2, 5)), x[:2, None, :3], feature_group_count=2)
    ),
    "kernel": mapped(lambda x: kernel(x, jnp.arange(4.0))),
    "second axis, moved to the front": lambda x: jnp.moveaxis(jnp.moveaxis(x, 0, 1) * 2, 1, 0),
}

MEET = {
    "reduce_sum": lambda x: x - x.sum(0, keepdims=True),
    "reduce_max": lambda x: x / x.max(),
    "argmax": lambda x: x[:, 0, 0] + jnp.argmax(x[:, 0, 0]),
    "psum": lambda x: jax.vmap(
        lambda one: lax.psum(one, "examples"), axis_name="examples", out_axes=None)(x[:, 0]),
    "cumsum": lambda x: jnp.cumsum(x, 0),
    "sort": lambda x: jnp.sort(x, 0),
    "approx_top_k": lambda x: lax.approx_max_k(x[:, 0].T, 4)[0].T,
    "top_k": lambda x: lax.top_k(x[:, 0].T, 4)[0].T,
    "rev": lambda x: x[::-1],
    "concatenate": lambda x: jnp.roll(x, 1, 0),
    "pad": lambda x: jnp.pad(x, ((1, 0), (0, 0), (0, 0)))[:-1],
    "slice": lambda x: x + x[:1],
    "gather": lambda x: x[jnp.asarray([1, 0, 3, 2])],
    "gather, by data": lambda x: x[jnp.argsort(x[:, 0, 0])],
    "scatter": lambda x: x.at[0].set(x[1]),
    "scatter-add": lambda x: jnp.zeros(4).at[jnp.zeros(4, int)].add(x[:, 0, 0]),
    "dynamic_slice": lambda x: x * lax.dynamic_index_in_dim(x, 2, 0),
    "dot_general": lambda x: jnp.einsum("eab,fab->ef", x, x),
    "dot_general, contracted": lambda x: x[..., None] + jnp.einsum("eab,ecd->bd", x, x),
    "conv_general_dilated": lambda x: conv(jnp.moveaxis(x, 0, 1), jnp.ones((4, 4, 1)))[0],
    "conv_general_dilated, two of a group": lambda x: conv(
        x[:, 0][None], jnp.ones((4, 2, 1)), feature_group_count=2)[0],
    "reduce_window_sum": lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 1, 1), (1, 1, 1), "SAME"),
    "reshape": lambda x: x.reshape(12, 4).T.reshape(4, 12).cumsum(1),
    "while": lambda x: lax.while_loop(lambda y: jnp.max(y) > 0.1, lambda y: y / 2, x),
    "branch": lambda x: lax.cond(x[:, 0, 0].sum() > 0.3, jnp.sin, jnp.cos, x),
    "scan": lambda x: lax.scan(lambda c, one: (c + one, c), jnp.zeros((3, 4)), x)[1],
    "select_n": lambda x: jnp.where(jnp.any(x > 3), 0.0, x),
    "fft": lambda x: jnp.fft.fft(x, axis=0).real,
    "pure_callback": lambda x: jax.pure_callback(
        lambda a: np.asarray(a)[::-1], jax.ShapeDtypeStruct(x.shape, x.dtype), x,
        vmap_method="broadcast_all"),
    "kernel of a batch": lambda x: kernel(x, jnp.arange(4.0)),
    "kernel, mapped along another axis": lambda x: jax.vmap(kernel, (1, None), 1)(
        x, jnp.arange(4.0)),
    "add": lambda x: x[:, 0] + x[:, 0].T,
    "loop in a loop": lambda x: lax.map(
        lambda a: lax.map(lambda b: jnp.sum(a * b), x).sum() + jnp.zeros(()), x
    ),
    "loop in a loop, by the first": lambda x: lax.map(
        lambda a: lax.map(lambda b: a * b, x), x
    ).sum(0),
    "random_bits": lambda x: jax.vmap(lambda one: jax.random.normal(
        jax.random.fold_in(jax.random.key(0, impl="rbg"), (one[0, 0] * 1000).astype(int)), (3,)
    ))(x),
}  # fmt: skip


LOWER = jnp.asarray([[2.0, 0, 0], [1, 3, 0], [0.5, -1, 4]])


def changed_others(function, changed=2):
    """Whether another example's result differs once one example has changed."""
    run = jax.jit(function)
    before, after = run(EXAMPLES), run(EXAMPLES.at[changed].multiply(-1.5).at[changed].add(0.25))
    others = np.arange(4) != changed
    return any(
        not np.array_equal(np.asarray(a)[others], np.asarray(b)[others], equal_nan=True)
        for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    )


@pytest.mark.parametrize("name", APART)
def test_what_keeps_examples_apart_is_run(name):
    # Convolutions are rewritten, and may add up in another order: of whole numbers, to the same.
    examples = jnp.round(4 * EXAMPLES) if "kernel's gradient" in name else EXAMPLES
    results = run_apart(APART[name], NO_LOSS, examples)
    jax.tree.map(np.testing.assert_array_equal, results, APART[name](examples))
    assert not changed_others(APART[name])


@pytest.mark.parametrize(("name", "function"), MEET.items(), ids=MEET)
def test_what_lets_examples_meet_is_refused(name, function):
    primitive = name.split(",")[0]
    with pytest.raises(ValueError, match="Examples meet") as caught:
        run_apart(function, NO_LOSS, EXAMPLES)
    assert "test_run.py" in str(caught.value)
    if primitive in ("reduce_sum", "cumsum", "sort", "rev", "dot_general", "pure_callback"):
        assert f"'{primitive}'" in str(caught.value)


@pytest.mark.parametrize("name", sorted(set(MEET) - {"pure_callback"}))
def test_the_functions_that_are_refused_do_mix(name):
    assert any(changed_others(MEET[name], changed) for changed in range(4))


def test_one_example_alone_meets_nobody():
    one = EXAMPLES[:1]
    np.testing.assert_array_equal(run_apart(lambda x: x - x.sum(0), NO_LOSS, one), one - one.sum(0))


def test_an_example_alone_may_still_meet_those_of_other_devices():
    def on_device(x):
        return run_apart(lambda x: lax.psum(x, "data"), NO_LOSS, x)

    with pytest.raises(ValueError, match=r"'psum' over the axis 'data'"):
        jax.vmap(on_device, axis_name="data")(EXAMPLES[:, None])


def test_mixing_that_nothing_comes_of_is_no_matter():
    def function(x):
        jax.debug.callback(lambda total: None, x.sum())
        return x * 2

    result = run_apart(function, NO_LOSS, EXAMPLES)
    np.testing.assert_array_equal(result, EXAMPLES * 2)


def test_arrays_without_entries():
    results = run_apart(lambda x: (x[:, :0], x[:, :0].sum(1), x), NO_LOSS, EXAMPLES)
    assert [r.shape for r in results] == [(4, 0, 4), (4, 4), (4, 3, 4)]


@custom_vmap
def summed(x):
    return x


@summed.def_vmap
def _(size, is_mapped, x):
    return x + x.sum(0), True


@custom_vmap
def hidden(x):
    return x


@hidden.def_vmap
def _(size, is_mapped, x):
    return summed(x), True


@pytest.mark.parametrize("size", [1, 2])
def test_a_rule_that_only_a_vmap_around_it_all_would_run_is_refused(size):
    groups = EXAMPLES.reshape(-1, size, 3, 4)
    with pytest.raises(ValueError, match="'custom_vmap_call'"):
        jax.vmap(lambda x: run_apart(jax.vmap(hidden), NO_LOSS, x))(groups)


@pytest.mark.parametrize("tiled", [False, True])
def test_a_sum_that_devices_share_out_keeps_examples_where_they_are(tiled):
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def shared_out(x):
        """Examples last, behind a dimension that is divided among devices, or is their number."""
        part = lax.psum_scatter(x[:2], "model", scatter_dimension=0, tiled=tiled)
        return part if tiled else part[None]

    def function(x):
        moved = jnp.moveaxis(x[:, :2], 0, 2)
        out = jax.shard_map(
            shared_out,
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec("model"),
            check_vma=False,
        )(moved)
        return jnp.moveaxis(out, -1, 0)

    result = run_apart(function, NO_LOSS, EXAMPLES)
    np.testing.assert_allclose(result, 2 * EXAMPLES[:, :2])


def test_a_mutable_array_may_not_take_one_example_to_another():
    kept = jax.new_ref(jnp.zeros(()))

    def function(x):
        kept[...] = x.sum()
        return x * kept[...]

    with pytest.raises(ValueError, match=r"(?s)'swap'.*test_run.py.*jax.new_ref"):
        run_apart(function, NO_LOSS, EXAMPLES)
