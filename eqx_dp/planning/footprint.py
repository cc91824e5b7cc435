"""The bytes that a traced program holds at its worst moment, by formula.

The program is walked through as a compiler reads it. What is computed entry by entry, or only moved
about, is fused into what uses it and never stored, unless it is costly and wanted twice, or wanted
by a contraction, a loop or a branch. What is stored lives from the operation that makes it to the
last one that reads it. The body of a loop is looked at once, and what it holds comes on top of what
the loop carries and stacks up; of branches the largest counts.

XLA's CPU compiler does two things of its own, which count for most of what it holds:

1. It has no arithmetic on 16-bit floats. What enters a contraction is first stored in float32, and
   so is its result; arrays whose slices a loop computes with are widened as a whole, before it.
2. It runs whatever is ready (`breadth_first`), where others look for an order that holds less.

Sharding: inside of a ``shard_map`` shapes are those of a device. Over other axes arrays are spread
as their types, constraints and arguments say; an operation entry by entry spreads its result like
the largest operand, and so does a contraction, unless both operands are spread: then that is taken
to be the dimension that is summed over.
"""

import copy
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.extend.core as jex_core

from ..precision.stages import stage_of
from ..programs import scan_arity
from .liveness import Buffer, Held, Operation, breadth_first, worst_moment
from .primitives import (
    CALLS,
    COSTLY,
    ELEMENTWISE,
    IN_PLACE,
    MATRIX,
    MOVING,
    RENAMING,
    reads_in_a_loop,
)
from .values import SMALL, Value, axes_of_spec, axes_of_type, bytes_of, is_key, is_narrow

_PURPOSES = {
    "probe": "activations",
    "loss": "activations",
    "norm": "per_example",
    "sum": "gradients",
    "microbatches": "gradients",
    "devices": "gradients",
    "draw": "noise",
    "bits": "noise",
    "noise": "noise",
}
OTHER = "other"


class Footprint:
    """Walks through programs on one kind of device.

    Args:
        platform: ``"cpu"``, or another that computes with 16-bit floats as they are.
        mesh: the lengths of the mesh's axes.
        sums: shapes and dtypes of the trained parameters' gradients, to tell them by.
    """

    def __init__(
        self,
        platform: str,
        mesh: Mapping[str, int],
        sums: Iterable[tuple[tuple[int, ...], Any]] = (),
    ):
        self.is_cpu = platform == "cpu"
        self.mesh = mesh
        self.sums = frozenset(sums)
        self._stored: dict[jex_core.Jaxpr, frozenset[int]] = {}

    def held(
        self, program: jex_core.ClosedJaxpr, arguments: Sequence[tuple[frozenset[str], bool]]
    ) -> Held:
        """Bytes on a device beside arguments and results, by what they are for.

        Args:
            program: traced.
            arguments: of each, the mesh axes it is spread over, and whether it is a parameter.
        """
        inputs = [
            self.given(aval, axes, is_parameter)
            for aval, (axes, is_parameter) in zip(program.in_avals, arguments, strict=True)
        ]
        body, results = self.body(program.jaxpr, inputs, "")
        return body.worst(results)

    def body(
        self, jaxpr: jex_core.Jaxpr, inputs: list[Value], scope: str
    ) -> tuple["_Body", list[Value]]:
        """A body's operations and results. The first of two walks sees who is read twice."""
        if jaxpr not in self._stored:
            self._stored[jaxpr] = self._walked(jaxpr, inputs, scope, frozenset())[0].wanted_twice()
        return self._walked(jaxpr, inputs, scope, self._stored[jaxpr])

    def _walked(
        self, jaxpr: jex_core.Jaxpr, inputs: list[Value], scope: str, stored: frozenset[int]
    ) -> tuple["_Body", list[Value]]:
        body = _Body(self, stored)
        results = body.program(jaxpr, [copy.copy(value) for value in inputs], scope)
        for value in results:
            if value.bytes:
                body.store(value, OTHER)
        return body, results

    def parts(self, axes: frozenset[str]) -> int:
        """How many parts there are over so many axes."""
        return math.prod(self.mesh.get(axis, 1) for axis in axes)

    def spread(self, aval: Any, axes: frozenset[str]) -> Value:
        """A value that is nowhere yet."""
        axes = axes_of_type(aval) or axes
        return Value(aval, axes, self.parts(axes))

    def given(
        self, aval: Any, axes: frozenset[str], is_parameter: bool = False, purpose: str = ""
    ) -> Value:
        """A value whose memory counts outside."""
        value = self.spread(aval, axes)
        value.buffer = Buffer(value.bytes, purpose, is_own=False)
        value.is_parameter, value.purpose = is_parameter, purpose
        return value


class _Body:
    """The operations of a body, that of the whole program, a loop or a branch."""

    def __init__(self, footprint: Footprint, stored: frozenset[int]):
        self.footprint = footprint
        self.stored = stored
        self.operations: list[Operation] = []
        self.readers: defaultdict[int, set[int]] = defaultdict(set)
        self.count = 0

    def worst(
        self, results: list[Value], carried: Sequence[Buffer] = (), has_room: bool = True
    ) -> Held:
        """What it holds at its worst moment."""
        order = breadth_first(self.operations) if self.footprint.is_cpu else self.operations
        return worst_moment(order, [value.buffer for value in results], carried, has_room)

    def wanted_twice(self) -> frozenset[int]:
        """The costly operations that more than one operation wants the result of."""
        return frozenset(heavy for heavy, readers in self.readers.items() if len(readers) > 1)

    # Walking.

    def program(
        self,
        jaxpr: jex_core.Jaxpr,
        inputs: Sequence[Value],
        scope: str,
        wanted: Sequence[frozenset[str]] = (),
    ) -> list[Value]:
        """From the values of the inputs to those of the results.

        Args:
            jaxpr: the program.
            inputs: their values.
            scope: the name stack of what is around it.
            wanted: the axes over which results will be spread, as far as known.
        """
        wants = _wanted(jaxpr, wanted)
        values: dict[Any, Value] = {
            v: self.footprint.given(v.aval, frozenset()) for v in jaxpr.constvars
        }
        values.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Value:
            return Value(atom.aval) if isinstance(atom, jex_core.Literal) else values[atom]

        for equation in jaxpr.eqns:
            results = self.equation(equation, list(map(read, equation.invars)), scope, wants)
            values.update(zip(equation.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars))

    def equation(
        self,
        equation: jex_core.JaxprEqn,
        inputs: list[Value],
        scope: str,
        wants: Mapping[Any, frozenset[str]],
    ) -> list[Value]:
        """From the values of an equation's operands to those of its results."""
        name = equation.primitive.name
        scope = f"{scope}/{equation.source_info.name_stack}"
        if name in CALLS and CALLS[name] in equation.params:
            inner = equation.params[CALLS[name]]
            wanted = [wants.get(variable, frozenset[str]()) for variable in equation.outvars]
            return self.program(getattr(inner, "jaxpr", inner), inputs, scope, wanted)
        into = {
            "shard_map": self.shard_map,
            "scan": self.scan,
            "while": self.while_loop,
            "cond": self.cond,
        }.get(name)
        if into is not None:
            return into(equation, inputs, scope)
        purpose = _PURPOSES.get(stage_of(scope) or "", OTHER)
        axes = _axes_like(equation, inputs) or wants.get(equation.outvars[0], frozenset())
        if name == "optimization_barrier":
            return [self.behind_barrier(value, purpose) for value in inputs]
        if name in ELEMENTWISE or name in MOVING:
            return [self.fused(equation, inputs, axes, purpose)]
        if name == "random_bits":
            return [self.random_bits(equation, inputs, axes, purpose)]
        return self.stored_results(equation, inputs, axes, purpose)

    # Values that stay in a loop, and those that are stored.

    def fused(
        self, equation: jex_core.JaxprEqn, inputs: list[Value], axes: frozenset[str], purpose: str
    ) -> Value:
        """The result of an operation that is computed where it is wanted."""
        name = equation.primitive.name
        value = self.footprint.spread(equation.outvars[0].aval, axes)
        first = inputs[0] if inputs else None
        value.is_parameter = _is_parameter(inputs)
        value.purpose = purpose if purpose != OTHER else ""
        if name in RENAMING and first is not None and first.buffer is not None:
            return _renamed(first, value)
        value.sources = frozenset[Buffer]().union(*(x.read() for x in inputs))
        value.heavy = frozenset[int]().union(*(x.heavy for x in inputs if x.buffer is None))
        if name in ELEMENTWISE:
            value.aligned = frozenset[Buffer]().union(*(x.read_aligned() for x in inputs))
        large = [x for x in inputs if bytes_of(x.aval) > SMALL]
        value.is_cheap = (
            len(large) == 1
            and (large[0].buffer is not None or large[0].is_cheap)
            and large[0].bytes <= value.bytes
            and name not in COSTLY
            and name not in RENAMING
            and not value.heavy
        )
        if name in COSTLY and value.bytes > SMALL:
            self.count += 1
            value.heavy |= {self.count}
            if self.count in self.stored:
                self.store(value, purpose)
                value.heavy = frozenset()
        return value

    def emit(
        self,
        reads: Iterable[Buffer],
        writes: list[Buffer],
        inside: Held | None = None,
        takes_over: Iterable[tuple[Buffer, Buffer]] = (),
        is_late: bool = False,
        purpose: str = "",
    ) -> None:
        """Notes an operation."""
        alike = [(new, old) for new, old in takes_over if new.size == old.size]
        reads = list(reads)
        if purpose in ("per_example", "gradients"):  # held for norms and sums
            for buffer in reads:
                if buffer.purpose == "activations":
                    buffer.purpose = "per_example"
        held = Counter[str]() if inside is None else inside
        self.operations.append(Operation(reads, writes, held, alike, is_late))

    def note(self, value: Value) -> None:
        """Notes that the next operation reads a value."""
        if value.buffer is None:
            for heavy in value.heavy:
                self.readers[heavy].add(len(self.operations))

    def purpose(self, value: Value, purpose: str) -> str:
        """What a value is stored for."""
        if value.is_parameter:
            return "parameters"
        purpose = value.purpose or purpose
        is_sum = (getattr(value.aval, "shape", None), value.aval.dtype) in self.footprint.sums
        return "gradients" if is_sum and purpose in ("activations", OTHER) else purpose

    def store(self, value: Value, purpose: str) -> Buffer:
        """Stores a value, if it is not in memory."""
        if value.buffer is None:
            self.note(value)
            value.buffer = Buffer(value.bytes, self.purpose(value, purpose))
            takes_over = [(value.buffer, old) for old in value.aligned]
            self.emit(value.sources, [value.buffer], takes_over=takes_over, purpose=purpose)
        return value.buffer

    def operand(self, value: Value, purpose: str, computes: bool = True) -> Buffer:
        """Stores a value for those who compute with it; on CPU in no less than float32."""
        if not (computes and self.footprint.is_cpu and is_narrow(value.aval)):
            return self.store(value, purpose)
        if value.wide is None:
            self.note(value)
            size = value.bytes * 4 // value.aval.dtype.itemsize
            value.wide = Buffer(size, self.purpose(value, purpose))
            self.emit(value.read(), [value.wide], purpose=purpose)
        return value.wide

    def behind_barrier(self, value: Value, purpose: str) -> Value:
        """What is behind a barrier is read from memory, whatever it was made of."""
        if value.bytes < SMALL:
            return value
        buffer = self.store(value, purpose)
        return Value(
            value.aval,
            value.axes,
            value.parts,
            buffer,
            None if value.is_cheap else value.wide,
            is_parameter=value.is_parameter,
            purpose=value.purpose,
        )

    def stored_results(
        self, equation: jex_core.JaxprEqn, inputs: list[Value], axes: frozenset[str], purpose: str
    ) -> list[Value]:
        """The results of an operation that is a loop of its own."""
        name = equation.primitive.name
        if reads_in_a_loop(name):
            for value in inputs:
                self.note(value)
            reads = frozenset[Buffer]().union(*(value.read() for value in inputs))
        else:
            large = [value for value in inputs if value.bytes]
            reads = {self.operand(value, purpose, name in MATRIX) for value in large}
        results = [self.footprint.spread(variable.aval, axes) for variable in equation.outvars]
        for value in results:
            value.purpose = purpose if purpose != OTHER else ""
            is_wide = name in MATRIX and self.footprint.is_cpu and is_narrow(value.aval)
            size = value.bytes * (4 // value.aval.dtype.itemsize if is_wide else 1)
            buffer = Buffer(size, self.purpose(value, purpose))
            if is_wide:  # the rounding is fused into what reads it
                value.wide, value.sources = buffer, frozenset([buffer])
                value.aligned = value.sources
            else:
                value.buffer = buffer
        writes = [buffer for value in results if (buffer := value.buffer or value.wide)]
        takes_over = [(w, r) for w in writes for r in reads] if name in IN_PLACE else ()
        self.emit(reads, writes, takes_over=takes_over, purpose=purpose)
        return results

    def random_bits(
        self, equation: jex_core.JaxprEqn, inputs: list[Value], axes: frozenset[str], purpose: str
    ) -> Value:
        """Threefry: two counters a number, encrypted by a loop; the bits are made of both.

        A round of the loop finds both words anew while it reads the old ones.
        """
        value = self.footprint.spread(equation.outvars[0].aval, axes)
        value.purpose = purpose if purpose != OTHER else ""
        counters, words = (
            [Buffer(value.bytes, self.purpose(value, purpose)) for _ in range(2)] for _ in range(2)
        )
        inside = Counter({self.purpose(value, purpose): 2 * value.bytes})
        self.emit([self.store(x, purpose) for x in inputs if x.bytes], counters)
        self.emit(counters, words, inside, takes_over=zip(words, counters, strict=True))
        value.sources = value.aligned = frozenset(words)
        return value

    # Programs in equations.

    def shard_map(
        self, equation: jex_core.JaxprEqn, inputs: list[Value], scope: str
    ) -> list[Value]:
        """A program on each device; what it needs all of is gathered first."""
        params = equation.params
        manual = frozenset(params["manual_axes"]) if "manual_axes" in params else None
        jaxpr: jex_core.Jaxpr = getattr(params["jaxpr"], "jaxpr", params["jaxpr"])
        manual = manual or frozenset(params.get("newly_manual_axes") or self.footprint.mesh)
        inner: list[Value] = []
        for value, spec, variable in zip(inputs, params["in_specs"], jaxpr.invars, strict=True):
            wanted = axes_of_spec(spec)
            here = self.footprint.spread(variable.aval, value.axes - manual)
            here.is_parameter, here.purpose = value.is_parameter, value.purpose
            here.buffer = self.store(value, OTHER)
            if value.axes & manual != wanted and value.bytes > SMALL:
                here.buffer = self.gathered(here, here.buffer)
            inner.append(here)
        results = self.program(jaxpr, inner, scope)
        outside: list[Value] = []
        for value, spec, variable in zip(
            results, params["out_specs"], equation.outvars, strict=True
        ):
            found = copy.copy(value)
            found.aval, found.axes = variable.aval, value.axes | axes_of_spec(spec)
            found.parts = self.footprint.parts(found.axes)
            outside.append(found)
        return outside

    def gathered(self, value: Value, part: Buffer) -> Buffer:
        """The whole of what devices hold parts of; on CPU it comes in float32."""
        whole = Buffer(value.bytes, self.purpose(value, OTHER))
        inside = Counter[str]()
        if self.footprint.is_cpu and is_narrow(value.aval):
            inside[whole.purpose] = value.bytes * 4 // value.aval.dtype.itemsize
        self.emit([part], [whole], inside)
        return whole

    def scan(self, equation: jex_core.JaxprEqn, inputs: list[Value], scope: str) -> list[Value]:
        """A loop over slices, which may stack up results."""
        params = equation.params
        body: jex_core.Jaxpr = params["jaxpr"].jaxpr
        num_consts, num_carry = scan_arity(params)
        first = num_consts + num_carry
        purpose = self.purpose_here(equation, scope)
        computed = _computed_with(body)
        consts, carry, xs = inputs[:num_consts], inputs[num_consts:first], inputs[first:]
        reads: set[Buffer] = {self.store(x, purpose) for x in consts if x.bytes > SMALL}
        for x, variable in zip(xs, body.invars[first:], strict=True):
            if x.bytes > SMALL and not x.is_constant:
                reads.add(self.operand(x, purpose, variable in computed))
        slices = [
            self.slice_of(x, variable.aval)
            for x, variable in zip(xs, body.invars[first:], strict=True)
        ]
        return self.loop(equation, body, consts, carry, slices, reads, scope)

    def while_loop(
        self, equation: jex_core.JaxprEqn, inputs: list[Value], scope: str
    ) -> list[Value]:
        """A loop whose end is not known."""
        params = equation.params
        skip, num_consts = params["cond_nconsts"], params["body_nconsts"]
        consts, carry = inputs[skip : skip + num_consts], inputs[skip + num_consts :]
        purpose = self.purpose_here(equation, scope)
        reads = {self.store(x, purpose) for x in consts if x.bytes > SMALL}
        return self.loop(equation, params["body_jaxpr"].jaxpr, consts, carry, [], reads, scope)

    def loop(
        self,
        equation: jex_core.JaxprEqn,
        body: jex_core.Jaxpr,
        consts: list[Value],
        carry: list[Value],
        slices: list[Value],
        reads: set[Buffer],
        scope: str,
    ) -> list[Value]:
        """Any loop: what it carries is one piece of memory, where a step finds and leaves it."""
        purpose = self.purpose_here(equation, scope)
        scope = f"{scope}/{equation.source_info.name_stack}"
        footprint = self.footprint
        inner = [footprint.given(x.aval, x.axes, x.is_parameter, x.purpose) for x in consts]
        carried = [footprint.given(x.aval, x.axes, False, x.purpose) for x in carry]
        inside, results = footprint.body(body, [*inner, *carried, *slices], scope)
        held = inside.worst(results, [x.buffer for x in carried if x.buffer])
        found: list[Value] = []
        takes_over: list[tuple[Buffer, Buffer]] = []
        for index, (variable, result) in enumerate(zip(equation.outvars, results, strict=True)):
            start = carry[index] if index < len(carry) else None
            value = footprint.spread(variable.aval, result.axes)
            value.purpose = (start.purpose if start else "") or result.purpose
            value.buffer = Buffer(value.bytes, self.purpose(value, purpose))
            found.append(value)
            if start is not None and not start.is_constant:
                reads |= start.read()
                takes_over += [(value.buffer, old) for old in start.read_aligned()]
            elif value.bytes > SMALL:  # starts as zeros, which are there as soon as they can be
                zeros = Buffer(value.bytes, value.buffer.purpose)
                self.emit([], [zeros])
                reads.add(zeros)
                takes_over.append((value.buffer, zeros))
        self.emit(reads, [x.buffer for x in found if x.buffer], held, takes_over)
        return found

    def slice_of(self, value: Value, aval: Any) -> Value:
        """What a step of a loop sees of an array that is gone through slice by slice."""
        found = self.footprint.spread(aval, value.axes)
        found.is_parameter, found.purpose = value.is_parameter, value.purpose
        if not value.is_constant:
            found.sources = frozenset([Buffer(0, found.purpose, is_own=False)])
        return found

    def cond(self, equation: jex_core.JaxprEqn, inputs: list[Value], scope: str) -> list[Value]:
        """Branches, of which the largest counts."""
        operands, purpose = inputs[1:], self.purpose_here(equation, scope)
        computed = _in_every_branch(equation)
        reads = {
            self.operand(x, purpose, always)
            for x, always in zip(operands, computed, strict=True)
            if x.bytes > SMALL
        }
        scope = f"{scope}/{equation.source_info.name_stack}"
        largest, results = Counter[str](), list[Value]()
        for branch in equation.params["branches"]:
            inner = [
                self.footprint.given(x.aval, x.axes, x.is_parameter, x.purpose) for x in operands
            ]
            for here, x, always in zip(inner, operands, computed, strict=True):
                if always and x.wide is not None:
                    here.wide = Buffer(x.wide.size, x.purpose, is_own=False)
            body, found = self.footprint.body(branch.jaxpr, inner, scope)
            held = body.worst(found, has_room=False)
            if not results or held.total() > largest.total():
                largest, results = held, found
        values: list[Value] = []
        for variable, result in zip(equation.outvars, results, strict=True):
            value = self.footprint.spread(variable.aval, result.axes)
            value.purpose = result.purpose
            value.buffer = Buffer(value.bytes, self.purpose(value, purpose))
            values.append(value)
        self.emit(reads, [x.buffer for x in values if x.buffer], largest, is_late=True)
        return values

    def purpose_here(self, equation: jex_core.JaxprEqn, scope: str) -> str:
        """What an equation is for."""
        stage = stage_of(f"{scope}/{equation.source_info.name_stack}")
        return _PURPOSES.get(stage or "", OTHER)


def _renamed(value: Value, as_: Value) -> Value:
    found = copy.copy(value)
    found.aval = as_.aval
    return found


def _is_parameter(inputs: list[Value]) -> bool:
    large = [x for x in inputs if x.bytes > SMALL or x.is_parameter]
    return bool(large) and all(x.is_parameter for x in large)


def _axes_like(equation: jex_core.JaxprEqn, inputs: list[Value]) -> frozenset[str]:
    """Over which axes of the mesh a result is spread, as far as its operands tell."""
    name = equation.primitive.name
    if name == "sharding_constraint":
        spec = getattr(equation.params["sharding"], "spec", None)
        return frozenset() if spec is None else axes_of_spec(spec)
    if name in MATRIX:
        one, other = (x.axes for x in inputs[:2])
        return one ^ other
    size = max((bytes_of(v.aval) for v in equation.outvars), default=0)
    alike = [x for x in inputs if x.axes and 4 * bytes_of(x.aval) >= size and not is_key(x.aval)]
    largest = max(alike, key=lambda x: bytes_of(x.aval), default=None)
    return frozenset() if largest is None else largest.axes


def _wanted(
    jaxpr: jex_core.Jaxpr, of_results: Sequence[frozenset[str]]
) -> dict[Any, frozenset[str]]:
    """Over which axes values will be spread, by the constraints on what is made of them."""
    pairs = zip(jaxpr.outvars, of_results, strict=False)
    found = {v: axes for v, axes in pairs if axes and not isinstance(v, jex_core.Literal)}
    for equation in reversed(jaxpr.eqns):
        name = equation.primitive.name
        if not (name in ELEMENTWISE or name in RENAMING or name in CALLS):
            continue
        (result, *_) = equation.outvars
        is_said = name in ("reshard", "sharding_constraint")
        axes = (_axes_like(equation, []) or axes_of_type(result.aval)) if is_said else None
        axes = axes or found.get(result, frozenset[str]())
        for v in equation.invars if axes and name not in CALLS else ():
            alike = getattr(v.aval, "shape", None) == getattr(result.aval, "shape", None)
            if alike and not isinstance(v, jex_core.Literal):
                found.setdefault(v, axes)
    return found


def _computed_with(jaxpr: jex_core.Jaxpr) -> set[Any]:
    """The inputs that a body computes with, and does not only hand on to branches or loops."""
    found: set[Any] = set()
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "while":
            continue
        used = equation.invars
        if name == "cond":
            always = _in_every_branch(equation)
            used = [v for v, it in zip(equation.invars[1:], always, strict=True) if it]
        found |= {v for v in used if not isinstance(v, jex_core.Literal)}
    return found


def _in_every_branch(equation: jex_core.JaxprEqn) -> list[bool]:
    """Of each operand whether every branch computes with it: then a cast is moved out of them."""
    branches = [branch.jaxpr for branch in equation.params["branches"]]
    computed = [_computed_with(branch) for branch in branches]
    return [
        all(b.invars[i] in found for b, found in zip(branches, computed, strict=True))
        for i in range(len(equation.invars) - 1)
    ]
