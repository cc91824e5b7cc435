"""Values of a program that is walked through: which are in memory, which never leave a loop."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from .liveness import Buffer

SMALL = 1024
"""Bytes below which a value is not looked at: scalars, keys, norms of a few examples."""


@dataclasses.dataclass(eq=False)
class Value:
    """A value, in memory or not.

    Attributes:
        aval: shape and dtype, of all devices.
        parts: over how many devices it is spread.
        axes: over which axes of the mesh.
        buffer: where it is; None as long as it lives in a fused loop alone.
        wide: where it is in float32, on a platform that computes with nothing narrower.
        sources: what has to be read to compute it again.
        aligned: those of them that are read entry for entry, so that it may take their place.
        heavy: the costly operations that it would repeat.
        is_cheap: whether to read its one source costs no more than to read itself.
        is_parameter: whether it follows from the model's arrays alone.
        purpose: what it is for.
    """

    aval: Any
    axes: frozenset[str] = frozenset()
    parts: int = 1
    buffer: Buffer | None = None
    wide: Buffer | None = None
    sources: frozenset[Buffer] = frozenset()
    aligned: frozenset[Buffer] = frozenset()
    heavy: frozenset[int] = frozenset()
    is_cheap: bool = False
    is_parameter: bool = False
    purpose: str = ""

    @property
    def bytes(self) -> int:
        """Bytes on a device."""
        return bytes_of(self.aval) // self.parts

    @property
    def is_constant(self) -> bool:
        """Whether nothing has to be read for it."""
        return self.buffer is None and not self.sources

    def read(self) -> frozenset[Buffer]:
        """What a fused loop reads for it."""
        if self.buffer is None or self.is_cheap:
            return self.sources
        return frozenset([self.buffer])

    def read_aligned(self) -> frozenset[Buffer]:
        """Of that, what is read entry for entry."""
        if self.buffer is None or self.is_cheap:
            return self.aligned
        return frozenset([self.buffer])


def bytes_of(aval: Any) -> int:
    """Bytes of an array."""
    if not hasattr(aval, "shape"):
        return 0
    return math.prod(aval.shape) * (8 if is_key(aval) else aval.dtype.itemsize)


def is_key(aval: Any) -> bool:
    """Whether it is an array of JAX's random keys."""
    return jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)


def is_narrow(aval: Any) -> bool:
    """Whether it is a float of 16 bits or fewer."""
    return (
        not is_key(aval) and jnp.issubdtype(aval.dtype, jnp.floating) and aval.dtype.itemsize <= 2
    )


def axes_of_spec(spec: Any) -> frozenset[str]:
    """The mesh axes that a ``PartitionSpec`` names."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    return frozenset(axis for entry in entries for axis in entry if isinstance(axis, str))


def axes_of_type(aval: Any) -> frozenset[str]:
    """The mesh axes that an array's type says it is spread over; none on Auto axes."""
    sharding = getattr(aval, "sharding", None)
    return frozenset() if sharding is None else axes_of_spec(sharding.spec)
