"""Steps that leak by what is returned, kept or shown, by slots, devices, and closures.

Tables are by frame, and a comment says what is wrong. None of them may be called fine. An example
that is left out moves all behind it by one slot, so whatever a slot decides changes for all of
them.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from dp_accounting import NeighboringRelation
from jax import lax
from jax.experimental import checkify, io_callback
from jax.random import bernoulli, fold_in, normal, split, uniform

import eqx_dp as dp
from tests.checks.privacy_steps import (
    CLASSES,
    NUM_EXAMPLES,
    OPTIMIZER,
    PLAN,
    SECRET,
    SLOTS,
    STDDEV,
    WIDTH,
    At,
    Case,
    absolute_error,
    added,
    beside,
    by_hand,
    cases,
    chained,
    clipped,
    data,
    each,
    epoch_by,
    first_state,
    keeping,
    made,
    minus,
    mlp,
    next_key,
    noised_by,
    over_devices,
    params_of,
    plan_under,
    prepared_by,
    psum,
    scaled,
    squared_error,
    step_of,
    updated,
    where,
    with_noise,
    with_optimizer,
    zero_sums,
)
from tests.sharding.losses import mesh_of

XS, YS, MASK = data()
LABELS = jnp.arange(NUM_EXAMPLES) % CLASSES
COLUMNS = np.repeat(np.asarray(XS)[:, :1], 3, 1)
SIGNS = np.resize(np.float32([1, -1]), 8)
NUMBERS = jnp.arange(SLOTS)
INDICES = {"batch": (XS, YS, NUMBERS)}  # the third argument, as many as there are rows
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)
norm = optax.tree.norm


def device():
    return lax.axis_index("data")


def negated(model):
    """Another model."""
    return jax.tree.map(lambda a: -a if eqx.is_array(a) else a, model)


def raw_step(at):
    return eqx.apply_updates(at.model, scaled(-0.1, at.grads))


# What is returned beside an honest step.


def hidden_in_a_reference(at):
    """The sum is written to a mutable array, and read from it again."""
    reference = jax.new_ref(jnp.zeros(CLASSES))
    reference[...] = at.grads.layers[-1].bias
    return reference[...]


def error_of_checkify(at):
    checked = checkify.checkify(lambda x: checkify.check(jnp.all(x > -100), "very negative"))
    return checked(at.x)[0]


def rate_by_a_line_search(at):
    moved = lambda rate: eqx.apply_updates(at.model, scaled(-rate, at.noisy))  # noqa: E731
    return jnp.argmin(lax.map(lambda rate: at.losses(moved(rate)).mean(), jnp.asarray([0.1, 1.0])))


BESIDE = {
    "mean_loss_returned": lambda at: at.values.loss.mean(),
    "number_of_examples_returned": lambda at: jnp.sum(~at.mask),
    "mean_of_inputs_returned": lambda at: at.x.mean(axis=0),
    "a_label_returned": lambda at: at.y[0],
    "accuracy_returned": lambda at: jnp.mean(
        jax.vmap(at.model)(at.x).argmax(axis=1) == at.y.argmax(axis=1)
    ),
    "early_stopping_flag_returned": lambda at: at.values.loss.mean() < 0.1,
    "sum_without_noise_returned": lambda at: at.grads,
    # A tiny noise on the mean loss, whose sensitivity nothing bounds.
    "dithered_loss": lambda at: with_noise(at.values.loss.mean(), jax.random.key(1), 1e-3),
    # One bit of the sum.
    "whether_the_raw_sum_is_finite": lambda at: jnp.all(jnp.isfinite(jax.tree.leaves(at.grads)[0])),
    # How well the noise is survived: a number about the raw sum.
    "similarity": lambda at: optax.tree.vdot(at.noisy, at.grads) / norm(at.noisy),
    "size_of_the_noise": lambda at: norm(minus(at.noisy, at.grads)),
    # Only how many losses are above each of some public numbers.
    "losses_by_a_private_order": lambda at: (at.values.loss[:, None] > jnp.arange(5)).sum(0),
    "hidden_in_a_reference": hidden_in_a_reference,
    # The better of two noisy models on the private batch.
    "model_chosen": lambda at: where(
        at.losses(at.new).mean() < at.losses().mean(), params_of(at.new), params_of(at.model)
    ),
    "error_of_checkify": error_of_checkify,
    "table_at_a_private_place": lambda at: jnp.arange(2.0)[at.y[0].argmax()],
    "batch_of_its_own": lambda at: (2 * at.x, at.y, at.mask),
    # A host function returns what nothing is known of.
    "data_of_a_host_function": lambda at: jax.pure_callback(lambda: XS.mean(), SCALAR),
    "raw_model_on_public_data": lambda at: jnp.sum(jax.vmap(raw_step(at))(jnp.ones((3, WIDTH)))),
    "rate_by_a_line_search": rate_by_a_line_search,
    "coins": lambda at: bernoulli(at.keys[0], jax.nn.sigmoid(at.x.mean()), (100,)),
    # Of data that the step closes over.
    "loss_of_closed_over": lambda at: At(at.new, None, XS, YS, MASK).losses().mean(),
    # Columns that are equal do not make rows equal.
    "equal_columns_of_closed_over": lambda at: jnp.asarray(COLUMNS).mean(),
}


# What is kept in the state of an honest step.


def best_model(kept, at):
    loss = at.losses().mean()
    return where(loss < kept[1], params_of(at.model), kept[0]), jnp.minimum(loss, kept[1])


def moments_of_inputs(kept, at):
    """A batch norm's statistics."""
    return 0.9 * kept[0] + 0.1 * at.x.mean(0), 0.9 * kept[1] + 0.1 * at.x.var(0)


def classes(at):
    return jax.nn.one_hot(at.y.argmax(1), CLASSES)


KEEPING = {
    # The mean loss of the batch is in the state, under a name that the state had before.
    "metrics": (lambda kept, at: {"loss": at.values.loss.mean()}, {"loss": jnp.zeros(())}, {}),
    # An average over models that the raw sum has moved.
    "average_of_raw_models": (
        lambda kept, at: added(scaled(0.9, kept), scaled(0.1, params_of(raw_step(at)))),
        params_of(mlp()),
    ),
    "least_loss": (lambda kept, at: jnp.minimum(kept, at.values.loss.mean()), jnp.zeros(())),
    # Error feedback: the sum minus the noisy sum is kept, and shows the noise.
    "residual_of_the_noise": (lambda kept, at: minus(at.grads, at.noisy), zero_sums()),
    # Error feedback: what the rounding of the raw sum has lost.
    "rounding_residual": (
        lambda kept, at: jax.tree.map(lambda g: g - jnp.round(g, 1), at.grads),
        zero_sums(),
    ),
    "number_of_examples_seen": (lambda kept, at: kept + jnp.sum(~at.mask), jnp.zeros((), int)),
    "histogram_of_labels": (lambda kept, at: kept + classes(at).sum(0), jnp.zeros(CLASSES)),
    "mean_and_variance_of_inputs": (moments_of_inputs, (jnp.zeros(WIDTH), jnp.ones(WIDTH))),
    # The slots of the largest losses, for the next step.
    "hardest_slots": (lambda _, at: lax.top_k(at.values.loss, 2)[1], jnp.zeros(2, jnp.int32)),
    # For scaling: the largest number of any input so far.
    "largest_input": (lambda kept, at: jnp.maximum(kept, jnp.abs(at.x).max()), jnp.zeros(())),
    "best_model": (best_model, (params_of(mlp()), jnp.float32(jnp.inf))),
    "prototypes": (lambda kept, at: kept + classes(at).T @ at.x, jnp.zeros((CLASSES, WIDTH))),
    "reservoir": (
        lambda kept, at: at.x[jax.random.randint(at.keys[0], (), 0, SLOTS)],
        jnp.zeros(WIDTH),
    ),
}


# What devices make of their sums, with one noise on the result.


def summed_again(grads):
    return lax.fori_loop(0, 2, lambda _, t: psum(added(t, grads)), zero_sums())


def standardized(at):
    return at.use(x=at.x - lax.pmean(at.x.mean(0), "data"))


def leafwise(change, tree):
    return jax.tree.map(change, tree)


ON_DEVICES = {
    # Each example counts nine times, and the noise is for two: a multiplier of 0.27.
    "sum_of_the_sum_and_the_parts": (lambda g: psum(added(psum(g), g)), {"stddev": 2 * STDDEV}),
    "sum_of_sums": lambda g: psum(psum(g)),
    # An example that is left out changes the sign of all behind it: 15 times the clip norm.
    "signs_of_devices": lambda g: psum(scaled(jnp.where(device() % 2 == 0, 1.0, -1.0), g)),
    # An example that is left out moves the next one to the first device: two change.
    "the_first_device_alone": lambda g: psum(where(device() == 0, g, zero_sums())),
    # Weights from -1 to 1: all behind an example that is left out get another one.
    "weights_of_devices": lambda g: psum(scaled((device() - 3.5) / 3.5, g)),
    # The gathered sums are added on each device, and the devices' equal results once more.
    "gathered_and_summed": lambda g: psum(leafwise(lambda a: lax.all_gather(a, "data").sum(0), g)),
    # One device's sum: an example that is left out changes two of its examples.
    "one_of_the_gathered_sums": lambda g: leafwise(lambda a: lax.all_gather(a, "data")[3], g),
    # The second mean changes nothing, and the noise is divided by the devices twice.
    "averaged_twice": (lambda g: lax.pmean(lax.pmean(g, "data"), "data"), {"stddev": STDDEV / 64}),
    # The sum of eight equal means is the sum, and the noise is for a mean.
    "sum_of_means": (lambda g: psum(lax.pmean(g, "data")), {"stddev": STDDEV / 8}),
    # `ppermute` gives zeros to devices that nobody sends to: two slots of eight are summed.
    "parts_of_two_devices_alone": lambda g: psum(lax.ppermute(g, "data", [(0, 0), (1, 1)])),
    # A loop sums the sum four times: each example counts 8 ** 4 times.
    "summed_until_it_is_large": lambda g: lax.fori_loop(0, 4, lambda _, g: psum(g), g),
    # In the other branch a device's own part goes on, which stands for two examples.
    "sum_in_one_branch": lambda g: lax.cond(
        psum(jnp.ones(())) > 8, lambda: psum(g), lambda: scaled(1.0, g)
    ),
    "table_of_weights": lambda g: psum(scaled(jnp.asarray([1.0, 0.0] * 4)[device()], g)),
    "gathered_signs": lambda g: leafwise(
        lambda a: jnp.tensordot(SIGNS, lax.all_gather(a, "data"), 1), g
    ),
    "neighbors": lambda g: psum(
        added(g, lax.ppermute(g, "data", [(i, (i + 1) % 8) for i in range(8)]))
    ),
    "carried_and_summed_again": (summed_again, {"stddev": 2 * STDDEV}),
}


def on_devices(of_a_sum, **options):
    return over_devices(lambda at: of_a_sum(at.sum()), **options)


OVER_DEVICES = {
    # The batch is not spread: all eight devices sum all examples.
    "the_whole_batch_on_every_device": (lambda at: psum(at.sum()), {"batch": None}),
    # The batch is spread over both axes: what leaves is the sum of one half.
    "one_of_two_axes": (
        lambda at: psum(at.sum()),
        {"mesh": mesh_of("auto", data=4, more=2), "batch": ("data", "more")},
    ),
    # The axis `model` holds copies: each example counts twice.
    "axis_without_examples": (
        lambda at: lax.psum(at.sum(), ("data", "model")),
        {"mesh": mesh_of("auto", data=4, model=2)},
    ),
    # An example that moves to the next device is differentiated at another model.
    "another_model_on_each": lambda at: psum(
        at.sum(model=leafwise(lambda a: a * (1 + device()) if eqx.is_array(a) else a, at.model))
    ),
    "another_loss_on_odd_ones": lambda at: psum(
        where(device() % 2 == 1, at.sum(), at.sum(absolute_error))
    ),
    "mean_over_real_examples": lambda at: scaled(
        1 / jnp.maximum(psum(jnp.sum(~at.mask)), 1), psum(at.sum(normalize_by=1.0))
    ),
    "one_slot_on_all": lambda at: psum(
        At(at.model, None, *(lax.all_gather(a, "data", tiled=True)[:1] for a in at[2:5])).sum()
    ),
    "standardized_over_all": lambda at: psum(standardized(at).sum()),
}


def side_by_side(of_a_device):
    """`of_a_device(grads, key)` is each device's noisy sum, and they are returned as they are."""

    def finish(params, state, result, key):
        return *updated(params, state, leafwise(lambda a: a.sum(0), result)), result

    def part(at):
        return leafwise(lambda a: a[None], of_a_device(at.sum(), at.keys[0]))

    return over_devices(part, out="data", finish=finish)


SIDE_BY_SIDE = {
    "a_noise_of_its_own": lambda g, k: with_noise(g, fold_in(k, device())),
    "one_noise_for_all_devices": with_noise,
    "an_eighth_of_the_noise": lambda g, k: psum(with_noise(g, fold_in(k, device()), STDDEV / 8)),
    "noise_for_a_mean": lambda g, k: with_noise(psum(g), k, STDDEV / 8),
}


# What is done to examples before the engine.


def columns_of(at):
    """Columns of copies of the batch, in a scan: they are no rows."""
    copies = jnp.broadcast_to(at.x, (2, *at.x.shape))
    _, turned = lax.scan(lambda c, a: (c, a.T), 0, copies)
    return at.use(x=turned[0][:, :WIDTH])


PREPARED = {
    "standardized": lambda at: at.use(x=(at.x - at.x.mean(axis=0)) / (at.x.std(axis=0) + 1e-3)),
    "inputs_scaled_by_their_largest": lambda at: at.use(x=at.x / jnp.max(jnp.abs(at.x))),
    "averaged_with_neighbors": lambda at: at.use(x=at.x + jnp.roll(at.x, 1, axis=0)),
    "differences_of_examples": lambda at: at.use(x=at.x - at.x[:1]),
    # Each column by itself: slots hold numbers of several examples.
    "examples_sorted": lambda at: at.use(x=jnp.sort(at.x, axis=0)),
    "running_sum_of_examples": lambda at: at.use(x=jnp.cumsum(at.x, axis=0)),
    # The first half is doubled and put before the second.
    "first_half_doubled": lambda at: at.use(x=jnp.concatenate([2 * at.x[:4], at.x[4:]])),
    # Slot 0 is set to zero: an example that is left out puts another one there.
    "the_first_slot_overwritten": lambda at: at.use(x=at.x.at[0].set(0.0)),
    # Every second slot is padding: an example that is left out brings four others back.
    "odd_slots_masked": lambda at: at.use(mask=at.mask | (NUMBERS % 2 == 1)),
    # The slot's number is written into the example.
    "slot_as_a_feature": lambda at: at.use(x=at.x.at[:, 0].set(NUMBERS)),
    # Rows of a unit matrix are added, as positions in a sequence are.
    "codes_of_slots_added": lambda at: at.use(x=at.x + jnp.eye(SLOTS, WIDTH)),
    # An example's inputs meet another one's targets: two rows change for one.
    "labels_turned_round": lambda at: at.use(y=at.y[::-1]),
    # Whether an example counts is said by another slot's mask.
    "mask_turned_round": lambda at: at.use(mask=at.mask[::-1]),
    # Inputs move to other rows, by an order that all labels decide; targets do not.
    "inputs_sorted_by_label": lambda at: at.use(x=at.x[jnp.argsort(at.y[:, 0])]),
    "mixed_up": lambda at: at.use(x=at.x + jax.random.permutation(at.keys[1], at.x)),
    "handed_on_twice": lambda at: at.rows(jnp.concatenate([NUMBERS, NUMBERS])),
    "one_row_in_all_slots": lambda at: at.rows(jnp.zeros(SLOTS, int)),
    "one_row_as_the_mask": lambda at: at.use(mask=jnp.tile(at.x[0] > 0, 2)),
    "pairs": lambda at: at.use(
        x=(at.x.reshape(4, 2, WIDTH) * jnp.asarray([[1.0], [-1.0]])).reshape(SLOTS, WIDTH)
    ),
    # Slot i takes a time between i / n and (i + 1) / n.
    "spread_times": lambda at: at.times(uniform(at.keys[1], (SLOTS,)) + NUMBERS),
    "centered_by_a_constant_batch": lambda at: at.use(x=at.x - XS.mean(0)),
    # The first four slots count: an example that is left out moves the fifth into them.
    "weights_concatenated": lambda at: at.times(jnp.concatenate([jnp.ones(4), jnp.zeros(4)])),
    "weights_padded": lambda at: at.times(jnp.pad(jnp.ones(4), (0, 4))),
    # Slot i has the weight i: all behind an example that is left out get another one.
    "ramp_by_map": lambda at: at.times(lax.map(lambda i: 1.0 * i, NUMBERS)),
    "ramp_by_a_counter": lambda at: at.times(
        lax.scan(lambda i, _: (i + 1.0, i), 0.0, None, length=SLOTS)[1]
    ),
    "ramp_by_a_cumulative_sum": lambda at: at.times(jnp.cumsum(jnp.ones(SLOTS))),
    # A triangular matrix times ones.
    "ramp_by_a_product": lambda at: at.times(jnp.tril(jnp.ones((SLOTS, SLOTS))) @ jnp.ones(SLOTS)),
    # Slot i has the i-th smallest of eight random times.
    "sorted_times": lambda at: at.times(jnp.sort(uniform(at.keys[1], (SLOTS,)))),
    "largest_times": lambda at: at.times(lax.top_k(uniform(at.keys[1], (SLOTS,)), SLOTS)[0]),
    # A random number up to the slot's own number.
    "bounds_of_slots": lambda at: at.times(uniform(at.keys[1], (SLOTS,), maxval=NUMBERS + 1.0)),
    # Slot i is multiplied by the same number in every step, and that number is a constant.
    "constant_random_numbers": lambda at: at.times(normal(jax.random.key(0), (SLOTS,))),
    "columns": (columns_of, {"batch": (jnp.ones((SLOTS, SLOTS)), YS, MASK)}),
    # The weights are not named private, but a slot's is that of whoever stands there.
    "weights_as_an_argument": (lambda at: at.times(at.more[0]), jnp.ones(SLOTS)),
    # Rows are taken by halves of public numbers: each row that is taken counts twice.
    "order_that_repeats": (lambda at: at.rows(at.more[0] // 2), NUMBERS),
    # Weights of slots, read from a longer table from the step's number on.
    "window_of_a_table": (
        lambda at: at.times(lax.dynamic_slice(at.more[0], (at.state.step,), (SLOTS,))),
        jnp.linspace(0, 1, 64),
    ),
    # One slot after the other is left out: the slot is public, and who stands there is not.
    "slot_of_the_step_masked": lambda at: at.use(mask=at.mask | (at.state.step % SLOTS == NUMBERS)),
    "mask_by_an_argument": (lambda at: at.use(mask=at.mask | (at.more[0] > 2)), jnp.ones(SLOTS)),
    "targets_rolled_by_the_step": lambda at: at.use(y=jnp.roll(at.y, at.state.step, 0)),
    # Inputs are looked up by indices, and targets are not: two rows change for one.
    "inputs_by_indices_alone": (lambda at: at.use(x=at.x[at.mask], mask=at.mask < 0), INDICES),
    "indices_times_zero": (lambda at: at.rows(at.mask * 0)._replace(mask=at.mask < 0), INDICES),
    "indices_too_large": (lambda at: at.rows(at.mask + 100)._replace(mask=at.mask < 0), INDICES),
    "no_mask": lambda at: at.use(mask=None),
    # Examples far from the mean of the batch are left out.
    "mask_by_others": lambda at: at.use(mask=at.mask | (jnp.abs(at.x - at.x.mean(0)).max(1) > 3)),
    "public_mask": lambda at: at.use(mask=jnp.zeros(SLOTS, bool)),
}


# Losses that tell of their example.


def printed(model, x, y):
    value = squared_error(model, x, y)
    jax.debug.print("loss {}", value)
    return value


def printed_in_a_loop(model, x, y):
    """How often a public number is printed, an example says."""

    def turn(c):
        jax.debug.print("turn {}", 1)
        return c * 0.5

    x = lax.stop_gradient(lax.while_loop(lambda c: jnp.sum(c * c) > 1, turn, x))
    return squared_error(model, x, y)


def printed_in_a_branch(model, x, y):
    """That a public number is printed tells of an example."""
    lax.cond(x[0] > 0, lambda: jax.debug.print("{}", 1), lambda: None)
    return squared_error(model, x, y)


@jax.custom_vjp
def spy(x):
    """Its backward rule prints the cotangent."""
    return x


spy.defvjp(lambda x: (x, None), lambda _, g: (jax.debug.callback(lambda c: None, g), (g,))[1])

LOSSES = {
    "loss_printed_inside": printed,
    "printed_in_a_loop": printed_in_a_loop,
    "printed_in_a_branch": printed_in_a_branch,
    "example_checked": lambda model, x, y: squared_error(
        model, eqx.error_if(x, x[0] > 100, "an input is large"), y
    ),
    "spying_rule": lambda model, x, y: jnp.sum((spy(model(x)) - y) ** 2),
}


def of_the_loss(loss):
    """An honest step of a loss that is not."""
    return noised_by(with_noise, clipped(loss))


# What the optimizer gets, and what happens on the way.


def aux_returned(at):
    grad_fn = clipped(lambda model, x, y: (squared_error(model, x, y), model(x)), has_aux=True)
    grads, aux = grad_fn(at.model, at.x, at.y, is_padding_example=at.mask)
    return at.noised(grads), leafwise(jnp.mean, aux)


def batch_closed_over(at):
    """The mean of all targets is in the loss of each example, past the engine's arguments."""
    center = at.y.mean(axis=0)
    return at.noised(at.sum(lambda m, x, y: squared_error(m, x, y - center)))


def balanced(at):
    """Each example is weighted by how many of its class are in the batch."""
    weight = 1 / (classes(at) @ classes(at).sum(axis=0))
    grad_fn = clipped(lambda m, x, y, weight: weight * squared_error(m, x, y))
    return at.noised(grad_fn(at.model, at.x, at.y, weight, is_padding_example=at.mask))


def hardest(at):
    """If one of the four hardest is taken away, another one steps in: two change."""
    return at.noised(at.rows(lax.top_k(jnp.where(at.mask, -1, at.losses()), 4)[1]).sum())


def halves(at):
    return at.rows(slice(4)), at.rows(slice(4, 8))


def accumulated(at, add):
    """`add(total, grads, i)` of chunks of a batch, in a scan; noise on what comes out."""
    parts = leafwise(lambda a: a.reshape(4, -1, *a.shape[1:]), (at.x, at.y, at.mask))

    def turn(total, i_and_part):
        i, part = i_and_part
        grads = At(at.model, at.state, *part).sum()
        return jax.tree.map(lambda t, g: add(t, g, i), total, grads), None

    return at.noised(lax.scan(turn, zero_sums(), (jnp.arange(4), parts))[0])


def slope(at):
    """How the clipped sum changes with the model: no clip norm bounds that."""
    params, static = eqx.partition(at.model, eqx.is_inexact_array)
    _, change = jax.jvp(lambda p: at.sum(model=eqx.combine(p, static)), (params,), (params,))
    return at.noised(change)


def models_mapped(at):
    """The engine under `vmap` over models: the sums share one noise for one sum."""
    params, static = eqx.partition(at.model, eqx.is_inexact_array)
    many = leafwise(lambda a: jnp.stack([a, 2 * a]), params)
    sums = jax.vmap(lambda p: at.sum(model=eqx.combine(p, static)))(many)
    return at.noised(leafwise(lambda a: a.sum(0), sums))


def columns_in_a_scan(at):
    """The engine is called in the scan, on columns."""
    grad_fn = clipped(lambda model, x: jnp.sum(model(x)))

    def turn(total, x_and_key):
        x, key = x_and_key
        grads = grad_fn(at.model, x.T[:, :WIDTH], is_padding_example=x[0] > 2)
        return total, with_noise(grads, key, 2 * STDDEV)

    copies = jnp.broadcast_to(at.x, (2, *at.x.shape)), split(at.keys[0])
    return leafwise(lambda a: a.mean(0), lax.scan(turn, 0, copies)[1])


def sent_out(at):
    """A host function gets the loss, and decides the scale of the noisy gradient."""
    return scaled(jax.pure_callback(lambda x: 0 * x + 1, SCALAR, at.losses().mean()), at.noised())


def printed_in_some_steps(at):
    noisy, loss = at.noised(), at.losses().mean()
    is_printed = jax.tree.leaves(noisy)[0].sum() > 0
    lax.cond(is_printed, lambda: jax.debug.print("{}", loss), lambda: None)
    return noisy


def skipped(at, is_skipped):
    noisy = at.noised()
    return lax.cond(is_skipped, zero_sums, lambda: noisy)


def while_the_loss_is_high(at):
    return lax.while_loop(
        lambda n: at.losses(eqx.apply_updates(at.model, n)).mean() > 1,
        lambda n: scaled(0.5, n),
        at.noised(),
    )


STEPS = {
    "learning_rate_from_the_loss": lambda at: scaled(1 / (1 + at.losses().mean()), at.noised()),
    # Without a branch: `jnp.where` leaves the update out if the loss is high.
    "selected_by_the_loss": lambda at: where(at.losses().mean() > 10, zero_sums(), at.noised()),
    "skipped_by_the_loss": lambda at: skipped(at, at.losses().mean() > 10),
    "loss_printed": lambda at: (jax.debug.print("{}", at.losses().mean()), at.noised())[1],
    "loss_logged": lambda at: (
        io_callback(lambda _: None, None, at.losses().mean(), ordered=True),
        at.noised(),
    )[1],
    "loss_checked": lambda at: eqx.error_if(at.noised(), at.losses().mean() > 1e9, "large"),
    "loss_sent_out": sent_out,
    "printed_in_some_steps": printed_in_some_steps,
    "aux_returned": aux_returned,
    "batch_closed_over": batch_closed_over,
    "balanced": balanced,
    "hardest": hardest,
    # Two models, each on its half: an example that is left out moves one to the other half.
    "models_of_halves": lambda at: at.noised(
        added(halves(at)[0].sum(), halves(at)[1].sum(model=negated(at.model)))
    ),
    "slope": slope,
    "models_mapped": models_mapped,
    # Two models are trained on one batch, each with the noise for one release.
    "ensemble": lambda at: (
        at.noised(),
        at.noised(at.sum(model=negated(at.model)), key=at.keys[1]),
    ),
    "one_loss_masked": lambda at: at.noised(
        added(at.sum(), at.use(mask=None).sum(absolute_error)), 2 * STDDEV
    ),
    "either_half": lambda at: at.noised(
        lax.cond(at.state.step % 2 == 0, halves(at)[0].sum, halves(at)[1].sum)
    ),
    "difference_of_halves": lambda at: at.noised(minus(*(half.sum() for half in halves(at)))),
    "three_of_four_parts": lambda at: at.noised(
        added(*(at.rows(slice(i, None, 4)).sum() for i in range(3)))
    ),
    "accumulated_growing": lambda at: accumulated(at, lambda t, g, i: 2.0 * t + g),
    "accumulated_alternating": lambda at: accumulated(
        at, lambda t, g, i: t + jnp.where(i % 2, -1.0, 1.0) * g
    ),
    "columns_in_a_scan": (columns_in_a_scan, {"batch": (jnp.ones((SLOTS, SLOTS)), YS, MASK)}),
    # Halves the gradient until it is short: the trip count depends on private data.
    "halved_while_long": lambda at: at.noised(
        lax.while_loop(lambda g: norm(g) > 0.1, lambda g: scaled(0.5, g), at.sum())
    ),
    "sum_checked": lambda at: at.noised(eqx.error_if(at.sum(), at.x.sum() > 10, "large")),
    "norm_logged": lambda at: (jax.debug.callback(lambda n: None, norm(at.sum())), at.noised())[1],
    "turns_by_examples": lambda at: lax.fori_loop(
        0, jnp.sum(~at.mask), lambda _, n: scaled(0.9, n), at.noised()
    ),
    "while_the_loss_is_high": while_the_loss_is_high,
    # A loop of fixed length, in which a private loss masks the rest of the turns.
    "masked_turns": lambda at: lax.fori_loop(
        0, 4, lambda _, n: scaled(1.0 * (at.losses().mean() > 1), n), at.noised()
    ),
    "skipped_without_examples": lambda at: skipped(at, jnp.all(at.mask)),
}


# Optimizers that hold the noise.

NOISE = PLAN.privatizer(clipped(), key=SECRET)


def kinds(params):
    return leafwise(lambda a: "matrix" if a.ndim > 1 else "vector", params)


def is_matrix(params):
    return leafwise(lambda a: a.ndim > 1, params)


OPTIMIZERS = {
    # The variance of `optax.add_noise` falls with the number of steps.
    "noise_of_optax": optax.chain(optax.add_noise(STDDEV**2, 0.55, jax.random.key(0)), OPTIMIZER),
    "noise_of_another_gradient": optax.chain(
        PLAN.privatizer(clipped(l2_clip_norm=0.5), key=SECRET), OPTIMIZER
    ),
    "scaled_before_and_behind": optax.chain(optax.scale(10.0), NOISE, optax.scale(0.1)),
    "schedule_before": optax.chain(optax.scale_by_schedule(lambda step: 1.0 + step), NOISE),
    "noise_on_matrices_alone": optax.chain(optax.masked(NOISE, is_matrix), OPTIMIZER),
    "one_of_two_groups": optax.multi_transform(
        {"matrix": optax.chain(NOISE, OPTIMIZER), "vector": optax.sgd(0.1)}, kinds
    ),
    "behind_a_check_that_skips": optax.apply_if_finite(optax.chain(NOISE, OPTIMIZER), 3),
    "for_a_sum_that_is_not_divided": (optax.chain(NOISE, OPTIMIZER), clipped(normalize_by=1.0)),
    "multi_steps_before_the_noise": optax.MultiSteps(
        optax.chain(NOISE, OPTIMIZER), 2, use_grad_mean=False
    ),
}


# Steps that fit no frame.


def reduced_on_plateau():
    plateau = optax.chain(optax.sgd(1e-2), optax.contrib.reduce_on_plateau(patience=1))

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        at = At(model, state, x, y, mask)
        given = {"value": at.losses().mean()}
        updates, opt = plateau.update(at.noised(key=key), state.opt, params_of(model), **given)
        return eqx.apply_updates(model, updates), state._replace(opt=opt)

    return by_hand(step, state=first_state(optimizer=plateau))


def remembering(change, first):
    """`change(kept, at)` gives inputs, and what is kept of this call."""

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        at = At(model, state, x, y, mask)
        x, kept = change(state.kept, at)
        model, state = updated(model, state, at.use(x=x).noised(key=key))
        return model, state._replace(kept=kept)

    return by_hand(step, state=first_state(kept=first))


def sum_of_the_step_before():
    """The model is moved by the gradient of the step before, which had no noise."""

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        grads = At(model, state, x, y, mask).sum()
        model, state = updated(model, state, added(with_noise(grads, key), state.kept))
        return model, state._replace(kept=grads)

    return by_hand(step, state=first_state(kept=zero_sums()))


class Training(eqx.Module):
    """A step that has the inputs of its data set in a field."""

    xs: jax.Array

    def __call__(self, model, state, x, y, mask):
        key, state = next_key(state)
        return updated(model, state, At(model, state, x - self.xs.mean(0), y, mask).noised(key=key))


def batch_closed_over_beside_its_mask():
    """Only the mask is an argument; inputs and targets are constants of the program."""

    def step(model, state, mask):
        return updated(model, state, At(model, state, XS, YS, mask).noised(key=state.key))

    return by_hand(step, batch=(MASK,), private=(2,))


def key_summed_over_devices(at):
    """Eight times the words of the key of a noise are shown."""
    everywhere = jax.sharding.PartitionSpec()
    options = {"in_specs": everywhere, "out_specs": everywhere, "check_vma": False}
    mapped = jax.shard_map(psum, mesh=mesh_of("auto", data=8), **options)
    noisy = with_noise(at.grads, at.keys[0], 9 * STDDEV)
    return noisy, mapped(jax.random.key_data(at.keys[0]))


EACH = {
    # Replacing an example moves a sum twice as far as leaving it out.
    "privatizer_of_a_relation": lambda: chained()._replace(
        plan=plan_under(NeighboringRelation.REPLACE_ONE)
    ),
    "noise_of_another_plan": lambda: chained(
        plan=dp.PrivacyPlan(0.5, 10, PLAN.noise_multiplier / 2, 1e-5)
    )._replace(plan=PLAN),
    "key_summed_over_devices": lambda: beside(
        key_summed_over_devices, plan=dp.PrivacyPlan(0.5, 10, 1.0, 1e-5)
    ),
    "reduced_on_plateau": reduced_on_plateau,
    # What stood in a slot before is added to who stands there now.
    "memory_of_slots": lambda: remembering(
        lambda kept, at: (0.5 * at.x + 0.5 * kept, at.x), jnp.zeros((SLOTS, WIDTH))
    ),
    # A batch norm by hand: inputs are shifted by a mean over earlier batches.
    "memory_of_the_mean": lambda: remembering(
        lambda kept, at: (at.x - kept, 0.9 * kept + 0.1 * at.x.mean(0)), jnp.zeros(WIDTH)
    ),
    "sum_of_the_step_before": sum_of_the_step_before,
    "closed_over_by_a_module": lambda: Case(
        Training(XS), (mlp(), first_state(), *data()), {}, (2, 3, 4), PLAN, 0.0
    ),
    # The loss is weighted by a statistic of as many labels as the data set has examples.
    "closed_over_by_the_loss": lambda: made(
        lambda model, x, y: LABELS.mean() * squared_error(model, x, y)
    ),
    # A call takes 20 steps, and the plan speaks of 10.
    "more_steps_than_the_plan_has": lambda: epoch_by(At.noised, 20),
    "batch_closed_over_beside_its_mask": batch_closed_over_beside_its_mask,
}

LEAKING = cases(
    (beside, BESIDE),
    (keeping, KEEPING),
    (on_devices, ON_DEVICES),
    (over_devices, OVER_DEVICES),
    (side_by_side, SIDE_BY_SIDE),
    (prepared_by, PREPARED),
    (of_the_loss, LOSSES),
    (step_of, STEPS),
    (with_optimizer, OPTIMIZERS),
    (each, EACH),
)
