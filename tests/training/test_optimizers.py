"""Optimizers of every kind run in a step, or are refused with the reason."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from tests.optimizers import AROUND
from tests.tiers import curated
from tests.training.runs import XS, YS, leaves, seeded, small_model
from tests.training.test_step import counted_compilations

# One of each kind of state.
OPTIMIZERS = {
    "adam": lambda: optax.adam(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2),
    "muon": lambda: optax.contrib.muon(1e-2),
    **AROUND,
}


def taken(step, state):
    mask = np.arange(8) >= 5
    return step(state, XS[:8], YS[:8], is_padding_example=mask)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", curated(OPTIMIZERS, ["adam"]))
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
    arrays = [x for x in arrays if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    assert len({array.unsafe_buffer_pointer() for array in arrays}) == len(arrays)


REFUSED = {
    "polyak": optax.polyak_sgd,
    "lbfgs": optax.lbfgs,
    "plateau": optax.contrib.reduce_on_plateau,
    "sam": lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_wants_more_than_gradients_is_refused(name):
    """It evaluates losses or gradients by itself, which no plan accounts for."""
    step = seeded(optimizer=REFUSED[name]())
    state = step.init(small_model())
    with pytest.raises(ValueError, match="It gets gradients, state and parameters alone"):
        taken(step, state)
    assert not state.model.weight.is_deleted()
