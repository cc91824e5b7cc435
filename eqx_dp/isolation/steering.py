"""Reductions over all examples by Equinox, and what they may be for.

`unvmap_any`, `unvmap_all` and `unvmap_max` see a whole batch from inside `vmap`. Equinox, and the
libraries on it, only control work with them: their loops continue while any example needs it and
leave a finished example unchanged, forward and backward; they skip work that no example needs. The
results of an example stay the same (up to rounding, if work is repeated that one example needs: the
first stage of a diffrax step). The equations do not show that, so it is decided by the library that
wrote them.
"""

import os
from typing import Any

import jax.extend.core as jex_core

from ..programs import programs_of, written_in
from .primitives import REDUCTIONS

# Equinox's files that a call goes through on its way from its author.
_PLUMBING = ("_unvmap.py", "_ad.py", "_jit.py", "_eval_shape.py", "_module/", "_vmap_pmap.py")


def may_be_trusted(loss: jex_core.Jaxpr) -> bool:
    """Whether all reductions over examples in a loss are those of Equinox and its family.

    The loss is examined as it was traced, where every equation has its own line. In derivative
    rules, which JAX runs later, a line may be that of the call that has the rule. So if the user
    has such a reduction as well, none of them is trusted; nor with `EQX_ON_ERROR=nan` (or
    `breakpoint`), where a failed check of one example changes all the others.
    """
    for equation in loss.eqns:
        if equation.primitive.name in REDUCTIONS:
            library, file = _writer(equation)
            is_check = (library, file) == ("equinox", "_errors.py")
            changes_values = os.environ.get("EQX_ON_ERROR") in ("nan", "breakpoint")
            if not library or (is_check and changes_values):
                return False
        if not all(map(may_be_trusted, programs_of(equation))):
            return False
    return True


def is_steering(equation: jex_core.JaxprEqn) -> bool:
    """Whether a reduction over all examples was written by Equinox or its family, not as a check.

    (A check says so itself: see `stops`.)
    """
    library, file = _writer(equation)
    return file.startswith("internal/") if library == "equinox" else bool(library)


def stops(branch: jex_core.Jaxpr) -> bool:
    """Whether a branch ends the run: Equinox's `error_if`, which raises an error on the host."""
    for equation in branch.eqns:
        function: Any = getattr(equation.params.get("callback"), "callback_func", None)
        name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
        is_check = name == ("equinox._errors", "_error.<locals>.raises")
        if is_check and equation.primitive.name == "pure_callback":
            return True
    return False


def _writer(equation: jex_core.JaxprEqn) -> tuple[str, str]:
    """The library and the file in it that an equation was written in; "" for the user's own."""
    for library, file, _ in written_in(equation):
        if not (library == "equinox" and file.startswith(_PLUMBING)):
            return library, file
    return "", ""
