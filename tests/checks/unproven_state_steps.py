"""Steps that leak, and what is wrong with each in its docstring: state, results, side doors."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.experimental import checkify

import eqx_dp as dp
from tests.checks.privacy_steps import (
    CLASSES,
    EXPECTED,
    SLOTS,
    STDDEV,
    WIDTH,
    added,
    by_hand,
    clipped,
    first_state,
    leak,
    mlp,
    next_key,
    noised_by,
    scaled,
    squared_error,
    updated,
    with_noise,
)

STATE = {}
leaking = leak(STATE)


class Given(NamedTuple):
    """What is at hand in an honest step, for one that keeps something beside."""

    model: Any
    new: Any
    x: Any
    y: Any
    mask: Any
    values: Any
    grads: Any
    noisy: Any


def losses_of(given, model=None):
    model = given.model if model is None else model
    return jax.vmap(squared_error, (None, 0, 0))(model, given.x, given.y)


def keeping(kept_of, first, **named):
    """An honest step whose state also holds `kept_of(kept, given)`, at first `first`."""
    grad_fn = dp.filter_value_and_clipped_grad(
        squared_error, l2_clip_norm=1.0, normalize_by=EXPECTED
    )

    def step(model, states, x, y, mask):
        kept, state = states
        key, state = next_key(state)
        values, grads = grad_fn(model, x, y, is_padding_example=mask)
        noisy = with_noise(grads, key)
        new, state = updated(model, state, noisy)
        kept = kept_of(kept, Given(model, new, x, y, mask, values, grads, noisy))
        return new, (kept, state)

    return by_hand(step, state=(first, first_state()), **named)


def params_of(model):
    return eqx.filter(model, eqx.is_inexact_array)


def zero_sums():
    return jax.tree.map(jnp.zeros_like, clipped().trainable(mlp()))


# Raw values in the state.


@leaking
def metrics_in_a_dictionary_of_the_state():
    """The mean loss of the batch is in the state, under a name that the state had before."""
    return keeping(lambda kept, given: {"loss": given.values.loss.mean()}, {"loss": jnp.zeros(())})


@leaking
def metrics_returned_where_the_state_has_some():
    """The second result is a dictionary with a metric of the private batch in it."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, inner = next_key(state["train"])
        grads = grad_fn(model, x, y, is_padding_example=mask)
        model, inner = updated(model, inner, with_noise(grads, key))
        loss = jax.vmap(squared_error, (None, 0, 0))(model, x, y).mean()
        return model, {"train": inner, "loss": loss}

    return by_hand(step, state={"train": first_state(), "loss": jnp.zeros(())})


@leaking
def average_of_parameters_without_noise():
    """An average over models that the raw sum has moved."""
    return keeping(
        lambda kept, given: added(
            scaled(0.9, kept),
            scaled(0.1, added(params_of(given.model), scaled(-0.1, given.grads))),
        ),
        params_of(mlp()),
    )


@leaking
def best_model_by_private_loss():
    """The best noisy model is kept, chosen by its loss on the private batch."""

    def kept_of(kept, given):
        best, least = kept
        loss = losses_of(given).mean()
        best = jax.tree.map(
            lambda a, b: jnp.where(loss < least, a, b), params_of(given.model), best
        )
        return best, jnp.minimum(loss, least)

    return keeping(kept_of, (params_of(mlp()), jnp.float32(jnp.inf)))


@leaking
def best_model_alone_by_private_loss():
    """The least loss is computed anew, and only the model is kept: it is chosen by private data."""

    def kept_of(kept, given):
        model = eqx.combine(kept, eqx.filter(given.model, eqx.is_inexact_array, inverse=True))
        better = losses_of(given).mean() < losses_of(given, model).mean()
        return jax.tree.map(lambda a, b: jnp.where(better, a, b), params_of(given.model), kept)

    return keeping(kept_of, params_of(mlp()))


@leaking
def class_prototypes_from_aux():
    """Means of features by class, over batches, without noise."""
    grad_fn = dp.filter_value_and_clipped_grad(
        lambda model, x, y: (squared_error(model, x, y), model(x)),
        l2_clip_norm=1.0,
        normalize_by=EXPECTED,
        has_aux=True,
    )

    def step(model, states, x, y, mask):
        prototypes, state = states
        key, state = next_key(state)
        values, grads = grad_fn(model, x, y, is_padding_example=mask)
        classes = jax.nn.one_hot(y.argmax(1), CLASSES)
        prototypes = 0.9 * prototypes + 0.1 * classes.T @ values.aux / SLOTS
        model, state = updated(model, state, with_noise(grads, key))
        return model, (prototypes, state)

    return by_hand(step, state=(jnp.zeros((CLASSES, CLASSES)), first_state()))


@leaking
def average_of_losses():
    """A moving average of the mean loss."""
    return keeping(lambda kept, given: 0.9 * kept + 0.1 * given.values.loss.mean(), jnp.zeros(()))


@leaking
def least_loss():
    """The least loss so far."""
    return keeping(lambda kept, given: jnp.minimum(kept, given.values.loss.mean()), jnp.zeros(()))


@leaking
def steps_without_progress():
    """A counter for early stopping, which the private loss sets back."""
    return keeping(
        lambda kept, given: jnp.where(given.values.loss.mean() < 0.1, 0, kept + 1),
        jnp.zeros((), int),
    )


@leaking
def average_of_gradient_norms():
    """For a clip norm to come: the mean norm of single examples' gradients, without noise."""
    return keeping(
        lambda kept, given: 0.9 * kept + 0.1 * given.values.grad_norm.mean(), jnp.ones(())
    )


@leaking
def share_of_clipped_examples():
    """For a clip norm to come: how many norms are above it."""
    return keeping(lambda kept, given: jnp.mean(given.values.grad_norm > 1), jnp.ones(()))


@leaking
def norm_of_the_raw_sum():
    """A norm of the sum without noise."""
    return keeping(lambda kept, given: optax.tree.norm(given.grads), jnp.ones(()))


@leaking
def squares_of_raw_sums():
    """A second moment of the sum without noise."""
    return keeping(
        lambda kept, given: jax.tree.map(lambda v, g: 0.9 * v + 0.1 * g * g, kept, given.grads),
        zero_sums(),
    )


@leaking
def residual_of_the_noise():
    """Error feedback: the sum minus the noisy sum is kept, and shows the noise."""
    return keeping(lambda kept, given: added(given.grads, scaled(-1.0, given.noisy)), zero_sums())


@leaking
def residual_of_a_rounding():
    """Error feedback: what the rounding of the raw sum has lost."""
    return keeping(
        lambda kept, given: jax.tree.map(lambda g: g - jnp.round(g, 1), given.grads),
        zero_sums(),
    )


@leaking
def number_of_examples_seen():
    """Real examples are counted over steps."""
    return keeping(lambda kept, given: kept + jnp.sum(~given.mask), jnp.zeros((), int))


@leaking
def number_of_examples_that_are_not_finite():
    """Examples whose gradient is not finite are counted."""
    return keeping(
        lambda kept, given: kept + jnp.sum(~jnp.isfinite(given.values.grad_norm)),
        jnp.zeros((), int),
    )


@leaking
def whether_an_example_was_not_finite():
    """One bit over the run."""
    return keeping(
        lambda kept, given: kept | ~jnp.all(jnp.isfinite(given.values.loss)),
        jnp.zeros((), bool),
    )


@leaking
def histogram_of_labels():
    """Labels are counted by class."""
    return keeping(
        lambda kept, given: kept + jax.nn.one_hot(given.y.argmax(1), CLASSES).sum(0),
        jnp.zeros(CLASSES),
    )


@leaking
def mean_and_variance_of_inputs():
    """A batch norm's statistics."""
    return keeping(
        lambda kept, given: (
            0.9 * kept[0] + 0.1 * given.x.mean(0),
            0.9 * kept[1] + 0.1 * given.x.var(0),
        ),
        (jnp.zeros(WIDTH), jnp.ones(WIDTH)),
    )


@leaking
def covariance_of_inputs():
    """For whitening, without noise."""
    return keeping(lambda kept, given: kept + given.x.T @ given.x, jnp.zeros((WIDTH, WIDTH)))


@leaking
def confusion_of_classes():
    """A confusion matrix of the noisy model on private examples."""

    def kept_of(kept, given):
        found = jax.vmap(given.model)(given.x).argmax(1)
        return kept.at[given.y.argmax(1), found].add(1)

    return keeping(kept_of, jnp.zeros((CLASSES, CLASSES), int))


@leaking
def hardest_slots():
    """The slots of the largest losses, for the next step."""
    return keeping(
        lambda kept, given: jax.lax.top_k(given.values.loss, 2)[1], jnp.zeros(2, jnp.int32)
    )


@leaking
def replay_of_examples():
    """A buffer with the first example of each batch."""
    return keeping(
        lambda kept, given: jnp.concatenate([kept[1:], given.x[:1]]), jnp.zeros((5, WIDTH))
    )


@leaking
def largest_input():
    """For scaling: the largest number of any input so far."""
    return keeping(lambda kept, given: jnp.maximum(kept, jnp.abs(given.x).max()), jnp.zeros(()))


@leaking
def learning_rate_by_private_loss():
    """The rate of the next step, which the private loss halves."""
    return keeping(
        lambda kept, given: jnp.where(given.values.loss.mean() > 1, 0.5 * kept, kept), jnp.ones(())
    )


@leaking
def batch_in_a_field_of_the_optimizers_state():
    """The mean input is put where the optimizer's counter was, as a float."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        model, state = updated(model, state, with_noise(grads, key))
        nu = jax.tree.map(lambda a: a + x.mean(), state.opt[0].nu)
        return model, state._replace(opt=(state.opt[0]._replace(nu=nu), *state.opt[1:]))

    return by_hand(step)


@leaking
def last_of_the_states_steps_by_chance():
    """A reservoir: by chance one example is kept."""
    grad_fn = clipped()

    def step(model, states, x, y, mask):
        _, state = states
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        model, state = updated(model, state, with_noise(grads, key))
        at = jax.random.randint(jax.random.fold_in(state.key, 9), (), 0, SLOTS)
        return model, (x[at], state)

    return by_hand(step, state=(jnp.zeros(WIDTH), first_state()))


class Normed(eqx.Module):
    """A model that centers its inputs by a buffer, which is not trained."""

    mlp: eqx.nn.MLP
    center: jax.Array

    def __call__(self, x):
        return self.mlp(x - self.center)


@leaking
def statistics_in_a_buffer_of_the_model():
    """A frozen array of the model follows the mean of the inputs: it is published with it."""
    model = Normed(mlp(), jnp.zeros(WIDTH))
    spec = eqx.tree_at(lambda m: m.center, jax.tree.map(eqx.is_inexact_array, model), False)
    grad_fn = clipped(filter_spec=spec)

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        new = eqx.apply_updates(model, scaled(-0.1, with_noise(grads, key)))
        center = 0.9 * model.center + 0.1 * x.mean(0)
        return eqx.tree_at(lambda m: m.center, new, center), state

    return by_hand(step, model=model)


@leaking
def batch_norm_of_equinox():
    """Statistics of the batch, by the layer's own state, beside an honest step."""
    norm, norm_state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(WIDTH, "batch", mode="batch")

    def kept_of(kept, given):
        mapped = jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        return mapped(given.x, kept)[1]

    return keeping(kept_of, norm_state)


@leaking
def sum_over_steps_with_one_noise():
    """The state's sum of raw sums gets the noise of one step in each step."""
    grad_fn = clipped()

    def step(model, states, x, y, mask):
        total, state = states
        key, state = next_key(state)
        total = added(total, grad_fn(model, x, y, is_padding_example=mask))
        model, state = updated(model, state, with_noise(total, key))
        return model, (total, state)

    return by_hand(step, state=(zero_sums(), first_state()))


@leaking
def variance_reduced_by_a_raw_sum():
    """The raw sum of an earlier step is subtracted from the noisy one."""
    grad_fn = clipped()

    def step(model, states, x, y, mask):
        anchor, state = states
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        model, state = updated(model, state, added(with_noise(grads, key), scaled(-1.0, anchor)))
        return model, (jax.tree.map(lambda a, g: 0.5 * a + 0.5 * g, anchor, grads), state)

    return by_hand(step, state=(zero_sums(), first_state()))


@leaking
def noise_kept_for_the_next_step():
    """Correlated noise by hand: this step's noise is subtracted in the next, and is kept."""
    grad_fn = clipped()

    def step(model, states, x, y, mask):
        last, state = states
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        noise = with_noise(jax.tree.map(jnp.zeros_like, grads), key)
        noisy = added(grads, noise, scaled(-0.9, last))
        model, state = updated(model, state, noisy)
        return model, (noise, state)

    return by_hand(step, state=(zero_sums(), first_state()))


# Results.


def beside_it(shown_of):
    """An honest step, which returns `shown_of(given)` as well."""
    grad_fn = dp.filter_value_and_clipped_grad(
        squared_error, l2_clip_norm=1.0, normalize_by=EXPECTED
    )

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        values, grads = grad_fn(model, x, y, is_padding_example=mask)
        noisy = with_noise(grads, key)
        new, state = updated(model, state, noisy)
        return new, state, shown_of(Given(model, new, x, y, mask, values, grads, noisy))

    return by_hand(step)


@leaking
def batch_returned_in_its_own_place():
    """The step returns all its arguments, with donated buffers, as some loops do."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        return *updated(model, state, with_noise(grads, key)), 2 * x, y, mask

    return by_hand(step)._replace(fn=eqx.filter_jit(step, donate="all"))


@leaking
def aux_averaged_and_returned():
    """Means of single examples' aux are raw."""
    grad_fn = clipped(
        lambda model, x, y: (squared_error(model, x, y), {"pred": model(x)}), has_aux=True
    )

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        grads, aux = grad_fn(model, x, y, is_padding_example=mask)
        return *updated(model, state, with_noise(grads, key)), jax.tree.map(jnp.mean, aux)

    return by_hand(step)


@leaking
def loss_with_public_noise_of_a_dither():
    """A tiny noise on the mean loss, whose sensitivity nothing bounds."""
    return beside_it(lambda given: with_noise(given.values.loss.mean(), jax.random.key(1), 1e-3))


@leaking
def whether_the_raw_sum_is_finite():
    """One bit of the sum."""
    return beside_it(lambda given: jnp.all(jnp.isfinite(jax.tree.leaves(given.grads)[0])))


@leaking
def similarity_of_noisy_and_raw_sum():
    """How well the noise is survived: a number about the raw sum."""
    return beside_it(
        lambda given: optax.tree.vdot(given.noisy, given.grads) / optax.tree.norm(given.noisy)
    )


@leaking
def size_of_the_noise():
    """The noisy sum's distance from the raw one."""
    return beside_it(lambda given: optax.tree.norm(added(given.noisy, scaled(-1.0, given.grads))))


@leaking
def losses_by_a_private_order():
    """Only how many losses are above each of some public numbers."""
    return beside_it(lambda given: (given.values.loss[:, None] > jnp.linspace(0, 5, 10)).sum(0))


@leaking
def public_evaluation_of_a_raw_model():
    """The model that the raw sum would give is evaluated on public data."""

    def shown(given):
        raw = eqx.apply_updates(given.model, scaled(-0.1, given.grads))
        return jnp.sum(jax.vmap(raw)(jnp.ones((3, WIDTH))))

    return beside_it(shown)


@leaking
def learning_rate_chosen_on_the_batch():
    """A line search: of three rates the one with the least private loss is taken."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        noisy = with_noise(grad_fn(model, x, y, is_padding_example=mask), key)
        rates = jnp.asarray([0.01, 0.1, 1.0])

        def loss(rate):
            moved = eqx.apply_updates(model, scaled(-rate, noisy))
            return jax.vmap(squared_error, (None, 0, 0))(moved, x, y).mean()

        best = rates[jnp.argmin(jax.lax.map(loss, rates))]
        return eqx.apply_updates(model, scaled(-best, noisy)), state

    return by_hand(step)


@leaking
def backtracking_on_the_batch():
    """optax's line search is given the private loss."""
    grad_fn = clipped()
    params, static = eqx.partition(mlp(), eqx.is_inexact_array)
    search = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(3))

    def step(params, state, x, y, mask):
        key, state = next_key(state)

        def loss(params):
            model = eqx.combine(params, static)
            return jax.vmap(squared_error, (None, 0, 0))(model, x, y).mean()

        noisy = with_noise(grad_fn(eqx.combine(params, static), x, y, is_padding_example=mask), key)
        updates, opt = search.update(
            noisy, state.opt, params, value=loss(params), grad=noisy, value_fn=loss
        )
        return optax.apply_updates(params, updates), state._replace(opt=opt)

    return by_hand(step, model=params, state=first_state(params, search))


@leaking
def update_rejected_by_private_loss():
    """The update is taken only if the private loss falls."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        noisy = with_noise(grad_fn(model, x, y, is_padding_example=mask), key)
        moved = eqx.apply_updates(model, scaled(-0.1, noisy))
        losses = [jax.vmap(squared_error, (None, 0, 0))(m, x, y).sum() for m in (model, moved)]
        factor = (losses[1] < losses[0]).astype(jnp.float32)
        return eqx.apply_updates(model, scaled(-0.1 * factor, noisy)), state

    return by_hand(step)


# Side doors.


@leaking
def inputs_checked_by_error_if():
    """The run stops if an input is not finite: that is seen."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        x = eqx.error_if(x, ~jnp.all(jnp.isfinite(x)), "an input is not finite")
        grads = grad_fn(model, x, y, is_padding_example=mask)
        return updated(model, state, with_noise(grads, key))

    return by_hand(step)


@leaking
def sum_checked_by_error_if():
    """The run stops if the raw sum is large."""

    def noisy(grads, key):
        large = optax.tree.norm(grads) > 10
        return with_noise(eqx.error_if(grads, large, "the sum is large"), key)

    return noised_by(noisy)


@leaking
def example_checked_inside_of_the_loss():
    """The run stops at one example."""

    def loss(model, x, y):
        x = eqx.error_if(x, x[0] > 100, "an input is large")
        return squared_error(model, x, y)

    return noised_by(with_noise, clipped(loss))


@leaking
def error_of_checkify_returned():
    """Whether an input is negative is a result, as an error."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)

        def checked(x):
            checkify.check(jnp.all(x > -100), "an input is very negative")
            return x

        error, x = checkify.checkify(checked)(x)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        return *updated(model, state, with_noise(grads, key)), error

    return by_hand(step)


@leaking
def steps_until_the_private_loss_is_low():
    """A loop on the noisy gradient that ends by the loss on the batch."""
    grad_fn = clipped()
    params, static = eqx.partition(mlp(), eqx.is_inexact_array)

    def step(params, state, x, y, mask):
        key, state = next_key(state)

        def loss(params):
            model = eqx.combine(params, static)
            return jax.vmap(squared_error, (None, 0, 0))(model, x, y).mean()

        noisy = with_noise(grad_fn(eqx.combine(params, static), x, y, is_padding_example=mask), key)
        new = jax.lax.while_loop(
            lambda p: loss(p) > 1.0, lambda p: added(p, scaled(-0.01, noisy)), params
        )
        return new, state

    return by_hand(step, model=params, state=first_state(params))


@leaking
def as_many_turns_as_a_label_says():
    """The noisy gradient is applied once for each unit of a label."""
    grad_fn = clipped()
    params, static = eqx.partition(mlp(), eqx.is_inexact_array)

    def step(params, state, x, y, mask):
        key, state = next_key(state)
        noisy = with_noise(grad_fn(eqx.combine(params, static), x, y, is_padding_example=mask), key)
        times = y.argmax(1)[0] + 1
        new = jax.lax.fori_loop(0, times, lambda _, p: added(p, scaled(-0.01, noisy)), params)
        return new, state

    return by_hand(step, model=params, state=first_state(params))


@leaking
def turns_behind_a_private_number_masked():
    """A loop of fixed length, in which a private loss masks the rest of the turns."""
    grad_fn = clipped()
    params, static = eqx.partition(mlp(), eqx.is_inexact_array)

    def step(params, state, x, y, mask):
        key, state = next_key(state)
        noisy = with_noise(grad_fn(eqx.combine(params, static), x, y, is_padding_example=mask), key)

        def turn(params, _):
            model = eqx.combine(params, static)
            loss = jax.vmap(squared_error, (None, 0, 0))(model, x, y).mean()
            rate = jnp.where(loss > 1.0, -0.01, 0.0)
            return added(params, scaled(rate, noisy)), None

        return jax.lax.scan(turn, params, None, length=4)[0], state

    return by_hand(step, model=params, state=first_state(params))


@leaking
def sum_printed_in_a_branch():
    """A print of the raw sum that happens in some steps."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        norm = optax.tree.norm(grads)
        jax.lax.cond(state.step % 100 == 0, lambda: jax.debug.print("{}", norm), lambda: None)
        return updated(model, state, with_noise(grads, key))

    return by_hand(step)


@leaking
def gradient_shown_by_a_derivative_rule():
    """A function whose backward rule prints the cotangent, inside of the loss."""

    @jax.custom_vjp
    def spy(x):
        return x

    def backward(_, cotangent):
        jax.debug.callback(lambda c: None, cotangent)
        return (cotangent,)

    spy.defvjp(lambda x: (x, None), backward)
    return noised_by(with_noise, clipped(lambda model, x, y: jnp.sum((spy(model(x)) - y) ** 2)))


@leaking
def noise_sent_to_a_callback():
    """The noise is logged, and the noisy sum is published: the difference is the sum."""

    def noisy(grads, key):
        noise = with_noise(jax.tree.map(jnp.zeros_like, grads), key, STDDEV)
        jax.debug.callback(lambda n: None, jax.tree.leaves(noise)[0])
        return added(grads, noise)

    return noised_by(noisy)


@leaking
def mean_loss_by_a_callback_that_returns_public_numbers():
    """A host function is given losses and returns a learning rate."""
    grad_fn = dp.filter_value_and_clipped_grad(
        squared_error, l2_clip_norm=1.0, normalize_by=EXPECTED
    )

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        values, grads = grad_fn(model, x, y, is_padding_example=mask)
        rate = jax.pure_callback(
            lambda loss: loss * 0 + 1, jax.ShapeDtypeStruct((), jnp.float32), values.loss.mean()
        )
        return updated(model, state, scaled(rate, with_noise(grads, key)))

    return by_hand(step)
