"""Matrix products: the dtypes of their operands (the `[matmul]` table), and their precision."""

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .refusals import dtype_of, one_of

MatmulPrecision: TypeAlias = Literal["default", "tensorfloat32", "highest"]
Scaling: TypeAlias = Literal["per_example", "none"]
ModuleMatmul: TypeAlias = Literal["wide"]

MODULE_MATMULS: tuple[ModuleMatmul, ...] = get_args(ModuleMatmul)
_SCALINGS: tuple[Scaling, ...] = get_args(Scaling)
_DTYPES: dict[str, np.dtype[Any]] = {
    name: jnp.dtype(name) for name in ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16")
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
        scaling: `"per_example"`, or `"none"`: operands are cast without scaling, and entries beyond
            the largest number of the format become that number.

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
        backward = forward if backward is None else backward
        vars(self).update(
            forward=dtype_of("matmul.forward", forward, _DTYPES),
            backward=dtype_of("matmul.backward", backward, _DTYPES),
            scaling=one_of("matmul.scaling", scaling, _SCALINGS),
        )

    def __str__(self) -> str:
        return f"{self.forward}:{self.backward}:{self.scaling}"


def matmul_precision(precision: MatmulPrecision) -> AbstractContextManager[None]:
    """The context in which matrix products have the precision that a policy declares."""
    return nullcontext() if precision == "default" else jax.default_matmul_precision(precision)
