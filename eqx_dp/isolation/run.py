"""Running a program of a batch that has been shown to keep its examples apart."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.core
import jax.extend.core as jex_core
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ..programs import (
    channels_last,
    checkpoint_results_compiled,
    halved,
    own_line,
    source_line,
    thin_products_summed,
)
from .dependence import SHARED, Apart, Dependence, Mixed, Single, dtype_of
from .follow import ENGINES_SUM, Follow
from .rules import REDUCTIONS, WRITES, axes_named, is_known
from .steering import may_be_trusted

Results = TypeVar("Results", bound=PyTree[Array])
Function = TypeVar("Function", bound=Callable[..., Any])


def run_apart(
    function: Callable[..., Results], loss: jex_core.Jaxpr, *batch: PyTree[Array]
) -> Results:
    """Calls a function of a batch, unless the examples in it meet.

    Guarantee: of every result, the entries of one example depend on that example alone and on what
    `function` closes over. It is shown on the program that `function` is traced to, in which
    the user's derivative and batching rules have been applied, and that very program is run (on
    a CPU with its convolutions written channels last, under JAX 0.10 with products of thin matrices
    written as sums, and with some results clamped between the infinities, which keeps them as they
    are). The exception is what the engine adds up itself, by `sum_over_examples`.

    Args:
        function: takes the batch; results have examples in front.
        loss: the loss of one example that is in it.
        *batch: trees of arrays, examples in front of every leaf.

    Raises:
        ValueError: examples meet; it names the equation and the line.
    """
    found = _shown_apart(
        lambda first, _: function(*first.of_examples), loss, Values(batch), Values(())
    )
    run = jex_core.jaxpr_as_fun(_compiled(found.program))
    return jax.tree.unflatten(found.results, run(*found.values))


class Values(NamedTuple):
    """What a function of a batch takes.

    Attributes:
        of_examples: a tree of arrays, examples in front of every leaf.
        shared: a tree of arrays that depend on no example.
    """

    of_examples: Any
    shared: Any = ()


def in_halves_apart(
    function: Callable[[Values, Values], Results],
    loss: jex_core.Jaxpr,
    first: Values,
    second: Values,
) -> tuple[list[Array], Callable[[list[Array], Values], Results]]:
    """Calls a function so far as it does not depend on its second argument.

    Guarantee: as that of `run_apart`, of all that the function computes.

    Args:
        function: of both arguments.
        loss: as that of `run_apart`.
        first: its first argument.
        second: its second one, or any of the same shapes and dtypes.

    Returns:
        What the rest of the function needs, and the rest: from that, and from a second argument, to
        the results.

    Raises:
        ValueError: as `run_apart`.
    """
    found = _shown_apart(function, loss, first, second)
    num_first = len(jax.tree.leaves(first))
    is_late = [index >= num_first for index in range(len(found.values))]
    halves = halved(_compiled(found.program), is_late)
    met = jex_core.jaxpr_as_fun(halves.first)(*found.values[:num_first])
    run = jex_core.jaxpr_as_fun(halves.second)

    def rest(met: list[Array], second: Values) -> Results:
        return jax.tree.unflatten(found.results, run(*met, *jax.tree.leaves(second)))

    return met, rest


class _Shown(NamedTuple):
    """A function in which examples were shown to be apart.

    Attributes:
        program: what it is traced to.
        values: the arrays that it is given.
        results: the structure of its results.
    """

    program: jex_core.ClosedJaxpr
    values: list[Array]
    results: Any


def _shown_apart(
    function: Callable[[Values, Values], Any], loss: jex_core.Jaxpr, first: Values, second: Values
) -> _Shown:
    structures: list[Any] = []

    def flat(*values: Array) -> list[Array]:
        results = function(*jax.tree.unflatten(structure, values))
        leaves, tree = jax.tree.flatten(results)
        structures.append(tree)
        return leaves

    values, structure = jax.tree.flatten((first, second))
    num_examples = jax.tree.leaves((first.of_examples, second.of_examples))[0].shape[0]
    of_example: Dependence = Apart(0) if num_examples > 1 else Single()
    facts = [
        fact
        for its in (first, second)
        for part, fact in zip(its, (of_example, SHARED), strict=True)
        for _ in jax.tree.leaves(part)
    ]
    # Within a trace, a jitted function is one equation there: nothing is traced a second time. Not
    # in float16, where XLA may multiply constants of the loss with each other, to 0, before it sees
    # that their other factor is a constant loss scale.
    is_traced = any(isinstance(value, jax.core.Tracer) for value in values)
    is_call = is_traced and not any(dtype_of(variable) == jnp.float16 for variable in loss.invars)
    is_call = is_call and not jax.tree.leaves(second)
    program = jax.make_jaxpr(jax.jit(flat) if is_call else flat)(*values)
    follow = Follow(num_examples, may_be_trusted(loss))
    for found in follow.program(program, facts) + follow.written:
        _check(found)
    return _Shown(program, values, structures[0])


def _compiled(program: jex_core.ClosedJaxpr) -> jex_core.ClosedJaxpr:
    """A program as it is run."""
    return checkpoint_results_compiled(thin_products_summed(channels_last(program)))


def sum_over_examples(function: Function) -> Function:
    """Marks a function in which the engine adds examples up.

    Its first result has examples in front, each entry from one example alone; all others are sums.
    """

    def named(*args: Any) -> Any:
        return function(*args)

    named.__name__ = named.__qualname__ = ENGINES_SUM
    return jax.jit(named)  # pyright: ignore[reportReturnType]


def _check(fact: Dependence) -> None:
    """Refuses a result that may depend on several examples."""
    if isinstance(fact, Apart) and fact != Apart(0):
        raise AssertionError(f"Examples are not in front of a result: {fact}.")
    if not isinstance(fact, Mixed) or fact.is_wanted:
        return
    equation = fact.equation
    line = fact.line or own_line(equation) or source_line(equation)
    meet = "meet" if is_known(equation) else "may meet"
    raise ValueError(
        f"Examples {meet} in the gradient of the loss, {_how(equation)} at {line}. What one "
        f"example adds to the sum must depend on that example alone. {_advice(equation)}"
    )


def _how(equation: jex_core.JaxprEqn) -> str:
    axes = ", ".join(sorted(map(repr, axes_named(equation))))
    return f"by '{equation.primitive.name}'" + (f" over the axis {axes}," if axes else "")


def _advice(equation: jex_core.JaxprEqn) -> str:
    name = equation.primitive.name
    if name == "psum_invariant":
        return (
            "In a shard_map over this axis the model is the same on all devices while examples "
            "differ, so that JAX sums per-example gradients over devices before they are clipped. "
            "Call the clipped gradient outside of shard_map, with "
            "sharding=dp.ShardingRules(mesh, ...); or give shard_map check_vma=False, and sum the "
            "result over the axis yourself."
        )
    if axes_named(equation):
        return (
            "An enclosing vmap or shard_map, or the sharding rules, bind this axis, and examples "
            "are spread over it, so this mixes them. Normalise within the example instead "
            "(eqx.nn.GroupNorm, eqx.nn.LayerNorm, eqx.nn.RMSNorm), or freeze the batch statistics "
            "of an eqx.nn.BatchNorm with eqx.nn.inference_mode(model)."
        )
    if name in REDUCTIONS:
        return (
            "It reduces over all examples and may only steer Equinox's own loops and checks. With "
            "EQX_ON_ERROR=nan (or breakpoint) one bad example changes all the others: use "
            "EQX_ON_ERROR=raise, which stops the run, or off."
        )
    if name.startswith("random_"):
        return (
            "For a batch of keys of the generators rbg and unsafe_rbg, JAX draws all numbers from "
            "the first key. Use keys of threefry: dp.key_from_secret(secret), or "
            "jax.random.key(seed, impl='threefry2x32')."
        )
    if name in ("pure_callback", "ffi_call"):
        return (
            "It hands all examples of a batch to a function on the host. With "
            "vmap_method='sequential' the function gets one example at a time."
        )
    if name in WRITES:
        return (
            "It writes to a mutable array (jax.new_ref), which outlives the example. Return the "
            "value instead, and carry it in a jax.lax.scan."
        )
    if is_known(equation):
        return (
            "If you wrote a batching rule (jax.custom_batching.custom_vmap), use the function "
            "without it. If the program does keep examples apart, please report it."
        )
    return (
        "There is no rule for this primitive, so it is not known whether it keeps examples apart. "
        "Use other operations; or pass microbatch_size=1: the program then holds one example at a "
        "time, and may use any primitive."
    )
