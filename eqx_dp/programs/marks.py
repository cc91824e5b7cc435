"""Marks on equations of a traced program, which only this package can make."""

from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.extend.core as jex_core
from jax.extend.core.primitives import jit_p
from jaxtyping import Array, PyTree

from .inside import open_jaxpr


class _MarkedName(str):
    """The name of a jitted call, which carries a mark. An equal text of another object has none.

    JAX passes the same object from the function to the equation.
    """

    mark: Any
    shapes: list[tuple[int, ...]]


def in_marked_equation(
    name: str,
    mark: Any,
    function: Callable[[PyTree[Array]], PyTree[Array]],
    operands: PyTree[Array],
) -> PyTree[Array]:
    """Calls a function; in a traced program, as one jitted call that carries the mark.

    The compiled program is the same, because XLA inlines the call. Without a trace there is no
    mark.
    """
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(operands)):
        return function(operands)

    named = _MarkedName(name)
    named.mark, named.shapes = mark, [x.shape for x in jax.tree.leaves(operands)]
    # A lambda: run-time checks of annotations would wrap a function.
    return jax.jit(_with_name(lambda operands: function(operands), named))(operands)


def _with_name(function: Any, name: str) -> Any:
    function.__name__ = function.__qualname__ = name
    return function


def mark_on(equation: jex_core.JaxprEqn) -> Any:
    """The mark of an equation; None without one, or if another function has its name."""
    name = equation.params.get("name") if equation.primitive is jit_p else None
    if not isinstance(name, _MarkedName):
        return None
    traced: Any = open_jaxpr(equation.params["jaxpr"])
    written = getattr(traced.debug_info, "func_src_info", None) or ""
    return name.mark if f" at {__file__}:" in written else None


def is_as_marked(equation: jex_core.JaxprEqn) -> bool:
    """Whether a marked equation has the operands that it was made with.

    It has others if it was mapped (`vmap`), differentiated, or made again by a transformation.
    """
    shapes = [getattr(variable.aval, "shape", None) for variable in equation.invars]
    return shapes == equation.params["name"].shapes
