"""Finding the uses of parameters in a program, and evaluating it so that cotangents can be read.

The result of every use gets a *tap* added to it, a zero: the gradient with respect to the tap is
the cotangent of the result. What the use needs beside it is kept on the way. Nothing is
differentiated with respect to a parameter, but for those that no uses describe (`whole`).
"""

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jaxtyping import Array

from ..programs import (
    Call,
    Scan,
    evaluated,
    inside,
    interpret,
    literal_value,
    rematerialised,
    scanned,
)
from ..programs import at as named
from .layouts import Layout, layout_of, shape_of, through
from .program import Program
from .uses import KINDS, Kind, MatrixKind, Operation, ParamUse, as_matrices, operation_of

Address: TypeAlias = tuple[int, ...]
"""Where an equation stands: its index, behind the indices of the equations around it."""


class Uses(NamedTuple):
    """The uses of every leaf, and the leaves that no uses describe.

    Attributes:
        of: of each trainable leaf its uses, by where they stand.
        whole: the leaves that are differentiated themselves, with the reason.
    """

    of: tuple[dict[Address, ParamUse], ...]
    whole: dict[int, str]

    @property
    def at(self) -> dict[Address, ParamUse]:
        """All uses."""
        return {address: use for its in self.of for address, use in its.items()}

    def without(self, reasons: dict[int, str]) -> "Uses":
        """The same with more leaves that are differentiated themselves."""
        whole = {**reasons, **self.whole}
        return Uses(tuple({} if i in whole else its for i, its in enumerate(self.of)), whole)


class _View(NamedTuple):
    """A rearranged parameter.

    Attributes:
        leaf: which.
        size: its number of entries.
        layout: of the array, or of all its slices, which are stacked along axes in front.
        over: the scans that go over those slices, outermost first.
    """

    leaf: int
    size: int
    layout: Layout
    over: tuple[Address, ...] = ()

    @property
    def is_regular(self) -> bool:
        """Whether a gradient can be brought back to the parameter."""
        return 0 in self.layout.shape or self.layout.is_regular(self.size)


def find_uses(program: Program, num_params: int) -> Uses:
    """Finds every leaf's uses by going through the program once; nothing is evaluated.

    Args:
        program: the loss of one example.
        num_params: how many of its inputs, the first, are trainable leaves.
    """
    variables = program.jaxpr.jaxpr.invars
    shapes = [shape_of(variable) for variable in variables[:num_params]]
    search = _Search(tuple({} for _ in shapes), {})
    params = [_View(i, math.prod(shape), layout_of(shape)) for i, shape in enumerate(shapes)]
    rest = [None] * (len(variables) - num_params)
    for output in search.program(program.jaxpr, [*params, *rest], (), ()):
        search.give_up(output, "it is a result of the loss itself")
    return Uses(search.of, {}).without(search.whole)


_Scans: TypeAlias = tuple[tuple[Address, int], ...]
"""The scans around an equation, outermost first: where they stand, and their lengths."""


class _Search(NamedTuple):
    """One pass over a program, through the programs inside it, on views: None is other data.

    Attributes:
        of, whole: what is found, as that of `Uses`.
    """

    of: tuple[dict[Address, ParamUse], ...]
    whole: dict[int, str]

    def program(
        self,
        program: jex_core.ClosedJaxpr,
        inputs: Sequence[_View | None],
        address: Address,
        scans: _Scans,
    ) -> list[_View | None]:
        """The views that a program makes of those that it is given."""
        indices = itertools.count()

        def of_equation(
            equation: jex_core.JaxprEqn, inputs: list[_View | None]
        ) -> Sequence[_View | None]:
            index = next(indices)
            if not any(inputs):
                return [None] * len(equation.outvars)
            return self.equation(equation, inputs, (*address, index), scans)

        consts: list[_View | None] = [None] * len(program.jaxpr.constvars)
        return interpret(program.jaxpr, consts, inputs, of_equation, lambda _: None)

    def equation(
        self,
        equation: jex_core.JaxprEqn,
        inputs: list[_View | None],
        address: Address,
        scans: _Scans,
    ) -> Sequence[_View | None]:
        """Follows views through an equation, notes it as a use, or gives them up."""
        nothing = [None] * len(equation.outvars)
        operands = [i for i, view in enumerate(inputs) if view is not None]
        first = inputs[operands[0]]
        assert first is not None
        if len(inputs) == 1:
            layouts = through(equation, first.layout, len(first.over))
            if layouts is not None:
                return [first._replace(layout=layout) for layout in layouts]
        match inside(equation):
            case Call("jit", body):
                return self.program(body, inputs, address, scans)
            case Call("remat", body):
                for output in self.program(body, inputs, address, scans):
                    self.give_up(output, "it leaves a jax.checkpoint")
                return nothing
            case Scan() as scan:
                self.scan(scan, inputs, address, scans)
                return nothing
            case _:
                pass
        claiming = [kind for kind in KINDS if kind.claims(equation, operands[0])]
        reason = f"no kind of use knows '{equation.primitive.name}'"
        if len(operands) > 1:
            reason = "it meets another parameter"
        elif claiming and _is_real(equation):
            if self.use(claiming[0], equation, operands[0], first, address, scans):
                return nothing
            reason = "its entries are in no regular order"
        for view in inputs:
            self.give_up(view, reason)
        return nothing

    def scan(
        self,
        scan: Scan,
        inputs: list[_View | None],
        address: Address,
        scans: _Scans,
    ) -> None:
        """Follows views into a scan, which may go over slices of them."""
        consts, carry, slices = scan.split(inputs)
        for view in carry:
            self.give_up(view, "a scan carries it")
        now = [view and view._replace(over=(*view.over, address)) for view in slices]
        start, around = [*consts, *[None] * len(carry), *now], (*scans, (address, scan.length))
        for output in self.program(scan.body, start, address, around):
            self.give_up(output, "a scan returns it")

    def give_up(self, view: _View | None, reason: str) -> None:
        """Makes a leaf `whole`."""
        if view is not None:
            self.whole.setdefault(view.leaf, reason)

    def use(
        self,
        kind: Kind,
        equation: jex_core.JaxprEqn,
        operand: int,
        view: _View,
        address: Address,
        scans: _Scans,
    ) -> bool:
        """Notes a use, if its gradient can be brought back to the parameter."""
        operation = operation_of(equation)
        matrices = as_matrices(kind, operation, operand, view.layout)
        if not view.is_regular or (matrices is None and isinstance(kind, MatrixKind)):
            return False
        lengths = [length for _, length in scans]
        result, residuals = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((*lengths, *x.shape), x.dtype),
            (equation.outvars[0].aval, _residuals(kind, operation, operand, _shapes(equation))),
        )
        use = ParamUse(
            kind,
            operation,
            operand,
            view.layout,
            matrices,
            tuple("slices" if scan in view.over else "time" for scan, _ in scans),
            result,
            residuals,
        )
        if not use.is_empty:
            self.of[view.leaf][address] = use
        return True


def _is_real(equation: jex_core.JaxprEqn) -> bool:
    results: list[Any] = [variable.aval for variable in equation.outvars]
    return all(jnp.issubdtype(result.dtype, jnp.floating) for result in results)


def _shapes(equation: jex_core.JaxprEqn) -> tuple[jax.ShapeDtypeStruct, ...]:
    avals: list[Any] = [variable.aval for variable in equation.invars]
    return tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals)


@functools.lru_cache(maxsize=1024)
def _residuals(
    kind: Kind, operation: Operation, operand: int, inputs: tuple[jax.ShapeDtypeStruct, ...]
) -> Any:
    """Shapes of what a use keeps."""
    return jax.eval_shape(lambda *x: kind.residuals(operation, operand, list(x)), *inputs)


AtUse: TypeAlias = Callable[[Any, jex_core.JaxprEqn, list[Any], Any, Any], tuple[Array, Any]]
"""What happens at a use: from what is known of it, its equation, the values of its operands, its
tap and what is given to all, to the result and the residuals."""


def tapped(
    use: ParamUse, equation: jex_core.JaxprEqn, inputs: list[Any], tap: Array, given: Any
) -> tuple[Array, Any]:
    """Adds a tap to the result, and keeps what a gradient is made of beside its cotangent."""
    del given
    (result,) = evaluated(equation, inputs)
    return result + tap, use.kind.residuals(use.operation, use.operand, inputs)


def evaluate(
    program: Program,
    at: Mapping[Address, Hashable],
    inputs: Sequence[Array],
    taps: dict[Address, Any],
    at_use: AtUse = tapped,
    given: Any = None,
) -> tuple[Array, list[Array], dict[Address, Any]]:
    """Evaluates one example's loss with taps.

    Args:
        program: the loss of one example.
        at: what is known of each use: `at_use` does the same wherever this is the same.
        inputs: the trainable leaves, the other arrays of the model, and one example's arrays.
        taps: what each use is given, the lengths of the scans around it in front of every array.
        at_use: what happens there.
        given: arrays that all uses are given.

    Returns:
        The loss, aux, and the residuals of every use, the scans' lengths in front.
    """
    outputs, residuals = _Evaluation(at_use, given, {}).program(program.jaxpr, at, inputs, taps)
    loss, *aux = map(jnp.asarray, outputs)
    return loss, aux, residuals


class _Evaluation(NamedTuple):
    """One pass over a program, through the programs in which there are uses, on values.

    Attributes:
        at_use: what happens at a use.
        given: what all uses are given.
        calls: the functions that stand for calls, by what they call: equal ones are traced once.
    """

    at_use: AtUse
    given: Any
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
                result, residuals[here] = self.at_use(
                    at[here], equation, inputs, taps[here], self.given
                )
                return [result]
            if index not in holders:
                return evaluated(equation, inputs)
            outputs, found = self.inside(equation, inputs, _below(at, index), _below(taps, index))
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
        """Evaluates an equation that holds uses: jit, remat and scan stay what they are.

        Taps go into them, and what uses keep comes out, saved or with the scan's other arrays.
        """
        with named(equation):
            match inside(equation):
                case Call("jit", body):
                    key = body, *at.items()
                    if key not in self.calls:
                        self.calls[key] = jax.jit(
                            lambda given, inputs, taps: self._replace(given=given).program(
                                body, at, inputs, taps
                            )
                        )
                    return self.calls[key](self.given, inputs, taps)
                case Call("remat", body):
                    run = functools.partial(self.program, body, at)
                    return rematerialised(equation, run, inputs, taps)
                case Scan(body=body) as scan:
                    run = functools.partial(self.program, body, at)
                    return scanned(equation, scan, run, inputs, taps)
                case other:
                    raise AssertionError(f"There are no uses inside {other}.")


def _below(of: Mapping[Address, Any], index: int) -> dict[Address, Any]:
    """What is inside one equation, by its address there."""
    return {address[1:]: its for address, its in of.items() if address[0] == index}
