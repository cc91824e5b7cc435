"""Types of losses and of clip norms, for type checkers.

A call of a clipped gradient takes the model that the loss takes, and as many further arguments. The
types of these are free: a loss takes an example, and a call a batch, which may be numpy's.
"""

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, SupportsFloat, TypeAlias, TypeVar

import equinox as eqx


class ClippingRule:
    """What stands for the clip norm of a whole model: the values of `dp.clipping`."""


ClipNorms: TypeAlias = (
    ClippingRule | SupportsFloat | eqx.Module | dict[str, Any] | list[Any] | tuple[Any, ...]
)
"""One clip norm, a tree of them, or a rule."""


Model = TypeVar("Model", bound=Any)  # by the bound, a lambda's model is Any
Aux = TypeVar("Aux")
Example = ParamSpec("Example")

Scalar: TypeAlias = SupportsFloat | complex  # not a pair

Loss: TypeAlias = Callable[Concatenate[Model, Example], Scalar]
"""`loss(model, *example)`, or with a `key` as well."""

LossWithAux: TypeAlias = Callable[Concatenate[Model, Example], tuple[Scalar, Aux]]
"""A loss with aux, for `has_aux=True`."""


class KeyedOne(Protocol):  # noqa: D101
    def __call__(self, x: Any, /, *, key: Any) -> Any: ...  # noqa: D102


class KeyedTwo(Protocol):  # noqa: D101
    def __call__(self, x: Any, y: Any, /, *, key: Any) -> Any: ...  # noqa: D102


class _Many(Protocol):
    def __call__(self, /, *example: Any) -> Any: ...


ThreeOrMore: TypeAlias = (
    Callable[[Any, Any, Any], Any] | Callable[[Any, Any, Any, Any], Any] | _Many
)
