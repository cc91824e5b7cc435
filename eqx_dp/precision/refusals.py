"""Errors of policies: every message says where, what was found and what is allowed."""

import contextlib
from collections.abc import Generator, Iterable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from ..shown import shown

T = TypeVar("T")

DTYPES: dict[str, np.dtype[Any]] = {
    name: jnp.dtype(name) for name in ("bfloat16", "float16", "float32", "float64")
}
# Values that users may expect to be allowed, with the reason why not, by the end of the key.
_NOTES = {
    "optimizer": "; no 8 bits, in which a second moment underflows: they need a scale for each "
    "block of entries, and optax's optimizers keep none",
    "scaling": "; no scale that looks at other examples (a maximum over a batch) or at earlier "
    "steps (a history): what one example adds would depend on them, and the privacy guarantee "
    "would not hold",
}


def refusal(key: str, found: str, allowed: str) -> ValueError:
    """The error for one bad entry, with one form for every source of a policy."""
    return ValueError(f"{key}: found {found}; allowed: {allowed}")


@contextlib.contextmanager
def refusals_name(source: str) -> Generator[None, None, None]:
    """Puts the name of the file or text before every refusal inside the block."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def one_of(key: str, found: object, allowed: Iterable[T]) -> T:
    """Returns the member of `allowed` that equals `found`, or refuses."""
    for choice in allowed:
        if isinstance(found, type(choice)) and choice == found:
            return choice
    note = _NOTES.get(key.rpartition(".")[2], "")
    raise refusal(key, shown(found), ", ".join(map(str, allowed)) + note)


def dtype_of(key: str, found: object, allowed: dict[str, np.dtype[Any]]) -> np.dtype[Any]:
    """Returns the dtype that a name or another spelling stands for, or refuses."""
    name = found
    if isinstance(found, type | np.dtype):  # numpy reads None as float64, and takes arrays
        with contextlib.suppress(TypeError, ValueError):
            name = str(np.dtype(cast(Any, found)))
    return allowed[one_of(key, name, allowed)]


def float_dtype(key: str, found: object) -> np.dtype[Any]:
    """Returns `found` as one of the four dtypes a policy may name, or refuses."""
    dtype = dtype_of(key, found, DTYPES)
    if dtype == DTYPES["float64"] and not jax.config.read("jax_enable_x64"):
        how = 'jax.config.update("jax_enable_x64", True), or with JAX_ENABLE_X64=1 before a start'
        allowed = f"bfloat16, float16, float32; float64 only after {how}"
        raise refusal(key, "float64 while jax_enable_x64 is off", allowed)
    return dtype
