"""Evaluating a program so that the cotangent of every use of a parameter can be read.

Each site's result gets a *tap* added to it, a zero: the gradient with respect to the tap is the
cotangent of the result. What the site needs beside it is kept on the way. Nothing is differentiated
with respect to a parameter, but for those that a site cannot describe (`whole`).
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jaxtyping import Array

from ..programs import (
    Call,
    Scan,
    at,
    evaluated,
    inside,
    interpret,
    literal_value,
    rematerialised,
    scanned,
)
from .program import Program
from .sites import KINDS, Kind
from .views import View, parameter_view, view_through

Place: TypeAlias = tuple[int, ...]
"""Where an equation stands: its index, behind the indices of the equations around it."""


ScanUse: TypeAlias = Literal["slices", "time"]


class Site(NamedTuple):
    """An equation that uses a parameter linearly.

    Attributes:
        view: what it uses.
        kind: which kind of equation it is.
        equation: the equation.
        operand: which operand is the view.
        scans: the scans around it, outermost first: whether each goes over slices of the parameter
            or uses all of it many times.
        tap: shape and dtype of the result, the scans' lengths in front.
        kept: the same of what it keeps.
    """

    view: View
    kind: Kind
    equation: jex_core.JaxprEqn
    operand: int
    scans: tuple[ScanUse, ...]
    tap: jax.ShapeDtypeStruct
    kept: Any


AtSite: TypeAlias = Callable[[Site, list[Any], Any], tuple[Array, Any]]
"""From a site, the values of its operands, and its tap: the result, and what is kept."""


class Survey(NamedTuple):
    """The sites of every leaf, and the leaves that no site describes, with the reason."""

    sites: dict[Place, Site]
    whole: dict[int, str]

    def of(self, leaf: int) -> list[tuple[Place, Site]]:
        """The sites of one leaf."""
        return [(place, site) for place, site in self.sites.items() if site.view.leaf == leaf]


def survey(program: Program, inputs: list[jax.ShapeDtypeStruct], num_params: int) -> Survey:
    """Finds every leaf's sites by walking through the program once, on shapes alone.

    Args:
        program: the loss of one example.
        inputs: shapes and dtypes of what it takes.
        num_params: how many of them, the first, are trainable leaves.
    """
    found = Survey({}, {})

    def run(params: list[Array], rest: list[Array]) -> None:
        walk = _Walk(found, None)
        views = [parameter_view(leaf, value) for leaf, value in enumerate(params)]
        for output in walk.program(program.jaxpr, [*views, *rest]):
            walk.value(output, "it is a result of the loss itself")

    jax.eval_shape(run, inputs[:num_params], inputs[num_params:])
    sites = {
        place: site
        for place, site in found.sites.items()
        if site.view.leaf not in found.whole and not _is_empty(site)
    }
    return Survey(sites, found.whole)


def tapped(site: Site, inputs: list[Any], tap: Array) -> tuple[Array, Any]:
    """Adds a tap to the result, and keeps what a gradient is made of beside its cotangent."""
    (result,) = evaluated(site.equation, inputs)
    return result + tap, site.kind.keep(site.equation, site.operand, inputs)


def _is_empty(site: Site) -> bool:
    """Whether nothing can come of a site: a scan of no steps, a slice of no rows."""
    return 0 in (*site.tap.shape, *site.view.value.shape)


def evaluate(
    program: Program,
    found: Survey,
    params: list[Array],
    frozen: list[Array],
    example: list[Array],
    taps: dict[Place, Any],
    at_site: AtSite = tapped,
) -> tuple[Array, list[Array], dict[Place, Any]]:
    """Evaluates one example's loss with taps.

    Args:
        program: the loss of one example.
        found: its sites.
        params: the trainable leaves. Those that are `whole` are used as they are.
        frozen: the other arrays of the model.
        example: one example's arrays.
        taps: what each site is given, the lengths of the scans around it in front of every array.
        at_site: what happens at a site.

    Returns:
        The loss, aux, and what each site keeps, the scans' lengths in front.
    """
    walk = _Walk(found, taps, at_site)
    inputs = [
        value if leaf in found.whole else parameter_view(leaf, value)
        for leaf, value in enumerate(params)
    ]
    outputs = walk.program(program.jaxpr, [*inputs, *frozen, *example])
    loss, *aux = (jnp.asarray(walk.value(output, "")) for output in outputs)
    return loss, aux, walk.kept


def _is_real(equation: jex_core.JaxprEqn) -> bool:
    results: list[Any] = [variable.aval for variable in equation.outvars]
    return all(jnp.issubdtype(result.dtype, jnp.floating) for result in results)


class _Around(NamedTuple):
    """A scan around an equation."""

    place: Place
    length: int


class _Walk:
    """One pass over a program, through the programs inside it.

    Without taps it is a survey: sites are noted. With taps, they are tapped.
    """

    def __init__(self, found: Survey, taps: dict[Place, Any] | None, at_site: AtSite = tapped):
        self.found = found
        self.taps = taps
        self.at_site = at_site
        self.kept: dict[Place, Any] = {}

    def program(
        self,
        program: jex_core.ClosedJaxpr,
        inputs: Sequence[Any],
        place: Place = (),
        scans: tuple[_Around, ...] = (),
    ) -> list[Any]:
        """Evaluates a program whose inputs are values or views; so are its results."""
        indices = itertools.count()

        def of_equation(equation: jex_core.JaxprEqn, inputs: list[Any]) -> list[Any]:
            return self.equation(equation, inputs, (*place, next(indices)), scans)

        return interpret(program.jaxpr, program.consts, inputs, of_equation, literal_value)

    def equation(
        self,
        equation: jex_core.JaxprEqn,
        inputs: list[Any],
        place: Place,
        scans: tuple[_Around, ...],
    ) -> list[Any]:
        """Evaluates one equation: plainly, as a view, as a site, or by going into it."""
        if not any(isinstance(x, View) for x in inputs):
            return evaluated(equation, inputs)
        views = view_through(equation, inputs)
        if views is not None:
            return views
        inner = inside(equation)
        with at(equation):
            match inner:
                case Call("jit", body):
                    return self.program(body, inputs, place, scans)
                case Call("remat", body):
                    return self._remat(equation, body, inputs, place, scans)
                case Scan() as scan:
                    return self._scan(equation, scan, inputs, place, scans)
                case _:
                    pass
        operands = [i for i, x in enumerate(inputs) if isinstance(x, View)]
        if len(operands) == 1 and _is_real(equation):
            for kind in KINDS:
                if kind.claims(equation, operands[0]):
                    return [self.site(kind, equation, operands[0], inputs, place, scans)]
        reason = (
            "it meets another parameter"
            if len(operands) > 1
            else f"no kind of site knows '{equation.primitive.name}'"
        )
        return evaluated(equation, [self.value(x, reason) for x in inputs])

    def value(self, x: Any, reason: str) -> Any:
        """The value of an input; a view whose use no site describes makes its leaf `whole`."""
        if not isinstance(x, View):
            return x
        self.found.whole.setdefault(x.leaf, reason)
        return x.value

    def site(
        self,
        kind: Kind,
        equation: jex_core.JaxprEqn,
        operand: int,
        inputs: list[Any],
        place: Place,
        scans: tuple[_Around, ...],
    ) -> Array:
        """Evaluates a site; notes it, or does what is to be done there."""
        view: View = inputs[operand]
        values = _values(inputs)
        if self.taps is not None and place in self.taps:
            result, self.kept[place] = self.at_site(
                self.found.sites[place], values, self.taps[place]
            )
            return result
        (result,) = evaluated(equation, values)
        if self.taps is None:
            lengths = [scan.length for scan in scans]
            tap, kept = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((*lengths, *x.shape), x.dtype),
                (result, kind.keep(equation, operand, values)),
            )
            uses: tuple[ScanUse, ...] = tuple(
                "slices" if scan.place in view.over else "time" for scan in scans
            )
            shape = jax.ShapeDtypeStruct(view.value.shape, view.value.dtype)
            view = view._replace(value=shape)  # no value of the survey outlives it
            self.found.sites[place] = Site(view, kind, equation, operand, uses, tap, kept)
        return result

    def _remat(
        self,
        equation: jex_core.JaxprEqn,
        body: jex_core.ClosedJaxpr,
        inputs: list[Any],
        place: Place,
        scans: tuple[_Around, ...],
    ) -> list[Any]:
        """A rematerialised function stays one; what its sites keep is saved."""

        def run(values: list[Any], taps: dict[Place, Any] | None) -> tuple[list[Any], Any]:
            walk = _Walk(self.found, taps, self.at_site)
            outputs = walk.program(body, _with_values(inputs, values), place, scans)
            return [walk.value(x, "it leaves a jax.checkpoint") for x in outputs], walk.kept

        outputs, kept = rematerialised(equation, run, _values(inputs), self._taps_inside(place))
        self.kept.update(kept)
        return outputs

    def _scan(
        self,
        equation: jex_core.JaxprEqn,
        scan: Scan,
        inputs: list[Any],
        place: Place,
        scans: tuple[_Around, ...],
    ) -> list[Any]:
        """A scan stays one; taps go in, and what sites keep comes out, with its other arrays."""
        consts, carry, slices = scan.split(inputs)
        carry = [self.value(x, "a scan carries it") for x in carry]
        slices = [x._replace(over=(*x.over, place)) if isinstance(x, View) else x for x in slices]
        start = len(consts) + len(carry)
        around = (*scans, _Around(place, scan.length))

        def run(values: list[Any], taps: Any) -> tuple[list[Any], Any]:
            walk = _Walk(self.found, taps, self.at_site)
            read = [*values[:start], *_with_values(slices, values[start:])]
            outputs = walk.program(scan.body, read, place, around)
            return [walk.value(x, "a scan returns it") for x in outputs], walk.kept

        values = [*consts, *carry, *_values(slices)]
        outputs, kept = scanned(equation, scan, run, values, self._taps_inside(place))
        self.kept.update(kept)
        return outputs

    def _taps_inside(self, place: Place) -> dict[Place, Any] | None:
        if self.taps is None:
            return None
        return {inner: tap for inner, tap in self.taps.items() if inner[: len(place)] == place}


def _values(inputs: list[Any]) -> list[Any]:
    return [x.value if isinstance(x, View) else x for x in inputs]


def _with_values(inputs: list[Any], values: list[Any]) -> list[Any]:
    return [
        x._replace(value=value) if isinstance(x, View) else value
        for x, value in zip(inputs, values, strict=True)
    ]
