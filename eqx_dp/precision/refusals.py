"""How a policy refuses: every message says where, what was found there and what is allowed."""

import contextlib
import re
from collections.abc import Generator, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from ..shown import shown

T = TypeVar("T")

_EIGHT_BITS = re.compile(r"float8|int8\b|fp8")

DTYPES: dict[str, np.dtype[Any]] = {
    name: jnp.dtype(name) for name in ("bfloat16", "float16", "float32", "float64")
}


def refusal(key: str, found: str, allowed: str) -> ValueError:
    """The error for one bad entry, written the same way wherever the policy comes from."""
    return ValueError(f"{key}: found {found}; allowed: {allowed}")


@contextlib.contextmanager
def refusals_name(source: str) -> Generator[None, None, None]:
    """Puts the file or the text that is being read in front of every refusal inside the block."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def one_of(key: str, found: object, allowed: Sequence[T]) -> T:
    """Returns the member of `allowed` that equals `found`, or refuses."""
    for choice in allowed:
        if choice == found:
            return choice
    raise refusal(key, shown(found), ", ".join(map(str, allowed)))


def float_dtype(key: str, found: object) -> np.dtype[Any]:
    """Returns `found` as one of the four dtypes a policy may name, or refuses."""
    dtype = DTYPES.get(found) if isinstance(found, str) else dtype_of(found)
    if dtype is None or dtype not in DTYPES.values():
        name = shown(found) if dtype is None else str(dtype)
        raise refusal(key, f"{name}{why_not(key, name)}", ", ".join(DTYPES))
    if dtype == DTYPES["float64"] and not jax.config.read("jax_enable_x64"):
        raise refusal(
            key,
            "float64 while jax_enable_x64 is off",
            "bfloat16, float16, float32; float64 only after "
            'jax.config.update("jax_enable_x64", True) or with JAX_ENABLE_X64=1 in the environment',
        )
    return dtype


def why_not(key: str, name: str) -> str:
    """Why 8 bits are refused where users may expect that they are not."""
    if key.split(".")[-1] != "optimizer" or not _EIGHT_BITS.search(name):
        return ""
    return (
        ", in which a second moment underflows: 8-bit moments need a scale for each block of "
        "entries, and optax's optimizers keep none"
    )


def dtype_of(found: object) -> np.dtype[Any] | None:
    """Any spelling of a dtype as one; None of what is none."""
    if found is None:  # which numpy reads as float64
        return None
    try:
        return np.dtype(cast(Any, found))
    except (TypeError, ValueError):
        return None
