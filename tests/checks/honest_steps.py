"""Training steps that are differentially private as their plan says, each by another idea."""

import dataclasses
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from dp_accounting import NeighboringRelation
from jax.flatten_util import ravel_pytree

import eqx_dp as dp
from eqx_dp.privacy import key_from_secret
from tests.checks.honest_made_steps import MADE
from tests.checks.privacy_steps import (
    CLASSES,
    EXPECTED,
    OPTIMIZER,
    PLAN,
    SECRET,
    SLOTS,
    STDDEV,
    WIDTH,
    absolute_error,
    adapters,
    added,
    beside,
    by_hand,
    chained,
    clip_norms_by_layer,
    clipped,
    data,
    dropout_loss,
    first_state,
    listed,
    lora,
    mlp,
    next_key,
    noised_by,
    on_devices,
    plan_under,
    prepared_by,
    scaled,
    sliced,
    squared_error,
    updated,
    with_noise,
)
from tests.sharding.losses import mesh_of

HONEST = dict(MADE)
honest = listed(HONEST)
MULTIPLIER = PLAN.noise_multiplier


# Loops by hand: clipped gradient, the plan's noise, optax.


@honest
def loop_of_the_readme():
    grad_fn = clipped()
    optimizer = optax.chain(PLAN.privatizer(grad_fn, key=SECRET), optax.adam(1e-3))

    def step(model, opt_state, x, y, is_padding_example):
        grads = grad_fn(model, x, y, is_padding_example=is_padding_example)
        updates, opt_state = optimizer.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state

    return by_hand(step, state=optimizer.init(grad_fn.trainable(mlp())))


@honest
def arguments_by_name():
    case = loop_of_the_readme()
    return case._replace(private=("x", "y", "is_padding_example"))


@honest
def chain_under_replace_one():
    return chained(plan=plan_under(NeighboringRelation.REPLACE_ONE))


@honest
def chain_with_a_key_for_the_loss():
    return chained(loss=dropout_loss, takes_key=True)


@honest
def chain_in_bfloat16():
    return chained(policy=dp.load_policy("mixed_bfloat16"), method="ghost")


@honest
def chain_in_float16_with_a_scale_for_each_example():
    policy = dp.load_policy("mixed_float16")
    scale = dp.LossScale("static", 1024)
    return chained(policy=dataclasses.replace(policy, loss_scale=scale))


@honest
def chain_with_multi_steps_behind():
    return chained(optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation())


def kinds(params):
    return jax.tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "vector", params)


@honest
def chain_with_groups_behind():
    return chained(
        optax.multi_transform({"matrix": optax.adam(1e-2), "vector": optax.sgd(0.1)}, kinds)
    )


@honest
def chain_with_masked_decay_behind():
    def is_matrix(params):
        return jax.tree.map(lambda leaf: leaf.ndim > 1, params)

    return chained(optax.masked(optax.add_decayed_weights(0.1), is_matrix), optax.sgd(0.1))


@honest
def noise_inside_of_groups():
    """The plan's noise for all numbers, drawn by two optimizers, each for its own parameters."""
    grad_fn = clipped()
    parts = {
        "matrix": optax.chain(PLAN.privatizer(grad_fn, key=SECRET), optax.adam(1e-2)),
        "vector": optax.chain(PLAN.privatizer(grad_fn, key=SECRET), optax.sgd(0.1)),
    }
    optimizer = optax.multi_transform(parts, kinds)

    def step(model, opt_state, x, y, mask):
        grads = grad_fn(model, x, y, is_padding_example=mask)
        updates, opt_state = optimizer.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state

    return by_hand(step, state=optimizer.init(grad_fn.trainable(mlp())))


@honest
def chain_with_lora():
    return chained(model=lora(), filter_spec=adapters(lora()))


@honest
def chain_with_clip_norms_of_layers():
    return chained(l2_clip_norm=clip_norms_by_layer(mlp()))


@honest
def layers_with_a_noise_of_their_own():
    """For clip norms C and noise z C sqrt(layers), the sum of (C / noise)^2 is 1 / z^2."""
    norms = (0.5, 2.0)
    grad_fn = clipped(l2_clip_norm=clip_norms_by_layer(mlp()))

    def noisy(grads, key):
        keys = jax.random.split(key, len(norms))
        layers = [
            with_noise(layer, layer_key, STDDEV * norm * math.sqrt(len(norms)))
            for layer, layer_key, norm in zip(grads.layers, keys, norms, strict=True)
        ]
        return eqx.tree_at(lambda tree: tuple(tree.layers), grads, tuple(layers))

    return noised_by(noisy, grad_fn)._replace(noise_multiplier=None)


@honest
def average_of_parameters():
    """An exponential moving average, which is given to the user."""
    grad_fn = clipped()

    def step(models, state, x, y, mask):
        model, average = models
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        model, state = updated(model, state, with_noise(grads, key))
        average = jax.tree.map(
            lambda old, new: 0.9 * old + 0.1 * new if eqx.is_array(new) else new, average, model
        )
        return (model, average), state

    return by_hand(step, model=(mlp(), mlp()), state=first_state())


# Epochs.


def batches_of(count):
    """Several batches, stacked."""
    x, y, mask = data()
    return tuple(jnp.stack([leaf] * count) for leaf in (x, y, mask))


@honest
def epoch_over_stacked_batches():
    grad_fn = clipped()
    optimizer = optax.chain(PLAN.privatizer(grad_fn, key=SECRET), OPTIMIZER)
    params, static = eqx.partition(mlp(), eqx.is_inexact_array)

    def epoch(params, opt_state, xs, ys, masks):
        def step(carry, batch):
            params, opt_state = carry
            x, y, mask = batch
            grads = grad_fn(eqx.combine(params, static), x, y, is_padding_example=mask)
            updates, opt_state = optimizer.update(grads, opt_state)
            return (optax.apply_updates(params, updates), opt_state), None

        return jax.lax.scan(step, (params, opt_state), (xs, ys, masks))[0]

    return by_hand(epoch, model=params, state=optimizer.init(params), batch=batches_of(3))


@honest
def epoch_by_key_of_the_carry():
    """Noise by hand, its key split in every step of the scan; learning rates come out as well."""
    grad_fn = clipped()
    params, static = eqx.partition(mlp(), eqx.is_inexact_array)
    rates = optax.cosine_decay_schedule(0.1, 10)

    def epoch(params, state, xs, ys, masks):
        def step(carry, batch):
            params, state = carry
            x, y, mask = batch
            key, state = next_key(state)
            grads = grad_fn(eqx.combine(params, static), x, y, is_padding_example=mask)
            params, state = updated(params, state, with_noise(grads, key))
            return (params, state), rates(state.step)

        return jax.lax.scan(step, (params, state), (xs, ys, masks))

    return by_hand(epoch, model=params, state=first_state(params), batch=batches_of(3))


@honest
def epoch_by_keys_split_before():
    grad_fn = clipped()
    params, static = eqx.partition(mlp(), eqx.is_inexact_array)

    def epoch(params, state, xs, ys, masks):
        key, state = next_key(state)

        def step(carry, batch):
            x, y, mask, key = batch
            grads = grad_fn(eqx.combine(carry[0], static), x, y, is_padding_example=mask)
            return updated(*carry, with_noise(grads, key)), None

        keys = jax.random.split(key, len(xs))
        return jax.lax.scan(step, (params, state), (xs, ys, masks, keys))[0]

    return by_hand(epoch, model=params, state=first_state(params), batch=batches_of(3))


@honest
def epoch_that_gathers_its_batches():
    """From the whole data set on the device, by the sampler's indices: -1 is padding."""
    grad_fn = clipped()
    params, static = eqx.partition(mlp(), eqx.is_inexact_array)

    def epoch(params, state, xs, ys, indices):
        def step(carry, index):
            params, state = carry
            key = jax.random.fold_in(state.key, state.step)
            model = eqx.combine(params, static)
            grads = grad_fn(model, xs[index], ys[index], is_padding_example=index < 0)
            return updated(params, state, with_noise(grads, key)), None

        return jax.lax.scan(step, (params, state), indices)[0]

    x, y, mask = data()
    index = jnp.where(mask, -1, jnp.arange(SLOTS))
    return by_hand(
        epoch, model=params, state=first_state(params), batch=(x, y, jnp.stack([index] * 3))
    )


@honest
def batch_gathered_by_indices():
    grad_fn = clipped()

    def step(model, state, xs, ys, indices):
        key, state = next_key(state)
        x, y = jnp.take(xs, indices, axis=0), jnp.take(ys, indices, axis=0)
        grads = grad_fn(model, x, y, is_padding_example=indices < 0)
        return updated(model, state, with_noise(grads, key))

    x, y, mask = data()
    return by_hand(step, batch=(x, y, jnp.where(mask, -1, jnp.arange(SLOTS))))


@honest
def epoch_in_a_python_loop():
    grad_fn = clipped()

    def epoch(model, state, xs, ys, masks):
        for x, y, mask in zip(xs, ys, masks, strict=True):
            key, state = next_key(state)
            grads = grad_fn(model, x, y, is_padding_example=mask)
            model, state = updated(model, state, with_noise(grads, key))
        return model, state

    return by_hand(epoch, batch=batches_of(2))


# Gradient accumulation: sums over disjoint slices of one batch, one noise at the end.


@honest
def accumulated_in_a_python_loop():
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        parts = [
            grad_fn(model, x[i : i + 2], y[i : i + 2], is_padding_example=mask[i : i + 2])
            for i in range(0, SLOTS, 2)
        ]
        return updated(model, state, with_noise(added(*parts), key))

    return by_hand(step)


@honest
def accumulated_by_scan():
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        parts = jax.tree.map(lambda leaf: leaf.reshape(4, 2, *leaf.shape[1:]), (x, y, mask))

        def add(total, part):
            x, y, mask = part
            return added(total, grad_fn(model, x, y, is_padding_example=mask)), None

        zeros = jax.tree.map(jnp.zeros_like, grad_fn.trainable(model))
        total, _ = jax.lax.scan(add, zeros, parts)
        return updated(model, state, with_noise(total, key))

    return by_hand(step)


@honest
def accumulated_by_fori_loop():
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)

        def add(i, total):
            x_part, y_part, mask_part = sliced((x, y, mask), 2 * i, 2)
            return added(total, grad_fn(model, x_part, y_part, is_padding_example=mask_part))

        zeros = jax.tree.map(jnp.zeros_like, grad_fn.trainable(model))
        total = jax.lax.fori_loop(0, SLOTS // 2, add, zeros)
        return updated(model, state, with_noise(total, key))

    return by_hand(step)


@honest
def accumulated_over_a_mapped_axis():
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        parts = jax.tree.map(lambda leaf: leaf.reshape(4, 2, *leaf.shape[1:]), (x, y, mask))
        sums = jax.lax.map(
            lambda part: grad_fn(model, *part[:2], is_padding_example=part[2]), parts
        )
        total = jax.tree.map(lambda leaf: leaf.sum(axis=0), sums)
        return updated(model, state, with_noise(total, key))

    return by_hand(step)


# Several losses, several models.


@honest
def two_losses_with_a_noise_each():
    """Two releases of noise multiplier z sqrt(2) are together one of z."""
    first, second = clipped(), clipped(absolute_error)

    def step(model, state, x, y, mask):
        keys = jax.random.split(state.key, 3)
        one = first(model, x, y, is_padding_example=mask)
        other = second(model, x, y, is_padding_example=mask)
        one = with_noise(one, keys[0], STDDEV * math.sqrt(2))
        other = with_noise(other, keys[1], STDDEV * math.sqrt(2))
        return updated(model, state._replace(key=keys[2]), added(one, other))

    return by_hand(step, multiplier=MULTIPLIER * math.sqrt(2))


@honest
def two_losses_with_one_noise():
    """One example moves the sum of both by twice the bound."""
    first, second = clipped(), clipped(absolute_error)

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        one = first(model, x, y, is_padding_example=mask)
        other = second(model, x, y, is_padding_example=mask)
        return updated(model, state, with_noise(added(one, other), key, 2 * STDDEV))

    return by_hand(step)


@honest
def mean_over_two_augmentations():
    grad_fn = clipped(dropout_loss)

    def step(model, state, x, y, mask):
        carried, noise_key, *keys = jax.random.split(state.key, 4)
        parts = [grad_fn(model, x, y, key=key, is_padding_example=mask) for key in keys]
        mean = scaled(0.5, added(*parts))
        return updated(model, state._replace(key=carried), with_noise(mean, noise_key))

    return by_hand(step)


@honest
def turns_of_two_losses():
    """Which of two losses is taken follows from the public number of the step."""
    first, second = clipped(), clipped(absolute_error)

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        grads = jax.lax.cond(
            state.step % 2 == 0,
            lambda: first(model, x, y, is_padding_example=mask),
            lambda: second(model, x, y, is_padding_example=mask),
        )
        return updated(model, state, with_noise(grads, key))

    return by_hand(step)


@honest
def generator_behind_a_private_critic():
    """The critic alone sees private data; the generator learns from the critic."""

    def critic_loss(critic, x, made):
        return jnp.sum(critic(made)) - jnp.sum(critic(x))

    grad_fn = clipped(critic_loss)

    def generator_loss(generator, critic, codes):
        return -jnp.mean(jax.vmap(lambda code: jnp.sum(critic(generator(code))))(codes))

    def step(models, states, x, y, mask):
        del y
        (critic, generator), (critic_state, generator_state) = models, states
        carried, noise_key, code_key, fake_key = jax.random.split(critic_state.key, 4)
        fakes = jax.vmap(generator)(jax.random.normal(fake_key, (SLOTS, WIDTH)))
        grads = grad_fn(critic, x, fakes, is_padding_example=mask)
        critic_state = critic_state._replace(key=carried)
        critic, critic_state = updated(critic, critic_state, with_noise(grads, noise_key))
        codes = jax.random.normal(code_key, (SLOTS, WIDTH))
        public = eqx.filter_grad(generator_loss)(generator, critic, codes)
        generator, generator_state = updated(generator, generator_state, public)
        return (critic, generator), (critic_state, generator_state)

    generator = eqx.nn.MLP(WIDTH, WIDTH, 4, 1, key=jax.random.key(5))
    return by_hand(step, model=(mlp(), generator), state=(first_state(), first_state(generator)))


# What may be computed or shown beside a step.


@honest
def public_evaluation_beside():
    grad_fn = clipped()

    def step(model, state, x, y, mask, held_out):
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        model, state = updated(model, state, with_noise(grads, key))
        losses = jax.vmap(squared_error, (None, 0, 0))(model, *held_out)
        return model, state, {"held_out_loss": losses.mean()}

    return by_hand(step, batch=(*data(), data()[:2]))


@honest
def public_gradient_added():
    """The gradient of public data is added to the noisy one, without clipping."""
    grad_fn = clipped()

    def step(model, state, x, y, mask, public):
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        of_public = eqx.filter_grad(
            lambda model: jax.vmap(squared_error, (None, 0, 0))(model, *public).mean()
        )(model)
        return updated(model, state, with_noise(added(grads, of_public), key))

    return by_hand(step, batch=(*data(), data()[:2]))


@honest
def public_metrics_beside():
    rate = optax.cosine_decay_schedule(0.1, 10)
    return beside(lambda given: {"rate": rate(given.state.step), "step": given.state.step})


@honest
def norm_of_the_noisy_gradient_beside():
    return beside(lambda given: optax.tree.norm(given.noisy))


@honest
def values_of_examples_thrown_away():
    return beside(lambda given: ())


@honest
def loss_disclosed_by_name():
    case = beside(lambda given: {"loss": given.values.loss.mean()})
    return case._replace(disclose=("loss",))


@honest
def public_value_checked():
    """`eqx.error_if` looks at what has been released."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        noisy = with_noise(grad_fn(model, x, y, is_padding_example=mask), key)
        norm = optax.tree.norm(noisy)
        noisy = eqx.error_if(noisy, ~jnp.isfinite(norm), "the noisy gradient is not finite")
        return updated(model, state, noisy)

    return by_hand(step)


@honest
def public_value_printed():
    def noisy(grads, key):
        noisy = with_noise(grads, key)
        jax.debug.print("norm of the noisy gradient {}", optax.tree.norm(noisy))
        return noisy

    return noised_by(noisy)


@honest
def step_number_printed():
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        jax.debug.print("step {}", state.step)
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        return updated(model, state, with_noise(grads, key))

    return by_hand(step)


@honest
def skipped_by_the_noisy_norm():
    """A branch that looks at a release."""

    def noisy(grads, key):
        noisy = with_noise(grads, key)
        large = optax.tree.norm(noisy) > 100.0
        return jax.lax.cond(large, lambda: scaled(0.0, noisy), lambda: noisy)

    return noised_by(noisy)


@honest
def noisy_gradient_made_sparse():
    """The largest half of a noisy gradient, rounded to bfloat16, by sign: all after the noise."""

    def noisy(grads, key):
        flat, restore = ravel_pytree(with_noise(grads, key))
        least = jax.lax.top_k(jnp.abs(flat), flat.size // 2)[0][-1]
        kept = jnp.where(jnp.abs(flat) >= least, jnp.sign(flat), 0)
        return restore(kept.astype(jnp.bfloat16).astype(jnp.float32))

    return noised_by(noisy)


# Noise and keys by hand.


@honest
def key_split_and_carried():
    return noised_by(with_noise)


@honest
def key_folded_with_a_counter():
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        grads = grad_fn(model, x, y, is_padding_example=mask)
        return updated(model, state, with_noise(grads, jax.random.fold_in(state.key, state.step)))

    return by_hand(step)


@honest
def root_key_closed_over():
    """The key is a constant of the program, and the state's counter is folded in."""
    grad_fn, root = clipped(), key_from_secret(SECRET, "noise")

    def step(model, state, x, y, mask):
        grads = grad_fn(model, x, y, is_padding_example=mask)
        return updated(model, state, with_noise(grads, jax.random.fold_in(root, state.step)))

    return by_hand(step)


@honest
def legacy_key_split_and_carried():
    state = first_state(key=jax.random.PRNGKey(3))
    return noised_by(with_noise, state=state)


@honest
def legacy_key_folded_with_a_counter():
    case = key_folded_with_a_counter()
    model, state, *batch = case.args
    return case._replace(args=(model, state._replace(key=jax.random.PRNGKey(3)), *batch))


@honest
def key_given_by_the_caller():
    """A fresh key is an argument of every call."""
    grad_fn = clipped()

    def step(model, state, x, y, mask, key):
        grads = grad_fn(model, x, y, is_padding_example=mask)
        return updated(model, state, with_noise(grads, key))

    return by_hand(step, batch=(*data(), jax.random.key(6)))


@honest
def keys_of_leaves_folded_in():
    def noisy(grads, key):
        leaves, structure = jax.tree.flatten(grads)
        return structure.unflatten(
            leaf + STDDEV * jax.random.normal(jax.random.fold_in(key, i), leaf.shape)
            for i, leaf in enumerate(leaves)
        )

    return noised_by(noisy)


@honest
def keys_of_leaves_split_one_after_another():
    def noisy(grads, key):
        leaves, structure = jax.tree.flatten(grads)
        found = []
        for leaf in leaves:
            key, own = jax.random.split(key)
            found.append(leaf + STDDEV * jax.random.normal(own, leaf.shape))
        return structure.unflatten(found)

    return noised_by(noisy)


@honest
def keys_for_loss_and_noise():
    grad_fn = clipped(dropout_loss)

    def step(model, state, x, y, mask):
        carried, loss_key, noise_key = jax.random.split(state.key, 3)
        grads = grad_fn(model, x, y, key=loss_key, is_padding_example=mask)
        return updated(model, state._replace(key=carried), with_noise(grads, noise_key))

    return by_hand(step)


@honest
def noise_as_one_flat_vector():
    def noisy(grads, key):
        flat, restore = ravel_pytree(grads)
        return restore(flat + STDDEV * jax.random.normal(key, flat.shape))

    return noised_by(noisy)


@honest
def noise_drawn_at_once_and_cut():
    """One draw for all leaves; each leaf gets a piece of its own."""

    def noisy(grads, key):
        leaves, structure = jax.tree.flatten(grads)
        ends = np.cumsum([leaf.size for leaf in leaves])
        pieces = jnp.split(STDDEV * jax.random.normal(key, (int(ends[-1]),)), ends[:-1])
        return structure.unflatten(
            leaf + piece.reshape(leaf.shape) for leaf, piece in zip(leaves, pieces, strict=True)
        )

    return noised_by(noisy)


@honest
def noise_in_two_parts():
    """The variances of two independent draws add up."""

    def noisy(grads, key):
        first, second = jax.random.split(key)
        return with_noise(with_noise(grads, first, 0.6 * STDDEV), second, 0.8 * STDDEV)

    return noised_by(noisy)


@honest
def noisy_copies_with_as_much_more_noise():
    """Four copies side by side have twice the sensitivity of one."""

    def noisy(grads, key):
        copies = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (4, *leaf.shape)), grads)
        noisy = with_noise(copies, key, 2 * STDDEV)
        return jax.tree.map(lambda leaf: leaf.mean(axis=0), noisy)

    return noised_by(noisy)


@honest
def noise_in_both_branches():
    """Twice as much in the first steps."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        noisy = jax.lax.cond(
            state.step < 3,
            lambda: with_noise(grads, key, 2 * STDDEV),
            lambda: with_noise(grads, key),
        )
        return updated(model, state, noisy)

    return by_hand(step)


@honest
def noise_behind_a_barrier():
    def noisy(grads, key):
        grads = jax.lax.optimization_barrier(grads)
        return jax.lax.optimization_barrier(with_noise(grads, key))

    return noised_by(noisy)


@honest
def sum_reshaped_before_the_noise():
    """Transposed, padded with zeros, cast to where it is: what moves no number further."""

    def noisy(grads, key):
        turned = jax.tree.map(lambda leaf: jnp.pad(leaf.T, 1).astype(jnp.float32), grads)
        noisy = with_noise(turned, key)
        return jax.tree.map(lambda leaf: leaf[(slice(1, -1),) * leaf.ndim].T, noisy)

    return noised_by(noisy)


@honest
def optimizer_run_in_a_public_loop():
    """As often as the caller says, all with one noisy gradient."""
    grad_fn = clipped()
    params, static = eqx.partition(mlp(), eqx.is_inexact_array)

    def step(params, state, x, y, mask, times):
        key, state = next_key(state)
        grads = grad_fn(eqx.combine(params, static), x, y, is_padding_example=mask)
        noisy = with_noise(grads, key)
        return jax.lax.fori_loop(0, times, lambda _, c: updated(*c, noisy), (params, state))

    batch = (*data(), jnp.asarray(3))
    return by_hand(step, model=params, state=first_state(params), batch=batch)


@honest
def noise_taken_away():
    def noisy(grads, key):
        noise = with_noise(jax.tree.map(jnp.zeros_like, grads), key)
        return jax.tree.map(lambda leaf, drawn: leaf - drawn, grads, noise)

    return noised_by(noisy)


@honest
def noise_of_the_scaled_gradient():
    return noised_by(lambda grads, key: with_noise(scaled(10.0, grads), key, 10.0 * STDDEV))


@honest
def noise_on_the_sum_divided_afterwards():
    def noisy(grads, key):
        noisy = with_noise(grads, key, PLAN.noise_multiplier)
        return jax.tree.map(lambda leaf: leaf / EXPECTED, noisy)

    return noised_by(noisy, clipped(normalize_by=1.0))


@honest
def more_noise_than_the_plan_says():
    case = noised_by(lambda grads, key: with_noise(grads, key, 2 * STDDEV))
    return case._replace(noise_multiplier=2 * MULTIPLIER)


@honest
def noise_for_replace_one_by_hand():
    plan = plan_under(NeighboringRelation.REPLACE_ONE)
    return noised_by(lambda grads, key: with_noise(grads, key, 2 * STDDEV), plan=plan)


@honest
def noise_under_jit_of_its_own():
    return noised_by(jax.jit(with_noise, static_argnums=2))


@honest
def noise_by_scan_over_stacked_layers():
    """A stack of layers of one shape; the noise of each is drawn in a scan."""

    def loss(model, x, y):
        hidden, _ = jax.lax.scan(lambda h, w: (jnp.tanh(w @ h), None), x, model["stack"])
        return jnp.sum((hidden[:CLASSES] - y) ** 2)

    def noisy(grads, key):
        stack = grads["stack"]
        keys = jax.random.split(key, len(stack))
        noisy = jax.lax.map(
            lambda pair: pair[0] + STDDEV * jax.random.normal(pair[1], pair[0].shape),
            (stack, keys),
        )
        return {"stack": noisy}

    model = {"stack": jax.random.normal(jax.random.key(7), (3, WIDTH, WIDTH))}
    return noised_by(noisy, clipped(loss), model=model)


@honest
def privatizer_with_a_standard_deviation():
    noise = dp.gaussian_privatizer(stddev=STDDEV, key=SECRET)
    grad_fn = clipped()

    def step(model, states, x, y, mask):
        noise_state, state = states
        grads = grad_fn(model, x, y, is_padding_example=mask)
        noisy, noise_state = noise.update(grads, noise_state)
        model, state = updated(model, state, noisy)
        return model, (noise_state, state)

    return by_hand(step, state=(noise.init(clipped().trainable(mlp())), first_state()))


# What may be done to examples before the engine: to each by itself, or by public numbers.


@honest
def examples_augmented():
    def augment(x, key):
        flip, jitter = jax.random.split(key)
        x = jnp.where(jax.random.bernoulli(flip), x[::-1], x)
        return x + 0.1 * jax.random.normal(jitter, x.shape)

    return prepared_by(
        lambda x, y, mask, key: (jax.vmap(augment)(x, jax.random.split(key, len(x))), y, mask)
    )


@honest
def examples_cropped():
    def crop(x, key):
        start = jax.random.randint(key, (), 0, 3)
        return jax.lax.dynamic_slice(jnp.pad(x, 1), (start,), x.shape)

    return prepared_by(
        lambda x, y, mask, key: (jax.vmap(crop)(x, jax.random.split(key, len(x))), y, mask)
    )


@honest
def examples_normalized_by_constants():
    mean, deviation = jnp.arange(WIDTH) / 10.0, jnp.full(WIDTH, 0.3)
    return prepared_by(lambda x, y, mask, key: ((x - mean) / deviation, y, mask))


@honest
def examples_normalized_each_by_itself():
    def normalized(x):
        return (x - x.mean(axis=1, keepdims=True)) / (x.std(axis=1, keepdims=True) + 1e-3)

    return prepared_by(lambda x, y, mask, key: (normalized(x), y, mask))


@honest
def images_of_uint8():
    images = np.random.default_rng(8).integers(0, 256, (SLOTS, 2, 2), np.uint8)

    def as_floats(x, y, mask, key):
        del key
        return x.reshape(SLOTS, -1).astype(jnp.float32) / 255, y, mask

    return prepared_by(as_floats, batch=(jnp.asarray(images), *data()[1:]))


@honest
def labels_made_one_hot():
    x, _, mask = data()
    return prepared_by(
        lambda x, y, mask, key: (x, jax.nn.one_hot(y, CLASSES), mask),
        batch=(x, jnp.arange(SLOTS) % CLASSES, mask),
    )


@honest
def mask_from_indices():
    x, y, mask = data()
    return prepared_by(
        lambda x, y, indices, key: (x, y, indices == -1),
        batch=(x, y, jnp.where(mask, -1, jnp.arange(SLOTS))),
    )


@honest
def mask_widened_by_bad_examples():
    """An example that is not finite is left out: each decides for itself."""
    return prepared_by(lambda x, y, mask, key: (x, y, mask | ~jnp.all(jnp.isfinite(x), axis=1)))


@honest
def tree_of_examples():
    def loss(model, example):
        return squared_error(model, example["x"], example["y"])

    grad_fn = clipped(loss)

    def step(model, state, examples, mask):
        key, state = next_key(state)
        grads = grad_fn(model, examples, is_padding_example=mask)
        return updated(model, state, with_noise(grads, key))

    x, y, mask = data()
    return by_hand(step, batch=({"x": x, "y": y}, mask), private=(2, 3))


# Devices.


def noised_outside(stddev):
    def finish(params, state, result, key):
        return updated(params, state, with_noise(result, key, stddev))

    return finish


@honest
def summed_over_devices():
    return on_devices(lambda grads, key: jax.lax.psum(grads, "data"), noised_outside(STDDEV))


@honest
def averaged_over_devices():
    """A mean over eight devices has an eighth of the sensitivity, and so of the noise."""
    return on_devices(lambda grads, key: jax.lax.pmean(grads, "data"), noised_outside(STDDEV / 8))


@honest
def noise_on_every_device_alike():
    """Each device sums over all of them and adds the same noise, so that all have one result."""
    return on_devices(
        lambda grads, key: with_noise(jax.lax.psum(grads, "data"), key),
        lambda params, state, result, key: updated(params, state, result),
    )


@honest
def rules_and_the_plan_by_hand():
    rules = dp.ShardingRules(mesh_of("auto", data=8))
    grad_fn = clipped(sharding=rules)
    optimizer = optax.chain(PLAN.privatizer(grad_fn, key=SECRET), OPTIMIZER)

    def step(model, opt_state, x, y, mask):
        grads = grad_fn(model, x, y, is_padding_example=mask)
        updates, opt_state = optimizer.update(grads, opt_state)
        return rules.shard(eqx.apply_updates(model, updates)), opt_state

    model = rules.shard(mlp())
    state = optimizer.init(grad_fn.trainable(model))
    return by_hand(step, model=model, state=state, batch=rules.shard_batch(data()))


# Inside of a loss.


@honest
def loss_under_checkpoint():
    def loss(model, x, y):
        return jnp.sum((eqx.filter_checkpoint(model)(x) - y) ** 2)

    return chained(loss=loss, method="ghost")


@jax.custom_vjp
def soft_sign(x):
    return jnp.tanh(x)


soft_sign.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (g / (1 + x * x),))


@honest
def loss_with_a_derivative_rule():
    def loss(model, x, y):
        return jnp.sum((soft_sign(model(x)) - y) ** 2)

    return chained(loss=loss)


@honest
def loss_with_a_loop_over_one_example():
    """How long it runs depends on the example, and on no other."""

    def loss(model, x, y):
        def grow(carry):
            x, i = carry
            return 1.5 * x + 0.1, i + 1

        def small(carry):
            x, i = carry
            return (jnp.sum(x * x) < 10.0) & (i < 5)

        x, _ = jax.lax.while_loop(small, grow, (x, 0))
        return squared_error(model, jax.lax.stop_gradient(x), y)

    return chained(loss=loss, method="per_example")


@honest
def loss_with_a_branch_on_one_example():
    def loss(model, x, y):
        error = model["weight"] @ x - y
        return jax.lax.cond(
            x[0] > 0, lambda e: jnp.sum(e * e), lambda e: jnp.sum(jnp.abs(e)), error
        )

    return chained(loss=loss, model={"weight": jnp.ones((CLASSES, WIDTH))})
