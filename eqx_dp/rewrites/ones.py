"""Multiplications by a constant one, which change nothing."""

from collections.abc import Sequence

import jax.extend.core as jex_core
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core.primitives import div_p, mul_p

from ..programs import inlined, rewritten


def without_ones(program: jex_core.ClosedJaxpr) -> jex_core.ClosedJaxpr:
    """Replaces products with a constant one by their other factor.

    For normal numbers the result is the same.

    Libraries that parametrise layers multiply a weight by a scale, which is one by default. Without
    that product, the weight itself multiplies the data.

    Returns:
        A program of the same inputs and results.
    """
    return rewritten(program, _of_equation)


def _of_equation(equation: jex_core.JaxprEqn) -> Sequence[jex_core.JaxprEqn] | None:
    if equation.primitive is not mul_p and equation.primitive is not div_p:
        return None
    for place, (other, factor) in enumerate((equation.invars, equation.invars[::-1])):
        is_factor = equation.primitive is mul_p or place == 0
        if is_factor and _is_one(factor) and other.aval == equation.outvars[0].aval:
            return inlined(lambda *x, place=place: checkpoint_name(x[place], "times_one"), equation)
    return None


def _is_one(atom: jex_core.Var | jex_core.Literal) -> bool:
    return isinstance(atom, jex_core.Literal) and np.shape(atom.val) == () and bool(atom.val == 1)
