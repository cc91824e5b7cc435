"""What honest and misused steps share: a case, small models and losses, a plan, noise by hand.

A step by hand is `step(model, state, x, y, mask)`, where `mask` is `is_padding_example`. It returns
the next model and the next state, and private are the last three arguments.
"""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

import eqx_dp as dp
from eqx_dp.checks import PrivacyReport
from tests.sharding.losses import mesh_of

SLOTS, WIDTH, CLASSES = 8, 4, 2
NUM_EXAMPLES = 10
SECRET = 0x1234_5678_9ABC_DEF0_0FED_CBA9_8765_4321

PLAN = dp.PrivacyPlan(sampling_prob=0.5, steps=10, noise_multiplier=1.2, delta=1e-5)
EXPECTED = PLAN.sampling_prob * NUM_EXAMPLES  # examples in a batch
STDDEV = PLAN.noise_multiplier / EXPECTED  # of the noise for what `clipped` returns
OPTIMIZER = optax.adam(1e-2)


class Case(NamedTuple):
    """A training step, how it is called, and what is to be said of its privacy.

    `private` and `plan` are None for a step of `make_step`, which knows them. `noise_multiplier` is
    the least of an honest step's releases, where it is known. `more` is given to the check as it
    is.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    private: Any
    plan: dp.PrivacyPlan | None
    noise_multiplier: float | None = None
    more: Mapping[str, Any] = MappingProxyType({})


def report_on(case: Case) -> PrivacyReport:
    given = dict(case.more)
    if case.private is not None:
        given |= {"private": case.private, "plan": case.plan}
    return dp.check_privacy(case.fn, *case.args, **given, **case.kwargs)


def plan_under(relation, **more):
    return dp.PrivacyPlan(
        **{
            "sampling_prob": 0.5,
            "steps": 10,
            "noise_multiplier": 1.2,
            "delta": 1e-5,
            "neighboring_relation": relation,
            **more,
        }
    )


class State(NamedTuple):
    """What a step by hand carries beside the model."""

    opt: Any
    key: Array
    step: Array


# Models, losses, data.


def mlp() -> eqx.nn.MLP:
    return eqx.nn.MLP(WIDTH, CLASSES, 4, 1, activation=jnp.tanh, key=jax.random.key(1))


def squared_error(model, x, y):
    return jnp.sum((model(x) - y) ** 2)


def absolute_error(model, x, y):
    return jnp.sum(jnp.abs(model(x) - y))


def dropout_loss(model, x, y, *, key):
    kept = jax.random.bernoulli(key, 0.5, x.shape)
    return squared_error(model, jnp.where(kept, 2 * x, 0), y)


def data() -> tuple[Array, Array, Array]:
    """Examples, targets, and a mask with three slots of padding."""
    random = np.random.default_rng(2)
    x = random.normal(size=(SLOTS, WIDTH)).astype(np.float32)
    y = random.normal(size=(SLOTS, CLASSES)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(y), jnp.arange(SLOTS) >= 5


def clip_norms_by_layer(model):
    """As a tree prefix: another clip norm for each layer."""
    prefix = jax.tree.map(lambda _: None, model)
    return eqx.tree_at(lambda m: m.layers, prefix, (0.5, 2.0), is_leaf=lambda x: x is None)


class LoRA(eqx.Module):
    """A linear layer, and beside it a product of two thin matrices."""

    base: eqx.nn.Linear
    down: jax.Array
    up: jax.Array

    def __call__(self, x):
        return self.base(x) + self.up @ (self.down @ x)


def lora():
    base = eqx.nn.Linear(WIDTH, CLASSES, key=jax.random.key(0))
    return LoRA(base, jax.random.normal(jax.random.key(1), (1, WIDTH)), jnp.zeros((CLASSES, 1)))


def adapters(model):
    spec = jax.tree.map(lambda _: False, model)
    return eqx.tree_at(lambda m: (m.down, m.up), spec, (True, True))


# A step of make_step.


def made(
    loss=squared_error,
    optimizer=OPTIMIZER,
    *,
    plan=PLAN,
    model=None,
    batch=None,
    **more,
) -> Case:
    """A case of `make_step`; `more` are options of it."""
    options = {"num_examples": NUM_EXAMPLES, "seed": SECRET, "l2_clip_norm": 1.0} | more
    step = dp.make_step(loss, optimizer, plan, **options)
    *examples, mask = data() if batch is None else batch
    kwargs = {"is_padding_example": step.shard_batch(mask)}
    args = (step.init(mlp() if model is None else model), *step.shard_batch(tuple(examples)))
    return Case(step, args, kwargs, None, None, noise_multiplier=plan.noise_multiplier)


# A step by hand.


def clipped(loss=squared_error, **options):
    """A clipped gradient: clip norm 1, divided by the expected number of examples."""
    return dp.filter_clipped_grad(
        loss, **({"l2_clip_norm": 1.0, "normalize_by": EXPECTED} | options)
    )


def first_state(model=None, optimizer=OPTIMIZER, key=None) -> State:
    params = eqx.filter(mlp() if model is None else model, eqx.is_inexact_array)
    key = jax.random.key(3) if key is None else key
    return State(optimizer.init(params), key, jnp.zeros((), jnp.int32))


def by_hand(
    step,
    *,
    model=None,
    state=None,
    batch=None,
    private=(2, 3, 4),
    plan=PLAN,
    multiplier=None,
    more=MappingProxyType({}),
) -> Case:
    """A case of `step(model, state, *batch)`, compiled."""
    args = (
        mlp() if model is None else model,
        first_state(model) if state is None else state,
        *(data() if batch is None else batch),
    )
    multiplier = plan.noise_multiplier if multiplier is None else multiplier
    return Case(eqx.filter_jit(step), args, {}, private, plan, multiplier, more)


def next_key(state: State) -> tuple[Array, State]:
    """A key for this step, and the state that carries the key for the next one."""
    carried, key = jax.random.split(state.key)
    return key, state._replace(key=carried)


def with_noise(grads, key, stddev=STDDEV):
    """Independent normal noise for every number; a traced deviation is for noise by hand."""
    is_traced = isinstance(stddev, jax.core.Tracer)
    return with_normals(grads, key, stddev) if is_traced else dp.add_noise(grads, key, stddev)


def with_normals(grads, key, stddev=STDDEV):
    """The same noise by hand, from a key for every leaf."""
    leaves, structure = jax.tree.flatten(grads)
    keys = jax.random.split(key, len(leaves))
    noisy = [
        leaf + stddev * jax.random.normal(leaf_key, leaf.shape)
        for leaf, leaf_key in zip(leaves, keys, strict=True)
    ]
    return structure.unflatten(noisy)


def updated(model, state: State, noisy, optimizer=OPTIMIZER):
    """The next model and state, from a noisy gradient."""
    updates, opt = optimizer.update(noisy, state.opt, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), state._replace(opt=opt, step=state.step + 1)


def scaled(factor, tree):
    return jax.tree.map(lambda leaf: factor * leaf, tree)


def added(*trees):
    return jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *trees)


def noised_by(noisy_of: Callable[[Any, Array], Any], grad_fn=None, **named) -> Case:
    """A step by hand in which `noisy_of(grads, key)` stands for adding the noise."""
    grad_fn = clipped() if grad_fn is None else grad_fn

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        return updated(model, state, noisy_of(grads, key))

    return by_hand(step, **named)


def chained(*behind, loss=squared_error, plan=PLAN, model=None, takes_key=False, **options):
    """A step by hand whose optimizer is a chain: the plan's noise, and what stands behind it."""
    grad_fn = clipped(loss, **options)
    optimizer = optax.chain(plan.privatizer(grad_fn, key=SECRET), *(behind or [OPTIMIZER]))
    model = mlp() if model is None else model

    def step(model, state, x, y, mask):
        key, state = next_key(state) if takes_key else (None, state)
        grads = grad_fn(model, x, y, key=key, is_padding_example=mask)
        updates, opt = optimizer.update(grads, state.opt, grad_fn.trainable(model))
        return eqx.apply_updates(model, updates), state._replace(opt=opt, step=state.step + 1)

    state = State(optimizer.init(grad_fn.trainable(model)), jax.random.key(4), jnp.zeros((), int))
    return by_hand(step, model=model, state=state, plan=plan)


class At(NamedTuple):
    """What is at hand in a step by hand: its arguments, and keys for this call alone."""

    model: Any
    state: State
    x: Any
    y: Any
    mask: Any
    more: tuple[Any, ...]
    keys: list[Array]

    def sum(self, loss=squared_error, *, model=None, key=None, **options):
        """The clipped sum of a loss."""
        grad_fn = clipped(loss, **options)
        model = self.model if model is None else model
        return grad_fn(model, self.x, self.y, key=key, is_padding_example=self.mask)


def step_of(noisy_of: Callable[[At], Any], **named) -> Case:
    """A step by hand; `noisy_of(at)` gives what the optimizer gets, or that and results."""

    def step(model, state, x, y, mask, *more):
        carried, *keys = jax.random.split(state.key, 5)
        state = state._replace(key=carried)
        found = noisy_of(At(model, state, x, y, mask, more, keys))
        noisy, *beside = found if type(found) is tuple else (found,)
        return *updated(model, state, noisy), *beside

    return by_hand(step, **named)


class Given(NamedTuple):
    """What is at hand in an honest step by hand, for a step that returns or keeps more."""

    model: Any
    new: Any
    x: Array
    y: Array
    mask: Array
    values: Any
    grads: Any
    noisy: Any
    state: State
    key: Array


def _given(model, state, x, y, mask):
    grad_fn = dp.filter_value_and_clipped_grad(
        squared_error, l2_clip_norm=1.0, normalize_by=EXPECTED
    )
    carried, noise_key, key = jax.random.split(state.key, 3)
    values, grads = grad_fn(model, x, y, is_padding_example=mask)
    noisy = with_noise(grads, noise_key)
    new, state = updated(model, state._replace(key=carried), noisy)
    return Given(model, new, x, y, mask, values, grads, noisy, state, key)


def beside(shown_of: Callable[[Given], Any], **named) -> Case:
    """An honest step by hand, which returns `shown_of(given)` as well."""

    def step(*args):
        given = _given(*args)
        return given.new, given.state, shown_of(given)

    return by_hand(step, **named)


def keeping(kept_of: Callable[[Any, Given], Any], first: Any) -> Case:
    """An honest step by hand whose state also holds `kept_of(kept, given)`, at first `first`."""

    def step(model, states, x, y, mask):
        given = _given(model, states[1], x, y, mask)
        return given.new, (kept_of(states[0], given), given.state)

    return by_hand(step, state=(first, first_state()))


def prepared_by(prepare: Callable[..., Any], **named) -> Case:
    """An honest step by hand on `prepare(x, y, mask, key)`, which gives the first three again."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        carried, noise_key, key = jax.random.split(state.key, 3)
        x, y, mask = prepare(x, y, mask, key)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        return updated(model, state._replace(key=carried), with_noise(grads, noise_key))

    return by_hand(step, **named)


def epoch_by(turn_of: Callable[..., Any], count=3, keys_of=None, **named) -> Case:
    """A scan over stacked batches: `turn_of(model, state, x, y, mask, key)` is a step of it.

    A turn's key is one of `keys_of(key, count)`; by default they are split from the state's.
    """
    params, static = eqx.partition(mlp(), eqx.is_inexact_array)
    keys_of = jax.random.split if keys_of is None else keys_of

    def epoch(params, state, xs, ys, masks):
        key, state = next_key(state)

        def turn(carry, batch):
            params, state = carry
            after, state = turn_of(eqx.combine(params, static), state, *batch)
            return (eqx.filter(after, eqx.is_inexact_array), state), None

        batches = (xs, ys, masks, keys_of(key, count))
        return jax.lax.scan(turn, (params, state), batches)[0]

    batch = tuple(jnp.stack([leaf] * count) for leaf in data())
    return by_hand(epoch, model=params, state=first_state(params), batch=batch, **named)


EVERYWHERE = P()


def on_devices(
    of_a_device: Callable[[Any, Array], Any],
    finish: Callable[..., Any],
    out_specs: P = EVERYWHERE,
) -> Case:
    """A step by hand on eight devices, by shard_map.

    `of_a_device(grads, key)` gets the clipped sum of one device's examples; `finish(params, state,
    result, key)` is what the step makes of its result, placed by `out_specs`.
    """
    grad_fn = clipped()
    params, static = eqx.partition(mlp(), eqx.is_array)

    def part(params, key, x, y, mask):
        model = eqx.combine(params, static)
        return of_a_device(grad_fn(model, x, y, is_padding_example=mask), key)

    # Unchecked, a gradient stays on its device.
    mapped = jax.shard_map(
        part,
        mesh=mesh_of("auto", data=8),
        in_specs=(P(), P(), P("data"), P("data"), P("data")),
        out_specs=out_specs,
        check_vma=False,
    )

    def step(params, state, x, y, mask):
        key, state = next_key(state)
        return finish(params, state, mapped(params, key, x, y, mask), key)

    return by_hand(step, model=params, state=first_state(params))


# Scaffolds that honest steps and leaking ones share.


def params_of(model):
    return eqx.filter(model, eqx.is_inexact_array)


def zero_sums():
    return jax.tree.map(jnp.zeros_like, clipped().trainable(mlp()))


def by_leaf(keys_of: Callable[[Any, int], Any]) -> Callable[..., Any]:
    """Noise leaf by leaf, with keys that `keys_of(key, number of leaves)` gives."""

    def noisy(grads, key):
        leaves, structure = jax.tree.flatten(grads)
        keys = keys_of(key, len(leaves))
        return structure.unflatten(map(with_noise, leaves, keys))

    return noisy


def in_parts(at: At, where: slice):
    """The clipped sum of some slots."""
    x, y, mask = (leaf[where] for leaf in (at.x, at.y, at.mask))
    return clipped()(at.model, x, y, is_padding_example=mask)


ROOT = jax.random.key(12)


def caller_keyed(key_of, t=0, returns=None) -> Case:
    """The noise's key is `key_of(root, t)`: a root that is closed over, and the caller counts."""

    def step(model, state, x, y, mask, t):
        grads = clipped()(model, x, y, is_padding_example=mask)
        new = updated(model, state, with_noise(grads, key_of(ROOT, t)))
        return new if returns is None else (*new, returns(ROOT, t))

    return by_hand(step, batch=(*data(), jnp.asarray(t)))


def with_optimizer(optimizer, grad_fn=None) -> Case:
    """A step by hand of an optimizer that holds the noise, wherever in it."""
    grad_fn = clipped() if grad_fn is None else grad_fn

    def step(model, opt_state, x, y, mask):
        grads = grad_fn(model, x, y, is_padding_example=mask)
        updates, opt_state = optimizer.update(grads, opt_state, grad_fn.trainable(model))
        return eqx.apply_updates(model, updates), opt_state

    return by_hand(step, state=optimizer.init(grad_fn.trainable(mlp())))


def weighted(weights_of) -> Case:
    """Examples times `weights_of(key)`, a number for each slot."""
    return prepared_by(lambda x, y, mask, key: (x * weights_of(key)[:, None], y, mask))


def with_argument(prepare, argument, **named) -> Case:
    """An honest step on `prepare(x, y, mask, argument, state)`; the argument is not private."""

    def step(model, state, x, y, mask, argument):
        key, state = next_key(state)
        x, y, mask = prepare(x, y, mask, argument, state)
        grads = clipped()(model, x, y, is_padding_example=mask)
        return updated(model, state, with_noise(grads, key))

    return by_hand(step, batch=(*data(), argument), **named)


def summed(of_a_device, stddev=STDDEV) -> Case:
    """One noise, outside, on what `of_a_device(grads)` makes of all devices' sums."""

    def finish(params, state, result, key):
        return updated(params, state, with_noise(result, key, stddev))

    return on_devices(lambda grads, key: of_a_device(grads), finish)


def psum(tree):
    return jax.lax.psum(tree, "data")


EXAMPLES = P("data")


def over_devices(part, mesh=None, stddev=STDDEV, batch=EXAMPLES) -> Case:
    """`part(model, x, y, mask)` on each device, and one noise on its result."""
    params, static = eqx.partition(mlp(), eqx.is_array)
    mapped = jax.shard_map(
        lambda params, *batch: part(eqx.combine(params, static), *batch),
        mesh=mesh_of("auto", data=8) if mesh is None else mesh,
        in_specs=(P(), batch, batch, batch),
        out_specs=P(),
        check_vma=False,
    )

    def step(params, state, x, y, mask):
        key, state = next_key(state)
        return updated(params, state, with_noise(mapped(params, x, y, mask), key, stddev))

    return by_hand(step, model=params, state=first_state(params))


def cases(tables):
    """All steps by name, each made when it is asked for."""
    found = {}
    for scaffold, table in tables:
        for name, given in table.items():
            given = given if type(given) is tuple else (given,)
            name = name if name not in found else f"{name} ({len(found)})"
            found[name] = functools.partial(scaffold, *given)
    return found
