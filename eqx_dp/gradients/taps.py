"""Where taps go: the uses of parameters in a program.

The result of every use gets a *tap* added to it, a zero: the gradient with respect to the tap is
the cotangent of the result. What the use needs beside it is kept on the way. A parameter that is
not multiplied by data alone has no uses: it is formed.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp

from ..programs import Call, Scan, inside, interpret
from .program import Program
from .uses import KINDS, Kind, Operation, ParamUse, convolution, operation_of
from .views import Steps, is_regular, shape_of, steps_of

Address: TypeAlias = tuple[int, ...]
"""Where an equation stands: its index, behind the indices of the equations around it."""


class Uses(NamedTuple):
    """The uses of every leaf, and the leaves that are formed.

    A leaf that has no uses, and is not formed, does not enter the loss.

    Attributes:
        of: of each trainable leaf its uses, by where they stand.
        formed: the leaves that are differentiated themselves, with the reason.
        kernels: where they are kernels of convolutions, whose gradients patches make.
    """

    of: tuple[dict[Address, ParamUse], ...]
    formed: dict[int, str]
    kernels: dict[Address, ParamUse]

    @property
    def at(self) -> dict[Address, ParamUse]:
        """All uses."""
        return {address: use for its in self.of for address, use in its.items()}

    def forming(self, reasons: dict[int, str]) -> "Uses":
        """The same with more leaves that are formed."""
        formed, kernels = {**reasons, **self.formed}, dict(self.kernels)
        for leaf in formed:
            its = self.of[leaf].items()
            kernels |= {at: use for at, use in its if use.kind is convolution and not use.matmul}
        of = tuple({} if leaf in formed else its for leaf, its in enumerate(self.of))
        return Uses(of, formed, kernels)

    def all_formed(self) -> "Uses":
        """The same with all leaves formed."""
        reason = "each example's gradient is formed by the backward pass itself"
        return self.forming({leaf: reason for leaf, its in enumerate(self.of) if its})


class _View(NamedTuple):
    """A rearranged parameter.

    Attributes:
        leaf: which.
        steps: what was done to it.
        over: the scans that go over its slices, outermost first: axes in front.
    """

    leaf: int
    steps: Steps = ()
    over: tuple[Address, ...] = ()


def find_uses(program: Program, num_params: int) -> Uses:
    """Finds every leaf's uses by going through the program once; nothing is evaluated.

    Args:
        program: the loss of one example.
        num_params: how many of its inputs, the first, are trainable leaves.
    """
    variables = program.jaxpr.jaxpr.invars
    shapes = [shape_of(variable) for variable in variables[:num_params]]
    search = _Search(shapes, tuple({} for _ in shapes), {})
    inputs = [*map(_View, range(num_params)), *[None] * (len(variables) - num_params)]
    loss, *_ = search.program(program.jaxpr, inputs, (), ())
    search.give_up([loss], "it is a result of the loss itself")
    if program.narrow is not None:
        narrow, matmul = frozenset(program.narrow.addresses(program.jaxpr)), program.narrow.matmul
        for its in search.of:
            its.update({at: use.narrowed(matmul) for at, use in its.items() if at in narrow})
    return Uses(search.of, {}, {}).forming(search.formed)


_Scans: TypeAlias = tuple[tuple[Address, int], ...]
"""The scans around an equation, outermost first: where they stand, and their lengths."""


class _Search(NamedTuple):
    """One pass over a program, through the programs inside it, on views: None is other data.

    Attributes:
        shapes: of the trainable leaves.
        of, formed: what is found, as that of `Uses`.
    """

    shapes: list[tuple[int, ...]]
    of: tuple[dict[Address, ParamUse], ...]
    formed: dict[int, str]

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
            if not any(inputs) or not _is_differentiated(equation):
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
        operands = [i for i, view in enumerate(inputs) if view is not None]
        first = inputs[operands[0]]
        assert first is not None
        if len(inputs) == 1 and (found := steps_of(equation, len(first.over))) is not None:
            views = [first._replace(steps=(*first.steps, *steps)) for steps in found]
            if all(is_regular(view.steps, self.shapes[view.leaf]) for view in views):
                return views
        match inside(equation):
            case Call("jit" | "remat", body):
                return self.program(body, inputs, address, scans)
            case Scan() as scan:
                return self.scan(scan, inputs, address, scans)
            case _:
                pass
        kind = next((kind for kind in KINDS if kind.claims(equation, operands[0])), None)
        if kind is not None and len(operands) == 1 and _is_real(equation):
            self.use(kind, equation, operands[0], first, address, scans)
        else:
            self.give_up(inputs, f"'{equation.primitive.name}' takes it: more than products")
        return [None] * len(equation.outvars)

    def scan(
        self, scan: Scan, inputs: list[_View | None], address: Address, scans: _Scans
    ) -> list[_View | None]:
        """Follows views into a scan, which may go over slices of them."""
        body, carried = scan.body.jaxpr, range(scan.num_consts, scan.num_consts + scan.num_carry)
        stays = {i for i in carried if body.invars[i] is body.outvars[i - scan.num_consts]}
        consts, _, slices = scan.split(inputs)
        reason = "a scan carries it, or returns it"
        self.give_up([inputs[i] for i in carried if i not in stays], reason)
        carry = [inputs[i] if i in stays else None for i in carried]
        now = [view and view._replace(over=(*view.over, address)) for view in slices]
        around = (*scans, (address, scan.length))
        outputs = self.program(scan.body, [*consts, *carry, *now], address, around)
        stay = [i + scan.num_consts in stays for i in range(scan.num_carry)]
        given = [view for i, view in enumerate(outputs) if i >= len(stay) or not stay[i]]
        self.give_up(given, reason)
        return [*carry, *[None] * (len(outputs) - scan.num_carry)]

    def give_up(self, views: Sequence[_View | None], reason: str) -> None:
        """Makes leaves formed."""
        for view in views:
            if view is not None:
                self.formed.setdefault(view.leaf, reason)

    def use(
        self,
        kind: Kind,
        equation: jex_core.JaxprEqn,
        operand: int,
        view: _View,
        address: Address,
        scans: _Scans,
    ) -> None:
        """Notes a use."""
        operation = operation_of(equation)
        lengths = [length for _, length in scans]
        result, residuals = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((*lengths, *x.shape), x.dtype),
            (equation.outvars[0].aval, _residuals(kind, operation, operand, _shapes(equation))),
        )
        use = ParamUse(
            kind,
            operation,
            operand,
            self.shapes[view.leaf],
            view.steps,
            tuple("slices" if scan in view.over else "time" for scan, _ in scans),
            result,
            residuals,
        )
        if use.is_empty:
            return
        if use.place is None:
            self.give_up([view], "its entries are in no regular order where it is used")
        else:
            self.of[view.leaf][address] = use


def _is_differentiated(equation: jex_core.JaxprEqn) -> bool:
    """Whether a gradient may come back through an equation."""
    results: list[Any] = [variable.aval for variable in equation.outvars]
    is_smooth = any(jnp.issubdtype(getattr(x, "dtype", bool), jnp.inexact) for x in results)
    return is_smooth and equation.primitive.name != "stop_gradient"


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
