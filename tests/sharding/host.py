"""One host of a training run of three steps; `python -m tests.sharding.host` is one process of it.

Arguments: the host's number, how many hosts there are, the coordinator's port, a folder, where it
leaves what it has seen, and what to run (see `RUNS`).
"""

import pathlib
import sys

import equinox as eqx
import jax
import numpy as np
import optax

import eqx_dp as dp
from tests.sharding.fully_sharded_net import batch_of, loss, net, rules_of
from tests.sharding.losses import GPT, Says, gpt_rules, language_loss, mesh_of, tokens

NUM_EXAMPLES, STEPS = 64, 3
PLAN = dp.PrivacyPlan(sampling_prob=0.2, steps=STEPS, noise_multiplier=0.5, delta=1e-5)


def train(host, hosts):
    """Trains on this host's part of each batch; returns what all hosts are to agree about."""
    # Nothing is divided over `model`: with two groups of devices, XLA's CPU collectives may meet
    # for the first time in an order that differs from host to host, and wait for each other.
    mesh = mesh_of("auto", data=8, model=1)
    rules = gpt_rules(mesh, accumulators="examples")
    data = tokens(NUM_EXAMPLES)
    grad_fn = dp.filter_clipped_grad(
        language_loss,
        l2_clip_norm=0.5,
        keep_batch_dim=True,
        sharding=rules,
        normalize_by=PLAN.sampling_prob * NUM_EXAMPLES,
    )
    privatizer = PLAN.privatizer(grad_fn, key=jax.random.key(1))
    optimizer = optax.chain(privatizer, optax.sgd(0.5))
    sampler = PLAN.sampler(NUM_EXAMPLES, seed=2, pad_to=8 // hosts, hosts=hosts, host=host)

    @eqx.filter_jit
    def step(model, state, batch, is_padding_example):
        grads = grad_fn(model, *batch, is_padding_example=is_padding_example)
        updates, state = optimizer.update(grads, state)
        return rules.shard(eqx.apply_updates(model, updates)), state

    with jax.set_mesh(mesh):
        model = rules.shard(GPT(Says("auto"), depth=1))
        params = eqx.filter(model, eqx.is_inexact_array)
        zeros = jax.jit(lambda: jax.tree.map(jax.numpy.zeros_like, params))()
        noise, _ = eqx.filter_jit(privatizer.update)(zeros, privatizer.init(zeros))
        state = optimizer.init(params)
        indices = []
        for t in range(STEPS):
            chosen, is_padding_example = sampler.batch(t)
            indices.append(np.where(is_padding_example, -1, chosen))
            batch = tuple(part[chosen] for part in data)
            batch, is_padding_example = rules.shard_batch((batch, is_padding_example))
            model, state = step(model, state, batch, is_padding_example)
        whole = jax.jit(
            lambda x: x,
            out_shardings=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()),
        )
        leaves = [
            whole(leaf).addressable_data(0)
            for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array))
        ]
        drawn = [whole(leaf).addressable_data(0) for leaf in jax.tree.leaves(noise)]
    return {
        **{f"param{i}": np.asarray(leaf) for i, leaf in enumerate(leaves)},
        **{f"noise{i}": np.asarray(leaf) for i, leaf in enumerate(drawn)},
        "indices": np.stack(indices),
        "epsilon": PLAN.epsilon(),
    }


def fully_sharded(host, hosts):
    """Clipped gradients of parameters that are spread over all devices, by every method.

    The second host has no example at all.
    """
    rules = rules_of(axes={"data": 4})
    data, padding = batch_of(8), np.arange(8) > 2
    own = slice(host * 8 // hosts, (host + 1) * 8 // hosts)
    found = []
    with jax.set_mesh(rules.mesh):
        model = rules.shard(net())
        batch = rules.shard_batch([x[own] for x in (*data, padding)])
        everywhere = jax.sharding.NamedSharding(rules.mesh, jax.sharding.PartitionSpec())
        whole = jax.jit(lambda x: x, out_shardings=everywhere)
        for method in ("ghost", "book_keeping", "per_example"):
            grad_fn = dp.filter_clipped_grad(
                loss, l2_clip_norm=0.7, sharding=rules, method=method, microbatch_size=1
            )
            *examples, mask = batch
            grads = eqx.filter_jit(grad_fn)(model, *examples, is_padding_example=mask)
            found += [whole(leaf).addressable_data(0) for leaf in jax.tree.leaves(grads)]
    return {f"grad{i:02}": np.asarray(leaf) for i, leaf in enumerate(found)}


RUNS = {"train": (train, 8), "fully_sharded": (fully_sharded, 4)}
"""What a host may be asked to run, and how many devices all hosts have together."""


def main():
    host, hosts, port = map(int, sys.argv[1:4])
    run, devices = RUNS[sys.argv[5]]
    jax.config.update("jax_num_cpu_devices", devices // hosts)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", hosts, host)
    np.savez(pathlib.Path(sys.argv[4]) / f"host{host}.npz", **run(host, hosts))


if __name__ == "__main__":
    main()
