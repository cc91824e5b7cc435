"""Whatever optax offers runs in a step, or is refused with the reason."""

import inspect
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from tests.training.runs import XS, YS, leaves, seeded, small_model
from tests.training.test_step import counted_compilations

# What wants more than a learning rate, and what is no whole optimizer.
SPECIAL = {
    "differentially_private_aggregate",  # clips and adds noise by itself
    "dpsgd",
    "hutchinson_estimator_diag_hessian",  # want functions
    "sophia",
    "lbfgs",
    "scale_by_muon",  # wants to know which arrays are matrices
    "schedule_free_eval_params",  # is none
}
PUBLIC_VALUE = {"polyak_sgd", "momo", "momo_adam", "reduce_on_plateau"}
AROUND = {
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


def offered():
    """Functions of optax that make an optimizer, by name."""
    aliases = inspect.getmodule(optax.adam)
    by_name = {
        name: getattr(optax, name, None) for name in dir(aliases) if not name.startswith("_")
    }
    by_name |= {
        name: getattr(optax.contrib, name)
        for name in dir(optax.contrib)
        if not name.startswith("_")
    }
    return {
        name: function
        for name, function in by_name.items()
        if inspect.isfunction(function) and name not in {*SPECIAL, *AROUND}
    }


def made(name):
    if name in AROUND:
        return AROUND[name]()
    rate = inspect.signature(offered()[name]).parameters.get("learning_rate")
    needed = rate is not None and rate.default is inspect.Parameter.empty
    return offered()[name](1e-2) if needed else offered()[name]()


def taken(step, state, extra=None):
    mask = np.arange(8) >= 5
    return step(state, XS[:8], YS[:8], is_padding_example=mask, extra=extra)


# One of each kind; what else optax offers is left to the exhaustive tests.
USUAL = {*PUBLIC_VALUE, "adam", "sam"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in USUAL else pytest.mark.exhaustive)
        for name in sorted({*offered(), *AROUND})
    ],
)
def test_two_steps_of_every_optimizer(name):
    """The second with the state of the first, in buffers of its own and of the same types."""
    step = seeded(optimizer=made(name))
    extra = {"value": 0.5} if name in PUBLIC_VALUE else None
    first = step.init(small_model())
    state = taken(step, first, extra)
    assert first.model.weight.is_deleted()
    with counted_compilations() as compiled:
        state = taken(step, state, extra)
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


def test_a_public_value_reaches_the_optimizer():
    plateau = optax.chain(
        optax.sgd(1e-2), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, cooldown=0)
    )
    step = seeded(optimizer=plateau)
    state = step.init(small_model())
    with counted_compilations() as compiled:
        for value in (1.0, 2.0, np.float32(3.0), jnp.asarray(4.0)):
            state = taken(step, state, {"value": value})
    scale = state.opt_state[1][1].scale
    assert float(scale) < 1
    assert len(compiled) <= 2  # numbers are no part of the program


@pytest.mark.parametrize(
    ("optimizer", "extra", "message"),
    [
        (optax.polyak_sgd, None, "wants 'value'. Hand it over at every step: step(state, *batch, "),
        (optax.polyak_sgd, {}, "extra={'value': ...}). It must be public"),
        (optax.lbfgs, {"value": 1.0}, "wants a function, 'value_fn', to evaluate losses"),
        (
            lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True),
            None,
            "wants a function, 'grad_fn'",
        ),
        (
            lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1)),
            {"value": 1.0},
            "extra holds 'value', which the optimizer's update does not take",
        ),
        (lambda: optax.contrib.sophia(0.1), None, "wants a function, 'obj_fn'"),
        (lambda: optax.polyak_sgd(0.1), {"value": jnp.sum}, "wants a function, 'value'"),
        (lambda: optax.polyak_sgd(0.1), {"value": "1"}, "extra['value'] must hold numbers"),
        (lambda: optax.stateless(lambda g, _: g), {"value": 1.0}, "takes nothing beside gradients"),
    ],
)
def test_what_an_optimizer_is_not_given(optimizer, extra, message):
    step = seeded(optimizer=optimizer())
    state = step.init(small_model())
    with pytest.raises(ValueError, match=re.escape(message)):
        taken(step, state, extra)
    assert not state.model.weight.is_deleted()
