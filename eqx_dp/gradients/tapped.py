"""Evaluating a program so that the cotangents of the uses in it can be read.

The result of every use gets its tap added to it.
"""

import functools
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jaxtyping import Array

from ..programs import (
    Call,
    Scan,
    inside,
    interpret,
    literal_value,
    rematerialised,
    scanned,
)
from ..programs import at as named
from ..sharding import Shard, evaluated_whole, rearranged, whole
from .program import Program
from .taps import Address
from .uses import ParamUse, convolution

AtUse: TypeAlias = Callable[[Any, jex_core.JaxprEqn, list[Any], Any], tuple[Array, Any]]
"""What happens at a use: from what is known of it, its equation, the values of its operands and its
tap to the result and the residuals."""


def tapped(
    use: ParamUse, equation: jex_core.JaxprEqn, inputs: list[Any], tap: Array
) -> tuple[Array, Any]:
    """Adds a tap to the result, and keeps what a gradient is made of beside its cotangent."""
    (result,) = evaluated_whole(equation, inputs)
    return use.received(result + tap), use.kept(inputs)


class Kernel(NamedTuple):
    """The use of a formed leaf as a kernel: its gradient is made of patches of the image.

    JAX's own rule convolves images with cotangents, each example with its own: on a CPU that takes
    several times as long.
    """

    use: ParamUse


def convolved(
    known: Kernel, equation: jex_core.JaxprEqn, inputs: list[Any], tap: Any
) -> tuple[Array, Any]:
    """The result of a convolution, with another rule for the kernel's gradient."""
    del tap
    use = known.use

    @jax.custom_vjp
    def run(image: Array, kernel: Array) -> Array:
        return evaluated_whole(equation, [image, kernel])[0]

    def forward(image: Array, kernel: Array) -> tuple[Array, Any]:
        result, pullback = jax.vjp(
            lambda image: evaluated_whole(equation, [image, kernel])[0], image
        )
        return result, (pullback, image)

    def backward(held: Any, cotangent: Array) -> tuple[Array, Array]:
        pullback, image = held
        aval: Any = equation.invars[1].aval
        grads = convolution.outer_products(use.operation, image, cotangent)
        return *pullback(cotangent), use.inside().to_parameter(grads).astype(aval.dtype)

    run.defvjp(forward, backward)
    return run(*map(whole, inputs)), ()


def evaluate(
    program: Program,
    at: Mapping[Address, Hashable],
    inputs: Sequence[Array | Shard],
    taps: dict[Address, Any],
    at_use: AtUse = tapped,
) -> tuple[Array, list[Array], dict[Address, Any]]:
    """Evaluates one example's loss with taps.

    Args:
        program: the loss of one example.
        at: what is known of each use: `at_use` does the same wherever this is the same.
        inputs: the program's.
        taps: a tree of arrays for each use, the lengths of the scans around it in front.
        at_use: what happens at a use.

    Returns:
        The loss, the leaves of aux, and what each use keeps, the lengths of scans in front.
    """
    outputs, residuals = _Evaluation(at_use, {}).program(program.run(), at, inputs, taps)
    loss, *aux = (jnp.asarray(whole(x)) for x in outputs)
    return loss, aux, residuals


class _Evaluation(NamedTuple):
    """One pass over a program, through the programs in which there are uses, on values.

    Attributes:
        at_use: what happens at a use.
        calls: the functions that stand for calls, by what they call: equal ones are traced once.
    """

    at_use: AtUse
    calls: dict[Any, Callable[..., Any]]

    def program(
        self,
        program: jex_core.ClosedJaxpr,
        at: Mapping[Address, Hashable],
        inputs: Sequence[Any],
        taps: dict[Address, Any],
    ) -> tuple[list[Any], dict[Address, Any]]:
        """Evaluates a program; addresses are those in it."""
        indices, residuals = itertools.count(), dict[Address, Any]()
        holders = {address[0] for address in at if len(address) > 1}

        def of_equation(equation: jex_core.JaxprEqn, inputs: list[Any]) -> list[Any]:
            index = next(indices)
            here = (index,)
            if here in at:
                result, residuals[here] = self.at_use(at[here], equation, inputs, taps[here])
                return [result]
            if index not in holders:
                part = rearranged(equation, inputs)
                if part is not None:
                    return [part]
                if not _takes_parts(equation, inputs):
                    return evaluated_whole(equation, inputs)
            with named(equation):
                outputs, found = self.inside(
                    equation, inputs, _below(at, index), _below(taps, index)
                )
            residuals.update({(index, *address): its for address, its in found.items()})
            return outputs

        outputs = interpret(program.jaxpr, program.consts, inputs, of_equation, literal_value)
        return outputs, residuals

    def inside(
        self,
        equation: jex_core.JaxprEqn,
        inputs: list[Any],
        at: Mapping[Address, Hashable],
        taps: dict[Address, Any],
    ) -> tuple[list[Any], dict[Address, Any]]:
        """Evaluates an equation that holds uses, or takes parts of parameters.

        A jit, remat and scan stay what they are. Taps go into it, and what uses keep comes out,
        saved or with a scan's other arrays. A parameter that a scan goes over is gathered slice by
        slice, inside, and again for the backward pass: a checkpoint around the scan saves what its
        steps do. One that all steps share is gathered once, ahead of it.
        """
        match inside(equation):
            case Call("jit", body):
                key = body, *at.items()
                if key not in self.calls:
                    self.calls[key] = jax.jit(
                        lambda inputs, taps: self.program(body, at, inputs, taps)
                    )
                return self.calls[key](inputs, taps)
            case Call("remat", body):
                run = functools.partial(self.program, body, at)
                if equation.params["policy"] is None:  # what is gathered inside is not saved
                    inputs = [x.within_checkpoint() if isinstance(x, Shard) else x for x in inputs]
                return rematerialised(equation, run, inputs, taps)
            case Scan() as scan:
                consts, carry, slices = scan.split(inputs)
                slices = [x.of_steps() if isinstance(x, Shard) else x for x in slices]

                def step(inputs: list[Any], taps: Any) -> tuple[list[Any], dict[Address, Any]]:
                    outputs, residuals = self.program(scan.body, at, inputs, taps)
                    return list(map(whole, outputs)), residuals

                return scanned(
                    equation, scan, step, [*map(whole, (*consts, *carry)), *slices], taps
                )
            case other:
                raise AssertionError(f"There are no uses inside {other}.")


def _takes_parts(equation: jex_core.JaxprEqn, inputs: Sequence[Any]) -> bool:
    """Whether it holds a program that goes on with parts of parameters."""
    if not any(isinstance(x, Shard) for x in inputs):
        return False
    return isinstance(found := inside(equation), Scan) or (
        isinstance(found, Call) and found.wrapper in ("jit", "remat")
    )


def _below(of: Mapping[Address, Any], index: int) -> dict[Address, Any]:
    """What is inside one equation, by its address there."""
    return {address[1:]: its for address, its in of.items() if address[0] == index}
