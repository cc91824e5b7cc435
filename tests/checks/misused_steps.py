"""Training steps with one fault each, in a step that is otherwise private as its plan says."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

import eqx_dp as dp
from tests.checks.misused_noise_steps import NOISE
from tests.checks.privacy_steps import (
    CLASSES,
    EXPECTED,
    SLOTS,
    STDDEV,
    absolute_error,
    added,
    beside,
    by_hand,
    clipped,
    data,
    first_state,
    misuse,
    mlp,
    next_key,
    noised_by,
    on_devices,
    prepared_by,
    scaled,
    squared_error,
    updated,
    with_noise,
)

MISUSED = dict(NOISE)
misused = functools.partial(misuse, MISUSED)


# What leaves a step beside the release.


@misused("release")
def mean_loss_returned():
    return beside(lambda given: given.values.loss.mean())


@misused("release")
def losses_of_examples_returned():
    return beside(lambda given: given.values.loss)


@misused("release")
def mean_gradient_norm_returned():
    return beside(lambda given: given.values.grad_norm.mean())


@misused("release")
def number_of_examples_returned():
    return beside(lambda given: jnp.sum(~given.mask))


@misused("release")
def mean_of_inputs_returned():
    return beside(lambda given: given.x.mean(axis=0))


@misused("release")
def a_label_returned():
    return beside(lambda given: given.y[0])


@misused("release")
def largest_number_of_the_gradient_returned():
    """Its position alone."""
    return beside(lambda given: jnp.argmax(jnp.abs(given.grads.layers[0].weight)))


@misused("release")
def training_accuracy_returned():
    """Of the noisy model, on the private batch."""
    return beside(
        lambda given: jnp.mean(
            jax.vmap(given.model)(given.x).argmax(axis=1) == given.y.argmax(axis=1)
        )
    )


@misused("release")
def public_table_read_at_a_private_place():
    """Only public numbers are returned; which one, private data says."""
    table = jnp.arange(2.0)
    return beside(lambda given: table[given.y[0].argmax()])


@misused("release", "side door", decided=False)
def sum_hidden_in_a_reference():
    """The sum is written to a mutable array, and read from it again."""

    def shown(given):
        reference = jax.new_ref(jnp.zeros(CLASSES))
        reference[...] = given.grads.layers[-1].bias
        return reference[...]

    return beside(shown)


@misused("release")
def early_stopping_flag_returned():
    return beside(lambda given: given.values.loss.mean() < 0.1)


@misused("release")
def sum_without_noise_returned():
    return beside(lambda given: given.grads)


@misused("release")
def clipped_share_returned():
    """How many gradients were longer than the clip norm, to tune it."""
    return beside(lambda given: jnp.mean(given.values.grad_norm > 1.0))


@misused("release")
def more_than_what_is_disclosed_returned():
    case = beside(lambda given: {"loss": given.values.loss.mean(), "x": given.x[0]})
    return case._replace(disclose=("loss",))


@misused("release")
def aux_returned():
    def loss(model, x, y):
        return squared_error(model, x, y), model(x)

    grad_fn = clipped(loss, has_aux=True)

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        grads, predictions = grad_fn(model, x, y, is_padding_example=mask)
        return *updated(model, state, with_noise(grads, key)), predictions

    return by_hand(step)


@misused("release")
def batch_norm_statistics_returned():
    return beside(lambda given: (given.x.mean(axis=0), given.x.var(axis=0)))


def changed_by_loss(change):
    """A step whose noisy gradient goes through `change(mean loss, noisy)`."""
    grad_fn = dp.filter_value_and_clipped_grad(
        squared_error, l2_clip_norm=1.0, normalize_by=EXPECTED
    )

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        values, grads = grad_fn(model, x, y, is_padding_example=mask)
        return updated(model, state, change(values.loss.mean(), with_noise(grads, key)))

    return by_hand(step)


@misused("release")
def learning_rate_from_the_loss():
    return changed_by_loss(lambda loss, noisy: scaled(1 / (1 + loss), noisy))


@misused("release")
def update_selected_by_the_loss():
    """Without a branch: `jnp.where` leaves the update out if the loss is high."""
    return changed_by_loss(
        lambda loss, noisy: jax.tree.map(lambda g: jnp.where(loss > 10.0, 0, g), noisy)
    )


@misused("release")
def new_model_chosen_by_private_loss():
    """The better of two noisy models on the private batch: the choice is no release."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        after, state = updated(model, state, with_noise(grads, key))
        losses = [jnp.sum(jax.vmap(squared_error, (None, 0, 0))(m, x, y)) for m in (model, after)]
        chosen = jax.tree.map(
            lambda a, b: jnp.where(losses[0] < losses[1], a, b) if eqx.is_array(a) else a,
            model,
            after,
        )
        return chosen, state

    return by_hand(step)


@misused("release", "side door")
def rate_reduced_when_the_training_loss_is_flat():
    """`reduce_on_plateau` on the mean loss of the private batch."""
    plateau = optax.chain(optax.sgd(1e-2), optax.contrib.reduce_on_plateau(patience=1))
    grad_fn = dp.filter_value_and_clipped_grad(
        squared_error, l2_clip_norm=1.0, normalize_by=EXPECTED
    )

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        values, grads = grad_fn(model, x, y, is_padding_example=mask)
        updates, opt = plateau.update(
            with_noise(grads, key),
            state.opt,
            grad_fn.trainable(model),
            value=values.loss.mean(),
        )
        return eqx.apply_updates(model, updates), state._replace(opt=opt)

    return by_hand(step, state=first_state(optimizer=plateau))


# What stays in the state without noise.


@misused("release", kept=True)
def batch_kept_in_the_state():
    grad_fn = clipped()

    def step(model, states, x, y, mask):
        _, state = states
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        model, state = updated(model, state, with_noise(grads, key))
        return model, (x, state)

    return by_hand(step, state=(jnp.zeros((SLOTS, 4)), first_state()))


@misused("release", kept=True)
def sum_without_noise_kept_in_the_state():
    grad_fn = clipped()

    def step(model, states, x, y, mask):
        _, state = states
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        model, state = updated(model, state, with_noise(grads, key))
        return model, (grads, state)

    grads = jax.tree.map(jnp.zeros_like, clipped().trainable(mlp()))
    return by_hand(step, state=(grads, first_state()))


@misused("release", "noise", decided=False)
def last_gradient_used_in_the_next_step():
    """The model is moved by the gradient of the step before, which had no noise."""
    grad_fn = clipped()

    def step(model, states, x, y, mask):
        last, state = states
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        model, state = updated(model, state, added(with_noise(grads, key), last))
        return model, (grads, state)

    last = jax.tree.map(jnp.zeros_like, clipped().trainable(mlp()))
    return by_hand(step, state=(last, first_state()))


@misused("release", "noise", "examples apart", decided=False)
def running_mean_used_in_the_next_step():
    """A batch norm by hand: inputs are shifted by a mean over earlier batches, without noise."""
    grad_fn = clipped()

    def step(model, states, x, y, mask):
        mean, state = states
        key, state = next_key(state)
        grads = grad_fn(model, x - mean, y, is_padding_example=mask)
        model, state = updated(model, state, with_noise(grads, key))
        return model, (0.9 * mean + 0.1 * x.mean(axis=0), state)

    return by_hand(step, state=(jnp.zeros(4), first_state()))


# Side doors.


@misused("side door")
def loss_printed():
    def change(loss, noisy):
        jax.debug.print("loss {}", loss)
        return noisy

    return changed_by_loss(change)


@misused("side door")
def loss_of_an_example_printed():
    """Inside of the loss that the engine differentiates."""

    def loss(model, x, y):
        value = squared_error(model, x, y)
        jax.debug.print("loss {}", value)
        return value

    return noised_by(with_noise, clipped(loss))


@misused("side door")
def gradient_norm_logged():
    """By `jax.debug.callback`, without noise."""
    log = []

    def noisy(grads, key):
        jax.debug.callback(log.append, optax.tree.norm(grads))
        return with_noise(grads, key)

    return noised_by(noisy)


@misused("side door")
def inputs_written_by_io_callback():
    grad_fn, log = clipped(), []

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        io_callback(log.append, None, x[0], ordered=True)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        return updated(model, state, with_noise(grads, key))

    return by_hand(step)


@misused("side door")
def loss_sent_through_pure_callback():
    """What comes back is used; what the host does with the loss is not known."""

    def change(loss, noisy):
        zero = jax.pure_callback(lambda loss: 0 * loss, jax.ShapeDtypeStruct((), loss.dtype), loss)
        return jax.tree.map(lambda leaf: leaf + zero, noisy)

    return changed_by_loss(change)


@misused("side door")
def loss_checked_by_error_if():
    """The run stops if the mean loss is not finite."""

    def change(loss, noisy):
        return eqx.error_if(noisy, ~jnp.isfinite(loss), "the loss is not finite")

    return changed_by_loss(change)


@misused("side door", "release")
def loop_as_long_as_the_gradient_is_large():
    """Halves the gradient until it is short: the trip count depends on private data."""

    def noisy(grads, key):
        short = jax.lax.while_loop(
            lambda tree: optax.tree.norm(tree) > 0.1, lambda tree: scaled(0.5, tree), grads
        )
        return with_noise(short, key)

    return noised_by(noisy)


@misused("side door", "release")
def steps_as_many_as_there_are_examples():
    """The optimizer takes a step with the noisy gradient for each real example."""
    grad_fn = clipped()
    params, static = eqx.partition(mlp(), eqx.is_inexact_array)

    def step(params, state, x, y, mask):
        key, state = next_key(state)
        grads = grad_fn(eqx.combine(params, static), x, y, is_padding_example=mask)
        noisy = with_noise(grads, key)
        return jax.lax.fori_loop(
            0, jnp.sum(~mask), lambda _, carry: updated(*carry, noisy), (params, state)
        )

    return by_hand(step, model=params, state=first_state(params))


@misused("side door", "release")
def update_skipped_when_the_loss_is_high():
    return changed_by_loss(
        lambda loss, noisy: jax.lax.cond(loss > 10.0, lambda: scaled(0.0, noisy), lambda: noisy)
    )


@misused("side door", "release")
def step_of_the_scan_skipped_when_no_example_is_there():
    """An empty batch adds no noise: that it was empty is seen."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        grads = jax.lax.cond(
            jnp.all(mask),
            lambda: jax.tree.map(jnp.zeros_like, grad_fn.trainable(model)),
            lambda: with_noise(grad_fn(model, x, y, is_padding_example=mask), key),
        )
        return updated(model, state, grads)

    return by_hand(step)


@misused("side door", "release", "noise", decided=False)
def noise_chosen_by_the_number_of_examples():
    """Of two amounts of noise, each of which is enough."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        deviation = jnp.where(jnp.sum(~mask) > 4, STDDEV, 2 * STDDEV)
        return updated(model, state, with_noise(grads, key, deviation))

    return by_hand(step)


@misused("side door", "fresh noise", "release", decided=False)
def key_from_private_data():
    """The noise's key is a hash of the batch: the same batch has the same noise."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key = jax.random.fold_in(state.key, jnp.sum(x).astype(jnp.int32))
        grads = grad_fn(model, x, y, is_padding_example=mask)
        return updated(model, state, with_noise(grads, key))

    return by_hand(step)


# Examples that meet before they are clipped.


def mixed_by(mix):
    """An otherwise honest step on `mix(x, y, key)`, which gives other examples."""
    return prepared_by(lambda x, y, mask, key: (*mix(x, y, key), mask))


@misused("examples apart")
def batch_standardized_by_its_own_mean():
    return mixed_by(lambda x, y, key: ((x - x.mean(axis=0)) / (x.std(axis=0) + 1e-3), y))


@misused("examples apart")
def inputs_scaled_by_their_largest():
    return mixed_by(lambda x, y, key: (x / jnp.max(jnp.abs(x)), y))


@misused("examples apart")
def mixed_up_examples():
    """Mixup: each example is averaged with another one."""

    def mixup(x, y, key):
        other, share = jax.random.permutation(key, SLOTS), 0.7
        return share * x + (1 - share) * x[other], share * y + (1 - share) * y[other]

    return mixed_by(mixup)


@misused("examples apart")
def examples_averaged_with_their_neighbors():
    return mixed_by(lambda x, y, key: (0.5 * (x + jnp.roll(x, 1, axis=0)), y))


@misused("examples apart")
def differences_of_examples():
    return mixed_by(lambda x, y, key: (x - x[:1], y))


@misused("examples apart", decided=False)
def examples_sorted():
    """Each column by itself: slots hold numbers of several examples."""
    return mixed_by(lambda x, y, key: (jnp.sort(x, axis=0), y))


@misused("examples apart")
def running_sum_of_examples():
    return mixed_by(lambda x, y, key: (jnp.cumsum(x, axis=0), y))


@misused("examples apart")
def all_examples_in_every_slot():
    """Attention over the batch: each slot sees all others."""

    def attend(x, y, key):
        return jax.nn.softmax(x @ x.T) @ x, y

    return mixed_by(attend)


@misused("examples apart", "padding", "noise", decided=False)
def mask_from_other_examples():
    """Examples far from the mean of the batch are left out: others decide whether one counts."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        far = jnp.abs(x - x.mean(axis=0)).max(axis=1) > 3
        grads = grad_fn(model, x, y, is_padding_example=mask | far)
        return updated(model, state, with_noise(grads, key))

    return by_hand(step)


@misused("examples apart", "noise", "release", decided=False)
def loss_that_closes_over_the_batch():
    """The mean of all targets is in the loss of each example, past the engine's arguments."""

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        center = y.mean(axis=0)
        grad_fn = clipped(lambda model, x, y: squared_error(model, x, y - center))
        grads = grad_fn(model, x, y, is_padding_example=mask)
        return updated(model, state, with_noise(grads, key))

    return by_hand(step)


def weighted_error(model, x, y, weight):
    return weight * squared_error(model, x, y)


@misused("examples apart")
def classes_balanced_by_the_batch():
    """Each example is weighted by how many of its class are in the batch."""
    grad_fn = clipped(weighted_error)

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        classes = jax.nn.one_hot(y.argmax(axis=1), CLASSES)
        weight = 1 / (classes @ classes.sum(axis=0))
        grads = grad_fn(model, x, y, weight, is_padding_example=mask)
        return updated(model, state, with_noise(grads, key))

    return by_hand(step)


@misused("examples apart", "noise", "release", decided=False)
def hardest_examples_chosen():
    """If one of the four hardest is taken away, another one steps in: two change."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        losses = jnp.where(mask, -1, jax.vmap(squared_error, (None, 0, 0))(model, x, y))
        _, hardest = jax.lax.top_k(losses, 4)
        grads = grad_fn(model, x[hardest], y[hardest], is_padding_example=mask[hardest])
        return updated(model, state, with_noise(grads, key))

    return by_hand(step)


# Padding.


@misused("padding", says="mask")
def mask_not_handed_on():
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        del mask
        key, state = next_key(state)
        return updated(model, state, with_noise(grad_fn(model, x, y), key))

    return by_hand(step)


@misused("padding", says="mask")
def mask_not_handed_on_to_one_of_two_losses():
    first, second = clipped(), clipped(absolute_error)

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        grads = added(first(model, x, y, is_padding_example=mask), second(model, x, y))
        return updated(model, state, with_noise(grads, key, 2 * STDDEV))

    return by_hand(step)


# Data and devices.


@misused("release", "noise", "padding", "examples apart", decided=False)
def private_data_closed_over():
    """The batch is a constant of the program, and no argument."""
    grad_fn = clipped()
    x, y, _ = data()

    def step(model, state, mask):
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        return updated(model, state, with_noise(grads, key))

    return by_hand(step, batch=data()[2:], private=(2,))


def taken(params, state, result, key):
    del key
    return updated(params, state, result)


def shown(params, state, result, key):
    """The sums of all devices, side by side, are returned beside the next model."""
    del key
    total = jax.tree.map(lambda leaf: leaf.sum(axis=0), result)
    return *updated(params, state, total), result


@misused("noise", "fresh noise", decided=False)
def an_eighth_of_the_noise_on_each_device():
    """Independent noises add up by variance: eight of deviation s / 8 have s / sqrt(8)."""

    def noisy(grads, key):
        own = jax.random.fold_in(key, jax.lax.axis_index("data"))
        return jax.lax.psum(with_noise(grads, own, STDDEV / 8), "data")

    return on_devices(noisy, taken)


@misused("fresh noise", "noise", "release", decided=False)
def one_noise_for_the_sums_of_all_devices():
    """Each device returns a sum of its own, and all have the same noise: differences have none."""

    def noisy(grads, key):
        return jax.tree.map(lambda leaf: leaf[None], with_noise(grads, key))

    return on_devices(noisy, shown, P("data"))


@misused("release", "noise", decided=False)
def noise_on_the_first_device_alone():
    """The sums of the other devices are returned as they are."""

    def noisy(grads, key):
        first = jax.lax.axis_index("data") == 0
        noise = with_noise(jax.tree.map(jnp.zeros_like, grads), key)
        return jax.tree.map(lambda g, n: (g + jnp.where(first, n, 0))[None], grads, noise)

    return on_devices(noisy, shown, P("data"))


@misused("noise", says="0.15")
def mean_over_devices_for_a_sum():
    """The noise is that of a mean over eight devices, and the gradients are summed."""

    def noisy(grads, key):
        return with_noise(jax.lax.psum(grads, "data"), key, STDDEV / 8)

    return on_devices(noisy, taken)
