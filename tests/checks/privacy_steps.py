"""The frames of honest and leaking steps: a case, small models and losses, a plan, steps by hand.

A step by hand is `step(model, state, x, y, mask)`, where `mask` is `is_padding_example`. It returns
the next model and the next state, and private are the last three arguments. Each frame makes such
a step from what differs: `noised_by(lambda grads, key: ...)`, `step_of(lambda at: ...)`.
"""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.random import bernoulli, split
from jax.sharding import PartitionSpec as P

import eqx_dp as dp
from tests.sharding.losses import mesh_of

SLOTS, WIDTH, CLASSES = 8, 4, 2
NUM_EXAMPLES = 10
SECRET = 0x1234_5678_9ABC_DEF0_0FED_CBA9_8765_4321
BASICS = {"sampling_prob": 0.5, "steps": 10, "noise_multiplier": 1.2, "delta": 1e-5}

PLAN = dp.PrivacyPlan(**BASICS)
EXPECTED = PLAN.sampling_prob * NUM_EXAMPLES  # examples in a batch
STDDEV = PLAN.noise_multiplier / EXPECTED  # of the noise for what `clipped` returns
OPTIMIZER = optax.adam(1e-2)


class Case(NamedTuple):
    """A training step, how it is called, and what is to be said of its privacy.

    `private` and `plan` are None for a step of `make_step`, which knows them. `noise_multiplier` is
    the least of an honest step's releases, and 0 where it is not compared. `more` is given to the
    check as it is.
    """

    fn: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    private: Any
    plan: dp.PrivacyPlan | None
    noise_multiplier: float
    more: Any = ()


def report_on(case):
    given = dict(case.more)
    if case.private is not None:
        given |= {"private": case.private, "plan": case.plan}
    return dp.check_privacy(case.fn, *case.args, **given, **case.kwargs)


def plan_under(relation, **more):
    return dp.PrivacyPlan(**BASICS | {"neighboring_relation": relation} | more)


def cases(*tables):
    """All steps by name, each made when it is asked for, from frames and their rows.

    A row is what its frame takes: one argument, or a tuple of them that may end in options.
    """
    found = {}
    for frame, rows in tables:
        for name, row in rows.items():
            *given, last = row if type(row) is tuple else (row,)
            options = last if type(last) is dict else {}
            given = given if type(last) is dict else [*given, last]
            assert name not in found, name
            found[name] = functools.partial(frame, *given, **options)
    return found


def each(make):
    """The frame of rows that make their case themselves."""
    return make()


# Models, losses, data.


@functools.cache
def mlp():
    return eqx.nn.MLP(WIDTH, CLASSES, 4, 1, activation=jnp.tanh, key=jax.random.key(1))


def squared_error(model, x, y):
    return jnp.sum((model(x) - y) ** 2)


def absolute_error(model, x, y):
    return jnp.sum(jnp.abs(model(x) - y))


def dropout_loss(model, x, y, *, key):
    kept = bernoulli(key, 0.5, x.shape)
    return squared_error(model, jnp.where(kept, 2 * x, 0), y)


@functools.cache
def data():
    """Examples, targets, and a mask with three slots of padding."""
    random = np.random.default_rng(2)
    x = random.normal(size=(SLOTS, WIDTH)).astype(np.float32)
    y = random.normal(size=(SLOTS, CLASSES)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(y), jnp.arange(SLOTS) >= 5


def clip_norms_by_layer(model):
    """As a tree prefix: another clip norm for each layer."""
    prefix = jax.tree.map(lambda _: None, model)
    return eqx.tree_at(lambda m: m.layers, prefix, (0.5, 2.0), is_leaf=lambda x: x is None)


def params_of(model):
    return eqx.filter(model, eqx.is_inexact_array)


def zero_sums():
    return jax.tree.map(jnp.zeros_like, clipped().trainable(mlp()))


# Trees as vectors.


def scaled(factor, tree):
    return jax.tree.map(lambda leaf: factor * leaf, tree)


def added(*trees):
    return jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *trees)


def minus(tree, other):
    return added(tree, scaled(-1.0, other))


def where(condition, tree, other):
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), tree, other)


# Parts of a step.


def clipped(loss=squared_error, **options):
    """A clipped gradient: clip norm 1, divided by the expected number of examples."""
    options = {"l2_clip_norm": 1.0, "normalize_by": EXPECTED} | options
    return dp.filter_clipped_grad(loss, **options)


NOISE = PLAN.privatizer(clipped(), key=SECRET)
"""The plan's noise, as an optimizer."""


class Noise:
    """A stream of noise within a step, and a key for noise by hand; each draw moves it on."""

    def __init__(self, state, key=None):
        self.state, self.key = state, key

    def chosen(self, which, branches, *operands):
        """One of several functions of operands and noise; all take the same state."""

        def branch(function):
            def run(state, *operands):
                own = Noise(state, self.key)
                return function(*operands, own), own.state

            return run

        functions = [branch(function) for function in branches]
        found, self.state = jax.lax.switch(which, functions, self.state, *operands)
        return found

    def turned(self, function, carry, over=None, length=None):
        """A scan of `function(carry, slice, noise)`, which gives the next carry."""

        def turn(carry, slices):
            own = Noise(carry[1], self.key)
            return (function(carry[0], slices, own), own.state), None

        (carry, self.state), _ = jax.lax.scan(turn, (carry, self.state), over, length)
        return carry

    def once(self):
        """Another one that begins where this one is."""
        return Noise(self.state, self.key)


def with_noise(grads, noise, stddev=STDDEV):
    """Independent normal noise for every number; a traced deviation is for noise by hand."""
    if isinstance(stddev, jax.core.Tracer):
        return with_normals(grads, noise, stddev)
    noisy, noise.state = dp.add_noise(grads, noise.state, stddev)
    return noisy


def with_normals(grads, noise, stddev=STDDEV, draw=jax.random.normal):
    """The same noise by hand, from a key for every leaf."""
    leaves, structure = jax.tree.flatten(grads)
    keys = split(noise.key, len(leaves))
    noisy = [a + stddev * draw(k, a.shape) for a, k in zip(leaves, keys, strict=True)]
    return structure.unflatten(noisy)


def noise_alone(grads, noise, stddev=STDDEV):
    return with_noise(jax.tree.map(jnp.zeros_like, grads), noise, stddev)


class State(NamedTuple):
    """What a step by hand carries beside the model."""

    opt: Any
    stream: Any
    key: Any
    step: Any
    kept: Any = None


def first_state(model=None, optimizer=OPTIMIZER, kept=None):
    params = params_of(mlp() if model is None else model)
    stream, step = dp.noise_stream(key=SECRET), jnp.zeros((), jnp.int32)
    return State(optimizer.init(params), stream, jax.random.key(3), step, kept)


def updated(model, state, noisy, optimizer=OPTIMIZER):
    """The next model and state, from a noisy gradient."""
    updates, opt = optimizer.update(noisy, state.opt, params_of(model))
    return eqx.apply_updates(model, updates), state._replace(opt=opt, step=state.step + 1)


def in_order(leaf):
    """Four microbatches, one after the other."""
    return leaf.reshape(4, -1, *leaf.shape[1:])


class At(NamedTuple):
    """What is at hand in a step: its arguments, its noise, and keys for this call alone.

    `values`, `grads`, `noisy` and `new` are of a step that has been taken: what the engine returns,
    the noisy gradient, the next model.
    """

    model: Any
    state: State
    x: Any
    y: Any
    mask: Any
    more: tuple[Any, ...] = ()
    keys: Any = ()
    noise: Any = None
    values: Any = None
    grads: Any = None
    noisy: Any = None
    new: Any = None

    def sum(self, loss=squared_error, *, model=None, key=None, **options):
        """The clipped sum of a loss."""
        model = self.model if model is None else model
        grad_fn = clipped(loss, **options)
        return grad_fn(model, self.x, self.y, key=key, is_padding_example=self.mask)

    def noised(self, tree=None, stddev=STDDEV, noise=None):
        """A tree, or the clipped sum, with noise of the step's stream."""
        tree = self.sum() if tree is None else tree
        return with_noise(tree, self.noise if noise is None else noise, stddev)

    def use(self, **parts):
        """The same with another `x`, `y` or `mask`."""
        return self._replace(**parts)

    def rows(self, at):
        """The same with these slots alone."""
        return self.use(x=self.x[at], y=self.y[at], mask=self.mask[at])

    def times(self, weights):
        """The same with inputs times a number for each slot."""
        return self._replace(x=self.x * weights[:, None])

    def over_microbatches(self, turn, start, parts_of=in_order):
        """The last carry of a scan; `turn(carry, microbatch)` gives the next one."""
        parts = jax.tree.map(parts_of, (self.x, self.y, self.mask))
        step = lambda carry, part: (turn(carry, At(self.model, self.state, *part)), None)  # noqa: E731
        return jax.lax.scan(step, start, parts)[0]

    def losses(self, model=None):
        model = self.model if model is None else model
        return jax.vmap(squared_error, (None, 0, 0))(model, self.x, self.y)


# Frames.


def made(loss=squared_error, optimizer=OPTIMIZER, *, plan=PLAN, model=None, batch=None, **more):
    """A case of `make_step`; `more` are options of it."""
    options = {"num_examples": NUM_EXAMPLES, "seed": SECRET, "l2_clip_norm": 1.0} | more
    step = dp.make_step(loss, optimizer, plan, **options)
    *examples, mask = data() if batch is None else batch
    kwargs = {"is_padding_example": step.shard_batch(mask)}
    args = (step.init(mlp() if model is None else model), *step.shard_batch(tuple(examples)))
    return Case(step, args, kwargs, None, None, plan.noise_multiplier)


def by_hand(
    step, model=None, state=None, batch=None, private=(2, 3, 4), plan=PLAN, multiplier=None, more=()
):
    """A case of `step(model, state, *batch)`, compiled."""
    state = first_state(model) if state is None else state
    args = (mlp() if model is None else model, state, *(data() if batch is None else batch))
    multiplier = plan.noise_multiplier if multiplier is None else multiplier
    return Case(eqx.filter_jit(step), args, {}, private, plan, multiplier, more)


def with_kept_noise(told=lambda before, after: (after,)):
    """A privatizer that keeps noise; `told` gives what the state keeps of it, and more results."""
    correlated = {
        "sampling": dp.sampling.CyclicPoisson(1.0, 2),
        "noise": dp.Banded((1.0,), (1, 0.5)),
    }
    plan = dp.PrivacyPlan(None, 100, PLAN.noise_multiplier, 1e-5, **correlated)
    noise = plan.privatizer(clipped(), key=SECRET)

    def step(model, kept, x, y, mask):
        before, state = kept
        noisy, after = noise.update(clipped()(model, x, y, is_padding_example=mask), before)
        past, *shown = told(before.past, after.past)
        model, state = updated(model, state, noisy)
        return model, (after._replace(past=past), state), *shown

    return by_hand(step, state=(noise.init(zero_sums()), first_state()), plan=plan)


def at_hand(model, state, *batch):
    """What is at hand, and the state that carries another key."""
    carried, *keys = split(state.key, 5)
    x, y, mask, *more = batch
    noise = Noise(state.stream, keys[0])
    return At(model, state, x, y, mask, more, keys, noise), state._replace(key=carried)


def step_of(noisy_of, **named):
    """`noisy_of(at)` gives what the optimizer gets, or that and results to return."""

    def step(model, state, *batch):
        at, state = at_hand(model, state, *batch)
        found = noisy_of(at)
        noisy, *shown = found if type(found) is tuple else (found,)
        return *updated(model, state._replace(stream=at.noise.state), noisy), *shown

    return by_hand(step, **named)


def with_a_number(noisy_of, number=0):
    """The same; the caller gives a number, `at.more[0]`, which is not private."""
    return step_of(noisy_of, batch=(*data(), jnp.asarray(number)))


def noised_by(noisy_of, grad_fn=None, **named):
    """`noisy_of(grads, noise)` stands for adding the noise."""
    grad_fn = clipped() if grad_fn is None else grad_fn

    def noisy(at):
        grads = grad_fn(at.model, at.x, at.y, is_padding_example=at.mask)
        return noisy_of(grads, at.noise)

    return step_of(noisy, **named)


def prepared_by(prepare, argument=None, **named):
    """An honest step on `prepare(at)`; an argument that is not private is `at.more[0]`."""
    if argument is not None:
        named |= {"batch": (*data(), argument)}
    return step_of(lambda at: at.noised(prepare(at).sum()), **named)


def carrying(noisy_of, kept=None):
    """`noisy_of(at)` gives the noisy gradient, and what else of the state changes."""

    def step(model, state, x, y, mask):
        at = At(model, state, x, y, mask, noise=Noise(state.stream))
        noisy, changes = noisy_of(at)
        model, after = updated(model, state, noisy)
        return model, after._replace(**{"stream": at.noise.state} | changes)

    return by_hand(step, state=first_state(kept=kept))


def _taken(model, state, x, y, mask):
    """An honest step that has been taken."""
    options = {"l2_clip_norm": 1.0, "normalize_by": EXPECTED}
    grad_fn = dp.filter_value_and_clipped_grad(squared_error, **options)
    at, state = at_hand(model, state, x, y, mask)
    values, grads = grad_fn(model, x, y, is_padding_example=mask)
    noisy = with_noise(grads, at.noise)
    new, after = updated(model, state, noisy)
    return at._replace(state=after, values=values, grads=grads, noisy=noisy, new=new)


def beside(shown_of, **named):
    """An honest step, which returns `shown_of(at)` as well."""

    def step(*args):
        at = _taken(*args)
        shown = shown_of(at)
        return at.new, at.state._replace(stream=at.noise.state), shown

    return by_hand(step, **named)


def keeping(kept_of, first, **named):
    """An honest step whose state also holds `kept_of(kept, at)`, at first `first`."""

    def step(*args):
        at = _taken(*args)
        kept = kept_of(at.state.kept, at)
        return at.new, at.state._replace(kept=kept, stream=at.noise.state)

    return by_hand(step, state=first_state(kept=first), **named)


def chained(*behind, loss=squared_error, plan=PLAN, **options):
    """The optimizer is a chain: the plan's noise, and what stands behind it."""
    grad_fn = clipped(loss, **options)
    optimizer = optax.chain(plan.privatizer(grad_fn, key=SECRET), *(behind or [OPTIMIZER]))
    return with_optimizer(optimizer, grad_fn, plan=plan)


def with_optimizer(optimizer, grad_fn=None, **named):
    """The optimizer holds the noise, wherever in it."""
    grad_fn = clipped() if grad_fn is None else grad_fn

    def step(model, state, x, y, mask):
        grads = grad_fn(model, x, y, is_padding_example=mask)
        updates, opt = optimizer.update(grads, state.opt, grad_fn.trainable(model))
        return eqx.apply_updates(model, updates), state._replace(opt=opt, step=state.step + 1)

    state = first_state()._replace(opt=optimizer.init(grad_fn.trainable(mlp())))
    return by_hand(step, state=state, **named)


def epoch_by(noisy_of, count=3, **named):
    """A scan over stacked batches; `noisy_of(at)` may also give what of the state changes."""
    params, static = eqx.partition(mlp(), eqx.is_inexact_array)

    def epoch(params, state, xs, ys, masks):
        def turn(carry, batch):
            params, state = carry
            at, state = at_hand(eqx.combine(params, static), state, *batch)
            found = noisy_of(at)
            noisy, changes = found if type(found) is tuple else (found, {})
            params, state = updated(params, state._replace(stream=at.noise.state), noisy)
            return (params, state._replace(**changes)), None

        return jax.lax.scan(turn, (params, state), (xs, ys, masks))[0]

    batch = tuple(jnp.stack([leaf] * count) for leaf in data())
    return by_hand(epoch, model=params, state=first_state(params), batch=batch, **named)


def over_devices(part, stddev=STDDEV):
    """`part(at)` on each of eight devices by shard_map, with examples spread; then noise."""
    params, static = eqx.partition(mlp(), eqx.is_array)

    def of_a_device(params, *batch):
        return part(At(eqx.combine(params, static), None, *batch))

    # Unchecked, a gradient stays on its device.
    specs = P(), *[P("data")] * 3
    mesh = mesh_of("auto", data=8)
    options = {"in_specs": specs, "out_specs": P(), "check_vma": False}
    mapped = jax.shard_map(of_a_device, mesh=mesh, **options)

    def step(params, state, *batch):
        noise = Noise(state.stream)
        noisy = with_noise(mapped(params, *batch), noise, stddev)
        return updated(params, state._replace(stream=noise.state), noisy)

    return by_hand(step, model=params, state=first_state(params))


def psum(tree):
    return jax.lax.psum(tree, "data")
