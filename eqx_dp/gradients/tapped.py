"""Evaluating a program so that the cotangents of the uses in it can be read.

The result of every use gets its tap added to it, or its operand where it is a `vjp`. Nothing is
differentiated with respect to a parameter itself, but for those that no uses describe (`whole`).
"""

import functools
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..programs import (
    Call,
    Places,
    Scan,
    inside,
    interpret,
    literal_value,
    outlined,
    rematerialised,
    scanned,
)
from ..programs import at as named
from ..sharding import Shard, evaluated_whole, rearranged, whole
from .program import Program
from .taps import Address
from .uses import ParamUse, ScanUse, vjp


@runtime_checkable
class InScans(Hashable, Protocol):
    """What is known of a use."""

    @property
    def scans(self) -> tuple[ScanUse, ...]:
        """The scans around it, outermost first, as those of a `ParamUse`."""
        ...


def zero_tap(use: ParamUse, dtype: np.dtype[Any], *batch: int) -> Array:
    """A tap of a use: in the accumulate dtype where it is a gradient that is read off it."""
    dtype = dtype if use.kind is vjp else use.result.dtype
    return jnp.zeros((*batch, *use.result.shape), dtype)


AtUse: TypeAlias = Callable[[Any, jex_core.JaxprEqn, list[Any], Any], tuple[Array, Any]]
"""What happens at a use: from what is known of it, its equation, the values of its operands and its
tap to the result and the residuals."""


def tapped(
    use: ParamUse, equation: jex_core.JaxprEqn, inputs: list[Any], tap: Array
) -> tuple[Array, Any]:
    """Adds a tap to the result, and keeps what a gradient is made of beside its cotangent."""
    (result,) = evaluated_whole(equation, inputs)
    return use.received(result + tap), use.kept(inputs)


def evaluate(
    program: Program,
    at: Mapping[Address, InScans],
    inputs: Sequence[Array | Shard],
    taps: dict[Address, Any],
    at_use: AtUse = tapped,
) -> tuple[Array, list[Array], dict[Address, Any]]:
    """Evaluates one example's loss with taps.

    Args:
        program: the loss of one example.
        at: what is known of each use: `at_use` does the same wherever this is the same.
        inputs: the trainable leaves, the other arrays of the model, and one example's arrays. Of
            the model's, a device may hold a part; it is gathered at the equations that need it.
        taps: what each use is given, the lengths of the scans around it in front of every array.
        at_use: what happens there.

    Returns:
        The loss, aux, and the residuals of every use, the scans' lengths in front.
    """
    evaluation = _Evaluation(at_use, {}, 0)
    outputs, residuals = evaluation.program(program.run(), at, inputs, taps)
    loss, *aux = (jnp.asarray(whole(x)) for x in outputs)
    return loss, aux, residuals


class _Evaluation(NamedTuple):
    """One pass over a program, through the programs in which there are uses, on values.

    Attributes:
        at_use: what happens at a use.
        calls: the functions that stand for calls, by what they call: equal ones are traced once.
        depth: how many scans there are around.
    """

    at_use: AtUse
    calls: dict[Any, Callable[..., Any]]
    depth: int

    def program(
        self,
        program: jex_core.ClosedJaxpr,
        at: Mapping[Address, InScans],
        inputs: Sequence[Any],
        taps: dict[Address, Any],
    ) -> tuple[list[Any], dict[Address, Any]]:
        """Evaluates a program; addresses are those in it."""
        program, places = outlined(program)
        at, taps = (_moved(of, places) for of in (at, taps))
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
            outputs, found = self.inside(equation, inputs, _below(at, index), _below(taps, index))
            residuals.update({(index, *address): its for address, its in found.items()})
            return outputs

        outputs = interpret(program.jaxpr, program.consts, inputs, of_equation, literal_value)
        return outputs, _moved_back(residuals, places)

    def inside(
        self,
        equation: jex_core.JaxprEqn,
        inputs: list[Any],
        at: Mapping[Address, InScans],
        taps: dict[Address, Any],
    ) -> tuple[list[Any], dict[Address, Any]]:
        """Evaluates an equation whose operands are tapped, or in which there are uses.

        Taps go into it, and what uses keep comes out, saved or with a scan's other arrays.
        """
        operands = {i: (~i,) for i in range(len(inputs)) if (~i,) in at}
        for i, address in operands.items():
            inputs[i] = _with_tap(whole(inputs[i]), taps[address])
        nothing = dict.fromkeys(operands.values(), ())
        at, taps = (
            {address: its for address, its in of.items() if address not in nothing}
            for of in (at, taps)
        )
        if not at and not _takes_parts(equation, inputs):
            return evaluated_whole(equation, inputs), nothing
        with named(equation):
            outputs, residuals = self.within(equation, inputs, at, taps)
        return outputs, {**nothing, **residuals}

    def within(
        self,
        equation: jex_core.JaxprEqn,
        inputs: list[Any],
        at: Mapping[Address, InScans],
        taps: dict[Address, Any],
    ) -> tuple[list[Any], dict[Address, Any]]:
        """Evaluates an equation that holds uses, or takes parts of parameters.

        A jit, remat and scan stay what they are.
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
                return self.scan(equation, scan, inputs, at, taps)
            case other:
                raise AssertionError(f"There are no uses inside {other}.")

    def scan(
        self,
        equation: jex_core.JaxprEqn,
        scan: Scan,
        inputs: list[Any],
        at: Mapping[Address, InScans],
        taps: dict[Address, Any],
    ) -> tuple[list[Any], dict[Address, Any]]:
        """A scan's steps have taps of their own, or one for all: their cotangents are added up.

        A parameter that it goes over is gathered slice by slice, inside, and again for the backward
        pass: a checkpoint around the scan saves what its steps do. One that all steps share is
        gathered once, ahead of it.
        """
        consts, carry, slices = scan.split(inputs)
        slices = [x.of_steps() if isinstance(x, Shard) else x for x in slices]
        inputs = [*map(whole, (*consts, *carry)), *slices]
        one_for_all = {address for address, its in at.items() if its.scans[self.depth] == "added"}
        same = {address: tap for address, tap in taps.items() if address in one_for_all}
        given_on = {
            i: address for i in range(scan.num_carry) if (address := (~(len(inputs) + i),)) in at
        }
        below = {address: its for address, its in at.items() if address not in given_on.values()}
        inner = self._replace(depth=self.depth + 1)

        def run(inputs: list[Any], own: dict[Address, Any]) -> tuple[list[Any], dict[Address, Any]]:
            taps = {**own, **same}
            of_body = {address: taps[address] for address in below}
            outputs, residuals = inner.program(scan.body, below, inputs, of_body)
            outputs = list(map(whole, outputs))
            for i, address in given_on.items():
                outputs[i] = _with_tap(outputs[i], taps[address])
                residuals[address] = ()
            return outputs, residuals

        own = {address: tap for address, tap in taps.items() if address not in one_for_all}
        return scanned(equation, scan, run, inputs, own)


def _takes_parts(equation: jex_core.JaxprEqn, inputs: Sequence[Any]) -> bool:
    """Whether it holds a program that goes on with parts of parameters."""
    if not any(isinstance(x, Shard) for x in inputs):
        return False
    match inside(equation):
        case Call("jit" | "remat") | Scan():
            return True
        case _:
            return False


def _with_tap(value: Array, tap: Array) -> Array:
    return value + tap.astype(value.dtype)


def _moved(of: Mapping[Address, Any], places: Places) -> dict[Address, Any]:
    """The same by where equations are in an outlined program."""
    return {(*places[index], *below): its for (index, *below), its in of.items()}


def _moved_back(of: Mapping[Address, Any], places: Places) -> dict[Address, Any]:
    """The same by where they are in the program as it was."""
    indices = {place: index for index, place in enumerate(places)}
    found = dict[Address, Any]()
    for address, its in of.items():
        known = 1 if address[:1] in indices else 2
        found[(indices[address[:known]], *address[known:])] = its
    return found


def _below(of: Mapping[Address, Any], index: int) -> dict[Address, Any]:
    """What is inside one equation, by its address there."""
    return {address[1:]: its for address, its in of.items() if address[0] == index}
