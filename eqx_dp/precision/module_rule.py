"""A rule of a policy: some modules of a model compute, or are stored, in another dtype."""

import dataclasses
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from ..expected import expect
from .matmul import MODULE_MATMULS, ModuleMatmul
from .refusals import float_dtype, one_of, refusal


@dataclasses.dataclass(frozen=True, init=False)
class ModuleRule:
    """Gives some modules of a model other dtypes than the policy's.

    Args:
        match: A path in the model's tree (`**.head`) or a class name. One or more printable
            characters without space, comma or equals sign, so that it fits a policy's string form.
        compute_dtype: The dtype that these modules compute in.
        matmul: `"wide"` keeps their matrix products in the compute dtype, whatever the policy's
            `matmul` says. None follows `matmul`, but a compute dtype of float32 or float64 is wide:
            products are then in that dtype.
        optional: Whether the rule may match no module of a model. Other rules must have an effect.
        param_dtype: The dtype that their parameters are stored in, frozen ones as well. None for
            the policy's where they are trained, and for their own where they are frozen.

    Raises:
        ValueError: If `match` holds a character that is not allowed, or a dtype is not one of
            bfloat16, float16, float32, float64 (the last only while `jax_enable_x64` is on), or
            `matmul` is something else, or `optional` is no boolean.
    """

    match: str
    compute_dtype: np.dtype[Any]
    matmul: ModuleMatmul | None = None
    optional: bool = False
    param_dtype: np.dtype[Any] | None = None

    def __init__(
        self,
        match: str,
        compute_dtype: DTypeLike,
        matmul: ModuleMatmul | None = None,
        optional: bool = False,
        param_dtype: DTypeLike | None = None,
    ):
        dtype = float_dtype("modules.compute", compute_dtype)
        stored = None if param_dtype is None else float_dtype("modules.params", param_dtype)
        expect("modules.match", match, str, "a text: a path pattern or a class name")
        one_of("modules.matmul", matmul, (None, *MODULE_MATMULS))
        one_of("modules.optional", optional, (True, False))
        if not match or not match.isprintable() or set(match) & set(" ,="):
            raise refusal(
                "modules.match",
                repr(match),
                "one or more printable characters other than space, comma and equals sign",
            )
        vars(self).update(match=match, compute_dtype=dtype, param_dtype=stored)
        vars(self).update(matmul=matmul, optional=optional)

    @property
    def is_wide(self) -> bool:
        """Whether products stay in the compute dtype: `matmul` says so, or the dtype does."""
        return self.matmul is not None or self.compute_dtype.itemsize > 2

    def __str__(self) -> str:
        stored = self.param_dtype and f"params={self.param_dtype}"
        more = (self.matmul, "optional" if self.optional else None, stored)
        return ":".join([str(self.compute_dtype), *filter(None, more)])
