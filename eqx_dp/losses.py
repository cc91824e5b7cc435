"""Losses: their types and those of clip norms, for type checkers; whether they take a key.

A call of a clipped gradient takes the model that the loss takes, and as many further arguments. The
types of these are free: a loss takes an example, and a call a batch, which may be numpy's.
"""

import inspect
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


def takes_key(fun: Callable[..., Any], num_positional: int) -> tuple[bool, bool]:
    """Reads from a loss's signature whether it can be given a `key`, and whether it must be.

    If the model or the batch fills the parameter of that name, it is data.
    """
    try:
        parameters = inspect.signature(fun).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return True, False
    named = parameters.get("key")
    if named is not None and named.kind in (named.KEYWORD_ONLY, named.POSITIONAL_OR_KEYWORD):
        if named.kind is not named.KEYWORD_ONLY and list(parameters).index("key") < num_positional:
            return False, False
        return True, named.default is named.empty
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values()), False


def check_key(
    fun: Callable[..., Any], num_batch_arguments: int, key: Any, augmentations: int = 1
) -> None:
    """Refuses a call that lacks the key that its loss takes, or has one that it does not take.

    Raises:
        ValueError: a key is missing, or not wanted.
    """
    can, must = takes_key(fun, 1 + num_batch_arguments)
    if augmentations > 1 and not can:
        raise ValueError(
            f"augmentations={augmentations} calls the loss with as many keys, and the loss has no "
            "parameter named 'key' after the batch. Add one, and augment the example with it."
        )
    if key is None and (must or augmentations > 1):
        raise ValueError(
            "The loss takes a key and none was given: call with key=jax.random.key(...), a fresh "
            "one every step. It is split into one key an example."
        )
    if key is not None and not can:
        raise ValueError(
            "A key was given, and the loss has no parameter named 'key' after the batch. Add one "
            "(fun(model, *example, key)) or leave the key out."
        )
