"""A traced program as a text: equal where, and only where, what is computed is equal.

Runs are told apart by it, so it is the same in every process and on any number of devices: it holds
no address of an object, no mesh, no sharding, no name that a user gave to a function or variable.
What JAX writes itself (`str(jaxpr)`) has all of these, and leaves out the values of constants.
"""

import dataclasses
import enum
import functools
import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.core
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec, Sharding

from ..programs import (
    PLACEMENTS,
    RULE_PARAMS,
    Call,
    evaluated,
    has_rules,
    inside,
    interpret,
    literal_value,
)
from ..trees import is_key

# Of a parameter that speaks of devices, by its name or its type, nothing is written.
_OF_DEVICES = ("sharding", "mesh", "layout")
_DEVICES = (Mesh, AbstractMesh, Sharding, PartitionSpec, jax.Device)


def program_text(program: jex_core.ClosedJaxpr) -> str:
    """Writes a program, one equation a line.

    | in the text | not in the text |
    |---|---|
    | primitives and their parameters, in order | names of functions and variables, source lines |
    | shapes and dtypes | weak types |
    | values of literals and of closed-over arrays | values of arrays that are traced |
    | programs inside equations, derivative rules too | `jit` around a part |
    | | conversions of literals: the literal is written as it is converted |
    | | meshes, shardings, constraints on them, devices |

    An array of more than one number enters by its hash (BLAKE2b, 128 bits); one that this host
    does not hold whole, by its shape and dtype alone. A derivative rule that cannot be traced by
    itself, and a callback, enter by the name of the Python function.
    """
    return _closed(program.jaxpr, program.consts, with_rules=True)


def _closed(jaxpr: jex_core.Jaxpr, consts: Sequence[Any], *, with_rules: bool) -> str:
    """A program with inputs and results of its own."""
    writer = _Writer(with_rules)
    inputs = [writer.named(variable) for variable in jaxpr.invars]
    outputs = writer.run(jaxpr, consts, [name for name, _ in inputs])
    taken = ", ".join(f"{name}: {kind}" for name, kind in inputs)
    return "\n".join([f"({taken}) {{", *writer.lines, f"}} -> ({', '.join(outputs)})"])


class _Writer:
    """Walks a program, and numbers what it meets in the order in which it meets it."""

    def __init__(self, with_rules: bool):
        self.lines: list[str] = []
        self._with_rules = with_rules
        self._numbers = itertools.count()

    def named(self, variable: Any) -> tuple[str, str]:
        return f"v{next(self._numbers)}", _kind(variable.aval)

    def run(self, jaxpr: jex_core.Jaxpr, consts: Sequence[Any], inputs: list[str]) -> list[str]:
        """Writes a program's equations, and gives the names of its results."""
        return interpret(jaxpr, list(map(_value, consts)), inputs, self._equation, _literal)

    def _equation(self, equation: jex_core.JaxprEqn, operands: list[str]) -> list[str]:
        name = equation.primitive.name
        if name in PLACEMENTS:
            return operands
        match inside(equation):
            case _ if name == "convert_element_type" and isinstance(operands[0], _Number):
                return [_converted(operands[0], equation.params["new_dtype"])]
            case Call("jit", body):  # says nothing of its own: the text is the same without
                return self.run(body.jaxpr, body.consts, operands)
            case _:
                pass
        results = [self.named(variable) for variable in equation.outvars]
        made = ", ".join(f"{result}: {kind}" for result, kind in results)
        said = ", ".join(self._params(equation))
        self.lines.append(f"{made} = {name}[{said}]({', '.join(operands)})")
        return [result for result, _ in results]

    def _params(self, equation: jex_core.JaxprEqn) -> Iterator[str]:
        for name, value in sorted(equation.params.items()):
            if name not in RULE_PARAMS and not any(word in name for word in _OF_DEVICES):
                yield f"{name}={self._text(value)}"
        if self._with_rules and has_rules(equation):
            yield f"rule={_rule(equation)}"

    def _text(self, value: Any) -> str:
        """A parameter of an equation."""
        match value:
            case jex_core.ClosedJaxpr():
                return _closed(value.jaxpr, value.consts, with_rules=self._with_rules)
            case jex_core.Jaxpr():
                return _closed(value, (), with_rules=self._with_rules)
            case np.ndarray() | np.generic() | jax.Array():
                return _value(value)
            case np.dtype():
                return str(value)
            case enum.Enum():
                return f"{type(value).__name__}.{value.name}"
            case None | bool() | int() | float() | complex() | str() | bytes():
                return repr(value)
            case _ if isinstance(value, _DEVICES):
                return "None"  # as on a single device
            case Mapping():
                found = cast("Mapping[Any, Any]", value)
                return str(sorted(f"{self._text(k)}: {self._text(v)}" for k, v in found.items()))
            case set() | frozenset():
                return str(sorted(map(self._text, cast("set[Any]", value))))
            case tuple() | list():
                inner = ", ".join(map(self._text, cast("Sequence[Any]", value)))
                return f"{type(cast(object, value)).__name__}({inner})"
            case functools.partial():
                return self._text((value.func, value.args, value.keywords))
            case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
                fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
                return type(value).__name__ + self._text(fields)
            case _:
                return _name(value)


class _Number(str):
    """A literal as it is written, and its number, of the dtype that it was given in."""

    number: np.ndarray


def _literal(literal: jex_core.Literal) -> str:
    dtype = cast(Any, literal.aval).dtype
    written = _value(np.asarray(literal.val, dtype))
    if np.shape(literal.val) or jnp.issubdtype(dtype, jax.dtypes.extended):
        return written
    found = _Number(written)
    found.number = np.asarray(literal.val)
    return found


def _converted(number: _Number, dtype: Any) -> _Number:
    """A literal in another dtype: JAX writes it so itself, but not where a `jit` is in between."""
    value = number.number
    if np.iscomplexobj(value) and not jnp.issubdtype(dtype, np.complexfloating):
        value = np.real(value)
    value = value.astype(dtype)
    found = _Number(_value(value))
    found.number = value
    return found


def _kind(aval: Any) -> str:
    if not hasattr(aval, "dtype"):
        return type(aval).__name__
    return f"{aval.dtype}{list(getattr(aval, 'shape', ()))}"


def _value(value: Any) -> str:
    """An array, by its number if it is one, else by a hash of its numbers."""
    if isinstance(value, jax.core.Tracer) or not hasattr(value, "dtype"):
        return _kind(value)
    if is_key(value):
        return f"{value.dtype} {_value(jax.random.key_data(value))}"
    if isinstance(value, jax.Array) and not (
        value.is_fully_addressable or value.is_fully_replicated
    ):
        return _kind(value)
    found = np.asarray(value)
    if found.size == 1:
        return f"{_kind(found)} {found.item()!r}"
    digest = hashlib.blake2b(np.ascontiguousarray(found).tobytes(), digest_size=16)
    return f"{_kind(found)} {digest.hexdigest()}"


def _name(value: Any) -> str:
    """Whatever else: what it is called, and nothing that differs from process to process."""
    named = value if hasattr(value, "__qualname__") else cast("type[Any]", type(value))
    return f"{named.__module__}.{named.__qualname__}"


def _rule(equation: jex_core.JaxprEqn) -> str:
    """The program of an equation's derivative, without inner rules, which may be the same."""
    variables = [v for v in equation.invars if not isinstance(v, jex_core.Literal)]
    is_pulled_back = "bwd" in equation.params

    def evaluate(*values: Any) -> list[Any]:
        known = iter(values)
        inputs = [
            literal_value(v) if isinstance(v, jex_core.Literal) else next(known)
            for v in equation.invars
        ]
        return evaluated(equation, inputs)

    def derivative(values: list[Any], along: list[Any]) -> Any:
        if is_pulled_back:
            results, pull_back = jax.vjp(evaluate, *values)
            return results, pull_back(along)
        return jax.jvp(evaluate, values, along)

    along = equation.outvars if is_pulled_back else variables
    try:
        traced = jax.make_jaxpr(derivative)(
            [variable.aval for variable in variables],
            [cast(Any, variable.aval).to_tangent_aval() for variable in along],
        )
    except Exception:  # the user's Python code, here without what it is otherwise called in
        rules = sorted(RULE_PARAMS & equation.params.keys())
        return str([_name(getattr(equation.params[rule], "f", rule)) for rule in rules])
    return _closed(traced.jaxpr, traced.consts, with_rules=False)
