"""Steps that leak, and what is wrong with each in its docstring: devices, slots, closures, calls.

They hold the check to "only proven facts count": none of them may be called fine. An example that
is left out moves all behind it by one slot, so whatever a slot decides changes for all of them.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from dp_accounting import NeighboringRelation
from jax.sharding import PartitionSpec as P

import eqx_dp as dp
from tests.checks.privacy_steps import (
    CLASSES,
    EXPECTED,
    NUM_EXAMPLES,
    OPTIMIZER,
    PLAN,
    SECRET,
    SLOTS,
    STDDEV,
    WIDTH,
    absolute_error,
    added,
    by_hand,
    chained,
    clipped,
    data,
    first_state,
    leak,
    made,
    mlp,
    next_key,
    noised_by,
    on_devices,
    plan_under,
    prepared_by,
    scaled,
    squared_error,
    updated,
    with_noise,
)
from tests.checks.unproven_noise_steps import NOISE
from tests.checks.unproven_state_steps import STATE
from tests.sharding.losses import mesh_of

LEAKING = NOISE | STATE
leaking = leak(LEAKING)

DEVICES = 8


# Sums across devices by hand. Each of eight devices has one slot.


def summed(of_a_device, stddev=STDDEV):
    """One noise, outside, on what `of_a_device(grads)` makes of all devices' sums."""

    def finish(params, state, result, key):
        return updated(params, state, with_noise(result, key, stddev))

    return on_devices(lambda grads, key: of_a_device(grads), finish)


def psum(tree):
    return jax.lax.psum(tree, "data")


def device():
    return jax.lax.axis_index("data")


@leaking
def sum_of_the_sum_and_the_parts():
    """Each example counts nine times, and the noise is for two: the noise multiplier is 0.27."""
    return summed(lambda grads: psum(added(psum(grads), grads)), 2 * STDDEV)


@leaking
def sum_of_sums():
    """Each example counts eight times."""
    return summed(lambda grads: psum(psum(grads)))


@leaking
def signs_of_devices():
    """An example that is left out changes the sign of all behind it: 15 times the clip norm."""
    return summed(lambda g: psum(scaled(jnp.where(device() % 2 == 0, 1.0, -1.0), g)))


@leaking
def the_first_device_alone():
    """An example that is left out moves the next one to the first device: two change."""
    return summed(lambda g: psum(jax.tree.map(lambda a: jnp.where(device() == 0, a, 0.0), g)))


@leaking
def weights_of_devices():
    """Weights from -1 to 1 by device: all behind an example that is left out get another one."""
    return summed(lambda g: psum(scaled((device() - 3.5) / 3.5, g)))


@leaking
def weights_of_devices_from_a_table():
    """Weights are looked up: every second example is left out, and all change places."""
    table = jnp.asarray([1.0, 0.0] * 4)
    return summed(lambda grads: psum(scaled(table[device()], grads)))


@leaking
def sums_gathered_added_and_summed():
    """The gathered sums are added on each device, and the devices' equal results once more."""
    return summed(lambda g: psum(jax.tree.map(lambda a: jax.lax.all_gather(a, "data").sum(0), g)))


@leaking
def gathered_sums_with_alternating_signs():
    """Two neighbors' slots have opposite signs: 15 times the clip norm."""
    signs = np.resize(np.float32([1, -1]), DEVICES)
    return summed(
        lambda g: jax.tree.map(lambda a: jnp.tensordot(signs, jax.lax.all_gather(a, "data"), 1), g)
    )


@leaking
def one_of_the_gathered_sums():
    """One device's sum: an example that is left out changes two of its examples."""
    return summed(lambda g: jax.tree.map(lambda a: jax.lax.all_gather(a, "data")[3], g))


@leaking
def averaged_twice():
    """The second mean changes nothing, and the noise is divided by the devices twice."""
    return summed(lambda g: jax.lax.pmean(jax.lax.pmean(g, "data"), "data"), STDDEV / DEVICES**2)


@leaking
def sum_of_means():
    """The sum of eight equal means is the sum, and the noise is for a mean."""
    return summed(lambda g: psum(jax.lax.pmean(g, "data")), STDDEV / DEVICES)


@leaking
def parts_and_their_neighbors():
    """Each device adds its neighbor's part: every example counts twice."""
    turn = [(i, (i + 1) % DEVICES) for i in range(DEVICES)]
    return summed(lambda g: psum(added(g, jax.lax.ppermute(g, "data", turn))))


@leaking
def parts_of_two_devices_alone():
    """`ppermute` gives zeros to devices that nobody sends to: two slots of eight are summed."""
    return summed(lambda g: psum(jax.lax.ppermute(g, "data", [(0, 0), (1, 1)])))


@leaking
def summed_until_it_is_large():
    """A loop sums the sum four times: each example counts 8 ** 4 times."""
    return summed(lambda g: jax.lax.fori_loop(0, 4, lambda _, g: psum(g), g))


@leaking
def sum_carried_and_summed_again():
    """The running total is summed over devices in each turn, old terms included."""

    def of_a_device(grads):
        zeros = jax.tree.map(jnp.zeros_like, grads)
        return jax.lax.fori_loop(0, 2, lambda _, total: psum(added(total, grads)), zeros)

    return summed(of_a_device, 2 * STDDEV)


@leaking
def sum_in_one_branch_alone():
    """In the other branch a device's own part goes on, which stands for two examples."""
    return summed(
        lambda g: jax.lax.cond(psum(jnp.ones(())) > 8, lambda: psum(g), lambda: scaled(1.0, g))
    )


@leaking
def each_device_releases_its_own_sum():
    """An example that is left out moves all behind it to the next device: all releases change."""

    def noisy(grads, key):
        own = with_noise(grads, jax.random.fold_in(key, device()))
        return jax.tree.map(lambda leaf: leaf[None], own)

    def finish(params, state, result, key):
        return updated(params, state, jax.tree.map(lambda leaf: leaf.sum(0), result))

    return on_devices(noisy, finish, P("data"))


EXAMPLES = P("data")


def over_devices(part, mesh=None, stddev=STDDEV, batch=EXAMPLES):
    """`part(model, x, y, mask)` on each device, and one noise on its result."""
    params, static = eqx.partition(mlp(), eqx.is_array)
    mapped = jax.shard_map(
        lambda params, *batch: part(eqx.combine(params, static), *batch),
        mesh=mesh_of("auto", data=DEVICES) if mesh is None else mesh,
        in_specs=(P(), batch, batch, batch),
        out_specs=P(),
        check_vma=False,
    )

    def step(params, state, x, y, mask):
        key, state = next_key(state)
        grads = mapped(params, x, y, mask)
        return updated(params, state, with_noise(grads, key, stddev))

    return by_hand(step, model=params, state=first_state(params))


@leaking
def another_public_model_on_each_device():
    """An example that moves to the next device is differentiated at another model."""

    def part(model, x, y, mask):
        moved = jax.tree.map(lambda a: a * (1 + device()) if eqx.is_array(a) else a, model)
        return psum(clipped()(moved, x, y, is_padding_example=mask))

    return over_devices(part)


@leaking
def another_loss_on_odd_devices():
    """Which loss an example has depends on its device."""

    def part(model, x, y, mask):
        losses = [clipped(), clipped(absolute_error)]
        one, other = (f(model, x, y, is_padding_example=mask) for f in losses)
        odd = device() % 2 == 1
        return psum(jax.tree.map(lambda a, b: jnp.where(odd, a, b), one, other))

    return over_devices(part)


@leaking
def the_whole_batch_on_every_device():
    """The batch is not spread: all eight devices sum all examples."""
    return over_devices(
        lambda model, x, y, mask: psum(clipped()(model, x, y, is_padding_example=mask)), batch=P()
    )


@leaking
def sum_over_an_axis_that_has_no_examples():
    """The axis `model` holds copies: each example counts twice."""
    return over_devices(
        lambda model, x, y, mask: jax.lax.psum(
            clipped()(model, x, y, is_padding_example=mask), ("data", "model")
        ),
        mesh_of("auto", data=4, model=2),
    )


@leaking
def sum_over_one_of_two_axes():
    """The batch is spread over both axes: what leaves is the sum of one half."""
    return over_devices(
        lambda model, x, y, mask: jax.lax.psum(
            clipped()(model, x, y, is_padding_example=mask), "data"
        ),
        mesh_of("auto", data=4, more=2),
        batch=P(("data", "more")),
    )


@leaking
def mean_over_real_examples_of_all_devices():
    """The divisor is the number of real examples, which one example changes."""

    def part(model, x, y, mask):
        total = psum(clipped(normalize_by=1.0)(model, x, y, is_padding_example=mask))
        return scaled(1 / jnp.maximum(psum(jnp.sum(~mask)), 1), total)

    return over_devices(part)


@leaking
def one_slot_copied_to_all_devices():
    """Every device takes the first slot of the whole batch: one example counts eight times."""

    def part(model, x, y, mask):
        first = (jax.lax.all_gather(leaf, "data", tiled=True)[:1] for leaf in (x, y, mask))
        x, y, mask = first
        return psum(clipped()(model, x, y, is_padding_example=mask))

    return over_devices(part)


@leaking
def batch_standardized_over_devices():
    """Each example is shifted by the mean over all devices before it is clipped."""

    def part(model, x, y, mask):
        x = x - jax.lax.pmean(x.mean(0), "data")
        return psum(clipped()(model, x, y, is_padding_example=mask))

    return over_devices(part)


@leaking
def sum_over_mapped_chunks_and_over_all():
    """`vmap` with an axis name: each chunk gets the sum of all, and the four are added."""

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        parts = jax.tree.map(lambda a: a.reshape(4, 2, *a.shape[1:]), (x, y, mask))
        sums = jax.lax.map(
            lambda part: clipped()(model, *part[:2], is_padding_example=part[2]), parts
        )
        sums = jax.vmap(lambda g: jax.lax.psum(g, "chunk"), axis_name="chunk")(sums)
        total = jax.tree.map(lambda leaf: leaf.sum(0), sums)
        return updated(model, state, with_noise(total, key))

    return by_hand(step)


# Weights of slots.


def weighted(weights_of):
    """Examples times `weights_of(key)`, a number for each slot."""
    return prepared_by(lambda x, y, mask, key: (x * weights_of(key)[:, None], y, mask))


@leaking
def weights_concatenated():
    """The first four slots count: an example that is left out moves the fifth into them."""
    return weighted(lambda key: jnp.concatenate([jnp.ones(4), jnp.zeros(4)]))


@leaking
def weights_padded():
    """The same, by `jnp.pad`."""
    return weighted(lambda key: jnp.pad(jnp.ones(4), (0, 4)))


@leaking
def ramp_by_map():
    """Slot i has the weight i: all behind an example that is left out get another one."""
    return weighted(lambda key: jax.lax.map(lambda i: 1.0 * i, jnp.arange(SLOTS)))


@leaking
def ramp_by_a_counter():
    """The same, by the carry of a scan."""
    return weighted(lambda key: jax.lax.scan(lambda i, _: (i + 1.0, i), 0.0, None, length=SLOTS)[1])


@leaking
def ramp_by_a_cumulative_sum():
    """The same, by `cumsum` of ones."""
    return weighted(lambda key: jnp.cumsum(jnp.ones(SLOTS)))


@leaking
def ramp_by_an_associative_scan():
    """The same, by a scan in parallel."""
    return weighted(lambda key: jax.lax.associative_scan(jnp.add, jnp.ones(SLOTS)))


@leaking
def ramp_by_written_slots():
    """The same, written slot by slot in a loop."""
    return weighted(
        lambda key: jax.lax.fori_loop(0, SLOTS, lambda i, w: w.at[i].set(i), jnp.zeros(SLOTS))
    )


@leaking
def ramp_by_a_product():
    """The same, by a triangular matrix times ones."""
    return weighted(lambda key: jnp.tril(jnp.ones((SLOTS, SLOTS))) @ jnp.ones(SLOTS))


@leaking
def ramp_as_a_constant():
    """The same, as an array of numpy that the step closes over."""
    ramp = np.linspace(0, 1, SLOTS, dtype=np.float32)
    return weighted(lambda key: ramp)


@leaking
def decay_by_a_loop():
    """Half the weight from slot to slot, by a product that a scan carries."""
    return weighted(lambda key: jax.lax.scan(lambda w, _: (0.5 * w, w), 1.0, None, length=SLOTS)[1])


@leaking
def sorted_times():
    """Slot i has the i-th smallest of eight random times."""
    return weighted(lambda key: jnp.sort(jax.random.uniform(key, (SLOTS,))))


@leaking
def largest_times():
    """The same from the largest on, by `top_k`."""
    return weighted(lambda key: jax.lax.top_k(jax.random.uniform(key, (SLOTS,)), SLOTS)[0])


@leaking
def random_walk_along_the_slots():
    """Random steps added up: the weights of later slots are larger in expectation."""
    return weighted(lambda key: jnp.cumsum(jax.random.exponential(key, (SLOTS,))))


@leaking
def bounds_of_slots():
    """A random number up to the slot's own number."""
    return weighted(lambda key: jax.random.uniform(key, (SLOTS,), maxval=jnp.arange(SLOTS) + 1.0))


@leaking
def numbers_of_a_key_that_never_changes():
    """Slot i is multiplied by the same number in every step, and that number is a constant."""
    return weighted(lambda key: jax.random.normal(jax.random.key(0), (SLOTS,)))


@leaking
def every_second_slot_negative():
    """Slots in pairs, by a reshape: the second of each pair changes its sign."""

    def prepare(x, y, mask, key):
        pairs = x.reshape(4, 2, WIDTH) * jnp.asarray([1.0, -1.0])[None, :, None]
        return pairs.reshape(SLOTS, WIDTH), y, mask

    return prepared_by(prepare)


@leaking
def two_halves_with_a_factor_each():
    """The second half is negative, by `vmap` over halves and factors."""

    def prepare(x, y, mask, key):
        halves = jax.vmap(lambda f, x: f * x)(jnp.asarray([1.0, -1.0]), x.reshape(2, 4, WIDTH))
        return halves.reshape(SLOTS, WIDTH), y, mask

    return prepared_by(prepare)


@leaking
def halves_stuck_together_again():
    """The first half is doubled and put before the second."""
    return prepared_by(lambda x, y, mask, key: (jnp.concatenate([2 * x[:4], x[4:]]), y, mask))


@leaking
def the_first_slot_overwritten():
    """Slot 0 is set to zero: an example that is left out puts another one there."""
    return prepared_by(lambda x, y, mask, key: (x.at[0].set(0.0), y, mask))


@leaking
def slots_of_odd_numbers_masked():
    """Every second slot is padding: an example that is left out brings four others back."""
    return prepared_by(lambda x, y, mask, key: (x, y, mask | (jnp.arange(SLOTS) % 2 == 1)))


@leaking
def numbers_of_slots_as_a_feature():
    """The slot's number is written into the example."""
    return prepared_by(lambda x, y, mask, key: (x.at[:, 0].set(jnp.arange(SLOTS)), y, mask))


@leaking
def codes_of_slots_added():
    """Rows of a unit matrix are added, as positions in a sequence are."""
    return prepared_by(lambda x, y, mask, key: (x + jnp.eye(SLOTS, WIDTH), y, mask))


@leaking
def labels_turned_round():
    """An example's inputs meet another one's targets: two rows change for one."""
    return prepared_by(lambda x, y, mask, key: (x, y[::-1], mask))


@leaking
def mask_turned_round():
    """Whether an example counts is said by another slot's mask."""
    return prepared_by(lambda x, y, mask, key: (x, y, mask[::-1]))


@leaking
def labels_shifted_by_the_step():
    """Targets are rolled by a public number, and inputs are not."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        grads = grad_fn(model, x, jnp.roll(y, state.step, 0), is_padding_example=mask)
        return updated(model, state, with_noise(grads, key))

    return by_hand(step)


@leaking
def only_inputs_sorted_by_their_label():
    """Inputs move to other rows, by an order that all labels decide; targets do not."""
    return prepared_by(lambda x, y, mask, key: (x[jnp.argsort(y[:, 0])], y, mask))


def with_argument(prepare, argument, **named):
    """An honest step on `prepare(x, y, mask, argument, state)`; the argument is not private."""
    grad_fn = clipped()

    def step(model, state, x, y, mask, argument):
        key, state = next_key(state)
        x, y, mask = prepare(x, y, mask, argument, state)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        return updated(model, state, with_noise(grads, key))

    return by_hand(step, batch=(*data(), argument), **named)


@leaking
def weights_of_slots_as_an_argument():
    """The weights are not named private, but a slot's is that of whoever stands there."""
    return with_argument(
        lambda x, y, mask, weights, state: (x * weights[:, None], y, mask), jnp.ones(SLOTS)
    )


@leaking
def diffusion_times_as_an_argument():
    """A time for each slot, and noise in the inputs by it: all behind a left-out one change."""

    def prepare(x, y, mask, times, state):
        return jnp.cos(times)[:, None] * x + jnp.sin(times)[:, None], y, mask

    return with_argument(prepare, jnp.linspace(0, 1, SLOTS))


@leaking
def weights_of_the_loss_as_an_argument():
    """The engine gets them beside the examples: one for each slot."""
    grad_fn = clipped(lambda model, x, y, weight: weight * squared_error(model, x, y))

    def step(model, state, x, y, mask, weights):
        key, state = next_key(state)
        grads = grad_fn(model, x, y, weights, is_padding_example=mask)
        return updated(model, state, with_noise(grads, key))

    return by_hand(step, batch=(*data(), jnp.ones(SLOTS)))


@leaking
def mask_as_an_argument_that_is_not_private():
    """Which slots count is public and fixed: the examples in them change when one is left out."""
    grad_fn = clipped()

    def step(model, state, x, y, mask, chosen):
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=mask | chosen)
        return updated(model, state, with_noise(grads, key))

    return by_hand(step, batch=(*data(), jnp.zeros(SLOTS, bool)))


@leaking
def order_as_an_argument_that_repeats():
    """Rows are taken by halves of public numbers: each row that is taken counts twice."""
    return with_argument(
        lambda x, y, mask, at, state: (x[at // 2], y[at // 2], mask[at // 2]), jnp.arange(SLOTS)
    )


@leaking
def window_of_a_public_table_at_the_step():
    """Weights of slots, read from a longer table from the step's number on."""
    return with_argument(
        lambda x, y, mask, table, state: (
            x * jax.lax.dynamic_slice(table, (state.step,), (SLOTS,))[:, None],
            y,
            mask,
        ),
        jnp.linspace(0, 1, 64),
    )


@leaking
def the_slot_of_the_step_left_out():
    """One slot after the other is left out: the slot is public, and who stands there is not."""
    return with_argument(
        lambda x, y, mask, _, state: (x, y, mask | (jnp.arange(SLOTS) == state.step % SLOTS)),
        jnp.zeros(()),
    )


@leaking
def memory_of_slots_in_the_state():
    """What stood in a slot before is added to who stands there now, and the memory stays raw."""
    grad_fn = clipped()

    def step(model, states, x, y, mask):
        memory, state = states
        key, state = next_key(state)
        x = 0.5 * x + 0.5 * memory
        grads = grad_fn(model, x, y, is_padding_example=mask)
        model, state = updated(model, state, with_noise(grads, key))
        return model, (x, state)

    return by_hand(step, state=(jnp.zeros((SLOTS, WIDTH)), first_state()))


@leaking
def a_parameter_for_each_slot():
    """The model has a row for each slot of a batch, which is added to who stands there."""
    grad_fn = clipped(lambda model, x, y: squared_error(model[0], x, y))

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        grads = grad_fn(model, x + model[1], y, is_padding_example=mask)
        return updated(model, state, with_noise(grads, key))

    return by_hand(step, model=(mlp(), jnp.ones((SLOTS, WIDTH))))


@leaking
def another_public_model_for_each_half():
    """Two models, each on its half: an example that is left out moves one to the other half."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        other = jax.tree.map(lambda a: -a if eqx.is_array(a) else a, model)
        parts = [
            grad_fn(m, x[at], y[at], is_padding_example=mask[at])
            for m, at in ((model, slice(4)), (other, slice(4, 8)))
        ]
        return updated(model, state, with_noise(added(*parts), key))

    return by_hand(step)


@leaking
def two_models_on_a_half_each_with_noise():
    """Each model's half changes by two examples, and there are two releases."""
    grad_fn = clipped()

    def step(models, states, x, y, mask):
        new = []
        for model, state, at in zip(models, states, (slice(4), slice(4, 8)), strict=True):
            key, state = next_key(state)
            grads = grad_fn(model, x[at], y[at], is_padding_example=mask[at])
            new.append(updated(model, state, with_noise(grads, key)))
        return tuple(zip(*new, strict=True))

    states = (first_state(key=jax.random.key(5)), first_state(key=jax.random.key(6)))
    return by_hand(step, model=(mlp(), mlp()), state=states)


@leaking
def sum_over_four_augmentations_by_vmap():
    """Each example counts four times, once for each augmentation."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        carried, key, *keys = jax.random.split(state.key, 6)

        def turn(key):
            shifted = x + jax.random.normal(key, x.shape)
            return grad_fn(model, shifted, y, is_padding_example=mask)

        sums = jax.lax.map(turn, jnp.stack(keys))
        total = jax.tree.map(lambda leaf: leaf.sum(0), sums)
        return updated(model, state._replace(key=carried), with_noise(total, key))

    return by_hand(step)


@leaking
def chunks_that_share_a_row():
    """Windows by a gather of public indices: rows 3 and 4 are in both."""
    grad_fn = clipped()
    windows = jnp.asarray([[0, 1, 2, 3, 4], [3, 4, 5, 6, 7]])

    def step(model, state, x, y, mask):
        key, state = next_key(state)

        def add(total, at):
            grads = grad_fn(model, x[at], y[at], is_padding_example=mask[at])
            return added(total, grads), None

        zeros = jax.tree.map(jnp.zeros_like, grad_fn.trainable(model))
        total, _ = jax.lax.scan(add, zeros, windows)
        return updated(model, state, with_noise(total, key))

    return by_hand(step)


@leaking
def three_of_four_strided_parts():
    """Every fourth row from 0, 1 and 2 on: rows that move enter and leave all three parts."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        parts = [grad_fn(model, x[i::4], y[i::4], is_padding_example=mask[i::4]) for i in range(3)]
        return updated(model, state, with_noise(added(*parts), key))

    return by_hand(step)


@leaking
def strided_parts_one_of_them_twice():
    """Parts 0, 1, 2 and again 2: no rows are disjoint in the last two."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        parts = [
            grad_fn(model, x[i::4], y[i::4], is_padding_example=mask[i::4]) for i in (0, 1, 2, 2)
        ]
        return updated(model, state, with_noise(added(*parts), key))

    return by_hand(step)


@leaking
def accumulated_with_a_growing_weight():
    """The total is doubled in each turn: the first part counts eight times."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        parts = jax.tree.map(lambda a: a.reshape(4, 2, *a.shape[1:]), (x, y, mask))

        def add(total, part):
            x, y, mask = part
            grads = grad_fn(model, x, y, is_padding_example=mask)
            return added(scaled(2.0, total), grads), None

        zeros = jax.tree.map(jnp.zeros_like, grad_fn.trainable(model))
        total, _ = jax.lax.scan(add, zeros, parts)
        return updated(model, state, with_noise(total, key))

    return by_hand(step)


@leaking
def accumulated_at_a_model_that_moves():
    """Local steps: the model of a later part depends on the earlier parts, without noise."""
    grad_fn = clipped()
    params, static = eqx.partition(mlp(), eqx.is_array)

    def step(params, state, x, y, mask):
        key, state = next_key(state)
        parts = jax.tree.map(lambda a: a.reshape(4, 2, *a.shape[1:]), (x, y, mask))

        def add(total, part):
            x, y, mask = part
            model = eqx.combine(added(params, scaled(-0.1, total)), static)
            return added(total, grad_fn(model, x, y, is_padding_example=mask)), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        total, _ = jax.lax.scan(add, zeros, parts)
        return updated(params, state, with_noise(total, key))

    return by_hand(step, model=params, state=first_state(params))


# Data that no argument holds.


@leaking
def metrics_of_data_closed_over():
    """The step evaluates the new model on training data that it closes over."""
    grad_fn = clipped()
    xs, ys, _ = data()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        model, state = updated(model, state, with_noise(grads, key))
        return model, state, {"loss": jax.vmap(squared_error, (None, 0, 0))(model, xs, ys).mean()}

    return by_hand(step)


@leaking
def class_weights_of_labels_closed_over():
    """How often a class is in the data set weights the loss of each example."""
    _, ys, _ = data()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        weights = 1 / (1 + jax.nn.one_hot(ys.argmax(1), CLASSES).sum(0))
        grad_fn = clipped(lambda model, x, y: weights[y.argmax()] * squared_error(model, x, y))
        grads = grad_fn(model, x, y, is_padding_example=mask)
        return updated(model, state, with_noise(grads, key))

    return by_hand(step)


@leaking
def mean_of_inputs_closed_over():
    """Inputs are centered by the mean of an array of batch size that is no argument."""
    xs = data()[0]
    return prepared_by(lambda x, y, mask, key: (x - xs.mean(0), y, mask))


@leaking
def batch_closed_over_beside_its_mask():
    """Only the mask is an argument; inputs and targets are constants of the program."""
    grad_fn = clipped()
    xs, ys, _ = data()

    def step(model, state, mask):
        key, state = next_key(state)
        grads = grad_fn(model, xs, ys, is_padding_example=mask)
        return *updated(model, state, with_noise(grads, key)), ys.mean()

    return by_hand(step, batch=data()[2:], private=(2,))


class Training(eqx.Module):
    """A step that has the inputs of its data set in a field."""

    xs: jax.Array

    def __call__(self, model, state, x, y, mask):
        key, state = next_key(state)
        grads = clipped()(model, x - self.xs.mean(0), y, is_padding_example=mask)
        return updated(model, state, with_noise(grads, key))


@leaking
def data_in_a_field_of_the_step():
    """The step is a module, and inputs are centered by what one of its fields holds."""
    return by_hand(lambda *args: None)._replace(fn=Training(data()[0]))


@leaking
def data_set_closed_over_by_the_loss_of_a_made_step():
    """The loss is weighted by a statistic of as many labels as the data set has examples."""
    labels = jnp.arange(NUM_EXAMPLES) % CLASSES

    def loss(model, x, y):
        return jnp.mean(labels == y.argmax()) * squared_error(model, x, y)

    return made(loss)


# Plans, relations, calls.


@leaking
def privatizer_of_another_plan():
    """The noise is that of a plan with half the noise multiplier."""
    weaker = dp.PrivacyPlan(0.5, 10, PLAN.noise_multiplier / 2, 1e-5)
    return chained(plan=weaker)._replace(plan=PLAN)


@leaking
def privatizer_of_another_gradient():
    """The noise is for a clip norm of 0.5, and the gradient has one of 1."""
    optimizer = optax.chain(PLAN.privatizer(clipped(l2_clip_norm=0.5), key=SECRET), OPTIMIZER)
    return with_optimizer(optimizer)


@leaking
def privatizer_of_another_relation():
    """Replacing an example moves a sum twice as far as leaving it out."""
    return chained()._replace(plan=plan_under(NeighboringRelation.REPLACE_ONE))


@leaking
def privatizer_scaled_behind_and_before():
    """The sum is multiplied by ten before the noise, and divided behind it."""
    optimizer = optax.chain(
        optax.scale(10.0), PLAN.privatizer(clipped(), key=SECRET), optax.scale(0.1), OPTIMIZER
    )
    return with_optimizer(optimizer)


@leaking
def schedule_before_the_noise():
    """The sum grows with the step's number, and the noise does not."""
    optimizer = optax.chain(
        optax.scale_by_schedule(lambda step: 1.0 + step),
        PLAN.privatizer(clipped(), key=SECRET),
        OPTIMIZER,
    )
    return with_optimizer(optimizer)


def with_optimizer(optimizer, grad_fn=None):
    """A step by hand of an optimizer that holds the noise, wherever in it."""
    grad_fn = clipped() if grad_fn is None else grad_fn

    def step(model, opt_state, x, y, mask):
        grads = grad_fn(model, x, y, is_padding_example=mask)
        updates, opt_state = optimizer.update(grads, opt_state, grad_fn.trainable(model))
        return eqx.apply_updates(model, updates), opt_state

    return by_hand(step, state=optimizer.init(grad_fn.trainable(mlp())))


@leaking
def privatizer_on_matrices_alone():
    """`optax.masked` leaves the biases' sums as they are."""
    privatizer = optax.masked(
        PLAN.privatizer(clipped(), key=SECRET), lambda p: jax.tree.map(lambda a: a.ndim > 1, p)
    )
    return with_optimizer(optax.chain(privatizer, OPTIMIZER))


@leaking
def privatizer_in_one_of_two_groups():
    """The other group of `multi_transform` has an optimizer without noise."""
    parts = {
        "matrix": optax.chain(PLAN.privatizer(clipped(), key=SECRET), OPTIMIZER),
        "vector": optax.sgd(0.1),
    }
    return with_optimizer(
        optax.multi_transform(
            parts, lambda p: jax.tree.map(lambda a: "matrix" if a.ndim > 1 else "vector", p)
        )
    )


@leaking
def privatizer_behind_a_check_that_skips():
    """`apply_if_finite` looks at the raw sum, and draws no noise if it does not like it."""
    inner = optax.chain(PLAN.privatizer(clipped(), key=SECRET), OPTIMIZER)
    return with_optimizer(optax.apply_if_finite(inner, 3))


@leaking
def noise_of_optax():
    """The variance of `optax.add_noise` falls with the number of steps."""
    return with_optimizer(
        optax.chain(optax.add_noise(STDDEV**2, 0.55, jax.random.key(0)), OPTIMIZER)
    )


@leaking
def more_steps_in_a_call_than_the_plan_has():
    """A call takes 20 steps, and the plan speaks of 10."""
    grad_fn = clipped()
    params, static = eqx.partition(mlp(), eqx.is_inexact_array)

    def epoch(params, state, xs, ys, masks):
        def step(carry, batch):
            params, state = carry
            x, y, mask = batch
            key, state = next_key(state)
            grads = grad_fn(eqx.combine(params, static), x, y, is_padding_example=mask)
            return updated(params, state, with_noise(grads, key)), None

        return jax.lax.scan(step, (params, state), (xs, ys, masks))[0]

    batch = tuple(jnp.stack([leaf] * 20) for leaf in data())
    return by_hand(epoch, model=params, state=first_state(params), batch=batch)


@leaking
def ensemble_with_the_noise_of_one():
    """Four models are trained on one batch, each with the noise for one release."""
    grad_fn = clipped()

    def step(models, state, x, y, mask):
        key, state = next_key(state)
        keys = jax.random.split(key, len(models))
        new = []
        for model, key in zip(models, keys, strict=True):
            noisy = with_noise(grad_fn(model, x, y, is_padding_example=mask), key)
            new.append(eqx.apply_updates(model, scaled(-0.1, noisy)))
        return new, state

    return by_hand(step, model=[mlp() for _ in range(4)], state=first_state())


@leaking
def sum_that_is_not_divided():
    """The noise is for a sum divided by the expected batch size, and another call gave it."""
    sums = clipped(normalize_by=1.0)
    optimizer = optax.chain(PLAN.privatizer(clipped(normalize_by=EXPECTED), key=SECRET), OPTIMIZER)
    return with_optimizer(optimizer, sums)


@leaking
def directional_derivative_of_the_sum():
    """How the clipped sum changes with the model: no clip norm bounds that."""
    grad_fn = clipped()
    params, static = eqx.partition(mlp(), eqx.is_array)

    def step(params, state, x, y, mask):
        key, state = next_key(state)

        def total(params):
            return grad_fn(eqx.combine(params, static), x, y, is_padding_example=mask)

        _, slope = jax.jvp(total, (params,), (params,))
        return updated(params, state, with_noise(slope, key))

    return by_hand(step, model=params, state=first_state(params))


@leaking
def models_mapped_over_one_batch():
    """The engine under `vmap` over four models: the four sums share one noise for one sum."""
    grad_fn = clipped()
    params, static = eqx.partition(mlp(), eqx.is_array)

    def step(params, state, x, y, mask):
        key, state = next_key(state)

        def total(params):
            return grad_fn(eqx.combine(params, static), x, y, is_padding_example=mask)

        many = jax.tree.map(lambda a: jnp.stack([a, 2 * a, 3 * a, 4 * a]), params)
        sums = jax.vmap(total)(many)
        return updated(params, state, with_noise(jax.tree.map(lambda a: a.sum(0), sums), key))

    return by_hand(step, model=params, state=first_state(params))


@leaking
def noise_without_a_plan_for_it():
    """Noise on the mean of the gradients of examples that nothing has clipped."""

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        grads = jax.vmap(eqx.filter_grad(squared_error), (None, 0, 0))(model, x, y)
        mean = jax.tree.map(lambda leaf: leaf.mean(0), grads)
        return updated(model, state, with_noise(mean, key))

    return by_hand(step)


@leaking
def noise_before_the_clipping():
    """Each example's gradient gets noise, and the noisy ones are clipped: the sum has less."""

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        grads = jax.vmap(eqx.filter_grad(squared_error), (None, 0, 0))(model, x, y)
        noisy = with_noise(grads, key)
        norms = jnp.sqrt(sum(jnp.sum(a**2, range(1, a.ndim)) for a in jax.tree.leaves(noisy)))
        factors = jnp.where(mask, 0.0, jnp.minimum(1.0, 1 / norms)) / EXPECTED
        total = jax.tree.map(lambda leaf: jnp.tensordot(factors, leaf, 1), noisy)
        return updated(model, state, total)

    return by_hand(step)


@leaking
def clipped_twice_with_the_smaller_norm_for_the_noise():
    """The sum of two losses' clipped gradients moves by 1.5, and the noise is for 0.5."""
    first, second = clipped(), clipped(absolute_error, l2_clip_norm=0.5)

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        total = added(*(f(model, x, y, is_padding_example=mask) for f in (first, second)))
        return updated(model, state, with_noise(total, key, 0.5 * STDDEV))

    return by_hand(step)


@leaking
def both_noises_of_a_public_branch_too_small():
    """Whichever branch is taken, the noise is a half or a quarter of the plan's."""

    def noisy(grads, key):
        return jax.lax.cond(
            jax.random.bernoulli(jax.random.fold_in(key, 7)),
            lambda: with_noise(grads, key, STDDEV / 2),
            lambda: with_noise(grads, key, STDDEV / 4),
        )

    return noised_by(noisy)
