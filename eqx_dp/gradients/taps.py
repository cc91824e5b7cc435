"""Taps: the uses of parameters in a program, found and evaluated.

The result of every use gets a *tap* added to it, a zero: the gradient with respect to the tap is
the cotangent of the result. The other values that the gradient needs are kept on the way. A
parameter that is not multiplied by data alone has no uses: it is formed. The search reads only
shapes; `evaluate` inserts the taps.
"""

import functools
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jaxtyping import Array

from ..programs import Call, Scan, inside, interpret, literal_value, rematerialised, scanned
from ..programs import at as named
from ..sharding import Shard, evaluated_whole, rearranged, whole
from . import contraction, convolution, lookup
from .program import Program
from .uses import Address, Kind, Operation, ParamUse, Uses, operation_of, shape_of
from .views import Steps, is_regular, steps_of

KINDS: tuple[Kind, ...] = (contraction, convolution, lookup)
"""All kinds of uses. A parameter that any other equation takes is formed."""


class _View(NamedTuple):
    """A rearranged parameter.

    Attributes:
        leaf: which.
        steps: how it was rearranged.
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
    return Uses(search.of, search.formed, {})


_Scans: TypeAlias = tuple[tuple[Address, int], ...]
"""The scans around an equation, outermost first: their addresses and lengths."""


class _Search(NamedTuple):
    """One pass over a program, through the programs inside it, on views: None is other data.

    Attributes:
        shapes: of the trainable leaves.
        of, formed: the results, as in `Uses`.
        is_held: whether what uses meet is held for the backward pass: they are in no checkpoint.
    """

    shapes: list[tuple[int, ...]]
    of: tuple[dict[Address, ParamUse], ...]
    formed: dict[int, str]
    is_held: bool = True

    def program(
        self,
        program: jex_core.ClosedJaxpr,
        inputs: Sequence[_View | None],
        address: Address,
        scans: _Scans,
    ) -> list[_View | None]:
        """The views that a program returns, from those that it gets."""
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
        """Follows views through an equation, records a use, or gives the views up."""
        operands = [i for i, view in enumerate(inputs) if view is not None]
        first = inputs[operands[0]]
        assert first is not None
        if len(inputs) == 1 and (found := steps_of(equation, len(first.over))) is not None:
            views = [first._replace(steps=(*first.steps, *steps)) for steps in found]
            if all(is_regular(view.steps, self.shapes[view.leaf]) for view in views):
                return views
        match inside(equation):
            case Call("jit", body):
                return self.program(body, inputs, address, scans)
            case Call("remat", body):
                return self._replace(is_held=False).program(body, inputs, address, scans)
            case Scan() as scan:
                return self.scan(scan, inputs, address, scans)
            case _:
                pass
        kind = next((kind for kind in KINDS if kind.claims(equation, operands[0])), None)
        if kind is not None and len(operands) == 1 and _is_real(equation):
            self.use(kind, equation, operands[0], first, address, scans)
        else:
            self.give_up(inputs, _reason(equation, inputs))
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
            is_held=self.is_held,
        )
        if use.is_empty:
            return
        if use.place is None:
            self.give_up([view], "its entries are in no regular order where it is used")
        else:
            self.of[view.leaf][address] = use


def _reason(equation: jex_core.JaxprEqn, inputs: Sequence[Any]) -> str:
    """Why a parameter that an equation takes is formed."""
    name = equation.primitive.name
    is_square = name in ("square", "integer_pow") or (len(inputs) > 1 and all(inputs))
    advice = "; an L2 term costs nothing as weight decay in the optimizer (optax.adamw)"
    return f"used by more than products ('{name}'){advice if is_square else ''}"


def _is_differentiated(equation: jex_core.JaxprEqn) -> bool:
    """Whether a gradient may flow back through an equation."""
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
    """The shapes of the residuals of a use."""
    return jax.eval_shape(lambda *x: kind.residuals(operation, operand, list(x)), *inputs)


AtUse: TypeAlias = Callable[[Any, jex_core.JaxprEqn, list[Any], Any], tuple[Array, Any]]
"""The function at a use: it takes what is known of the use, its equation, the values of its
operands and its tap, and returns the result and the residuals."""


def tapped(
    use: ParamUse, equation: jex_core.JaxprEqn, inputs: list[Any], tap: Array
) -> tuple[Array, Any]:
    """Adds a tap to the result, and keeps the residuals."""
    (result,) = evaluated_whole(equation, inputs)
    return use.received(result + tap), use.kept(inputs)


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
        at: what is known of each use; equal uses are treated equally by `at_use`.
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
        calls: functions for calls, by the program that they call: equal ones are traced once.
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
        """Evaluates a program; addresses are relative to it."""
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

        A jit, remat or scan is kept. Taps go in, and residuals come out, saved or with a scan's
        other arrays. A parameter that a scan goes over is gathered slice by slice, inside, and
        again for the backward pass: a checkpoint around the scan saves what its steps do. One that
        all steps share is gathered once, before the scan.
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
                if equation.params["policy"] is None:  # gathered arrays are not saved
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
    """Whether it holds a program that takes parts of parameters."""
    if not any(isinstance(x, Shard) for x in inputs):
        return False
    return isinstance(found := inside(equation), Scan) or (
        isinstance(found, Call) and found.wrapper in ("jit", "remat")
    )


def _below(of: Mapping[Address, Any], index: int) -> dict[Address, Any]:
    """The entries inside one equation, by their address there."""
    return {address[1:]: its for address, its in of.items() if address[0] == index}
