"""Convolutions in the layout that XLA runs on all cores of a CPU."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.extend.core.primitives import conv_general_dilated_p
from jax.sharding import NamedSharding, PartitionSpec

from .inside import open_jaxpr, with_programs


def channels_last(program: jex_core.ClosedJaxpr) -> jex_core.ClosedJaxpr:
    """Rewrites a program's convolutions, in loops and branches as well, for a CPU.

    XLA runs a convolution on a CPU by a library, on all cores, if channels are last in images and
    kernels. It brings convolutions into that layout by itself, but not those in the body of a loop
    or in a branch (https://github.com/jax-ml/jax/issues/12868): the gradient of a convolution of 64
    images takes 20 times as long there. Here every convolution is written channels last, between
    transpositions, and groups of images as groups of channels. Nothing else changes, and on other
    platforms nothing at all.

    Args:
        program: any program, already differentiated and batched: derivative rules that are not yet
            applied stay as they are.

    Returns:
        A program of the same inputs and results.
    """
    if jax.default_backend() != "cpu":
        return program
    return _Rewriting().program(program)


class _Rewriting:
    """Rewrites each program once: what is called twice is compiled once, before and after."""

    def __init__(self) -> None:
        self._done: dict[Any, Any] = {}

    def program(self, program: Any) -> Any:
        """A program, open or closed, with all that it calls; itself if there is nothing to do."""
        if program not in self._done:
            self._done[program] = self._rewritten(program)
        return self._done[program]

    def _rewritten(self, program: Any) -> Any:
        jaxpr = open_jaxpr(program)
        # In JAX 0.11 a closed program is an open one with constants, and both are one class.
        if jaxpr is not program:
            new = self.program(jaxpr)
            return program if new is jaxpr else jex_core.ClosedJaxpr(new, program.consts)
        rewritten = [new for equation in jaxpr.eqns for new in self._of_equation(equation)]
        is_same = all(new is old for new, old in zip(rewritten, jaxpr.eqns, strict=False))
        return jaxpr if is_same else jaxpr.replace(eqns=rewritten)

    def _of_equation(self, equation: jex_core.JaxprEqn) -> Sequence[jex_core.JaxprEqn]:
        if equation.primitive is conv_general_dilated_p:
            return _moved(equation)
        params = with_programs(equation, self.program)
        if all(params[name] is value for name, value in equation.params.items()):
            return [equation]
        return [equation.replace(params=params)]


def _moved(equation: jex_core.JaxprEqn) -> list[jex_core.JaxprEqn]:
    """Transpositions, the convolution channels last, and the transposition back."""
    params = dict(equation.params)
    numbers, where = params["dimension_numbers"], params["out_sharding"]
    dimensions = len(numbers.lhs_spec)
    last = _channels_last(dimensions)
    groups = _groups_of_images(equation)
    if numbers == last and groups == 1:
        return [equation]
    images, kernel, results = (_order(spec, to) for spec, to in zip(numbers, last, strict=True))
    params["dimension_numbers"] = last
    if where is not None:
        spec = [*where.spec, *[None] * dimensions]
        spec = PartitionSpec(*(spec[dimension] for dimension in results))
        params["out_sharding"] = NamedSharding(where.mesh, spec, memory_kind=where.memory_kind)
    if groups > 1:
        params |= {"batch_group_count": 1, "feature_group_count": groups}

    def convolution(image: Any, weight: Any) -> Any:
        image, weight = jax.lax.transpose(image, images), jax.lax.transpose(weight, kernel)
        if groups > 1:
            image = _side_by_side(image, groups)
        found = conv_general_dilated_p.bind(image, weight, **params)
        return jax.lax.transpose(found, sorted(range(dimensions), key=results.__getitem__))

    return _inlined(convolution, equation)


def _groups_of_images(equation: jex_core.JaxprEqn) -> int:
    """How many groups of images each have kernels of their own, where they can be moved.

    So it is in the gradient of a kernel whose channels are in groups.
    """
    image: Any = equation.invars[0].aval
    is_spread = any(image.sharding.spec)  # on Explicit axes
    return 1 if is_spread else equation.params["batch_group_count"]


def _side_by_side(image: jax.Array, groups: int) -> jax.Array:
    """Groups of images become groups of channels.

    As groups of images they would get a dimension of space, full of holes: XLA takes up to 500
    times as long.
    """
    size, *space, channels = image.shape
    apart = image.reshape(groups, size // groups, *space, channels)
    return jnp.moveaxis(apart, 0, -2).reshape(size // groups, *space, groups * channels)


def _channels_last(dimensions: int) -> jax.lax.ConvDimensionNumbers:
    space = range(1, dimensions - 1)
    return jax.lax.ConvDimensionNumbers(
        (0, dimensions - 1, *space),
        (dimensions - 1, dimensions - 2, *range(dimensions - 2)),
        (0, dimensions - 1, *space),
    )


def _inlined(function: Callable[..., Any], equation: jex_core.JaxprEqn) -> list[jex_core.JaxprEqn]:
    """The equations of a function, in place of one with the same operands and the same result."""
    inner = jax.make_jaxpr(function)(*(variable.aval for variable in equation.invars)).jaxpr
    outer = dict(zip(inner.invars, equation.invars, strict=True))
    outer |= dict(zip(inner.outvars, equation.outvars, strict=True))
    return [
        one.replace(
            invars=[outer.get(x, x) for x in one.invars],
            outvars=[outer.get(x, x) for x in one.outvars],
            source_info=equation.source_info,
            ctx=equation.ctx,
        )
        for one in inner.eqns
    ]


def _order(spec: Sequence[int], to: Sequence[int]) -> list[int]:
    """The permutation that brings dimensions from where one spec has them to where another has."""
    at = dict(zip(to, spec, strict=True))
    return [at[i] for i in range(len(spec))]
