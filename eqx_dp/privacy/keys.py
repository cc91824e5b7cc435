"""Secrets from the operating system, and keys from a secret: one for each purpose."""

import contextlib
import hashlib
import operator
import secrets
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, SupportsIndex, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import io_callback, multihost_utils
from jaxtyping import PRNGKeyArray, UInt64
from wadler_lindig import TextDoc

from ..trees import is_key
from .chacha import GENERATOR

Secret: TypeAlias = SupportsIndex | bytes
"""A number of at least 0, or bytes; of any length."""


def fresh_secret() -> bytes:
    """Draws 256 random bits from the operating system of host 0, and gives them to every host.

    Nothing stores them. On several hosts all must call this function, in the same order.
    """
    drawn = np.frombuffer(secrets.token_bytes(32), np.uint8)
    if jax.process_count() > 1:
        drawn = np.asarray(multihost_utils.broadcast_one_to_all(drawn), np.uint8)
    return drawn.tobytes()


def key_from_secret(secret: Secret, *purpose: str | bytes) -> PRNGKeyArray:
    """Makes a key of 256 bits from a secret of any length.

    `jax.random.key(seed)` keeps 32 bits of a seed and refuses more than 63. This keeps all of them:
    `key_from_secret(secret, "dropout")`, where `secret` is `secrets.randbits(128)` or
    `secrets.token_bytes(32)`.

    **Guarantee.** Every bit of the secret enters the key, by BLAKE2b (RFC 7693). The key is the
    same on every machine. The key for one purpose does not reveal the key for another, as far as
    BLAKE2b hides its input. The key is one of the cipher ChaCha (RFC 8439): without it, its numbers
    cannot be told from random ones, as far as anybody knows.

    Args:
        secret: A number of at least 0, or bytes that are not empty. The number 5 and the byte 5 are
            different secrets.
        *purpose: What the key is for: texts. Different texts give different keys; no text at all
            counts as one purpose.

    Returns:
        A typed key, of the type `key<chacha12>`, regardless of `jax_default_prng_impl`. (The cipher
        has 12 rounds; the best known attack breaks 7.) `jax.random.fold_in`, `split`, `bits`,
        `normal` and so on take it, and give the same numbers on any number of devices, with or
        without `jit`.

    Raises:
        ValueError: If the secret is negative, empty, or neither a number nor bytes.
    """
    words = _words(secret, purpose)
    with jax.ensure_compile_time_eval():  # one constant, also where it is called in a trace
        return jax.random.wrap_key_data(jnp.asarray(words), impl=GENERATOR)


def _words(secret: Secret, purpose: Iterable[str | bytes]) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.frombuffer(digest(secret, purpose, size=32), np.dtype("<u4")).astype(np.uint32)


def fold_text(key: PRNGKeyArray, text: str | bytes) -> PRNGKeyArray:
    """Folds a public text of any length into a key of any generator, by 64 bits of its hash."""
    for word in words_of(text):
        key = jax.random.fold_in(key, word)
    return key


def fold_texts(key: PRNGKeyArray, texts: Sequence[str | bytes]) -> list[PRNGKeyArray]:
    """One key for each text: the given key with that text folded in, as by `fold_text`."""
    if not texts or "rbg" in str(jax.random.key_impl(key)):  # whose keys differ under vmap
        return [fold_text(key, text) for text in texts]
    first, second = np.stack([words_of(text) for text in texts], axis=1)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, first)
    keys = jax.vmap(jax.random.fold_in)(keys, second)
    return [keys[i] for i in range(len(texts))]


def words_of(text: str | bytes) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """The hash of a text, as two words."""
    hashed = hashlib.blake2b(public_bytes("text", text), digest_size=8).digest()
    return np.frombuffer(hashed, np.dtype("<u4")).astype(np.uint32)


def digest(secret: Secret, purpose: Iterable[str | bytes], *, size: int) -> bytes:
    """Hashes a secret, with the texts that say what it is for, into at most 64 bytes.

    The boundaries between texts matter. Refuses a secret as `key_from_secret` does.
    """
    hashed = hashlib.blake2b(digest_size=size)
    texts = [public_bytes("purpose", text) for text in purpose]
    own = checked_secret("a secret", secret)
    if isinstance(own, bytes):
        told = b"bytes" + own
    else:
        told = b"number" + own.to_bytes((own.bit_length() + 7) // 8, "little")
    for part in (told, *texts):
        hashed.update(len(part).to_bytes(8, "little") + part)
    return hashed.digest()


def numbers_of(
    secret: Secret, purpose: Iterable[str | bytes], count: int
) -> UInt64[np.ndarray, "count"]:
    """Random numbers of 64 bits for one purpose, by SHAKE256 (FIPS 202)."""
    key = digest(secret, purpose, size=64)
    return np.frombuffer(hashlib.shake_256(key).digest(8 * count), np.dtype("<u8"))


def public_bytes(name: str, text: object) -> bytes:
    """Returns a public text as bytes, or raises a ValueError."""
    if not isinstance(text, (str, bytes)):
        raise ValueError(f"{name} must be a text or bytes; found a {type(text).__name__}.")
    return text.encode() if isinstance(text, str) else text


def checked_secret(name: str, secret: object) -> int | bytes:
    """Returns a secret as an int or as bytes, or raises a ValueError that does not show it."""
    found = f"a {type(secret).__name__}"
    if isinstance(secret, bytes):
        if secret:
            return secret
        found = "no byte"
    elif isinstance(secret, SupportsIndex) and not isinstance(secret, (bool, np.bool_)):
        with contextlib.suppress(TypeError):  # an array that is no single number
            number = operator.index(secret)
            if number >= 0:
                return number
            found = "a negative number"
    raise ValueError(
        f"{name} must be a whole number of at least 0, or at least one byte; found {found}. Take "
        "secrets.randbits(128) or secrets.token_bytes(32)."
    )


def refuse_to_pickle(self: object) -> NoReturn:
    """The `__reduce__` of what holds a secret: no pickle holds one.

    Raises:
        TypeError: always.
    """
    raise TypeError(
        f"{type(self).__name__} holds a secret, which no file may hold: anyone with it can "
        "subtract the noise, or tell which examples were in which batch. Save what is public, and "
        "draw fresh randomness at the next start. To copy a state: jax.tree.map(jnp.copy, state)."
    )


def without_key(self: object) -> str:
    """The `__repr__` of what holds a key: JAX would print its bits."""
    return f"{type(self).__name__}(<secret>)"


def printed_without_key(holder: object, **_: Any) -> TextDoc:
    """The `__pdoc__` of what holds a key: `eqx.tree_pformat` prints what `repr` does."""
    return TextDoc(repr(holder))


def warn_of_small(name: str, secret: int | bytes) -> None:
    """Warns of a secret that can be guessed: one of at most 32 bits."""
    number = int.from_bytes(secret, "little") if isinstance(secret, bytes) else secret
    if number < 2**32:
        warnings.warn(
            f"{name} is small, and can be guessed by trying all numbers up to it: anyone who does "
            "can subtract the noise, or tell which examples were in a batch. Take "
            "secrets.randbits(128) and keep it secret, or leave it out for fresh randomness.",
            stacklevel=4,
        )


def outside_of_programs(key: PRNGKeyArray | None) -> PRNGKeyArray:
    """The given key, or a fresh one. A compiled `init` asks the host for it at each call.

    So no program holds it, nor a printed form of the program, nor JAX's cache of programs on disk.
    (But a program for several hosts holds a key that was given.)
    """
    hosts, is_traced = jax.process_count(), isinstance(jnp.zeros(()), Tracer)
    if not is_traced or isinstance(key, Tracer) or (key is not None and hosts > 1):
        return key_from_secret(fresh_secret(), "noise") if key is None else key
    with jax.ensure_compile_time_eval():
        given = None if key is None else np.asarray(jax.random.key_data(key))

    # Without JAX, for which a callback may wait for ever.
    def words() -> np.ndarray[Any, np.dtype[np.uint32]]:
        if hosts > 1:
            raise ValueError("on several hosts begin noise outside of jit, or give a key")
        return _words(fresh_secret(), ("noise",)) if given is None else given

    drawn = io_callback(words, jax.ShapeDtypeStruct((8,), jnp.uint32))
    return jax.random.wrap_key_data(drawn, impl=GENERATOR)


def single_key(key: PRNGKeyArray | Secret) -> PRNGKeyArray:
    """The given key of ChaCha, or the one made from the given secret."""
    if not isinstance(key, (jax.Array, np.ndarray)):
        secret = checked_secret("key", key)
        warn_of_small("key", secret)
        return key_from_secret(secret, "noise")
    is_one = is_key(key) and key.shape == ()
    if not (is_one and jax.random.key_impl(key) == GENERATOR):
        raise ValueError(
            "key must be the secret itself, a number or bytes, or one key of ChaCha, the cipher; "
            f"found an array of shape {key.shape} and dtype {key.dtype}. Take "
            "secrets.randbits(128), or leave it out for fresh randomness."
        )
    return cast(PRNGKeyArray, key)
