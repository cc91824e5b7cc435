"""What matrix products are multiplied in: the `[matmul]` table of a policy."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ..shown import shown
from .refusals import dtype_of, one_of, refusal

Scaling: TypeAlias = Literal["per_example", "none"]
ModuleMatmul: TypeAlias = Literal["wide"]

SCALINGS: tuple[Scaling, ...] = get_args(Scaling)
MODULE_MATMULS: tuple[ModuleMatmul, ...] = get_args(ModuleMatmul)
MATMUL_DTYPES: dict[str, np.dtype[Any]] = {
    name: jnp.dtype(name) for name in ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16")
}
_LEAKS = {
    "batch": "a maximum over a batch",
    "current": "a maximum over a batch",
    "tensor": "a maximum over a batch",
    "delayed": "a history of maxima over earlier steps",
    "history": "a history of maxima over earlier steps",
}


@dataclasses.dataclass(frozen=True, init=False)
class Matmul:
    """The dtypes of the operands of contractions and convolutions, and how operands are scaled.

    Every operand is multiplied by a power of two that brings its largest entry near the end of the
    format, cast, and multiplied; the product is in float32, and the powers are divided out of it.
    The power of an activation, or of a cotangent, depends on that operand of one example alone,
    that of a parameter on the parameter alone. So one example's result depends on no other example.

    Args:
        forward: The operands of a forward product: float8_e4m3fn, float8_e5m2, bfloat16 or float16.
        backward: The cotangent in the two products that the derivative of a product consists of;
            the other operand is in `forward`. By default the same as `forward`.
        scaling: `"per_example"`, or `"none"`: operands are cast as they are, and entries beyond the
            largest number of the format become that number.

    Raises:
        ValueError: If a dtype is none of the four, or the scaling none of the two. A scale that
            looks at other examples or at earlier steps is refused with the reason.
    """

    forward: np.dtype[Any]
    backward: np.dtype[Any]
    scaling: Scaling = "per_example"

    def __init__(
        self,
        forward: DTypeLike,
        backward: DTypeLike | None = None,
        scaling: Scaling = "per_example",
    ):
        vars(self).update(
            forward=_matmul_dtype("matmul.forward", forward),
            backward=_matmul_dtype("matmul.backward", forward if backward is None else backward),
            scaling=checked_scaling(scaling),
        )

    def __str__(self) -> str:
        return f"{self.forward}:{self.backward}:{self.scaling}"


def read_matmul(text: str, named: Callable[[str, str], Any]) -> Matmul | None:
    """Reads `FORWARD`, `FORWARD:BACKWARD` or `FORWARD:BACKWARD:SCALING`; None from `none`.

    `named` gives a dtype from a key and jmp's name of it, or what it was given.

    Raises:
        ValueError: it has more parts; or as `Matmul`.
    """
    if text == "none":
        return None
    parts = text.split(":")
    if len(parts) > 3:
        raise refusal("matmul", repr(text), "FORWARD:BACKWARD:SCALING, or none")
    keys = ("matmul.forward", "matmul.backward")
    dtypes = [named(key, part) for key, part in zip(keys, parts, strict=False)]
    return Matmul(*dtypes, **({"scaling": checked_scaling(parts[2])} if len(parts) == 3 else {}))


def _matmul_dtype(key: str, found: object) -> np.dtype[Any]:
    dtype = MATMUL_DTYPES.get(found) if isinstance(found, str) else dtype_of(found)
    if dtype is None or dtype not in MATMUL_DTYPES.values():
        raise refusal(key, shown(found) if dtype is None else str(dtype), ", ".join(MATMUL_DTYPES))
    return dtype


def checked_scaling(found: object) -> Scaling:
    """Returns one of the scalings, or refuses, with the reason where it would leak."""
    if isinstance(found, str) and found in _LEAKS:
        raise refusal(
            "matmul.scaling",
            f"{found!r}, a scale from {_LEAKS[found]}, by which what one example adds to the sum "
            "would depend on other examples, and the privacy guarantee would not hold",
            ", ".join(SCALINGS),
        )
    if found not in SCALINGS:
        raise refusal(
            "matmul.scaling",
            shown(found),
            f"{', '.join(SCALINGS)}; no scale that looks at other examples or at other steps, as "
            "the privacy guarantee would not hold",
        )
    return one_of("matmul.scaling", found, SCALINGS)
