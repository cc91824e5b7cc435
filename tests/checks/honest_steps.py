"""Steps that are private as their plan says, each by another idea; and why some are undecided.

They are written from the definition of differential privacy, and know nothing of how they are
checked.
"""

import math

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import optax.contrib
from dp_accounting import NeighboringRelation
from jax import lax
from jax.random import bits, fold_in, uniform

import eqx_dp as dp
from tests import models
from tests.checks import privacy_steps as steps
from tests.checks.privacy_steps import (
    CLASSES,
    PLAN,
    SECRET,
    SLOTS,
    STDDEV,
    WIDTH,
    At,
    added,
    by_hand,
    chained,
    clipped,
    data,
    dropout_loss,
    each,
    made,
    mlp,
    scaled,
    step_of,
    with_noise,
)
from tests.optimizers import made as optimizer_named
from tests.sharding.losses import mesh_of

MULTIPLIER = PLAN.noise_multiplier
REPLACE_ONE = steps.plan_under(NeighboringRelation.REPLACE_ONE)
REPLACE_SPECIAL = steps.plan_under(NeighboringRelation.REPLACE_SPECIAL)
EVERY_EXAMPLE = steps.plan_under(NeighboringRelation.ADD_OR_REMOVE_ONE, sampling_prob=1.0)
PRESETS = sorted({*dp.available_policies()} - {"float64"})
METHODS = ("book_keeping", "ghost", "per_example")


def is_matrix(leaf):
    return eqx.is_inexact_array(leaf) and leaf.ndim > 1


def kinds(params):
    return jax.tree.map(lambda leaf: "matrix" if is_matrix(leaf) else "vector", params)


# make_step in its forms, and of models that were not written for this library.


def of_case(case):
    """A model of the tests of the engine."""
    batch = (*case.batch(SLOTS), data()[2])
    return made(case.loss, model=case.model, batch=batch, filter_spec=case.filter_spec)


def large_leaf():
    """Kernels of 2,048 numbers or more: noise is drawn in rows, and then cut."""
    model = eqx.nn.Conv2d(16, 16, 3, key=jax.random.key(0))
    batch = jnp.zeros((SLOTS, 16, 4, 4)), data()[2]
    return made(lambda model, x: jnp.sum(model(x) ** 2), model=model, batch=batch)


def scanned(loss=steps.squared_error):
    """Several steps in one program, of one state."""
    case = made(loss)
    arrays, static = eqx.partition(case.args[0], eqx.is_array)

    def take(arrays, batch):
        *examples, mask = batch
        after = case.fn(eqx.combine(arrays, static), *examples, is_padding_example=mask)
        return eqx.filter(after, eqx.is_array), None

    step = jax.jit(lambda arrays, *batches: lax.scan(take, arrays, batches)[0])
    many = [jnp.stack([jnp.asarray(x)] * 3) for x in data()]
    return case._replace(fn=step, args=(arrays, *many), kwargs={}, private=(1, 2, 3), plan=PLAN)


def batch_loss(model, x, y):
    return jnp.mean(jnp.sum((jax.vmap(model)(x) - y) ** 2, axis=-1))


def sharded(kind, **more):
    params = (("**.weight", jax.sharding.PartitionSpec("model", None)),)
    return made(sharding=dp.ShardingRules(mesh_of(kind, data=4, model=2), params=params), **more)


def of_policy(name):
    policy = dp.load_policy(name)
    return made(policy=policy, model=policy.cast_to_param(mlp()))


MADE = {
    **{name: lambda name=name: made(method=name) for name in METHODS},
    "microbatches_of_one": lambda: made(microbatch_size=1),
    **{name: lambda name=name: of_policy(name) for name in PRESETS},
    "loss_with_keys": lambda: made(dropout_loss),
    "loss_of_a_batch": lambda: made(batch_loss, keep_batch_dim=True),
    "clip_norms_of_layers": lambda: made(l2_clip_norm=steps.clip_norms_by_layer(mlp())),
    "quantile_of_one_number": lambda: made(
        lambda w, x, y: w * x[0], model=jnp.ones(()), l2_clip_norm=dp.clipping.Quantile(weight=0.01)
    ),
    "frozen_layers": lambda: of_case(models.frozen_mlp()),
    "convolutions": lambda: of_case(models.cnn()),
    "transformer": lambda: of_case(models.gpt()),
    "auto_axes": lambda: sharded("auto"),
    "explicit_axes": lambda: sharded("explicit"),
    "replace_one": lambda: made(plan=REPLACE_ONE),
    "replace_special": lambda: made(plan=REPLACE_SPECIAL),
    "all_examples_in_every_step": lambda: made(plan=EVERY_EXAMPLE),
    "fresh_randomness": lambda: made(seed=None),
    "large_leaf": large_leaf,
    "scanned": scanned,
}


# Loops by hand with the plan's noise in a chain of optax.


def groups():
    """The plan's noise for all numbers, drawn by two optimizers, each for its own parameters."""
    optimizers = {"matrix": steps.OPTIMIZER, "vector": optax.sgd(1)}
    parts = {kind: optax.chain(steps.NOISE, its) for kind, its in optimizers.items()}
    return steps.with_optimizer(optax.multi_transform(parts, kinds))


def loss_with_a_solver(model, x, y):
    options = {"stepsize_controller": diffrax.PIDController(1e-3, 1e-6), "throw": False}
    term = diffrax.ODETerm(lambda t, x, args: jnp.tanh(model(x)[0]) * x)
    found = diffrax.diffeqsolve(term, diffrax.Tsit5(), 0.0, 1.0, 0.1, x, max_steps=16, **options)
    return jnp.sum((model(found.ys[0]) - y) ** 2)


def loss_with_a_loop(model, x, y):
    """How long it runs depends on the example, and on no other."""
    is_short = lambda c: (jnp.sum(c[0] * c[0]) < 10.0) & (c[1] < 5)  # noqa: E731
    x, _ = lax.while_loop(is_short, lambda c: (1.5 * c[0] + 0.1, c[1] + 1), (x, 0))
    return steps.squared_error(model, lax.stop_gradient(x), y)


def loss_with_a_branch(model, x, y):
    error = model(x) - y
    return lax.cond(x[0] > 0, lambda e: jnp.sum(e * e), lambda e: jnp.sum(jnp.abs(e)), error)


CHAINS = {
    "replace_one": lambda: chained(plan=REPLACE_ONE),
    "mixed_bfloat16": lambda: chained(policy=dp.load_policy("mixed_bfloat16")),
    "loss_scale": lambda: chained(policy=dp.load_policy("mixed_float16")),
    "multi_transform": lambda: chained(
        optax.multi_transform({"matrix": optax.adam(1e-2), "vector": optax.sgd(0.1)}, kinds)
    ),
    "noise_inside_of_groups": groups,
    "schedule_free": lambda: steps.with_optimizer(
        optax.contrib.schedule_free(optax.chain(steps.NOISE, optax.sgd(0.1)), 0.1)
    ),
    "frozen_vectors": lambda: chained(filter_spec=is_matrix),
    "clip_norms_of_layers": lambda: chained(l2_clip_norm=steps.clip_norms_by_layer(mlp())),
    "noise_that_is_kept": steps.with_kept_noise,
    "loop_over_one_example": lambda: chained(loss=loss_with_a_loop, method="per_example"),
    "branch_on_one_example": lambda: chained(loss=loss_with_a_branch),
    "solver_that_adapts": lambda: chained(loss=loss_with_a_solver, method="per_example"),
}


# Noise and keys by hand, on the sum of one loss or of several.


def layers_with_a_noise_of_their_own(grads, noise):
    """For clip norms C and noise z C sqrt(layers), the sum of (C / noise)^2 is 1 / z^2."""
    given = zip(grads.layers, (0.5, 2.0), strict=True)
    layers = [with_noise(layer, noise, STDDEV * norm * math.sqrt(2)) for layer, norm in given]
    return eqx.tree_at(lambda tree: tuple(tree.layers), grads, tuple(layers))


def checked(grads, key):
    """`eqx.error_if` and a print look at what has been released."""
    noisy = with_noise(grads, key)
    norm = optax.tree.norm(noisy)
    jax.debug.print("norm of the noisy gradient {}", norm)
    return eqx.error_if(noisy, ~jnp.isfinite(norm), "the noisy gradient is not finite")


def skipped_by_the_noisy_norm(grads, key):
    noisy = with_noise(grads, key)
    return lax.cond(optax.tree.norm(noisy) > 100.0, lambda: scaled(0.0, noisy), lambda: noisy)


def under_jit_and_remat(grads, noise):
    """The stream goes in and out of a jitted and rematerialised function."""

    @jax.jit
    @jax.checkpoint
    def drawn(grads, state):
        return dp.add_noise(grads, state, STDDEV)

    noisy, noise.state = drawn(grads, noise.state)
    return noisy


NOISED_BY = {
    "stream_carried": with_noise,
    "layers_with_a_noise_of_their_own": (
        layers_with_a_noise_of_their_own,
        {"grad_fn": clipped(l2_clip_norm=steps.clip_norms_by_layer(mlp())), "multiplier": 0.0},
    ),
    "noise_of_the_scaled_gradient": lambda g, k: with_noise(scaled(10.0, g), k, 10.0 * STDDEV),
    "divided_afterwards": (
        lambda g, k: scaled(1 / steps.EXPECTED, with_noise(g, k, MULTIPLIER)),
        {"grad_fn": clipped(normalize_by=1.0)},
    ),
    "more_noise": (lambda g, k: with_noise(g, k, 2 * STDDEV), {"multiplier": 2 * MULTIPLIER}),
    "noise_for_replace_one": (lambda g, k: with_noise(g, k, 2 * STDDEV), {"plan": REPLACE_ONE}),
    "noise_under_jit_and_remat": under_jit_and_remat,
    "checked": checked,
    "skipped_by_the_noisy_norm": skipped_by_the_noisy_norm,
    "behind_a_barrier": lambda g, k: lax.optimization_barrier(
        with_noise(lax.optimization_barrier(g), k)
    ),
}

STEP_OF = {
    "counter_for_the_loss": (
        lambda at: at.noised(at.sum(dropout_loss, key=fold_in(at.more[0], at.state.step))),
        {"batch": (*data(), jax.random.key(6))},
    ),
    "key_that_is_split": lambda at: at.noised(at.sum(dropout_loss, key=at.keys[1])),
    # One example moves the sum of both by twice the bound.
    "two_losses": lambda at: at.noised(added(at.sum(), at.sum(steps.absolute_error)), 2 * STDDEV),
    "decay_behind_the_noise": lambda at: added(at.noised(), scaled(0.1, steps.params_of(at.model))),
}

# The caller counts turns.
WITH_A_NUMBER = {
    "times_of_the_caller": lambda at: lax.fori_loop(
        0, at.more[0], lambda _, noisy: scaled(0.9, noisy), at.noised()
    ),
}


# What is shown or kept beside a step.

PUBLIC = jnp.ones((3, WIDTH)), jnp.ones((3, CLASSES))
RATE = optax.cosine_decay_schedule(0.1, 10)
BESIDE = {
    "nothing": lambda at: (),
    "norm_of_the_noisy_gradient": lambda at: optax.tree.norm(at.noisy),
    "rate_and_step": lambda at: (RATE(at.state.step), at.state.step),
    "loss_of_public_data": lambda at: At(at.new, None, *PUBLIC, None).losses().mean(),
    "clipped_gradient_of_public_data": lambda at: clipped()(at.new, *PUBLIC),
    "numbers_of_a_fresh_key": lambda at: bits(at.keys[0], (4,)),
    "disclosed_loss": (
        lambda at: {"loss": at.values.loss.mean()},
        {"more": {"disclose": ("2.loss",)}},
    ),
}


KEEPING = {
    "kept_model": (lambda kept, at: steps.params_of(at.new), steps.params_of(mlp())),
    "kept_counter": (lambda kept, at: kept + 1, jnp.zeros((), int)),
}


# What may be done to examples before the engine: to each by itself, or by public numbers.


def normalized(x):
    return (x - x.mean(axis=1, keepdims=True)) / (x.std(axis=1, keepdims=True) + 1e-3)


def gathered():
    """From the whole data set on the device, by the sampler's indices: -1 is padding."""
    x, y, mask = (jnp.concatenate([leaf, leaf]) for leaf in data())
    index = jnp.where(mask[:SLOTS], -1, jnp.arange(SLOTS))
    tables = {"batch": (x, y, index, index < 0), "private": (2, 3, 4, 5)}
    rows = lambda at: {"x": at.x[at.mask], "y": jnp.take(at.y, at.mask, axis=0)}  # noqa: E731
    return steps.prepared_by(lambda at: at.use(mask=at.more[0], **rows(at)), **tables)


def scanned_indices():
    """The same, a row of indices in each turn of a scan."""
    params, static = eqx.partition(mlp(), eqx.is_inexact_array)

    def epoch(params, state, xs, ys, *chosen):
        def step(carry, chosen):
            (params, state), (index, mask) = carry, chosen
            noise = steps.Noise(state.stream)
            at = At(eqx.combine(params, static), state, xs[index], ys[index], mask)
            noisy = at.noised(noise=noise)
            return steps.updated(params, state._replace(stream=noise.state), noisy), None

        return lax.scan(step, (params, state), chosen)[0]

    index = jnp.stack([jnp.where(data()[2], -1, jnp.arange(SLOTS))] * 3)
    batch = {"batch": (*data()[:2], index, index < 0), "private": (2, 3, 4, 5)}
    return by_hand(epoch, model=params, state=steps.first_state(params), **batch)


def rules_and_the_plan():
    rules = dp.ShardingRules(mesh_of("auto", data=8))
    case = chained(sharding=rules)
    model, state, *batch = case.args
    return case._replace(args=(rules.shard(model), state, *rules.shard_batch(tuple(batch))))


BACKBONE = eqx.nn.MLP(WIDTH, WIDTH, 4, 1, key=jax.random.key(3))
PREPARED = {
    "normalized_by_constants": lambda at: at.use(x=(at.x - jnp.arange(WIDTH)) / 0.3),
    "normalized_each_by_itself": lambda at: at.use(x=normalized(at.x)),
    # An example that is not finite is left out: each decides for itself.
    "not_finite_masked": lambda at: at.use(mask=at.mask | ~jnp.all(jnp.isfinite(at.x), axis=1)),
    "one_weight_for_all_slots": lambda at: at.times(jnp.full(SLOTS, 0.5)),
    # A number for each feature, which all examples share.
    "public_table": (lambda at: at.use(x=at.x * at.more[0]), jnp.ones(WIDTH)),
    # What changes from step to step is the same for all slots.
    "row_of_a_table": (lambda at: at.use(x=at.x * at.more[0][at.state.step]), jnp.ones(64)),
    "public_rows": (lambda at: at.times(at.more[0]), jnp.ones(SLOTS), {"more": {"public_rows": 5}}),
    "frozen_backbone": lambda at: at.use(x=jax.vmap(BACKBONE)(at.x)),
    "one_hot_labels": lambda at: at.use(y=jax.nn.one_hot(jnp.argmax(at.y, 1), CLASSES)),
    "padding_zeroed": lambda at: at.use(x=jnp.where(at.mask[:, None], 0.0, at.x)),
    "mask_chosen": lambda at: at.use(mask=jnp.where(jnp.any(at.x > 9, axis=1), True, at.mask)),
}

# More of what users write.


def accumulated(at, parts_of=steps.in_order):
    """Clipped sums of microbatches, added up in a scan."""
    turn = lambda total, part: added(total, part.sum())  # noqa: E731
    return at.noised(at.over_microbatches(turn, steps.zero_sums(), parts_of))


def of_fixed_size():
    """Batches of a fixed size have no padding, and need no mask."""
    relation = NeighboringRelation.REPLACE_ONE
    sampling = dp.sampling.FixedSize(SLOTS, 100)
    plan = dp.PrivacyPlan(None, 10, 1.2, 1e-5, sampling=sampling, neighboring_relation=relation)
    noised = lambda at: at.noised(at.use(mask=None).sum(), 2 * STDDEV)  # noqa: E731
    return step_of(noised, plan=plan)


def with_unlabelled():
    """A labelled and an unlabelled batch, each with its mask: one row moves one of two sums."""
    more = jnp.ones((6, WIDTH)), jnp.ones((6, CLASSES)), jnp.zeros(6, bool)

    def noisy(at):
        x, y, mask = at.more
        return at.noised(added(at.sum(), at.use(x=x, y=y, mask=mask).sum()), 2 * STDDEV)

    return step_of(noisy, batch=(*data(), *more), private=(2, 3, 4, 5, 6, 7), multiplier=0.0)


def of_users():
    users = dp.Users(jnp.arange(40) // 4, 4)
    plan = dp.PrivacyPlan(**steps.BASICS, unit=users)
    x, y, mask = data()
    rows = jnp.stack([x] * 4, 1), jnp.stack([y] * 4, 1), jnp.zeros((SLOTS, 4), bool)
    return made(plan=plan, batch=(*rows, mask))


def ensemble():
    """Two models on one batch, by `vmap` of the whole step, with more noise."""
    noise, grad_fn = noise_of(0), clipped()
    params, static = eqx.partition(mlp(), eqx.is_inexact_array)

    def step(params, state, x, y, mask):
        model = eqx.combine(params, static)
        grads, state = noise.update(grad_fn(model, x, y, is_padding_example=mask), state)
        return eqx.apply_updates(params, scaled(-0.1, grads)), state

    state = jax.tree.map(lambda *a: jnp.stack(a), *(noise_of(i).init(params) for i in range(2)))
    many = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), params)
    mapped = jax.vmap(step, (0, 0, None, None, None))
    return by_hand(mapped, model=many, state=state)


def noise_of(i):
    return dp.gaussian_privatizer(stddev=STDDEV * math.sqrt(2), key=SECRET + i)


def strided(a):
    return jnp.swapaxes(a.reshape(2, 4, *a.shape[1:]), 0, 1)


MORE = {
    "gathered": gathered,
    "scanned_indices": scanned_indices,
    "rules_and_the_plan": rules_and_the_plan,
    "accumulated": lambda: step_of(accumulated),
    "accumulated_with_strides": lambda: step_of(lambda at: accumulated(at, strided)),
    "fixed_size": of_fixed_size,
    "with_unlabelled": with_unlabelled,
    "of_users": of_users,
    "ensemble": ensemble,
    "augmented_by_the_engine": lambda: made(dropout_loss, augmentations=3),
    "scanned_with_keys": lambda: scanned(dropout_loss),
}

HONEST = steps.cases(
    (each, {f"made: {name}": make for name, make in MADE.items()}),
    (each, {f"chain: {name}": make for name, make in CHAINS.items()}),
    (steps.noised_by, NOISED_BY),
    (step_of, STEP_OF),
    (steps.with_a_number, WITH_A_NUMBER),
    (steps.epoch_by, {"epoch": At.noised}),
    (steps.beside, BESIDE),
    (steps.keeping, KEEPING),
    (steps.prepared_by, PREPARED),
    (each, MORE),
)


# Steps of which the check cannot tell, and why.


BY_PARTS = {
    # Parts of a batch by hand: the engine makes microbatches, or a scan adds them up.
    "slices": lambda at: at.noised(added(*(at.rows(slice(i, i + 2)).sum() for i in (0, 2, 4, 6)))),
    # A bound that is not reached.
    "noise_in_both_branches": lambda at: at.noise.chosen(
        1 * (at.state.step < 3), [lambda g, n: with_noise(g, n, 2 * STDDEV), with_noise], at.sum()
    ),
    "noise_in_two_parts": lambda at: at.noised(at.noised(stddev=0.6 * STDDEV), 0.8 * STDDEV),
}

BY_ROWS = {
    # Random numbers of slots: draw in the loss, with its key.
    "times_of_a_diffusion": lambda at: at.times(uniform(at.keys[1], (SLOTS,))),
}

OVER_DEVICES = {"sum_of_devices": lambda at: steps.psum(at.sum())}

# Noise by hand: dp.add_noise is what the check knows.
BY_NORMALS = {
    "normals": steps.with_normals,
    "taken_away": lambda g, k: added(g, scaled(-1.0, steps.noise_alone(g, k))),
}

UNDECIDED = steps.cases(
    (step_of, BY_PARTS),
    (steps.prepared_by, BY_ROWS),
    (steps.over_devices, OVER_DEVICES),
    (steps.noised_by, BY_NORMALS),
)


PUBLIC_VALUE = {"polyak_sgd", "momo", "momo_adam", "reduce_on_plateau"}
"""Optimizers of optax that want a value beside the gradient."""


def with_optimizer_named(name):
    """A step by hand of one of optax's optimizers behind the plan's noise."""
    grad_fn = clipped(lambda model, x, y: jnp.sum((model["weight"] @ x - y) ** 2))
    chain = optax.chain(PLAN.privatizer(grad_fn, key=SECRET), optimizer_named(name))
    optimizer = optax.with_extra_args_support(chain)
    extra = {"value": 0.5} if name in PUBLIC_VALUE else {}

    def step(model, opt_state, x, y, mask):
        grads = grad_fn(model, x, y, is_padding_example=mask)
        updates, opt_state = optimizer.update(grads, opt_state, model, **extra)
        return eqx.apply_updates(model, updates), opt_state

    model = {"weight": jnp.ones((CLASSES, WIDTH))}
    return by_hand(step, model=model, state=optimizer.init(model))
