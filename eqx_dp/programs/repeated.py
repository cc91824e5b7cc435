"""Equations in a row that a program repeats, as calls of one program: layers that are unrolled."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives as jax_primitives

from .inside import closed, equations, open_jaxpr, programs_of

_WINDOWS = 4, 16
"""How many equations in a row have to come again for a distance to be thought of."""

_DISTANCES = 16
"""How many distances are tried."""

_CALL = 6
"""How many equations cost as much as a call of a program."""

_PLAIN = frozenset(
    value
    for name, value in vars(jax_primitives).items()
    if name.endswith("_p") and not name.startswith("custom_")
)

Places: TypeAlias = tuple[tuple[int, ...], ...]
"""Of every equation of a program its new address: its index, behind that of a call around it."""


def outlined(program: jex_core.ClosedJaxpr) -> tuple[jex_core.ClosedJaxpr, Places]:
    """A program in which rows of equations that are equal are calls of one program.

    What is done to a program by JAX is done once to one that is called many times: of a model of 24
    unrolled blocks, one block is differentiated, batched and lowered. The compiler puts the
    equations in the place of every call, so that what is compiled is as it was.

    Equations are equal if nothing but their variables, and the lines that they were written in,
    tells them apart: where it matters which library wrote one (a primitive that is not JAX's own,
    a derivative rule), the files as well. Rows are equal if their equations are, and take what they
    need from the same places in a row or from anywhere outside. None has effects. In float16
    nothing is outlined: the compiler would look at constants in a call before it knows what
    they meet.

    Args:
        program: one whose equations are to be differentiated or batched.

    Returns:
        The program, and where its equations are; an equation in a call has another equation of its
        kind for itself.
    """
    jaxpr = open_jaxpr(program)
    unchanged = program, tuple((i,) for i in range(len(jaxpr.eqns)))
    if len(jaxpr.eqns) < 2 * _CALL or _holds_float16(jaxpr):
        return unchanged
    rows = list(_rows(jaxpr))
    if not rows:
        return unchanged
    new, places = list[jex_core.JaxprEqn](), list[tuple[int, ...]]()
    for start, end, call in _all_of(rows, len(jaxpr.eqns)):
        if call is None:
            places += [(len(new) + i,) for i in range(end - start)]
            new += jaxpr.eqns[start:end]
        else:
            places += [(len(new), i) for i in range(end - start)]
            new.append(call)
    changed: Any = jaxpr.replace(eqns=new)
    # In JAX 0.11 a closed program is an open one with constants, and both are one class.
    result = changed if jaxpr is program else jex_core.ClosedJaxpr(changed, program.consts)
    return result, tuple(places)


def _all_of(
    rows: list[tuple[int, int, jex_core.JaxprEqn]], size: int
) -> Iterator[tuple[int, int, jex_core.JaxprEqn | None]]:
    """The rows that are calls, and those between them."""
    at = 0
    for start, end, call in sorted(rows, key=lambda row: row[0]):
        if at < start:
            yield at, start, None
        yield start, end, call
        at = end
    if at < size:
        yield at, size, None


def _rows(jaxpr: jex_core.Jaxpr) -> Iterator[tuple[int, int, jex_core.JaxprEqn]]:
    """Rows of equations, each with the call in its place."""
    known, plain = dict[Any, int](), dict[Any, bool]()
    labels = [known.setdefault(_label(one, plain), len(known)) for one in jaxpr.eqns]
    program = _Variables.of(jaxpr)
    for starts, size in _repeated(np.array(labels), program.alive()):
        alike: dict[Any, list[int]] = {}
        for start in starts:
            alike.setdefault(program.shape_of(start, size), []).append(start)
        for its in alike.values():
            if len(its) > 1:
                yield from program.calls(its, size)


class _Variables(NamedTuple):
    """Where a program's variables are made and needed.

    Attributes:
        jaxpr: the program.
        made: of every result of an equation, which equation's, and which of its results it is.
        last: which equation needs it last; one behind all where it is a result of the program.
    """

    jaxpr: jex_core.Jaxpr
    made: dict[Any, tuple[int, int]]
    last: dict[Any, int]

    @classmethod
    def of(cls, jaxpr: jex_core.Jaxpr) -> "_Variables":
        """Those of a program."""
        made = {
            variable: (index, place)
            for index, equation in enumerate(jaxpr.eqns)
            for place, variable in enumerate(equation.outvars)
        }
        last = {x: index for index, equation in enumerate(jaxpr.eqns) for x in _needed(equation)}
        last.update({x: len(jaxpr.eqns) for x in _variables(jaxpr.outvars)})
        return cls(jaxpr, made, last)

    def alive(self) -> np.ndarray[Any, Any]:
        """Ahead of every equation, how many results of those before are still needed."""
        changes = np.zeros(len(self.jaxpr.eqns) + 2, int)
        for variable, (index, _) in self.made.items():
            if variable in self.last:
                changes[index + 1] += 1
                changes[self.last[variable] + 1] -= 1
        return np.cumsum(changes)

    def operands(self, start: int, size: int) -> list[Any]:
        """What a row takes from outside, in the order in which it is needed."""
        found = dict[Any, None]()
        for equation in self.jaxpr.eqns[start : start + size]:
            for variable in _needed(equation):
                if not self._is_inside(variable, start):
                    found[variable] = None
        return list(found)

    def _is_inside(self, variable: Any, start: int) -> bool:
        return variable in self.made and self.made[variable][0] >= start

    def shape_of(self, start: int, size: int) -> tuple[Any, ...]:
        """Where the equations of a row take each operand from: equal for rows that are equal."""
        outside = {variable: i for i, variable in enumerate(self.operands(start, size))}

        def source(variable: Any) -> Any:
            if variable in outside:
                return outside[variable]
            index, place = self.made[variable]
            return index - start, place

        row = self.jaxpr.eqns[start : start + size]
        return tuple(tuple(map(source, _needed(equation))) for equation in row)

    def results(self, start: int, size: int) -> set[tuple[int, int]]:
        """Which results of a row's equations are needed behind it."""
        row = enumerate(self.jaxpr.eqns[start : start + size])
        return {
            (index, place)
            for index, equation in row
            for place, variable in enumerate(equation.outvars)
            if self.last.get(variable, -1) >= start + size
        }

    def calls(
        self, starts: Sequence[int], size: int
    ) -> Iterator[tuple[int, int, jex_core.JaxprEqn]]:
        """Calls of one program in the place of equal rows, from what each row takes."""
        eqns = self.jaxpr.eqns
        results = sorted(set[tuple[int, int]]().union(*(self.results(at, size) for at in starts)))

        def made(start: int) -> list[Any]:
            return [eqns[start + index].outvars[place] for index, place in results]

        first, *_ = starts
        row = eqns[first : first + size]
        name = jex_core.DebugInfo("repeated", "layer", None, None)
        body = closed(
            jex_core.Jaxpr(
                (), self.operands(first, size), made(first), row, frozenset(), debug_info=name
            )
        )
        call = _call(body)
        for start in starts:
            operands = self.operands(start, size)
            # The line of a row is that of its first equation; names of scopes are inside.
            said = call.source_info.replace(traceback=eqns[start].source_info.traceback)
            yield (
                start,
                start + size,
                call.replace(invars=operands, outvars=made(start), source_info=said),
            )


def _call(body: jex_core.ClosedJaxpr) -> jex_core.JaxprEqn:
    """An equation that calls a program."""

    def repeated(*inputs: Any) -> list[Any]:
        return [jnp.zeros(x.shape, x.dtype) for x in body.out_avals]

    (call,) = jax.make_jaxpr(jax.jit(repeated))(*body.in_avals).jaxpr.eqns
    return call.replace(params={**call.params, "jaxpr": body})


def _repeated(
    labels: np.ndarray[Any, Any], alive: np.ndarray[Any, Any]
) -> Iterator[tuple[list[int], int]]:
    """Where rows of equal labels start that stand side by side, and how long they are.

    Args:
        labels: of every equation.
        alive: ahead of every equation, how many results of those before are still needed. Rows
            begin where there are few.
    """
    free = np.ones(len(labels), bool)
    for _ in range(_DISTANCES):
        found = [
            (saved, starts, size)
            for size in _distances(np.where(free, labels, -1))
            for starts, size in _runs(labels, free, alive, size)
            if (saved := (len(starts) - 1) * size - len(starts) * _CALL) > 0
        ]
        if not found:
            return
        _, starts, size = max(found, key=lambda its: its[0])
        yield starts, size
        for start in starts:
            free[start : start + size] = False


def _distances(labels: np.ndarray[Any, Any]) -> list[int]:
    """How far apart the same windows stand, the most frequent distances, and multiples of them."""
    found = Counter[int]()
    for width in _WINDOWS:
        before: dict[tuple[int, ...], int] = {}
        values = labels.tolist()
        for index in range(len(values) - width + 1):
            window = tuple(values[index : index + width])
            if -1 in window:
                continue
            if window in before:
                found[index - before[window]] += 1
            before[window] = index
    frequent = [distance for distance, _ in found.most_common(_DISTANCES)]
    several = {distance * 2**i for distance in frequent for i in range(5)}
    return sorted(size for size in several if size <= len(labels) // 2)


def _runs(
    labels: np.ndarray[Any, Any],
    free: np.ndarray[Any, Any],
    alive: np.ndarray[Any, Any],
    size: int,
) -> Iterator[tuple[list[int], int]]:
    """Rows of a size that follow each other."""
    again = (labels[size:] == labels[:-size]) & free[size:] & free[:-size]
    edges = np.flatnonzero(np.diff([False, *again.tolist(), False]))
    for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        count = (end - begin) // size + 1
        slack = (end - begin) % size
        if count > 1 and free[begin : end + size].all():
            needed = [
                int(alive[[begin + shift + i * size for i in range(count + 1)]].sum())
                for shift in range(slack + 1)
            ]
            first = begin + int(np.argmin(needed))
            yield [first + i * size for i in range(count)], size


def _label(equation: jex_core.JaxprEqn, plain: dict[Any, bool]) -> Any:
    """What tells an equation from others; of one that is like no other, itself."""
    said = equation.source_info
    if equation.effects:
        return id(equation)
    found = (
        equation.primitive,
        tuple(map(_operand, equation.invars)),
        tuple(variable.aval for variable in equation.outvars),
        tuple((name, _value(value)) for name, value in sorted(equation.params.items())),
        said.name_stack,
        equation.ctx,
        () if _is_plain(equation, plain) else _files(equation),
    )
    try:
        hash(found)
    except TypeError:
        return id(equation)
    return found


def _operand(atom: Any) -> Any:
    if not isinstance(atom, jex_core.Literal):
        return atom.aval
    value = np.asarray(atom.val)
    return atom.aval, str(value.dtype), value.tobytes()


def _value(value: Any) -> Any:
    """A parameter, so that what is equal and not the same (1 and True, 0 and -0) differs."""
    if isinstance(value, tuple):
        return type(value), tuple(map(_value, value))
    return type(value), value.hex() if isinstance(value, float) else value


def _is_plain(equation: jex_core.JaxprEqn, known: dict[Any, bool]) -> bool:
    """Whether JAX's own primitives say all that an equation does."""
    if equation.primitive not in _PLAIN:
        return False
    programs = programs_of(equation)
    for program in programs:
        if program not in known:
            known[program] = all(_is_plain(one, known) for one in program.eqns)
    return all(known[program] for program in programs)


def _files(equation: jex_core.JaxprEqn) -> tuple[str, ...]:
    """The files of the calls that led to an equation."""
    traceback: Any = equation.source_info.traceback
    return () if traceback is None else tuple(frame.file_name for frame in traceback.frames)


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return [atom for atom in atoms if isinstance(atom, jex_core.Var)]


def _needed(equation: jex_core.JaxprEqn) -> list[Any]:
    return _variables(equation.invars)


def _holds_float16(jaxpr: jex_core.Jaxpr) -> bool:
    """Whether anything in a program is in float16."""
    variables = itertools.chain(jaxpr.invars, *(one.outvars for one in equations(jaxpr)))
    return any(getattr(variable.aval, "dtype", None) == jnp.float16 for variable in variables)
