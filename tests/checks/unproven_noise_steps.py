"""Steps that leak, each with what is wrong: noise, keys, marks, random values."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from dp_accounting import NeighboringRelation
from jax.flatten_util import ravel_pytree

import eqx_dp as dp
from tests.checks.privacy_steps import (
    EXPECTED,
    PLAN,
    SECRET,
    STDDEV,
    State,
    absolute_error,
    added,
    by_hand,
    clipped,
    data,
    dropout_loss,
    first_state,
    leak,
    mlp,
    next_key,
    noised_by,
    plan_under,
    scaled,
    squared_error,
    updated,
    with_noise,
)

NOISE = {}
leaking = leak(NOISE)


def shown_beside(shown_of, plan=PLAN):
    """An honest step that returns `shown_of(grads, key)` beside; the key is a new one."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        carried, noise_key, key = jax.random.split(state.key, 3)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        new = updated(model, state._replace(key=carried), with_noise(grads, noise_key))
        return *new, shown_of(grads, key)

    return by_hand(step, plan=plan)


def last_of(grads):
    """One leaf: the last bias."""
    return jax.tree.leaves(grads)[-1]


# Random values that carry what has hardly been noised.


def from_a_quiet_release(random_of):
    """Returns `random_of(quiet, key)`, where `quiet` is the sum with a millionth of noise."""

    def shown(grads, key):
        quiet_key, key = jax.random.split(key)
        return random_of(with_noise(last_of(grads), quiet_key, 1e-6), key)

    return shown_beside(shown)


def as_words(values):
    return jax.lax.bitcast_convert_type(values, jnp.uint32)


@leaking
def bits_of_a_key_folded_with_a_quiet_release():
    """Whoever tries all sums finds the one whose bits these are; the release is not counted."""
    return from_a_quiet_release(
        lambda quiet, key: jax.random.bits(
            jax.random.fold_in(jax.random.key(0), as_words(quiet)[0]), (4,)
        )
    )


@leaking
def numbers_of_a_key_seeded_by_a_quiet_release():
    """The seed is the sum, but for a millionth of noise."""
    return from_a_quiet_release(
        lambda quiet, key: jax.random.normal(jax.random.key(as_words(quiet)[0]), (4,))
    )


@leaking
def numbers_of_key_data_from_a_quiet_release():
    """The two words of a key are two numbers of the sum."""
    return from_a_quiet_release(
        lambda quiet, key: jax.random.uniform(jax.random.wrap_key_data(as_words(quiet)), (4,))
    )


@leaking
def coin_of_a_quiet_release():
    """A coin's probability of heads is a number of the sum."""
    return from_a_quiet_release(
        lambda quiet, key: jax.random.bernoulli(key, jax.nn.sigmoid(quiet), (1000, 2))
    )


@leaking
def choice_by_a_quiet_release():
    """The largest number of the sum is chosen, all but surely."""
    return from_a_quiet_release(lambda quiet, key: jax.random.categorical(key, 1e6 * quiet))


@leaking
def sample_with_weights_of_a_quiet_release():
    """Of a public table, by probabilities that the sum decides."""
    return from_a_quiet_release(
        lambda quiet, key: jax.random.choice(key, jnp.arange(2), (1000,), p=jax.nn.softmax(quiet))
    )


@leaking
def uniform_around_a_quiet_release():
    """The interval that the number is drawn from shows the sum to six digits."""
    return from_a_quiet_release(
        lambda quiet, key: jax.random.uniform(key, (2,), minval=quiet, maxval=quiet + 1e-6)
    )


@leaking
def integer_below_a_quiet_release():
    """The bound of the number is the sum, in millionths."""
    return from_a_quiet_release(
        lambda quiet, key: jax.random.randint(key, (2,), 0, 1 + (1e6 * jnp.abs(quiet)).astype(int))
    )


@leaking
def uniform_compared_with_a_quiet_release():
    """A thousand comparisons with known numbers find the sum."""
    return from_a_quiet_release(
        lambda quiet, key: jax.random.uniform(jax.random.key(0), (1000, 2)) < quiet
    )


@leaking
def count_of_events_at_the_rate_of_a_quiet_release():
    """A Poisson number whose mean is the sum."""
    return from_a_quiet_release(
        lambda quiet, key: jax.random.poisson(key, jnp.exp(quiet), (1000, 2))
    )


@leaking
def order_by_a_quiet_release():
    """A public table in the order of the sum's numbers."""
    return from_a_quiet_release(lambda quiet, key: jnp.arange(2)[jnp.argsort(quiet)])


@leaking
def quiet_release_through_a_loop():
    """A scan carries it, and returns its running sum."""
    return from_a_quiet_release(
        lambda quiet, key: jax.lax.scan(lambda c, q: (c + q, c), 0.0, quiet)[0]
    )


@leaking
def quiet_release_in_a_trip_count():
    """A loop runs as often as the sum says, in thousandths."""
    return from_a_quiet_release(
        lambda quiet, key: jax.lax.while_loop(lambda i: i < 1e3 * quiet[0], lambda i: i + 1, 0)
    )


@leaking
def quiet_release_in_a_branch():
    """Which of two public numbers is returned, the sum says."""
    return from_a_quiet_release(
        lambda quiet, key: jax.lax.cond(quiet[0] > 0, lambda: 1.0, lambda: 2.0)
    )


@leaking
def one_time_pad_returned_with_its_message():
    """The sum's words under random words, and the random words beside."""

    def shown(grads, key):
        pad = jax.random.bits(key, (2,))
        return pad ^ as_words(last_of(grads)), pad

    return shown_beside(shown)


@leaking
def sum_times_random_numbers():
    """Numbers of the sum that are zero stay zero, and large ones stay large."""
    return shown_beside(lambda grads, key: last_of(grads) * jax.random.normal(key, (2,)))


@leaking
def sum_times_a_random_sign():
    """How large it is stays."""
    return shown_beside(lambda grads, key: last_of(grads) * jax.random.rademacher(key, (2,)))


@leaking
def sum_in_random_order():
    """Which numbers the sum has stays."""
    return shown_beside(lambda grads, key: jax.random.permutation(key, last_of(grads)))


@leaking
def sum_with_half_of_it_dropped():
    """The other half stays."""
    return shown_beside(
        lambda grads, key: jnp.where(jax.random.bernoulli(key, 0.5, (2,)), last_of(grads), 0.0)
    )


@leaking
def sum_rounded_up_or_down_by_chance():
    """Stochastic rounding is no noise: whole numbers stay as they are."""

    def shown(grads, key):
        scaled = 1e3 * last_of(grads)
        return jnp.floor(scaled + jax.random.uniform(key, (2,)))

    return shown_beside(shown)


@leaking
def random_response_of_a_private_coin():
    """The mean input decides the probability."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        carried, noise_key, key = jax.random.split(state.key, 3)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        coins = jax.random.bernoulli(key, jax.nn.sigmoid(x.mean()), (100,))
        return *updated(model, state._replace(key=carried), with_noise(grads, noise_key)), coins

    return by_hand(step)


@leaking
def carried_key_chosen_by_a_label():
    """Which of two keys the state carries, a label says: whoever has the keys reads it."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        one, other, noise_key = jax.random.split(state.key, 3)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        key = jnp.where(y[0, 0] > 0, one, other)
        return updated(model, state._replace(key=key), with_noise(grads, noise_key))

    return by_hand(step)


# Noise that is used twice, or taken away.


@leaking
def noise_of_zeros_subtracted():
    """One key for the sum and for zeros: the difference has no noise."""
    return noised_by(
        lambda grads, key: added(
            with_noise(grads, key),
            scaled(-1.0, with_noise(jax.tree.map(jnp.zeros_like, grads), key)),
        )
    )


@leaking
def noise_of_zeros_returned():
    """One key for the sum and for zeros, and both leave."""
    return shown_beside(
        lambda grads, key: [
            with_noise(tree, key, 3 * STDDEV) for tree in (grads, scaled(0.0, grads))
        ],
        dp.PrivacyPlan(0.5, 10, 1.0, 1e-5),
    )


def two_sums(noisy_of):
    """The mean of what `noisy_of(sums, key)` makes of the sums of two losses."""
    grad_fns = clipped(), clipped(absolute_error)

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        sums = [grad_fn(model, x, y, is_padding_example=mask) for grad_fn in grad_fns]
        return *updated(model, state, noisy_of(sums, key)[0]), noisy_of(sums, key)[1]

    return by_hand(step)


@leaking
def one_key_for_two_losses():
    """The difference of the two noisy sums has no noise."""
    return two_sums(lambda sums, key: [with_noise(g, key, 2 * STDDEV) for g in sums])


@leaking
def one_key_for_every_leaf():
    """Noise is added leaf by leaf: leaves of one shape get the same."""
    return noised_by(lambda grads, key: jax.tree.map(lambda leaf: with_noise(leaf, key), grads))


@leaking
def one_key_for_the_rows_of_a_leaf():
    """`vmap` over rows: all get the same noise, and their differences none."""
    return noised_by(
        lambda grads, key: jax.tree.map(
            lambda leaf: jax.vmap(lambda row: with_noise(row, key))(leaf), grads
        )
    )


@leaking
def four_noisy_copies_by_vmap():
    """`vmap` over keys: four copies of the sum, each with the noise of one, are averaged."""

    def noisy(grads, key):
        copies = jax.vmap(lambda key: with_noise(grads, key))(jax.random.split(key, 4))
        return jax.tree.map(lambda leaf: leaf.mean(0), copies)

    return noised_by(noisy)


@leaking
def one_key_for_four_noises_in_a_loop():
    """Four times the same noise is added, and three times it is taken away again."""

    def noisy(grads, key):
        return jax.lax.fori_loop(
            0,
            4,
            lambda i, g: added(with_noise(g, key), scaled(-1.0, with_noise(scaled(0.0, g), key))),
            grads,
        )

    return noised_by(noisy)


@leaking
def one_key_for_two_steps_of_a_call():
    """Two batches, one key: the difference of both updates shows the difference of both sums."""
    grad_fn = clipped()

    def step(model, state, xs, ys, masks):
        key, state = next_key(state)
        for x, y, mask in zip(xs, ys, masks, strict=True):
            grads = grad_fn(model, x, y, is_padding_example=mask)
            model, state = updated(model, state, with_noise(grads, key))
        return model, state

    return by_hand(step, batch=tuple(jnp.stack([leaf] * 2) for leaf in data()))


@leaking
def key_of_the_state_used_and_kept():
    """The state's key never changes: every step has the same noise."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        grads = grad_fn(model, x, y, is_padding_example=mask)
        return updated(model, state, with_noise(grads, state.key))

    return by_hand(step)


@leaking
def privatizer_called_twice_with_one_state():
    """Once for the sum and once for zeros: the difference has no noise."""
    grad_fn = clipped()
    privatizer = PLAN.privatizer(grad_fn, key=SECRET)

    def step(model, states, x, y, mask):
        noise, state = states
        grads = grad_fn(model, x, y, is_padding_example=mask)
        noisy, later = privatizer.update(grads, noise)
        zeros, _ = privatizer.update(scaled(0.0, grads), noise)
        model, state = updated(model, state, noisy)
        return model, (later, state), zeros

    state = privatizer.init(grad_fn.trainable(mlp())), first_state()
    return by_hand(step, state=state)


@leaking
def two_privatizers_of_one_secret():
    """Two sums of one bound get the same noise from one key, and both leave."""
    grad_fns = clipped(), clipped(absolute_error)
    noises = [dp.gaussian_privatizer(stddev=2 * STDDEV, key=SECRET) for _ in grad_fns]

    def step(model, states, x, y, mask):
        *states, state = states
        sums = [grad_fn(model, x, y, is_padding_example=mask) for grad_fn in grad_fns]
        found = [n.update(g, s) for n, g, s in zip(noises, sums, states, strict=True)]
        new = updated(model, state, found[0][0])
        return new[0], (*(s for _, s in found), new[1]), found[1][0]

    states = [noise.init(clipped().trainable(mlp())) for noise in noises]
    return by_hand(step, state=(*states, first_state()))


@leaking
def privatizer_mapped_over_a_stack_of_sums():
    """`vmap` of the privatizer: all sums of the stack get the same noise."""
    grad_fn = clipped()
    privatizer = PLAN.privatizer(grad_fn, key=SECRET)

    def step(model, states, x, y, mask):
        noise, state = states
        parts = jax.tree.map(lambda a: a.reshape(4, 2, *a.shape[1:]), (x, y, mask))
        sums = jax.lax.map(lambda p: grad_fn(model, *p[:2], is_padding_example=p[2]), parts)
        noisy, noises = jax.vmap(lambda g: privatizer.update(g, noise))(sums)
        model, state = updated(model, state, jax.tree.map(lambda a: a[0] - a[1], noisy))
        return model, (jax.tree.map(lambda a: a[0], noises), state)

    return by_hand(step, state=(privatizer.init(grad_fn.trainable(mlp())), first_state()))


@leaking
def tangent_of_the_noisy_sum():
    """The derivative of `sum + noise` in the sum's direction is the sum."""
    return noised_by(
        lambda grads, key: jax.jvp(lambda g: with_noise(g, key), (grads,), (grads,))[1]
    )


@leaking
def cotangent_of_the_noisy_sum():
    """Backwards through the noise goes what was handed in: the sum."""

    def cotangent(grads, key):  # that of certified noise is zero: it is rounded
        noisy = functools.partial(dp.add_noise, key=key, stddev=STDDEV, certified=False)
        return jax.vjp(noisy, grads)[1](grads)[0]

    return noised_by(cotangent)


@leaking
def tangent_of_the_privatizer():
    """The same, through the privatizer's update."""
    grad_fn = clipped()
    privatizer = PLAN.privatizer(grad_fn, key=SECRET)

    def step(model, states, x, y, mask):
        noise, state = states
        grads = grad_fn(model, x, y, is_padding_example=mask)
        _, noise = privatizer.update(grads, noise)
        _, slope = jax.jvp(lambda g: privatizer.update(g, states[0])[0], (grads,), (grads,))
        model, state = updated(model, state, slope)
        return model, (noise, state)

    return by_hand(step, state=(privatizer.init(grad_fn.trainable(mlp())), first_state()))


# How much noise.


def deviation_of(stddev_of):
    """The noise's standard deviation is `stddev_of(values, x, mask)`."""
    grad_fn = dp.filter_value_and_clipped_grad(
        squared_error, l2_clip_norm=1.0, normalize_by=EXPECTED
    )

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        values, grads = grad_fn(model, x, y, is_padding_example=mask)
        return updated(model, state, with_noise(grads, key, stddev_of(values, x, mask)))

    return by_hand(step)


@leaking
def deviation_for_the_number_of_real_examples():
    """The noise shows how many examples there are."""
    return deviation_of(lambda values, x, mask: STDDEV * jnp.maximum(1, jnp.sum(~mask)))


@leaking
def deviation_by_the_loss():
    """At least the plan's, but how much it is shows the loss."""
    return deviation_of(lambda values, x, mask: STDDEV * (1 + values.loss.mean()))


@leaking
def deviation_by_the_largest_norm():
    """Sensitivity by what is in the batch, and not by what could be."""
    return deviation_of(lambda values, x, mask: STDDEV * jnp.max(values.grad_norm))


@leaking
def deviation_of_a_selected_number():
    """At least the plan's, of two that the data chooses from."""
    return deviation_of(lambda values, x, mask: STDDEV * jnp.where(x[0, 0] > 0, 1.0, 100.0))


@leaking
def deviation_below_zero_by_its_square():
    """The root of the square of a difference: the plan's deviation minus itself."""
    return deviation_of(lambda values, x, mask: jnp.sqrt((jnp.float32(STDDEV) - STDDEV) ** 2))


@leaking
def deviation_from_an_argument():
    """Any number: the program does not say how much noise there is."""
    grad_fn = clipped()

    def step(model, state, x, y, mask, stddev):
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        return updated(model, state, with_noise(grads, key, stddev))

    return by_hand(step, batch=(*data(), jnp.float32(STDDEV)))


@leaking
def deviation_from_the_state():
    """It is halved in every step."""
    grad_fn = clipped()

    def step(model, states, x, y, mask):
        stddev, state = states
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        model, state = updated(model, state, with_noise(grads, key, stddev))
        return model, (0.5 * stddev, state)

    return by_hand(step, state=(jnp.float32(STDDEV), first_state()))


@leaking
def deviation_that_underflows():
    """Multiplied by a tiny number and by a huge one, as float32 does it: zero."""
    return deviation_of(lambda values, x, mask: jnp.float32(STDDEV) * 1e-38 * 1e-38 * 1e38 * 1e38)


# What is done to a sum before the noise, or to the noise.


def noise_alone(grads, key, stddev=STDDEV):
    return with_noise(jax.tree.map(jnp.zeros_like, grads), key, stddev)


@leaking
def noise_masked_by_the_sum():
    """Where the sum is negative no noise is added."""
    return noised_by(
        lambda grads, key: jax.tree.map(
            lambda g, n: g + jnp.where(g > 0, n, 0.0), grads, noise_alone(grads, key)
        )
    )


@leaking
def noise_times_the_sum():
    """Its deviation is that of the sum's own numbers."""
    return noised_by(
        lambda grads, key: jax.tree.map(lambda g, n: g + g * n, grads, noise_alone(grads, key, 1.0))
    )


@leaking
def noise_and_the_sum_selected_by_chance():
    """A coin for each number: the sum with noise, or the sum."""

    def noisy(grads, key):
        coin, key = jax.random.split(key)
        keep = jax.random.bernoulli(coin)
        return jax.tree.map(lambda g, n: jnp.where(keep, g, n), grads, with_noise(grads, key))

    return noised_by(noisy)


@leaking
def noise_in_one_branch_of_a_public_coin():
    """In every second step the sum goes on without noise."""

    def noisy(grads, key):
        coin, key = jax.random.split(key)
        return jax.lax.cond(
            jax.random.bernoulli(coin), lambda: grads, lambda: with_noise(grads, key)
        )

    return noised_by(noisy)


@leaking
def noise_on_one_platform_alone():
    """`platform_dependent`: on a GPU the sum goes on without noise."""
    return noised_by(
        lambda grads, key: jax.lax.platform_dependent(
            grads,
            cpu=lambda grads: with_noise(grads, key),
            default=lambda grads: scaled(1.0, grads),
        )
    )


@leaking
def noise_redrawn_until_it_is_small():
    """A loop draws noise until the noisy sum is near the sum."""

    def noisy(grads, key):
        def far(carry):
            _, noisy = carry
            return optax.tree.norm(added(noisy, scaled(-1.0, grads))) > 0.1

        def draw(carry):
            key, own = jax.random.split(carry[0])
            return key, with_noise(grads, own)

        return jax.lax.while_loop(far, draw, draw((key, None)))[1]

    return noised_by(noisy)


@leaking
def better_of_two_noises():
    """Two draws, and the one that is nearer to the sum is taken."""

    def noisy(grads, key):
        both = [with_noise(grads, k, 2 * STDDEV) for k in jax.random.split(key)]
        far = [optax.tree.norm(added(noisy, scaled(-1.0, grads))) for noisy in both]
        return jax.tree.map(lambda a, b: jnp.where(far[0] < far[1], a, b), *both)

    return noised_by(noisy)


@leaking
def largest_half_before_the_noise():
    """Which numbers are kept changes with one example: the sum jumps by more than the clip norm."""

    def noisy(grads, key):
        def sparse(leaf):
            least = jnp.median(jnp.abs(leaf))
            return jnp.where(jnp.abs(leaf) >= least, leaf, 0.0)

        return with_noise(jax.tree.map(sparse, grads), key)

    return noised_by(noisy)


@leaking
def rounded_to_a_coarse_grid_before_the_noise():
    """One example moves a number by a whole step of the grid, or by none."""
    return noised_by(
        lambda grads, key: with_noise(jax.tree.map(lambda g: jnp.round(g, 0), grads), key)
    )


@leaking
def projected_on_its_own_direction():
    """The direction is the sum's own: one example turns it."""

    def noisy(grads, key):
        def projected(leaf):
            direction = leaf / (jnp.linalg.norm(leaf) + 1e-6)
            return 0.5 * leaf + direction

        return with_noise(jax.tree.map(projected, grads), key)

    return noised_by(noisy)


@leaking
def sum_of_a_sum_and_its_transpose():
    """A square leaf moves by twice the clip norm."""

    def noisy(grads, key):
        both = jax.tree.map(lambda g: g + g.T if g.shape == (4, 4) else g, grads)
        return with_noise(both, key)

    return noised_by(noisy)


@leaking
def tiled_before_the_noise():
    """Each number is there four times, each with the noise for one."""

    def noisy(grads, key):
        tiled = with_noise(jax.tree.map(lambda g: jnp.repeat(g, 4, 0), grads), key)
        return jax.tree.map(lambda g: g.reshape(-1, 4, *g.shape[1:]).mean(1), tiled)

    return noised_by(noisy)


@leaking
def leaves_exchanged_between_two_sums():
    """Two sums with clip norms of 1 each: leaves of both side by side move by more than 1."""
    return two_sums_joined(lambda one, other: added(scaled(0.8, one), scaled(0.8, other)))


def two_sums_joined(join):
    first, second = clipped(), clipped(absolute_error)

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        sums = [f(model, x, y, is_padding_example=mask) for f in (first, second)]
        return updated(model, state, with_noise(join(*sums), key))

    return by_hand(step)


@leaking
def sum_at_a_quietly_noised_model():
    """The second gradient's model is the first sum with a hundredth of the noise."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        carried, one, other = jax.random.split(state.key, 3)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        moved = eqx.apply_updates(model, with_noise(grads, one, STDDEV / 100))
        grads = grad_fn(moved, x, y, is_padding_example=mask)
        return updated(model, state._replace(key=carried), with_noise(grads, other))

    return by_hand(step)


# Raw sums behind the noise.


def behind_the_noise(change):
    """The noisy gradient goes through `change(noisy, grads, model)`."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        return updated(model, state, change(with_noise(grads, key), grads, model))

    return by_hand(step)


@leaking
def trust_ratio_of_the_raw_sum():
    """The rate is divided by the norm of the sum."""
    return behind_the_noise(
        lambda noisy, grads, model: scaled(1 / (1e-3 + optax.tree.norm(grads)), noisy)
    )


@leaking
def noisy_sum_clipped_to_the_norm_of_the_raw_one():
    """How long the update is shows how long the sum is."""
    return behind_the_noise(
        lambda noisy, grads, model: scaled(
            jnp.minimum(1.0, optax.tree.norm(grads) / optax.tree.norm(noisy)), noisy
        )
    )


@leaking
def preconditioned_by_raw_squares():
    """The second moment is that of the sum, and the first that of the noisy sum."""
    return behind_the_noise(
        lambda noisy, grads, model: jax.tree.map(lambda n, g: n / (1e-3 + jnp.abs(g)), noisy, grads)
    )


@leaking
def signs_of_the_raw_sum():
    """How large the noisy numbers are, with the signs of the sum."""
    return behind_the_noise(
        lambda noisy, grads, model: jax.tree.map(lambda n, g: jnp.copysign(n, g), noisy, grads)
    )


@leaking
def raw_sum_a_little_behind_the_noise():
    """A hundredth of the sum is added once more: the noise is for it no more independent."""
    return behind_the_noise(lambda noisy, grads, model: added(noisy, scaled(0.01, grads)))


@leaking
def small_layers_without_noise():
    """Biases get the sum: they are few."""
    return behind_the_noise(
        lambda noisy, grads, model: jax.tree.map(lambda n, g: n if g.ndim > 1 else g, noisy, grads)
    )


@leaking
def raw_sum_through_a_derivative_rule():
    """A function with a `custom_jvp` is given the noisy sum and the sum, and returns the latter."""

    @jax.custom_jvp
    def straight(noisy, exact):
        return exact

    straight.defjvp(lambda primals, tangents: (primals[1], tangents[0]))
    return behind_the_noise(lambda noisy, grads, model: jax.tree.map(straight, noisy, grads))


@leaking
def raw_sum_through_a_backward_rule():
    """A `custom_vjp` whose backward pass returns what the forward pass kept: the sum."""

    @jax.custom_vjp
    def kept(noisy, exact):
        return noisy

    kept.defvjp(lambda noisy, exact: (noisy, exact), lambda exact, g: (exact, g))

    def change(noisy, grads, model):
        def of(noisy, exact):
            return jnp.sum(kept(noisy, exact))

        return jax.tree.map(lambda n, g: jax.grad(of)(n, g), noisy, grads)

    return behind_the_noise(change)


@leaking
def raw_sum_through_a_mapping_rule():
    """A `custom_vmap` that gives the noisy sum alone, and the sum under `vmap`."""

    @jax.custom_batching.custom_vmap
    def hidden(noisy, exact):
        return noisy

    hidden.def_vmap(lambda size, batched, noisy, exact: (exact, True))

    def change(noisy, grads, model):
        def of(n, g):
            return jax.vmap(hidden)(n[None], g[None])[0]

        return jax.tree.map(of, noisy, grads)

    return behind_the_noise(change)


@leaking
def raw_sum_through_remat_and_a_loop_without_turns():
    """A loop that does not run returns what it was given: the sum."""
    return behind_the_noise(
        lambda noisy, grads, model: jax.lax.fori_loop(
            0, 0, lambda _, g: noisy, jax.checkpoint(lambda g: g)(grads)
        )
    )


@leaking
def raw_sum_in_the_last_turn():
    """A loop exchanges two trees: after an odd number of turns the sum is first."""
    return behind_the_noise(
        lambda noisy, grads, model: jax.lax.fori_loop(
            0, 3, lambda _, c: (c[1], c[0]), (noisy, grads)
        )[0]
    )


@leaking
def raw_sum_through_an_operation_of_zero_weight():
    """The noisy sum times zero, plus the sum."""
    return behind_the_noise(lambda noisy, grads, model: added(scaled(0.0, noisy), grads))


@leaking
def raw_sum_selected_by_an_argument():
    """A public flag turns the noise off."""
    grad_fn = clipped()

    def step(model, state, x, y, mask, debug):
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        noisy = with_noise(grads, key)
        chosen = jax.tree.map(lambda n, g: jnp.where(debug, g, n), noisy, grads)
        return updated(model, state, chosen)

    return by_hand(step, batch=(*data(), jnp.asarray(False)))


# Marks by name.


@leaking
def public_bits_in_a_scope_of_our_name():
    """Constant words, in a scope that is named as our random bits are: there is no noise."""

    def noisy(grads, key):
        flat, restore = ravel_pytree(grads)
        words = jnp.broadcast_to(jax.random.key_data(key)[0], flat.shape)
        zeros = jnp.zeros(flat.shape, jnp.uint32)
        with jax.named_scope("eqx_dp.bits"):
            words = jax.lax.bitwise_and(words, zeros)
        unit = jax.lax.bitcast_convert_type((words >> 9) | jnp.uint32(0x3F800000), jnp.float32) - 1
        low = np.nextafter(np.float32(-1), np.float32(0))
        uniform = jnp.maximum(low, unit * (np.float32(1) - low) + low)
        return restore(flat + STDDEV * (np.float32(np.sqrt(2)) * jax.lax.erf_inv(uniform)))

    return noised_by(noisy)


def in_scope(name):
    """All that would be noise is an addition of zeros, in a scope of this name."""

    def noisy(grads, key):
        with jax.named_scope(name):
            return jax.tree.map(lambda leaf: leaf + 0.0, grads)

    return noised_by(noisy)


@leaking
def zeros_in_a_scope_named_noise():
    """A scope with the name of our noise, and no noise in it."""
    return in_scope("eqx_dp.noise")


@leaking
def zeros_in_a_scope_named_draw():
    """A scope with the name of our draw, and no draw in it."""
    return in_scope("eqx_dp.draw")


@leaking
def raw_values_in_a_scope_named_sum():
    """The mean of unclipped gradients, in a scope with the name of our sum, gets the noise."""

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        with jax.named_scope("eqx_dp.sum"):
            grads = jax.vmap(eqx.filter_grad(squared_error), (None, 0, 0))(model, x, y)
            total = jax.tree.map(lambda leaf: leaf.sum(0) / EXPECTED, grads)
        return updated(model, state, with_noise(total, key))

    return by_hand(step)


def called(name):
    """The sum goes through a jitted function of this name, which adds nothing to it."""

    def identity(tree, key, stddev):
        return jax.tree.map(lambda leaf: leaf + stddev * 0.0, tree)

    identity.__name__ = identity.__qualname__ = name
    identity.__module__ = "eqx_dp.privacy.noise"
    return noised_by(lambda grads, key: jax.jit(identity)(grads, key, STDDEV))


@leaking
def function_named_add_noise():
    """A jitted function of this name, in a module that says it is ours, which adds nothing."""
    return called("add_noise")


@leaking
def function_named_gaussian_privatizer():
    """The same, with the name of the privatizer."""
    return called("gaussian_privatizer")


def copied(name_of):
    """A jitted function with the name of what the engine or the noise is in a traced step."""
    grad_fn = clipped()
    x, y, mask = data()
    privatizer = PLAN.privatizer(grad_fn, key=SECRET)
    model = mlp()

    def honest(model, noise, x, y, mask):
        grads = grad_fn(model, x, y, is_padding_example=mask)
        return privatizer.update(grads, noise)[0]

    state = privatizer.init(grad_fn.trainable(model))
    program, *_ = eqx.filter_make_jaxpr(honest)(model, state, x, y, mask)
    named = [e.params["name"] for e in program.jaxpr.eqns if isinstance(e.params.get("name"), str)]
    return name_of(named)


@leaking
def function_with_the_name_of_the_engines_call():
    """Gradients are summed unclipped in a jitted function that is named as the engine's call is."""

    def step(model, state, x, y, mask):
        key, state = next_key(state)

        def total(model, x, y, mask):
            grads = jax.vmap(eqx.filter_grad(squared_error), (None, 0, 0))(model, x, y)
            return jax.tree.map(lambda leaf: leaf.sum(0) / EXPECTED, grads)

        total.__name__ = copied(lambda names: names[0])
        return updated(model, state, with_noise(eqx.filter_jit(total)(model, x, y, mask), key))

    return by_hand(step)


@leaking
def function_with_the_name_of_the_last_call_of_the_noise():
    """The sum goes through a jitted function that is named as the last call of the noise is."""
    return called(copied(lambda names: names[-1]))


# Keys: a step's number that the caller gives, and carried keys.


ROOT = jax.random.key(12)


def caller_keyed(key_of, t=0, returns=None):
    """The noise's key is `key_of(root, t)`: a root that is closed over, and the caller counts."""
    grad_fn = clipped()

    def step(model, state, x, y, mask, t):
        grads = grad_fn(model, x, y, is_padding_example=mask)
        new = updated(model, state, with_noise(grads, key_of(ROOT, t)))
        return new if returns is None else (*new, returns(ROOT, t))

    return by_hand(step, batch=(*data(), jnp.asarray(t)))


@leaking
def number_of_the_caller_halved():
    """Steps 0 and 1, 2 and 3 have one key."""
    return caller_keyed(lambda key, t: jax.random.fold_in(key, t // 2))


@leaking
def number_of_the_caller_modulo_four():
    """Every fourth step has the same noise."""
    return caller_keyed(lambda key, t: jax.random.fold_in(key, t % 4))


@leaking
def number_of_the_caller_in_eight_bits():
    """Every 256th step has the same noise."""
    return caller_keyed(lambda key, t: jax.random.fold_in(key, t.astype(jnp.uint8)))


@leaking
def number_of_the_caller_times_zero():
    """Every step has the same noise."""
    return caller_keyed(lambda key, t: jax.random.fold_in(key, 0 * t))


@leaking
def number_of_the_caller_up_to_a_largest():
    """From step 100 on every step has the same noise."""
    return caller_keyed(lambda key, t: jax.random.fold_in(key, jnp.minimum(t, 100)))


@leaking
def time_of_the_caller_in_whole_seconds():
    """Two steps within a second have the same noise."""
    return caller_keyed(lambda key, t: jax.random.fold_in(key, t.astype(int)), t=0.5)


@leaking
def one_of_four_keys_by_the_callers_number():
    """There are four keys, and then they come again."""
    return caller_keyed(lambda key, t: jax.random.split(key, 4)[t % 4])


@leaking
def number_of_the_caller_and_the_next_one():
    """The second noise of a step is the first of the next one."""
    return numbered_twice(lambda t: (t, t + 1))


@leaking
def number_of_the_caller_and_a_constant():
    """In step 3 both sums have the same noise."""
    return numbered_twice(lambda t: (t, 3))


@leaking
def number_of_the_caller_twice():
    """Both sums have the same noise in every step."""
    return numbered_twice(lambda t: (t, t))


def numbered_twice(numbers_of):
    """Two losses' noises have the keys `fold_in(key, number)`, for two numbers that t gives."""
    grad_fns = clipped(), clipped(absolute_error)

    def step(model, state, x, y, mask, t):
        noisy = [
            with_noise(
                grad_fn(model, x, y, is_padding_example=mask),
                jax.random.fold_in(ROOT, number),
                2 * STDDEV,
            )
            for grad_fn, number in zip(grad_fns, numbers_of(t), strict=True)
        ]
        return *updated(model, state, noisy[0]), noisy[1]

    return by_hand(step, batch=(*data(), jnp.asarray(0)))


@leaking
def numbers_of_epoch_and_step_added():
    """Step 1 of epoch 0 and step 0 of epoch 1 have the same noise."""
    grad_fn = clipped()

    def step(model, state, x, y, mask, epoch, t):
        grads = grad_fn(model, x, y, is_padding_example=mask)
        return updated(model, state, with_noise(grads, jax.random.fold_in(ROOT, epoch + t)))

    batch = (*data(), jnp.asarray(0), jnp.asarray(0))
    return by_hand(step, batch=batch)


@leaking
def number_from_the_data():
    """The number that is folded in is the number of examples: it repeats, and is private."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        grads = grad_fn(model, x, y, is_padding_example=mask)
        return updated(
            model, state, with_noise(grads, jax.random.fold_in(state.key, jnp.sum(~mask)))
        )

    return by_hand(step)


@leaking
def root_key_shown_beside():
    """The key that the caller's number is folded into is among the results."""
    return caller_keyed(jax.random.fold_in, returns=lambda root, t: jax.random.key_data(root))


@leaking
def next_key_shown_beside():
    """The key of the next step's noise is among the results of this one."""
    return caller_keyed(
        jax.random.fold_in,
        returns=lambda root, t: jax.random.key_data(jax.random.fold_in(root, t + 1)),
    )


@leaking
def root_key_from_the_number_of_the_caller():
    """The seed is the step's number, which everybody knows."""
    return caller_keyed(lambda root, t: jax.random.key(t))


@leaking
def root_key_of_the_caller_without_a_number():
    """Every step has the same noise, and the key is among the results."""
    return caller_keyed(lambda root, t: root, returns=lambda root, t: root)


@leaking
def number_of_the_caller_for_noise_and_loss():
    """The loss draws its dropout masks from the key of the noise."""
    grad_fn = clipped(dropout_loss)

    def step(model, state, x, y, mask, t):
        key = jax.random.fold_in(ROOT, t)
        grads = grad_fn(model, x, y, key=key, is_padding_example=mask)
        return updated(model, state, with_noise(grads, key))

    return by_hand(step, batch=(*data(), jnp.asarray(0)))


@leaking
def number_of_the_caller_in_a_scan_of_two_steps():
    """A call takes two steps with the numbers t and t + 1, and the next call has t + 1, too."""
    grad_fn = clipped()
    params, static = eqx.partition(mlp(), eqx.is_array)

    def epoch(params, state, xs, ys, masks, t):
        def step(carry, i_and_batch):
            i, (x, y, mask) = i_and_batch
            params, state = carry
            grads = grad_fn(eqx.combine(params, static), x, y, is_padding_example=mask)
            noisy = with_noise(grads, jax.random.fold_in(ROOT, t + i))
            return updated(params, state, noisy), None

        return jax.lax.scan(step, (params, state), (jnp.arange(2), (xs, ys, masks)))[0]

    batch = (*(jnp.stack([leaf] * 2) for leaf in data()), jnp.asarray(0))
    return by_hand(epoch, model=params, state=first_state(params), batch=batch)


@leaking
def carried_key_split_every_second_step():
    """In the other steps the key stays, and with it the noise."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        carried, key = jax.random.split(state.key)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        carried = jnp.where(state.step % 2 == 0, carried, state.key)
        return updated(model, state._replace(key=carried), with_noise(grads, key))

    return by_hand(step)


@leaking
def carried_key_that_goes_back():
    """The state carries two keys and exchanges them: every second step has the same noise."""
    grad_fn = clipped()

    def step(model, states, x, y, mask):
        one, other, state = states
        grads = grad_fn(model, x, y, is_padding_example=mask)
        model, state = updated(model, state, with_noise(grads, one))
        return model, (other, one, state)

    keys = jax.random.split(jax.random.key(3))
    return by_hand(step, state=(keys[0], keys[1], first_state()))


@leaking
def counter_that_counts_noisy_steps_alone():
    """The counter moves when the noisy sum is short: if it is not, the noise comes again."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        grads = grad_fn(model, x, y, is_padding_example=mask)
        noisy = with_noise(grads, jax.random.fold_in(state.key, state.step))
        new, later = updated(model, state, noisy)
        short = optax.tree.norm(noisy) < 1
        return new, State(later.opt, later.key, jnp.where(short, later.step, state.step))

    return by_hand(step)


# Noise by our own function, in ways that its author did not think of.

if hasattr(dp, "add_noise"):

    @leaking
    def deviation_of_zero_by_our_function():
        """No noise at all, from a marked equation."""
        outer = jax.jit(lambda grads, key: dp.add_noise(grads, key, 0 * STDDEV))
        return noised_by(outer)

    @leaking
    def half_the_deviation_by_our_function():
        """The noise multiplier is 0.6."""
        return noised_by(lambda grads, key: dp.add_noise(grads, key, STDDEV / 2))

    @leaking
    def deviation_for_half_the_sensitivity():
        """Under replace-one the sum moves twice as far."""
        plan = plan_under(NeighboringRelation.REPLACE_ONE)
        return noised_by(lambda grads, key: dp.add_noise(grads, key, STDDEV), plan=plan)

    @leaking
    def noise_of_our_function_through_jit_of_another_deviation():
        """The deviation goes through a jitted function, and is a fourth."""
        outer = jax.jit(lambda grads, key, s: dp.add_noise(grads, key, s / 4), static_argnums=2)
        return noised_by(lambda grads, key: outer(grads, key, STDDEV))

    @leaking
    def noise_of_our_function_to_half_of_the_leaves():
        """The other leaves leave as they are."""

        def noisy(grads, key):
            leaves, structure = jax.tree.flatten(grads)
            half = dp.add_noise(leaves[:2], key, STDDEV)
            return structure.unflatten([*half, *leaves[2:]])

        return noised_by(noisy)

    @leaking
    def one_key_for_two_halves_of_the_leaves():
        """Two calls on lists with one key: the same paths, so the same noise."""

        def noisy(grads, key):
            leaves, structure = jax.tree.flatten(grads)
            halves = [dp.add_noise(half, key, STDDEV) for half in (leaves[:2], leaves[2:])]
            return structure.unflatten([*halves[0], *halves[1]])

        return noised_by(noisy)

    @leaking
    def sum_with_noise_twice_of_one_key():
        """The second noise doubles the first: it is the same, and both versions leave."""
        return shown_beside(
            lambda grads, key: [
                dp.add_noise(grads, key, 3 * STDDEV),
                dp.add_noise(scaled(2.0, grads), key, 3 * STDDEV),
            ]
        )

    @leaking
    def noise_under_vmap_with_many_sums():
        """`vmap` over multiples of the sum, with one key: all have the same noise."""
        multiples = jnp.asarray([1.0, 2.0])
        return noised_by(
            lambda grads, key: jax.tree.map(
                lambda a: a[1] - a[0],
                jax.vmap(lambda s: dp.add_noise(scaled(s, grads), key, STDDEV))(multiples),
            )
        )

    @leaking
    def one_key_for_two_deviations():
        """Twice the first minus the second is the sum, without noise."""
        return shown_beside(
            lambda grads, key: [dp.add_noise(grads, key, s * STDDEV) for s in (10, 20)]
        )

    @leaking
    def two_copies_in_one_tree():
        """Both have noise of their own, and the mean of them has less."""

        def noisy(grads, key):
            both = dp.add_noise({"one": grads, "other": grads}, key, STDDEV)
            return scaled(0.5, added(both["one"], both["other"]))

        return noised_by(noisy)

    @leaking
    def noise_of_our_function_on_rounded_sums():
        """The sum is rounded to bfloat16 before: one example moves it by whole steps."""

        def rounded(leaf):
            return leaf.astype(jnp.bfloat16).astype(jnp.float32)

        return noised_by(lambda grads, key: dp.add_noise(jax.tree.map(rounded, grads), key, STDDEV))

    @leaking
    def noise_of_our_function_drawn_by_the_loss():
        """Noise in the loss of each example is clipped with it."""

        def loss(model, x, y):
            return squared_error(model, dp.add_noise(x, jax.random.key(0), STDDEV), y)

        return noised_by(lambda grads, key: grads, clipped(loss))

    @leaking
    def noise_of_our_function_transposed():
        """The transpose of adding noise is to add nothing."""

        def noisy(grads, key):
            noise = dp.add_noise(jax.tree.map(jnp.zeros_like, grads), key, STDDEV)
            return jax.linear_transpose(lambda g: added(g, scaled(0.0, noise)), grads)(grads)[0]

        return noised_by(noisy)

    @leaking
    def noise_of_our_function_switched_by_the_step():
        """In every second step a deviation of a tenth."""
        grad_fn = clipped()

        def step(model, state, x, y, mask):
            key, state = next_key(state)
            grads = grad_fn(model, x, y, is_padding_example=mask)
            branches = [lambda g, s=s: dp.add_noise(g, key, s * STDDEV) for s in (1.0, 0.1)]
            return updated(model, state, jax.lax.switch(state.step % 2, branches, grads))

        return by_hand(step)

    @leaking
    def noise_of_our_function_replaced_by_a_rule():
        """A `custom_jvp` around the noise whose tangent is the sum itself."""

        @jax.custom_jvp
        def noisy(grads, key):
            return dp.add_noise(grads, key, STDDEV)

        @noisy.defjvp
        def _(primals, tangents):
            return noisy(*primals), primals[0]

        def change(grads, key):
            return jax.jvp(lambda g: noisy(g, key), (grads,), (grads,))[1]

        return noised_by(change)

    @leaking
    def noise_of_our_function_by_a_function_of_its_name():
        """A wrapper of the same name calls it, and returns what went in."""

        def add_noise(tree, key, stddev):
            dp.add_noise(tree, key, stddev)
            return jax.tree.map(lambda leaf: leaf + 0.0, tree)

        return noised_by(
            lambda grads, key: jax.jit(add_noise, static_argnums=2)(grads, key, STDDEV)
        )
