"""A stream of noise: a secret key, and how often noise was drawn with it."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray, UInt32

from .keys import (
    Secret,
    fold_text,
    outside_of_programs,
    printed_without_key,
    refuse_to_pickle,
    single_key,
    without_key,
)
from .noise_checks import noise_key

Counter = tuple[UInt32[Array, ""], UInt32[Array, ""]]
"""64 bits: the low word, and the high word."""


class NoiseStream(NamedTuple):
    """The state of a stream of noise, from `noise_stream`. **Secret**: do not save it.

    Attributes:
        key: one key of ChaCha; never changed.
        counter: how often noise was drawn, modulo 2^64; two words, the low one first. Every draw
            returns the stream with a counter that is one larger. So no pair of key and counter is
            used twice, unless a state is used twice.
    """

    key: PRNGKeyArray
    counter: Counter

    __repr__, __pdoc__, __reduce__ = without_key, printed_without_key, refuse_to_pickle

    def grown(self) -> "NoiseStream":
        """The stream after one draw."""
        low, high = self.counter
        after = low + np.uint32(1)
        return NoiseStream(self.key, (after, high + (after == 0).astype(jnp.uint32)))


def noise_stream(key: PRNGKeyArray | Secret | None = None) -> NoiseStream:
    """Begins a stream of noise, for `add_noise`.

    ```python
    state = dp.noise_stream()
    for t in range(plan.steps):
        ...
        noisy, state = dp.add_noise(grads, state, plan.noise_multiplier * sensitivity)
    ```

    Without `key` each call draws 256 random bits from the operating system, which nothing stores:
    no two streams share noise. Under `jit` too: the compiled program asks the host at each call.
    On several hosts call it outside of `jit`, on all of them: they get one stream.

    **A key given by hand repeats its noise.** It cancels in the difference of two runs with one
    key, or of two values that two streams with one key were added to, and neither is private any
    more. It is for experiments that must repeat.

    Args:
        key: None: fresh randomness. Or a secret that is not used elsewhere, a number of any size or
            bytes, from which a key of ChaCha is made; or such a key.

    Returns:
        The stream, a PyTree: carry it through `jit` and `scan`, and return it from a step. After a
        restart begin another one.

    Raises:
        ValueError: If `key` is neither one secret nor one key of ChaCha; or it would be one stream
            for several models under `vmap`.
    """
    return first_stream(None if key is None else single_key(key), "eqx_dp noise stream")


def first_stream(root: PRNGKeyArray | None, text: str) -> NoiseStream:
    """The beginning of the stream of a root key, or of a fresh one; another one for each text."""
    return stream_of(fold_text(outside_of_programs(root), text))


def stream_of(key: PRNGKeyArray) -> NoiseStream:
    """The beginning of the stream that is drawn with this key itself."""
    zero = jnp.zeros((), jnp.uint32)
    return NoiseStream(noise_key(key, "init"), (zero, jnp.copy(zero)))


def checked_stream(state: object) -> NoiseStream:
    """Returns the state of a stream; a ValueError for anything else, such as a key."""
    if not isinstance(state, NoiseStream):
        raise ValueError(
            "state must be a stream of noise, as dp.noise_stream() returns it; found a value of "
            f"type {type(state).__name__}. Noise takes no key: state = dp.noise_stream() once, and "
            "then noisy, state = dp.add_noise(tree, state, stddev) in each step."
        )
    return state


def earlier(counter: Counter, back: UInt32[Array, ""]) -> tuple[Counter, Any]:
    """The counter of so many draws before, and whether there was such a draw."""
    low, high = counter
    borrowed = (low < back).astype(jnp.uint32)
    return (low - back, high - borrowed), high >= borrowed
