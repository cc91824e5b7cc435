"""Which process holds which part of a batch."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh


def local_shards(mesh: Mesh, examples: Sequence[str]) -> int:
    """How many parts of the examples the devices of this process hold.

    Raises:
        ValueError: devices of several processes hold the same part. Each process would give it
            different examples, and several examples would share one slot.
    """
    of_devices = np.array([device.process_index for device in mesh.devices.flat], np.int64)
    axes = [mesh.axis_names.index(axis) for axis in examples]
    by_part = np.moveaxis(of_devices.reshape(mesh.devices.shape), axes, range(len(axes)))
    of_parts = by_part.reshape(int(np.prod(by_part.shape[: len(axes)])), -1)
    if np.any(of_parts != of_parts[:, :1]):
        others = [axis for axis in mesh.axis_names if axis not in examples]
        raise ValueError(
            f"The mesh axes {', '.join(others)} go over devices of several processes, each of "
            "which draws examples of its own: a part of the batch would be other examples on each. "
            "Lay out the mesh so that the devices along these axes belong to one process."
        )
    return int(np.sum(of_parts[:, 0] == jax.process_index()))
