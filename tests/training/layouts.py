"""A run that is fully sharded, on one layout of devices; `python -m tests.training.layouts`.

Arguments: the host's number, how many hosts there are, how many devices all have together, the
coordinator's port, the run's directory, a folder for what is compiled, how accumulators live, and
how many steps to take. Prints each step.
"""

import sys
import time

import jax

import eqx_dp as dp
from tests.sharding.fully_sharded_net import batch_of, loss, net, rules_of
from tests.training import runs

STEPS = 24
# Little noise: beside it a gradient that is wrong by a percent shows.
PLAN = dp.PrivacyPlan(sampling_prob=0.25, steps=STEPS, noise_multiplier=1.0, delta=1e-5)
DATA = batch_of(runs.NUM_EXAMPLES)
PAUSE = 0.2


def trainer(directory, rules, **options):
    """A trainer whose checkpoints are of every third step."""
    step = runs.make(PLAN, loss=loss, sharding=rules, ema=0.9, microbatch_size=2, method="ghost")
    return runs.trainer(directory, step, DATA, save_every=3, **options)


def main():
    host, hosts, devices, port = map(int, sys.argv[1:5])
    directory, cache, accumulators, steps = sys.argv[5:]
    for name, value in {
        "jax_num_cpu_devices": devices // hosts,
        "jax_cpu_collectives_implementation": "gloo" if hosts > 1 else None,
        "jax_compilation_cache_dir": cache,
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
    }.items():
        jax.config.update(name, value)
    if hosts > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", hosts, host)

    def says(event):
        parts = event.state.model.up.addressable_shards
        assert all(part.data.size == event.state.model.up.size // devices for part in parts)
        print(f"step {event.step}", flush=True)
        time.sleep(PAUSE)

    rules = rules_of(axes={"data": devices}, accumulators=accumulators)
    trainer(directory, rules, callbacks=[says]).run(init_model=net, steps=int(steps))


if __name__ == "__main__":
    main()
