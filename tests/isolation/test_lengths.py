"""Where all dimensions are as long as the batch, lengths tell nothing apart, and rules have to.

Each function is tried with examples along each dimension. What is accepted has to keep examples
apart, where it says that they are.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eqx_dp.isolation.dependence import Apart
from eqx_dp.isolation.follow import Follow
from tests.isolation.test_run import conv

X, W = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 4, 4)), jnp.float32)
LOWER = jnp.tril(W[0]) + 4 * jnp.eye(4)
PAIRS = jnp.ones((4, 2, 1))  # a kernel of groups of two features


def front(x, a):
    return jnp.moveaxis(x, a, 0)


def named(function, a, out=None):
    """Over an axis with a name, which vmap maps away."""
    return lambda x: jax.vmap(function, in_axes=a, out_axes=out, axis_name="i")(x)


def apart(function, a):
    return lambda x: jax.vmap(function, in_axes=a, out_axes=a)(x)


def by_axis(a):
    """Functions of an array that do something along one dimension."""
    return {
        "sum": lambda x: x.sum(a),
        "argmax": lambda x: lax.argmax(x, a, jnp.int32),
        "cumsum": lambda x: jnp.cumsum(x, a),
        "sort": lambda x: lax.sort((x, 2 * x), dimension=a),
        "flip": lambda x: jnp.flip(x, a),
        "roll": lambda x: jnp.roll(x, 1, a),
        "pad": lambda x: lax.pad(x, 0.0, [((1, -1, 0) if i == a else (0, 0, 0)) for i in range(3)]),
        "stack": lambda x: jnp.stack([x, x, x, x], a),
        "unstack": lambda x: jnp.unstack(x, axis=a),
        "take": lambda x: jnp.take(x, jnp.asarray([1, 0, 3, 2]), axis=a),
        "take by data": lambda x: jnp.take_along_axis(x, jnp.argsort(x, axis=1), axis=a),
        "rows by data": apart(lambda y: y[jnp.argsort(y[:, 0])], a),
        "table": apart(lambda y: W[0][jnp.argsort(y[:, 0])], a),
        "written": apart(lambda y: y.at[jnp.argmax(y, 0)].add(y), a),
        "spread": lambda x: jnp.zeros((4, 4)).at[(9 * x.sum(a)).astype(int) % 4].add(1.0),
        "update": lambda x: lax.dynamic_update_slice_in_dim(jnp.zeros((4, 4, 4)), x, 1, a),
        "top_k": lambda x: lax.top_k(jnp.moveaxis(x, a, -1), 4),
        "approximate": lambda x: lax.approx_max_k(x, 4, reduction_dimension=a - 3),
        "fft": lambda x: jnp.fft.fft(x, axis=a).real,
        "product": lambda x: jnp.tensordot(x, W[0], [[a], [0]]),
        "product with itself": lambda x: jnp.einsum(x, [0, 1, 2], x, [a, 1, 3], [1, 0, 3]),
        "repeat": lambda x: jnp.repeat(lax.slice_in_dim(x, 0, 2, axis=a), 2, axis=a),
        "broadcast": lambda x: jnp.broadcast_to(x.sum(a), (4, 4, 4)),
        "psum": named(lambda y: lax.psum(y, "i"), a),
        "pmax": named(lambda y: y - lax.pmax(y, "i"), a, a),
        "all_gather": named(lambda y: lax.all_gather(y, "i", tiled=True), a, a),
        "ppermute": named(lambda y: lax.ppermute(y, "i", [(0, 1), (1, 2), (2, 3), (3, 0)]), a, a),
        "psum_scatter": named(lambda y: lax.psum_scatter(y, "i", tiled=True), a, 0),
        "scan": lambda x: lax.scan(lambda c, y: (c.T, c + y), jnp.zeros((4, 4)), front(x, a))[1],
        "map": lambda x: lax.map(lambda y: x.sum(a) * y, front(x, a)),
        "solve": lambda x: lax.linalg.triangular_solve(LOWER, front(x, a)[0], left_side=True),
        "other side": lambda x: lax.linalg.triangular_solve(LOWER, front(x, a)[0]),
        "inverse": lambda x: jnp.linalg.inv(front(x, a)),
        "convolution": lambda x: conv(front(x, a), jnp.ones((4, 4, 1))),
        "groups": lambda x: conv(front(x, a), PAIRS, feature_group_count=2),
        "groups of images": lambda x: conv(front(x, a), W[:, :, :1], batch_group_count=2),
        "kernels": lambda x: conv(jnp.ones((4, 4, 4)), front(x, a), batch_group_count=2),
        "laid out": lambda x: front(x, a).reshape(8, 8).T.reshape(4, 4, 4),
        "ordered": lambda x: lax.reshape(x, (16, 4), dimensions=np.roll([0, 1, 2], a)),
        "every fourth": lambda x: front(x, a).reshape(16, 4)[::4],
        "transposed": lambda x: front(x, a) + x,
    }


def run_by_run(function, place):
    """Results before, and after each example has changed."""
    for changed in (None, 0, 2):
        at = (*[slice(None)] * place, slice(0) if changed is None else changed)
        yield changed, jax.tree.leaves(function(X.at[at].multiply(-1.5)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", by_axis(0))
def test_what_is_accepted_keeps_examples_where_it_says(name):
    for a, place in itertools.product(range(3), range(3)):
        function = by_axis(a)[name]
        facts = Follow(4, True).program(jax.make_jaxpr(function)(X), [Apart(place)])
        if not any(isinstance(fact, Apart) for fact in facts):
            continue
        (_, before), *runs = run_by_run(function, place)
        for (changed, after), (i, fact) in itertools.product(runs, enumerate(facts)):
            if isinstance(fact, Apart):
                others = np.arange(before[i].shape[fact.dim]) // fact.inner % 4 != changed
                pair = [np.moveaxis(x[i], fact.dim, 0)[others] for x in (before, after)]
                np.testing.assert_allclose(*pair, rtol=1e-5, atol=1e-5, err_msg=f"{a} {place}")
