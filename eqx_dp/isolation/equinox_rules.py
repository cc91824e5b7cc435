"""What Equinox's own loops and errors do with reductions over all examples."""

from typing import Any

import jax.extend.core as jex_core

from .lines import frames_of

_LOOPS = "equinox/internal/_loop/"
_BENEATH = ("equinox/_unvmap.py",)


def is_steering(equation: jex_core.JaxprEqn) -> bool:
    """Whether a reduction over all examples is the predicate of one of Equinox's loops.

    They go on while any example wants to, and their bodies, forward and backward, leave a finished
    example as it is. Only they can say so: what the number of steps is used for beside is seen by
    no one else. So it is told by where in Equinox the reduction stands.
    """
    return _LOOPS in _innermost(equation)


def stops(branch: jex_core.Jaxpr) -> bool:
    """Whether a branch ends the run: Equinox's `error_if`, which raises an error on the host."""
    return any(
        equation.primitive.name == "pure_callback" and _raises(equation.params["callback"])
        for equation in branch.eqns
    )


def _raises(callback: Any) -> bool:
    function = getattr(callback, "callback_func", None)
    return (
        getattr(function, "__module__", "") == "equinox._errors"
        and getattr(function, "__qualname__", "") == "_error.<locals>.raises"
    )


def _innermost(equation: jex_core.JaxprEqn) -> str:
    """The file in which an equation was written, beneath JAX's own files and Equinox's wrapper."""
    frames = (frame.file_name.replace("\\", "/") for frame in frames_of(equation))
    return next((file for file in frames if not file.endswith(_BENEATH)), "")
