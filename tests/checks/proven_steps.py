"""Steps that are private as their plan says, and that the check must call fine.

Each scaffold of the steps that leak is here without a leak, so that none of those is refused for
what it has in common with an honest step.
"""

import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from dp_accounting import NeighboringRelation

import eqx_dp as dp
from tests.checks import unproven_noise_steps as noise_steps
from tests.checks import unproven_state_steps as state_steps
from tests.checks import unproven_steps as steps
from tests.checks.privacy_steps import (
    OPTIMIZER,
    PLAN,
    SECRET,
    SLOTS,
    STDDEV,
    absolute_error,
    added,
    by_hand,
    chained,
    clipped,
    data,
    dropout_loss,
    first_state,
    listed,
    made,
    mlp,
    next_key,
    noised_by,
    plan_under,
    scaled,
    squared_error,
    updated,
    with_noise,
)
from tests.training.test_optimizers import made as optimizer_named

PUBLIC_VALUE = {"polyak_sgd", "momo", "momo_adam", "reduce_on_plateau"}
"""Optimizers of optax that want a value beside the gradient."""

PROVEN = {}
proven = listed(PROVEN)


# The scaffolds, without a leak.


@proven
def sum_of_all_devices():
    return steps.summed(steps.psum)


@proven
def mean_of_all_devices():
    return steps.summed(lambda g: jax.lax.pmean(g, "data"), STDDEV / steps.DEVICES)


@proven
def engine_on_each_device():
    return steps.over_devices(
        lambda model, x, y, mask: steps.psum(clipped()(model, x, y, is_padding_example=mask))
    )


@proven
def engine_on_devices_of_two_axes():
    return steps.over_devices(
        lambda model, x, y, mask: steps.psum(clipped()(model, x, y, is_padding_example=mask)),
        steps.mesh_of("auto", data=4, model=2),
    )


@proven
def one_weight_for_all_slots():
    return steps.weighted(lambda key: jnp.full(SLOTS, 0.5))


@proven
def independent_times_of_slots():
    """Times of a diffusion, drawn in the step: which one an example gets, chance says."""
    return steps.weighted(lambda key: jax.random.uniform(key, (SLOTS,)))


@proven
def public_number_as_an_argument():
    return steps.with_argument(
        lambda x, y, mask, scale, state: (x * scale, y, mask), jnp.asarray(0.5)
    )


@proven
def public_table_as_an_argument():
    """A number for each feature, which all examples share."""
    return steps.with_argument(
        lambda x, y, mask, table, state: (x * table, y, mask), jnp.ones(steps.WIDTH)
    )


@proven
def public_row_of_a_table_at_the_step():
    """What changes from step to step is the same for all slots."""
    return steps.with_argument(
        lambda x, y, mask, table, state: (x * table[state.step], y, mask), jnp.ones(64)
    )


@proven
def optimizer_that_holds_the_noise():
    return steps.with_optimizer(optax.chain(PLAN.privatizer(clipped(), key=SECRET), OPTIMIZER))


@proven
def model_kept_beside():
    """What is kept is made of releases."""
    return state_steps.keeping(
        lambda kept, given: state_steps.params_of(given.new), state_steps.params_of(mlp())
    )


@proven
def noisy_sum_kept_beside():
    return state_steps.keeping(
        lambda kept, given: added(scaled(0.9, kept), scaled(0.1, given.noisy)),
        state_steps.zero_sums(),
    )


@proven
def best_model_by_a_public_loss():
    """The best model so far on public examples is kept."""
    xs, ys = jnp.ones((3, steps.WIDTH)), jnp.ones((3, steps.CLASSES))

    def kept_of(kept, given):
        best, least = kept
        loss = jax.vmap(squared_error, (None, 0, 0))(given.new, xs, ys).mean()
        params = state_steps.params_of(given.new)
        best = jax.tree.map(lambda a, b: jnp.where(loss < least, a, b), params, best)
        return best, jnp.minimum(loss, least)

    return state_steps.keeping(kept_of, (state_steps.params_of(mlp()), jnp.float32(jnp.inf)))


@proven
def counter_of_steps_kept_beside():
    return state_steps.keeping(lambda kept, given: kept + 1, jnp.zeros((), int))


@proven
def norm_of_the_noisy_sum_kept_beside():
    return state_steps.keeping(lambda kept, given: optax.tree.norm(given.noisy), jnp.zeros(()))


@proven
def nothing_beside():
    return noise_steps.shown_beside(lambda grads, key: ())


@proven
def numbers_of_a_fresh_key_beside():
    return noise_steps.shown_beside(lambda grads, key: jax.random.bits(key, (4,)))


@proven
def deviation_as_a_constant():
    return noise_steps.deviation_of(lambda values, x, mask: STDDEV)


@proven
def deviation_as_an_array_of_numpy():
    return noise_steps.deviation_of(lambda values, x, mask: np.float32(STDDEV))


@proven
def nothing_behind_the_noise():
    return noise_steps.behind_the_noise(lambda noisy, grads, model: noisy)


@proven
def decay_of_the_model_behind_the_noise():
    return noise_steps.behind_the_noise(
        lambda noisy, grads, model: added(noisy, scaled(0.1, state_steps.params_of(model)))
    )


@proven
def scope_of_any_name():
    def noisy(grads, key):
        with jax.named_scope("my own scope"):
            return with_noise(grads, key)

    return noised_by(noisy)


# Keys.


@proven
def number_of_the_caller():
    """The most common pattern in JAX: the caller counts steps, and the root is closed over."""
    return noise_steps.caller_keyed(jax.random.fold_in)


@proven
def number_and_root_of_the_caller():
    grad_fn = clipped()

    def step(model, state, x, y, mask, root, t):
        grads = grad_fn(model, x, y, is_padding_example=mask)
        return updated(model, state, with_noise(grads, jax.random.fold_in(root, t)))

    return by_hand(step, batch=(*data(), jax.random.key(6), jnp.asarray(0)))


@proven
def epoch_and_step_of_the_caller():
    grad_fn = clipped()

    def step(model, state, x, y, mask, root, epoch, t):
        key = jax.random.fold_in(jax.random.fold_in(root, epoch), t)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        return updated(model, state, with_noise(grads, key))

    batch = (*data(), jax.random.key(6), jnp.asarray(0), jnp.asarray(0))
    return by_hand(step, batch=batch)


@proven
def number_of_the_caller_for_two_keys():
    """One for the loss and one for the noise, split from that of the step."""
    grad_fn = clipped(dropout_loss)

    def step(model, state, x, y, mask, root, t):
        loss_key, key = jax.random.split(jax.random.fold_in(root, t))
        grads = grad_fn(model, x, y, key=loss_key, is_padding_example=mask)
        return updated(model, state, with_noise(grads, key))

    return by_hand(step, batch=(*data(), jax.random.key(6), jnp.asarray(0)))


@proven
def two_losses_with_keys_of_their_own():
    """Each noise has sqrt(2) times the deviation."""
    grad_fns = clipped(), clipped(absolute_error)

    def step(model, state, x, y, mask):
        carried, *keys = jax.random.split(state.key, 3)
        noisy = [
            with_noise(grad_fn(model, x, y, is_padding_example=mask), key, 2**0.5 * STDDEV)
            for grad_fn, key in zip(grad_fns, keys, strict=True)
        ]
        return *updated(model, state._replace(key=carried), noisy[0]), noisy[1]

    return by_hand(step, multiplier=2**0.5 * PLAN.noise_multiplier)


# make_step, and loops over it.


@proven
def made_step_in_eight_bits():
    return made(policy=dp.load_policy("mixed_float8"))


@proven
def made_step_in_eight_bits_with_wide_heads():
    return made(policy=dp.load_policy("mixed_float8_wide_heads"))


@proven
def made_step_of_a_policy_in_a_line():
    policy = dp.parse_policy("params=float32,compute=bfloat16,output=float32")
    return made(policy=policy, microbatch_size=2)


@proven
def made_step_scanned_over_three_batches():
    case = made()
    model_and_state, static = eqx.partition(case.args[0], eqx.is_array)

    def epoch(state, xs, ys, masks):
        def turn(state, batch):
            x, y, mask = batch
            state = case.fn(eqx.combine(state, static), x, y, is_padding_example=mask)
            return eqx.filter(state, eqx.is_array), None

        return jax.lax.scan(turn, state, (xs, ys, masks))[0]

    batch = tuple(jnp.stack([leaf] * 3) for leaf in data())
    return case._replace(
        fn=eqx.filter_jit(epoch),
        args=(model_and_state, *batch),
        kwargs={},
        private=(1, 2, 3),
        plan=PLAN,
        noise_multiplier=PLAN.noise_multiplier,
    )


@proven
def loop_in_eight_bits():
    return chained(policy=dp.load_policy("mixed_float8"))


@proven
def loop_in_float16():
    return chained(policy=dp.load_policy("mixed_float16"))


@proven
def loop_in_chunks_of_the_engine():
    return chained(microbatch_size=2)


@proven
def loop_in_chunks_that_do_not_divide_the_batch():
    return chained(microbatch_size=3, method="per_example")


@proven
def loop_with_a_mask_of_padding_alone():
    return chained(plan=plan_under(NeighboringRelation.REPLACE_SPECIAL))


# optax behind the noise.


@proven
def adamw_with_a_schedule():
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)
    return chained(optax.adamw(rate, weight_decay=0.1))


@proven
def clipped_behind_the_noise():
    return chained(optax.clip_by_global_norm(1.0), optax.clip(0.1), optax.sgd(0.1))


@proven
def partition_of_parameters():
    def kinds(params):
        return jax.tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "vector", params)

    return chained(optax.partition({"matrix": optax.adam(1e-2), "vector": optax.sgd(0.1)}, kinds))


@proven
def frozen_by_an_optimizer():
    def kinds(params):
        return jax.tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "vector", params)

    return chained(optax.partition({"matrix": OPTIMIZER, "vector": optax.set_to_zero()}, kinds))


@proven
def average_by_optax():
    return chained(optax.ema(0.9), optax.sgd(0.1))


@proven
def skipped_where_the_noisy_sum_is_not_finite():
    return chained(optax.apply_if_finite(optax.adam(1e-2), 3))


@proven
def several_steps_of_noisy_sums():
    return chained(optax.MultiSteps(optax.adam(1e-2), 3).gradient_transformation())


@proven
def hyperparameters_in_the_state():
    return chained(optax.inject_hyperparams(optax.adam)(1e-2))


@proven
def masked_decay():
    return chained(
        optax.masked(
            optax.add_decayed_weights(0.1), lambda p: jax.tree.map(lambda a: a.ndim > 1, p)
        ),
        optax.trace(0.9),
        optax.scale_by_schedule(optax.cosine_decay_schedule(-0.1, 10)),
    )


def with_optimizer_named(name):
    """A step by hand of one of optax's optimizers behind the plan's noise."""

    def loss(model, x, y):
        return jnp.sum((model["weight"] @ x - y) ** 2)

    grad_fn = clipped(loss)
    privatizer = PLAN.privatizer(grad_fn, key=SECRET)
    optimizer = optax.with_extra_args_support(optax.chain(privatizer, optimizer_named(name)))
    extra = {"value": 0.5} if name in PUBLIC_VALUE else {}

    def step(model, opt_state, x, y, mask):
        grads = grad_fn(model, x, y, is_padding_example=mask)
        updates, opt_state = optimizer.update(grads, opt_state, model, **extra)
        return eqx.apply_updates(model, updates), opt_state

    model = {"weight": jnp.ones((steps.CLASSES, steps.WIDTH))}
    return by_hand(step, model=model, state=optimizer.init(model))


# What the caller says.

if "public_rows" in inspect.signature(dp.check_privacy).parameters:

    @proven
    def times_of_slots_that_the_caller_calls_public():
        case = steps.with_argument(
            lambda x, y, mask, times, state: (x + times[:, None], y, mask), jnp.ones(SLOTS)
        )
        return case._replace(more={"public_rows": ("argument",)})


if "kept" in inspect.signature(dp.check_privacy).parameters:

    @proven
    def loss_that_the_caller_keeps():
        case = state_steps.keeping(
            lambda kept, given: {"loss": given.values.loss.mean()}, {"loss": jnp.zeros(())}
        )
        return case._replace(more={"kept": ("loss",)})


if hasattr(dp, "add_noise"):

    @proven
    def noise_for_the_whole_tree():
        return noised_by(lambda grads, key: dp.add_noise(grads, key, STDDEV))

    @proven
    def noise_for_two_halves_of_the_leaves_with_a_key_each():
        def noisy(grads, key):
            leaves, structure = jax.tree.flatten(grads)
            keys = jax.random.split(key)
            halves = [
                dp.add_noise(half, k, STDDEV)
                for half, k in zip((leaves[:2], leaves[2:]), keys, strict=True)
            ]
            return structure.unflatten([*halves[0], *halves[1]])

        return noised_by(noisy)

    @proven
    def noise_leaf_by_leaf_with_keys_by_number():
        def noisy(grads, key):
            leaves, structure = jax.tree.flatten(grads)
            return structure.unflatten(
                dp.add_noise(leaf, jax.random.fold_in(key, i), STDDEV)
                for i, leaf in enumerate(leaves)
            )

        return noised_by(noisy)

    @proven
    def noise_under_jit_and_remat():
        return noised_by(
            jax.jit(jax.checkpoint(lambda grads, key: dp.add_noise(grads, key, STDDEV)))
        )

    @proven
    def epoch_with_our_function():
        grad_fn = clipped()
        params, static = eqx.partition(mlp(), eqx.is_inexact_array)

        def epoch(params, state, xs, ys, masks):
            def step(carry, batch):
                params, state = carry
                x, y, mask = batch
                key, state = next_key(state)
                grads = grad_fn(eqx.combine(params, static), x, y, is_padding_example=mask)
                return updated(params, state, dp.add_noise(grads, key, STDDEV)), None

            return jax.lax.scan(step, (params, state), (xs, ys, masks))[0]

        batch = tuple(jnp.stack([leaf] * 3) for leaf in data())
        return by_hand(epoch, model=params, state=first_state(params), batch=batch)
