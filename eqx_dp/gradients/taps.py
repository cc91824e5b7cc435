"""Taps: the uses of parameters in a program, found and evaluated.

A *tap* at a use is a zero whose cotangent is what a method wants of the use (`AtUse`). A parameter
that is not multiplied by data alone has no uses: it is formed. The search reads only shapes;
`evaluate` inserts the taps.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jaxtyping import Array

from ..programs import Call, Scan, inside, interpret, literal_value, rematerialised, scanned
from ..programs import at as named
from ..sharding import Shard, evaluated_whole, rearranged, whole
from .contraction import Contraction
from .convolution import Convolution
from .kind import Kind, shape_of
from .lookup import Lookup
from .narrow_products import Narrow, is_product
from .program import Program
from .uses import Address, ParamUse, Uses
from .views import Steps, steps_of

KINDS: tuple[type[Kind], ...] = (Contraction, Convolution, Lookup)
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
    search = _Search(shapes, tuple({} for _ in shapes), {}, program.narrow)
    inputs = [*map(_View, range(num_params)), *[None] * (len(variables) - num_params)]
    loss, *_ = search.program(program.jaxpr, inputs)
    search.give_up([loss], "it is a result of the loss itself")
    return Uses(search.of, search.formed, {})


class _Search(NamedTuple):
    """One pass over a program, through the programs inside it, on views: None is other data.

    Attributes:
        shapes: of the trainable leaves.
        of, formed: the results, as in `Uses`.
        narrow: which products are in a narrow dtype; None if none is.
        address: of the program, or of the equation.
        scans: those around it, outermost first: their addresses and lengths.
        is_wide: whether the products around it stay wide, by the modules' rules.
        is_held: whether what uses meet is held for the backward pass: they are in no checkpoint.
    """

    shapes: list[tuple[int, ...]]
    of: tuple[dict[Address, ParamUse], ...]
    formed: dict[int, str]
    narrow: Narrow | None
    address: Address = ()
    scans: tuple[tuple[Address, int], ...] = ()
    is_wide: bool = False
    is_held: bool = True

    def program(
        self, program: jex_core.ClosedJaxpr, inputs: Sequence[_View | None]
    ) -> list[_View | None]:
        """The views that a program returns, from those that it gets."""
        indices = itertools.count()

        def of_equation(
            equation: jex_core.JaxprEqn, inputs: list[_View | None]
        ) -> Sequence[_View | None]:
            here = self._replace(address=(*self.address, next(indices)))
            if not any(inputs) or not _is_differentiated(equation):
                return [None] * len(equation.outvars)
            if self.narrow is not None:
                here = here._replace(is_wide=self.narrow.is_wide(equation, self.is_wide))
            return here.equation(equation, inputs)

        consts: list[_View | None] = [None] * len(program.jaxpr.constvars)
        return interpret(program.jaxpr, consts, inputs, of_equation, lambda _: None)

    def equation(
        self, equation: jex_core.JaxprEqn, inputs: list[_View | None]
    ) -> Sequence[_View | None]:
        """Follows views through an equation, records a use, or gives the views up."""
        operands = [i for i, view in enumerate(inputs) if view is not None]
        first = inputs[operands[0]]
        assert first is not None
        if len(inputs) == 1 and (of_results := steps_of(equation, len(first.over))) is not None:
            return [first._replace(steps=(*first.steps, *steps)) for steps in of_results]
        match inside(equation):
            case Call("jit", body):
                return self.program(body, inputs)
            case Call("remat", body):
                return self._replace(is_held=False).program(body, inputs)
            case Scan() as scan:
                return self.scan(scan, inputs)
            case _:
                pass
        result: Any = equation.outvars[0].aval
        is_real = jnp.issubdtype(result.dtype, jnp.floating)
        kind = next((kind for kind in KINDS if kind.claims(equation, operands[0])), None)
        if kind is not None and len(operands) == 1 and is_real:
            self.use(kind.of(equation, operands[0]), equation, first)
        else:
            self.give_up(inputs, _reason(equation, inputs))
        return [None] * len(equation.outvars)

    def scan(self, scan: Scan, inputs: list[_View | None]) -> list[_View | None]:
        """Follows views into a scan, which may go over slices of them."""
        consts, carry, slices = scan.split(inputs)
        reason = "a scan carries it, or returns it"
        self.give_up(carry, reason)
        now = [view and view._replace(over=(*view.over, self.address)) for view in slices]
        inner = self._replace(scans=(*self.scans, (self.address, scan.length)))
        no_views: list[_View | None] = [None] * scan.num_carry
        outputs = inner.program(scan.body, [*consts, *no_views, *now])
        self.give_up(outputs, reason)
        return [None] * len(outputs)

    def give_up(self, views: Sequence[_View | None], reason: str) -> None:
        """Makes leaves formed."""
        for view in views:
            if view is not None:
                self.formed.setdefault(view.leaf, reason)

    def use(self, kind: Kind, equation: jex_core.JaxprEqn, view: _View) -> None:
        """Notes a use."""
        lengths = [length for _, length in self.scans]

        def stacked(variable: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((*lengths, *variable.aval.shape), variable.aval.dtype)

        narrow = None if self.is_wide or not is_product(equation) else self.narrow
        use = ParamUse(
            kind,
            self.shapes[view.leaf],
            view.steps,
            tuple("slices" if scan in view.over else "time" for scan, _ in self.scans),
            stacked(equation.outvars[0]),
            stacked(equation.invars[1 - kind.operand]),
            narrow and narrow.matmul,
            self.is_held,
        )
        # A scan without steps and a slice without rows contribute nothing.
        if 0 in (*use.result.shape, *use.shape, *use.kind.shape):
            return
        if use.place is None:
            self.give_up([view], "its entries are in no regular order where it is used")
        else:
            self.of[view.leaf][self.address] = use


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


class AtUse(Protocol):
    """What happens at a use. Equal ones evaluate an equation equally."""

    def tap(self) -> Any:
        """A tree of zeros, the lengths of the scans around the use in front."""
        ...

    def evaluated(
        self, equation: jex_core.JaxprEqn, inputs: list[Any], tap: Any
    ) -> tuple[Array, Any]:
        """The result of the equation, and what leaves the program beside it."""
        ...


def evaluate(
    program: Program,
    at: Mapping[Address, AtUse],
    inputs: Sequence[Array | Shard],
    taps: dict[Address, Any],
) -> tuple[Array, list[Array], dict[Address, Any]]:
    """Evaluates one example's loss with taps.

    Args:
        program: the loss of one example.
        at: what happens at each use.
        inputs: the program's.
        taps: a tree of arrays for each use, the lengths of the scans around it in front.

    Returns:
        The loss, the leaves of aux, and what leaves each use, the lengths of scans in front.
    """
    outputs, beside = _Evaluation(at, {}).program(program.run(), inputs, taps)
    loss, *aux = (jnp.asarray(whole(x)) for x in outputs)
    return loss, aux, beside


class _Evaluation(NamedTuple):
    """One pass over a program, through the programs in which there are uses, on values.

    Attributes:
        at: what happens at each use; addresses are relative to the program.
        calls: functions for calls, by the program that they call: equal ones are traced once.
    """

    at: Mapping[Address, AtUse]
    calls: dict[Any, Callable[..., Any]]

    def program(
        self, program: jex_core.ClosedJaxpr, inputs: Sequence[Any], taps: dict[Address, Any]
    ) -> tuple[list[Any], dict[Address, Any]]:
        """Evaluates a program; addresses are relative to it."""
        indices, beside = itertools.count(), dict[Address, Any]()
        holders = {address[0] for address in self.at if len(address) > 1}

        def of_equation(equation: jex_core.JaxprEqn, inputs: list[Any]) -> list[Any]:
            index = next(indices)
            here = (index,)
            if here in self.at:
                result, beside[here] = self.at[here].evaluated(equation, inputs, taps[here])
                return [result]
            if index not in holders:
                part = rearranged(equation, inputs)
                if part is not None:
                    return [part]
                if not _takes_parts(equation, inputs):
                    return evaluated_whole(equation, inputs)
            inner = self._replace(at=_below(self.at, index))
            with named(equation):
                outputs, inner_beside = inner.inside(equation, inputs, _below(taps, index))
            beside.update({(index, *address): x for address, x in inner_beside.items()})
            return outputs

        outputs = interpret(program.jaxpr, program.consts, inputs, of_equation, literal_value)
        return outputs, beside

    def inside(
        self, equation: jex_core.JaxprEqn, inputs: list[Any], taps: dict[Address, Any]
    ) -> tuple[list[Any], dict[Address, Any]]:
        """Evaluates an equation that holds uses, or takes parts of parameters.

        A jit, remat or scan is kept. Taps go in, and what leaves uses comes out, saved or with a
        scan's other arrays. A parameter that a scan goes over is gathered slice by slice, inside,
        and again for the backward pass: a checkpoint around the scan saves what its steps do. One
        that all steps share is gathered once, before the scan.
        """
        match inside(equation):
            case Call("jit", body):
                key = body, *self.at.items()
                if key not in self.calls:
                    self.calls[key] = jax.jit(functools.partial(self.program, body))
                return self.calls[key](inputs, taps)
            case Call("remat", body):
                run = functools.partial(self.program, body)
                if equation.params["policy"] is None:  # gathered arrays are not saved
                    inputs = [x.within_checkpoint() if isinstance(x, Shard) else x for x in inputs]
                return rematerialised(equation, run, inputs, taps)
            case Scan() as scan:
                consts, carry, slices = scan.split(inputs)
                slices = [x.of_steps() if isinstance(x, Shard) else x for x in slices]

                def step(inputs: list[Any], taps: Any) -> tuple[list[Any], dict[Address, Any]]:
                    outputs, beside = self.program(scan.body, inputs, taps)
                    return list(map(whole, outputs)), beside

                inputs = [*map(whole, (*consts, *carry)), *slices]
                return scanned(equation, scan, step, inputs, taps)
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
    return {address[1:]: x for address, x in of.items() if address[0] == index}
