"""Steps made to pass the check although they leak: one hole each, that a rule could have.

They are no likely mistakes. Each was taken for fine once, or is next to one that was.
"""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import eqx_dp as dp
from tests.checks.privacy_steps import (
    SLOTS,
    STDDEV,
    WIDTH,
    added,
    by_hand,
    clipped,
    data,
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
from tests.sharding.losses import mesh_of

ATTACKED = {}
attack = functools.partial(misuse, ATTACKED, decided=False)


def by_counter(noise_key_of, **named):
    """The noise's key is `noise_key_of(key, step)`; the key in the state stays as it is."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        grads = grad_fn(model, x, y, is_padding_example=mask)
        return updated(model, state, with_noise(grads, noise_key_of(state.key, state.step)))

    return by_hand(step, **named)


def with_keys(keys_of):
    """The leaves' keys are `keys_of(key, number of leaves)`."""

    def noisy(grads, key):
        leaves, structure = jax.tree.flatten(grads)
        keys = keys_of(key, len(leaves))
        noisy = [
            leaf + STDDEV * jax.random.normal(leaf_key, leaf.shape)
            for leaf, leaf_key in zip(leaves, keys, strict=True)
        ]
        return structure.unflatten(noisy)

    return noised_by(noisy)


def with_noise_of(noise_of):
    """The noise of a leaf is `noise_of(key, shape)`, made from a key of its own."""

    def noisy(grads, key):
        leaves, structure = jax.tree.flatten(grads)
        keys = jax.random.split(key, len(leaves))
        noisy = [
            leaf + noise_of(leaf_key, leaf.shape)
            for leaf, leaf_key in zip(leaves, keys, strict=True)
        ]
        return structure.unflatten(noisy)

    return noised_by(noisy)


def in_turns(add, finish=lambda total: total, length=2):
    """`add(total, grads, i)` of the slices of a batch, in a scan; noise on `finish(total)`."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        parts = jax.tree.map(lambda a: a.reshape(length, -1, *a.shape[1:]), (x, y, mask))

        def turn(total, i_and_part):
            i, (x, y, mask) = i_and_part
            grads = grad_fn(model, x, y, is_padding_example=mask)
            return jax.tree.map(functools.partial(add, i=i), total, grads), grads

        zeros = jax.tree.map(jnp.zeros_like, grad_fn.trainable(model))
        total, stacked = jax.lax.scan(turn, zeros, (jnp.arange(length), parts))
        return updated(model, state, with_noise(finish((total, stacked)), key))

    return by_hand(step)


def prepared_by(prepare, stddev=STDDEV):
    """An honest step by hand on `prepare(x, y, mask, key)`, which gives the first three again."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        carried, noise_key, key = jax.random.split(state.key, 3)
        x, y, mask = prepare(x, y, mask, key)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        return updated(model, state._replace(key=carried), with_noise(grads, noise_key, stddev))

    return by_hand(step)


class Given(NamedTuple):
    """What is at hand in an honest step, for one that returns something beside."""

    grads: Any
    key: Any


def beside_the_step(shown_of):
    """An honest step by hand, which returns `shown_of(given)` as well; the key is a new one."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        carried, noise_key, key = jax.random.split(state.key, 3)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        new = updated(model, state._replace(key=carried), with_noise(grads, noise_key))
        return *new, shown_of(Given(grads, key))

    plan = dp.PrivacyPlan(0.5, 10, 1.13, 1e-5)
    return by_hand(step, plan=plan)


# Keys.


@attack("fresh noise")
def counter_of_eight_bits():
    """After 256 steps the keys come again."""
    return by_counter(lambda key, step: jax.random.fold_in(key, step.astype(jnp.uint8)))


@attack("fresh noise")
def counter_in_the_state_of_eight_bits():
    state = first_state()._replace(step=jnp.zeros((), jnp.int8))
    return by_counter(jax.random.fold_in, state=state)


@attack("fresh noise")
def counter_times_a_power_of_two():
    """It goes round: there are two keys."""

    def key_of(key, step):
        return jax.random.fold_in(key, step.astype(jnp.uint32) * jnp.uint32(2**31))

    return by_counter(key_of)


@attack("fresh noise")
def counter_that_stops_early():
    most = jnp.iinfo(jnp.int32).max
    return by_counter(
        lambda key, step: jax.random.fold_in(key, jnp.where(step < 3, step + 1, most))
    )


@attack("fresh noise")
def numbers_folded_in_that_differ_by_a_whole_turn():
    def key_of(key, n):
        keys = jax.random.split(key, n)
        last = jnp.uint32(3) + jnp.full((), 2**31, jnp.uint32) + jnp.full((), 2**31, jnp.uint32)
        return [jax.random.fold_in(key, 3), jax.random.fold_in(key, last), *keys[5:], *keys[:2]]

    return with_keys(key_of)


@attack("fresh noise")
def one_number_folded_in_for_all_leaves():
    def keys_of(key, n):
        return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.ones(n, jnp.int32))

    return with_keys(keys_of)


@attack("fresh noise")
def one_key_broadcast_to_all_leaves():
    return with_keys(lambda key, n: jnp.broadcast_to(jax.random.split(key, 1), (n,)))


@attack("fresh noise")
def key_behind_the_last():
    """An index that is too large is the last."""

    def keys_of(key, n):
        keys = jax.random.split(key, 2)
        return [jax.lax.dynamic_index_in_dim(keys, i, keepdims=False) for i in range(n)]

    return with_keys(keys_of)


@attack("fresh noise")
def one_of_four_keys_by_the_counter():
    return by_counter(lambda key, step: jax.random.split(key, 4)[step])


@attack("fresh noise")
def numbers_in_two_dimensions():
    def keys_of(key, n):
        keys = jax.vmap(jax.vmap(lambda i: jax.random.fold_in(key, i)))(jnp.arange(6).reshape(2, 3))
        return [keys[1, 2], jax.random.fold_in(key, 5), keys[0, 0], jax.random.fold_in(key, 9)][:n]

    return with_keys(keys_of)


@attack("fresh noise", "noise", "release")
def one_key_for_all_rows_of_a_leaf():
    def noise_of(key, shape):
        if len(shape) < 2:
            return STDDEV * jax.random.normal(key, shape)
        keys = jnp.broadcast_to(key, shape[:1])
        return STDDEV * jax.vmap(lambda k: jax.random.normal(k, shape[1:]))(keys)

    return with_noise_of(noise_of)


@attack("fresh noise", "noise", "release")
def one_number_folded_in_for_all_rows_of_a_leaf():
    def noise_of(key, shape):
        if len(shape) < 2:
            return STDDEV * jax.random.normal(key, shape)
        numbers = jnp.arange(shape[0]) // 2
        return STDDEV * jax.vmap(
            lambda i: jax.random.normal(jax.random.fold_in(key, i), shape[1:])
        )(numbers)

    return with_noise_of(noise_of)


@attack("fresh noise")
def epoch_over_numbers_that_repeat():
    grad_fn = clipped()
    params, static = eqx.partition(mlp(), eqx.is_array)

    def step(params, state, x, y, mask):
        key, state = next_key(state)

        def turn(params, i_and_batch):
            i, (x, y, mask) = i_and_batch
            grads = grad_fn(eqx.combine(params, static), x, y, is_padding_example=mask)
            noisy = with_noise(eqx.filter(grads, eqx.is_array), jax.random.fold_in(key, i))
            return added(params, scaled(-1.0, noisy)), None

        params, _ = jax.lax.scan(turn, params, (jnp.arange(2) // 2, (x, y, mask)))
        return params, state

    batch = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), data())
    return by_hand(step, model=params, batch=batch, state=first_state(params))


@attack("fresh noise")
def legacy_key_made_twice():
    """Two arrays of words that are equal, by arithmetic."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        keys = [
            jax.random.fold_in(jax.random.wrap_key_data(words), state.step)
            for words in (state.key ^ jnp.uint32(0), state.key | jnp.uint32(0))
        ]
        grads = [grad_fn(model, x, y, is_padding_example=mask) for _ in keys]
        noisy = added(*map(with_noise, grads, keys))
        return updated(model, state, noisy)

    state = first_state(key=jax.random.key_data(jax.random.key(3)))
    return by_hand(step, state=state, plan=None, multiplier=0.0)


@attack("fresh noise")
def seed_twice_as_a_constant_and_inside():
    grad_fn = clipped()
    outside = jax.random.key(5)

    def step(model, state, x, y, mask):
        keys = [jax.random.fold_in(key, state.step) for key in (outside, jax.random.key(5))]
        grads = [grad_fn(model, x, y, is_padding_example=mask) for _ in keys]
        return updated(model, state, added(*map(with_noise, grads, keys)))

    return by_hand(step, plan=None, multiplier=0.0)


@attack("fresh noise")
def key_from_the_step_alone():
    return by_counter(lambda key, step: jax.random.key(step))


@attack("fresh noise")
def branches_whose_counters_meet():
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        grads = grad_fn(model, x, y, is_padding_example=mask)

        def branch(offset):
            return lambda grads: with_noise(
                grads, jax.random.fold_in(state.key, state.step - offset)
            )

        noisy = jax.lax.cond(state.step % 2 == 0, branch(0), branch(1), grads)
        return updated(model, state, noisy)

    return by_hand(step)


# Noise.


@attack("noise", "release")
def deviation_that_is_rounded_to_zero():
    def noisy(grads, key):
        stddev = jnp.full((), STDDEV).astype(jnp.int32).astype(jnp.float32)
        return with_noise(grads, key, stddev)

    return noised_by(noisy)


@attack("noise")
def factor_that_is_rounded_to_one():
    def noisy(grads, key):
        factor = jnp.full((), 0.01).astype(bool).astype(jnp.float32)
        return with_noise(scaled(100 * factor, grads), key)

    return noised_by(noisy)


def two_numbers_twice(noises_of):
    """Twice the last bias's gradient, with the two noises `noises_of(key)`."""

    def shown(given):
        key = given.key
        last = jax.tree.leaves(given.grads)[-1]
        return [last + STDDEV * 3 * noise for noise in noises_of(key)]

    return beside_the_step(shown)


@attack("fresh noise")
def noise_turned_round():
    def noises(key):
        noise = jax.random.normal(key, (4,))
        return noise[2:], jax.lax.rev(noise, (0,))[:2]

    return two_numbers_twice(noises)


@attack("fresh noise")
def noise_by_columns():
    def noises(key):
        noise = jax.random.normal(key, (2, 4))
        return noise.reshape(8)[4:6], noise.T.reshape(8)[1:3]

    return two_numbers_twice(noises)


@attack("fresh noise")
def noise_of_a_slice_of_a_slice():
    def noises(key):
        noise = jax.random.normal(key, (8,))
        part = jax.lax.dynamic_slice(noise, (4,), (4,))
        return noise[4:6], part[:2]

    return two_numbers_twice(noises)


@attack("fresh noise")
def noise_of_a_strided_slice():
    def noises(key):
        noise = jax.random.normal(key, (8,))
        return noise[::2][1:3], noise[4:6]

    return two_numbers_twice(noises)


@attack("fresh noise")
def noise_side_by_side_and_alone():
    def noises(key):
        one, other = (jax.random.normal(k, (2,)) for k in jax.random.split(key))
        return jnp.concatenate([one, other])[2:], other

    return two_numbers_twice(noises)


@attack("side door", "release")
def noise_printed():
    def shown(given):
        noise = jax.random.normal(given.key, (2,))
        jax.debug.print("{}", noise)
        return jax.tree.leaves(given.grads)[-1] + 3 * STDDEV * noise

    return beside_the_step(shown)


@attack("side door", "release")
def key_of_the_noise_printed():
    def shown(given):
        key = given.key
        jax.debug.print("{}", jax.random.key_data(key))
        return jax.tree.leaves(given.grads)[-1] + 3 * STDDEV * jax.random.normal(key, (2,))

    return beside_the_step(shown)


@attack("side door", "release")
def noise_written_to_a_reference():
    def shown(given):
        noise = jax.random.normal(given.key, (2,))
        ref = jax.new_ref(jnp.zeros(2))
        ref[...] = noise
        return jax.tree.leaves(given.grads)[-1] + 3 * STDDEV * noise, ref[...]

    return beside_the_step(shown)


def with_key_shown(show):
    def shown(given):
        keys = jax.random.split(given.key, 3)
        noise = jax.random.normal(keys[0], (2,))
        return jax.tree.leaves(given.grads)[-1] + 3 * STDDEV * noise, show(keys)

    return beside_the_step(shown)


@attack("release")
def key_of_the_noise_looked_up():
    return with_key_shown(lambda keys: keys[np.array([0, 2])])


@attack("release")
def key_of_the_noise_among_others():
    return with_key_shown(lambda keys: jnp.stack([keys[0], keys[1]]))


@attack("noise", "fresh noise", "release")
def noise_in_the_model():
    """The gradient at a model that holds the noise moves with it."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        zeros = jax.tree.map(jnp.zeros_like, grad_fn.trainable(model))
        noise = with_noise(zeros, key)
        moved = eqx.apply_updates(model, noise)
        grads = grad_fn(moved, x, y, is_padding_example=mask)
        return updated(model, state, added(grads, noise))

    return by_hand(step)


@attack("noise", "fresh noise", "release")
def noise_in_the_examples():
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        one, other = jax.random.split(key)
        noise = jax.random.normal(one, (SLOTS, WIDTH))
        grads = grad_fn(model, x + noise, y, is_padding_example=mask)
        leaves, structure = jax.tree.flatten(with_noise(grads, other))
        leaves[0] = jax.tree.leaves(grads)[0] + STDDEV * noise[:4]
        return updated(model, state, structure.unflatten(leaves))

    return by_hand(step)


@attack("fresh noise")
def key_of_the_noise_closed_over_by_the_loss():
    def step(model, state, x, y, mask):
        carried, key, *others = jax.random.split(state.key, 8)
        state = state._replace(key=carried)

        def loss(model, x, y):
            return squared_error(model, x + jax.random.normal(key, x.shape), y)

        grads = clipped(loss)(model, x, y, is_padding_example=mask)
        leaves, structure = jax.tree.flatten(grads)
        keys = [key, *others[: len(leaves) - 1]]
        noisy = [
            leaf + STDDEV * jax.random.normal(k, leaf.shape)
            for leaf, k in zip(leaves, keys, strict=True)
        ]
        return updated(model, state, structure.unflatten(noisy))

    return by_hand(step)


# Releases that are lost.


@attack("noise")
def release_of_much_too_little_noise_added_to_a_sum():
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        one, other = jax.random.split(key)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        bad = with_noise(scaled(10, grads), one, 1e-3)
        return updated(model, state, with_noise(added(grads, bad), other))

    return by_hand(step)


@attack("noise")
def gradient_at_a_model_of_too_little_noise():
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        one, other = jax.random.split(key)
        bad = with_noise(grad_fn(model, x, y, is_padding_example=mask), one, 1e-6)
        grads = grad_fn(eqx.apply_updates(model, bad), x, y, is_padding_example=mask)
        return updated(model, state, with_noise(grads, other))

    return by_hand(step)


@attack("noise")
def noise_little_by_little_in_a_loop():
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        one, other, third = jax.random.split(key, 3)
        grads = grad_fn(model, x, y, is_padding_example=mask)

        def turn(grads, k):
            return with_noise(grads, k, 1e-6), None

        little, _ = jax.lax.scan(turn, grads, jax.random.split(one, 2))
        little = with_noise(little, other, 1e-6)
        return *updated(model, state, with_noise(grads, third)), little

    return by_hand(step)


@attack("noise", "release")
def minus_the_noise_in_a_branch():
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        zeros = jax.tree.map(jnp.zeros_like, grads)
        noise = with_noise(zeros, key)
        minus = jax.tree.map(lambda n: jnp.where(state.step >= 0, -n, 0.0), noise)
        first = jax.lax.cond(state.step % 2 == 0, lambda: minus, lambda: scaled(0.0, grads))
        return updated(model, state, added(added(first, grads), noise))

    return by_hand(step)


# Sensitivity.


def on_sums(change, **named):
    """Noise on the leaves as `change(leaves)` makes them."""

    def noisy(grads, key):
        leaves, structure = jax.tree.flatten(grads)
        return with_noise(structure.unflatten(change(leaves)), key)

    return noised_by(noisy, **named)


@attack("noise")
def leaves_added_up():
    """Two leaves of one clipped sum: their sum moves by sqrt(2) of its norm."""

    def change(leaves):
        both = leaves[3] + leaves[1][:2]
        return [*scaled(0.0, leaves[:3]), both]

    return on_sums(change)


@attack("noise")
def leaves_added_up_and_joined():
    def change(leaves):
        both = jnp.concatenate([leaves[3][:1] + leaves[1][:1], 0.0 * leaves[3][1:]])
        return [*scaled(0.0, leaves[:3]), both]

    return on_sums(change)


@attack("noise")
def selected_among_itself_and_itself_turned_round():
    def change(leaves):
        return [
            jnp.where(
                (jnp.arange(leaf.size) < leaf.size // 2).reshape(leaf.shape),
                leaf,
                jnp.flip(leaf),
            )
            for leaf in leaves
        ]

    return on_sums(change)


@attack("noise")
def one_number_as_the_bound_of_many():
    def change(leaves):
        return [
            jax.lax.clamp(leaf.ravel()[0], jnp.full(leaf.shape, -1e9), jnp.float32(1e9))
            for leaf in leaves
        ]

    return on_sums(change)


@attack("noise")
def halved_as_often_as_an_argument_says():
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        grads = scaled(100.0, grads)
        grads = jax.lax.fori_loop(0, state.step, lambda _, g: scaled(0.5, g), grads)
        return updated(model, state, with_noise(grads, key))

    return by_hand(step)


@attack("noise")
def running_sums_of_a_loop_side_by_side():
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        parts = jax.tree.map(lambda a: a.reshape(4, 2, *a.shape[1:]), (x, y, mask))

        def turn(total, part):
            x, y, mask = part
            total = added(total, grad_fn(model, x, y, is_padding_example=mask))
            return total, total

        zeros = jax.tree.map(jnp.zeros_like, grad_fn.trainable(model))
        _, totals = jax.lax.scan(turn, zeros, parts)
        total = jax.tree.map(lambda leaf: leaf.sum(0), totals)
        return updated(model, state, with_noise(total, key))

    return by_hand(step)


@attack("noise")
def sums_of_turns_side_by_side():
    """A row that goes moves all behind it: each turn loses one, and gains one."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        parts = jax.tree.map(lambda a: a.reshape(4, 2, *a.shape[1:]), (x, y, mask))

        def turn(_, part):
            x, y, mask = part
            return None, grad_fn(model, x, y, is_padding_example=mask)

        _, sums = jax.lax.scan(turn, None, parts)
        noisy = jax.tree.map(lambda leaf: leaf.sum(0), with_noise(sums, key))
        return updated(model, state, noisy)

    return by_hand(step)


@attack("noise")
def the_first_turn_alone():
    return in_turns(
        lambda total, grads, i: total,
        lambda found: jax.tree.map(lambda leaf: leaf[0], found[1]),
    )


@attack("noise")
def turns_with_alternating_signs():
    return in_turns(lambda total, grads, i: grads - total, lambda found: found[0], 4)


@attack("noise")
def turns_with_alternating_factors():
    return in_turns(
        lambda total, grads, i: total + jnp.where(i % 2 == 0, 1.0, -1.0) * grads,
        lambda found: found[0],
        4,
    )


@attack("noise")
def turns_with_weights_of_their_own():
    signs = np.array([1.0, -1.0, 1.0, -1.0], np.float32)

    def finish(found):
        return jax.tree.map(
            lambda leaf: (leaf * signs.reshape(-1, *(1,) * (leaf.ndim - 1))).sum(0), found[1]
        )

    return in_turns(lambda total, grads, i: total, finish, 4)


def halves(combine, grad_fns=None):
    first, second = grad_fns or (clipped(),) * 2

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        one = first(model, x[:4], y[:4], is_padding_example=mask[:4])
        other = second(model, x[4:], y[4:], is_padding_example=mask[4:])
        return updated(model, state, with_noise(combine(one, other, state), key))

    return by_hand(step)


@attack("noise")
def difference_of_two_halves():
    """An example that is left out moves another one from one half to the other."""
    return halves(lambda one, other, state: added(one, scaled(-1.0, other)))


@attack("noise")
def other_losses_for_two_halves():
    losses = (clipped(), clipped(lambda model, x, y: -squared_error(model, x, y)))
    return halves(lambda one, other, state: added(one, other), losses)


@attack("noise")
def one_half_or_the_other():
    return halves(
        lambda one, other, state: jax.lax.cond(state.step % 2 == 0, lambda: one, lambda: other)
    )


# Rows.


@attack("examples apart", "noise")
def one_row_in_all_slots():
    def prepare(x, y, mask, key):
        at = jnp.zeros(SLOTS, jnp.int32)
        return x[at], y[at], mask[at]

    return prepared_by(prepare, stddev=4 * STDDEV)


def by_index(at_of):
    grad_fn = clipped()

    def step(model, state, x, y, mask, index):
        key, state = next_key(state)
        at = at_of(index)
        grads = grad_fn(model, x[at], y[at], is_padding_example=mask[at])
        return updated(model, state, with_noise(grads, key, 2 * STDDEV))

    return by_hand(step, batch=(*data(), jnp.arange(SLOTS)))


@attack("examples apart", "noise")
def indices_times_zero():
    return by_index(lambda index: index * 0)


@attack("examples apart", "noise")
def indices_behind_the_last():
    return by_index(lambda index: index + 100)


@attack("examples apart", "noise")
def more_indices_than_rows():
    return by_index(lambda index: jnp.arange(2 * SLOTS))


@attack("examples apart", "noise")
def slices_that_go_past_the_end():
    """The second is moved back, onto the first."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)

        def add(i, total):
            x_part, y_part, mask_part = sliced((x, y, mask), 4 * i, 4)
            return added(total, grad_fn(model, x_part, y_part, is_padding_example=mask_part))

        zeros = jax.tree.map(jnp.zeros_like, grad_fn.trainable(model))
        total = jax.lax.fori_loop(1, 3, add, zeros)
        return updated(model, state, with_noise(total, key))

    return by_hand(step)


@attack("examples apart", "noise")
def columns_for_examples():
    def loss(model, x):
        return jnp.sum((model(x[:WIDTH]) - x[0]) ** 2)

    grad_fn = clipped(loss)

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        return updated(model, state, with_noise(grad_fn(model, x.T), key))

    return by_hand(step, plan=dp.PrivacyPlan(1.0, 10, 1.2, 1e-5))


@attack("examples apart", "noise")
def one_row_as_the_mask():
    grad_fn = clipped(lambda model, x, y: squared_error(model, x[:WIDTH], y))

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=x[0] > 0)
        return updated(model, state, with_noise(grads, key))

    return by_hand(step, batch=(jnp.ones((8, 8)), jnp.ones((8, 2)), jnp.zeros(8, bool)))


@attack("examples apart", "noise")
def examples_scaled_by_their_slot():
    """All behind an example that is left out get another factor."""
    return prepared_by(lambda x, y, mask, key: (x * jnp.arange(SLOTS)[:, None], y, mask))


@attack("examples apart", "noise")
def times_spread_over_the_slots():
    """Slot i takes a time between i / n and (i + 1) / n: an example that moves gets another one."""

    def prepared(x, y, mask, key):
        times = (jax.random.uniform(key, (SLOTS,)) + jnp.arange(SLOTS)) / SLOTS
        return x + times[:, None], y, mask

    return prepared_by(prepared)


@attack("noise")
def one_batch_taken_in_two_ways():
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        one, other = jax.random.split(key)
        first = (leaf[0] for leaf in (x, y, mask))
        again = [jax.lax.dynamic_index_in_dim(a, 0, keepdims=False) for a in (x, y, mask)]
        noisy = []
        for (x_, y_, mask_), k in ((first, one), (again, other)):
            noisy.append(with_noise(grad_fn(model, x_, y_, is_padding_example=mask_), k))
        return updated(model, state, added(*noisy))

    batch = (jnp.ones((2, 8, WIDTH)), jnp.ones((2, 8, 2)), jnp.zeros((2, 8), bool))
    return by_hand(step, batch=batch)


@attack("noise", "examples apart")
def as_many_windows_as_an_argument_says():
    grad_fn = clipped()
    params, static = eqx.partition(mlp(), eqx.is_array)

    def step(params, state, x, y, mask):
        key, state = next_key(state)

        def turn(i, params):
            x_part, y_part, mask_part = sliced((x, y, mask), 4 * i, 4)
            model = eqx.combine(params, static)
            grads = grad_fn(model, x_part, y_part, is_padding_example=mask_part)
            noisy = with_noise(grads, jax.random.fold_in(key, i))
            return jax.tree.map(lambda p, g: p - g, params, eqx.filter(noisy, eqx.is_array))

        return jax.lax.fori_loop(0, state.step, turn, params), state._replace(step=state.step + 1)

    return by_hand(step, model=params, state=first_state(params))


# Devices.


def spread_over_devices(of_a_device, in_specs, out_specs, args_of):
    """`of_a_device` on eight devices, of `args_of(flat gradient, key)`; the result is returned."""
    mapped = jax.shard_map(
        of_a_device,
        mesh=mesh_of("auto", data=8),
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )

    def shown(given):
        key = given.key
        flat = jax.tree.leaves(given.grads)[0].ravel()
        return mapped(*args_of(flat, key))

    return beside_the_step(shown)


def noisy_vector(sums, key):
    return sums + 3 * STDDEV * jax.random.normal(key, sums.shape)


@attack("noise", "fresh noise")
def one_noise_for_the_parts_on_all_devices():
    return spread_over_devices(noisy_vector, (P("data"), P()), P("data"), lambda g, k: (g, k))


@attack("noise", "fresh noise")
def eight_noisy_copies_on_devices():
    return spread_over_devices(
        lambda g, k: noisy_vector(g, k[0]),
        (P(), P("data")),
        P("data"),
        lambda g, k: (g, jax.random.split(k, 8)),
    )


@attack("noise", "fresh noise")
def mean_of_noisy_copies_on_devices():
    return spread_over_devices(
        lambda g, k: jax.lax.pmean(noisy_vector(g, k[0]), "data"),
        (P(), P("data")),
        P(),
        lambda g, k: (g, jax.random.split(k, 8)),
    )


@attack("noise", "fresh noise", "release")
def noise_repeated_by_devices():
    mapped = jax.shard_map(
        lambda k: jax.random.normal(k, (2,)),
        mesh=mesh_of("auto", data=8),
        in_specs=P(),
        out_specs=P("data"),
        check_vma=False,
    )

    def shown(given):
        key = given.key
        flat = jax.tree.leaves(given.grads)[0].ravel()
        return flat + 3 * STDDEV * mapped(key)

    return beside_the_step(shown)


def copies_by_devices():
    mapped = jax.shard_map(
        lambda g: g,
        mesh=mesh_of("auto", data=8),
        in_specs=P(),
        out_specs=P("data"),
        check_vma=False,
    )

    def noisy(grads, key):
        leaves, structure = jax.tree.flatten(grads)
        copies = [mapped(leaf[None]) for leaf in leaves]
        noisy = with_noise(structure.unflatten(copies), key)
        return jax.tree.map(lambda leaf: leaf.mean(0), noisy)

    return noised_by(noisy)


@attack("noise")
def noise_for_each_copy_by_devices():
    return copies_by_devices()
