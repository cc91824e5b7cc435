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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.core
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec, Sharding

from ..programs import Call, evaluated, inside, interpret

# These say where a value lives, and leave the value as it is.
_SHARDING_ONLY = frozenset(
    {"sharding_constraint", "reshard", "mesh_cast", "pvary", "pcast", "device_put"}
)
_OF_SHARDING = ("sharding", "mesh", "layout")
_SHARDINGS = (Mesh, AbstractMesh, Sharding, PartitionSpec, jax.Device)
# Python functions that stand for programs: those are traced, and written instead.
_RULES = frozenset({"jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "out_trees"})


def program_text(program: jex_core.ClosedJaxpr) -> str:
    """Writes a program, one equation a line.

    | in the text | not in the text |
    |---|---|
    | primitives and their parameters, in order | names of functions and variables, source lines |
    | shapes and dtypes | weak types |
    | values of literals and of closed-over arrays | values of arrays that are traced |
    | programs inside equations, derivative rules too | `jit` around a part |
    | | meshes, shardings, constraints on them, devices |

    An array of more than one number enters by its hash (BLAKE2b, 128 bits); one that this host
    does not hold whole, by its shape and dtype alone. A derivative rule that cannot be traced by
    itself, and a callback, enter by the name of the Python function.

    Args:
        program: as `jax.make_jaxpr` gives it. Traced constants may be in it.
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
        if name in _SHARDING_ONLY:
            return operands
        match inside(equation):
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
            if name not in _RULES and not any(word in name for word in _OF_SHARDING):
                yield f"{name}={self._text(value)}"
        if self._with_rules and _RULES & equation.params.keys():
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
            case _ if isinstance(value, _SHARDINGS):
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


def _literal(literal: jex_core.Literal) -> str:
    return _value(np.asarray(literal.val, cast(Any, literal.aval).dtype))


def _kind(aval: Any) -> str:
    if not hasattr(aval, "dtype"):
        return type(aval).__name__
    return f"{aval.dtype}{list(getattr(aval, 'shape', ()))}"


def _value(value: Any) -> str:
    """An array, by its number if it is one, else by a hash of its numbers."""
    if isinstance(value, jax.core.Tracer) or not hasattr(value, "dtype"):
        return _kind(value)
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
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
    """The program of a custom_jvp's or custom_vjp's derivative: of JAX's own, and of the user's.

    Rules inside of it are left out: a rule may well call the function that it belongs to.
    """
    variables = [v for v in equation.invars if not isinstance(v, jex_core.Literal)]
    is_float = [_is_float(variable) for variable in variables]
    structs = [_struct(variable) for variable in variables]
    floats = [struct for struct, is_one in zip(structs, is_float, strict=True) if is_one]
    rest = [struct for struct, is_one in zip(structs, is_float, strict=True) if not is_one]

    def of_floats(rest: list[Any]) -> Callable[..., list[Any]]:
        def evaluate(*floats: Any) -> list[Any]:
            each = {True: iter(floats), False: iter(rest)}
            known = iter([next(each[is_one]) for is_one in is_float])
            inputs = [
                v.val if isinstance(v, jex_core.Literal) else next(known) for v in equation.invars
            ]
            found = zip(equation.outvars, evaluated(equation, inputs), strict=True)
            return [result for variable, result in found if _is_float(variable)]

        return evaluate

    def derivative(floats: list[Any], rest: list[Any], along: list[Any]) -> Any:
        if "bwd" in equation.params:
            results, pull_back = jax.vjp(of_floats(rest), *floats)
            return results, pull_back(along)
        return jax.jvp(of_floats(rest), floats, along)

    of_results = [_struct(v) for v in equation.outvars if _is_float(v)]
    along = of_results if "bwd" in equation.params else floats
    try:
        traced = jax.make_jaxpr(derivative)(floats, rest, along)
    except Exception:  # the user's Python code, here without what it is otherwise called in
        rules = sorted(_RULES & equation.params.keys())
        return str([_name(getattr(equation.params[rule], "f", rule)) for rule in rules])
    return _closed(traced.jaxpr, traced.consts, with_rules=False)


def _is_float(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.inexact)


def _struct(variable: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype)
