"""Steps of `make_step` in its forms, and of models that were not written for this library."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest
from dp_accounting import NeighboringRelation
from jax.sharding import PartitionSpec as P

import eqx_dp as dp
from tests.checks.privacy_steps import (
    CLASSES,
    SLOTS,
    WIDTH,
    adapters,
    by_hand,
    chained,
    clip_norms_by_layer,
    clipped,
    data,
    dropout_loss,
    listed,
    lora,
    made,
    mlp,
    next_key,
    plan_under,
    updated,
    with_noise,
)
from tests.sharding.losses import mesh_of

MADE = {}
honest = listed(MADE)


# make_step in its forms.


@honest
def method_auto():
    return made()


@honest
def method_book_keeping():
    return made(method="book_keeping")


@honest
def method_ghost():
    return made(method="ghost")


@honest
def method_per_example():
    return made(method="per_example")


@honest
def microbatches_of_one():
    return made(microbatch_size=1)


@honest
def microbatches_of_two():
    return made(microbatch_size=2)


@honest
def microbatches_that_do_not_divide_the_batch():
    return made(microbatch_size=3, method="book_keeping")


@honest
def policy_float32():
    return made(policy=dp.load_policy("float32"))


@honest
def policy_mixed_bfloat16():
    return made(policy=dp.load_policy("mixed_bfloat16"))


@honest
def policy_mixed_float16():
    return made(policy=dp.load_policy("mixed_float16"))


@honest
def policy_bfloat16():
    policy = dp.load_policy("bfloat16")
    return made(policy=policy, model=policy.cast_to_param(mlp()))


@honest
def loss_with_keys():
    return made(dropout_loss)


@honest
def loss_with_keys_in_microbatches():
    return made(dropout_loss, microbatch_size=2)


def batch_loss(model, x, y):
    return jnp.mean(jnp.sum((jax.vmap(model)(x) - y) ** 2, axis=-1))


@honest
def loss_of_a_batch():
    return made(batch_loss, keep_batch_dim=True)


@honest
def rescaled_to_unit_norm():
    return made(l2_clip_norm=0.1, rescale_to_unit_norm=True)


@honest
def clip_norms_of_layers():
    return made(l2_clip_norm=clip_norms_by_layer(mlp()))


@honest
def frozen_first_layer():
    spec = jax.tree.map(lambda _: False, mlp())
    spec = eqx.tree_at(lambda m: (m.layers[-1].weight, m.layers[-1].bias), spec, (True, True))
    return made(filter_spec=spec)


@honest
def lora_made():
    return made(model=lora(), filter_spec=adapters(lora()))


@honest
def optimizer_sgd_with_momentum():
    return made(optimizer=optax.sgd(0.1, momentum=0.9, nesterov=True))


@honest
def optimizer_adamw_with_schedule():
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)
    return made(optimizer=optax.adamw(rate, weight_decay=0.1))


@honest
def optimizer_lion():
    return made(optimizer=optax.lion(1e-3))


@honest
def optimizer_prodigy():
    return made(optimizer=optax.contrib.prodigy(1.0))


@honest
def optimizer_schedule_free():
    return made(optimizer=optax.contrib.schedule_free(optax.adam(1e-2), 1e-2))


@honest
def optimizer_chain_with_decay_and_clip():
    return made(
        optimizer=optax.chain(
            optax.clip_by_global_norm(1.0), optax.add_decayed_weights(0.1), optax.sgd(0.1)
        )
    )


@honest
def optimizer_multi_steps():
    return made(optimizer=optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation())


@honest
def optimizer_that_skips_what_is_not_finite():
    return made(optimizer=optax.apply_if_finite(optax.adam(1e-2), 2))


def sharded(kind, **more):
    rules = dp.ShardingRules(
        mesh_of(kind, data=4, model=2), params=(("**.weight", P("model", None)),)
    )
    return made(sharding=rules, **more)


@honest
def sharded_on_auto_axes():
    return sharded("auto")


@honest
def sharded_on_explicit_axes():
    return sharded("explicit")


@honest
def sharded_in_microbatches_of_bfloat16():
    return sharded("auto", microbatch_size=1, policy=dp.load_policy("mixed_bfloat16"))


@honest
def replace_one():
    return made(plan=plan_under(NeighboringRelation.REPLACE_ONE))


@honest
def replace_special():
    return made(plan=plan_under(NeighboringRelation.REPLACE_SPECIAL))


@honest
def all_examples_in_every_step():
    plan = plan_under(NeighboringRelation.ADD_OR_REMOVE_ONE, sampling_prob=1.0)
    return made(plan=plan, method="per_example")


@honest
def fresh_randomness():
    return made(seed=None)


@honest
def scanned_steps():
    """Several steps in one program, of one state."""
    case, mask = made(), data()[-1]
    arrays, static = eqx.partition(case.args[0], eqx.is_array)

    def scan(arrays, *batches, is_padding_example):
        def take(arrays, batch):
            *examples, mask = batch
            state = eqx.combine(arrays, static)
            after = case.fn(state, *examples, is_padding_example=mask)
            return eqx.filter(after, eqx.is_array), None

        return jax.lax.scan(take, arrays, (*batches, is_padding_example))[0]

    many = [jnp.stack([jnp.asarray(x)] * 3) for x in (*case.args[1:], mask)]
    return case._replace(
        fn=jax.jit(scan),
        args=(arrays, *many[:-1]),
        kwargs={"is_padding_example": many[-1]},
        private=(*range(1, len(many)), "is_padding_example"),
        plan=case.fn.plan,
    )


# Models that were not written for this library.


@honest
def masked_autoregressive_flow():
    pytest.importorskip("flowjax")
    import paramax
    from flowjax.distributions import Normal
    from flowjax.flows import masked_autoregressive_flow as make_flow

    flow = make_flow(
        jax.random.key(0), base_dist=Normal(jnp.zeros(WIDTH)), flow_layers=1, nn_width=4
    )

    def loss(flow, x):
        return -paramax.unwrap(flow).log_prob(x)

    grad_fn = clipped(loss)

    def step(model, state, x, y, mask):
        del y
        key, state = next_key(state)
        grads = grad_fn(model, x, is_padding_example=mask)
        return updated(model, state, with_noise(grads, key))

    return by_hand(step, model=flow)


class Recurrent(eqx.Module):
    """A GRU over a sequence, as in Equinox's documentation, with a linear layer on its end."""

    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(2, 3, key=keys[0])
        self.head = eqx.nn.Linear(3, CLASSES, key=keys[1])

    def __call__(self, sequence):
        start = jnp.zeros(self.cell.hidden_size)
        hidden, _ = jax.lax.scan(lambda h, x: (self.cell(x, h), None), start, sequence)
        return self.head(hidden)


def sequences(length, width):
    _, y, mask = data()
    return jax.random.normal(jax.random.key(9), (SLOTS, length, width)), y, mask


@honest
def recurrent_network():
    return made(model=Recurrent(jax.random.key(0)), batch=sequences(3, 2))


@honest
def attention():
    layer = eqx.nn.MultiheadAttention(2, WIDTH, key=jax.random.key(0))

    def loss(attention, x, y):
        return jnp.sum((attention(x, x, x).mean(axis=0)[:CLASSES] - y) ** 2)

    return made(loss, model=layer, batch=sequences(3, WIDTH))


@honest
def convolutional_network():
    """The layers of the network in Equinox's documentation, on smaller images."""
    keys = jax.random.split(jax.random.key(0), 2)
    model = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(1, 2, kernel_size=3, key=keys[0]),
            eqx.nn.MaxPool2d(kernel_size=2),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(18, CLASSES, key=keys[1]),
            eqx.nn.Lambda(jax.nn.log_softmax),
        ]
    )

    def cross_entropy(model, image, label):
        return -model(image)[label]

    images = jax.random.normal(jax.random.key(1), (SLOTS, 1, 6, 6))
    labels, mask = jnp.arange(SLOTS) % CLASSES, data()[2]
    return made(cross_entropy, model=model, batch=(images, labels, mask))


@honest
def dropout_layer():
    model = eqx.nn.Sequential(
        [eqx.nn.Linear(WIDTH, CLASSES, key=jax.random.key(0)), eqx.nn.Dropout(0.5)]
    )

    def loss(model, x, y, *, key):
        return jnp.sum((model(x, key=key) - y) ** 2)

    return chained(loss=loss, model=model, takes_key=True)
