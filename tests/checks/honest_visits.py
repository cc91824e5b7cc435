"""Private steps as users write them who never heard of the check: models and optimizers."""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import optax.contrib

import eqx_dp as dp
from tests.checks.privacy_steps import (
    EXPECTED,
    PLAN,
    SECRET,
    SLOTS,
    by_hand,
    chained,
    clipped,
    data,
    listed,
    mlp,
    squared_error,
)

VISITS = {}
visit = listed(VISITS)


def trained(model, loss, *examples, **options):
    """A step by hand of another model: the plan's noise, then Adam; buffers are donated."""
    grad_fn = clipped(loss, **options)
    optimizer = optax.chain(PLAN.privatizer(grad_fn, key=SECRET), optax.adamw(1e-3))

    def step(model, opt_state, *batch):
        *examples, mask = batch
        grads = grad_fn(model, *examples, is_padding_example=mask)
        updates, opt_state = optimizer.update(grads, opt_state, grad_fn.trainable(model))
        return eqx.apply_updates(model, updates), opt_state

    state = optimizer.init(grad_fn.trainable(model))
    private = tuple(range(2, 3 + len(examples)))
    batch = (*examples, jnp.zeros(SLOTS, bool))
    case = by_hand(step, model=model, state=state, batch=batch, private=private)
    return case._replace(fn=eqx.filter_jit(step, donate="all"))


@visit
def convolution_of_many_kernels():
    """Kernels of 3 x 3, of 2,048 numbers or more: noise is drawn in rows, and then cut."""
    model = eqx.nn.Conv2d(16, 16, 3, key=jax.random.key(0))
    return trained(model, lambda model, x: jnp.sum(model(x) ** 2), jnp.zeros((SLOTS, 16, 4, 4)))


def ordinary_differential_equation(controller, throw):
    class Derivative(eqx.Module):
        mlp: eqx.nn.MLP

        def __call__(self, t, y, args):
            return self.mlp(y)

    def loss(model, ys):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(model),
            diffrax.Tsit5(),
            t0=0.0,
            t1=1.0,
            dt0=0.1,
            y0=ys[0],
            saveat=diffrax.SaveAt(ts=jnp.linspace(0, 1, 5)),
            stepsize_controller=controller,
            max_steps=16,
            throw=throw,
        )
        return jnp.mean((solution.ys - ys) ** 2)

    model = Derivative(eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0)))
    return trained(model, loss, jnp.zeros((SLOTS, 5, 2)), method="per_example")


@visit
def differential_equation_that_does_not_throw():
    return ordinary_differential_equation(diffrax.ConstantStepSize(), throw=False)


@visit
def differential_equation_in_steps_that_adapt():
    return ordinary_differential_equation(diffrax.PIDController(rtol=1e-3, atol=1e-6), throw=False)


@visit
def sharpness_aware_behind_the_noise():
    adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    return chained(optax.contrib.sam(optax.sgd(0.1), adversary, sync_period=2))


@visit
def schedule_free_around_the_noise():
    grad_fn = clipped()
    noise = optax.chain(PLAN.privatizer(grad_fn, key=SECRET), optax.sgd(0.1))
    optimizer = optax.contrib.schedule_free(noise, learning_rate=0.1)
    return _around(grad_fn, optimizer)


@visit
def hyperparameters_injected_around_the_noise():
    grad_fn = clipped()

    @optax.inject_hyperparams
    def optimizer(learning_rate):
        return optax.chain(PLAN.privatizer(grad_fn, key=SECRET), optax.adam(learning_rate))

    return _around(grad_fn, optimizer(optax.cosine_decay_schedule(0.1, 10)))


def _around(grad_fn, optimizer):
    def step(model, opt_state, x, y, mask):
        grads = grad_fn(model, x, y, is_padding_example=mask)
        updates, opt_state = optimizer.update(grads, opt_state, grad_fn.trainable(model))
        return eqx.apply_updates(model, updates), opt_state

    return by_hand(step, state=optimizer.init(grad_fn.trainable(mlp())))


@visit
def value_of_public_data_for_the_optimizer():
    """The loss on held-out data, which momentum with model-based step sizes asks for."""
    grad_fn = clipped()
    optimizer = optax.chain(PLAN.privatizer(grad_fn, key=SECRET), optax.contrib.momo_adam(1e-2))
    held_out = data()[:2]

    def step(model, opt_state, x, y, mask, held_out):
        grads = grad_fn(model, x, y, is_padding_example=mask)
        value = jnp.mean(jax.vmap(squared_error, (None, 0, 0))(model, *held_out))
        params = grad_fn.trainable(model)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=value)
        return eqx.apply_updates(model, updates), opt_state

    state = optimizer.init(grad_fn.trainable(mlp()))
    return by_hand(step, state=state, batch=(*data(), held_out))


@visit
def times_of_their_own():
    """Diffusion: each slot of a batch takes a time of its own, independent of its number."""
    model = eqx.nn.MLP(5, 4, 8, 1, key=jax.random.key(0))

    def loss(model, x, time, key):
        noise = jax.random.normal(key, x.shape)
        return jnp.mean((model(jnp.append(x + time * noise, time)) - noise) ** 2)

    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=1.0, normalize_by=EXPECTED)
    optimizer = optax.chain(PLAN.privatizer(grad_fn, key=SECRET), optax.adabelief(3e-4))

    def step(model, state, x, mask):
        opt_state, key = state
        key, of_times, of_loss = jax.random.split(key, 3)
        times = jax.random.uniform(of_times, (SLOTS,))
        grads = grad_fn(model, x, times, key=of_loss, is_padding_example=mask)
        updates, opt_state = optimizer.update(grads, opt_state)
        return eqx.apply_updates(model, updates), (opt_state, key)

    x, _, mask = data()
    state = (optimizer.init(grad_fn.trainable(model)), jax.random.key(1))
    return by_hand(step, model=model, state=state, batch=(x, mask), private=(2, 3))
