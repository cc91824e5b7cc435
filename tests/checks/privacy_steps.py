"""What honest and misused steps share: a case, small models and losses, a plan, noise by hand.

A step by hand is `step(model, state, x, y, mask)`, where `mask` is `is_padding_example`. It returns
the next model and the next state, and private are the last three arguments.
"""

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
    the least of an honest step's releases, where it is known; `rules` are those of which a misuse
    breaks one, `says` is in the report on it, and `decided` is False where it may be undecided.
    `more` is given to the check as it is.
    A misuse that is `kept` may be among what the report calls kept, since it stays in the state.
    """

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    private: Any
    plan: dp.PrivacyPlan | None
    disclose: tuple[str, ...] = ()
    noise_multiplier: float | None = None
    rules: tuple[str, ...] = ()
    says: str = ""
    decided: bool = True
    kept: bool = False
    more: Mapping[str, Any] = MappingProxyType({})


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
    return Case("", step, args, kwargs, None, None, noise_multiplier=plan.noise_multiplier)


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
    step, *, model=None, state=None, batch=None, private=(2, 3, 4), plan=PLAN, multiplier=None
) -> Case:
    """A case of `step(model, state, *batch)`, compiled."""
    args = (
        mlp() if model is None else model,
        first_state(model) if state is None else state,
        *(data() if batch is None else batch),
    )
    multiplier = plan.noise_multiplier if multiplier is None else multiplier
    return Case("", eqx.filter_jit(step), args, {}, private, plan, noise_multiplier=multiplier)


def next_key(state: State) -> tuple[Array, State]:
    """A key for this step, and the state that carries the key for the next one."""
    carried, key = jax.random.split(state.key)
    return key, state._replace(key=carried)


def with_noise(grads, key, stddev=STDDEV):
    """Independent normal noise for every number; a traced deviation is for noise by hand."""
    if isinstance(stddev, jax.core.Tracer):
        return with_normals(grads, key, stddev)
    return dp.add_noise(grads, key, stddev)


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


def sliced(tree, start, size):
    """Some slots of a batch; `start` may be traced."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, size), tree)


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


class Given(NamedTuple):
    """What is at hand in an honest step by hand, for a step that returns something beside."""

    model: Any
    x: Array
    y: Array
    mask: Array
    values: Any
    grads: Any
    noisy: Any
    state: State


def beside(shown_of: Callable[[Given], Any], **named) -> Case:
    """An honest step by hand, which returns `shown_of(...)` as well."""
    grad_fn = dp.filter_value_and_clipped_grad(
        squared_error, l2_clip_norm=1.0, normalize_by=EXPECTED
    )

    def step(model, state, x, y, mask):
        key, state = next_key(state)
        values, grads = grad_fn(model, x, y, is_padding_example=mask)
        noisy = with_noise(grads, key)
        shown = shown_of(Given(model, x, y, mask, values, grads, noisy, state))
        return *updated(model, state, noisy), shown

    return by_hand(step, **named)


def prepared_by(prepare: Callable[..., Any], **named) -> Case:
    """An honest step by hand on `prepare(x, y, mask, key)`, which gives the first three again."""
    grad_fn = clipped()

    def step(model, state, x, y, mask):
        carried, noise_key, key = jax.random.split(state.key, 3)
        x, y, mask = prepare(x, y, mask, key)
        grads = grad_fn(model, x, y, is_padding_example=mask)
        return updated(model, state._replace(key=carried), with_noise(grads, noise_key))

    return by_hand(step, **named)


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


def listed(cases: dict[str, Callable[[], Case]], **known: Any) -> Callable[..., Any]:
    """A decorator that enters a function without arguments, which makes a case, by its name."""

    def enter(make: Callable[[], Case]) -> Callable[[], Case]:
        def named() -> Case:
            return make()._replace(name=make.__name__, **known)

        assert make.__name__ not in cases
        cases[make.__name__] = named
        return named

    return enter


def misuse(
    cases: dict[str, Callable[[], Case]],
    *rules: str,
    says: str = "",
    decided: bool = True,
    kept: bool = False,
) -> Callable[..., Any]:
    """Enters a misuse that breaks one of some rules; see `Case`."""
    return listed(cases, rules=rules, says=says, decided=decided, kept=kept)


def leak(cases: dict[str, Callable[[], Case]]) -> Callable[..., Any]:
    """Enters a step that leaks; the docstring of its function says what is wrong with it."""

    def enter(make: Callable[[], Case]) -> Callable[[], Case]:
        assert make.__doc__, make.__name__
        entered = listed(cases)(make)
        entered.__doc__ = make.__doc__
        return entered

    return enter
