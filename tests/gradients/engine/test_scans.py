"""Parameters that a scan goes over, and parameters that it uses again and again."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.gradients.engine import agreement
from tests.gradients.engine.kinds import check, examples, normal
from tests.models import Case


def over_slices(body, reverse=False):
    """Slices of the parameter one after the other: layers that are stacked."""
    return lambda w, x: lax.scan(lambda x, w: (body(w, x), None), x, w, reverse=reverse)[0]


def over_time(body, reverse=False):
    """All of the parameter at every step: a recurrent network."""

    def use(w, x):
        def step(state, now):
            state = body(w, jnp.tanh(state + now))
            return state, state

        return lax.scan(step, x[0], x, reverse=reverse)[1]

    return use


CONTRACT = lambda w, x: jnp.sin(x @ w)  # noqa: E731
CONVOLVE = lambda w, x: jnp.sin(lax.conv(x[None], w, (1,), "SAME")[0])  # noqa: E731
BODIES = {
    # Body, shape of the parameter, shape of its data, kind, whether it has a ghost norm.
    "contraction_tokens": (CONTRACT, (4, 4), (2, 4), "contraction", True),
    "contraction_view": (lambda w, x: CONTRACT(w.T[:4], x), (4, 5), (4,), "contraction", True),
    "convolution": (CONVOLVE, (2, 2, 3), (2, 4), "convolution", True),
    "grouped": (
        lambda w, x: jnp.sin(
            lax.conv_general_dilated(x[None], w, (1,), "SAME", feature_group_count=2)[0]
        ),
        (2, 1, 2), (2, 4), "convolution", True,
    ),
    "scale": (lambda w, x: jnp.sin(w * x), (4,), (4,), "scale", False),
    "shift": (lambda w, x: jnp.sin(w + x), (4,), (3, 4), "shift", False),
    "lookup": (
        lambda w, x: x * w[(10 * x[0]).astype(int) % 3], (3, 4), (4,), "lookup", True,
    ),
}  # fmt: skip


# Each body in one direction; what a direction can spoil is the order of the scan's arrays.
DIRECTIONS = [(name, i % 2 == 0) for i, name in enumerate(BODIES)]


@pytest.mark.parametrize(("name", "reverse"), DIRECTIONS)
def test_slices(name, reverse):
    body, parameter, data, kind, ghost = BODIES[name]
    check(
        over_slices(body, reverse),
        normal(3, *parameter),
        examples(*data),
        kinds=[kind],
        ghost=ghost,
    )


def in_time(kind):
    """A bias that steps share is differentiated as the operand: its steps are added up."""
    return ["vjp" if kind == "shift" else kind]


@pytest.mark.parametrize(("name", "reverse"), DIRECTIONS)
def test_time(name, reverse):
    body, parameter, data, kind, ghost = BODIES[name]
    use = over_time(body, reverse)
    check(use, normal(*parameter), examples(3, *data), kinds=in_time(kind), ghost=ghost)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["contraction_tokens", "grouped", "shift"])
def test_slices_and_time(name):
    """A stack of recurrent layers: slices outside, time inside."""
    body, parameter, data, kind, ghost = BODIES[name]
    stack = over_slices(over_time(body))
    check(stack, normal(2, *parameter), examples(3, *data), kinds=in_time(kind), ghost=ghost)


@pytest.mark.parametrize("name", ["contraction_view", "lookup"])
def test_time_and_slices(name):
    """A stack of layers at every step: time outside, slices inside."""
    body, parameter, data, kind, ghost = BODIES[name]
    network = over_time(over_slices(body, reverse=True))
    check(network, normal(2, *parameter), examples(3, *data), kinds=[kind], ghost=ghost)


def test_slices_of_slices_with_time_between():
    check(
        over_slices(over_time(over_slices(CONTRACT))),
        normal(2, 2, 4, 4),
        examples(3, 4),
        kinds=["contraction"],
        ghost=True,
    )


def test_time_in_time():
    check(
        over_time(over_time(CONTRACT)),
        normal(3, 3),
        examples(2, 2, 3),
        kinds=["contraction"],
        ghost=True,
    )


def test_views_on_the_way_into_scans():
    """Blocks of one matrix: reshaped outside, turned inside, cut again."""

    def body(w, x):
        return over_slices(lambda w, x: CONTRACT(w.T, x))(w.reshape(2, 4, 4), x)

    check(
        lambda w, x: over_slices(body)(w[1:].reshape(2, 8, 4), x),
        normal(5, 16),
        examples(4),
        kinds=["contraction"],
        ghost=True,
    )


def test_one_parameter_scanned_over_and_closed_over():
    def use(w, x):
        return lax.scan(lambda x, row: (jnp.sin(w @ x) * row, None), x, w)[0]

    check(use, normal(4, 4), examples(4), kinds=["contraction", "scale"], ghost=False)


def test_data_beside_the_slices():
    def use(w, x):
        return lax.scan(lambda c, wx: (c + jnp.sin(wx[0] @ wx[1]), c), x[0], (w, x))[1]

    check(use, normal(3, 4, 4), examples(3, 4), kinds=["contraction"], ghost=True)


def test_checkpoint_around_and_inside():
    body = jax.checkpoint(CONTRACT, policy=jax.checkpoint_policies.dots_saveable)
    stack = jax.checkpoint(over_slices(body))
    check(stack, normal(3, 4, 4), examples(2, 4), kinds=["contraction"], ghost=True)


def test_fori_loop():
    check(
        lambda w, x: lax.fori_loop(0, 3, lambda i, x: CONTRACT(w, x) + i, x),
        normal(4, 4),
        examples(4),
        kinds=["contraction"],
        ghost=True,
    )


def test_no_steps():
    def use(w, x):
        return lax.scan(lambda x, _: (CONTRACT(w, x), None), x, None, 0)[0] * x

    check_beside_a_scale(use, jnp.ones((4, 4)))


def test_no_layers():
    check_beside_a_scale(over_slices(CONTRACT), jnp.zeros((0, 4, 4)))


def check_beside_a_scale(use, unused):
    """The parameter gets no gradient at all; another one does."""

    def loss(model, x):
        return jnp.sum(jnp.sin(model["scale"] * use(model["unused"], x)))

    def draw(rng, size):
        return (jnp.asarray(rng.normal(size=(size, 4)), jnp.float32),)

    agreement.check(Case("nothing", {"scale": jnp.ones(()), "unused": unused}, loss, draw))
