"""Steps whose noise is too little, no noise, or noise twice: one fault each.

Where one example's part in a release can be worked out by hand, the true noise multiplier is given.
"""

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from dp_accounting import NeighboringRelation
from jax.flatten_util import ravel_pytree

import eqx_dp as dp
from eqx_dp.privacy import key_from_secret
from tests.checks.privacy_steps import (
    EXPECTED,
    OPTIMIZER,
    PLAN,
    SECRET,
    SLOTS,
    STDDEV,
    absolute_error,
    added,
    by_hand,
    clipped,
    data,
    dropout_loss,
    first_state,
    misuse,
    mlp,
    next_key,
    noised_by,
    scaled,
    sliced,
    squared_error,
    updated,
    with_noise,
)

NOISE = {}
misused = functools.partial(misuse, NOISE)

UNBOUNDED = "unbounded"


# Too little noise, or none. The plan's noise multiplier is 1.2.


@misused("release")
def no_noise():
    return noised_by(lambda grads, key: grads)


@misused("release", "noise")
def noise_of_deviation_zero():
    return noised_by(lambda grads, key: with_noise(grads, key, 0.0))


@misused("noise", says="0.6")
def noise_of_half_the_plan():
    return noised_by(lambda grads, key: with_noise(grads, key, STDDEV / 2))


@misused("noise", says="0.24")
def noise_for_a_mean_on_a_sum():
    """The noise is divided by the expected batch size, and the gradient is not."""
    return noised_by(with_noise, clipped(normalize_by=1.0))


@misused("noise", says="0.6")
def noise_without_the_clip_norm():
    return noised_by(with_noise, clipped(l2_clip_norm=2.0))


@misused("noise", says="0.6")
def noise_of_add_or_remove_under_replace_one():
    relation = NeighboringRelation.REPLACE_ONE
    plan = dp.PrivacyPlan(0.5, 10, PLAN.noise_multiplier, 1e-5, relation)
    return noised_by(with_noise, plan=plan)


@misused("noise", says="0.12")
def gradient_scaled_before_the_noise():
    return noised_by(lambda grads, key: with_noise(scaled(10.0, grads), key))


@misused("noise", says="0.6")
def noise_scaled_down_after_the_draw():
    def noisy(grads, key):
        noise = with_noise(jax.tree.map(jnp.zeros_like, grads), key)
        return added(grads, scaled(0.5, noise))

    return noised_by(noisy)


@misused("noise", says="0.288")
def noise_of_the_variance():
    """The standard deviation is 0.24, and its square is taken for it."""
    return noised_by(lambda grads, key: with_noise(grads, key, STDDEV**2))


@misused("noise", says="0.3")
def one_noise_for_four_gradients_of_a_batch():
    losses = [
        clipped(lambda model, x, y, i=i: squared_error(model, x, y) ** (1 + i)) for i in range(4)
    ]

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        grads = added(*(grad_fn(model, x, y, is_padding_example=mask) for grad_fn in losses))
        return updated(model, state, with_noise(grads, key))

    return by_hand(step)


@misused("noise", says="0.3")
def one_noise_for_four_augmentations_of_a_batch():
    """Added up in a scan, each with a key of its own."""
    grad_fn = clipped(dropout_loss)

    def step(model, state, x, y, mask):
        carried, noise_key, loss_key = jax.random.split(state.key, 3)

        def add(total, key):
            return added(total, grad_fn(model, x, y, key=key, is_padding_example=mask)), None

        zeros = jax.tree.map(jnp.zeros_like, grad_fn.trainable(model))
        total, _ = jax.lax.scan(add, zeros, jax.random.split(loss_key, 4))
        return updated(model, state._replace(key=carried), with_noise(total, noise_key))

    return by_hand(step)


@misused("noise")
def accumulated_over_overlapping_slices():
    """Four slices of five slots, which all hold the slots 3 and 4."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        parts = []
        for start in range(4):
            x_part, y_part, mask_part = (leaf[start : start + 5] for leaf in (x, y, mask))
            parts.append(grad_fn(model, x_part, y_part, is_padding_example=mask_part))
        return updated(model, state, with_noise(added(*parts), key))

    return by_hand(step)


@misused("noise", decided=False)
def accumulated_over_overlapping_slices_in_a_loop():
    """Slices of four slots that move by one: a slot is in up to four of them."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)

        def add(i, total):
            x_part, y_part, mask_part = sliced((x, y, mask), i, 4)
            return added(total, grad_fn(model, x_part, y_part, is_padding_example=mask_part))

        zeros = jax.tree.map(jnp.zeros_like, grad_fn.trainable(model))
        total = jax.lax.fori_loop(0, 5, add, zeros)
        return updated(model, state, with_noise(total, key))

    return by_hand(step)


@misused("noise", "examples apart", decided=False)
def batch_handed_on_twice():
    """A batch is concatenated with itself: every example counts twice."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        x, y, mask = (jnp.concatenate([leaf, leaf]) for leaf in (x, y, mask))
        grads = grad_fn(model, x, y, is_padding_example=mask)
        return updated(model, state, with_noise(grads, key))

    return by_hand(step)


@misused("noise", "examples apart", decided=False)
def examples_repeated_by_a_gather():
    """Every slot is filled with the first two examples."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        index = jnp.arange(SLOTS) % 2
        grads = grad_fn(model, x[index], y[index], is_padding_example=mask[index])
        return updated(model, state, with_noise(grads, key))

    return by_hand(step)


@misused("noise", says="0.84")
def two_releases_of_one_gradient():
    """Two chains add noise to the same gradient, each from a key of its own: z / sqrt(2)."""
    grad_fn = clipped()
    chains = [
        optax.chain(PLAN.privatizer(grad_fn, key=key_from_secret(SECRET, name)), OPTIMIZER)
        for name in ("first", "second")
    ]

    def step(models, states, x, y, mask):
        grads = grad_fn(models[0], x, y, is_padding_example=mask)
        taken = [chain.update(grads, state) for chain, state in zip(chains, states, strict=True)]
        models = [eqx.apply_updates(m, u) for m, (u, _) in zip(models, taken, strict=True)]
        return models, [state for _, state in taken]

    states = [chain.init(grad_fn.trainable(mlp())) for chain in chains]
    return by_hand(step, model=[mlp(), mlp()], state=states)


@misused("noise", says="0.84")
def two_losses_with_the_noise_of_one():
    """Each of two releases has the plan's noise multiplier, together they have z / sqrt(2)."""
    first, second = clipped(), clipped(absolute_error)

    def step(model, state, x, y, mask):
        keys = jax.random.split(state.key, 3)
        one = with_noise(first(model, x, y, is_padding_example=mask), keys[0])
        other = with_noise(second(model, x, y, is_padding_example=mask), keys[1])
        return updated(model, state._replace(key=keys[2]), added(one, other))

    return by_hand(step)


@misused("noise", says="0.6")
def epoch_that_takes_one_batch_four_times():
    """Four steps on one sample: z / sqrt(4), where the plan counts a fresh sample each."""
    grad_fn = clipped()
    params, static = eqx.partition(mlp(), eqx.is_inexact_array)

    def epoch(params, state, x, y, mask):
        def step(carry, _):
            params, state = carry
            key, state = next_key(state)
            grads = grad_fn(eqx.combine(params, static), x, y, is_padding_example=mask)
            return updated(params, state, with_noise(grads, key)), None

        return jax.lax.scan(step, (params, state), None, length=4)[0]

    return by_hand(epoch, model=params, state=first_state(params))


@misused("noise", says="0.6")
def four_noisy_copies_averaged():
    """A gradient is released four times, and the mean of them has half of the noise."""

    def noisy(grads, key):
        copies = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (4, *leaf.shape)), grads)
        return jax.tree.map(lambda leaf: leaf.mean(axis=0), with_noise(copies, key))

    return noised_by(noisy)


@misused("noise")
def two_gradients_in_one_vector():
    """Side by side they have sqrt(2) times the sensitivity of one."""
    first, second = clipped(), clipped(absolute_error)

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        both = (
            first(model, x, y, is_padding_example=mask),
            second(model, x, y, is_padding_example=mask),
        )
        flat, restore = ravel_pytree(both)
        noisy = restore(flat + STDDEV * jax.random.normal(key, flat.shape))
        return updated(model, state, added(*noisy))

    return by_hand(step)


@misused("noise", decided=False)
def multiplied_by_a_matrix_before_the_noise():
    """A matrix of ones moves a vector by up to 4 times its length."""

    def noisy(grads, key):
        def spread(leaf):
            return jnp.ones((len(leaf), len(leaf))) @ leaf

        return with_noise(jax.tree.map(spread, grads), key)

    return noised_by(noisy)


@misused("noise", decided=False)
def running_sum_of_numbers_before_the_noise():
    def noisy(grads, key):
        return with_noise(jax.tree.map(lambda leaf: jnp.cumsum(leaf, axis=0), grads), key)

    return noised_by(noisy)


@misused("noise", decided=False)
def scaled_by_an_argument_before_the_noise():
    """A public number, but any: what it is decides how much noise there is."""
    grad_fn = clipped()

    def step(model, state, x, y, mask, scale):
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        return updated(model, state, with_noise(scaled(scale, grads), key))

    return by_hand(step, batch=(*data(), jnp.asarray(1.0)))


@misused("noise", decided=False)
def noise_that_fades():
    """Less of it in each step, and less than the plan's from the second one on."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        return updated(model, state, with_noise(grads, key, STDDEV * 0.9**state.step))

    return by_hand(step)


@misused("noise", "release", decided=False)
def noise_in_proportion_to_the_gradient():
    return noised_by(lambda grads, key: with_noise(grads, key, STDDEV * optax.tree.norm(grads)))


@misused("noise", "release")
def no_noise_in_the_first_steps():
    """By a branch on the public number of the step."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        noisy = jax.lax.cond(state.step < 3, lambda: grads, lambda: with_noise(grads, key))
        return updated(model, state, noisy)

    return by_hand(step)


@misused("noise", "release", decided=False)
def no_noise_in_the_first_steps_by_where():
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        deviation = jnp.where(state.step < 3, 0.0, STDDEV)
        return updated(model, state, with_noise(grads, key, deviation))

    return by_hand(step)


@misused("noise", decided=False)
def as_many_releases_as_the_caller_says():
    """A loop over one batch whose length is an argument."""
    grad_fn = clipped()
    params, static = eqx.partition(mlp(), eqx.is_inexact_array)

    def step(params, state, x, y, mask, times):
        def once(_, carry):
            params, state = carry
            key, state = next_key(state)
            grads = grad_fn(eqx.combine(params, static), x, y, is_padding_example=mask)
            return updated(params, state, with_noise(grads, key))

        return jax.lax.fori_loop(0, times, once, (params, state))

    batch = (*data(), jnp.asarray(2))
    return by_hand(step, model=params, state=first_state(params), batch=batch)


# Noise that is no independent Gaussian for each number.


@misused("release")
def noise_on_some_leaves_only():
    def noisy(grads, key):
        layers = with_noise(grads.layers[:1], key)
        return eqx.tree_at(lambda tree: tree.layers, grads, (*layers, *grads.layers[1:]))

    return noised_by(noisy)


@misused("release", "noise", decided=False)
def noise_on_some_numbers_only():
    """Half of each leaf gets none."""

    def noisy(grads, key):
        noise = with_noise(jax.tree.map(jnp.zeros_like, grads), key)
        return jax.tree.map(lambda g, n: g.at[::2].add(n[::2]), grads, noise)

    return noised_by(noisy)


@misused("noise", "fresh noise")
def one_number_of_noise_for_a_leaf():
    """The differences of a leaf's numbers have no noise."""

    def noisy(grads, key):
        leaves, structure = jax.tree.flatten(grads)
        keys = jax.random.split(key, len(leaves))
        return structure.unflatten(
            leaf + STDDEV * jax.random.normal(own, ())
            for leaf, own in zip(leaves, keys, strict=True)
        )

    return noised_by(noisy)


@misused("noise", "fresh noise")
def one_row_of_noise_for_a_matrix():
    def noisy(grads, key):
        leaves, structure = jax.tree.flatten(grads)
        keys = jax.random.split(key, len(leaves))
        return structure.unflatten(
            leaf + STDDEV * jax.random.normal(own, leaf.shape[-1:])
            for leaf, own in zip(leaves, keys, strict=True)
        )

    return noised_by(noisy)


def drawn_by(draw):
    """An otherwise honest step whose noise is `draw(key, shape)`, of standard deviation 1."""

    def noisy(grads, key):
        leaves, structure = jax.tree.flatten(grads)
        keys = jax.random.split(key, len(leaves))
        return structure.unflatten(
            leaf + STDDEV * draw(own, leaf.shape) for leaf, own in zip(leaves, keys, strict=True)
        )

    return noised_by(noisy)


@misused("noise", "release", decided=False)
def uniform_noise():
    return drawn_by(lambda key, shape: math.sqrt(3) * jax.random.uniform(key, shape, minval=-1))


@misused("noise", "release", decided=False)
def laplace_noise():
    return drawn_by(lambda key, shape: jax.random.laplace(key, shape) / math.sqrt(2))


@misused("noise", "release", decided=False)
def normal_noise_cut_at_two_deviations():
    return drawn_by(lambda key, shape: jax.random.truncated_normal(key, -2.0, 2.0, shape))


@misused("noise", "release", decided=False)
def normal_noise_in_absolute_value():
    return drawn_by(lambda key, shape: jnp.abs(jax.random.normal(key, shape)))


@misused("noise", "release", decided=False)
def normal_noise_masked_by_the_gradient():
    """Zeros of the gradient stay zeros."""

    def noisy(grads, key):
        return jax.tree.map(lambda g, n: jnp.where(g == 0, 0, n), grads, with_noise(grads, key))

    return noised_by(noisy)


# What is not linear, between the clipped sum and the noise.


def before_the_noise(change):
    """A step that does something to the clipped sum first."""
    return noised_by(lambda grads, key: with_noise(change(grads), key))


@misused("noise", "release", says=UNBOUNDED)
def sign_before_the_noise():
    return before_the_noise(lambda grads: jax.tree.map(jnp.sign, grads))


@misused("noise", "release", says=UNBOUNDED)
def square_before_the_noise():
    return before_the_noise(lambda grads: jax.tree.map(jnp.square, grads))


@misused("noise", "release", says=UNBOUNDED)
def normalized_before_the_noise():
    return before_the_noise(
        lambda grads: jax.tree.map(lambda leaf: leaf / optax.tree.norm(grads), grads)
    )


@misused("noise", "release", decided=False)
def rounded_before_the_noise():
    """To bfloat16: a small change of one example can move a number by a whole step of rounding."""

    def rounded(leaf):
        return leaf.astype(jnp.bfloat16).astype(jnp.float32)

    return before_the_noise(lambda grads: jax.tree.map(rounded, grads))


@misused("noise", "release", says=UNBOUNDED)
def divided_by_the_number_of_real_examples():
    grad_fn = clipped(normalize_by=1.0)

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        number = jnp.maximum(1, jnp.sum(~mask))
        grads = jax.tree.map(lambda leaf: leaf / number, grads)
        return updated(model, state, with_noise(grads, key))

    return by_hand(step)


@misused("noise", "release", says=UNBOUNDED)
def adam_before_the_noise():
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        updates, opt = OPTIMIZER.update(grads, state.opt)
        return eqx.apply_updates(model, with_noise(updates, key)), state._replace(opt=opt)

    return by_hand(step)


@misused("noise", "release", "side door", decided=False)
def multi_steps_before_the_noise():
    """The sum over two steps is in the state, and one noise is for both."""
    grad_fn = clipped()
    noise = PLAN.privatizer(grad_fn, key=SECRET)
    optimizer = optax.MultiSteps(optax.chain(noise, OPTIMIZER), 2, use_grad_mean=False)

    def step(model, state, x, y, mask):
        grads = grad_fn(model, x, y, is_padding_example=mask)
        updates, state = optimizer.update(grads, state, grad_fn.trainable(model))
        return eqx.apply_updates(model, updates), state

    return by_hand(step, state=optimizer.init(grad_fn.trainable(mlp())))


@misused("noise", "release", decided=False)
def momentum_before_the_noise():
    """The average of gradients without noise is in the state, and every step releases it anew."""
    grad_fn = clipped()

    def step(model, states, x, y, mask):
        average, state = states
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        average = added(scaled(0.9, average), grads)
        model, state = updated(model, state, with_noise(average, key))
        return model, (average, state)

    average = jax.tree.map(jnp.zeros_like, clipped().trainable(mlp()))
    return by_hand(step, state=(average, first_state()))


@misused("noise", "release", says=UNBOUNDED)
def inner_step_without_noise():
    """The gradient is clipped and noised, but at a model that private data has moved."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        inner = grad_fn(model, x, y, is_padding_example=mask)
        ahead = eqx.apply_updates(model, scaled(-0.1, inner))
        grads = grad_fn(ahead, x, y, is_padding_example=mask)
        return updated(model, state, with_noise(grads, key))

    return by_hand(step)


@misused("noise", "release", says=UNBOUNDED)
def local_steps_before_the_noise():
    """Four steps on parts of the batch without noise, then noise on how far the model has gone."""
    grad_fn = clipped()
    params, static = eqx.partition(mlp(), eqx.is_inexact_array)

    def step(params, state, x, y, mask):
        key, state = next_key(state)

        def local(params, part):
            x, y, mask = part
            grads = grad_fn(eqx.combine(params, static), x, y, is_padding_example=mask)
            return added(params, scaled(-0.1, grads)), None

        parts = jax.tree.map(lambda leaf: leaf.reshape(4, 2, *leaf.shape[1:]), (x, y, mask))
        moved, _ = jax.lax.scan(local, params, parts)
        gone = jax.tree.map(lambda before, after: before - after, params, moved)
        return updated(params, state, with_noise(gone, key))

    return by_hand(step, model=params, state=first_state(params))


@misused("noise", "release", decided=False)
def ordinary_gradient_with_noise():
    """No clipping at all."""

    def step(model, state, x, y, mask):
        key, state = next_key(state)

        def mean_loss(model):
            losses = jax.vmap(squared_error, (None, 0, 0))(model, x, y)
            return jnp.sum(jnp.where(mask, 0, losses)) / EXPECTED

        return updated(model, state, with_noise(eqx.filter_grad(mean_loss)(model), key))

    return by_hand(step)


@misused("noise", "release")
def clip_norm_of_infinity():
    return noised_by(with_noise, clipped(l2_clip_norm=math.inf))


# Noise that is seen, or taken away.


@misused("noise", "release", "fresh noise", decided=False)
def noise_taken_away_again():
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        noise = with_noise(jax.tree.map(jnp.zeros_like, grads), key)
        noisy = added(grads, noise)
        return updated(model, state, jax.tree.map(lambda a, b: a - b, noisy, noise))

    return by_hand(step)


@misused("noise", "release", "fresh noise", decided=False)
def noise_returned_beside():
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        noise = with_noise(jax.tree.map(jnp.zeros_like, grads), key)
        return *updated(model, state, added(grads, noise)), noise

    return by_hand(step)


@misused("noise", "fresh noise")
def one_noise_on_two_sums():
    """The difference of the two has no noise."""
    first, second = clipped(), clipped(absolute_error)

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        one = first(model, x, y, is_padding_example=mask)
        other = second(model, x, y, is_padding_example=mask)
        noise = with_noise(jax.tree.map(jnp.zeros_like, one), key, STDDEV * math.sqrt(2))
        return *updated(model, state, added(one, noise)), added(other, noise)

    return by_hand(step)


@misused("noise", "fresh noise")
def one_noise_for_a_stack_of_sums():
    """Under vmap over two sums, with one key for both."""
    first, second = clipped(), clipped(absolute_error)

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        sums = jax.tree.map(
            lambda *leaves: jnp.stack(leaves),
            first(model, x, y, is_padding_example=mask),
            second(model, x, y, is_padding_example=mask),
        )
        deviation = STDDEV * math.sqrt(2)
        noisy = jax.vmap(lambda grads: with_noise(grads, key, deviation))(sums)
        return updated(model, state, jax.tree.map(lambda leaf: leaf[0] - leaf[1], noisy))

    return by_hand(step)


@misused("noise", "fresh noise", "release", decided=False)
def key_of_the_noise_returned():
    """Whoever has the key draws the noise again, and takes it away."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        return *updated(model, state, with_noise(grads, key)), key

    return by_hand(step)


# Keys.


@misused("fresh noise", says="key")
def one_key_for_all_leaves():
    def noisy(grads, key):
        return jax.tree.map(lambda g: g + STDDEV * jax.random.normal(key, g.shape), grads)

    return noised_by(noisy)


@misused("fresh noise", says="key")
def one_key_for_two_losses():
    first, second = clipped(), clipped(absolute_error)

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        deviation = STDDEV * math.sqrt(2)
        one = with_noise(first(model, x, y, is_padding_example=mask), key, deviation)
        other = with_noise(second(model, x, y, is_padding_example=mask), key, deviation)
        return *updated(model, state, one), other

    return by_hand(step)


@misused("fresh noise", says="key")
def constant_key():
    return noised_by(lambda grads, key: with_noise(grads, jax.random.key(0)))


@misused("fresh noise", says="key")
def key_of_the_state_not_advanced():
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        _, key = jax.random.split(state.key)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        return updated(model, state, with_noise(grads, key))

    return by_hand(step)


@misused("fresh noise", says="key")
def counter_not_advanced():
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        grads = grad_fn(model, x, y, is_padding_example=mask)
        noisy = with_noise(grads, jax.random.fold_in(state.key, state.step))
        model, after = updated(model, state, noisy)
        return model, after._replace(step=state.step)

    return by_hand(step)


@misused("fresh noise", says="key", decided=False)
def counter_that_repeats():
    """The number of the step is folded in modulo 2: every second step has the same noise."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        grads = grad_fn(model, x, y, is_padding_example=mask)
        key = jax.random.fold_in(state.key, state.step % 2)
        return updated(model, state, with_noise(grads, key))

    return by_hand(step)


@misused("fresh noise", says="key", decided=False)
def key_drawn_from_and_carried():
    """The key of the noise is the one that the next step splits."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        carried, _ = jax.random.split(state.key)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        flat, restore = ravel_pytree(grads)
        noisy = restore(flat + STDDEV * jax.random.normal(carried, flat.shape))
        model, state = updated(model, state, noisy)
        return model, state._replace(key=carried)

    return by_hand(step)


@misused("fresh noise", says="key")
def key_drawn_from_and_split():
    def noisy(grads, key):
        leaves, structure = jax.tree.flatten(grads)
        keys = [key, *jax.random.split(key, len(leaves) - 1)]
        return structure.unflatten(
            leaf + STDDEV * jax.random.normal(own, leaf.shape)
            for leaf, own in zip(leaves, keys, strict=True)
        )

    return noised_by(noisy)


def by_key_of_leaf(key_of):
    """A step whose leaves get noise from `key_of(key, position of the leaf)`."""

    def noisy(grads, key):
        leaves, structure = jax.tree.flatten(grads)
        return structure.unflatten(
            leaf + STDDEV * jax.random.normal(key_of(key, i), leaf.shape)
            for i, leaf in enumerate(leaves)
        )

    return noised_by(noisy)


@misused("fresh noise", says="key")
def numbers_that_repeat_folded_in():
    """The first leaf and the third get one key."""
    return by_key_of_leaf(lambda key, i: jax.random.fold_in(key, i % 2))


@misused("fresh noise", says="key", decided=False)
def split_and_fold_in_of_one_key():
    """With JAX's default generator, `split(key)[i]` is `fold_in(key, i)`."""
    return by_key_of_leaf(
        lambda key, i: jax.random.split(key)[i] if i < 2 else jax.random.fold_in(key, i - 2)
    )


@misused("fresh noise", says="key", decided=False)
def two_splits_of_one_key():
    """In two and in three parts: the first two of both are the same."""
    return by_key_of_leaf(lambda key, i: jax.random.split(key, 2 + i // 2)[i % 2])


@misused("fresh noise", says="key", decided=False)
def counters_that_meet():
    """The second noise of a step is the first one of the next step."""
    first, second = clipped(), clipped(absolute_error)

    def step(model, state, x, y, mask):
        deviation = STDDEV * math.sqrt(2)
        key, later = (jax.random.fold_in(state.key, state.step + i) for i in range(2))
        one = with_noise(first(model, x, y, is_padding_example=mask), key, deviation)
        other = with_noise(second(model, x, y, is_padding_example=mask), later, deviation)
        return updated(model, state, added(one, other))

    return by_hand(step)


@misused("fresh noise", says="key")
def key_of_the_loss_for_the_noise():
    grad_fn = clipped(dropout_loss)

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        grads = grad_fn(model, x, y, key=key, is_padding_example=mask)
        return updated(model, state, with_noise(grads, key))

    return by_hand(step)


@misused("fresh noise")
def privatizer_started_anew_in_every_step():
    grad_fn = clipped()
    noise = PLAN.privatizer(grad_fn, key=SECRET)

    def step(model, state, x, y, mask):
        grads = grad_fn(model, x, y, is_padding_example=mask)
        noisy, _ = noise.update(grads, noise.init(grads))
        return updated(model, state, noisy)

    return by_hand(step)


@misused("fresh noise")
def state_of_the_privatizer_thrown_away():
    grad_fn = clipped()
    noise = PLAN.privatizer(grad_fn, key=SECRET)

    def step(model, states, x, y, mask):
        noise_state, state = states
        grads = grad_fn(model, x, y, is_padding_example=mask)
        noisy, _ = noise.update(grads, noise_state)
        model, state = updated(model, state, noisy)
        return model, (noise_state, state)

    return by_hand(step, state=(noise.init(clipped().trainable(mlp())), first_state()))


def epoch_with_noise(key_of):
    """An epoch under scan; `key_of(state)` gives a step's key and the state behind it."""
    grad_fn = clipped()
    params, static = eqx.partition(mlp(), eqx.is_inexact_array)

    def epoch(params, state, xs, ys, masks):
        outer, state = next_key(state)

        def step(carry, batch):
            params, state = carry
            x, y, mask = batch
            key, state = key_of(outer, state)
            grads = grad_fn(eqx.combine(params, static), x, y, is_padding_example=mask)
            return updated(params, state, with_noise(grads, key)), None

        return jax.lax.scan(step, (params, state), (xs, ys, masks))[0]

    batches = tuple(jnp.stack([leaf] * 3) for leaf in data())
    return by_hand(epoch, model=params, state=first_state(params), batch=batches)


@misused("fresh noise", says="key")
def epoch_with_one_key_for_all_steps():
    return epoch_with_noise(lambda outer, state: (outer, state))


@misused("fresh noise", says="key")
def epoch_whose_carried_key_does_not_move():
    return epoch_with_noise(lambda outer, state: (jax.random.split(state.key)[1], state))


@misused("fresh noise", decided=False)
def epoch_whose_carried_key_is_set_anew_to_one_key():
    """The second step and the third draw from one key; the first from another."""

    def key_of(outer, state):
        return jax.random.fold_in(state.key, 0), state._replace(key=jax.random.fold_in(outer, 1))

    return epoch_with_noise(key_of)


@misused("fresh noise", decided=False)
def epoch_whose_end_counts_back():
    """The step behind the loop has the key of the second in it: the number 3 - 2 was there."""
    grad_fn = clipped()
    params, static = eqx.partition(mlp(), eqx.is_inexact_array)

    def epoch(params, state, xs, ys, masks):
        outer, state = next_key(state)

        def step(carry, batch, ago=0):
            params, state, number = carry
            x, y, mask = batch
            grads = grad_fn(eqx.combine(params, static), x, y, is_padding_example=mask)
            key = jax.random.fold_in(outer, number - ago)
            return (*updated(params, state, with_noise(grads, key)), number + 1), None

        in_loop, at_end = (tuple(leaf[part] for leaf in (xs, ys, masks)) for part in (slice(3), 3))
        carry, _ = jax.lax.scan(step, (params, state, 0), in_loop)
        return step(carry, at_end, ago=2)[0][:2]

    batches = tuple(jnp.stack([leaf] * 4) for leaf in data())
    return by_hand(epoch, model=params, state=first_state(params), batch=batches)


@misused("fresh noise", says="key")
def epoch_with_copies_of_one_key():
    """The keys of all steps are handed to the scan, and are all the same."""
    grad_fn = clipped()
    params, static = eqx.partition(mlp(), eqx.is_inexact_array)

    def epoch(params, state, xs, ys, masks):
        key, state = next_key(state)

        def step(carry, batch):
            x, y, mask, key = batch
            grads = grad_fn(eqx.combine(carry[0], static), x, y, is_padding_example=mask)
            return updated(*carry, with_noise(grads, key)), None

        keys = jnp.broadcast_to(key, len(xs))
        return jax.lax.scan(step, (params, state), (xs, ys, masks, keys))[0]

    batches = tuple(jnp.stack([leaf] * 3) for leaf in data())
    return by_hand(epoch, model=params, state=first_state(params), batch=batches)
