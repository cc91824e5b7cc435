"""A run has one seed, and everything random in it a stream of its own that follows from it."""

import functools
import hashlib
from typing import Literal

from jaxtyping import PRNGKeyArray

from ..privacy import Secret, digest, key_from_secret

_ROOT = "make_step"


def key_of(seed: Secret, stream: Literal["noise", "loss"], run: str = "") -> PRNGKeyArray:
    """The root key of a stream, for one run."""
    return key_from_secret(seed, _ROOT, stream, run)


def keyed_digest(seed: Secret, *texts: str) -> str:
    """Tells whether texts are the same, to those who know the seed alone.

    Others learn nothing: not what the texts say, guessed or not, and not the seed.
    """
    return digest(_slow(seed, b"eqx_dp: keyed digest"), texts, size=16).hex()


def fingerprint(seed: Secret, salt: bytes) -> str:
    """Tells whether two runs have the same seed, and does not tell the seed."""
    return _slow(seed, salt)[:16].hex()


@functools.lru_cache(maxsize=16)
def _slow(seed: Secret, salt: bytes) -> bytes:
    """A hash of a seed.

    A seed is often a small number, and a plain hash of it would be undone by trying them all:
    scrypt (RFC 7914) makes each try take some 50 ms and 16 MiB.
    """
    secret = digest(seed, (_ROOT, "fingerprint"), size=64)
    return hashlib.scrypt(secret, salt=salt, n=2**14, r=8, p=1, dklen=32)
