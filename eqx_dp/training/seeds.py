"""A run has one seed, and everything random in it a stream of its own that follows from it."""

import functools
import hashlib
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

# Three words: the sampler's streams are told apart by a step, which is one word or two, so that
# none of these is ever one of those.
_STREAMS = {"noise": (1, 0, 0), "loss": (2, 0, 0)}


def key_of(seed: int, stream: Literal["noise", "loss"]) -> PRNGKeyArray:
    """The root key of a stream: 64 bits, hashed from a seed of up to 128."""
    words = np.random.SeedSequence(seed, spawn_key=_STREAMS[stream]).generate_state(2)
    return jax.random.wrap_key_data(jnp.asarray(words, jnp.uint32), impl="threefry2x32")


@functools.lru_cache(maxsize=16)
def fingerprint(seed: int, salt: bytes) -> str:
    """Tells whether two runs have the same seed, and does not tell the seed.

    A seed is often a small number, and a plain hash of it would be undone by trying them all:
    scrypt (RFC 7914) makes each try take some 50 ms and 16 MiB.
    """
    return hashlib.scrypt(str(seed).encode(), salt=salt, n=2**14, r=8, p=1, dklen=16).hex()
