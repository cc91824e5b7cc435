"""`PyTree`, for the annotations that users see.

jaxtyping's `PyTree` is Any to type checkers, but by a way that pyright, in strict mode, reports as
unknown wherever a user calls such a function. This one is Any by a way that all of them know, and
jaxtyping's own where programs run.
"""

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from typing_extensions import TypeAliasType

    _Leaf = TypeVar("_Leaf")
    PyTree = TypeAliasType("PyTree", Any, type_params=(_Leaf,))
else:
    from jaxtyping import PyTree

__all__ = ["PyTree"]
