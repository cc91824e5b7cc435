"""Finding the values that depend on parameters alone: masked weights, normed ones, penalties.

Such a value is the same for every example. It is evaluated once, outside of the program of one
example, and is a *root* there, as a parameter is: its uses are found as those of a parameter.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.extend.core import primitives

from ..programs import ENTRY_BY_ENTRY, Call, Scan, evaluated, inside, interpret, named
from .carried_back import operands_wanted
from .layouts import Layout, layout_of, shape_of, through
from .program import Program
from .uses import lookup

Key: TypeAlias = tuple[int, ...]
"""Which result of which equation: its index, behind its address."""


class Entries(NamedTuple):
    """The entries of a parameter, in some order.

    Attributes:
        leaf: which parameter.
        layout: where each stands in it, slices of scans in front.
    """

    leaf: int
    layout: Layout


class Joined(NamedTuple):
    """Parameters side by side, each entry (or its negative) once, constants added or not.

    Attributes:
        axis: along which.
        parts: the parameters, no two the same.
    """

    axis: int
    parts: tuple[Entries, ...]

    def pulled_back(self, gradient: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
        """The gradient of every part, from that of the whole; `shapes` are the parameters'."""
        if len(self.parts) == 1:
            pieces = [gradient]
        else:
            sizes = [entries.layout.shape[self.axis] for entries in self.parts]
            pieces = jax.lax.split(gradient, sizes, self.axis)
        return [
            entries.layout.pulled_back(piece, shapes[entries.leaf])
            for entries, piece in zip(self.parts, pieces, strict=True)
        ]


class Derived(NamedTuple):
    """A value that depends on parameters alone.

    Attributes:
        key: where it is made.
        value: its shape and dtype, slices of scans in front.
        over: the scans that go over its slices, outermost first.
        leaves: the parameters that it depends on.
        entries: where each of its entries depends on one entry of one parameter alone, on which.
        joined: where it is parameters side by side, which.
    """

    key: Key
    value: jax.ShapeDtypeStruct
    over: tuple[Key, ...]
    leaves: frozenset[int]
    entries: Entries | None
    joined: Joined | None


class View(NamedTuple):
    """A rearranged root: as a parameter's view in `taps`, and where its entries come from."""

    root: int
    layout: Layout
    over: tuple[Key, ...]
    entries: Entries | None


class Fixed(NamedTuple):
    """A value that has no gradient, and is the same for every example.

    Attributes:
        over: the scans that go over its slices.
        key: where it is made; None where it depends on no parameter.
    """

    over: tuple[Key, ...] = ()
    key: Key | None = None


Fact: TypeAlias = View | Fixed | None
"""What is known of a value; None of one that depends on the example, or is to be taken so."""


class Search(NamedTuple):
    """One pass over a program, on facts.

    Attributes:
        sizes: how many entries each parameter has; roots behind them are derived.
        derived: those.
        met: the keys of values that meet data, with the scans that go over their slices.
        moved: the addresses of equations that are evaluated outside alone.
        data: those of equations whose results are data though no operand is, or not every one.
    """

    sizes: tuple[int, ...]
    derived: list[Derived]
    met: dict[Key, tuple[Key, ...]]
    moved: set[Key]
    data: set[Key]

    def program(
        self,
        program: jex_core.ClosedJaxpr,
        inputs: Sequence[Fact],
        address: Key = (),
        scans: tuple[tuple[Key, int], ...] = (),
    ) -> list[Fact]:
        """The facts about a program's results, from those about its inputs."""
        indices = itertools.count()

        def of_equation(equation: jex_core.JaxprEqn, inputs: list[Fact]) -> Sequence[Fact]:
            return self.equation(equation, inputs, (*address, next(indices)), scans)

        consts: list[Fact] = [Fixed()] * len(program.jaxpr.constvars)
        return interpret(program.jaxpr, consts, inputs, of_equation, lambda _: Fixed())

    def equation(
        self,
        equation: jex_core.JaxprEqn,
        inputs: list[Fact],
        address: Key,
        scans: tuple[tuple[Key, int], ...],
    ) -> Sequence[Fact]:
        """The same for an equation."""
        is_known = None not in inputs
        match inside(equation):
            case Call("jit", body):
                return self.program(body, inputs, address, scans)
            case Call("remat", body):
                outputs = self.program(body, inputs, address, scans)
                if is_known:
                    return outputs
                self.data.add(address)
                return self.meet(outputs)
            case Scan() as scan if not is_known:
                self.data.add(address)
                return self.scan(scan, inputs, address, scans)
            case _:
                pass
        if not is_known:
            self.meet(inputs)
            return [None] * len(equation.outvars)
        return self.known(equation, [x for x in inputs if x is not None], address, dict(scans))

    def scan(
        self,
        scan: Scan,
        inputs: list[Fact],
        address: Key,
        scans: tuple[tuple[Key, int], ...],
    ) -> Sequence[Fact]:
        """The same for a scan that meets data: what it carries is data."""
        consts, carry, slices = scan.split(inputs)
        self.meet(carry)
        now = [x and x._replace(over=(*x.over, address)) for x in slices]
        start = [*consts, *[None] * len(carry), *now]
        return self.meet(self.program(scan.body, start, address, (*scans, (address, scan.length))))

    def known(
        self,
        equation: jex_core.JaxprEqn,
        inputs: list[View | Fixed],
        address: Key,
        lengths: dict[Key, int],
    ) -> Sequence[Fact]:
        """The same where no operand depends on the example."""
        views = [x for x in inputs if isinstance(x, View)]
        over = tuple(scan for scan in lengths if any(scan in x.over for x in inputs))
        places = range(len(equation.outvars))
        if not views and all(isinstance(x, Fixed) and x.key is None for x in inputs):
            return [Fixed(over)] * len(places)
        if len(inputs) == 1 and views:
            found = _rearranged(equation, views[0])
            if found is not None:
                return found
        is_lookup = len(views) == 1 and inputs[0] is views[0] and lookup.claims(equation, 0)
        if is_lookup or equation.effects:
            # Rows keep a lookup's norm cheap, whoever says which; effects stay where they are.
            self.data.add(address)
            self.meet(inputs)
            return [None] * len(places)
        self.moved.add(address)
        keys = [(*address, place) for place in places]
        stopped = not views or not any(operands_wanted(equation, [True] * len(places)))
        avals: list[Any] = [variable.aval for variable in equation.outvars]
        return [
            Fixed(over, key)
            if stopped or not jnp.issubdtype(aval.dtype, jnp.inexact)
            else self.new(equation, inputs, key, over, lengths)
            for key, aval in zip(keys, avals, strict=True)
        ]

    def new(
        self,
        equation: jex_core.JaxprEqn,
        inputs: list[View | Fixed],
        key: Key,
        over: tuple[Key, ...],
        lengths: dict[Key, int],
    ) -> View:
        """Enters a derived value."""
        aval: Any = equation.outvars[key[-1]].aval
        stack = tuple(lengths[scan] for scan in over)
        value = jax.ShapeDtypeStruct((*stack, *aval.shape), aval.dtype, weak_type=aval.weak_type)
        views = [x for x in inputs if isinstance(x, View)]
        leaves = frozenset[int]().union(*(self.leaves(x.root) for x in views))
        entries = None
        is_whole = all(x.over == over and x.layout.shape == value.shape for x in views)
        if is_whole and _is_entry_by_entry(equation):
            entries = self.regular(_agreed([x.entries for x in views]))
        joined = self.joined(equation, inputs, over)
        self.derived.append(Derived(key, value, over, leaves, entries, joined))
        root = len(self.sizes) + len(self.derived) - 1
        return View(root, layout_of(value.shape), over, entries)

    def leaves(self, root: int) -> frozenset[int]:
        """The parameters that a root depends on."""
        if root < len(self.sizes):
            return frozenset([root])
        return self.derived[root - len(self.sizes)].leaves

    def joined(
        self, equation: jex_core.JaxprEqn, inputs: list[View | Fixed], over: tuple[Key, ...]
    ) -> Joined | None:
        """The parameters that an equation puts side by side, or adds constants to."""
        views = [x for x in inputs if isinstance(x, View)]
        parts = [Entries(x.root, x.layout) for x in views]
        name, axis = equation.primitive.name, len(over)
        if name in _SHIFTS and len(views) == 1:
            if name == "sub" and inputs[0] is not views[0]:
                ((leaf, layout),) = parts
                parts = [Entries(leaf, layout._replace(sign=-layout.sign))]
            # A number repeated into an array is no parameter as it is.
            if views[0].layout.shape[len(views[0].over) :] != shape_of(equation.outvars[0]):
                return None
        elif name in _SIDE_BY_SIDE and len(views) == len(inputs):
            axis += equation.params[_SIDE_BY_SIDE[name]]
            if name == "stack":
                parts = [
                    Entries(leaf, its._replace(axes=(*its.axes[:axis], (), *its.axes[axis:])))
                    for leaf, its in parts
                ]
        else:
            return None
        leaves = [leaf for leaf, _ in parts]
        fits = len({*leaves}) == len(leaves) and max(leaves) < len(self.sizes)
        fits = fits and all(x.over == over and x.layout.is_isometric for x in views)
        return Joined(axis, tuple(parts)) if fits and all(map(self.regular, parts)) else None

    def regular(self, entries: Entries | None) -> Entries | None:
        """Entries of a parameter, if a gradient can be brought back to it."""
        if entries is None or 0 in entries.layout.shape:
            return entries
        return entries if entries.layout.is_regular(self.sizes[entries.leaf]) else None

    def meet(self, facts: Sequence[Fact]) -> list[Fact]:
        """Notes the values that data meet; what comes of that is data."""
        for fact in facts:
            if isinstance(fact, View) and fact.root >= len(self.sizes):
                its = self.derived[fact.root - len(self.sizes)]
                self.met[its.key] = its.over
            elif isinstance(fact, Fixed) and fact.key is not None:
                self.met[fact.key] = fact.over
        return [None] * len(facts)


def search(program: Program, num_leaves: int, num_fixed: int) -> tuple[Search, list[Fact]]:
    """Goes through a loss once, on shapes; beside what is found, facts about its results.

    Args:
        program: the loss of one example.
        num_leaves: how many of its inputs, the first, are trainable leaves.
        num_fixed: how many behind those are the same for every example.
    """
    variables = program.jaxpr.jaxpr.invars
    shapes = [shape_of(variable) for variable in variables[:num_leaves]]
    found = Search(tuple(map(math.prod, shapes)), [], {}, set(), set())
    layouts = map(layout_of, shapes)
    params = [View(i, layout, (), Entries(i, layout)) for i, layout in enumerate(layouts)]
    batch = [None] * (len(variables) - num_leaves - num_fixed)
    outputs = found.program(program.jaxpr, [*params, *[Fixed()] * num_fixed, *batch])
    found.meet(outputs[:1])
    return found, outputs


def _rearranged(equation: jex_core.JaxprEqn, view: View) -> list[Fact] | None:
    """The views that an equation makes of one."""
    layouts = through(equation, view.layout, len(view.over))
    if layouts is None:
        return None
    its = view.entries
    of_leaf = None if its is None else through(equation, its.layout, len(view.over))
    return [
        view._replace(
            layout=layout,
            entries=None if its is None or of_leaf is None else its._replace(layout=of_leaf[i]),
        )
        for i, layout in enumerate(layouts)
    ]


def _agreed(found: list[Entries | None]) -> Entries | None:
    """The entries that all operands are of; signs are in the derivative."""
    first, *others = [x and x._replace(layout=x.layout._replace(sign=1)) for x in found]
    return first if all(x == first for x in others) else None


def _is_entry_by_entry(equation: jex_core.JaxprEqn, has_rule: bool = True) -> bool:
    """Whether each entry of the result depends on that at its place in every operand alone.

    Its derivative does so too: of a function with a rule of its own that is what the rule says.
    Inside of it nothing is differentiated once more (`has_rule` is false): it may call itself.
    """
    match inside(equation):
        case Call("custom_jvp") if has_rule:
            rule = _with_tangents(equation).jaxpr.eqns
            return all(_is_entry_by_entry(its, has_rule=False) for its in rule)
        case Call("jit" | "remat" | "custom_jvp", body):
            return all(_is_entry_by_entry(its, has_rule) for its in body.jaxpr.eqns)
        case None:
            pass
        case _:
            return False
    shape = shape_of(equation.outvars[0])
    if equation.primitive is primitives.broadcast_in_dim_p:
        return all(isinstance(x, jex_core.Literal) for x in equation.invars)
    fits = all(shape_of(x) in ((), shape) for x in equation.invars)
    return equation.primitive.name in ENTRY_BY_ENTRY and fits


def _with_tangents(equation: jex_core.JaxprEqn) -> jex_core.ClosedJaxpr:
    """An equation and its derivative, by its own rule."""
    avals: list[Any] = [variable.aval for variable in equation.invars]
    smooth = [i for i, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.inexact)]

    def both(values: list[Any], tangents: list[Any]) -> Any:
        def function(*moved: Any) -> list[Any]:
            changed = dict(zip(smooth, moved, strict=True))
            return evaluated(equation, [changed.get(i, x) for i, x in enumerate(values)])

        return jax.jvp(function, [values[i] for i in smooth], tangents)

    return jax.make_jaxpr(both)(avals, [avals[i] for i in smooth])


_SHIFTS = named("add add_any sub")
_SIDE_BY_SIDE = {primitives.concatenate_p.name: "dimension", "stack": "axis"}
