"""The two transformations under `eqx.filter_jit`: as they are used, and many times faster to test.

What is asked of them without a jit is in `test_transformations.py`.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx

import eqx_dp as dp


def grad(fun: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return eqx.filter_jit(dp.filter_clipped_grad(fun, **options))


def value_and_grad(fun: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return eqx.filter_jit(dp.filter_value_and_clipped_grad(fun, **options))
