"""The reader of compiled programs that counts loops, against counts by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from tests.benchmarks.counted import Sent, counted
from tests.sharding.losses import mesh_of

pytestmark = pytest.mark.optimized

STEPS, WIDTH, DEVICES = 5, 32, 8


def program(times):
    """A scan of products with a gathered matrix, in a loop of so many turns; a scattered sum."""
    mesh = mesh_of("auto", data=DEVICES)

    def on_device(part, x, flag):
        def step(x, part):
            return jnp.tanh(x @ jax.lax.all_gather(part, "data", tiled=True)), None

        x = jax.lax.fori_loop(0, times, lambda _, x: jax.lax.scan(step, x, part)[0], x)
        return jax.lax.cond(
            flag[0],
            lambda x: jax.lax.psum_scatter(x.T @ x, "data", tiled=True),
            lambda x: jnp.zeros((WIDTH // DEVICES, WIDTH)),
            x,
        )

    run = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(P(None, "data"), P(), P()),
        out_specs=P("data"),
        check_vma=False,
    )
    arguments = jnp.ones((STEPS, WIDTH, WIDTH)), jnp.ones((4, WIDTH)), jnp.ones(1, bool)
    return jax.jit(run).lower(*arguments).compile().as_text()


@pytest.mark.parametrize("taken", [1, 0.5])
def test_loops_count_by_their_iterations_and_branches_as_told(taken):
    found = counted(program(3), taken=taken)
    of_steps, of_sum = 2 * 4 * WIDTH**2, 2 * 4 * WIDTH**2
    assert found.flops == 3 * STEPS * of_steps + taken * of_sum
    whole = 4 * WIDTH**2
    assert found.sent == {
        "all-gather": Sent(3 * STEPS, 3 * STEPS * whole),
        "reduce-scatter": Sent(taken, taken * whole),
    }
    narrow = counted(program(3), taken=taken, narrow=("all-gather",))
    assert narrow.sent["all-gather"].size == found.sent["all-gather"].size / 2


def test_what_a_loop_does_not_say_is_given():
    """The number of turns is an argument of the program."""

    def run(turns, x):
        return jax.lax.fori_loop(0, turns, lambda _, x: jnp.tanh(x @ x), x)

    text = jax.jit(run).lower(3, jnp.ones((WIDTH, WIDTH))).compile().as_text()
    assert counted(text, unknown=7).flops == 7 * 2 * WIDTH**3
