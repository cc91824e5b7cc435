"""Optimizers that optax offers, each made by its name."""

import inspect

import jax
import optax
import optax.contrib

import eqx_dp as dp

# What wants more than a learning rate, and what is no whole optimizer.
SPECIAL = {
    "differentially_private_aggregate",  # clips and adds noise by itself
    "dpsgd",
    "hutchinson_estimator_diag_hessian",  # want functions
    "sophia",
    "lbfgs",
    "polyak_sgd",  # want a public value
    "momo",
    "momo_adam",
    "reduce_on_plateau",
    "scale_by_muon",  # wants to know which arrays are matrices
    "schedule_free_eval_params",  # is none
}
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
    "adam_corrected": lambda: dp.optimizers.adam_corrected(1e-2, 0.1),
    "disk": lambda: dp.optimizers.disk(optax.adam(1e-2)),
    "add_noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(1e-2)),
}


def offered():
    """Functions of optax that make an optimizer, by name."""
    by_name = {name: getattr(optax, name, None) for name in dir(inspect.getmodule(optax.adam))}
    by_name |= {name: getattr(optax.contrib, name) for name in dir(optax.contrib)}
    return {
        name: function
        for name, function in by_name.items()
        if inspect.isfunction(function) and not name.startswith("_")
        if name not in {*SPECIAL, *AROUND}
    }


def made(name):
    if name in AROUND:
        return AROUND[name]()
    rate = inspect.signature(offered()[name]).parameters.get("learning_rate")
    needed = rate is not None and rate.default is inspect.Parameter.empty
    return offered()[name](1e-2) if needed else offered()[name]()
