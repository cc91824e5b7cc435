"""Types of losses and clip norms, so that type checkers find missing arguments of a call.

A type gives the number of arguments of a loss after the model, but not their types: a loss takes an
example, and a call of its clipped gradient a batch, which may be numpy's.
"""

from collections.abc import Callable
from typing import Any, Protocol, SupportsFloat, TypeAlias

import equinox as eqx


class ClippingRule:
    """What stands for the clip norm of a whole model: the values of `dp.clipping`."""


ClipNorms: TypeAlias = (
    ClippingRule | SupportsFloat | eqx.Module | dict[str, Any] | list[Any] | tuple[Any, ...]
)
"""One clip norm, a tree of them, or a rule."""


class _KeyedLoss1(Protocol):
    def __call__(self, model: Any, x: Any, /, *, key: Any) -> Any: ...


class _KeyedLoss2(Protocol):
    def __call__(self, model: Any, x: Any, y: Any, /, *, key: Any) -> Any: ...


Loss1: TypeAlias = Callable[[Any, Any], Any] | _KeyedLoss1
"""`loss(model, x)`, or with a `key` as well."""

Loss2: TypeAlias = Callable[[Any, Any, Any], Any] | _KeyedLoss2
"""`loss(model, x, y)`, or with a `key` as well."""
