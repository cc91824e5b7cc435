"""One of two hosts of a run; `python -m tests.training.host` is one process of it.

Arguments: the host's number, the coordinator's port, the run's directory, a folder for what is
compiled, how long a step takes at least, in seconds, and "shared" where hosts share a draw and make
the model by a function, or "several" where a call takes three steps. Prints each step; at the end
host 0 leaves the parameters in `params.npz` beside the run's directory.
"""

import os
import pathlib
import sys
import time

import jax
import numpy as np

import eqx_dp as dp
from tests.training import runs

STEPS = 30
PLAN = runs.plan_of(STEPS)


def main(host, port, directory, cache, pause, how=""):
    for name, value in {
        "jax_num_cpu_devices": 1,
        "jax_cpu_collectives_implementation": "gloo",
        "jax_compilation_cache_dir": cache,
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
    }.items():
        jax.config.update(name, value)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(host))

    def says(event):
        print(f"step {event.step}", flush=True)
        time.sleep(float(pause))

    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    is_shared = how == "shared"
    rules = dp.ShardingRules(mesh, accumulators="examples")
    step = runs.make(PLAN, sharding=rules, shared=is_shared)
    options = {"steps_per_call": 3 if how == "several" else 1}
    trainer = runs.trainer(directory, step, callbacks=[says], save_every=5, **options)
    made = {"init_model": runs.small_model}
    state = trainer.run(**(made if is_shared else {"model": runs.small_model()}))
    whole = jax.NamedSharding(mesh, jax.P())
    leaves = [
        jax.jit(lambda x: x, out_shardings=whole)(x).addressable_data(0)
        for x in jax.tree.leaves(state.model)
        if hasattr(x, "shape")
    ]
    if int(host) == 0:
        np.savez(pathlib.Path(directory).parent / "params.npz", *map(np.asarray, leaves))


def forked(output, *arguments):
    """For a process that is forked: prints to a file, and leaves the other host in good order."""
    with output.open("w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    main(*arguments)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
