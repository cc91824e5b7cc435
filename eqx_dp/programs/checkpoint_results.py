"""Results of a checkpoint that are transposed operands, on which XLA aborts on a CPU."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.extend.core.primitives import transpose_p

from .inside import Call, closed, equations, inside, open_jaxpr, programs_of, with_programs
from .interpreter import bound
from .rewriting import inlined, rewritten


def checkpoint_results_compiled(program: jex_core.ClosedJaxpr) -> jex_core.ClosedJaxpr:
    """Rewrites a differentiated program so that XLA can compile the checkpoints in it on a CPU.

    The operands of a differentiated `jax.checkpoint` are behind a barrier, which XLA takes away
    once all arrays have their layouts. If a batch of products comes before the barrier and nothing
    but a transposition after it, as in the gradient of a weight that is transposed in the
    checkpoint, XLA makes one product of both, gives it a layout that it cannot write, and ends the
    process (JAX 0.10.2, of small products). Here a result that is an operand, or a transposed one,
    is clamped between the infinities, which keeps normal numbers, infinities and NaN as they are
    (what is smaller may become zero, as in any arithmetic there), and is part of the loop that
    transposes. Nothing else changes, and on other platforms nothing at all.

    Returns:
        A program of the same inputs and results.
    """
    return rewritten(program, _of_checkpoint) if jax.default_backend() == "cpu" else program


def _of_checkpoint(equation: jex_core.JaxprEqn) -> Sequence[jex_core.JaxprEqn] | None:
    found = inside(equation)
    if not isinstance(found, Call) or found.wrapper != "remat":
        return None
    body = found.body.jaxpr
    programs = [body, *(inner for one in equations(body) for inner in programs_of(one))]
    operands = {variable for program in programs for variable in program.invars}
    results = {id(variable) for program in programs for variable in program.outvars}

    def of_transposition(inner: jex_core.JaxprEqn) -> Sequence[jex_core.JaxprEqn] | None:
        if inner.primitive is not transpose_p or inner.invars[0] not in operands:
            return None
        if id(inner.outvars[0]) not in results or not _may_be_product(inner.outvars[0]):
            return None
        return inlined(lambda x: _clamped(*bound(inner, inner.params, [x])), inner)

    def of_body(program: Any) -> Any:
        return open_jaxpr(rewritten(closed(program), of_transposition))

    params = with_programs(equation, of_body)
    # What goes through as it is may be transposed behind the checkpoint.
    through = [
        not isinstance(result, jex_core.Literal) and result in operands and _may_be_product(result)
        for result in body.outvars
    ]
    is_same = all(params[name] is value for name, value in equation.params.items())
    if not any(through):
        return None if is_same else [equation.replace(params=params)]

    def checkpointed(*inputs: Any) -> list[Any]:
        outputs = bound(equation, params, inputs)
        return [_clamped(x) if goes else x for x, goes in zip(outputs, through, strict=True)]

    return inlined(checkpointed, equation)


def _may_be_product(variable: Any) -> bool:
    """Whether it may be the result of a batch of products; narrow ones are cast, which XLA can."""
    shape = variable.aval
    return shape.ndim > 2 and jnp.issubdtype(shape.dtype, jnp.floating) and shape.dtype.itemsize > 3


def _clamped(x: jax.Array) -> jax.Array:
    largest = jnp.array(jnp.inf, x.dtype)
    return jax.lax.clamp(-largest, x, largest)
