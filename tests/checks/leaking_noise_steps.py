"""Steps that leak by their noise: too little, none, twice the same, taken away; by their keys.

Tables are by frame, and a comment says what is wrong. None of them may be called fine.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from dp_accounting import NeighboringRelation
from jax import lax
from jax.random import bernoulli, bits, fold_in, key_data, normal, split, uniform

import eqx_dp as dp
from tests.checks.privacy_steps import (
    EXPECTED,
    OPTIMIZER,
    SECRET,
    SLOTS,
    STDDEV,
    WIDTH,
    absolute_error,
    added,
    beside,
    by_hand,
    by_leaf,
    carrying,
    cases,
    clipped,
    counted,
    dropout_loss,
    epoch_by,
    first_state,
    minus,
    noise_alone,
    noised_by,
    plan_under,
    scaled,
    squared_error,
    step_of,
    updated,
    where,
    with_a_number,
    with_noise,
    with_normals,
    zero_sums,
)

ROOT = jax.random.key(12)
NO_PLAN = {"plan": None, "multiplier": 0.0}
WEAK = {"plan": dp.PrivacyPlan(0.5, 10, 1.0, 1e-5)}
norm = optax.tree.norm


def last_of(grads):
    """One leaf: the last bias."""
    return jax.tree.leaves(grads)[-1]


def as_words(values):
    return lax.bitcast_convert_type(values, jnp.uint32)


def leafwise(change, *trees):
    return jax.tree.map(change, *trees)


# What stands for adding the noise.


def selected(grads, key):
    """Of itself and itself turned round."""

    def halves(g):
        first = (jnp.arange(g.size) < g.size // 2).reshape(g.shape)
        return jnp.where(first, g, jnp.flip(g))

    return with_noise(leafwise(halves, grads), key)


def sum_of_two_leaves(grads, key):
    """Two leaves of one clipped sum: their sum moves by sqrt(2) of its norm."""
    leaves, structure = jax.tree.flatten(grads)
    both = leaves[3] + leaves[1][:2]
    return with_noise(structure.unflatten([*scaled(0.0, leaves[:3]), both]), key)


def redrawn(grads, key):
    """A loop draws noise until the noisy sum is near the sum."""

    def draw(carry):
        key, own = split(carry[0])
        return key, with_noise(grads, own)

    return lax.while_loop(lambda c: norm(minus(c[1], grads)) > 0.1, draw, draw((key, None)))[1]


def better_of_two(grads, key):
    """Two draws, and the one that is nearer to the sum is taken."""
    one, other = (with_noise(grads, k, 2 * STDDEV) for k in split(key))
    return where(norm(minus(one, grads)) < norm(minus(other, grads)), one, other)


def padded_with_one_number(grads, key):
    """One number of the sum is in many places, each with the noise for one."""
    padded = leafwise(lambda g: lax.pad(g, g.ravel()[0], [(0, 9, 0)] * g.ndim), grads)
    noisy = with_noise(padded, key, 2 * STDDEV)
    return leafwise(lambda g, n: n[tuple(map(slice, g.shape))], grads, noisy)


def on_some_leaves(grads, key):
    layers = with_noise(grads.layers[:1], key)
    return eqx.tree_at(lambda tree: tree.layers, grads, (*layers, *grads.layers[1:]))


def copied(grads, key):
    """The sum is released four times, and the mean of them has half of the noise."""
    many = leafwise(lambda leaf: jnp.broadcast_to(leaf, (4, *leaf.shape)), grads)
    return leafwise(lambda leaf: leaf.mean(0), with_noise(many, key))


def halves_with_one_key(grads, key):
    """Two calls on lists with one key: the same paths, so the same noise."""
    leaves, structure = jax.tree.flatten(grads)
    return structure.unflatten([*with_noise(leaves[:2], key), *with_noise(leaves[2:], key)])


def mean_of_two_copies(grads, key):
    both = with_noise({"one": grads, "other": grads}, key)
    return scaled(0.5, added(both["one"], both["other"]))


def by_a_rule(grads, key):
    """A `custom_jvp` around the noise whose tangent is the sum itself."""
    noisy = jax.custom_jvp(lambda grads: with_noise(grads, key))
    noisy.defjvp(lambda primals, tangents: (noisy(*primals), primals[0]))
    return jax.jvp(noisy, (grads,), (grads,))[1]


def little_by_little(grads, key):
    noisier = lambda g, k: (with_noise(g, k, 1e-6), None)  # noqa: E731
    return lax.scan(noisier, grads, split(key, 3))[0]


def exact_by_a_rule(grads, key):
    """A function with a `custom_jvp` is given the noisy sum and the sum, and returns the latter."""
    straight = jax.custom_jvp(lambda noisy, exact: exact)
    straight.defjvp(lambda primals, tangents: (primals[1], tangents[0]))
    return leafwise(straight, with_noise(grads, key), grads)


def exact_by_a_mapping_rule(grads, key):
    """A `custom_vmap` that gives the noisy sum alone, and the sum under `vmap`."""
    hidden = jax.custom_batching.custom_vmap(lambda noisy, exact: noisy)
    hidden.def_vmap(lambda size, batched, noisy, exact: (exact, True))
    mapped = jax.vmap(hidden)
    return leafwise(lambda n, g: mapped(n[None], g[None])[0], with_noise(grads, key), grads)


def with_zeros(grads, key):
    return leafwise(lambda leaf: leaf + 0.0, grads)


def called(name):
    """The sum goes through a jitted function of this name, which adds nothing to it."""

    def identity(tree, key, stddev):
        return leafwise(lambda leaf: leaf + stddev * 0.0, tree)

    identity.__name__ = identity.__qualname__ = name
    identity.__module__ = "eqx_dp.privacy.noise"
    return lambda grads, key: jax.jit(identity)(grads, key, STDDEV)


NOISED_BY = {
    "no_noise": lambda g, k: g,
    "noise_of_deviation_zero": lambda g, k: with_noise(g, k, 0.0),
    "noise_of_half_the_plan": lambda g, k: with_noise(g, k, STDDEV / 2),
    # The noise is divided by the expected batch size, and the gradient is not.
    "gradient_scaled_before_the_noise": lambda g, k: with_noise(scaled(10.0, g), k),
    "noise_in_proportion": lambda g, k: with_noise(g, k, STDDEV * norm(g)),
    "constant_key": lambda g, k: with_noise(g, jax.random.key(0)),
    # One key for the sum and for zeros: the difference has no noise.
    "noise_of_zeros_subtracted": lambda g, k: minus(with_noise(g, k), noise_alone(g, k)),
    # `vmap` over rows: all get the same noise, and their differences none.
    "one_key_for_rows": lambda g, k: leafwise(
        lambda leaf: jax.vmap(lambda row: with_noise(row, k))(leaf), g
    ),
    # The derivative of `sum + noise` in the sum's direction is the sum.
    "tangent": lambda g, k: jax.jvp(lambda g: with_noise(g, k), (g,), (g,))[1],
    # Backwards through the noise goes what was handed in: the sum.
    # (That of certified noise is zero: it is rounded.)
    "cotangent": lambda g, k: jax.vjp(lambda g: dp.add_noise(g, k, STDDEV, certified=False), g)[1](
        g
    )[0],
    # Where the sum is negative no noise is added.
    "noise_masked": lambda g, k: leafwise(
        lambda g, n: g + jnp.where(g > 0, n, 0.0), g, noise_alone(g, k)
    ),
    # Its deviation is that of the sum's own numbers.
    "noise_times_the_sum": lambda g, k: leafwise(lambda g, n: g + g * n, g, noise_alone(g, k, 1.0)),
    # `platform_dependent`: on a GPU the sum goes on without noise.
    "on_one_platform": lambda g, k: lax.platform_dependent(
        g, cpu=lambda g: with_noise(g, k), default=lambda g: scaled(1.0, g)
    ),
    "uniform_noise": lambda g, k: with_normals(g, k, draw=uniform),
    "normal_noise_in_absolute_value": lambda g, k: with_normals(
        g, k, draw=lambda *x: abs(normal(*x))
    ),
    "on_some_leaves": on_some_leaves,
    "padded_with_one_number": padded_with_one_number,
    "copied": copied,
    "selected": selected,
    "sum_of_two_leaves": sum_of_two_leaves,
    "redrawn": redrawn,
    "better_of_two": better_of_two,
    "halves_with_one_key": halves_with_one_key,
    "mean_of_two_copies": mean_of_two_copies,
    "by_a_rule": by_a_rule,
    "little_by_little": little_by_little,
    # A branch on a public coin.
    "in_one_branch": lambda g, k: lax.cond(
        bernoulli(fold_in(k, 1)), lambda: g, lambda: with_noise(g, k)
    ),
    "deviation_of_zero_under_jit": jax.jit(lambda g, k: with_noise(g, k, 0 * STDDEV)),
    "same_noise_in_a_loop": lambda g, k: lax.fori_loop(
        0, 4, lambda i, g: minus(with_noise(g, k), noise_alone(g, k)), g
    ),
    "tangent_of_many": lambda g, k: leafwise(
        lambda a: a[1] - a[0],
        jax.vmap(lambda s: with_noise(scaled(s, g), k))(jnp.asarray([1.0, 2.0])),
    ),
    "copied_by_vmap": lambda g, k: leafwise(
        lambda a: a.mean(0), jax.vmap(lambda k: with_noise(g, k))(split(k, 4))
    ),
    "transpose": lambda g, k: jax.linear_transpose(
        lambda g: added(g, scaled(0.0, noise_alone(zero_sums(), k))), g
    )(g)[0],
    "noise_unused": lambda g, k: jax.jit(lambda g: (with_noise(g, k), with_zeros(g, k))[1])(g),
    # A scope with the name of our noise, or of our draw, and none in it.
    "zeros_in_a_scope_named_noise": jax.named_scope("eqx_dp.noise")(with_zeros),
    "zeros_in_a_scope_named_draw": jax.named_scope("eqx_dp.draw")(with_zeros),
    # A jitted function of a name of ours, in a module that says it is ours, which adds nothing.
    "function_named_add_noise": called("add_noise"),
    "function_named_gaussian_privatizer": called("gaussian_privatizer"),
    # The rate is divided by the norm of the sum.
    "trust_ratio_of_the_raw_sum": lambda g, k: scaled(1 / (1e-3 + norm(g)), with_noise(g, k)),
    # The second moment is that of the sum, and the first that of the noisy sum.
    "preconditioned": lambda g, k: leafwise(
        lambda n, g: n / (1e-3 + jnp.abs(g)), with_noise(g, k), g
    ),
    # A hundredth of the sum is added once more: the noise is for it no more independent.
    "raw_sum_a_little_behind_the_noise": lambda g, k: added(with_noise(g, k), scaled(0.01, g)),
    # Biases get the sum: they are few.
    "vectors_alone": lambda g, k: leafwise(
        lambda n, g: n if g.ndim > 1 else g, with_noise(g, k), g
    ),
    # A loop that does not run returns what it was given: the sum.
    "no_turns": lambda g, k: lax.fori_loop(
        0, 0, lambda _, g: with_noise(g, k), jax.checkpoint(lambda g: g)(g)
    ),
    # The noisy sum times zero, plus the sum.
    "raw_sum_beside_zero_weight": lambda g, k: added(scaled(0.0, with_noise(g, k)), g),
    "exact_by_a_rule": exact_by_a_rule,
    "exact_by_a_mapping_rule": exact_by_a_mapping_rule,
    "normalized_before_the_noise": lambda g, k: with_noise(scaled(1 / norm(g), g), k),
    "of_another_relation": (with_noise, {"plan": plan_under(NeighboringRelation.REPLACE_ONE)}),
    "for_a_mean_on_a_sum": (with_noise, clipped(normalize_by=1.0)),
    "without_the_clip_norm": (with_noise, clipped(l2_clip_norm=2.0)),
    "without_a_clip_norm": (with_noise, clipped(l2_clip_norm=math.inf)),
}

# What happens to each leaf of the sum before the noise.
EACH_LEAF = {
    "sign": jnp.sign,
    # One example moves a number by a whole step of the grid, or by none.
    "rounded_to_a_coarse_grid": lambda g: jnp.round(g, 0),
    "rounded": lambda g: g.astype(jnp.bfloat16).astype(jnp.float32),
    # A square leaf moves by twice the clip norm.
    "added_to_its_transpose": lambda g: g + g.T if g.shape == (4, 4) else g,
    # Each number is there four times, each with the noise for one.
    "repeated": lambda g: jnp.repeat(g, 4, 0).reshape(-1, 4, *g.shape[1:]).sum(1),
    # A matrix of ones moves a vector by up to 4 times its length.
    "times_a_matrix": lambda g: jnp.ones((len(g), len(g))) @ g,
    "running_sum": lambda g: jnp.cumsum(g, axis=0),
    "largest_half": lambda g: jnp.where(jnp.abs(g) >= jnp.median(jnp.abs(g)), g, 0.0),
    "in_its_own_direction": lambda g: 0.5 * g + g / (jnp.linalg.norm(g) + 1e-6),
    # One number of the sum is in many places.
    "one_number_added_to_many": lambda g: lax.add(jnp.zeros(g.shape), g.ravel()[0]),
    "one_number_subtracted": lambda g: lax.sub(0.5 * g, 0.5 * g.ravel()[0]),
    "clamped_by_one_number": lambda g: lax.clamp(g.ravel()[0], 0 * g - 1e9, jnp.float32(1e9)),
    "one_number_written_twice": lambda g: g.at[0].set(g[-1]),
    "gathered_twice": lambda g: g[jnp.zeros(len(g), int)],
    "sorted": lambda g: jnp.sort(g, 0),
    "joined_with_itself": lambda g: jnp.concatenate([g, g]).reshape(2, *g.shape).mean(0) * 2,
}


def each_leaf(change):
    return noised_by(lambda grads, key: with_noise(leafwise(change, grads), key))


# What the optimizer gets, and what is returned.


def one_batch_four_times(at):
    """Four steps on one sample: z / sqrt(4), where the plan counts a fresh sample each."""
    grads, keys = at.sum(), split(at.keys[0], 4)
    return lax.scan(lambda c, k: (added(c, with_noise(grads, k)), None), zero_sums(), keys)[0]


def noise(at, stddev=STDDEV):
    return noise_alone(zero_sums(), at.keys[0], stddev)


def of_batch(model, x, y):
    return jax.vmap(squared_error, (None, 0, 0))(model, x, y).mean()


def moved_sum(at, by):
    """The gradient is clipped and noised, but at a model that private data has moved."""
    return at.sum(model=eqx.apply_updates(at.model, by))


def noise_before_the_clipping(at):
    """Each example's gradient gets noise, and the noisy ones are clipped: the sum has less."""
    grads = jax.vmap(eqx.filter_grad(squared_error), (None, 0, 0))(at.model, at.x, at.y)
    noisy = at.noised(grads)
    norms = jnp.sqrt(sum(jnp.sum(a**2, range(1, a.ndim)) for a in jax.tree.leaves(noisy)))
    factors = jnp.where(at.mask, 0.0, jnp.minimum(1.0, 1 / norms)) / EXPECTED
    return leafwise(lambda leaf: jnp.tensordot(factors, leaf, 1), noisy)


def with_keys(at, keys, stddev=STDDEV):
    """Two sums, each with noise from a key of its own: for the optimizer, and returned."""
    sums = at.sum(), at.sum(absolute_error)
    return tuple(with_noise(g, k, stddev) for g, k in zip(sums, keys, strict=True))


def loss_with_key(at, key, *shown):
    """Dropout masks of slots come from a key."""
    return at.noised(at.sum(dropout_loss, key=key)), *shown


def made_twice(key):
    words = key_data(key)
    return [jax.random.wrap_key_data(again) for again in (words ^ 0, words | 0)]


def twice(at, *keys):
    """Noise from two keys, added."""
    return added(*(at.noised(key=key) for key in keys))


STEPS = {
    "one_noise_for_four_losses": lambda at: at.noised(
        added(*(at.sum(lambda *a, i=i: squared_error(*a) ** (1 + i)) for i in range(4)))
    ),
    # Each has the plan's noise multiplier, together they have z / sqrt(2).
    "two_losses_with_the_noise_of_one": lambda at: added(*with_keys(at, at.keys[:2])),
    # The difference of the two noisy sums has no noise.
    "one_key_for_two_losses": lambda at: with_keys(at, [at.keys[0]] * 2, 2 * STDDEV),
    "one_batch_four_times": one_batch_four_times,
    "no_noise_in_the_first_steps": lambda at: lax.cond(
        at.state.step < 3, lambda g: g, lambda g: at.noised(g), at.sum()
    ),
    "less_noise_in_every_second_step": lambda at: lax.switch(
        at.state.step % 2, [lambda g, s=s: at.noised(g, s * STDDEV) for s in (1.0, 0.1)], at.sum()
    ),
    "divided_by_real_examples": lambda at: at.noised(
        scaled(1 / jnp.maximum(1, jnp.sum(~at.mask)), at.sum(normalize_by=1.0))
    ),
    "adam_before_the_noise": lambda at: at.noised(OPTIMIZER.update(at.sum(), at.state.opt)[0]),
    "inner_step_without_noise": lambda at: at.noised(moved_sum(at, scaled(-0.1, at.sum()))),
    "inner_step_quiet": lambda at: at.noised(moved_sum(at, at.noised(None, 1e-3, at.keys[1]))),
    "ordinary_gradient": lambda at: at.noised(eqx.filter_grad(of_batch)(at.model, at.x, at.y)),
    "noise_before_the_clipping": noise_before_the_clipping,
    # The gradient at a model that holds the noise moves with it.
    "noise_in_the_model": lambda at: added(moved_sum(at, noise(at)), noise(at)),
    # A release of little noise is added to the sum.
    "quiet_release_added": lambda at: at.noised(
        added(at.sum(), at.noised(scaled(10, at.sum()), 1e-3, at.keys[1]))
    ),
    "noise_returned": lambda at: (added(at.sum(), noise(at)), noise(at)),
    # The difference of the two has no noise.
    "one_noise_on_two_sums": lambda at: tuple(
        added(at.sum(loss), noise(at, 2 * STDDEV)) for loss in (squared_error, absolute_error)
    ),
    # The noise shows how many examples there are.
    "deviation_by_examples": lambda at: at.noised(
        stddev=STDDEV * jnp.maximum(1, jnp.sum(~at.mask))
    ),
    # At least the plan's, but how much it is shows the loss, or an input.
    "deviation_by_the_loss": lambda at: at.noised(stddev=STDDEV * (1 + at.losses().mean())),
    "deviation_selected": lambda at: at.noised(
        stddev=STDDEV * jnp.where(at.x[0, 0] > 0, 1.0, 100.0)
    ),
    "key_returned": lambda at: (at.noised(), at.keys[0]),
    "key_looked_up": lambda at: (at.noised(), jnp.stack(at.keys)[np.array([0, 2])]),
    "key_printed": lambda at: (jax.debug.print("{}", key_data(at.keys[0])), at.noised())[1],
    "key_for_loss_and_noise": lambda at: loss_with_key(at, at.keys[0]),
    # The loss closes over the key of the noise.
    "key_in_the_loss": lambda at: at.noised(
        at.sum(lambda m, x, y: squared_error(m, x + normal(at.keys[0], x.shape), y))
    ),
    "key_from_private_data": lambda at: at.noised(
        key=fold_in(at.keys[0], jnp.sum(at.x).astype(jnp.int32))
    ),
    "noise_in_the_loss": lambda at: at.sum(
        lambda m, x, y: squared_error(m, with_noise(x, jax.random.key(0)), y)
    ),
    "noise_to_a_callback": lambda at: (
        jax.debug.callback(lambda n: None, last_of(noise(at))),
        added(at.sum(), noise(at)),
    )[1],
    "noise_for_one_clip_norm": lambda at: at.noised(
        added(at.sum(), at.sum(absolute_error, l2_clip_norm=0.5)), 0.5 * STDDEV
    ),
    # Which mask an example gets, its slot says, in every step the same.
    "constant_loss_key": lambda at: loss_with_key(at, jax.random.key(0)),
    "few_loss_keys": lambda at: loss_with_key(at, fold_in(jax.random.key(0), at.state.step % 2)),
    "loss_key_returned": lambda at: loss_with_key(at, at.keys[1], at.keys[1]),
    "loss_key_drawn_from": lambda at: loss_with_key(
        at, at.keys[1], normal(split(at.keys[1], SLOTS)[0], (WIDTH,))
    ),
    # Two arrays of words that are equal, by arithmetic.
    "key_made_twice": (lambda at: twice(at, *made_twice(at.keys[0])), NO_PLAN),
    "seed_twice": (
        lambda at: twice(at, *(fold_in(k, at.state.step) for k in (ROOT, jax.random.key(12)))),
        NO_PLAN,
    ),
}


# The caller gives a number.


def several_releases(at):
    """As many releases of one sum as an argument says."""
    grads = at.sum()
    noised = lambda i: at.noised(grads, key=fold_in(at.keys[0], i))  # noqa: E731
    return lax.fori_loop(0, at.more[0], lambda i, total: added(total, noised(i)), zero_sums())


def by_number(at, *numbers):
    return with_keys(at, [fold_in(ROOT, number) for number in numbers], 2 * STDDEV)


NUMBERED = {
    # Steps 0 and 1, 2 and 3 have one key.
    "number_halved": lambda at: at.noised(key=fold_in(ROOT, at.more[0] // 2)),
    # Every fourth step has the same noise.
    "number_modulo_four": lambda at: at.noised(key=fold_in(ROOT, at.more[0] % 4)),
    "number_in_eight_bits": lambda at: at.noised(key=fold_in(ROOT, at.more[0].astype(jnp.uint8))),
    "one_of_four_keys": lambda at: at.noised(key=split(ROOT, 4)[at.more[0]]),
    # The seed is the step's number, which everybody knows.
    "number_as_the_seed": lambda at: at.noised(key=jax.random.key(at.more[0])),
    # Two steps within a second have the same noise.
    "whole_seconds": (lambda at: at.noised(key=fold_in(ROOT, at.more[0].astype(int))), 0.5),
    # The key that the caller's number is folded into is among the results.
    "root_returned": lambda at: (at.noised(key=fold_in(ROOT, at.more[0])), key_data(ROOT)),
    # The key of the next step's noise is among the results of this one.
    "next_key_returned": lambda at: (
        at.noised(key=fold_in(ROOT, at.more[0])),
        key_data(fold_in(ROOT, at.more[0] + 1)),
    ),
    # The second noise of a step is the first of the next one.
    "number_and_the_next": lambda at: by_number(at, at.more[0], at.more[0] + 1),
    # In step 3 both sums have the same noise.
    "number_and_a_constant": lambda at: by_number(at, at.more[0], 3),
    "number_twice": lambda at: by_number(at, at.more[0], at.more[0]),
    # Step 1 and key 0, step 0 and key 1 have the same noise.
    "number_and_counter_added": lambda at: at.noised(key=fold_in(ROOT, at.state.step + at.more[0])),
    "several_releases": several_releases,
    "doubled_by_an_argument": lambda at: at.noised(
        lax.fori_loop(0, at.more[0], lambda _, g: scaled(2.0, g), at.sum())
    ),
    "scaled_by_an_argument": lambda at: at.noised(scaled(at.more[0], at.sum())),
    "deviation_from_an_argument": lambda at: at.noised(stddev=1.0 * at.more[0]),
    # A public flag turns the noise off.
    "raw_sum_by_a_flag": lambda at: where(at.more[0] > 2, at.sum(), at.noised()),
}


# What is shown beside an honest step: another release, or what comes of one with little noise.


def key_carried_in_words(at):
    """A loop that begins with zeros carries the words of a key, and returns them a turn later."""
    words = key_data(at.keys[0])
    noisy = with_noise(last_of(at.grads), at.keys[0], 9 * STDDEV)
    return noisy, lax.scan(lambda c, _: (words, c), jnp.zeros_like(words), None, length=2)[1]


BESIDE = {
    # Numbers of the sum that are zero stay zero, and large ones stay large.
    "sum_times_random_numbers": lambda at: last_of(at.grads) * normal(at.keys[0], (2,)),
    # The other half stays.
    "half_of_the_sum_dropped": lambda at: jnp.where(
        bernoulli(at.keys[0], 0.5, (2,)), last_of(at.grads), 0.0
    ),
    # One key for the sum and for zeros, and both leave.
    "zeros_with_one_key": (
        lambda at: [at.noised(tree, 3 * STDDEV) for tree in (at.grads, scaled(0.0, at.grads))],
        WEAK,
    ),
    # The second noise doubles the first: it is the same, and both versions leave.
    "doubled_with_one_key": lambda at: [
        at.noised(tree, 3 * STDDEV) for tree in (at.grads, scaled(2.0, at.grads))
    ],
    # Twice the first minus the second is the sum, without noise.
    "one_key_for_two_deviations": lambda at: [at.noised(at.grads, s * STDDEV) for s in (10, 20)],
    "key_carried_in_words": (key_carried_in_words, WEAK),
}

# `quiet` is the sum with a millionth of noise. Whoever tries all sums finds it from its traces.
QUIET = {
    "bits_of_a_key": lambda quiet, k: bits(fold_in(ROOT, as_words(quiet)[0])),
    "numbers_of_a_seed": lambda quiet, k: normal(jax.random.key(as_words(quiet)[0])),
    # A coin's probability of heads is a number of the sum.
    "coin": lambda quiet, k: bernoulli(k, jax.nn.sigmoid(quiet), (1000, 2)),
    # The interval that the number is drawn from shows the sum to six digits.
    "uniform_around": lambda quiet, k: uniform(k, (2,), minval=quiet, maxval=quiet + 1e-6),
    # A public table in the order of the sum's numbers.
    "order": lambda quiet, k: jnp.arange(2)[jnp.argsort(quiet)],
    # A scan carries it, and returns its running sum.
    "running_total": lambda quiet, k: lax.scan(lambda c, q: (c + q, c), 0.0, quiet)[0],
    # A loop runs as often as the sum says, in thousandths.
    "trip_count": lambda quiet, k: lax.fori_loop(0, quiet[0].astype(int), lambda i, c: c + 1, 0),
    # Which of two public numbers is returned, the sum says.
    "branch": lambda quiet, k: lax.cond(quiet[0] > 0, lambda: 1.0, lambda: 2.0),
}


def from_a_quiet_release(random_of):
    return beside(lambda at: random_of(with_noise(last_of(at.grads), at.keys[0], 1e-6), at.keys[1]))


# Keys: of steps by a counter in the state, of leaves, of an epoch's turns, and what is carried.

COUNTED = {
    # After 256 steps the keys come again.
    "counter_of_eight_bits": lambda key, step: fold_in(key, step.astype(jnp.uint8)),
    "one_of_four_keys_by_the_counter": lambda key, step: split(key, 4)[step],
    "key_from_the_step_alone": lambda key, step: jax.random.key(step),
    "not_advanced": lambda key, step: split(key)[1],
    "counter_modulo_two": lambda key, step: fold_in(key, step % 2),
    "counter_times_a_power": lambda key, step: fold_in(
        key, step.astype(jnp.uint32) * jnp.uint32(2**31)
    ),
    "counter_stops_early": lambda key, step: fold_in(key, jnp.where(step < 3, step, 9)),
    "counter_by_float": lambda key, step: fold_in(key, (0.5 * step).astype(int)),
    "bits_of_the_counter_dropped": lambda key, step: fold_in(key, step & 255),
}

KEYS_OF_LEAVES = {
    "one_key": lambda key, n: [key] * n,
    "by_a_whole_turn": lambda key, n: [
        fold_in(key, jnp.uint32(3) + (i % 2) * jnp.full((), 2**31, jnp.uint32) * 2)
        for i in range(n)
    ],
    "by_ones": lambda key, n: jax.vmap(fold_in, (None, 0))(key, jnp.ones(n, int)),
    "by_numbers_modulo_two": lambda key, n: [fold_in(key, i % 2) for i in range(n)],
    # An index that is too large is the last.
    "behind_the_last": lambda key, n: [
        lax.dynamic_index_in_dim(split(key), i, keepdims=False) for i in range(n)
    ],
    # With JAX's default generator, `split(key)[i]` is `fold_in(key, i)`.
    "split_and_folded": lambda key, n: [*split(key), fold_in(key, 0), key],
    "two_splits": lambda key, n: [*split(key), *split(key, 3)][:n],
    "parent_and_children": lambda key, n: [key, *split(key, n - 1)],
    "joined": lambda key, n: jnp.concatenate([split(key, 2)] * 2),
    "stacked_by_a_loop": lambda key, n: lax.map(lambda i: key, jnp.arange(n)),
    "in_two_dimensions": lambda key, n: [*split(key, (2, 2)).reshape(-1)[:2], *split(key, 4)[:2]],
}

KEYS_OF_TURNS = {
    "one_key_for_all_turns": jnp.broadcast_to,
    "in_pairs": lambda key, n: jax.vmap(fold_in, (None, 0))(key, jnp.arange(n) // 2),
    "halved": lambda key, n: split(key, 2 * n).reshape(n, 2)[:, 0][::-1],
}


def epoch_keys(keys_of):
    return epoch_by(lambda at: at.noised(), keys_of=keys_of)


def chosen_key(at):
    """Which of two keys the state carries, a label says: whoever has the keys reads it."""
    one, other, key = split(at.state.key, 3)
    return at.noised(key=key), {"key": jnp.where(at.y[0, 0] > 0, one, other)}


def carried_every_second_step(at):
    """In the other steps the key stays, and with it the noise."""
    carried, key = split(at.state.key)
    return at.noised(key=key), {"key": jnp.where(at.state.step % 2 == 0, carried, at.state.key)}


def drawn_from_and_carried(at):
    """The key of the noise is the one that the next step splits."""
    carried, _ = split(at.state.key)
    return at.noised(key=carried), {"key": carried}


def counter_of_short_noisy_sums(at):
    """The counter moves when the noisy sum is short: if it is not, the noise comes again."""
    noisy = at.noised(key=fold_in(at.state.key, at.state.step))
    return noisy, {"step": at.state.step + (norm(noisy) < 1)}


def sum_of_steps(at):
    """The state's sum of raw sums gets the noise of one step in each step."""
    carried, key = split(at.state.key)
    total = added(at.state.kept, at.sum())
    return with_noise(total, key), {"key": carried, "kept": total}


def noise_of_the_step_before(at):
    """Correlated noise by hand: this step's noise is subtracted in the next, and is kept."""
    carried, key = split(at.state.key)
    grads = at.sum()
    noise = noise_alone(grads, key)
    return added(grads, noise, scaled(-0.9, at.state.kept)), {"key": carried, "kept": noise}


CARRYING = {
    "chosen_key": chosen_key,
    "carried_every_second_step": carried_every_second_step,
    # At step 0 the key of the noise is the key that the state carries on.
    "carried_and_counted": lambda at: (
        at.noised(key=fold_in(at.state.key, at.state.step)),
        {"key": split(at.state.key)[0]},
    ),
    "drawn_from_and_carried": drawn_from_and_carried,
    "counter_not_advanced": lambda at: (
        at.noised(key=fold_in(at.state.key, at.state.step)),
        {"step": at.state.step},
    ),
    "counter_of_short_noisy_sums": counter_of_short_noisy_sums,
    # The state carries two keys and exchanges them: every second step has the same noise.
    "exchanged_keys": (
        lambda at: (at.noised(key=at.state.key), {"key": at.state.kept, "kept": at.state.key}),
        jax.random.key(4),
    ),
    "sum_of_steps": (sum_of_steps, zero_sums()),
    "noise_of_the_step_before": (noise_of_the_step_before, zero_sums()),
}


def privatizers(states_of):
    """Two privatizers of one secret, on two sums; `states_of(before, after)` is kept of them."""
    noise = dp.gaussian_privatizer(stddev=2 * STDDEV, key=SECRET)
    other = dp.gaussian_privatizer(stddev=2 * STDDEV, key=SECRET)

    def step(model, kept, x, y, mask):
        one, two, state = kept
        sums = (
            clipped(loss)(model, x, y, is_padding_example=mask)
            for loss in (squared_error, absolute_error)
        )
        noisy, after_one = noise.update(next(sums), one)
        shown, after_two = other.update(next(sums), two)
        model, state = updated(model, state, noisy)
        return model, (*states_of((one, two), (after_one, after_two)), state), shown

    return by_hand(step, state=(noise.init(zero_sums()), other.init(zero_sums()), first_state()))


PRIVATIZERS = {
    "two_privatizers_of_one_secret": lambda before, after: after,
    "states_of_privatizers_thrown_away": lambda before, after: before,
}

LEAKING_NOISE = cases(
    (noised_by, NOISED_BY),
    (each_leaf, EACH_LEAF),
    (step_of, STEPS),
    (with_a_number, NUMBERED),
    (beside, BESIDE),
    (from_a_quiet_release, QUIET),
    (counted, COUNTED),
    (by_leaf, KEYS_OF_LEAVES),
    (epoch_keys, KEYS_OF_TURNS),
    (carrying, CARRYING),
    (privatizers, PRIVATIZERS),
)
