"""Every accepted primitive keeps examples apart: no value of one changes another, bit for bit.

Which primitives are accepted is known inside the room alone, so these tests look there.
"""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eqx_dp.isolation import run_apart
from eqx_dp.isolation.facts import OWN, SHARED
from eqx_dp.isolation.judge import Judge
from eqx_dp.isolation.mapping import stay_mapped
from eqx_dp.isolation.primitives import _JAXS, _MEETING, ATTENTION
from eqx_dp.programs import COLLECTIVES, OF_LAX, UNCHANGED, equations, inside, named
from eqx_dp.programs.inside import HOLDERS
from tests.tiers import curated

NO_LOSS = jax.make_jaxpr(lambda: 0.0)().jaxpr
pytestmark = pytest.mark.optimized

EXAMPLES = jnp.asarray(np.random.default_rng(0).normal(size=(16, 3, 4)), jnp.float32)
HARD = [jnp.full((3, 4), x) for x in (jnp.nan, jnp.inf, -jnp.inf, 0, 1e-40)]
HARD += [jnp.repeat(jnp.asarray([[1e3], [1e3], [0.0]]), 4, 1), EXAMPLES[0] * 1e4]
# These place or show a value, have no operand, are not mapped by JAX, are not in programs of JAX
# 0.10 or only in what others are lowered to, hold programs, or go over axes of the example's own.
# `tests/gradients/test_isolation.py` has attention, and primitives of Equinox.
NO_CASE = {*UNCHANGED, *HOLDERS, *COLLECTIVES, *ATTENTION} | named(
    """device_put debug_callback debug_print inspect_sharding empty empty2 iota select_and_scatter
    log2 one_minus_square geqp3 philox2x32 philox4x32 threefry2x32 threefry4x32 axis_index
    all_gather_reduced ragged_all_to_all"""
)
ACCEPTED = ({x.name for x in _JAXS} | OF_LAX) - _MEETING - NO_CASE


def bits(x):
    return lax.bitcast_convert_type(x, jnp.uint32)


def place(x):
    return x[0, 0].astype(int) % 3


def square(x):
    return x[:, :3] @ x[:, :3].T + 3 * jnp.eye(3)


def plain(x):
    """What JAX's public function for each primitive makes of the first operands that it takes."""
    of_numbers = [(x,), (abs(x), abs(x[::-1])), (x + 1j * x,), (x > 0, x, x[::-1]), (x, x, x)]
    of_bits = [(bits(x),), (bits(x), bits(x[::-1]))]
    with_sizes = [(x, (4, 3)), (x, 2), (x, (0,)), (x, (1, 0)), (x, (1, 2)), (x, 5, 7), (x, 0, int)]
    with_sizes += [(x > 0, (0,)), ([x, x],), ([x, x], 0)]
    of_matrices = [(square(x),), (square(x), square(x)), (x.T, x[0, :3]), (x.T, x[0, :3], x.T)]
    tried = [*of_numbers, *of_bits, *with_sizes, *of_matrices]

    def result(name):
        for operands, known in itertools.product(tried, [name, f"bitwise_{name}"]):
            with contextlib.suppress(Exception):
                return getattr(lax if hasattr(lax, known) else lax.linalg, known)(*operands)
        return None

    # On CPUs `ormqr` disturbs a loop of the same program, from run to run: it has a program alone.
    return [result(name) for name in sorted(ACCEPTED - {"ormqr"})]


def pooled(x, of=lax.max, start=-jnp.inf):
    return lax.reduce_window(x, start, of, (2, 2), (1, 1), "VALID")


def written(x):
    there = x.at[jnp.argmax(x, 0) % 3]
    ways = there.set, there.add, there.subtract, there.multiply, there.min, there.max
    return [way(x[0]) for way in ways]


def drawn(x):
    own, other = jax.random.wrap_key_data(bits(x[0, :2])), jax.random.key(place(x))
    keys = other, jax.random.fold_in(own, place(x)), jax.random.split(own), jax.random.clone(own)
    return *map(jax.random.key_data, keys), jax.random.bits(own), jax.random.gamma(own, x)


# fmt: off
CASES = {
    "plain": plain,
    "reflected": lambda x: lax.linalg.ormqr(x.T, x[0, :3], x.T),
    "compared": lambda x: [p.bind(x, x[::-1]) for p in (lax.eq_to_p, lax.le_to_p, lax.lt_to_p)],
    "reduced": lambda x: (lax.reduce(x, 0.0, lambda a, b: a + b, (1,)), lax.approx_max_k(x, 2)),
    "pooled": lambda x: (
        *(pooled(x), pooled(x, lax.min, jnp.inf), pooled(x, lax.add, 0.0)),
        *(pooled(x, lambda a, b: a + b, 0.0), jax.jvp(pooled, (x,), (x[::-1],))),
        jax.grad(lambda x: pooled(x).sum())(x),
    ),
    "moved": lambda x: (
        *(x[:, None] + jnp.zeros((2, 4)), jnp.pad(x, 1), x[1:, ::2], x[:1].squeeze(0)),
        *(x.astype(int), x[jnp.argsort(x[:, 0])], lax.dynamic_slice(x, (place(x), 0), (1, 2))),
        *(lax.dynamic_update_slice(x, x[:1], (place(x), 0)), lax.optimization_barrier((x, 0.0))),
    ),
    "written": written,
    "products": lambda x: (
        *(x @ x.T, jnp.fft.fft(x), jax.grad(lambda x: (jnp.sin(x) * jnp.cos(x)).sum())(x)),
        lax.ragged_dot(x, x[0, 0] * jnp.ones((2, 4, 2)), place(x) + jnp.asarray([1, 2])),
        lax.conv(x[None], x[:, :3, None], (1,), "SAME"),
    ),
    "matrices": lambda x: (
        *(jnp.linalg.solve(jnp.eye(3) + 1, x), jnp.linalg.solve(jnp.tril(square(x)), x)),
        lax.linalg.lu_pivots_to_permutation(lax.linalg.lu(square(x))[1], 3),
        *(lax.linalg.tridiagonal_solve(x[0], x[1], x[2], x.T), jnp.linalg.qr(x, mode="raw")),
    ),
    "drawn": drawn,
}
# fmt: on


def changed_others(function, examples=EXAMPLES, hard=HARD, place=2):
    """Whether a hard example in one place changes a bit of another's results."""
    run = jax.jit(function)
    results = [
        [np.delete(x, place, 0).tobytes() for x in jax.tree.leaves(run(examples.at[place].set(it)))]
        for it in [examples[place], *hard]
    ]
    return any(found != results[0] for found in results)


def held(name):
    """The equations of a case that hold no programs."""
    program = jax.make_jaxpr(CASES[name])(EXAMPLES[0])
    held = [x for x in equations(program) if x.invars and inside(x) is None]
    return [x for x in held if x.primitive.name not in NO_CASE]


@pytest.mark.parametrize("name", curated(CASES, CASES.keys() - {"plain", "drawn"}))
def test_no_example_changes_another(name):
    assert not changed_others(lambda x: run_apart(CASES[name], NO_LOSS, x))


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="JAX 0.12 has mended betainc")
def test_the_hard_examples_show_a_loop_that_goes_on_for_all():
    beta = jax.vmap(lambda x: lax.betainc(abs(x[0]), abs(x[1]), jax.nn.sigmoid(x[2])))
    assert changed_others(beta)


@pytest.mark.parametrize("name", CASES)
def test_what_is_an_examples_own_stays_mapped(name):
    """Whichever operands are its own, where JAX can map them."""
    for equation in held(name):
        for facts in np.where(np.tri(len(equation.invars)), OWN, SHARED).tolist():
            found = Judge(trusts=True)._result(equation, facts)
            with contextlib.suppress(NotImplementedError):
                mapped = stay_mapped(equation, [fact == OWN for fact in facts])
                assert mapped == [fact == OWN for fact in found], equation


def test_every_accepted_primitive_has_a_case():
    assert {x.primitive.name for name in CASES for x in held(name)} >= ACCEPTED
