"""Examples never meet, whatever rule of the user's they could meet in.

The bound is 1, so to take an example away may move the sum by 1 at most, to replace it by 2.
"""

import contextlib
import functools

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax.sharding import AxisType, PartitionSpec

import eqx_dp as dp
from tests.sharding.losses import mesh_of
from tests.tiers import METHODS, curated

PARAMS = jnp.asarray([1.0, -0.5, 2.0])
EXAMPLES = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)), jnp.float32)
refused = functools.partial(pytest.raises, ValueError)


def clipped(loss, method="auto", **options):
    return eqx.filter_jit(dp.filter_clipped_grad(loss, l2_clip_norm=1.0, method=method, **options))


def loss_with(function, where):
    """Where the function stands in the loss, or in a rule of it: `tests/isolation` has others."""
    rule = function
    if where == "backward rule":
        rule = jax.custom_vjp(lambda x: x)
        rule.defvjp(lambda x: (x, None), lambda _, g: (function(g),))
    return lambda params, x: jnp.sum(rule(params * x.reshape(3))) ** 2


WHERE = ["loss", "backward rule"]


# Batching rules


ATTENTION = {
    "plain": lambda p, x: {},
    "bias of the example": lambda p, x: {"bias": p * x[0, 0]},
    "frozen bias": lambda p, x: {"bias": jax.lax.stop_gradient(p)},
    "learned bias": lambda p, x: {"bias": p},
    "dropout": lambda p, x: {"dropout_rate": 0.1},
    "packed": lambda p, x: {
        **{name: jnp.array([[1, 2]]) for name in ("q_seqlen", "kv_seqlen")},
        **{name: jnp.array([[0, 1, 3]]) for name in ("q_offsets", "kv_offsets")},
    },
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ATTENTION)
def test_attention_by_cudnn(kind, method, monkeypatch):
    """For a batch, JAX before 0.11.1 adds up the gradient of a shared bias. (Traced on a CPU.)"""
    for check in ("check_cudnn_version", "check_compute_capability", "check_is_flash_attention"):
        monkeypatch.setattr(fused, check, lambda *_, **options: 91000)

    def loss(p, x):
        rows = jnp.reshape(p[0, 0, :, :1] * x, (1, 3, 1, 1))
        result = fused.dot_product_attention(rows, rows, rows, **ATTENTION[kind](p, x))
        return jnp.sum(result) ** 2

    refusal = refused(match="'dot_product_attention_.wd_wrapper' at .*test_isolation.py.*'xla'")
    is_old = jax.__version_info__ < (0, 11, 1)
    is_mixed = kind in ("dropout", "packed") or (kind == "learned bias" and is_old)
    weight, x = jnp.ones((1, 1, 3, 3), "bfloat16"), EXAMPLES[..., None].astype("bfloat16")
    with refusal if is_mixed else contextlib.nullcontext():
        jax.eval_shape(clipped(loss, method), weight, x)


# Collectives


def psum(x):
    return jax.lax.psum(x, "data")


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("keep_batch_dim", [False, True])
def test_a_collective_over_the_example_axis_is_refused(kind, where, keep_batch_dim):
    """Also where the loss insists on a batch of one.

    With axes of length one JAX leaves it out, and a batch of two cannot be traced.
    """
    loss, rules = loss_with(psum, where), dp.ShardingRules(mesh_of(kind, data=4))
    with jax.set_mesh(rules.mesh), refused(match=r"psum.*data|data.*psum"):
        batch = rules.shard_batch(jnp.tile(EXAMPLES, (2, 1)))
        grad_fn = clipped(loss, sharding=rules, keep_batch_dim=keep_batch_dim)
        grad_fn(rules.shard(PARAMS), batch)


@pytest.mark.parametrize("where", WHERE)
def test_a_collective_over_an_axis_that_the_user_binds_is_refused(where):
    grad_fn = dp.filter_clipped_grad(loss_with(psum, where), l2_clip_norm=1.0)
    with refused(match=r"'psum' over the axis 'data'"):
        jax.vmap(lambda x: grad_fn(PARAMS, x), axis_name="data")(EXAMPLES[:, None])
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    spec = PartitionSpec("data")
    options = {"mesh": mesh, "in_specs": spec, "out_specs": spec, "check_vma": False}
    sharded = jax.shard_map(lambda x: grad_fn(PARAMS, x), **options)
    with refused(match=r"'psum' over the axis 'data'"):
        jax.jit(sharded)(EXAMPLES)


def test_a_model_that_is_the_same_on_all_devices_of_an_enclosing_shard_map():
    """Its gradient would be summed over devices before it is clipped."""
    grad_fn = dp.filter_clipped_grad(lambda model, x: jnp.sum(model * x), l2_clip_norm=1.0)
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("batch")
    sharded = jax.shard_map(lambda x: grad_fn(PARAMS, x), mesh=mesh, in_specs=spec, out_specs=spec)
    with refused(match=r"(?s)batch.*check_vma=False"):
        sharded(EXAMPLES)


# Equinox's reductions over all examples, its loops, and solvers


def test_a_maximum_over_all_examples_in_a_loop_of_equinox_is_refused():
    """The loop's own reductions are not taken for the user's, nor the user's for the loop's."""

    def loss(params, x):
        largest = eqxi.unvmap_max((3 * x[0]).astype(int))
        body = lambda s: (s[0] + 1, s[1] * largest)  # noqa: E731
        start = jnp.zeros(()), params * x
        loop = eqxi.while_loop(lambda s: s[0] < 3, body, start, kind="checkpointed", max_steps=4)
        return jnp.sum(loop[1])

    with refused(match="unvmap"):
        clipped(loss)(PARAMS, EXAMPLES)


def looped(kind):
    def loss(params, x):
        def body(state):
            return state[0] + 1, jnp.sin(state[1] * params)

        goes_on = lambda s: s[0] < 4 * jnp.abs(x[0])  # noqa: E731
        loop = eqxi.while_loop(goes_on, body, (jnp.zeros(()), x), kind=kind, max_steps=8)
        return jnp.sum(loop[1])

    return loss


def solved(params, x):
    operator = lx.MatrixLinearOperator(jnp.diag(2 + params**2) + 0.1 * jnp.outer(x, x))
    return jnp.sum(lx.linear_solve(operator, x).value)


WORKING = {"checkpointed": looped("checkpointed"), "bounded": looped("bounded"), "solve": solved}


@pytest.mark.parametrize("name", curated(WORKING, ["bounded", "solve"]))
def test_loops_and_solves_go_on_working(name):
    """Each example adds the same, whoever else is there."""
    grad_fn = clipped(WORKING[name])
    whole = grad_fn(PARAMS, EXAMPLES)
    alone = sum(grad_fn(PARAMS, EXAMPLES[i : i + 1]) for i in range(len(EXAMPLES)))
    np.testing.assert_allclose(whole, alone, rtol=1e-5, atol=1e-6)


# Checks


def checked(on_error="default"):
    def loss(params, x):
        x = eqx.error_if(x, jnp.all(x == 0), "all of it is zero", on_error=on_error)
        return jnp.sum(params * x)

    return loss


@pytest.mark.parametrize("on_error", ["nan", "breakpoint"])
def test_a_check_that_changes_all_examples_for_one_is_refused(on_error):
    with refused(match="EQX_ON_ERROR"):
        clipped(checked(on_error))(PARAMS, EXAMPLES)


@pytest.mark.parametrize("on_error", ["raise", "off"])
def test_a_check_that_passes_changes_nothing(on_error):
    grads = clipped(checked(on_error))(PARAMS, EXAMPLES)
    np.testing.assert_array_equal(grads, clipped(lambda p, x: jnp.sum(p * x))(PARAMS, EXAMPLES))


def test_padding_on_a_device_of_its_own_fails_no_check():
    rules = dp.ShardingRules(mesh_of("auto", data=4))
    batch, is_padding = jnp.zeros((8, 3)).at[0].set(1.0), np.arange(8) > 0
    batch, is_padding = rules.shard_batch((batch, is_padding))
    grads = clipped(checked(), sharding=rules)(PARAMS, batch, is_padding_example=is_padding)
    np.testing.assert_allclose(grads, np.ones(3) / np.sqrt(3), rtol=1e-5)
