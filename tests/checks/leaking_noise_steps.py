"""Steps that leak by their noise: too little, none, twice the same, taken away; by their keys.

Tables are by what a step is made with, and a comment says what is wrong. None of them may be called
fine. Where one example's part can be worked out by hand, the true noise multiplier is given.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from dp_accounting import NeighboringRelation

import eqx_dp as dp
from tests.checks.privacy_steps import (
    EXPECTED,
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
    by_leaf,
    caller_keyed,
    chained,
    clipped,
    data,
    dropout_loss,
    epoch_by,
    first_state,
    next_key,
    noised_by,
    plan_under,
    scaled,
    squared_error,
    step_of,
    updated,
    with_noise,
    with_optimizer,
    zero_sums,
)

CONSTANT = jax.random.key(5)
REPLACE_ONE = plan_under(NeighboringRelation.REPLACE_ONE)
WEAK = dp.PrivacyPlan(0.5, 10, 1.0, 1e-5)


def last_of(grads):
    """One leaf: the last bias."""
    return jax.tree.leaves(grads)[-1]


def as_words(values):
    return jax.lax.bitcast_convert_type(values, jnp.uint32)


def noise_alone(grads, key, stddev=STDDEV):
    return with_noise(jax.tree.map(jnp.zeros_like, grads), key, stddev)


def shown_beside(shown_of, plan=PLAN):
    """An honest step that returns `shown_of(grads, key)` beside; the key is a new one."""
    return beside(lambda given: shown_of(given.grads, given.key), plan=plan)


def from_a_quiet_release(random_of):
    """Returns `random_of(quiet, key)`, where `quiet` is the sum with a millionth of noise."""

    def shown(grads, key):
        quiet_key, key = jax.random.split(key)
        return random_of(with_noise(last_of(grads), quiet_key, 1e-6), key)

    return shown_beside(shown)


def drawn_by(draw):
    """The noise of a leaf is `draw(key, shape)`, of standard deviation 1."""

    def noisy(grads, key):
        leaves, structure = jax.tree.flatten(grads)
        keys = jax.random.split(key, len(leaves))
        return structure.unflatten(
            g + STDDEV * draw(k, g.shape) for g, k in zip(leaves, keys, strict=True)
        )

    return noised_by(noisy)


def before_the_noise(change):
    """A step that does something to the clipped sum first."""
    return noised_by(lambda grads, key: with_noise(change(grads), key))


def each_leaf(change):
    """The same, to each leaf."""
    return before_the_noise(lambda grads: jax.tree.map(change, grads))


def behind_the_noise(change):
    """The noisy gradient goes through `change(noisy, grads, model)`."""

    def noisy(at):
        grads = at.sum()
        return change(with_noise(grads, at.keys[0]), grads, at.model)

    return step_of(noisy)


def deviation_of(stddev_of):
    """The noise's standard deviation is `stddev_of(values, x, mask)`."""
    grad_fn = dp.filter_value_and_clipped_grad(
        squared_error, l2_clip_norm=1.0, normalize_by=EXPECTED
    )

    def noisy(at):
        values, grads = grad_fn(at.model, at.x, at.y, is_padding_example=at.mask)
        return with_noise(grads, at.keys[0], stddev_of(values, at.x, at.mask))

    return step_of(noisy)


def two_sums(noisy_of):
    """`noisy_of(sums, key)` of the sums of two losses: for the optimizer, and to return."""
    return step_of(lambda at: tuple(noisy_of([at.sum(), at.sum(absolute_error)], at.keys[0])))


def numbered_twice(numbers_of):
    """Two losses' noises have the keys `fold_in(root, number)`, for two numbers that t gives."""

    def noisy(at):
        keys = (jax.random.fold_in(jax.random.key(12), number) for number in numbers_of(at.more[0]))
        sums = at.sum(), at.sum(absolute_error)
        return tuple(with_noise(g, k, 2 * STDDEV) for g, k in zip(sums, keys, strict=True))

    return step_of(noisy, batch=(*data(), jnp.asarray(0)))


def by_counter(noise_key_of, **named):
    """The noise's key is `noise_key_of(key, step)`; the key in the state stays as it is."""

    def step(model, state, x, y, mask):
        grads = clipped()(model, x, y, is_padding_example=mask)
        return updated(model, state, with_noise(grads, noise_key_of(state.key, state.step)))

    return by_hand(step, **named)


def by_leaf_keys(keys_of):
    return noised_by(by_leaf(keys_of))


def loss_key_of(key_of):
    """Dropout masks of slots come from `key_of(at)`; `key_of` may give a result beside."""

    def noisy(at):
        key, *beside = key_of(at)
        return with_noise(at.sum(dropout_loss, key=key), at.keys[0]), *beside

    return step_of(noisy)


def epoch_keys(keys_of):
    """An epoch under scan; a turn's key is one of `keys_of(key, count)`."""

    def turn(model, state, x, y, mask, key):
        grads = clipped()(model, x, y, is_padding_example=mask)
        return updated(model, state, with_noise(grads, key))

    return epoch_by(turn, keys_of=keys_of)


def with_a_number(noisy_of):
    """The caller gives a number."""
    return step_of(noisy_of, batch=(*data(), jnp.asarray(2)))


def without_a_plan(noisy_of):
    return step_of(noisy_of, plan=None, multiplier=0.0)


def with_bounds(options):
    """The noise is that of a plan and of a gradient, and these are others."""
    return noised_by(with_noise, **options)


def in_scope(name):
    """All that would be noise is an addition of zeros, in a scope of this name."""
    return noised_by(jax.named_scope(name)(lambda g, key: jax.tree.map(lambda leaf: leaf + 0.0, g)))


def called(name):
    """The sum goes through a jitted function of this name, which adds nothing to it."""

    def identity(tree, key, stddev):
        return jax.tree.map(lambda leaf: leaf + stddev * 0.0, tree)

    identity.__name__ = identity.__qualname__ = name
    identity.__module__ = "eqx_dp.privacy.noise"
    return noised_by(lambda grads, key: jax.jit(identity)(grads, key, STDDEV))


def name_in_a_program():
    """The name of the call that adds the noise, in a traced step."""
    case = chained()
    program, *_ = eqx.filter_make_jaxpr(case.fn)(*case.args)
    names = [
        e.params["name"]
        for e in program.jaxpr.eqns[0].params["jaxpr"].jaxpr.eqns
        if isinstance(e.params.get("name"), str)
    ]
    return next(name for name in names if "noise" in name)


def each(make):
    return make()


def of_a_state(step, *first):
    """A step by hand `step(model, kept, x, y, mask)` of which `first` is kept beside the state."""
    return by_hand(step, state=(*first, first_state()))


# Functions that fit no line.


def selected(grads, key):
    """Of itself and itself turned round."""
    return with_noise(
        jax.tree.map(
            lambda g: jnp.where(
                (jnp.arange(g.size) < g.size // 2).reshape(g.shape), g, jnp.flip(g)
            ),
            grads,
        ),
        key,
    )


def sum_of_two_leaves(grads, key):
    """Two leaves of one clipped sum: their sum moves by sqrt(2) of its norm."""
    leaves, structure = jax.tree.flatten(grads)
    both = leaves[3] + leaves[1][:2]
    return with_noise(structure.unflatten([*scaled(0.0, leaves[:3]), both]), key)


def redrawn(grads, key):
    """A loop draws noise until the noisy sum is near the sum."""

    def far(carry):
        return optax.tree.norm(added(carry[1], scaled(-1.0, grads))) > 0.1

    def draw(carry):
        key, own = jax.random.split(carry[0])
        return key, with_noise(grads, own)

    return jax.lax.while_loop(far, draw, draw((key, None)))[1]


def better_of_two(grads, key):
    """Two draws, and the one that is nearer to the sum is taken."""
    both = [with_noise(grads, k, 2 * STDDEV) for k in jax.random.split(key)]
    far = [optax.tree.norm(added(noisy, scaled(-1.0, grads))) for noisy in both]
    return jax.tree.map(lambda a, b: jnp.where(far[0] < far[1], a, b), *both)


def padded_with_one_number(grads, key):
    """One number of the sum is in many places, each with the noise for one."""
    padded = jax.tree.map(lambda g: jax.lax.pad(g, g.ravel()[0], [(0, 9, 0)] * g.ndim), grads)
    return jax.tree.map(
        lambda g, n: n[tuple(map(slice, g.shape))], grads, with_noise(padded, key, 2 * STDDEV)
    )


def on_some_leaves(grads, key):
    layers = with_noise(grads.layers[:1], key)
    return eqx.tree_at(lambda tree: tree.layers, grads, (*layers, *grads.layers[1:]))


def copied(grads, key):
    """The sum is released four times, and the mean of them has half of the noise."""
    many = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (4, *leaf.shape)), grads)
    return jax.tree.map(lambda leaf: leaf.mean(0), with_noise(many, key))


def halves_with_one_key(grads, key):
    """Two calls on lists with one key: the same paths, so the same noise."""
    leaves, structure = jax.tree.flatten(grads)
    halves = [with_noise(half, key) for half in (leaves[:2], leaves[2:])]
    return structure.unflatten([*halves[0], *halves[1]])


def mean_of_two_copies(grads, key):
    both = with_noise({"one": grads, "other": grads}, key)
    return scaled(0.5, added(both["one"], both["other"]))


def by_a_rule(grads, key):
    """A `custom_jvp` around the noise whose tangent is the sum itself."""

    @jax.custom_jvp
    def noisy(grads):
        return with_noise(grads, key)

    noisy.defjvp(lambda primals, tangents: (noisy(*primals), primals[0]))
    return jax.jvp(noisy, (grads,), (grads,))[1]


def little_by_little(grads, key):
    keys = jax.random.split(key, 3)
    little, _ = jax.lax.scan(lambda g, k: (with_noise(g, k, 1e-6), None), grads, keys)
    return little


def exact_by_a_rule(noisy, grads, model):
    """A function with a `custom_jvp` is given the noisy sum and the sum, and returns the latter."""

    @jax.custom_jvp
    def straight(noisy, exact):
        return exact

    straight.defjvp(lambda primals, tangents: (primals[1], tangents[0]))
    return jax.tree.map(straight, noisy, grads)


def exact_by_a_mapping_rule(noisy, grads, model):
    """A `custom_vmap` that gives the noisy sum alone, and the sum under `vmap`."""

    @jax.custom_batching.custom_vmap
    def hidden(noisy, exact):
        return noisy

    hidden.def_vmap(lambda size, batched, noisy, exact: (exact, True))
    return jax.tree.map(lambda n, g: jax.vmap(hidden)(n[None], g[None])[0], noisy, grads)


def one_batch_four_times(at):
    """Four steps on one sample: z / sqrt(4), where the plan counts a fresh sample each."""
    keys = jax.random.split(at.keys[0], 4)
    grads = at.sum()
    return jax.lax.scan(lambda c, k: (added(c, with_noise(grads, k)), None), zero_sums(), keys)[0]


def key_carried_in_words(given):
    """A loop that begins with zeros carries the words of a key, and returns them a turn later."""
    words = jax.random.key_data(given.key)
    noisy = with_noise(last_of(given.grads), given.key, 9 * STDDEV)
    shown = jax.lax.scan(lambda c, _: (words, c), jnp.zeros_like(words), None, length=2)[1]
    return noisy, shown


def several_releases(at):
    """As many releases of one sum as an argument says."""
    grads = at.sum()

    def turn(i, total):
        return added(total, with_noise(grads, jax.random.fold_in(at.keys[0], i)))

    return jax.lax.fori_loop(0, at.more[0], turn, zero_sums())


def halved_as_often_as_an_argument_says(at):
    grads = jax.lax.fori_loop(0, at.more[0], lambda _, g: scaled(0.5, g), scaled(100.0, at.sum()))
    return with_noise(grads, at.keys[0])


def noise_in_the_model(at):
    """The gradient at a model that holds the noise moves with it."""
    noise = noise_alone(at.sum(), at.keys[0])
    return added(at.sum(model=eqx.apply_updates(at.model, noise)), noise)


def of_batch(model, x, y):
    return jax.vmap(squared_error, (None, 0, 0))(model, x, y).mean()


def quiet_model(at):
    """The second gradient's model is the first sum with a hundredth of the noise."""
    moved = eqx.apply_updates(at.model, with_noise(at.sum(), at.keys[1], STDDEV / 100))
    return with_noise(at.sum(model=moved), at.keys[0])


def key_in_the_loss(at):
    """The loss closes over the key of the noise."""

    def loss(model, x, y):
        return squared_error(model, x + jax.random.normal(at.keys[0], x.shape), y)

    return with_noise(at.sum(loss), at.keys[0])


def noise_before_the_clipping(at):
    """Each example's gradient gets noise, and the noisy ones are clipped: the sum has less."""
    grads = jax.vmap(eqx.filter_grad(squared_error), (None, 0, 0))(at.model, at.x, at.y)
    noisy = with_noise(grads, at.keys[0])
    norms = jnp.sqrt(sum(jnp.sum(a**2, range(1, a.ndim)) for a in jax.tree.leaves(noisy)))
    factors = jnp.where(at.mask, 0.0, jnp.minimum(1.0, 1 / norms)) / EXPECTED
    return jax.tree.map(lambda leaf: jnp.tensordot(factors, leaf, 1), noisy)


def chosen_key(model, kept, x, y, mask):
    """Which of two keys the state carries, a label says: whoever has the keys reads it."""
    one, other, noise_key = jax.random.split(kept[0].key, 3)
    grads = clipped()(model, x, y, is_padding_example=mask)
    state = kept[0]._replace(key=jnp.where(y[0, 0] > 0, one, other))
    model, state = updated(model, state, with_noise(grads, noise_key))
    return model, (state,)


def exchanged_keys(model, kept, x, y, mask):
    """The state carries two keys and exchanges them: every second step has the same noise."""
    one, other, state = kept
    grads = clipped()(model, x, y, is_padding_example=mask)
    model, state = updated(model, state, with_noise(grads, one))
    return model, (other, one, state)


def carried_every_second_step(model, kept, x, y, mask):
    """In the other steps the key stays, and with it the noise."""
    carried, key = jax.random.split(kept[0].key)
    grads = clipped()(model, x, y, is_padding_example=mask)
    carried = jnp.where(kept[0].step % 2 == 0, carried, kept[0].key)
    model, state = updated(model, kept[0]._replace(key=carried), with_noise(grads, key))
    return model, (state,)


def carried_and_counted(model, kept, x, y, mask):
    """At step 0 the key of the noise is the key that the state carries on."""
    carried, _ = jax.random.split(kept[0].key)
    grads = clipped()(model, x, y, is_padding_example=mask)
    noisy = with_noise(grads, jax.random.fold_in(kept[0].key, kept[0].step))
    model, state = updated(model, kept[0]._replace(key=carried), noisy)
    return model, (state,)


def drawn_from_and_carried(model, kept, x, y, mask):
    """The key of the noise is the one that the next step splits."""
    carried, _ = jax.random.split(kept[0].key)
    grads = clipped()(model, x, y, is_padding_example=mask)
    model, state = updated(model, kept[0]._replace(key=carried), with_noise(grads, carried))
    return model, (state,)


def counter_not_advanced(model, kept, x, y, mask):
    grads = clipped()(model, x, y, is_padding_example=mask)
    noisy = with_noise(grads, jax.random.fold_in(kept[0].key, kept[0].step))
    model, after = updated(model, kept[0], noisy)
    return model, (after._replace(step=kept[0].step),)


def counter_of_short_noisy_sums(model, kept, x, y, mask):
    """The counter moves when the noisy sum is short: if it is not, the noise comes again."""
    (state,) = kept
    grads = clipped()(model, x, y, is_padding_example=mask)
    noisy = with_noise(grads, jax.random.fold_in(state.key, state.step))
    model, after = updated(model, state, noisy)
    short = optax.tree.norm(noisy) < 1
    return model, (after._replace(step=jnp.where(short, after.step, state.step)),)


def sum_of_steps(model, kept, x, y, mask):
    """The state's sum of raw sums gets the noise of one step in each step."""
    total, state = kept
    key, state = next_key(state)
    total = added(total, clipped()(model, x, y, is_padding_example=mask))
    model, state = updated(model, state, with_noise(total, key))
    return model, (total, state)


def noise_of_the_step_before(model, kept, x, y, mask):
    """Correlated noise by hand: this step's noise is subtracted in the next, and is kept."""
    last, state = kept
    key, state = next_key(state)
    grads = clipped()(model, x, y, is_padding_example=mask)
    noise = noise_alone(grads, key)
    model, state = updated(model, state, added(grads, noise, scaled(-0.9, last)))
    return model, (noise, state)


def privatizers(states_of):
    """Two privatizers of one secret, on two sums; `states_of(before, after)` is kept of them."""
    noises = [dp.gaussian_privatizer(stddev=2 * STDDEV, key=SECRET) for _ in range(2)]

    def step(model, kept, x, y, mask):
        *before, state = kept
        sums = (
            clipped(f)(model, x, y, is_padding_example=mask)
            for f in (squared_error, absolute_error)
        )
        found = [n.update(g, s) for n, g, s in zip(noises, sums, before, strict=True)]
        model, state = updated(model, state, found[0][0])
        return model, (*states_of(before, [s for _, s in found]), state), found[1][0]

    return of_a_state(step, *(noise.init(zero_sums()) for noise in noises))


NOISED_BY = {
    "no_noise": lambda grads, key: grads,
    "noise_of_deviation_zero": lambda grads, key: with_noise(grads, key, 0.0),
    "noise_of_half_the_plan": lambda grads, key: with_noise(grads, key, STDDEV / 2),
    # The noise is divided by the expected batch size, and the gradient is not.
    "gradient_scaled_before_the_noise": lambda grads, key: with_noise(scaled(10.0, grads), key),
    # The standard deviation is 0.24, and its square is taken for it.
    "noise_of_the_variance": lambda grads, key: with_noise(grads, key, STDDEV**2),
    "noise_in_proportion_to_the_gradient": lambda grads, key: with_noise(
        grads, key, STDDEV * optax.tree.norm(grads)
    ),
    "constant_key": lambda grads, key: with_noise(grads, jax.random.key(0)),
    # One key for the sum and for zeros: the difference has no noise.
    "noise_of_zeros_subtracted": lambda grads, key: added(
        with_noise(grads, key), scaled(-1.0, with_noise(jax.tree.map(jnp.zeros_like, grads), key))
    ),
    # `vmap` over rows: all get the same noise, and their differences none.
    "one_key_for_the_rows_of_a_leaf": lambda grads, key: jax.tree.map(
        lambda leaf: jax.vmap(lambda row: with_noise(row, key))(leaf), grads
    ),
    # The derivative of `sum + noise` in the sum's direction is the sum.
    "tangent_of_the_noisy_sum": lambda grads, key: jax.jvp(
        lambda g: with_noise(g, key), (grads,), (grads,)
    )[1],
    # Backwards through the noise goes what was handed in: the sum.
    # (That of certified noise is zero: it is rounded.)
    "cotangent_of_the_noisy_sum": lambda grads, key: jax.vjp(
        lambda g: dp.add_noise(g, key, STDDEV, certified=False), grads
    )[1](grads)[0],
    # Where the sum is negative no noise is added.
    "noise_masked_by_the_sum": lambda grads, key: jax.tree.map(
        lambda g, n: g + jnp.where(g > 0, n, 0.0), grads, noise_alone(grads, key)
    ),
    # Its deviation is that of the sum's own numbers.
    "noise_times_the_sum": lambda grads, key: jax.tree.map(
        lambda g, n: g + g * n, grads, noise_alone(grads, key, 1.0)
    ),
    # `platform_dependent`: on a GPU the sum goes on without noise.
    "noise_on_one_platform_alone": lambda grads, key: jax.lax.platform_dependent(
        grads, cpu=lambda grads: with_noise(grads, key), default=lambda grads: scaled(1.0, grads)
    ),
    # One example moves a number by a whole step of the grid, or by none.
    "rounded_to_a_coarse_grid_before_the_noise": lambda grads, key: with_noise(
        jax.tree.map(lambda g: jnp.round(g, 0), grads), key
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
    # A branch on a public coin, and a deviation of zero.
    "in_one_branch": lambda g, k: jax.lax.cond(
        jax.random.bernoulli(jax.random.fold_in(k, 1)), lambda: g, lambda: with_noise(g, k)
    ),
    "deviation_of_zero_under_jit": jax.jit(lambda g, k: with_noise(g, k, 0 * STDDEV)),
    "same_noise_in_a_loop": lambda g, k: jax.lax.fori_loop(
        0, 4, lambda i, g: added(with_noise(g, k), scaled(-1.0, noise_alone(g, k))), g
    ),
    "tangent_of_many": lambda g, k: jax.tree.map(
        lambda a: a[1] - a[0],
        jax.vmap(lambda s: with_noise(scaled(s, g), k))(jnp.asarray([1.0, 2.0])),
    ),
    "four_copies_by_vmap": lambda g, k: jax.tree.map(
        lambda a: a.mean(0), jax.vmap(lambda k: with_noise(g, k))(jax.random.split(k, 4))
    ),
    "raw_sum_of_a_transpose": lambda g, k: jax.linear_transpose(
        lambda g: added(g, scaled(0.0, noise_alone(zero_sums(), k))), g
    )(g)[0],
    "in_vain_by_a_wrapper_of_its_name": lambda g, k: jax.jit(
        lambda g: (with_noise(g, k), jax.tree.map(lambda a: a + 0.0, g))[1]
    )(g),
}

DRAWN_BY = {
    "uniform_noise": lambda key, shape: math.sqrt(3) * jax.random.uniform(key, shape, minval=-1),
    "normal_noise_in_absolute_value": lambda key, shape: jnp.abs(jax.random.normal(key, shape)),
}

BEFORE_THE_NOISE = {
    "sign_before_the_noise": lambda grads: jax.tree.map(jnp.sign, grads),
    "normalized_before_the_noise": lambda grads: jax.tree.map(
        lambda leaf: leaf / optax.tree.norm(grads), grads
    ),
}

FROM_A_QUIET_RELEASE = {
    # Whoever tries all sums finds the one whose bits these are; the release is not counted.
    "bits_of_a_key_folded_with_a_quiet_release": lambda quiet, key: jax.random.bits(
        jax.random.fold_in(jax.random.key(0), as_words(quiet)[0]), (4,)
    ),
    # The seed is the sum, but for a millionth of noise.
    "numbers_of_a_key_seeded_by_a_quiet_release": lambda quiet, key: jax.random.normal(
        jax.random.key(as_words(quiet)[0]), (4,)
    ),
    # A coin's probability of heads is a number of the sum.
    "coin_of_a_quiet_release": lambda quiet, key: jax.random.bernoulli(
        key, jax.nn.sigmoid(quiet), (1000, 2)
    ),
    # The interval that the number is drawn from shows the sum to six digits.
    "uniform_around_a_quiet_release": lambda quiet, key: jax.random.uniform(
        key, (2,), minval=quiet, maxval=quiet + 1e-6
    ),
    # A public table in the order of the sum's numbers.
    "order_by_a_quiet_release": lambda quiet, key: jnp.arange(2)[jnp.argsort(quiet)],
    # A scan carries it, and returns its running sum.
    "quiet_release_through_a_loop": lambda quiet, key: jax.lax.scan(
        lambda c, q: (c + q, c), 0.0, quiet
    )[0],
    # A loop runs as often as the sum says, in thousandths.
    "quiet_release_in_a_trip_count": lambda quiet, key: jax.lax.while_loop(
        lambda i: i < 1e3 * quiet[0], lambda i: i + 1, 0
    ),
    # Which of two public numbers is returned, the sum says.
    "quiet_release_in_a_branch": lambda quiet, key: jax.lax.cond(
        quiet[0] > 0, lambda: 1.0, lambda: 2.0
    ),
}

SHOWN_BESIDE = {
    # Numbers of the sum that are zero stay zero, and large ones stay large.
    "sum_times_random_numbers": lambda grads, key: last_of(grads) * jax.random.normal(key, (2,)),
    # The other half stays.
    "sum_with_half_of_it_dropped": lambda grads, key: jnp.where(
        jax.random.bernoulli(key, 0.5, (2,)), last_of(grads), 0.0
    ),
    # One key for the sum and for zeros, and both leave.
    "noise_of_zeros_returned": (
        lambda grads, key: [
            with_noise(tree, key, 3 * STDDEV) for tree in (grads, scaled(0.0, grads))
        ],
        dp.PrivacyPlan(0.5, 10, 1.0, 1e-5),
    ),
    # The second noise doubles the first: it is the same, and both versions leave.
    "sum_with_noise_twice_of_one_key": lambda grads, key: [
        dp.add_noise(grads, key, 3 * STDDEV),
        dp.add_noise(scaled(2.0, grads), key, 3 * STDDEV),
    ],
    # Twice the first minus the second is the sum, without noise.
    "one_key_for_two_deviations": lambda grads, key: [
        dp.add_noise(grads, key, s * STDDEV) for s in (10, 20)
    ],
}

TWO_SUMS = {
    # The difference of the two noisy sums has no noise.
    "one_key_for_two_losses": lambda sums, key: [with_noise(g, key, 2 * STDDEV) for g in sums],
}

DEVIATION_OF = {
    # The noise shows how many examples there are.
    "deviation_for_the_number_of_real_examples": lambda values, x, mask: (
        STDDEV * jnp.maximum(1, jnp.sum(~mask))
    ),
    # At least the plan's, but how much it is shows the loss.
    "deviation_by_the_loss": lambda values, x, mask: STDDEV * (1 + values.loss.mean()),
    # At least the plan's, of two that the data chooses from.
    "deviation_of_a_selected_number": lambda values, x, mask: (
        STDDEV * jnp.where(x[0, 0] > 0, 1.0, 100.0)
    ),
}

BEHIND_THE_NOISE = {
    # The rate is divided by the norm of the sum.
    "trust_ratio_of_the_raw_sum": lambda noisy, grads, model: scaled(
        1 / (1e-3 + optax.tree.norm(grads)), noisy
    ),
    # The second moment is that of the sum, and the first that of the noisy sum.
    "preconditioned_by_raw_squares": lambda noisy, grads, model: jax.tree.map(
        lambda n, g: n / (1e-3 + jnp.abs(g)), noisy, grads
    ),
    # A hundredth of the sum is added once more: the noise is for it no more independent.
    "raw_sum_a_little_behind_the_noise": lambda noisy, grads, model: added(
        noisy, scaled(0.01, grads)
    ),
    # Biases get the sum: they are few.
    "small_layers_without_noise": lambda noisy, grads, model: jax.tree.map(
        lambda n, g: n if g.ndim > 1 else g, noisy, grads
    ),
    # A loop that does not run returns what it was given: the sum.
    "raw_sum_through_remat_and_a_loop_without_turns": lambda noisy, grads, model: jax.lax.fori_loop(
        0, 0, lambda _, g: noisy, jax.checkpoint(lambda g: g)(grads)
    ),
    # The noisy sum times zero, plus the sum.
    "raw_sum_through_an_operation_of_zero_weight": lambda noisy, grads, model: added(
        scaled(0.0, noisy), grads
    ),
    "exact_by_a_rule": exact_by_a_rule,
    "exact_by_a_mapping_rule": exact_by_a_mapping_rule,
}

IN_SCOPE = {
    # A scope with the name of our noise, and no noise in it.
    "zeros_in_a_scope_named_noise": "eqx_dp.noise",
    # A scope with the name of our draw, and no draw in it.
    "zeros_in_a_scope_named_draw": "eqx_dp.draw",
}

CALLED = {
    # A jitted function of this name, in a module that says it is ours, which adds nothing.
    "function_named_add_noise": "add_noise",
    # The same, with the name of the privatizer.
    "function_named_gaussian_privatizer": "gaussian_privatizer",
}

CALLER_KEYED = {
    # Steps 0 and 1, 2 and 3 have one key.
    "number_of_the_caller_halved": lambda key, t: jax.random.fold_in(key, t // 2),
    # Every fourth step has the same noise.
    "number_of_the_caller_modulo_four": lambda key, t: jax.random.fold_in(key, t % 4),
    # Every 256th step has the same noise.
    "number_of_the_caller_in_eight_bits": lambda key, t: jax.random.fold_in(
        key, t.astype(jnp.uint8)
    ),
    # There are four keys, and then they come again.
    "one_of_four_keys_by_the_callers_number": lambda key, t: jax.random.split(key, 4)[t % 4],
    # The seed is the step's number, which everybody knows.
    "root_key_from_the_number_of_the_caller": lambda root, t: jax.random.key(t),
}

EACH = {
    "key_carried_in_words": lambda: beside(key_carried_in_words, plan=WEAK),
    # Two steps within a second have the same noise.
    "time_of_the_caller_in_whole_seconds": lambda: caller_keyed(
        lambda key, t: jax.random.fold_in(key, t.astype(int)), t=0.5
    ),
    # The key that the caller's number is folded into is among the results.
    "root_key_shown_beside": lambda: caller_keyed(
        jax.random.fold_in, returns=lambda root, t: jax.random.key_data(root)
    ),
    # The key of the next step's noise is among the results of this one.
    "next_key_shown_beside": lambda: caller_keyed(
        jax.random.fold_in,
        returns=lambda root, t: jax.random.key_data(jax.random.fold_in(root, t + 1)),
    ),
}

NUMBERED_TWICE = {
    # The second noise of a step is the first of the next one.
    "number_of_the_caller_and_the_next_one": lambda t: (t, t + 1),
    # In step 3 both sums have the same noise.
    "number_of_the_caller_and_a_constant": lambda t: (t, 3),
    # Both sums have the same noise in every step.
    "number_of_the_caller_twice": lambda t: (t, t),
}

BY_COUNTER = {
    # After 256 steps the keys come again.
    "counter_of_eight_bits": lambda key, step: jax.random.fold_in(key, step.astype(jnp.uint8)),
    "one_of_four_keys_by_the_counter": lambda key, step: jax.random.split(key, 4)[step],
    "key_from_the_step_alone": lambda key, step: jax.random.key(step),
    "not_advanced": lambda key, step: jax.random.split(key)[1],
    "modulo_two": lambda key, step: jax.random.fold_in(key, step % 2),
    "times_a_power_of_two": lambda key, step: jax.random.fold_in(
        key, step.astype(jnp.uint32) * jnp.uint32(2**31)
    ),
    "stops_early": lambda key, step: jax.random.fold_in(key, jnp.where(step < 3, step, 9)),
    "by_float": lambda key, step: jax.random.fold_in(key, (0.5 * step).astype(int)),
    "bits_of_it_dropped": lambda key, step: jax.random.fold_in(key, step & 255),
}

EACH_LEAF = {
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
    "one_number_added_to_many": lambda g: jax.lax.add(jnp.zeros(g.shape), g.ravel()[0]),
    "one_number_subtracted": lambda g: jax.lax.sub(0.5 * g, 0.5 * g.ravel()[0]),
    "clamped_by_one_number": lambda g: jax.lax.clamp(
        g.ravel()[0], jnp.full(g.shape, -1e9), jnp.float32(1e9)
    ),
    "one_number_written_twice": lambda g: g.at[0].set(g[-1]),
    "gathered_twice": lambda g: g[jnp.zeros(len(g), int)],
    "sorted": lambda g: jnp.sort(g, 0),
    "joined_with_itself": lambda g: jnp.concatenate([g, g]).reshape(2, *g.shape).mean(0) * 2,
}

STEP_OF = {
    "one_noise_for_four_losses": lambda at: with_noise(
        added(*(at.sum(lambda *a, i=i: squared_error(*a) ** (1 + i)) for i in range(4))), at.keys[0]
    ),
    # Each has the plan's noise multiplier, together they have z / sqrt(2).
    "two_losses_with_the_noise_of_one": lambda at: added(
        with_noise(at.sum(), at.keys[0]), with_noise(at.sum(absolute_error), at.keys[1])
    ),
    "one_batch_four_times": one_batch_four_times,
    "no_noise_in_the_first_steps": lambda at: jax.lax.cond(
        at.state.step < 3, lambda g: g, lambda g: with_noise(g, at.keys[0]), at.sum()
    ),
    "less_noise_in_every_second_step": lambda at: jax.lax.switch(
        at.state.step % 2,
        [lambda g, s=s: with_noise(g, at.keys[0], s * STDDEV) for s in (1.0, 0.1)],
        at.sum(),
    ),
    "divided_by_the_number_of_real_examples": lambda at: with_noise(
        scaled(1 / jnp.maximum(1, jnp.sum(~at.mask)), at.sum(normalize_by=1.0)), at.keys[0]
    ),
    "adam_before_the_noise": lambda at: with_noise(
        OPTIMIZER.update(at.sum(), at.state.opt)[0], at.keys[0]
    ),
    # The gradient is clipped and noised, but at a model that private data has moved.
    "inner_step_without_noise": lambda at: with_noise(
        at.sum(model=eqx.apply_updates(at.model, scaled(-0.1, at.sum()))), at.keys[0]
    ),
    "ordinary_gradient": lambda at: with_noise(
        eqx.filter_grad(of_batch)(at.model, at.x, at.y), at.keys[0]
    ),
    "noise_before_the_clipping": noise_before_the_clipping,
    "quiet_model": quiet_model,
    "noise_in_the_model": noise_in_the_model,
    # A release of little noise is added to the sum.
    "quiet_release_added": lambda at: with_noise(
        added(at.sum(), with_noise(scaled(10, at.sum()), at.keys[1], 1e-3)), at.keys[0]
    ),
    "noise_returned": lambda at: (
        added(at.sum(), noise_alone(at.sum(), at.keys[0])),
        noise_alone(at.sum(), at.keys[0]),
    ),
    # The difference of the two has no noise.
    "one_noise_on_two_sums": lambda at: tuple(
        added(at.sum(loss), noise_alone(at.sum(), at.keys[0], 2 * STDDEV))
        for loss in (squared_error, absolute_error)
    ),
    "key_returned": lambda at: (with_noise(at.sum(), at.keys[0]), at.keys[0]),
    "key_looked_up": lambda at: (
        with_noise(at.sum(), at.keys[0]),
        jnp.stack(at.keys)[np.array([0, 2])],
    ),
    "key_printed": lambda at: (
        jax.debug.print("{}", jax.random.key_data(at.keys[0])),
        with_noise(at.sum(), at.keys[0]),
    )[1],
    "key_for_loss_and_noise": lambda at: with_noise(
        at.sum(dropout_loss, key=at.keys[0]), at.keys[0]
    ),
    "key_in_the_loss": key_in_the_loss,
    "key_from_private_data": lambda at: with_noise(
        at.sum(), jax.random.fold_in(at.keys[0], jnp.sum(at.x).astype(jnp.int32))
    ),
    "noise_in_the_loss_alone": lambda at: at.sum(
        lambda m, x, y: squared_error(m, with_noise(x, jax.random.key(0)), y)
    ),
    "noise_sent_to_a_callback": lambda at: (
        jax.debug.callback(lambda n: None, last_of(noise_alone(at.sum(), at.keys[0]))),
        added(at.sum(), noise_alone(at.sum(), at.keys[0])),
    )[1],
    # Loss and noise are those of a sum that is not divided.
    "clipped_with_the_smaller_norm_for_the_noise": lambda at: with_noise(
        added(at.sum(), at.sum(absolute_error, l2_clip_norm=0.5)), at.keys[0], 0.5 * STDDEV
    ),
}

WITH_A_NUMBER = {
    "several_releases": several_releases,
    "halved_as_often_as_an_argument_says": halved_as_often_as_an_argument_says,
    "scaled_by_an_argument": lambda at: with_noise(scaled(at.more[0], at.sum()), at.keys[0]),
    "deviation_from_an_argument": lambda at: with_noise(at.sum(), at.keys[0], 1.0 * at.more[0]),
    # Step 1 and key 0, step 0 and key 1 have the same noise.
    "number_and_counter_added": lambda at: with_noise(
        at.sum(), jax.random.fold_in(jax.random.key(1), at.state.step + at.more[0])
    ),
    # A public flag turns the noise off.
    "raw_sum_by_a_flag": lambda at: jax.tree.map(
        lambda n, g: jnp.where(at.more[0] > 2, g, n), with_noise(at.sum(), at.keys[0]), at.sum()
    ),
}

WITHOUT_A_PLAN = {
    # Two arrays of words that are equal, by arithmetic.
    "key_made_twice": lambda at: added(
        *(
            with_noise(at.sum(), jax.random.wrap_key_data(words))
            for words in (
                jax.random.key_data(at.keys[0]) ^ jnp.uint32(0),
                jax.random.key_data(at.keys[0]) | jnp.uint32(0),
            )
        )
    ),
    "seed_twice_as_a_constant_and_inside": lambda at: added(
        *(
            with_noise(at.sum(), jax.random.fold_in(key, at.state.step))
            for key in (CONSTANT, jax.random.key(5))
        )
    ),
}

BESIDE = {
    "key_carried_in_words": key_carried_in_words,
}

BY_LEAF_KEYS = {
    "one": lambda key, n: [key] * n,
    "by_a_whole_turn": lambda key, n: [
        jax.random.fold_in(key, jnp.uint32(3) + (i % 2) * jnp.full((), 2**31, jnp.uint32) * 2)
        for i in range(n)
    ],
    "ones": lambda key, n: jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.ones(n, int)),
    "modulo_two": lambda key, n: [jax.random.fold_in(key, i % 2) for i in range(n)],
    # An index that is too large is the last.
    "behind_the_last": lambda key, n: [
        jax.lax.dynamic_index_in_dim(jax.random.split(key), i, keepdims=False) for i in range(n)
    ],
    # With JAX's default generator, `split(key)[i]` is `fold_in(key, i)`.
    "split_and_folded": lambda key, n: [*jax.random.split(key), jax.random.fold_in(key, 0), key][
        :n
    ],
    "two_splits": lambda key, n: [*jax.random.split(key), *jax.random.split(key, 3)][:n],
    "parent_and_children": lambda key, n: [key, *jax.random.split(key, n - 1)],
    "joined": lambda key, n: jnp.concatenate([jax.random.split(key, 2)] * 2),
    "stacked_by_a_loop": lambda key, n: jax.lax.map(lambda i: key, jnp.arange(n)),
    "in_two_dimensions": lambda key, n: [
        *jax.random.split(key, (2, 2)).reshape(-1)[:2],
        *jax.random.split(key, 4)[:2],
    ],
}

EPOCH_KEYS = {
    "one": jnp.broadcast_to,
    "in_pairs": lambda key, n: jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(n) // 2),
    "halved": lambda key, n: jax.random.split(key, 2 * n).reshape(n, 2)[:, 0][::-1],
}

LOSS_KEY_OF = {
    # Which mask an example gets, its slot says, in every step the same.
    "constant": lambda at: (jax.random.key(0),),
    "of_the_loss_and_returned": lambda at: (at.keys[1], at.keys[1]),
    "of_the_loss_and_drawn_from": lambda at: (
        at.keys[1],
        jax.random.normal(jax.random.split(at.keys[1], SLOTS)[0], (WIDTH,)),
    ),
    "of_few": lambda at: (jax.random.fold_in(jax.random.key(0), at.state.step % 2),),
}

OF_A_STATE = {
    "chosen_key": chosen_key,
    "carried_every_second_step": carried_every_second_step,
    "carried_and_counted": carried_and_counted,
    "drawn_from_and_carried": drawn_from_and_carried,
    "counter_not_advanced": counter_not_advanced,
    "counter_of_short_noisy_sums": counter_of_short_noisy_sums,
    "exchanged_keys": (exchanged_keys, *jax.random.split(jax.random.key(3))),
    "sum_of_steps": (sum_of_steps, zero_sums()),
    "noise_of_the_step_before": (noise_of_the_step_before, zero_sums()),
}

PRIVATIZERS = {
    "one_secret": lambda before, after: after,
    "states_thrown_away": lambda before, after: before,
}

WITH_OPTIMIZER = {
    "multi_steps_before_the_noise": optax.MultiSteps(
        optax.chain(PLAN.privatizer(clipped(), key=SECRET), OPTIMIZER), 2, use_grad_mean=False
    ),
}

OTHER_BOUNDS = {
    "for_a_mean_on_a_sum": {"grad_fn": clipped(normalize_by=1.0)},
    "without_the_clip_norm": {"grad_fn": clipped(l2_clip_norm=2.0)},
    "without_a_clip_norm": {"grad_fn": clipped(l2_clip_norm=math.inf)},
    "of_another_relation": {"plan": REPLACE_ONE},
}

NOISE = [
    (noised_by, NOISED_BY),
    (drawn_by, DRAWN_BY),
    (before_the_noise, BEFORE_THE_NOISE),
    (from_a_quiet_release, FROM_A_QUIET_RELEASE),
    (shown_beside, SHOWN_BESIDE),
    (two_sums, TWO_SUMS),
    (deviation_of, DEVIATION_OF),
    (behind_the_noise, BEHIND_THE_NOISE),
    (in_scope, IN_SCOPE),
    (called, CALLED),
    (caller_keyed, CALLER_KEYED),
    (each, EACH),
    (numbered_twice, NUMBERED_TWICE),
    (by_counter, BY_COUNTER),
    (each_leaf, EACH_LEAF),
    (step_of, STEP_OF),
    (with_a_number, WITH_A_NUMBER),
    (without_a_plan, WITHOUT_A_PLAN),
    (by_leaf_keys, BY_LEAF_KEYS),
    (epoch_keys, EPOCH_KEYS),
    (loss_key_of, LOSS_KEY_OF),
    (of_a_state, OF_A_STATE),
    (privatizers, PRIVATIZERS),
    (with_optimizer, WITH_OPTIMIZER),
    (with_bounds, OTHER_BOUNDS),
]
