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
from jaxtyping import Bool, Int

from .inside import closed, equations, open_jaxpr, programs_of

_WINDOW = 4
"""How many equations in a row have to come again for a distance to be thought of."""

_DISTANCES = 16
"""How many distances are tried, and how often rows are looked for."""

_CALL = 6
"""How many equations cost as much as a call of a program."""

_PLAIN = frozenset(
    value
    for name, value in vars(jax_primitives).items()
    if name.endswith("_p") and not name.startswith("custom_")
)
"""Primitives that say all that they do: no rule and no library stands behind them."""

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
    jaxpr: Any = open_jaxpr(program)
    calls = {} if _holds_float16(jaxpr) else _calls(jaxpr)
    new, places, rest = list[jex_core.JaxprEqn](), list[tuple[int, ...]](), 0
    for index, equation in enumerate(jaxpr.eqns):
        if call := calls.get(index):
            rest = len(open_jaxpr(call.params["jaxpr"]).eqns)
            places += [(len(new), i) for i in range(rest)]
            new.append(call)
        elif rest <= 0:
            places.append((len(new),))
            new.append(equation)
        rest -= 1
    if not calls:
        return program, tuple(places)
    changed = jaxpr.replace(eqns=new)
    # In JAX 0.11 a closed program is an open one with constants, and both are one class.
    result = changed if jaxpr is program else jex_core.ClosedJaxpr(changed, program.consts)
    return result, tuple(places)


class _Row(NamedTuple):
    """Some equations of a program, one behind the other.

    Attributes:
        start: the index of the first.
        operands: what they take from outside, in the order in which it is needed.
        sources: for everything that they need, in order: which operand, or which result of which
            equation in the row. Equal for rows that are equal.
        results: which results of which equations are needed behind the row.
    """

    start: int
    operands: list[Any]
    sources: tuple[int | tuple[int, int], ...]
    results: frozenset[tuple[int, int]]


def _calls(jaxpr: jex_core.Jaxpr) -> dict[int, jex_core.JaxprEqn]:
    """Calls in the place of rows of equations, by where the rows start."""
    known = dict[Any, int]()
    labels = np.array([known.setdefault(_label(one), len(known)) for one in jaxpr.eqns], int)
    # Which equation needs a variable last; one behind all where it is a result of the program.
    last = {x: index for index, equation in enumerate(jaxpr.eqns) for x in _needed(equation)}
    last |= dict.fromkeys(_variables(jaxpr.outvars), len(jaxpr.eqns))
    calls = dict[int, jex_core.JaxprEqn]()
    for starts, size in _repeated(labels, _alive(jaxpr, last)):
        alike: dict[Any, list[_Row]] = {}
        for start in starts:
            row = _row(jaxpr, last, start, size)
            alike.setdefault(row.sources, []).append(row)
        for rows in alike.values():
            if len(rows) > 1:
                calls |= _calls_of(jaxpr, rows, size)
    return calls


def _row(jaxpr: jex_core.Jaxpr, last: dict[Any, int], start: int, size: int) -> _Row:
    row = jaxpr.eqns[start : start + size]
    made = {
        variable: (index, place)
        for index, equation in enumerate(row)
        for place, variable in enumerate(equation.outvars)
    }
    needed = [variable for equation in row for variable in _needed(equation)]
    operands = {variable: None for variable in needed if variable not in made}
    sources = {**{variable: i for i, variable in enumerate(operands)}, **made}
    results = {at for variable, at in made.items() if last.get(variable, -1) >= start + size}
    return _Row(start, list(operands), tuple(map(sources.__getitem__, needed)), frozenset(results))


def _calls_of(
    jaxpr: jex_core.Jaxpr, rows: Sequence[_Row], size: int
) -> dict[int, jex_core.JaxprEqn]:
    """Calls of one program in the place of equal rows."""
    results = sorted(frozenset[tuple[int, int]]().union(*(row.results for row in rows)))

    def made(row: _Row) -> list[Any]:
        return [jaxpr.eqns[row.start + index].outvars[place] for index, place in results]

    first, said = rows[0], jex_core.DebugInfo("repeated", "layer", None, None)
    its = jaxpr.eqns[first.start : first.start + size]
    body = jex_core.Jaxpr((), first.operands, made(first), its, frozenset(), debug_info=said)
    call, calls = call_of(closed(body)), dict[int, jex_core.JaxprEqn]()
    for row in rows:
        # The line of a row is that of its first equation; names of scopes are inside.
        line = jaxpr.eqns[row.start].source_info.traceback
        calls[row.start] = call.replace(
            invars=row.operands,
            outvars=made(row),
            source_info=call.source_info.replace(traceback=line),
        )
    return calls


def call_of(body: jex_core.ClosedJaxpr) -> jex_core.JaxprEqn:
    """An equation that calls a program."""

    def repeated(*inputs: Any) -> list[Any]:
        return [jnp.zeros(x.shape, x.dtype) for x in body.out_avals]

    (call,) = jax.make_jaxpr(jax.jit(repeated))(*body.in_avals).jaxpr.eqns
    return call.replace(params={**call.params, "jaxpr": body})


def _alive(jaxpr: jex_core.Jaxpr, last: dict[Any, int]) -> Int[np.ndarray, " place"]:
    """Ahead of every equation, how many results of those before are still needed."""
    changes = np.zeros(len(jaxpr.eqns) + 2, int)
    for index, equation in enumerate(jaxpr.eqns):
        for variable in equation.outvars:
            if variable in last:
                changes[index + 1] += 1
                changes[last[variable] + 1] -= 1
    return np.cumsum(changes)


def _repeated(
    labels: Int[np.ndarray, " equation"], alive: Int[np.ndarray, " place"]
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
            for size in _distances(np.where(free, labels, -1).tolist())
            for starts in _runs(labels, free, alive, size)
            if (saved := (len(starts) - 1) * size - len(starts) * _CALL) > 0
        ]
        if not found:
            return
        _, starts, size = max(found, key=lambda its: its[0])
        yield starts, size
        free[starts[0] : starts[-1] + size] = False


def _distances(labels: list[int]) -> list[int]:
    """How far apart the same windows stand: the most frequent distances."""
    found, before = Counter[int](), dict[tuple[int, ...], int]()
    for index in range(len(labels) - _WINDOW + 1):
        window = tuple(labels[index : index + _WINDOW])
        if -1 not in window:
            if window in before:
                found[index - before[window]] += 1
            before[window] = index
    return [distance for distance, _ in found.most_common(_DISTANCES)]


def _runs(
    labels: Int[np.ndarray, " equation"],
    free: Bool[np.ndarray, " equation"],
    alive: Int[np.ndarray, " place"],
    size: int,
) -> Iterator[list[int]]:
    """Where rows of a size start that follow each other."""
    again = (labels[size:] == labels[:-size]) & free[size:] & free[:-size]
    edges = np.flatnonzero(np.diff([False, *again.tolist(), False]))
    for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        count, slack = (end - begin) // size + 1, (end - begin) % size
        if count > 1 and free[begin : end + size].all():
            offsets = size * np.arange(count + 1)
            needed = [int(alive[begin + shift + offsets].sum()) for shift in range(slack + 1)]
            first = begin + int(np.argmin(needed))
            yield (first + offsets[:-1]).tolist()


def _label(equation: jex_core.JaxprEqn) -> Any:
    """What tells an equation from others; of one that is like no other, itself."""
    if equation.effects:
        return id(equation)
    try:
        found = (
            equation.primitive,
            tuple(map(_operand, equation.invars)),
            # The type says whether a result is dropped.
            tuple((type(variable), variable.aval) for variable in equation.outvars),
            tuple((name, _value(value)) for name, value in sorted(equation.params.items())),
            equation.source_info.name_stack,
            equation.ctx,
            () if _is_plain(equation) else _files(equation),
        )
        hash(found)
    except TypeError:  # a parameter that cannot be compared, a literal that is no number
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


def _is_plain(equation: jex_core.JaxprEqn) -> bool:
    """Whether JAX's own primitives say all that an equation does."""
    inner = (one for program in programs_of(equation) for one in equations(program))
    return all(one.primitive in _PLAIN for one in itertools.chain([equation], inner))


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
    made = (one.outvars for one in equations(jaxpr))
    variables = itertools.chain(jaxpr.constvars, jaxpr.invars, *made)
    return any(getattr(variable.aval, "dtype", None) == jnp.float16 for variable in variables)
