"""Optimizers of every kind run in a step, or are refused with the reason."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from tests.training.runs import XS, YS, leaves, seeded, small_model
from tests.training.test_step import counted_compilations

# One of each kind of state.
OPTIMIZERS = {
    "adam": lambda: optax.adam(1e-2),
    "lion": lambda: optax.lion(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2),
    "mechanize": lambda: optax.contrib.mechanize(optax.adam(1e-2)),
    "schedule_free": lambda: optax.contrib.schedule_free(optax.adam(1e-2), 1e-2),
    "split_real_and_imaginary": lambda: optax.contrib.split_real_and_imaginary(optax.adam(1e-2)),
    "sam": lambda: optax.contrib.sam(
        optax.sgd(1e-2), optax.chain(optax.contrib.normalize(), optax.sgd(0.1))
    ),
    "ema": lambda: optax.chain(optax.sgd(1e-2), optax.ema(0.9)),
    "lbfgs": lambda: optax.lbfgs(1e-2, linesearch=None),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 2),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(1e-2),
    "add_noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(1e-2)),
}


def taken(step, state):
    mask = np.arange(8) >= 5
    return step(state, XS[:8], YS[:8], is_padding_example=mask)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_steps_of_optimizers_of_every_kind(name):
    """The second with the state of the first, in buffers of its own and of the same types."""
    step = seeded(optimizer=OPTIMIZERS[name]())
    first = step.init(small_model())
    state = taken(step, first)
    assert first.model.weight.is_deleted()
    with counted_compilations() as compiled:
        state = taken(step, state)
    assert not compiled
    assert all(np.isfinite(leaf).all() for leaf in leaves(state.model))
    assert not np.array_equal(state.model.weight, small_model().weight)
    arrays = jax.tree.leaves(eqx.filter((state.model, state.opt_state[1]), eqx.is_array))
    buffers = {
        array.unsafe_buffer_pointer()
        for array in arrays
        if not jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    }
    num_keys = sum(jnp.issubdtype(array.dtype, jax.dtypes.prng_key) for array in arrays)
    assert len(buffers) == len(arrays) - num_keys


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.polyak_sgd,
        optax.lbfgs,
        optax.contrib.reduce_on_plateau,
        lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True),
        lambda: optax.contrib.sophia(0.1),
    ],
)
def test_an_optimizer_that_wants_more_than_gradients_is_refused(optimizer):
    """It evaluates losses or gradients by itself, which no plan accounts for."""
    step = seeded(optimizer=optimizer())
    state = step.init(small_model())
    with pytest.raises(ValueError, match="It gets gradients, state and parameters alone"):
        taken(step, state)
    assert not state.model.weight.is_deleted()
