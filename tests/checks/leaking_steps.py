"""Steps that leak: by what is returned, kept or shown, by slots, devices, closures, noise and keys.

Tables are by frame, and a comment says what is wrong. None of them may be called fine. An example
that is left out moves all behind it by one slot, so whatever a slot decides changes for all of
them.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.random import fold_in, key_data, normal, split, uniform

import eqx_dp as dp
from tests.checks import privacy_steps as steps
from tests.checks.honest_steps import REPLACE_ONE, ensemble, is_matrix
from tests.checks.privacy_steps import (
    NOISE,
    OPTIMIZER,
    SECRET,
    SLOTS,
    STDDEV,
    WIDTH,
    At,
    added,
    clipped,
    data,
    prepared_by,
    scaled,
    squared_error,
    step_of,
    with_noise,
    zero_sums,
)

XS, YS, MASK = data()
COLUMNS = np.repeat(np.asarray(XS)[:, :1], 3, 1)
NUMBERS = jnp.arange(SLOTS)
INDICES = {"batch": (XS, YS, NUMBERS)}  # the third argument, as many as there are rows
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)
ROOT = jax.random.key(12)
CONSTANT, STREAM = jax.random.key(0), dp.noise_stream(key=SECRET)
norm = optax.tree.norm


def leafwise(change, *trees):
    return jax.tree.map(change, *trees)


# What is returned beside an honest step.


BESIDE = {
    "mean_loss_returned": lambda at: at.values.loss.mean(),
    "sum_without_noise_returned": lambda at: at.grads,
    # A tiny noise on the mean loss, whose sensitivity nothing bounds.
    "dithered_loss": lambda at: at.noised(at.values.loss.mean(), 1e-3),
    # One bit of the sum.
    "whether_the_raw_sum_is_finite": lambda at: jnp.all(jnp.isfinite(jax.tree.leaves(at.grads)[0])),
    "size_of_the_noise": lambda at: norm(steps.minus(at.noisy, at.grads)),
    # A host function returns what nothing is known of.
    "data_of_a_host_function": lambda at: jax.pure_callback(lambda: XS.mean(), SCALAR),
    # Of data that the step closes over.
    "loss_of_closed_over": lambda at: At(at.new, None, XS, YS, MASK).losses().mean(),
    # Columns that are equal do not make rows equal.
    "equal_columns_of_closed_over": lambda at: jnp.asarray(COLUMNS).mean(),
    "stream_in_metrics": lambda at: {"stream": at.noise.state},
    "state_in_metrics": lambda at: {"1": at.state._replace(stream=at.noise.state)},
    "children_of_the_stream": lambda at: split(at.noise.state.key),
    "loss_under_a_name_that_is_disclosed": (
        lambda at: {"loss": {"mean": at.values.loss.mean()}, "ok": jnp.ones(())},
        {"more": {"disclose": ("2.ok",)}},
    ),
}


# What is kept in the state of an honest step.


KEEPING = {
    # The mean loss of the batch is in the state, under a name that the state had before.
    "metrics": (lambda kept, at: {"loss": at.values.loss.mean()}, {"loss": jnp.zeros(())}, {}),
    # Error feedback: the sum minus the noisy sum is kept, and shows the noise.
    "residual_of_the_noise": (lambda kept, at: steps.minus(at.grads, at.noisy), zero_sums()),
}


# What devices make of their sums, with one noise on the result.


OVER_DEVICES = {
    # Each example counts nine times, and the noise is for two: a multiplier of 0.27.
    "sum_of_the_sum_and_the_parts": (
        lambda at: (lambda g: steps.psum(added(steps.psum(g), g)))(at.sum()),
        {"stddev": 2 * STDDEV},
    ),
}


# What is done to examples before the engine: what primitives do to rows is in test_rows.py.


PREPARED = {
    "standardized": lambda at: at.use(x=(at.x - at.x.mean(axis=0)) / (at.x.std(axis=0) + 1e-3)),
    # The slot's number is written into the example.
    "slot_as_a_feature": lambda at: at.use(x=at.x.at[:, 0].set(NUMBERS)),
    # Rows of a unit matrix are added, as positions in a sequence are.
    "codes_of_slots_added": lambda at: at.use(x=at.x + jnp.eye(SLOTS, WIDTH)),
    # Slot i is multiplied by the same number in every step, and that number is a constant.
    "constant_random_numbers": lambda at: at.times(normal(jax.random.key(0), (SLOTS,))),
    # The targets are not named private, but a slot's is that of whoever stands there.
    "targets_as_an_argument": (lambda at: at.use(y=at.more[0]), jnp.ones((SLOTS, steps.CLASSES))),
    # One slot after the other is left out: the slot is public, and who stands there is not.
    "slot_of_the_step_masked": lambda at: at.use(mask=at.mask | (at.state.step % SLOTS == NUMBERS)),
    # Inputs are looked up by indices, and targets are not: two rows change for one.
    "inputs_by_indices_alone": (lambda at: at.use(x=at.x[at.mask], mask=at.mask < 0), INDICES),
    "no_mask": lambda at: at.use(mask=None),
    # Examples far from the mean of the batch are left out.
    "mask_by_others": lambda at: at.use(mask=at.mask | (jnp.abs(at.x - at.x.mean(0)).max(1) > 3)),
    "public_mask": lambda at: at.use(mask=jnp.zeros(SLOTS, bool)),
    "weights_of_bytes": lambda at: at.times(
        lax.bitcast_convert_type(jnp.broadcast_to(1.0 * at.state.step, 2), jnp.uint8).reshape(-1)
    ),
    "mask_and_false": lambda at: at.use(mask=at.mask & False),
}


# Losses that tell of their example.


def printed(model, x, y):
    value = squared_error(model, x, y)
    jax.debug.print("loss {}", value)
    return value


def printed_in_a_branch(model, x, y):
    """That a public number is printed tells of an example."""
    lax.cond(x[0] > 0, lambda: jax.debug.print("{}", 1), lambda: None)
    return squared_error(model, x, y)


def drawn_with_a_constant(model, x, y):
    terms = leafwise(lambda p: jnp.sum(p * normal(CONSTANT, p.shape)), steps.params_of(model))
    return squared_error(model, x, y) - sum(jax.tree.leaves(terms))


@jax.custom_vjp
def spy(x):
    """Its backward rule prints the cotangent."""
    return x


spy.defvjp(lambda x: (x, None), lambda _, g: (jax.debug.callback(lambda c: None, g), (g,))[1])

LOSSES = {
    "loss_printed_inside": printed,
    "printed_in_a_branch": printed_in_a_branch,
    "spying_rule": lambda model, x, y: jnp.sum((spy(model(x)) - y) ** 2),
    "noise_drawn_with_a_constant": drawn_with_a_constant,
}


def of_the_loss(loss):
    """An honest step of a loss that is not."""
    return steps.noised_by(with_noise, clipped(loss))


# What the optimizer gets, and what happens on the way.

KEPT = jax.new_ref(jnp.zeros(2))


def aux_returned(at):
    grad_fn = clipped(lambda model, x, y: (squared_error(model, x, y), model(x)), has_aux=True)
    grads, aux = grad_fn(at.model, at.x, at.y, is_padding_example=at.mask)
    return at.noised(grads), leafwise(jnp.mean, aux)


def batch_closed_over(at):
    """The mean of all targets is in the loss of each example, past the engine's arguments."""
    center = at.y.mean(axis=0)
    return at.noised(at.sum(lambda m, x, y: squared_error(m, x, y - center)))


def skipped(at, is_skipped):
    noisy = at.noised()
    return lax.cond(is_skipped, zero_sums, lambda: noisy)


STEPS = {
    "learning_rate_from_the_loss": lambda at: scaled(1 / (1 + at.losses().mean()), at.noised()),
    "skipped_by_the_loss": lambda at: skipped(at, at.losses().mean() > 10),
    "kept_in_a_mutable_array": lambda at: (KEPT.__setitem__(..., at.x[0, :2]), at.noised())[1],
    "loss_printed": lambda at: (jax.debug.print("{}", at.losses().mean()), at.noised())[1],
    "loss_checked": lambda at: eqx.error_if(at.noised(), at.losses().mean() > 1e9, "large"),
    "aux_returned": aux_returned,
    "batch_closed_over": batch_closed_over,
    "turns_by_examples": lambda at: lax.fori_loop(
        0, jnp.sum(~at.mask), lambda _, n: scaled(0.9, n), at.noised()
    ),
}


# Optimizers that hold the noise.


MATRICES = leafwise(is_matrix, steps.params_of(steps.mlp()))
OPTIMIZERS = {
    # The variance of `optax.add_noise` falls with the number of steps.
    "noise_of_optax": optax.chain(optax.add_noise(STDDEV**2, 0.55, jax.random.key(0)), OPTIMIZER),
    "noise_on_matrices_alone": optax.chain(optax.masked(NOISE, MATRICES), OPTIMIZER),
    "behind_a_check_that_skips": optax.apply_if_finite(optax.chain(NOISE, OPTIMIZER), 3),
    "for_a_sum_that_is_not_divided": (optax.chain(NOISE, OPTIMIZER), clipped(normalize_by=1.0)),
    "multi_steps_before_the_noise": optax.MultiSteps(
        optax.chain(NOISE, OPTIMIZER), 2, use_grad_mean=False
    ),
}


# What stands for adding the noise: it is too little, twice the same, or taken away.


def on_one_platform(grads, noise):
    noisy = lambda g, state: dp.add_noise(g, state, STDDEV)  # noqa: E731
    raw = lambda g, state: (scaled(1.0, g), state)  # noqa: E731
    found, noise.state = lax.platform_dependent(grads, noise.state, cpu=noisy, default=raw)
    return found


def with_zeros(grads, key):
    return leafwise(lambda leaf: leaf + 0.0, grads)


NOISED_BY = {
    "no_noise": lambda g, k: g,
    "noise_of_deviation_zero": lambda g, k: with_noise(g, k, 0.0),
    "noise_of_half_the_plan": lambda g, k: with_noise(g, k, STDDEV / 2),
    # The noise is divided by the expected batch size, and the gradient is not.
    "gradient_scaled_before_the_noise": lambda g, k: with_noise(scaled(10.0, g), k),
    "noise_in_proportion": lambda g, k: with_noise(g, k, STDDEV * norm(g)),
    "constant_key": lambda g, k: with_noise(g, steps.Noise(STREAM)),
    # The derivative of `sum + noise` in the sum's direction is the sum.
    "tangent": lambda g, k: jax.jvp(lambda g: with_noise(g, k.once()), (g,), (g,))[1],
    # Backwards through the noise goes what was handed in: the sum.
    # (That of `add_noise` is zero: it is rounded.)
    "cotangent": lambda g, k: jax.vjp(lambda g: steps.with_normals(g, k.once()), g)[1](g)[0],
    # `platform_dependent`: on a GPU the sum goes on without noise.
    "on_one_platform": on_one_platform,
    "uniform_noise": lambda g, k: steps.with_normals(g, k, draw=uniform),
    # A scope with the name of our noise, and none in it.
    "zeros_in_a_scope_named_noise": jax.named_scope("eqx_dp.noise")(with_zeros),
    # The rate is divided by the norm of the sum.
    "trust_ratio_of_the_raw_sum": lambda g, k: scaled(1 / (1e-3 + norm(g)), with_noise(g, k)),
    # The noisy sum times zero, plus the sum.
    "raw_sum_beside_zero_weight": lambda g, k: added(scaled(0.0, with_noise(g, k)), g),
    "normalized_before_the_noise": lambda g, k: with_noise(scaled(1 / norm(g), g), k),
    "of_another_relation": (with_noise, {"plan": REPLACE_ONE}),
    "for_a_mean_on_a_sum": (with_noise, clipped(normalize_by=1.0)),
    "without_the_clip_norm": (with_noise, clipped(l2_clip_norm=2.0)),
    "without_a_clip_norm": (with_noise, clipped(l2_clip_norm=math.inf)),
}

# What happens to each leaf of the sum before the noise.
EACH_LEAF = {
    "sign": jnp.sign,
    "rounded": lambda g: g.astype(jnp.bfloat16).astype(jnp.float32),
    # A matrix of ones moves a vector by up to 4 times its length.
    "times_a_matrix": lambda g: jnp.ones((len(g), len(g))) @ g,
    "sorted": lambda g: jnp.sort(g, 0),
    "joined_with_itself": lambda g: jnp.concatenate([g, g]).reshape(2, *g.shape).mean(0) * 2,
}


def each_leaf(change):
    return steps.noised_by(lambda grads, key: with_noise(leafwise(change, grads), key))


# What the optimizer gets, and what is returned.


def one_batch_four_times(at):
    """Four steps on one sample: z / sqrt(4), where the plan counts a fresh sample each."""
    grads = at.sum()
    again = lambda total, _, noise: added(total, with_noise(grads, noise))  # noqa: E731
    return at.noise.turned(again, zero_sums(), length=4)


def noise(at, stddev=STDDEV):
    return steps.noise_alone(zero_sums(), at.noise, stddev)


def moved_sum(at, by):
    """The gradient is clipped and noised, but at a model that private data has moved."""
    return at.sum(model=eqx.apply_updates(at.model, by))


def each_noised(at, stddev=STDDEV, of=lambda noise: noise):
    """Two sums, each with its noise: for the optimizer, and returned."""
    first, other = at.sum(), at.sum(steps.absolute_error)
    return with_noise(first, of(at.noise), stddev), with_noise(other, at.noise, stddev)


def loss_with_key(at, key, *shown):
    """Dropout masks of slots come from a key."""
    return at.noised(at.sum(steps.dropout_loss, key=key)), *shown


def with_words_of_the_counter_exchanged(at):
    """The stream comes back in order from its draw, but began out of order."""
    at.noise.state = at.state.stream._replace(counter=at.state.stream.counter[::-1])
    return at.noised()


NOISED = {
    "words_of_the_counter_exchanged": with_words_of_the_counter_exchanged,
    "one_noise_for_four_losses": lambda at: at.noised(
        added(*(at.sum(lambda *a, i=i: squared_error(*a) ** (1 + i)) for i in range(4)))
    ),
    # Each has the plan's noise multiplier, together they have z / sqrt(2).
    "two_losses_with_the_noise_of_one": lambda at: added(*each_noised(at)),
    # The difference of the two noisy sums has no noise.
    "one_key_for_two_losses": lambda at: each_noised(at, 2 * STDDEV, steps.Noise.once),
    "one_batch_four_times": one_batch_four_times,
    "no_noise_in_the_first_steps": lambda at: at.noise.chosen(
        1 * (at.state.step >= 3), [lambda g, n: scaled(1.0, g), with_noise], at.sum()
    ),
    "divided_by_real_examples": lambda at: at.noised(
        scaled(1 / jnp.maximum(1, jnp.sum(~at.mask)), at.sum(normalize_by=1.0))
    ),
    "adam_before_the_noise": lambda at: at.noised(OPTIMIZER.update(at.sum(), at.state.opt)[0]),
    "inner_step_without_noise": lambda at: at.noised(moved_sum(at, scaled(-0.1, at.sum()))),
    "ordinary_gradient": lambda at: at.noised(
        eqx.filter_grad(lambda m: at.losses(m).mean())(at.model)
    ),
    # The gradient at a model that holds the noise moves with it.
    "noise_in_the_model": lambda at: (lambda n: added(moved_sum(at, n), n))(noise(at)),
    # A release of little noise is added to the sum.
    "quiet_release_added": lambda at: at.noised(
        added(at.sum(), at.noised(scaled(10, at.sum()), 1e-3))
    ),
    "noise_returned": lambda at: (lambda n: (added(at.sum(), n), n))(noise(at)),
    # At least the plan's, but how much it is shows the loss.
    "deviation_by_the_loss": lambda at: at.noised(stddev=STDDEV * (1 + at.losses().mean())),
    "key_returned": lambda at: (at.noised(), at.noise.state.key),
    "key_printed": lambda at: (jax.debug.print("{}", key_data(at.noise.state.key)), at.noised())[1],
    "key_for_loss_and_noise": lambda at: loss_with_key(at, at.noise.state.key),
    # Which mask an example gets, its slot says, in every step the same.
    "constant_loss_key": lambda at: loss_with_key(at, jax.random.key(0)),
    "loss_key_of_the_data": lambda at: loss_with_key(at, fold_in(at.keys[1], at.x[0, 0] > 0)),
    "loss_key_returned": lambda at: loss_with_key(at, at.keys[1], at.keys[1]),
    "loss_key_drawn_from": lambda at: loss_with_key(
        at, at.keys[1], normal(split(at.keys[1], SLOTS)[0], (WIDTH,))
    ),
}


# The caller gives a number.


def several_releases(at):
    """As many releases of one sum as an argument says."""
    grads = at.sum()

    def turn(_, carry):
        noisy, state = dp.add_noise(grads, carry[1], STDDEV)
        return added(carry[0], noisy), state

    total, at.noise.state = lax.fori_loop(0, at.more[0], turn, (zero_sums(), at.noise.state))
    return total


NUMBERED = {
    "several_releases": several_releases,
    "scaled_by_an_argument": lambda at: at.noised(scaled(at.more[0], at.sum())),
    "deviation_from_an_argument": lambda at: at.noised(stddev=1.0 * at.more[0]),
    # A public flag turns the noise off.
    "raw_sum_by_a_flag": lambda at: steps.where(at.more[0] > 2, at.sum(), at.noised()),
}


# What the state carries.


def sum_of_steps(at):
    """The state's sum of raw sums gets the noise of one step in each step."""
    total = added(at.state.kept, at.sum())
    return at.noised(total), {"kept": total}


CARRYING = {
    "two_privatizers_of_one_secret": (
        lambda at: (at.noised(noise=steps.Noise(at.state.kept)), {}),
        dp.noise_stream(key=SECRET),
    ),
    "not_advanced": lambda at: (at.noised(), {"stream": at.state.stream}),
    "one_key_in_all_calls": lambda at: loss_with_key(at, at.state.key, {}),
    "counter_that_stands_still": lambda at: loss_with_key(
        at, fold_in(at.state.key, at.state.step), {"step": at.state.step}
    ),
    "sum_of_steps": (sum_of_steps, zero_sums()),
}


# The noise that a privatizer keeps is returned, printed, or changed before the next step.
KEPT_NOISE = {
    "kept_noise_returned": lambda before, after: (after, after[0][0]),
    "kept_noise_of_the_step_before_returned": lambda before, after: (after, before[0][0][0]),
    "kept_noise_printed": lambda before, after: (after, jax.debug.print("{}", after[0][0][0])),
    "kept_noise_doubled": lambda before, after: (scaled(2.0, after),),
    "words_of_kept_noise_exchanged": lambda before, after: (([one[::-1] for one in after[0]],),),
}

# Data sets that are looked up or closed over, parts of batches and batches in loops.


def rows_of_a_user():
    """Four rows of a user are clipped one by one, and the plan's unit is the user."""
    plan = dp.PrivacyPlan(0.5, 10, 1.2, 1e-5, unit=dp.Users(np.arange(8) // 4, 4))
    return steps.chained(plan=plan)


class Sized(eqx.Module):
    x: jax.Array
    size: int = eqx.field(static=True)


def of_a_batch(divided, batch):
    """A batch that is one argument; `divided(noisy, batch)` is released."""

    def step(model, state, batch):
        y = jnp.zeros((SLOTS, steps.CLASSES))
        at, state = steps.at_hand(model, state, batch["x"], y, batch["mask"])
        noisy = divided(at.noised(), batch)
        return steps.updated(model, state._replace(stream=at.noise.state), noisy)

    return steps.by_hand(step, batch=({"x": XS, "mask": MASK} | batch,), private=(2,))


def two_totals(at, turn):
    """A scan over microbatches carries two totals; a turn gives the next two."""
    step = lambda totals, part: turn(*totals, part.sum())  # noqa: E731
    return at.over_microbatches(step, (zero_sums(), zero_sums()))


def prefix_sums(one, two, part):
    total = added(one, part)
    return total, added(two, total)


def one_by_one(at, changed, start):
    """A scan over microbatches: `changed(microbatch, carried)` gives both as they are used."""

    def turn(carry, part):
        part, carried = changed(part, carry[1])
        return added(carry[0], part.sum()), carried

    return at.noised(at.over_microbatches(turn, (zero_sums(), start))[0])


def with_another_weight(part, key):
    key, own = split(key)
    return part.times(jnp.full(2, uniform(own))), key


def left_out_by_a_mutable_array(at):
    count = jax.new_ref(jnp.zeros((), int))

    def changed(part, _):
        count[...] += 1
        return part.use(mask=part.mask | (count[...] > 2)), 0

    return one_by_one(at, changed, 0)


def sign_by_the_turn(at):
    def turn(carry, part):
        total, i = carry
        signed = lambda g: lax.cond(i > 1, lambda g: 1.0 * g, lambda g: -1.0 * g, g)  # noqa: E731
        return added(total, leafwise(signed, part.sum())), i + 1

    return at.noised(at.over_microbatches(turn, (zero_sums(), 0))[0])


def handed_on_after_a_draw(at):
    """Each turn hands on a state that it has drawn with: the next turn has the same noise."""
    grads = at.sum()

    def turn(state, _):
        _, state = dp.add_noise(zero_sums(), state, 9 * STDDEV)
        return state, dp.add_noise(grads, state, 9 * STDDEV)[0]

    at.noise.state, noisy = lax.scan(turn, at.noise.state, None, 2)
    return leafwise(lambda leaf: leaf.sum(0), noisy)


def of_the_batch_before(at):
    """Labels of each batch of a stack go with the inputs of the batch before it."""

    def turn(carry, batch):
        grads = At(at.model, at.state, carry[1], *batch[1:]).sum()
        noisy, state = dp.add_noise(grads, carry[0], STDDEV)
        return (state, batch[0]), noisy

    start = at.noise.state, jnp.zeros((SLOTS, WIDTH))
    (at.noise.state, _), noisy = lax.scan(turn, start, (at.x, at.y, at.mask))
    return leafwise(lambda leaf: leaf.sum(0), noisy)


def a_noise_for_each_copy(at):
    """One sum gets the noise of each of several streams."""
    grads = at.sum()
    noisy, kept = jax.vmap(lambda state: dp.add_noise(grads, state, STDDEV))(at.state.kept)
    return leafwise(lambda leaf: leaf.mean(0), noisy), {"kept": kept}


def models_with_one_stream():
    """Two models are mapped over, and their streams are copies of one."""
    case = ensemble()
    state = leafwise(lambda a: jnp.stack([a[0], a[0]]), case.args[1])
    return case._replace(args=(case.args[0], state, *case.args[2:]))


LOOPS = {
    "every_second_row": lambda at: at.noised(at.rows(slice(0, None, 2)).sum()),
    "left_out_by_a_mutable_array": left_out_by_a_mutable_array,
    "sign_by_the_turn": sign_by_the_turn,
    "handed_on_after_a_draw": handed_on_after_a_draw,
    "total_before_the_last_microbatch": lambda at: (
        at.noised(),
        two_totals(at, lambda one, two, part: (added(one, part), one))[1],
    ),
    "prefix_sums": lambda at: at.noised(two_totals(at, prefix_sums)[1]),
}

EACH = {
    # A call takes 20 steps, and the plan speaks of 10.
    "more_steps_than_the_plan_has": lambda: steps.epoch_by(At.noised, 20),
    "microbatches_with_other_weights": lambda: step_of(
        lambda at: one_by_one(at, with_another_weight, at.more[0]), batch=(*data(), ROOT)
    ),
    "keys_exchanged": lambda: step_of(
        lambda at: one_by_one(
            at,
            lambda part, keys: (part.times(jnp.full(2, uniform(keys[0]))), keys[::-1]),
            tuple(fold_in(at.more[0], factor * at.state.step) for factor in (2, 3)),
        ),
        batch=(*data(), ROOT),
    ),
    "of_the_batch_before": lambda: step_of(
        of_the_batch_before, batch=[jnp.stack([leaf] * 3) for leaf in data()]
    ),
    "pairs_by_an_index": lambda: step_of(
        lambda at: at.noised(
            at.use(x=at.x[at.mask].sum(1), y=at.y[at.mask].sum(1), mask=at.more[0]).sum()
        ),
        batch=(XS, YS, jnp.arange(10).reshape(5, 2), jnp.zeros(5, bool)),
        private=(2, 3, 4, 5),
    ),
    "noise_for_each_copy": lambda: steps.carrying(
        a_noise_for_each_copy,
        jax.tree.map(lambda *a: jnp.stack(a), *(dp.noise_stream(key=SECRET + i) for i in (1, 2))),
    ),
    "models_with_one_stream": models_with_one_stream,
    "rows_of_a_user": rows_of_a_user,
    "size_as_a_static_field": lambda: of_a_batch(
        lambda noisy, batch: scaled(1 / batch["more"].size, noisy), {"more": Sized(XS, 5)}
    ),
    "another_argument_named": lambda: prepared_by(
        lambda at: at, jnp.ones(3), private=(5,), more={}
    ),
    "size_as_a_number": lambda: of_a_batch(
        lambda noisy, batch: scaled(1 / batch["size"], noisy), {"size": 5}
    ),
    "column_of_features_as_mask": lambda: prepared_by(
        lambda at: at.use(mask=at.more[0][:, 0]), jnp.ones((SLOTS, 2), bool), private=(2, 3, 5)
    ),
}

LEAKING = steps.cases(
    (steps.with_kept_noise, KEPT_NOISE),
    (steps.beside, BESIDE),
    (steps.keeping, KEEPING),
    (steps.over_devices, OVER_DEVICES),
    (prepared_by, PREPARED),
    (of_the_loss, LOSSES),
    (step_of, STEPS),
    (steps.with_optimizer, OPTIMIZERS),
    (steps.each, EACH),
    (steps.noised_by, NOISED_BY),
    (each_leaf, EACH_LEAF),
    (step_of, NOISED),
    (steps.with_a_number, NUMBERED),
    (steps.carrying, CARRYING),
    (step_of, LOOPS),
)
