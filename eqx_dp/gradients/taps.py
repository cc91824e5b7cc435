"""Where taps go: the uses of parameters in a program.

The result of every use gets a *tap* added to it, a zero: the gradient with respect to the tap is
the cotangent of the result. What the use needs beside it is kept on the way. Where no kind of use
is known, the tap is added to the parameter as it comes to that equation.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp

from ..programs import (
    Call,
    Scan,
    inside,
    interpret,
)
from .carried_back import carried_back, operands_wanted, wanted_inside
from .layouts import Layout, layout_of, shape_of, through
from .program import Program
from .uses import (
    KINDS,
    Kind,
    MatrixKind,
    Operation,
    ParamUse,
    as_matrices,
    operation_of,
    shift,
    vjp,
)

Address: TypeAlias = tuple[int, ...]
"""Where an equation stands: its index, behind the indices of the equations around it.

The complement `~i` of a position, behind that, says which of its operands; those that the body of a
scan gives on to the next step come after the operands.
"""


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

    def stacked(self, scan: Address, length: int) -> "_View":
        """What a scan makes of it that returns it at every step: its slices, or repetitions."""
        if self.over[-1:] == (scan,):
            return self._replace(over=self.over[:-1])
        axes, outer = self.layout.axes, len(self.over)
        repeated = ((length, 0),) if length != 1 else ()
        return self._replace(
            layout=self.layout._replace(axes=(*axes[:outer], repeated, *axes[outer:]))
        )


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
    of_loss = [i == 0 for i in range(len(program.jaxpr.jaxpr.outvars))]
    loss, *_ = search.program(program.jaxpr, [*params, *rest], of_loss, (), ())
    search.give_up(loss, "it is a result of the loss itself")
    if program.narrow is not None:
        narrow, matmul = frozenset(program.narrow.addresses(program.jaxpr)), program.narrow.matmul
        for its in search.of:
            its.update({at: use.narrowed(matmul) for at, use in its.items() if at in narrow})
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
        wanted: Sequence[bool],
        address: Address,
        scans: _Scans,
    ) -> list[_View | None]:
        """The views that a program makes of those that it is given.

        Uses from which no gradient comes back are none: `wanted` says of which results one does.
        """
        indices, passed = itertools.count(), carried_back(program.jaxpr, wanted)

        def of_equation(
            equation: jex_core.JaxprEqn, inputs: list[_View | None]
        ) -> Sequence[_View | None]:
            index, wanted = next(indices), [variable in passed for variable in equation.outvars]
            if not any(inputs) or not any(wanted):
                return [None] * len(equation.outvars)
            of_operands = operands_wanted(equation, wanted)
            inputs = [view if its else None for view, its in zip(inputs, of_operands, strict=True)]
            if not any(inputs):
                return [None] * len(equation.outvars)
            return self.equation(equation, inputs, wanted, (*address, index), scans)

        consts: list[_View | None] = [None] * len(program.jaxpr.constvars)
        return interpret(program.jaxpr, consts, inputs, of_equation, lambda _: None)

    def equation(
        self,
        equation: jex_core.JaxprEqn,
        inputs: list[_View | None],
        wanted: list[bool],
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
            views = [first._replace(layout=layout) for layout in layouts or ()]
            if views and all(view.is_regular for view in views):
                return views
        match inside(equation):
            case Call("jit" | "remat", body):
                return self.program(body, inputs, wanted, address, scans)
            case Scan() as scan:
                return self.scan(equation, scan, inputs, wanted, address, scans)
            case _:
                pass
        if len(operands) == 1 and _is_real(equation):
            is_repeated = any(at not in first.over for at, _ in scans)
            if is_repeated and shift.claims(equation, operands[0]):
                # Each step's gradient is its cotangent: added up there, it need not be held.
                self.differentiate(equation, {operands[0]: first}, address, scans)
                return nothing
            for kind in KINDS:
                if kind.claims(equation, operands[0]) and self.use(
                    kind, equation, operands[0], first, address, scans
                ):
                    return nothing
        self.differentiate(equation, dict(enumerate(inputs)), address, scans)
        return nothing

    def scan(
        self,
        equation: jex_core.JaxprEqn,
        scan: Scan,
        inputs: list[_View | None],
        wanted: list[bool],
        address: Address,
        scans: _Scans,
    ) -> list[_View | None]:
        """Follows views into a scan, which may go over slices of them, and out of it."""
        body, carried = scan.body.jaxpr, range(scan.num_consts, scan.num_consts + scan.num_carry)
        stays = {i for i in carried if body.invars[i] is body.outvars[i - scan.num_consts]}
        consts, carry, slices = scan.split(inputs)
        starts = {i: inputs[i] for i in carried if i not in stays}
        self.differentiate(equation, starts, address, scans)
        carry = [inputs[i] if i in stays else None for i in carried]
        now = [view and view._replace(over=(*view.over, address)) for view in slices]
        around, of_body = (*scans, (address, scan.length)), wanted_inside(scan, wanted)
        outputs = self.program(scan.body, [*consts, *carry, *now], of_body, address, around)
        given_on = {
            len(inputs) + i: outputs[i]
            for i in range(scan.num_carry)
            if of_body[i] and i + scan.num_consts not in stays
        }
        self.differentiate(equation, given_on, address, around)
        stacked = [view and view.stacked(address, scan.length) for view in outputs]
        return [*carry, *stacked[scan.num_carry :]]

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

    def differentiate(
        self,
        equation: jex_core.JaxprEqn,
        views: dict[int, _View | None],
        address: Address,
        scans: _Scans,
    ) -> None:
        """Notes uses of the kind `vjp`.

        Args:
            equation: any.
            views: by which operand each is. What a scan's body gives on to the next step comes
                after the operands.
            address: where the equation stands.
            scans: those around the operands.
        """
        for operand, view in views.items():
            if view is None:
                continue
            aval: Any = [*equation.invars, *equation.outvars][operand].aval
            if jnp.issubdtype(aval.dtype, jnp.complexfloating):
                name = equation.primitive.name
                self.give_up(view, f"no kind of use knows '{name}' of complex numbers")
                continue
            lengths = [length for scan, length in scans if scan in view.over]
            use = ParamUse(
                vjp,
                Operation(equation.primitive.name, (), (aval.shape,), aval.shape),
                0,
                view.layout,
                None,
                tuple("slices" if scan in view.over else "added" for scan, _ in scans),
                jax.ShapeDtypeStruct((*lengths, *aval.shape), aval.dtype),
                (),
            )
            if not use.is_empty:
                self.of[view.leaf][(*address, ~operand)] = use


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
