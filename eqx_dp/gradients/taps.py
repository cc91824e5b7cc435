"""Evaluating a program so that the cotangent of every use of a parameter can be read.

Each site's result gets a *tap* added to it, a zero: the gradient with respect to the tap is the
cotangent of the result. What the site needs beside it is kept on the way. Nothing is differentiated
with respect to a parameter, but for those that a site cannot describe (``whole``).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.extend import source_info_util
from jaxtyping import Array

from ..programs import scan_arity
from .program import Program
from .sites import KINDS, Kind
from .views import View, apply, parameter_view, view_through

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
        outputs = walk.jaxpr(program.jaxpr.jaxpr, program.jaxpr.consts, [*views, *rest], (), ())
        for output in outputs:
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
    (result,) = apply(site.equation, inputs)
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
        params: the trainable leaves. Those that are ``whole`` are used as they are.
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
    outputs = walk.jaxpr(
        program.jaxpr.jaxpr, program.jaxpr.consts, [*inputs, *frozen, *example], (), ()
    )
    loss, *aux = (jnp.asarray(walk.value(output, "")) for output in outputs)
    return loss, aux, walk.kept


def _is_real(equation: jex_core.JaxprEqn) -> bool:
    results: list[Any] = [variable.aval for variable in equation.outvars]
    return all(jnp.issubdtype(result.dtype, jnp.floating) for result in results)


class _Scan(NamedTuple):
    """A scan around an equation."""

    place: Place
    length: int


class _Walk:
    """One pass over a program, through the jaxprs inside it.

    Without taps it is a survey: sites are noted. With taps, they are tapped.
    """

    def __init__(self, found: Survey, taps: dict[Place, Any] | None, at_site: AtSite = tapped):
        self.found = found
        self.taps = taps
        self.at_site = at_site
        self.kept: dict[Place, Any] = {}

    def jaxpr(
        self,
        jaxpr: jex_core.Jaxpr,
        consts: Sequence[Any],
        inputs: Sequence[Any],
        place: Place,
        scans: tuple[_Scan, ...],
    ) -> list[Any]:
        """Evaluates a jaxpr whose inputs are values or views; so are its outputs."""
        environment: dict[Any, Any] = dict(
            zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True)
        )
        for index, equation in enumerate(jaxpr.eqns):
            read = [
                v.val if isinstance(v, jex_core.Literal) else environment[v]
                for v in equation.invars
            ]
            outputs = self.equation(equation, read, (*place, index), scans)
            environment.update(zip(equation.outvars, outputs, strict=True))
        return [v.val if isinstance(v, jex_core.Literal) else environment[v] for v in jaxpr.outvars]

    def equation(
        self, equation: jex_core.JaxprEqn, inputs: list[Any], place: Place, scans: tuple[_Scan, ...]
    ) -> list[Any]:
        """Evaluates one equation: plainly, as a view, as a site, or by going into it."""
        if not any(isinstance(x, View) for x in inputs):
            return apply(equation, inputs)
        views = view_through(equation, inputs)
        if views is not None:
            return views
        into = _INTO.get(equation.primitive.name)
        if into is not None:
            with _scopes_of(equation):
                return into(self, equation, inputs, place, scans)
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
        return apply(equation, [self.value(x, reason) for x in inputs])

    def value(self, x: Any, reason: str) -> Any:
        """The value of an input; a view whose use no site describes makes its leaf ``whole``."""
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
        scans: tuple[_Scan, ...],
    ) -> Array:
        """Evaluates a site; notes it, or does what is to be done there."""
        view: View = inputs[operand]
        values = [x.value if isinstance(x, View) else x for x in inputs]
        if self.taps is not None and place in self.taps:
            result, self.kept[place] = self.at_site(
                self.found.sites[place], values, self.taps[place]
            )
            return result
        (result,) = apply(equation, values)
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


def _scopes_of(equation: jex_core.JaxprEqn) -> AbstractContextManager[Any]:
    """The context of an equation's line and named scopes, for the equations inside it.

    A scope around a jitted function, a scan, a jax.checkpoint is known to that equation alone.
    """
    said = equation.source_info
    scopes = source_info_util.current_name_stack() + said.name_stack
    return source_info_util.user_context(said.traceback, name_stack=scopes)


_Into: TypeAlias = Callable[
    [_Walk, jex_core.JaxprEqn, list[Any], Place, tuple[_Scan, ...]], list[Any]
]


def _inline(
    walk: _Walk,
    equation: jex_core.JaxprEqn,
    inputs: list[Any],
    place: Place,
    scans: tuple[_Scan, ...],
) -> list[Any]:
    """A jitted function is evaluated where it is called."""
    inner: jex_core.ClosedJaxpr = equation.params["jaxpr"]
    return walk.jaxpr(inner.jaxpr, inner.consts, inputs, place, scans)


def _remat(
    walk: _Walk,
    equation: jex_core.JaxprEqn,
    inputs: list[Any],
    place: Place,
    scans: tuple[_Scan, ...],
) -> list[Any]:
    """A rematerialised function stays one; what its sites keep is saved."""
    inner: jex_core.Jaxpr = equation.params["jaxpr"]

    def run(values: list[Any], taps: dict[Place, Any] | None) -> tuple[list[Any], Any]:
        inside = _Walk(walk.found, taps, walk.at_site)
        outputs = inside.jaxpr(inner, (), _with_values(inputs, values), place, scans)
        return [inside.value(x, "it leaves a jax.checkpoint") for x in outputs], inside.kept

    run = jax.checkpoint(
        run, prevent_cse=equation.params["prevent_cse"], policy=equation.params["policy"]
    )
    outputs, kept = run(_values(inputs), _taps_inside(walk, place))
    walk.kept.update(kept)
    return outputs


def _scan(
    walk: _Walk,
    equation: jex_core.JaxprEqn,
    inputs: list[Any],
    place: Place,
    scans: tuple[_Scan, ...],
) -> list[Any]:
    """A scan stays one; taps go in, and what sites keep comes out, with its other arrays."""
    params = equation.params
    inner: jex_core.ClosedJaxpr = params["jaxpr"]
    num_consts, num_carry = scan_arity(params)
    consts = inputs[:num_consts]
    carry = [
        walk.value(x, "a scan carries it") for x in inputs[num_consts : num_consts + num_carry]
    ]
    slices = [
        x._replace(over=(*x.over, place)) if isinstance(x, View) else x
        for x in inputs[num_consts + num_carry :]
    ]
    around = (*scans, _Scan(place, params["length"]))

    def body(carry: list[Any], now: tuple[list[Any], Any]) -> tuple[list[Any], Any]:
        values, taps = now
        inside = _Walk(walk.found, taps, walk.at_site)
        read = [*consts, *carry, *_with_values(slices, values)]
        outputs = inside.jaxpr(inner.jaxpr, inner.consts, read, place, around)
        outputs = [inside.value(x, "a scan returns it") for x in outputs]
        return outputs[:num_carry], (outputs[num_carry:], inside.kept)

    carry, (outputs, kept) = jax.lax.scan(
        body,
        carry,
        (_values(slices), _taps_inside(walk, place)),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    walk.kept.update(kept)
    return [*carry, *outputs]


_INTO: dict[str, _Into] = {
    "jit": _inline,
    "pjit": _inline,
    "closed_call": _inline,
    "checkpoint": _remat,
    "remat2": _remat,
    "scan": _scan,
}


def _values(inputs: list[Any]) -> list[Any]:
    return [x.value if isinstance(x, View) else x for x in inputs]


def _with_values(inputs: list[Any], values: list[Any]) -> list[Any]:
    return [
        x._replace(value=value) if isinstance(x, View) else value
        for x, value in zip(inputs, values, strict=True)
    ]


def _taps_inside(walk: _Walk, place: Place) -> dict[Place, Any] | None:
    if walk.taps is None:
        return None
    return {inner: tap for inner, tap in walk.taps.items() if inner[: len(place)] == place}
