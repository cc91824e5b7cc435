"""Running the program of one example for a batch, once it is shown that no two examples meet."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.core
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.extend.core.primitives import closed_call_p
from jaxtyping import Array, PyTree

from ..programs import Call, inside, rewritten
from ..rewrites import fit_for_compiler
from .facts import OWN, Meeting
from .judge import Judge
from .mapping import is_mapped
from .primitives import engines_rule
from .refusal import refusal
from .steering import may_be_trusted

Results = TypeVar("Results", bound=PyTree[Array])


def run_apart(
    one: Callable[..., Results], loss: jex_core.Jaxpr, *batch: PyTree[Array], out_axes: Any = 0
) -> Results:
    """Maps a function of one example over a batch, unless examples could meet.

    Guarantee: of every result that has examples in front, the entries of one example depend on that
    example alone and on what `one` closes over. The proof is on the program of `one` for one
    example, in which the user's derivative rules have been applied, and what implements a `HiPrim`
    stands in its place (`Judge` says how). `jax.vmap` maps that same program, and it is run (on a
    CPU with convolutions written channels last, and under JAX 0.10 with some products clamped
    between the infinities, which does not change them). The exception are sums of the engine, of
    functions that `of_one` made: such a result has no examples in front.

    Args:
        one: takes the arrays of one example.
        loss: the loss of one example that `one` evaluates.
        *batch: trees of arrays, examples in front of every leaf.
        out_axes: as that of `jax.vmap`: 0, or None for a sum by the engine.

    Raises:
        ValueError: examples meet; it names the equation and the line.
    """
    structures: list[Any] = []
    leaves, structure = jax.tree.flatten(batch)

    def judged(*values: Any) -> Any:
        # A program is evaluated within this mesh. What is traced within it is not traced again.
        with jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh()):
            program, shapes = jax.make_jaxpr(one, return_shape=True)(*values)
        program = rewritten(program, _implemented)
        leaves, judge = jax.tree.leaves(values), Judge(may_be_trusted(loss))
        facts = judge.program(program, [OWN] * len(leaves))
        for fact in [*facts, *judge.remembered]:
            if isinstance(fact, Meeting):
                raise refusal(fact)
        structures.append(jax.tree.structure(shapes))
        results = jex_core.jaxpr_as_fun(program)(*leaves)
        for variable, fact, result in zip(program.jaxpr.outvars, facts, results, strict=True):
            if fact == OWN and not is_mapped(result, leaves[0]):
                equation = next(x for x in program.jaxpr.eqns if variable in x.outvars)
                raise refusal(Meeting(equation))
        return jax.tree.unflatten(structures[0], results)

    def flat(*leaves: Array) -> list[Array]:
        mapped = jax.vmap(judged, out_axes=out_axes)
        return jax.tree.leaves(mapped(*jax.tree.unflatten(structure, leaves)))

    # Within a trace, a jitted function is one equation, so nothing is traced twice. Not in float16,
    # where XLA may multiply constants of the loss with each other, to 0, before it sees that their
    # other factor is a constant loss scale.
    is_call = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
    is_call &= not any(getattr(x.aval, "dtype", None) == jnp.float16 for x in loss.invars)
    mapped = fit_for_compiler(jax.make_jaxpr(jax.jit(flat) if is_call else flat)(*leaves))
    return jax.tree.unflatten(structures[0], jex_core.jaxpr_as_fun(mapped)(*leaves))


def of_one(of_batch: Callable[..., tuple[Array, Any]], size: int = 1) -> Callable[..., Any]:
    """Turns a function of a batch into one that the program of one example calls.

    Guarantee: `vmap` calls `of_batch` once, with all examples. Nothing else is run.

    Args:
        of_batch: from trees of arrays, examples in front, to an array with examples in front, each
            entry from one example alone, and a tree of sums over examples.
        size: how many examples it is traced on to know what it returns.
    """

    @custom_vmap
    def one(*values: Any) -> tuple[Array, Any]:
        own, sums = of_batch(*jax.tree.map(lambda x: jnp.broadcast_to(x, (size, *x.shape)), values))
        return own[0], sums

    @one.def_vmap
    @engines_rule
    def _(size: int, is_mapped: list[Any], *values: Any) -> tuple[Any, tuple[bool, Any]]:
        def of_all(x: Array, its: bool) -> Array:
            return x if its else jnp.broadcast_to(x, (size, *x.shape))

        own, sums = of_batch(*jax.tree.map(of_all, values, tuple(is_mapped)))
        return (own, sums), (True, jax.tree.map(lambda _: False, sums))

    return one


def _implemented(equation: jex_core.JaxprEqn) -> list[jex_core.JaxprEqn] | None:
    """A call of the implementation, in place of a `HiPrim` with its batching rule."""
    match inside(equation):
        case Call("high", body):
            params = {"call_jaxpr": rewritten(body, _implemented)}
            return [equation.replace(primitive=closed_call_p, params=params)]
        case _:
            return None
