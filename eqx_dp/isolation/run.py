"""Running the program of one example for a batch, once it is shown that no two examples meet."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.core
import jax.extend.core as jex_core
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ..programs import channels_last, checkpoint_results_compiled, halved, thin_products_summed
from .facts import OWN, SHARED, Meeting
from .judge import Judge
from .refusal import refusal
from .steering import may_be_trusted

Results = TypeVar("Results", bound=PyTree[Array])


class Values(NamedTuple):
    """What a function of one example takes.

    Attributes:
        of_examples: a tree of arrays, examples in front of every leaf; the function gets those of
            one example.
        shared: a tree of arrays that depend on no example.
    """

    of_examples: Any
    shared: Any = ()


class Mapped(NamedTuple):
    """A function of one example that was traced, judged, and mapped over a batch.

    Attributes:
        one: the program of one example, as it was judged.
        results: the structure of its results.
        batch: the program of the batch, as it is run.
        values: the arrays that it is given.
        num_first: how many of the arrays are the first argument's.
    """

    one: jex_core.ClosedJaxpr
    results: Any
    batch: jex_core.ClosedJaxpr
    values: list[Array]
    num_first: int

    def run(self) -> Any:
        """The results."""
        return jax.tree.unflatten(self.results, jex_core.jaxpr_as_fun(self.batch)(*self.values))

    def in_halves(self) -> tuple[list[Array], Callable[[list[Array], Values], Any]]:
        """So far as it does not depend on the second argument, and the rest.

        Returns:
            What the rest needs, and the rest: from that, and from a second argument of the same
            shapes and dtypes, to the results.
        """
        is_late = [index >= self.num_first for index in range(len(self.values))]
        start, end = map(jex_core.jaxpr_as_fun, halved(self.batch, is_late))
        met = start(*self.values[: self.num_first])

        def rest(met: list[Array], second: Values) -> Any:
            return jax.tree.unflatten(self.results, end(*met, *jax.tree.leaves(second)))

        return met, rest


def run_apart(
    one: Callable[..., Results], loss: jex_core.Jaxpr, *batch: PyTree[Array], out_axes: Any = 0
) -> Results:
    """Maps a function of one example over a batch, unless examples could meet.

    Guarantee: that of `mapped_apart`.

    Args:
        one: takes the arrays of one example.
        loss: the loss of one example that is in it.
        *batch: trees of arrays, examples in front of every leaf.
        out_axes: as that of `mapped_apart`.

    Raises:
        ValueError: examples meet; it names the equation and the line.
    """
    run = lambda first, _: one(*first.of_examples)  # noqa: E731
    return mapped_apart(run, loss, Values(batch), out_axes=out_axes).run()


def mapped_apart(
    one: Callable[[Values, Values], Any],
    loss: jex_core.Jaxpr,
    first: Values,
    second: Values = Values(()),  # noqa: B008
    out_axes: Any = 0,
) -> Mapped:
    """Maps a function of one example over a batch, unless examples could meet.

    Guarantee: of every result that has examples in front, the entries of one example depend on that
    example alone and on what `one` closes over. It is shown on the program that `one` is traced to
    for one example, in which the user's derivative rules have been applied (`Judge` says how), and
    that very program is what `jax.vmap` maps and what is run (on a CPU with its convolutions
    written channels last, under JAX 0.10 with products of thin matrices written as sums, and with
    some results clamped between the infinities, which keeps them as they are). The exception is
    what the engine adds up itself, in rules that are marked by `engines_rule`: such a result has no
    examples in front.

    Args:
        one: from both arguments of one example to a tree of arrays.
        loss: the loss of one example that is in it.
        first: its first argument.
        second: its second one, or any of the same shapes and dtypes.
        out_axes: as that of `jax.vmap`: 0, or None for a sum by the engine.

    Raises:
        ValueError: examples meet; it names the equation and the line.
    """
    traced: list[tuple[jex_core.ClosedJaxpr, Any]] = []
    leaves, structure = jax.tree.flatten((first, second))

    def judged(*values: Values) -> Any:
        program, shapes = jax.make_jaxpr(one, return_shape=True)(*values)
        _refuse_meetings(program, values, loss)
        traced.append((program, jax.tree.structure(shapes)))
        results = jex_core.jaxpr_as_fun(program)(*jax.tree.leaves(values))
        return jax.tree.unflatten(traced[0][1], results)

    def flat(*leaves: Array) -> list[Array]:
        mapped = jax.vmap(judged, (Values(0, None), Values(0, None)), out_axes)
        return jax.tree.leaves(mapped(*jax.tree.unflatten(structure, leaves)))

    # Within a trace, a jitted function is one equation there: nothing is traced a second time. Not
    # in float16, where XLA may multiply constants of the loss with each other, to 0, before it sees
    # that their other factor is a constant loss scale.
    is_call = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
    is_call &= not any(getattr(x.aval, "dtype", None) == jnp.float16 for x in loss.invars)
    is_call &= not jax.tree.leaves(second)
    batch = jax.make_jaxpr(jax.jit(flat) if is_call else flat)(*leaves)
    compiled = checkpoint_results_compiled(thin_products_summed(channels_last(batch)))
    return Mapped(*traced[0], compiled, leaves, len(jax.tree.leaves(first)))


def _refuse_meetings(
    program: jex_core.ClosedJaxpr, values: tuple[Values, ...], loss: jex_core.Jaxpr
) -> None:
    """Raises a ValueError if other examples may come into the program of one."""
    parts = [(OWN, its.of_examples) for its in values], [(SHARED, its.shared) for its in values]
    facts = [
        fact for two in zip(*parts, strict=True) for fact, x in two for _ in jax.tree.leaves(x)
    ]
    judge = Judge(may_be_trusted(loss))
    for fact in [*judge.program(program, facts), *judge.remembered]:
        if isinstance(fact, Meeting):
            raise refusal(fact)
