"""What the hosts of a run have to agree about."""

import jax
import numpy as np
from jax.experimental import multihost_utils


def is_first_host() -> bool:
    """Whether this process is the one that writes and prints for all."""
    return jax.process_index() == 0


def broadcast(number: int) -> int:
    """The first host's number, on every host."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int64(number)))


def any_host_asked_to_stop(asked: bool, step: int) -> bool:
    """Whether to stop after this step: one answer for all hosts, at the same step.

    Several hosts hear of SIGTERM by JAX's preemption service, which names a step that none of them
    has passed; one alone hears of it itself.
    """
    if jax.process_count() == 1:
        return asked
    return multihost_utils.reached_preemption_sync_point(step)
