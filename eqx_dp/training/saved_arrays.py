"""Arrays of a checkpoint, written from where they live, and read to where they are to live."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from ..expected import RunPath
from ..extras import extra
from .directory import STATE
from .files import is_remote

# How much of the arrays is on its way at the same time: a part of them, and no less than this,
# which is more for a store, whose answers take their time.
_PART, _LEAST, _LEAST_OF_STORE = 64, 2**24, 2**28


def writer(arrays: Mapping[str, Array], folder: RunPath) -> Any:
    """Orbax's checkpointer for arrays like these, in folders like this.

    A few parts of arrays are packed and written at a time: without a limit, packed copies of all
    of them would be in the host's memory (and that took longer).
    """
    total, largest = 0, 0
    for x in arrays.values():
        part = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        total += part * len(x.sharding.addressable_devices)
        largest = max(largest, part)
    orbax = extra("orbax.checkpoint")
    limit = _limit(largest, total, folder)
    handler = orbax.StandardCheckpointHandler(save_concurrent_gb=limit / 10**9)
    return orbax.AsyncCheckpointer(handler)


def arrays_in(folder: RunPath, targets: Mapping[str, Any]) -> dict[str, Array]:
    """Arrays of a checkpoint, by name, each to where its target lives, an array or its shape.

    Each host reads the parts that its devices hold, a few at a time: what is on its way is read
    into the host's memory, unpacked, and copied to a device.
    """
    orbax = extra("orbax.checkpoint")

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        here = x.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)

    shapes = {name: shape(target) for name, target in targets.items()}
    to = orbax.checkpoint_utils.construct_restore_args(shapes)
    metadata_of = orbax.PyTreeCheckpointHandler()
    saved = metadata_of.metadata(folder / STATE).tree
    limit = _bytes_on_the_way(shapes, saved, folder) / 10**9
    handler = orbax.PyTreeCheckpointHandler(restore_concurrent_gb=limit)
    with orbax.Checkpointer(handler) as checkpointer:
        return checkpointer.restore(
            folder / STATE,
            args=orbax.args.PyTreeRestore(shapes, restore_args=to, partial_restore=True),
        )


def _bytes_on_the_way(
    shapes: Mapping[str, jax.ShapeDtypeStruct], saved: Mapping[str, Any], folder: RunPath
) -> int:
    """How many bytes may be read at once: at least those of any part, with chunks around it."""
    total, largest = 0, 0
    for name, leaf in shapes.items():
        sharding: Any = leaf.sharding
        part = sharding.shard_shape(leaf.shape)
        total += math.prod(part) * leaf.dtype.itemsize * len(sharding.addressable_devices)
        chunks = zip(part, saved[name].storage.chunk_shape, strict=False)
        around = math.prod(_around(length, chunk) for length, chunk in chunks)
        largest = max(largest, around * np.dtype(saved[name].dtype).itemsize)
    return _limit(largest, total, folder)


def _limit(largest: int, total: int, folder: RunPath) -> int:
    """How many bytes may be on their way: of any part, and a part of all."""
    # A tenth more: the limit is handed over in gigabytes.
    least = _LEAST_OF_STORE if is_remote(folder) else _LEAST
    return max(largest + largest // 10 + 1, total // _PART, least)


def _around(length: int, chunk: int) -> int:
    """The length of the chunks that hold any part of a length, which begins at a multiple of it."""
    chunk = max(chunk, 1)
    if length % chunk == 0 or chunk % max(length, 1) == 0:
        return max(length, chunk)
    return (-(-length // chunk) + 1) * chunk
