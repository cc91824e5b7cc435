"""Steps that are private as their plan says, each by another idea; and why some are undecided.

They are written from the definition of differential privacy, and know nothing of how they are
checked.
"""

import dataclasses
import math

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from dp_accounting import NeighboringRelation
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P

import eqx_dp as dp
from eqx_dp.privacy import key_from_secret
from tests.checks.privacy_steps import (
    CLASSES,
    EXPECTED,
    OPTIMIZER,
    PLAN,
    SECRET,
    SLOTS,
    STDDEV,
    WIDTH,
    State,
    absolute_error,
    adapters,
    added,
    beside,
    by_hand,
    by_leaf,
    caller_keyed,
    chained,
    clip_norms_by_layer,
    clipped,
    data,
    dropout_loss,
    epoch_by,
    first_state,
    in_parts,
    keeping,
    lora,
    made,
    mlp,
    noised_by,
    on_devices,
    over_devices,
    params_of,
    plan_under,
    prepared_by,
    psum,
    scaled,
    squared_error,
    step_of,
    summed,
    updated,
    weighted,
    with_argument,
    with_noise,
    with_optimizer,
    zero_sums,
)
from tests.optimizers import made as optimizer_named
from tests.sharding.losses import mesh_of

MULTIPLIER = PLAN.noise_multiplier
REPLACE_ONE = plan_under(NeighboringRelation.REPLACE_ONE)
REPLACE_SPECIAL = plan_under(NeighboringRelation.REPLACE_SPECIAL)
MULTI_STEPS = optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation()


def batch_loss(model, x, y):
    return jnp.mean(jnp.sum((jax.vmap(model)(x) - y) ** 2, axis=-1))


def kinds(params):
    return jax.tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "vector", params)


def is_matrix(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def last_layer():
    spec = jax.tree.map(lambda _: False, mlp())
    return eqx.tree_at(lambda m: (m.layers[-1].weight, m.layers[-1].bias), spec, (True, True))


def sharded(kind, **more):
    mesh = mesh_of(kind, data=4, model=2)
    rules = dp.ShardingRules(mesh, params=(("**.weight", P("model", None)),))
    return made(sharding=rules, **more)


def of_policy(name, **more):
    policy = dp.load_policy(name)
    return made(policy=policy, model=policy.cast_to_param(mlp()), **more)


# make_step in its forms, and of models that were not written for this library.

MADE = {
    "auto": lambda: made(),
    "book_keeping": lambda: made(method="book_keeping"),
    "ghost": lambda: made(method="ghost"),
    "per_example": lambda: made(method="per_example"),
    "microbatches_of_one": lambda: made(microbatch_size=1),
    "microbatches_that_do_not_divide_the_batch": lambda: made(microbatch_size=3),
    **{
        name: lambda name=name: of_policy(name)
        for name in sorted({*dp.available_policies()} - {"float64"})
    },
    "policy_in_a_line": lambda: made(policy=dp.parse_policy("p=f32,c=bf16,o=f32")),
    "loss_with_keys": lambda: made(dropout_loss),
    "loss_with_keys_in_microbatches": lambda: made(dropout_loss, microbatch_size=2),
    "loss_of_a_batch": lambda: made(batch_loss, keep_batch_dim=True),
    "clip_norms_of_layers": lambda: made(l2_clip_norm=clip_norms_by_layer(mlp())),
    "frozen_first_layer": lambda: made(filter_spec=last_layer()),
    "lora": lambda: made(model=lora(), filter_spec=adapters(lora())),
    "adamw_with_a_schedule": lambda: made(
        optimizer=optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10))
    ),
    "prodigy": lambda: made(optimizer=optax.contrib.prodigy(1.0)),
    "schedule_free": lambda: made(optimizer=optax.contrib.schedule_free(optax.adam(1e-2), 1e-2)),
    "chain": lambda: made(optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))),
    "multi_steps": lambda: made(optimizer=MULTI_STEPS),
    "skips_what_is_not_finite": lambda: made(optimizer=optax.apply_if_finite(OPTIMIZER, 2)),
    "auto_axes": lambda: sharded("auto"),
    "explicit_axes": lambda: sharded("explicit"),
    "auto_axes_in_microbatches": lambda: sharded("auto", microbatch_size=1),
    "replace_one": lambda: made(plan=REPLACE_ONE),
    "replace_special": lambda: made(plan=REPLACE_SPECIAL),
    "all_examples_in_every_step": lambda: made(
        plan=plan_under(NeighboringRelation.ADD_OR_REMOVE_ONE, sampling_prob=1.0)
    ),
    "fresh_randomness": lambda: made(seed=None),
    "recurrent_network": lambda: made(model=Recurrent(jax.random.key(0)), batch=sequences()),
    "convolution": lambda: convolution(),
    "scanned": lambda: scanned(),
}


class Recurrent(eqx.Module):
    """A GRU over a sequence, as in Equinox's documentation, with a linear layer on its end."""

    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(2, 3, key=keys[0])
        self.head = eqx.nn.Linear(3, CLASSES, key=keys[1])

    def __call__(self, sequence):
        start = jnp.zeros(self.cell.hidden_size)
        return self.head(jax.lax.scan(lambda h, x: (self.cell(x, h), None), start, sequence)[0])


def sequences():
    return jax.random.normal(jax.random.key(9), (SLOTS, 3, 2)), *data()[1:]


def convolution():
    """Kernels of 2,048 numbers or more: noise is drawn in rows, and then cut."""
    model = eqx.nn.Conv2d(16, 16, 3, key=jax.random.key(0))
    batch = jnp.zeros((SLOTS, 16, 4, 4)), data()[2]
    return made(lambda model, x: jnp.sum(model(x) ** 2), model=model, batch=batch)


def scanned():
    """Several steps in one program, of one state."""
    case = made()
    arrays, static = eqx.partition(case.args[0], eqx.is_array)

    def scan(arrays, *batches):
        def take(arrays, batch):
            *examples, mask = batch
            state = eqx.combine(arrays, static)
            after = case.fn(state, *examples, is_padding_example=mask)
            return eqx.filter(after, eqx.is_array), None

        return jax.lax.scan(take, arrays, batches)[0]

    many = [jnp.stack([jnp.asarray(x)] * 3) for x in data()]
    private = (1, 2, 3)
    return case._replace(
        fn=jax.jit(scan), args=(arrays, *many), kwargs={}, private=private, plan=PLAN
    )


# Loops by hand with the plan's noise in a chain of optax.


def readme():
    grad_fn = clipped()
    optimizer = optax.chain(PLAN.privatizer(grad_fn, key=SECRET), optax.adam(1e-3))

    def step(model, opt_state, x, y, is_padding_example):
        grads = grad_fn(model, x, y, is_padding_example=is_padding_example)
        updates, opt_state = optimizer.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state

    private = ("x", "y", "is_padding_example")
    return by_hand(step, state=optimizer.init(grad_fn.trainable(mlp())), private=private)


def groups():
    """The plan's noise for all numbers, drawn by two optimizers, each for its own parameters."""
    grad_fn = clipped()
    chains = [
        optax.chain(PLAN.privatizer(grad_fn, key=SECRET), o) for o in (OPTIMIZER, optax.sgd(1))
    ]
    return with_optimizer(optax.multi_transform({"matrix": chains[0], "vector": chains[1]}, kinds))


def ordinary_differential_equation(controller):
    def loss(model, x, y):
        term = diffrax.ODETerm(lambda t, y, args: model(y))
        found = diffrax.diffeqsolve(
            term, diffrax.Tsit5(), 0.0, 1.0, 0.1, x, stepsize_controller=controller,
            max_steps=16, throw=False
        )  # fmt: skip
        return jnp.mean((found.ys - y[0]) ** 2)

    model = eqx.nn.MLP(WIDTH, WIDTH, 4, 1, key=jax.random.key(0))
    return chained(loss=loss, model=model, method="per_example")


@jax.custom_vjp
def soft_sign(x):
    return jnp.tanh(x)


soft_sign.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (g / (1 + x * x),))


def loss_with_a_loop(model, x, y):
    """How long it runs depends on the example, and on no other."""
    x, _ = jax.lax.while_loop(
        lambda c: (jnp.sum(c[0] * c[0]) < 10.0) & (c[1] < 5),
        lambda c: (1.5 * c[0] + 0.1, c[1] + 1),
        (x, 0),
    )
    return squared_error(model, jax.lax.stop_gradient(x), y)


def loss_with_a_branch(model, x, y):
    error = model(x) - y
    return jax.lax.cond(x[0] > 0, lambda e: jnp.sum(e * e), lambda e: jnp.sum(jnp.abs(e)), error)


CHAINS = {
    "readme": readme,
    "replace_one": lambda: chained(plan=REPLACE_ONE),
    "replace_special": lambda: chained(plan=REPLACE_SPECIAL),
    "key_for_the_loss": lambda: chained(loss=dropout_loss, takes_key=True),
    **{
        name: lambda name=name: chained(policy=dp.load_policy(name))
        for name in ("mixed_bfloat16", "mixed_float16", "mixed_float8")
    },
    "loss_scale": lambda: chained(
        policy=dataclasses.replace(
            dp.load_policy("mixed_float16"), loss_scale=dp.LossScale("static", 1024)
        )
    ),
    "microbatches": lambda: chained(microbatch_size=3, method="per_example"),
    "multi_steps": lambda: chained(MULTI_STEPS),
    "multi_transform": lambda: chained(
        optax.multi_transform({"matrix": optax.adam(1e-2), "vector": optax.sgd(0.1)}, kinds)
    ),
    "partition": lambda: chained(
        optax.partition({"matrix": OPTIMIZER, "vector": optax.set_to_zero()}, kinds)
    ),
    "masked": lambda: chained(
        optax.masked(optax.add_decayed_weights(0.1), is_matrix), optax.sgd(0.1)
    ),
    "ema": lambda: chained(optax.ema(0.9), optax.sgd(0.1)),
    "injected_hyperparameters": lambda: chained(optax.inject_hyperparams(optax.adam)(1e-2)),
    "noise_inside_of_groups": groups,
    "schedule_free_around_the_noise": lambda: with_optimizer(
        optax.contrib.schedule_free(
            optax.chain(PLAN.privatizer(clipped(), key=SECRET), optax.sgd(0.1)), 0.1
        )
    ),
    "sharpness_aware": lambda: chained(
        optax.contrib.sam(
            optax.sgd(0.1), optax.chain(optax.contrib.normalize(), optax.sgd(0.05)), sync_period=2
        )
    ),
    "lora": lambda: chained(model=lora(), filter_spec=adapters(lora())),
    "clip_norms_of_layers": lambda: chained(l2_clip_norm=clip_norms_by_layer(mlp())),
    "privatizer_with_a_standard_deviation": lambda: with_optimizer(
        optax.chain(dp.gaussian_privatizer(stddev=STDDEV, key=SECRET), OPTIMIZER)
    ),
    "checkpoint": lambda: chained(
        loss=lambda model, x, y: jnp.sum((eqx.filter_checkpoint(model)(x) - y) ** 2)
    ),
    "derivative_rule": lambda: chained(
        loss=lambda model, x, y: jnp.sum((soft_sign(model(x)) - y) ** 2)
    ),
    "loop_over_one_example": lambda: chained(loss=loss_with_a_loop, method="per_example"),
    "branch_on_one_example": lambda: chained(loss=loss_with_a_branch),
    "solver": lambda: ordinary_differential_equation(diffrax.ConstantStepSize()),
    "solver_that_adapts": lambda: ordinary_differential_equation(
        diffrax.PIDController(rtol=1e-3, atol=1e-6)
    ),
}


# Noise and keys by hand, on the sum of one loss or of several.


def legacy():
    return first_state(key=jax.random.PRNGKey(3))


def two_losses(of):
    """`of(sums, keys)`, of the sums of two losses."""
    return step_of(lambda at: of([at.sum(), at.sum(absolute_error)], at.keys))


def average_of_parameters():
    """An exponential moving average, which is given to the user."""

    def kept_of(kept, given):
        return added(scaled(0.9, kept), scaled(0.1, params_of(given.new)))

    return keeping(kept_of, params_of(mlp()))


def best_model_by_a_public_loss():
    xs, ys = jnp.ones((3, WIDTH)), jnp.ones((3, CLASSES))

    def kept_of(kept, given):
        loss = jax.vmap(squared_error, (None, 0, 0))(given.new, xs, ys).mean()
        best = jax.tree.map(
            lambda a, b: jnp.where(loss < kept[1], a, b), params_of(given.new), kept[0]
        )
        return best, jnp.minimum(loss, kept[1])

    return keeping(kept_of, (params_of(mlp()), jnp.float32(jnp.inf)))


def layers_with_a_noise_of_their_own(grads, key):
    """For clip norms C and noise z C sqrt(layers), the sum of (C / noise)^2 is 1 / z^2."""
    layers = [
        with_noise(layer, layer_key, STDDEV * norm * math.sqrt(2))
        for layer, layer_key, norm in zip(
            grads.layers, jax.random.split(key), (0.5, 2.0), strict=True
        )
    ]
    return eqx.tree_at(lambda tree: tuple(tree.layers), grads, tuple(layers))


def sparse(grads, key):
    """The largest half of a noisy gradient, rounded to bfloat16, by sign: all after the noise."""
    flat, restore = ravel_pytree(with_noise(grads, key))
    least = jax.lax.top_k(jnp.abs(flat), flat.size // 2)[0][-1]
    kept = jnp.where(jnp.abs(flat) >= least, jnp.sign(flat), 0)
    return restore(kept.astype(jnp.bfloat16).astype(jnp.float32))


def copies(grads, key):
    """Four copies side by side have twice the sensitivity of one."""
    many = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (4, *leaf.shape)), grads)
    return jax.tree.map(lambda leaf: leaf.mean(axis=0), with_noise(many, key, 2 * STDDEV))


def turned(grads, key):
    """Transposed and flat, cast to where it is: what moves no number further."""
    flat, restore = ravel_pytree(jax.tree.map(lambda leaf: leaf.T.astype(jnp.float32), grads))
    return jax.tree.map(lambda leaf: leaf.T, restore(with_noise(flat, key)))


def checked(grads, key):
    """`eqx.error_if` and a print look at what has been released."""
    noisy = with_noise(grads, key)
    norm = optax.tree.norm(noisy)
    jax.debug.print("norm of the noisy gradient {}", norm)
    return eqx.error_if(noisy, ~jnp.isfinite(norm), "the noisy gradient is not finite")


def skipped_by_the_noisy_norm(grads, key):
    noisy = with_noise(grads, key)
    large = optax.tree.norm(noisy) > 100.0
    return jax.lax.cond(large, lambda: scaled(0.0, noisy), lambda: noisy)


def behind_a_barrier(grads, key):
    return jax.lax.optimization_barrier(with_noise(jax.lax.optimization_barrier(grads), key))


def times_of_the_caller():
    """The optimizer runs as often as the caller says, all with one noisy gradient."""
    params, static = eqx.partition(mlp(), eqx.is_inexact_array)

    def step(params, state, x, y, mask, times):
        carried, key = jax.random.split(state.key)
        grads = clipped()(eqx.combine(params, static), x, y, is_padding_example=mask)
        noisy, state = with_noise(grads, key), state._replace(key=carried)
        return jax.lax.fori_loop(0, times, lambda _, c: updated(*c, noisy), (params, state))

    batch = (*data(), jnp.asarray(3))
    return by_hand(step, model=params, state=first_state(params), batch=batch)


def of_public(model, batch):
    return jnp.mean(jax.vmap(squared_error, (None, 0, 0))(model, *batch))


BY_HAND = {
    "key_split_and_carried": lambda: noised_by(with_noise),
    # As JAX 0.11 takes arrays apart.
    "key_taken_apart": lambda: noised_by(
        lambda grads, key: with_noise(grads, jax.lax.unstack(jax.random.split(key))[1])
    ),
    "legacy_key_taken_apart": lambda: noised_by(
        lambda grads, key: with_noise(grads, jax.lax.unstack(jax.random.split(key))[1]),
        state=legacy(),
    ),
    "legacy_key_split_and_carried": lambda: noised_by(with_noise, state=legacy()),
    "counter": lambda: step_of(
        lambda at: with_noise(at.sum(), jax.random.fold_in(at.keys[0], at.state.step))
    ),
    "root_and_counter": lambda: counted(lambda state: state.key),
    "legacy_root_and_counter": lambda: counted(lambda state: state.key, state=legacy()),
    "root_that_is_closed_over": lambda: counted(lambda state: key_from_secret(3, "noise")),
    "root_that_is_made_inside": lambda: counted(lambda state: jax.random.key(3)),
    "key_of_the_caller": lambda: step_of(
        lambda at: with_noise(at.sum(), at.more[0]), batch=(*data(), jax.random.key(6))
    ),
    # The most common pattern in JAX: the caller counts steps, and the root is closed over.
    "number_of_the_caller": lambda: caller_keyed(jax.random.fold_in),
    "numbers_of_the_caller_and_a_root": lambda: step_of(
        lambda at: with_noise(
            at.sum(), jax.random.fold_in(jax.random.fold_in(*at.more[:2]), at.more[2])
        ),
        batch=(*data(), jax.random.key(6), jnp.asarray(0), jnp.asarray(0)),
    ),
    "number_of_the_caller_for_loss_and_noise": lambda: two_keys_of_the_caller(),
    "keys_for_loss_and_noise": lambda: step_of(
        lambda at: with_noise(at.sum(dropout_loss, key=at.keys[1]), at.keys[0])
    ),
    "leaves_with_keys_by_number": lambda: noised_by(
        by_leaf(lambda key, count: [jax.random.fold_in(key, i) for i in range(count)])
    ),
    "leaves_with_keys_by_split": lambda: noised_by(by_leaf(jax.random.split)),
    "two_losses_with_a_noise_each": lambda: two_losses(
        lambda sums, keys: added(
            *(with_noise(g, k, 2**0.5 * STDDEV) for g, k in zip(sums, keys, strict=False))
        )
    )._replace(noise_multiplier=2**0.5 * MULTIPLIER),
    # One example moves the sum of both by twice the bound.
    "two_losses_with_one_noise": lambda: two_losses(
        lambda sums, keys: with_noise(added(*sums), keys[0], 2 * STDDEV)
    ),
    "mean_over_two_augmentations": lambda: step_of(
        lambda at: with_noise(
            scaled(0.5, added(*(at.sum(dropout_loss, key=key) for key in at.keys[1:3]))), at.keys[0]
        )
    ),
    "layers_with_a_noise_of_their_own": lambda: noised_by(
        layers_with_a_noise_of_their_own, clipped(l2_clip_norm=clip_norms_by_layer(mlp()))
    )._replace(noise_multiplier=None),
    "noise_of_the_scaled_gradient": lambda: noised_by(
        lambda grads, key: with_noise(scaled(10.0, grads), key, 10.0 * STDDEV)
    ),
    "noise_on_the_sum_divided_afterwards": lambda: noised_by(
        lambda grads, key: scaled(1 / EXPECTED, with_noise(grads, key, MULTIPLIER)),
        clipped(normalize_by=1.0),
    ),
    "more_noise_than_the_plan_says": lambda: noised_by(
        lambda grads, key: with_noise(grads, key, 2 * STDDEV), multiplier=2 * MULTIPLIER
    ),
    "noise_for_replace_one": lambda: noised_by(
        lambda grads, key: with_noise(grads, key, 2 * STDDEV), plan=REPLACE_ONE
    ),
    "deviation_as_a_number_of_numpy": lambda: noised_by(
        lambda grads, key: with_noise(grads, key, np.float32(STDDEV))
    ),
    "noise_under_jit_and_remat": lambda: noised_by(jax.jit(jax.checkpoint(with_noise))),
    "scope_of_any_name": lambda: noised_by(jax.named_scope("my own scope")(with_noise)),
    "sparse": lambda: noised_by(sparse),
    "copies": lambda: noised_by(copies),
    "turned": lambda: noised_by(turned),
    "checked": lambda: noised_by(checked),
    "skipped_by_the_noisy_norm": lambda: noised_by(skipped_by_the_noisy_norm),
    "behind_a_barrier": lambda: noised_by(behind_a_barrier),
    "decay_behind_the_noise": lambda: step_of(
        lambda at: added(with_noise(at.sum(), at.keys[0]), scaled(0.1, params_of(at.model)))
    ),
    "public_gradient_added": lambda: step_of(
        lambda at: with_noise(
            added(at.sum(), eqx.filter_grad(of_public)(at.model, at.more[0])), at.keys[0]
        ),
        batch=(*data(), data()[:2]),
    ),
    "times_of_the_caller": times_of_the_caller,
    "epoch": lambda: epoch_by(
        lambda model, state, x, y, mask, key: updated(
            model, state, with_noise(clipped()(model, x, y, is_padding_example=mask), key)
        )
    ),
    "epoch_by_a_counter": lambda: epoch_by(
        lambda model, state, x, y, mask, key: updated(
            model,
            state,
            with_noise(
                clipped()(model, x, y, is_padding_example=mask),
                jax.random.fold_in(jax.random.key(5), state.step),
            ),
        )
    ),
}


def counted(root_of, **named):
    """The state's counter is folded into a root."""

    def step(model, state, x, y, mask):
        grads = clipped()(model, x, y, is_padding_example=mask)
        key = jax.random.fold_in(root_of(state), state.step)
        return updated(model, state, with_noise(grads, key))

    return by_hand(step, **named)


def two_keys_of_the_caller():
    def noisy(at):
        loss_key, key = jax.random.split(jax.random.fold_in(*at.more))
        return with_noise(at.sum(dropout_loss, key=loss_key), key)

    return step_of(noisy, batch=(*data(), jax.random.key(6), jnp.asarray(0)))


# What is shown or kept beside a step.

BESIDE = {
    "nothing": lambda: beside(lambda given: ()),
    "norm_of_the_noisy_gradient": lambda: beside(lambda given: optax.tree.norm(given.noisy)),
    "rate_and_step": lambda: beside(
        lambda given: (optax.cosine_decay_schedule(0.1, 10)(given.state.step), given.state.step)
    ),
    "loss_of_public_data": lambda: beside(
        lambda given: of_public(given.new, (jnp.ones((3, WIDTH)), jnp.ones((3, CLASSES))))
    ),
    "numbers_of_a_fresh_key": lambda: beside(lambda given: jax.random.bits(given.key, (4,))),
    "disclosed_loss": lambda: beside(
        lambda given: {"loss": given.values.loss.mean()}, more={"disclose": ("loss",)}
    ),
    "kept_loss": lambda: keeping(
        lambda kept, given: {"loss": given.values.loss.mean()}, {"loss": jnp.zeros(())}
    )._replace(more={"kept": ("loss",)}),
    "kept_model": lambda: keeping(lambda kept, given: params_of(given.new), params_of(mlp())),
    "kept_noisy_sum": lambda: keeping(
        lambda kept, given: added(scaled(0.9, kept), scaled(0.1, given.noisy)), zero_sums()
    ),
    "kept_counter": lambda: keeping(lambda kept, given: kept + 1, jnp.zeros((), int)),
    "average_of_parameters": average_of_parameters,
    "best_model_by_a_public_loss": best_model_by_a_public_loss,
}


# What may be done to examples before the engine: to each by itself, or by public numbers.


def of_images():
    images = np.random.default_rng(8).integers(0, 256, (SLOTS, 2, 2), np.uint8)
    batch = (jnp.asarray(images), *data()[1:])
    return prepared_by(lambda x, y, mask, key: (x.reshape(SLOTS, -1) / 255, y, mask), batch=batch)


def gathered():
    """From the whole data set on the device, by the sampler's indices: -1 is padding."""
    x, y, mask = (jnp.concatenate([leaf, leaf]) for leaf in data())
    index = jnp.where(mask[:SLOTS], -1, jnp.arange(SLOTS))
    return prepared_by(
        lambda xs, ys, index, key: (xs[index], jnp.take(ys, index, axis=0), index < 0),
        batch=(x, y, index),
    )


def scanned_indices():
    """The same, a row of indices in each turn of a scan."""
    params, static = eqx.partition(mlp(), eqx.is_inexact_array)

    def epoch(params, state, xs, ys, indices):
        def step(carry, index):
            params, state = carry
            key = jax.random.fold_in(state.key, state.step)
            model = eqx.combine(params, static)
            grads = clipped()(model, xs[index], ys[index], is_padding_example=index < 0)
            return updated(params, state, with_noise(grads, key)), None

        return jax.lax.scan(step, (params, state), indices)[0]

    index = jnp.stack([jnp.where(data()[2], -1, jnp.arange(SLOTS))] * 3)
    return by_hand(epoch, model=params, state=first_state(params), batch=(*data()[:2], index))


def normalized(x):
    return (x - x.mean(axis=1, keepdims=True)) / (x.std(axis=1, keepdims=True) + 1e-3)


def rules_and_the_plan():
    rules = dp.ShardingRules(mesh_of("auto", data=8))
    case = with_optimizer(
        optax.chain(PLAN.privatizer(clipped(sharding=rules), key=SECRET), OPTIMIZER),
        clipped(sharding=rules),
    )
    model, state, *batch = case.args
    return case._replace(args=(rules.shard(model), state, *rules.shard_batch(tuple(batch))))


PREPARED = {
    "normalized_by_constants": lambda: prepared_by(
        lambda x, y, mask, key: ((x - jnp.arange(WIDTH)) / jnp.full(WIDTH, 0.3), y, mask)
    ),
    "normalized_each_by_itself": lambda: prepared_by(
        lambda x, y, mask, key: (normalized(x), y, mask)
    ),
    "images": of_images,
    "labels_made_one_hot": lambda: prepared_by(
        lambda x, y, mask, key: (x, jax.nn.one_hot(y, CLASSES), mask),
        batch=(data()[0], jnp.arange(SLOTS) % CLASSES, data()[2]),
    ),
    # An example that is not finite is left out: each decides for itself.
    "mask_widened_by_bad_examples": lambda: prepared_by(
        lambda x, y, mask, key: (x, y, mask | ~jnp.all(jnp.isfinite(x), axis=1))
    ),
    "gathered": gathered,
    "scanned_indices": scanned_indices,
    "one_weight_for_all_slots": lambda: weighted(lambda key: jnp.full(SLOTS, 0.5)),
    "public_number": lambda: with_argument(
        lambda x, y, mask, scale, state: (x * scale, y, mask), jnp.asarray(0.5)
    ),
    # A number for each feature, which all examples share.
    "public_table": lambda: with_argument(
        lambda x, y, mask, table, state: (x * table, y, mask), jnp.ones(WIDTH)
    ),
    # What changes from step to step is the same for all slots.
    "public_row_of_a_table": lambda: with_argument(
        lambda x, y, mask, table, state: (x * table[state.step], y, mask), jnp.ones(64)
    ),
    "public_rows": lambda: with_argument(
        lambda x, y, mask, times, state: (x + times[:, None], y, mask), jnp.ones(SLOTS)
    )._replace(more={"public_rows": ("argument",)}),
    "rules_and_the_plan": rules_and_the_plan,
    "sum_of_devices": lambda: summed(psum),
    "mean_of_devices": lambda: summed(lambda g: jax.lax.pmean(g, "data"), STDDEV / 8),
    "noise_on_every_device_alike": lambda: on_devices(
        lambda grads, key: with_noise(psum(grads), key),
        lambda params, state, result, key: updated(params, state, result),
    ),
    "devices_of_two_axes": lambda: over_devices(
        lambda model, x, y, mask: psum(clipped()(model, x, y, is_padding_example=mask)),
        mesh_of("auto", data=4, model=2),
    ),
}

HONEST = {
    f"{group}: {name}": make
    for group, cases in {
        "made": MADE,
        "chain": CHAINS,
        "by hand": BY_HAND,
        "beside": BESIDE,
        "prepared": PREPARED,
    }.items()
    for name, make in cases.items()
}


# Steps of which the check cannot tell, and why.


def augmented(x, key):
    flip, jitter = jax.random.split(key)
    x = jnp.where(jax.random.bernoulli(flip), x[::-1], x)
    return x + 0.1 * jax.random.normal(jitter, x.shape)


def epoch_in_a_python_loop():
    def epoch(model, state, xs, ys, masks):
        for x, y, mask in zip(xs, ys, masks, strict=True):
            carried, key = jax.random.split(state.key)
            grads = clipped()(model, x, y, is_padding_example=mask)
            state = state._replace(key=carried)
            model, state = updated(model, state, with_noise(grads, key))
        return model, state

    return by_hand(epoch, batch=tuple(jnp.stack([leaf] * 2) for leaf in data()))


def split_in_turns(model, state, x, y, mask, key):
    carried, key = jax.random.split(state.key)
    grads = clipped()(model, x, y, is_padding_example=mask)
    return updated(model, State(state.opt, carried, state.step), with_noise(grads, key))


UNDECIDED = {
    "parts of a batch by hand: the engine makes microbatches": {
        "slices": lambda: step_of(
            lambda at: with_noise(
                added(*(in_parts(at, slice(i, i + 2)) for i in range(0, SLOTS, 2))), at.keys[0]
            )
        ),
        "strided_slices": lambda: step_of(
            lambda at: with_noise(
                added(*(in_parts(at, slice(i, None, 4)) for i in range(4))), at.keys[0]
            )
        ),
        "chunks": lambda: step_of(
            lambda at: with_noise(jax.tree.map(lambda leaf: leaf.sum(0), chunked(at)), at.keys[0])
        ),
        "batches_in_a_python_loop": epoch_in_a_python_loop,
        "as_many_indices_as_rows": lambda: prepared_by(
            lambda x, y, index, key: (x[index], y[index], index < 0),
            batch=(*data()[:2], jnp.arange(SLOTS)),
        ),
    },
    "random numbers of slots: draw in the loss, with its key": {
        "augmented": lambda: prepared_by(
            lambda x, y, mask, key: (jax.vmap(augmented)(x, jax.random.split(key, len(x))), y, mask)
        ),
        "times_of_a_diffusion": lambda: weighted(lambda key: jax.random.uniform(key, (SLOTS,))),
    },
    "a key that a loop splits: split before it, or fold a counter in": {
        "epoch": lambda: epoch_by(split_in_turns),
    },
    "noise by hand: dp.add_noise is what the check knows": {
        "normals": lambda: noised_by(
            lambda grads, key: jax.tree.map(
                lambda g: g + STDDEV * jax.random.normal(key, g.shape), grads
            )
        ),
        "taken_away": lambda: noised_by(
            lambda grads, key: added(grads, scaled(-1.0, with_noise(scaled(0.0, grads), key)))
        ),
    },
    "a bound that is not reached": {
        "noise_in_both_branches": lambda: step_of(
            lambda at: jax.lax.cond(
                at.state.step < 3,
                lambda g: with_noise(g, at.keys[0], 2 * STDDEV),
                lambda g: with_noise(g, at.keys[0]),
                at.sum(),
            )
        ),
        "noise_in_two_parts": lambda: step_of(
            lambda at: with_noise(
                with_noise(at.sum(), at.keys[0], 0.6 * STDDEV), at.keys[1], 0.8 * STDDEV
            )
        ),
        "turns_of_two_losses": lambda: step_of(
            lambda at: with_noise(
                jax.lax.cond(at.state.step % 2 == 0, at.sum, lambda: at.sum(absolute_error)),
                at.keys[0],
            )
        ),
    },
}


def chunked(at):
    parts = jax.tree.map(lambda leaf: leaf.reshape(4, 2, *leaf.shape[1:]), (at.x, at.y, at.mask))
    return jax.lax.map(
        lambda part: clipped()(at.model, *part[:2], is_padding_example=part[2]), parts
    )


PUBLIC_VALUE = {"polyak_sgd", "momo", "momo_adam", "reduce_on_plateau"}
"""Optimizers of optax that want a value beside the gradient."""


def with_optimizer_named(name):
    """A step by hand of one of optax's optimizers behind the plan's noise."""
    grad_fn = clipped(lambda model, x, y: jnp.sum((model["weight"] @ x - y) ** 2))
    chain = optax.chain(PLAN.privatizer(grad_fn, key=SECRET), optimizer_named(name))
    optimizer = optax.with_extra_args_support(chain)
    extra = {"value": 0.5} if name in PUBLIC_VALUE else {}

    def step(model, opt_state, x, y, mask):
        grads = grad_fn(model, x, y, is_padding_example=mask)
        updates, opt_state = optimizer.update(grads, opt_state, model, **extra)
        return eqx.apply_updates(model, updates), opt_state

    model = {"weight": jnp.ones((CLASSES, WIDTH))}
    return by_hand(step, model=model, state=optimizer.init(model))
