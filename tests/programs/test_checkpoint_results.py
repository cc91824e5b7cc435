"""Results of checkpoints that XLA cannot compile as they are: the same values, kept apart."""

import subprocess
import sys

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from eqx_dp.programs import checkpoint_results_compiled, equations
from tests.sharding.losses import mesh_of

RESULTS = {
    "transposed": jax.checkpoint(lambda w: w.T),
    "transposed in a call": jax.checkpoint(jax.jit(lambda w: w.T)),
    "transposed in a checkpoint": jax.checkpoint(jax.checkpoint(lambda w: w.T)),
    "transposed outside": lambda w: jax.checkpoint(lambda w: w + 0)(w.T),
}


def gradients(result):
    """Gradients of two examples with respect to a weight that a checkpoint gives."""
    loss = lambda w, x: jnp.sum((x @ result(w)) ** 2)  # noqa: E731
    return jax.vmap(jax.grad(loss), (None, 0))


def clamps(program):
    return [one for one in equations(program) if one.primitive.name == "clamp"]


ARGS = jnp.arange(16.0).reshape(4, 4), jnp.arange(24.0).reshape(2, 3, 4)


@pytest.mark.parametrize("kind", RESULTS)
def test_results_are_clamped_and_the_same(kind):
    program = jax.make_jaxpr(gradients(RESULTS[kind]))(*ARGS)
    found = checkpoint_results_compiled(program)
    assert clamps(found)
    assert found.out_avals == program.out_avals
    expected = jex_core.jaxpr_as_fun(program)(*ARGS)[0]
    np.testing.assert_array_equal(jex_core.jaxpr_as_fun(found)(*ARGS)[0], expected)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -0.0, 6e4])
def test_every_value_stays(value):
    pullback = lambda g: jax.vjp(jax.checkpoint(lambda w: w.mT), g)[1](g.mT)[0]  # noqa: E731
    g = jnp.full((2, 3, 4), value)
    program = jax.make_jaxpr(pullback)(g)
    found = checkpoint_results_compiled(program)
    assert clamps(found)
    (result,) = jex_core.jaxpr_as_fun(found)(g)
    assert result.dtype == g.dtype
    np.testing.assert_array_equal(result, g)
    np.testing.assert_array_equal(jnp.signbit(result), jnp.signbit(g))


UNTOUCHED = {
    "no checkpoint": gradients(lambda w: w.T),
    "no result": gradients(jax.checkpoint(lambda w: jnp.tanh(w.T))),
    "no batch": jax.grad(lambda w, x: jnp.sum(x @ jax.checkpoint(lambda w: w.T)(w))),
    "whole numbers": lambda w, x: jax.vmap(jax.checkpoint(lambda x: x.T))(x.astype(int)),
    "narrow": lambda w, x: jax.vmap(jax.checkpoint(lambda x: x.T))(x.astype(jnp.bfloat16)),
}


@pytest.mark.parametrize("kind", UNTOUCHED)
def test_others_stay_the_same_object(kind):
    program = jax.make_jaxpr(UNTOUCHED[kind])(*ARGS)
    assert checkpoint_results_compiled(program) is program


@pytest.mark.parametrize("kind", ["transposed", "transposed outside"])
def test_on_devices(kind):
    mesh = mesh_of("auto", data=2)
    spread = jax.shard_map(
        gradients(RESULTS[kind]), mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")
    )
    args = ARGS[0], jnp.concatenate([ARGS[1]] * 2)
    program = jax.make_jaxpr(spread)(*args)
    found = checkpoint_results_compiled(program)
    assert clamps(found)
    results = [jax.jit(jex_core.jaxpr_as_fun(one))(*args)[0] for one in (program, found)]
    np.testing.assert_array_equal(*results)


PROGRAM = """
import jax, jax.numpy as jnp, eqx_dp as dp
loss = lambda model, x: jnp.sum((x @ {result}) ** 2)
clipped = dp.filter_clipped_grad(
    loss, l2_clip_norm=1e9, method="per_example", microbatch_size=2
)
model, xs = dict(w=jnp.ones((4, 4))), jnp.ones((8, 3, 4))
print(jax.jit(clipped)(model, xs)["w"].sum())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "result",
    [
        "jax.checkpoint(lambda w: w.T)(model['w'])",
        "jax.checkpoint(jax.jit(lambda w: w.T))(model['w'])",
        "jax.checkpoint(lambda w: w)(model['w'].T)",
    ],
)
def test_xla_compiles_them(result):
    """In a process of its own, which XLA would end."""
    program = [sys.executable, "-c", PROGRAM.format(result=result)]
    found = subprocess.run(program, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    assert float(found.stdout) == 2 * 4 * 16 * 8 * 3
