"""Steps that leak by what is returned, kept or shown, by slots, devices, and closures.

Tables are by what a step is made with, and a comment says what is wrong. None of them may be called
fine. An example that is left out moves all behind it by one slot, so whatever a slot decides
changes for all of them.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from dp_accounting import NeighboringRelation
from jax.experimental import checkify, io_callback
from jax.sharding import PartitionSpec as P

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
    absolute_error,
    added,
    beside,
    by_hand,
    chained,
    clipped,
    data,
    epoch_by,
    first_state,
    in_parts,
    keeping,
    made,
    mlp,
    next_key,
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
from tests.sharding.losses import mesh_of

DEVICES = 8
LABELS = jnp.arange(NUM_EXAMPLES) % CLASSES
COLUMNS = np.repeat(np.asarray(data()[0])[:, :1], 3, 1)
SIGNS = np.resize(np.float32([1, -1]), DEVICES)


def device():
    return jax.lax.axis_index("data")


def losses_of(model, given):
    return jax.vmap(squared_error, (None, 0, 0))(model, given.x, given.y)


def changed_by_loss(change):
    """A step whose noisy gradient goes through `change(mean loss, noisy)`."""

    def noisy(at):
        loss = losses_of(at.model, at).mean()
        return change(loss, with_noise(at.sum(), at.keys[0]))

    return step_of(noisy)


def mixed_by(mix):
    """An otherwise honest step on `mix(x, y, key)`, which gives other examples."""
    return prepared_by(lambda x, y, mask, key: (*mix(x, y, key), mask))


def by_indices(prepare):
    """The third private argument holds indices, as many as there are rows."""
    return prepared_by(prepare, batch=(*data()[:2], jnp.arange(SLOTS)))


def with_numbers_of_slots(prepare):
    return with_argument(prepare, jnp.ones(SLOTS))


def each(make):
    return make()


def of_the_loss(loss, **options):
    """An honest step of a loss that is not."""
    return noised_by(with_noise, clipped(loss, **options))


def with_mask(mask_of):
    """The mask is `mask_of(at)`, or none."""

    def noisy(at):
        mask = mask_of(at)
        return with_noise(clipped()(at.model, at.x, at.y, is_padding_example=mask), at.keys[0])

    return step_of(noisy)


def of_params(of):
    """`of(params, static, x, y, mask, noisy)` gives the next parameters."""
    params, static = eqx.partition(mlp(), eqx.is_inexact_array)

    def step(params, state, x, y, mask):
        key, state = next_key(state)
        grads = clipped()(eqx.combine(params, static), x, y, is_padding_example=mask)
        return of(params, static, x, y, mask, with_noise(grads, key)), state

    return by_hand(step, model=params, state=first_state(params))


def moved_by(params, noisy, rate=-0.01):
    return added(params, scaled(rate, noisy))


def mean_loss(params, static, x, y):
    return jax.vmap(squared_error, (None, 0, 0))(eqx.combine(params, static), x, y).mean()


def key_summed_over_devices(given):
    """Eight times the words of the key of a noise are shown."""
    mapped = jax.shard_map(
        psum, mesh=mesh_of("auto", data=8), in_specs=P(), out_specs=P(), check_vma=False
    )
    noisy = with_noise(given.grads, given.key, 9 * STDDEV)
    return noisy, mapped(jax.random.key_data(given.key))


def of_devices(of_a_device):
    """`of_a_device(grads, key)` gives each device's noisy sum; they are returned side by side."""

    def finish(params, state, result, key):
        total = jax.tree.map(lambda leaf: leaf.sum(axis=0), result)
        return *updated(params, state, total), result

    return on_devices(
        lambda g, key: jax.tree.map(lambda leaf: leaf[None], of_a_device(g, key)), finish, P("data")
    )


# Functions that fit no line.


def aux_returned():
    def loss(model, x, y):
        return squared_error(model, x, y), model(x)

    def noisy(at):
        grads, aux = clipped(loss, has_aux=True)(at.model, at.x, at.y, is_padding_example=at.mask)
        return with_noise(grads, at.keys[0]), jax.tree.map(jnp.mean, aux)

    return step_of(noisy)


def hidden_in_a_reference(given):
    """The sum is written to a mutable array, and read from it again."""
    reference = jax.new_ref(jnp.zeros(CLASSES))
    reference[...] = given.grads.layers[-1].bias
    return reference[...]


def model_chosen(given):
    """The better of two noisy models on the private batch."""
    better = losses_of(given.new, given).mean() < losses_of(given.model, given).mean()
    return jax.tree.map(
        lambda a, b: jnp.where(better, a, b), params_of(given.new), params_of(given.model)
    )


def best_model(kept, given):
    best, least = kept
    loss = losses_of(given.model, given).mean()
    best = jax.tree.map(lambda a, b: jnp.where(loss < least, a, b), params_of(given.model), best)
    return best, jnp.minimum(loss, least)


def reduced_on_plateau():
    plateau = optax.chain(optax.sgd(1e-2), optax.contrib.reduce_on_plateau(patience=1))

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        noisy = with_noise(clipped()(model, x, y, is_padding_example=mask), key)
        value = jax.vmap(squared_error, (None, 0, 0))(model, x, y).mean()
        updates, opt = plateau.update(noisy, state.opt, params_of(model), value=value)
        return eqx.apply_updates(model, updates), state._replace(opt=opt)

    return by_hand(step, state=first_state(optimizer=plateau))


def of_kept(change, first):
    """`change(model, kept, x, y, mask)` gives inputs, and what is kept of this call."""

    def step(model, states, x, y, mask):
        kept, state = states
        key, state = next_key(state)
        x, kept = change(model, kept, x, y, mask)
        model, state = updated(
            model, state, with_noise(clipped()(model, x, y, is_padding_example=mask), key)
        )
        return model, (kept, state)

    return by_hand(step, state=(first, first_state()))


def sum_of_the_step_before():
    """The model is moved by the gradient of the step before, which had no noise."""

    def step(model, states, x, y, mask):
        last, state = states
        key, state = next_key(state)
        grads = clipped()(model, x, y, is_padding_example=mask)
        return (*updated(model, state, added(with_noise(grads, key), last)), grads)[::2]

    def returned(model, states, x, y, mask):
        model, last = step(model, states, x, y, mask)
        return model, (last, states[1])

    return by_hand(returned, state=(zero_sums(), first_state()))


def error_of_checkify(given):
    def checked(x):
        checkify.check(jnp.all(x > -100), "an input is very negative")
        return x

    return checkify.checkify(checked)(given.x)[0]


def spying_rule():
    """A function whose backward rule prints the cotangent, inside of the loss."""

    @jax.custom_vjp
    def spy(x):
        return x

    def backward(_, cotangent):
        jax.debug.callback(lambda c: None, cotangent)
        return (cotangent,)

    spy.defvjp(lambda x: (x, None), backward)
    return of_the_loss(lambda model, x, y: jnp.sum((spy(model(x)) - y) ** 2))


def printed(model, x, y):
    value = squared_error(model, x, y)
    jax.debug.print("loss {}", value)
    return value


def printed_in_a_loop(model, x, y):
    """How often a public number is printed, an example says."""

    def turn(c):
        jax.debug.print("turn {}", 1)
        return c * 0.5

    x = jax.lax.stop_gradient(jax.lax.while_loop(lambda c: jnp.sum(c * c) > 1, turn, x))
    return squared_error(model, x, y)


def printed_in_a_branch(model, x, y):
    """That a public number is printed tells of an example."""
    jax.lax.cond(x[0] > 0, lambda: jax.debug.print("{}", 1), lambda: None)
    return squared_error(model, x, y)


def checked(model, x, y):
    return squared_error(model, eqx.error_if(x, x[0] > 100, "an input is large"), y)


def batch_closed_over(at):
    """The mean of all targets is in the loss of each example, past the engine's arguments."""
    center = at.y.mean(axis=0)
    return with_noise(at.sum(lambda m, x, y: squared_error(m, x, y - center)), at.keys[0])


def balanced(at):
    """Each example is weighted by how many of its class are in the batch."""
    classes = jax.nn.one_hot(at.y.argmax(axis=1), CLASSES)
    weight = 1 / (classes @ classes.sum(axis=0))
    grad_fn = clipped(lambda m, x, y, weight: weight * squared_error(m, x, y))
    grads = grad_fn(at.model, at.x, at.y, weight, is_padding_example=at.mask)
    return with_noise(grads, at.keys[0])


def hardest(at):
    """If one of the four hardest is taken away, another one steps in: two change."""
    _, where = jax.lax.top_k(jnp.where(at.mask, -1, losses_of(at.model, at)), 4)
    return with_noise(in_parts(at, where), at.keys[0])


def models_of_halves(at):
    """Two models, each on its half: an example that is left out moves one to the other half."""
    other = jax.tree.map(lambda a: -a if eqx.is_array(a) else a, at.model)
    parts = in_parts(at, slice(4)), in_parts(at._replace(model=other), slice(4, 8))
    return with_noise(added(*parts), at.keys[0])


def accumulated(add, length=4):
    """`add(total, grads, i)` of chunks of a batch, in a scan; noise on what comes out."""

    def noisy(at):
        parts = jax.tree.map(lambda a: a.reshape(length, -1, *a.shape[1:]), (at.x, at.y, at.mask))

        def turn(total, i_and_part):
            i, (x, y, mask) = i_and_part
            grads = clipped()(at.model, x, y, is_padding_example=mask)
            return jax.tree.map(lambda t, g: add(t, g, i), total, grads), None

        total, _ = jax.lax.scan(turn, zero_sums(), (jnp.arange(length), parts))
        return with_noise(total, at.keys[0])

    return step_of(noisy)


def slope(at):
    """How the clipped sum changes with the model: no clip norm bounds that."""
    params, static = eqx.partition(at.model, eqx.is_inexact_array)
    _, change = jax.jvp(lambda p: at.sum(model=eqx.combine(p, static)), (params,), (params,))
    return with_noise(change, at.keys[0])


def models_mapped(at):
    """The engine under `vmap` over models: the sums share one noise for one sum."""
    params, static = eqx.partition(at.model, eqx.is_inexact_array)
    many = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), params)
    sums = jax.vmap(lambda p: at.sum(model=eqx.combine(p, static)))(many)
    return with_noise(jax.tree.map(lambda a: a.sum(0), sums), at.keys[0])


def columns():
    """Columns of copies of the batch, in a scan: they are no rows."""

    def prepare(x, y, mask, key):
        copies = jnp.broadcast_to(x, (2, *x.shape))
        _, turned = jax.lax.scan(lambda c, a: (c, a.T), 0, copies)
        return turned[0][:, :WIDTH], y, mask

    return prepared_by(prepare, batch=(jnp.ones((SLOTS, SLOTS)), *data()[1:]))


def columns_in_a_scan():
    """The engine is called in the scan, on columns."""
    square, grad_fn = jnp.ones((SLOTS, SLOTS)), clipped(lambda model, x: jnp.sum(model(x)))

    def noisy(at):
        def turn(total, x_and_key):
            x, key = x_and_key
            grads = grad_fn(at.model, x.T[:, :WIDTH], is_padding_example=x[0] > 2)
            return total, with_noise(grads, key, 2 * STDDEV)

        copies = jnp.broadcast_to(at.x, (2, *at.x.shape)), jax.random.split(at.keys[0])
        return jax.tree.map(lambda a: a.mean(0), jax.lax.scan(turn, 0, copies)[1])

    return step_of(noisy, batch=(square, *data()[1:]))


def closed_over_by_a_module():
    """A step that has the inputs of its data set in a field."""

    class Training(eqx.Module):
        xs: jax.Array

        def __call__(self, model, state, x, y, mask):
            key, state = next_key(state)
            grads = clipped()(model, x - self.xs.mean(0), y, is_padding_example=mask)
            return updated(model, state, with_noise(grads, key))

    return by_hand(lambda *args: None)._replace(fn=Training(data()[0]))


def of_closed_over(metric_of):
    """A metric of data that the step closes over is returned."""
    xs, ys, _ = data()
    return beside(lambda given: metric_of(given, xs, ys))


def one_noise_for_two_groups():
    parts = {
        "matrix": optax.chain(PLAN.privatizer(clipped(), key=SECRET), OPTIMIZER),
        "vector": optax.sgd(0.1),
    }

    def kinds(params):
        return jax.tree.map(lambda a: "matrix" if a.ndim > 1 else "vector", params)

    return optax.multi_transform(parts, kinds)


def ensemble(at):
    """Two models are trained on one batch, each with the noise for one release."""
    other = jax.tree.map(lambda a: -a if eqx.is_array(a) else a, at.model)
    return with_noise(at.sum(), at.keys[0]), with_noise(at.sum(model=other), at.keys[1])


def turn(model, state, x, y, mask, key):
    return updated(model, state, with_noise(clipped()(model, x, y, is_padding_example=mask), key))


NOISE = PLAN.privatizer(clipped(), key=SECRET)

BESIDE = {
    "mean_loss_returned": lambda given: given.values.loss.mean(),
    "number_of_examples_returned": lambda given: jnp.sum(~given.mask),
    "mean_of_inputs_returned": lambda given: given.x.mean(axis=0),
    "a_label_returned": lambda given: given.y[0],
    # Of the noisy model, on the private batch.
    "training_accuracy_returned": lambda given: jnp.mean(
        jax.vmap(given.model)(given.x).argmax(axis=1) == given.y.argmax(axis=1)
    ),
    "early_stopping_flag_returned": lambda given: given.values.loss.mean() < 0.1,
    "sum_without_noise_returned": lambda given: given.grads,
    # A tiny noise on the mean loss, whose sensitivity nothing bounds.
    "loss_with_public_noise_of_a_dither": lambda given: with_noise(
        given.values.loss.mean(), jax.random.key(1), 1e-3
    ),
    # One bit of the sum.
    "whether_the_raw_sum_is_finite": lambda given: jnp.all(
        jnp.isfinite(jax.tree.leaves(given.grads)[0])
    ),
    # How well the noise is survived: a number about the raw sum.
    "similarity_of_noisy_and_raw_sum": lambda given: (
        optax.tree.vdot(given.noisy, given.grads) / optax.tree.norm(given.noisy)
    ),
    # The noisy sum's distance from the raw one.
    "size_of_the_noise": lambda given: optax.tree.norm(
        added(given.noisy, scaled(-1.0, given.grads))
    ),
    # Only how many losses are above each of some public numbers.
    "losses_by_a_private_order": lambda given: (
        given.values.loss[:, None] > jnp.linspace(0, 5, 10)
    ).sum(0),
    "hidden_in_a_reference": hidden_in_a_reference,
    "model_chosen": model_chosen,
    "error_of_checkify": error_of_checkify,
    "table_at_a_private_place": lambda given: jnp.arange(2.0)[given.y[0].argmax()],
    "batch_of_its_own": lambda given: (2 * given.x, given.y, given.mask),
    # A host function returns what nothing is known of.
    "data_of_a_host_function": lambda given: jax.pure_callback(
        lambda: data()[0].mean(), jax.ShapeDtypeStruct((), jnp.float32)
    ),
    "raw_model_on_public_data": lambda given: jnp.sum(
        jax.vmap(eqx.apply_updates(given.model, scaled(-0.1, given.grads)))(jnp.ones((3, WIDTH)))
    ),
    "rate_by_a_line_search": lambda given: jnp.argmin(
        jax.lax.map(
            lambda rate: losses_of(
                eqx.apply_updates(given.model, scaled(-rate, given.noisy)), given
            ).mean(),
            jnp.asarray([0.01, 0.1, 1.0]),
        )
    ),
    "coins_of_a_private_probability": lambda given: jax.random.bernoulli(
        given.key, jax.nn.sigmoid(given.x.mean()), (100,)
    ),
}

CHANGED_BY_LOSS = {
    "learning_rate_from_the_loss": lambda loss, noisy: scaled(1 / (1 + loss), noisy),
    # Without a branch: `jnp.where` leaves the update out if the loss is high.
    "update_selected_by_the_loss": lambda loss, noisy: jax.tree.map(
        lambda g: jnp.where(loss > 10.0, 0, g), noisy
    ),
    "update_skipped_when_the_loss_is_high": lambda loss, noisy: jax.lax.cond(
        loss > 10.0, lambda: scaled(0.0, noisy), lambda: noisy
    ),
    "loss_printed": lambda loss, noisy: (jax.debug.print("{}", loss), noisy)[1],
    "loss_logged": lambda loss, noisy: (
        io_callback(lambda _: None, None, loss, ordered=True),
        noisy,
    )[1],
    "loss_checked": lambda loss, noisy: eqx.error_if(noisy, loss > 1e9, "the loss is large"),
    "loss_sent_out": lambda loss, noisy: scaled(
        jax.pure_callback(lambda x: 0 * x + 1, jax.ShapeDtypeStruct((), jnp.float32), loss), noisy
    ),
    "printed_in_some_steps": lambda loss, noisy: (
        jax.lax.cond(
            jax.tree.leaves(noisy)[0].sum() > 0, lambda: jax.debug.print("{}", loss), lambda: None
        ),
        noisy,
    )[1],
}

MIXED_BY = {
    "batch_standardized_by_its_own_mean": lambda x, y, key: (
        (x - x.mean(axis=0)) / (x.std(axis=0) + 1e-3),
        y,
    ),
    "inputs_scaled_by_their_largest": lambda x, y, key: (x / jnp.max(jnp.abs(x)), y),
    "examples_averaged_with_their_neighbors": lambda x, y, key: (
        0.5 * (x + jnp.roll(x, 1, axis=0)),
        y,
    ),
    "differences_of_examples": lambda x, y, key: (x - x[:1], y),
    # Each column by itself: slots hold numbers of several examples.
    "examples_sorted": lambda x, y, key: (jnp.sort(x, axis=0), y),
    "running_sum_of_examples": lambda x, y, key: (jnp.cumsum(x, axis=0), y),
}

KEEPING = {
    # The mean loss of the batch is in the state, under a name that the state had before.
    "metrics_in_a_dictionary_of_the_state": (
        lambda kept, given: {"loss": given.values.loss.mean()},
        {"loss": jnp.zeros(())},
    ),
    # An average over models that the raw sum has moved.
    "average_of_parameters_without_noise": (
        lambda kept, given: added(
            scaled(0.9, kept), scaled(0.1, added(params_of(given.model), scaled(-0.1, given.grads)))
        ),
        params_of(mlp()),
    ),
    # The least loss so far.
    "least_loss": (lambda kept, given: jnp.minimum(kept, given.values.loss.mean()), jnp.zeros(())),
    # Error feedback: the sum minus the noisy sum is kept, and shows the noise.
    "residual_of_the_noise": (
        lambda kept, given: added(given.grads, scaled(-1.0, given.noisy)),
        zero_sums(),
    ),
    # Error feedback: what the rounding of the raw sum has lost.
    "residual_of_a_rounding": (
        lambda kept, given: jax.tree.map(lambda g: g - jnp.round(g, 1), given.grads),
        zero_sums(),
    ),
    # Real examples are counted over steps.
    "number_of_examples_seen": (
        lambda kept, given: kept + jnp.sum(~given.mask),
        jnp.zeros((), int),
    ),
    # Labels are counted by class.
    "histogram_of_labels": (
        lambda kept, given: kept + jax.nn.one_hot(given.y.argmax(1), CLASSES).sum(0),
        jnp.zeros(CLASSES),
    ),
    # A batch norm's statistics.
    "mean_and_variance_of_inputs": (
        lambda kept, given: (
            0.9 * kept[0] + 0.1 * given.x.mean(0),
            0.9 * kept[1] + 0.1 * given.x.var(0),
        ),
        (jnp.zeros(WIDTH), jnp.ones(WIDTH)),
    ),
    # The slots of the largest losses, for the next step.
    "hardest_slots": (
        lambda kept, given: jax.lax.top_k(given.values.loss, 2)[1],
        jnp.zeros(2, jnp.int32),
    ),
    # For scaling: the largest number of any input so far.
    "largest_input": (lambda kept, given: jnp.maximum(kept, jnp.abs(given.x).max()), jnp.zeros(())),
    "best_model": (best_model, (params_of(mlp()), jnp.float32(jnp.inf))),
    "prototypes": (
        lambda kept, given: kept + jax.nn.one_hot(given.y.argmax(1), CLASSES).T @ given.x,
        jnp.zeros((CLASSES, WIDTH)),
    ),
    "reservoir": (
        lambda kept, given: given.x[jax.random.randint(given.key, (), 0, SLOTS)],
        jnp.zeros(WIDTH),
    ),
}

SUMMED = {
    # Each example counts nine times, and the noise is for two: a multiplier of 0.27.
    "sum_of_the_sum_and_the_parts": (lambda grads: psum(added(psum(grads), grads)), 2 * STDDEV),
    # Each example counts eight times.
    "sum_of_sums": lambda grads: psum(psum(grads)),
    # An example that is left out changes the sign of all behind it: 15 times the clip norm.
    "signs_of_devices": lambda g: psum(scaled(jnp.where(device() % 2 == 0, 1.0, -1.0), g)),
    # An example that is left out moves the next one to the first device: two change.
    "the_first_device_alone": lambda g: psum(
        jax.tree.map(lambda a: jnp.where(device() == 0, a, 0.0), g)
    ),
    # Weights from -1 to 1: all behind an example that is left out get another one.
    "weights_of_devices": lambda g: psum(scaled((device() - 3.5) / 3.5, g)),
    # The gathered sums are added on each device, and the devices' equal results once more.
    "sums_gathered_added_and_summed": lambda g: psum(
        jax.tree.map(lambda a: jax.lax.all_gather(a, "data").sum(0), g)
    ),
    # One device's sum: an example that is left out changes two of its examples.
    "one_of_the_gathered_sums": lambda g: jax.tree.map(
        lambda a: jax.lax.all_gather(a, "data")[3], g
    ),
    # The second mean changes nothing, and the noise is divided by the devices twice.
    "averaged_twice": (
        lambda g: jax.lax.pmean(jax.lax.pmean(g, "data"), "data"),
        STDDEV / DEVICES**2,
    ),
    # The sum of eight equal means is the sum, and the noise is for a mean.
    "sum_of_means": (lambda g: psum(jax.lax.pmean(g, "data")), STDDEV / DEVICES),
    # `ppermute` gives zeros to devices that nobody sends to: two slots of eight are summed.
    "parts_of_two_devices_alone": lambda g: psum(jax.lax.ppermute(g, "data", [(0, 0), (1, 1)])),
    # A loop sums the sum four times: each example counts 8 ** 4 times.
    "summed_until_it_is_large": lambda g: jax.lax.fori_loop(0, 4, lambda _, g: psum(g), g),
    # In the other branch a device's own part goes on, which stands for two examples.
    "sum_in_one_branch_alone": lambda g: jax.lax.cond(
        psum(jnp.ones(())) > 8, lambda: psum(g), lambda: scaled(1.0, g)
    ),
    "table_of_weights": lambda g: psum(scaled(jnp.asarray([1.0, 0.0] * 4)[device()], g)),
    "gathered_signs": lambda g: jax.tree.map(
        lambda a: jnp.tensordot(SIGNS, jax.lax.all_gather(a, "data"), 1), g
    ),
    "neighbors": lambda g: psum(
        added(g, jax.lax.ppermute(g, "data", [(i, (i + 1) % 8) for i in range(8)]))
    ),
    "carried_and_summed_again": (
        lambda g: jax.lax.fori_loop(0, 2, lambda _, t: psum(added(t, g)), zero_sums()),
        2 * STDDEV,
    ),
    "one_branch": lambda g: jax.lax.cond(
        psum(jnp.ones(())) > 8, lambda: psum(g), lambda: scaled(1.0, g)
    ),
}

EACH = {
    # The batch is not spread: all eight devices sum all examples.
    "the_whole_batch_on_every_device": lambda: over_devices(
        lambda model, x, y, mask: psum(clipped()(model, x, y, is_padding_example=mask)), batch=P()
    ),
    # The batch is spread over both axes: what leaves is the sum of one half.
    "sum_over_one_of_two_axes": lambda: over_devices(
        lambda model, x, y, mask: jax.lax.psum(
            clipped()(model, x, y, is_padding_example=mask), "data"
        ),
        mesh_of("auto", data=4, more=2),
        batch=P(("data", "more")),
    ),
    # Replacing an example moves a sum twice as far as leaving it out.
    "privatizer_of_another_relation": lambda: chained()._replace(
        plan=plan_under(NeighboringRelation.REPLACE_ONE)
    ),
    "columns": columns,
    "columns_in_a_scan": columns_in_a_scan,
    "key_summed_over_devices": lambda: beside(
        key_summed_over_devices, plan=dp.PrivacyPlan(0.5, 10, 1.0, 1e-5)
    ),
    "aux_returned": aux_returned,
    "reduced_on_plateau": reduced_on_plateau,
    "sum_of_the_step_before": sum_of_the_step_before,
    "spying_rule": spying_rule,
    "closed_over_by_a_module": closed_over_by_a_module,
    # The loss is weighted by a statistic of as many labels as the data set has examples.
    "closed_over_by_the_loss": lambda: made(
        lambda model, x, y: (
            jnp.mean(jnp.arange(NUM_EXAMPLES) % CLASSES == y.argmax())
            * LABELS.mean()
            * squared_error(model, x, y)
        )
    ),
    # A call takes 20 steps, and the plan speaks of 10.
    "more_steps_than_the_plan_has": lambda: epoch_by(turn, 20),
    "noise_of_another_plan": lambda: chained(
        plan=dp.PrivacyPlan(0.5, 10, PLAN.noise_multiplier / 2, 1e-5)
    )._replace(plan=PLAN),
    # Only the mask is an argument; inputs and targets are constants of the program.
    "batch_closed_over_beside_its_mask": lambda: by_hand(
        lambda model, state, mask: updated(
            model,
            state,
            with_noise(clipped()(model, *data()[:2], is_padding_example=mask), state.key),
        ),
        batch=data()[2:],
        private=(2,),
    ),
}

OVER_DEVICES = {
    # The axis `model` holds copies: each example counts twice.
    "sum_over_an_axis_that_has_no_examples": (
        lambda model, x, y, mask: jax.lax.psum(
            clipped()(model, x, y, is_padding_example=mask), ("data", "model")
        ),
        mesh_of("auto", data=4, model=2),
    ),
    # An example that moves to the next device is differentiated at another model.
    "another_model_on_each": lambda model, x, y, mask: psum(
        clipped()(
            jax.tree.map(lambda a: a * (1 + device()) if eqx.is_array(a) else a, model),
            x,
            y,
            is_padding_example=mask,
        )
    ),
    "another_loss_on_odd_ones": lambda model, x, y, mask: psum(
        jax.tree.map(
            lambda a, b: jnp.where(device() % 2 == 1, a, b),
            clipped()(model, x, y, is_padding_example=mask),
            clipped(absolute_error)(model, x, y, is_padding_example=mask),
        )
    ),
    "mean_over_real_examples": lambda model, x, y, mask: scaled(
        1 / jnp.maximum(psum(jnp.sum(~mask)), 1),
        psum(clipped(normalize_by=1.0)(model, x, y, is_padding_example=mask)),
    ),
    "one_slot_on_all": lambda model, *batch: psum(
        (lambda x, y, mask: clipped()(model, x, y, is_padding_example=mask))(
            *(jax.lax.all_gather(leaf, "data", tiled=True)[:1] for leaf in batch)
        )
    ),
    "standardized_over_all": lambda model, x, y, mask: psum(
        clipped()(model, x - jax.lax.pmean(x.mean(0), "data"), y, is_padding_example=mask)
    ),
}

WEIGHTED = {
    # The first four slots count: an example that is left out moves the fifth into them.
    "weights_concatenated": lambda key: jnp.concatenate([jnp.ones(4), jnp.zeros(4)]),
    # The same, by `jnp.pad`.
    "weights_padded": lambda key: jnp.pad(jnp.ones(4), (0, 4)),
    # Slot i has the weight i: all behind an example that is left out get another one.
    "ramp_by_map": lambda key: jax.lax.map(lambda i: 1.0 * i, jnp.arange(SLOTS)),
    # The same, by the carry of a scan.
    "ramp_by_a_counter": lambda key: jax.lax.scan(
        lambda i, _: (i + 1.0, i), 0.0, None, length=SLOTS
    )[1],
    # The same, by `cumsum` of ones.
    "ramp_by_a_cumulative_sum": lambda key: jnp.cumsum(jnp.ones(SLOTS)),
    # The same, by a triangular matrix times ones.
    "ramp_by_a_product": lambda key: jnp.tril(jnp.ones((SLOTS, SLOTS))) @ jnp.ones(SLOTS),
    # Slot i has the i-th smallest of eight random times.
    "sorted_times": lambda key: jnp.sort(jax.random.uniform(key, (SLOTS,))),
    # The same from the largest on, by `top_k`.
    "largest_times": lambda key: jax.lax.top_k(jax.random.uniform(key, (SLOTS,)), SLOTS)[0],
    # A random number up to the slot's own number.
    "bounds_of_slots": lambda key: jax.random.uniform(
        key, (SLOTS,), maxval=jnp.arange(SLOTS) + 1.0
    ),
    # Slot i is multiplied by the same number in every step, and that number is a constant.
    "numbers_of_a_key_that_never_changes": lambda key: jax.random.normal(
        jax.random.key(0), (SLOTS,)
    ),
}

PREPARED_BY = {
    # The first half is doubled and put before the second.
    "halves_stuck_together_again": lambda x, y, mask, key: (
        jnp.concatenate([2 * x[:4], x[4:]]),
        y,
        mask,
    ),
    # Slot 0 is set to zero: an example that is left out puts another one there.
    "the_first_slot_overwritten": lambda x, y, mask, key: (x.at[0].set(0.0), y, mask),
    # Every second slot is padding: an example that is left out brings four others back.
    "slots_of_odd_numbers_masked": lambda x, y, mask, key: (
        x,
        y,
        mask | (jnp.arange(SLOTS) % 2 == 1),
    ),
    # The slot's number is written into the example.
    "numbers_of_slots_as_a_feature": lambda x, y, mask, key: (
        x.at[:, 0].set(jnp.arange(SLOTS)),
        y,
        mask,
    ),
    # Rows of a unit matrix are added, as positions in a sequence are.
    "codes_of_slots_added": lambda x, y, mask, key: (x + jnp.eye(SLOTS, WIDTH), y, mask),
    # An example's inputs meet another one's targets: two rows change for one.
    "labels_turned_round": lambda x, y, mask, key: (x, y[::-1], mask),
    # Whether an example counts is said by another slot's mask.
    "mask_turned_round": lambda x, y, mask, key: (x, y, mask[::-1]),
    # Inputs move to other rows, by an order that all labels decide; targets do not.
    "only_inputs_sorted_by_their_label": lambda x, y, mask, key: (x[jnp.argsort(y[:, 0])], y, mask),
    "mixed_up": lambda x, y, mask, key: (
        0.7 * x + 0.3 * x[jax.random.permutation(key, SLOTS)],
        y,
        mask,
    ),
    "handed_on_twice": lambda x, y, mask, key: tuple(
        jnp.concatenate([leaf, leaf]) for leaf in (x, y, mask)
    ),
    "one_row_in_all_slots": lambda x, y, mask, key: tuple(
        leaf[jnp.zeros(SLOTS, int)] for leaf in (x, y, mask)
    ),
    "one_row_as_the_mask": lambda x, y, mask, key: (x, y, jnp.tile(x[0] > 0, 2)),
    "pairs": lambda x, y, mask, key: (
        (x.reshape(4, 2, WIDTH) * jnp.asarray([1.0, -1.0])[None, :, None]).reshape(SLOTS, WIDTH),
        y,
        mask,
    ),
    # Slot i takes a time between i / n and (i + 1) / n.
    "spread_times": lambda x, y, mask, key: (
        x + ((jax.random.uniform(key, (SLOTS,)) + jnp.arange(SLOTS)) / SLOTS)[:, None],
        y,
        mask,
    ),
    "centered_by_a_constant_batch": lambda x, y, mask, key: (x - data()[0].mean(0), y, mask),
}

WITH_ARGUMENT = {
    # The weights are not named private, but a slot's is that of whoever stands there.
    "weights_of_slots_as_an_argument": (
        lambda x, y, mask, weights, state: (x * weights[:, None], y, mask),
        jnp.ones(SLOTS),
    ),
    # Rows are taken by halves of public numbers: each row that is taken counts twice.
    "order_as_an_argument_that_repeats": (
        lambda x, y, mask, at, state: (x[at // 2], y[at // 2], mask[at // 2]),
        jnp.arange(SLOTS),
    ),
    # Weights of slots, read from a longer table from the step's number on.
    "window_of_a_public_table_at_the_step": (
        lambda x, y, mask, table, state: (
            x * jax.lax.dynamic_slice(table, (state.step,), (SLOTS,))[:, None],
            y,
            mask,
        ),
        jnp.linspace(0, 1, 64),
    ),
    # One slot after the other is left out: the slot is public, and who stands there is not.
    "the_slot_of_the_step_left_out": (
        lambda x, y, mask, _, state: (x, y, mask | (jnp.arange(SLOTS) == state.step % SLOTS)),
        jnp.zeros(()),
    ),
}

WITH_OPTIMIZER = {
    # The variance of `optax.add_noise` falls with the number of steps.
    "noise_of_optax": optax.chain(optax.add_noise(STDDEV**2, 0.55, jax.random.key(0)), OPTIMIZER),
    "of_another_gradient": optax.chain(
        PLAN.privatizer(clipped(l2_clip_norm=0.5), key=SECRET), OPTIMIZER
    ),
    "scaled_before_and_behind": optax.chain(optax.scale(10.0), NOISE, optax.scale(0.1)),
    "schedule_before": optax.chain(optax.scale_by_schedule(lambda step: 1.0 + step), NOISE),
    "on_matrices_alone": optax.chain(
        optax.masked(NOISE, lambda p: jax.tree.map(lambda a: a.ndim > 1, p)), OPTIMIZER
    ),
    "in_one_of_two_groups": one_noise_for_two_groups(),
    "behind_a_check_that_skips": optax.apply_if_finite(optax.chain(NOISE, OPTIMIZER), 3),
    "for_a_sum_that_is_not_divided": (optax.chain(NOISE, OPTIMIZER), clipped(normalize_by=1.0)),
}

OF_CLOSED_OVER = {
    "loss": lambda given, xs, ys: jax.vmap(squared_error, (None, 0, 0))(given.new, xs, ys).mean(),
    # Columns that are equal do not make rows equal.
    "equal_columns": lambda given, xs, ys: jnp.asarray(COLUMNS).mean(),
}

OF_KEPT = {
    # What stood in a slot before is added to who stands there now.
    "memory_of_slots": (
        lambda m, kept, x, *_: (0.5 * x + 0.5 * kept, x),
        jnp.zeros((SLOTS, WIDTH)),
    ),
    # A batch norm by hand: inputs are shifted by a mean over earlier batches.
    "mean_of_inputs": (
        lambda m, kept, x, *_: (x - kept, 0.9 * kept + 0.1 * x.mean(0)),
        jnp.zeros(WIDTH),
    ),
}

OF_THE_LOSS = {
    "printed": printed,
    "printed_in_a_loop": printed_in_a_loop,
    "printed_in_a_branch": printed_in_a_branch,
    "checked": checked,
}

NOISED_BY = {
    # Halves the gradient until it is short: the trip count depends on private data.
    "halved_while_it_is_long": lambda g, k: with_noise(
        jax.lax.while_loop(lambda t: optax.tree.norm(t) > 0.1, lambda t: scaled(0.5, t), g), k
    ),
    "sum_checked": lambda g, k: with_noise(
        eqx.error_if(g, optax.tree.norm(g) > 10, "the sum is large"), k
    ),
    "norm_logged": lambda g, k: (
        jax.debug.callback(lambda n: None, optax.tree.norm(g)),
        with_noise(g, k),
    )[1],
}

OF_PARAMS = {
    "as_many_steps_as_examples": lambda p, static, x, y, mask, noisy: jax.lax.fori_loop(
        0, jnp.sum(~mask), lambda _, p: moved_by(p, noisy), p
    ),
    "until_the_loss_is_low": lambda p, static, x, y, mask, noisy: jax.lax.while_loop(
        lambda p: mean_loss(p, static, x, y) > 1.0, lambda p: moved_by(p, noisy), p
    ),
    # A loop of fixed length, in which a private loss masks the rest of the turns.
    "masked_turns": lambda p, static, x, y, mask, noisy: jax.lax.fori_loop(
        0, 4, lambda _, p: moved_by(p, noisy, -0.01 * (mean_loss(p, static, x, y) > 1)), p
    ),
    "skipped_without_examples": lambda p, static, x, y, mask, noisy: jax.lax.cond(
        jnp.all(mask), lambda: p, lambda: moved_by(p, noisy)
    ),
}

WITH_MASK = {
    "none": lambda at: None,
    # Examples far from the mean of the batch are left out.
    "by_others": lambda at: at.mask | (jnp.abs(at.x - at.x.mean(0)).max(1) > 3),
    "public": lambda at: jnp.zeros(SLOTS, bool),
    "of_every_second_slot": lambda at: at.mask | (jnp.arange(SLOTS) % 2 == 1),
}

BY_INDICES = {
    # Inputs are looked up by indices, and targets are not: two rows change for one.
    "inputs_by_indices_alone": lambda x, y, index, key: (x[index], y, index < 0),
    "indices_times_zero": lambda x, y, at, key: (x[at * 0], y[at * 0], at < 0),
    "indices_behind_the_last": lambda x, y, at, key: (x[at + 100], y[at + 100], at < 0),
}

WITH_NUMBERS_OF_SLOTS = {
    "mask_that_is_not_private": lambda x, y, mask, chosen, state: (x, y, mask | (chosen > 2)),
    "targets_rolled_by_the_step": lambda x, y, mask, _, state: (
        x,
        jnp.roll(y, state.step, 0),
        mask,
    ),
    "diffusion_times": lambda x, y, mask, times, state: (jnp.cos(times)[:, None] * x, y, mask),
}

STEP_OF = {
    "batch_closed_over": batch_closed_over,
    "balanced": balanced,
    "hardest": hardest,
    "models_of_halves": models_of_halves,
    "slope": slope,
    "models_mapped": models_mapped,
    "ensemble": ensemble,
    "mask_for_one_of_two_losses": lambda at: with_noise(
        added(at.sum(), clipped(absolute_error)(at.model, at.x, at.y)), at.keys[0], 2 * STDDEV
    ),
    "one_half_or_the_other": lambda at: with_noise(
        jax.lax.cond(
            at.state.step % 2 == 0,
            lambda: in_parts(at, slice(4)),
            lambda: in_parts(at, slice(4, 8)),
        ),
        at.keys[0],
    ),
    "difference_of_halves": lambda at: with_noise(
        added(in_parts(at, slice(4)), scaled(-1.0, in_parts(at, slice(4, 8)))), at.keys[0]
    ),
    "three_of_four_strided_parts": lambda at: with_noise(
        added(*(in_parts(at, slice(i, None, 4)) for i in range(3))), at.keys[0]
    ),
}

ACCUMULATED = {
    "growing": lambda total, grads, i: 2.0 * total + grads,
    "alternating_factors": lambda total, grads, i: total + jnp.where(i % 2, -1.0, 1.0) * grads,
}

OF_DEVICES = {
    "a_noise_of_its_own": lambda g, key: with_noise(g, jax.random.fold_in(key, device())),
    "one_noise_for_all": lambda g, key: with_noise(g, key),
    "an_eighth_of_the_noise": lambda g, key: psum(
        with_noise(g, jax.random.fold_in(key, device()), STDDEV / 8)
    ),
    "noise_for_a_mean": lambda g, key: with_noise(psum(g), key, STDDEV / 8),
}

STEPS = [
    (beside, BESIDE),
    (changed_by_loss, CHANGED_BY_LOSS),
    (mixed_by, MIXED_BY),
    (keeping, KEEPING),
    (summed, SUMMED),
    (each, EACH),
    (over_devices, OVER_DEVICES),
    (weighted, WEIGHTED),
    (prepared_by, PREPARED_BY),
    (with_argument, WITH_ARGUMENT),
    (with_optimizer, WITH_OPTIMIZER),
    (of_closed_over, OF_CLOSED_OVER),
    (of_kept, OF_KEPT),
    (of_the_loss, OF_THE_LOSS),
    (noised_by, NOISED_BY),
    (of_params, OF_PARAMS),
    (with_mask, WITH_MASK),
    (by_indices, BY_INDICES),
    (with_numbers_of_slots, WITH_NUMBERS_OF_SLOTS),
    (step_of, STEP_OF),
    (accumulated, ACCUMULATED),
    (of_devices, OF_DEVICES),
]
