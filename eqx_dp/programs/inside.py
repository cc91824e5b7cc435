"""The programs inside an equation, and how the equation's operands map to theirs.

This file alone knows how JAX's equations hold a call, a rematerialised function, a derivative rule,
a loop, a branch and a shard_map. It was written for JAX 0.10 to 0.12, whose parameters differ.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, cast

import jax
import jax.extend.core as jex_core
from jax.extend.core import primitives as jax_primitives
from jax.sharding import PartitionSpec

Value = TypeVar("Value")

Wrapper: TypeAlias = Literal[
    "jit", "remat", "custom_jvp", "custom_vjp", "custom_vmap", "own", "high"
]


class Call(NamedTuple):
    """One program; its operands and results are those of the equation.

    Attributes:
        wrapper: `jit` (or no transformation), `jax.checkpoint`, a derivative rule, a batching
            rule, or all rules (lineax' `own`, JAX's `high`: see [`implementation`][]). For a rule,
            the program is the function without it.
        body: the program.
    """

    wrapper: Wrapper
    body: jex_core.ClosedJaxpr


class Scan(NamedTuple):
    """A program that runs a known number of times.

    Attributes:
        body: from constants, carry and slices to carry and slices.
        num_consts: how many operands are the same at every step.
        num_carry: how many go from step to step.
        length: how many steps.
    """

    body: jex_core.ClosedJaxpr
    num_consts: int
    num_carry: int
    length: int

    def split(self, operands: Sequence[Value]) -> tuple[list[Value], list[Value], list[Value]]:
        """Constants, first carry, and what the scan goes over."""
        start, end = self.num_consts, self.num_consts + self.num_carry
        return list(operands[:start]), list(operands[start:end]), list(operands[end:])


class While(NamedTuple):
    """A program that runs while another returns True.

    Attributes:
        condition: from its constants and the carry to one boolean.
        body: from its constants and the carry to the carry.
        num_condition: how many operands are the condition's constants.
        num_body: how many are the body's.
    """

    condition: jex_core.ClosedJaxpr
    body: jex_core.ClosedJaxpr
    num_condition: int
    num_body: int

    def split(self, operands: Sequence[Value]) -> tuple[list[Value], list[Value], list[Value]]:
        """The condition's constants, the body's, and the first carry."""
        start, end = self.num_condition, self.num_condition + self.num_body
        return list(operands[:start]), list(operands[start:end]), list(operands[end:])


class Cond(NamedTuple):
    """Programs of which one runs: the first operand selects it, and it gets the others."""

    branches: tuple[jex_core.ClosedJaxpr, ...]


class ShardMap(NamedTuple):
    """A program that runs on every device of some axes, on its part of each operand.

    Attributes:
        body: on shapes of one device.
        axes: the mesh axes that it runs over.
        num_devices: how many there are along them.
        in_specs: how operands are cut, one a operand.
        out_specs: how results are put together.
        check_vma: as `jax.shard_map` was given it.
    """

    body: jex_core.ClosedJaxpr
    axes: frozenset[str]
    num_devices: int
    in_specs: tuple[PartitionSpec, ...]
    out_specs: tuple[PartitionSpec, ...]
    check_vma: bool


class LinearSolve(NamedTuple):
    """The solution of a linear system by the user's function; its derivative has been taken.

    Attributes:
        solve: from its constants and the right-hand sides to the solution.
        num_before: how many operands are constants of other programs, before its own.
        num_consts: how many are its own constants.
        num_after: how many are constants of others, after them.
    """

    solve: jex_core.ClosedJaxpr
    num_before: int
    num_consts: int
    num_after: int

    def split(self, operands: Sequence[Value]) -> list[Value]:
        """The operands of `solve`."""
        start = self.num_before
        end = start + self.num_consts
        return [*operands[start:end], *operands[end + self.num_after :]]


Inside: TypeAlias = Call | Scan | While | Cond | ShardMap | LinearSolve


def inside(equation: jex_core.JaxprEqn) -> Inside | None:
    """The programs that an equation evaluates; None if it holds none, or an unknown kind.

    The program of a scatter or a reduction combines two numbers, and a Pallas kernel describes
    blocks of memory: neither is a program on the equation's operands.
    """
    if (body := implementation(equation)) is not None:
        return Call("own" if equation.primitive.name == "linear_solve" else "high", body)
    read = HOLDERS.get(equation.primitive.name)
    return None if read is None else read(equation.params)


def implementation(equation: jex_core.JaxprEqn) -> jex_core.ClosedJaxpr | None:
    """The program of a primitive that brings all its rules along; None for any other primitive.

    Those are the `HiPrim`s of JAX 0.12 (`jnp.searchsorted` is one) and lineax' linear solve.
    """
    primitive: Any = equation.primitive
    held_as = {"linear_solve": "impl", "call_hi_primitive": "to_lojax"}.get(primitive.name)
    if held_as is None:
        return None
    run = functools.partial(getattr(primitive, held_as), **equation.params)
    with cast(Any, equation.ctx).manager:
        return jax.make_jaxpr(run)(*(variable.aval for variable in equation.invars))


def closed(program: Any) -> jex_core.ClosedJaxpr:
    """A program with its constants; an open one has none. In JAX 0.11 both are one class."""
    if isinstance(program, jex_core.ClosedJaxpr):
        return program
    return jex_core.ClosedJaxpr(program, ())


def open_jaxpr(program: Any) -> jex_core.Jaxpr:
    """A program without its constants."""
    return getattr(program, "jaxpr", program)


def programs_of(equation: jex_core.JaxprEqn) -> list[jex_core.Jaxpr]:
    """All programs among an equation's parameters, or its implementation, for any purpose."""
    body = implementation(equation)
    held = jex_core.jaxprs_in_params(equation.params) if body is None else [body]
    return [open_jaxpr(program) for program in held]


def equations(program: Any) -> Iterator[jex_core.JaxprEqn]:
    """All equations of a program, each before those of the programs among its parameters."""
    for equation in open_jaxpr(program).eqns:
        yield equation
        for inner in programs_of(equation):
            yield from equations(inner)


def with_programs(equation: jex_core.JaxprEqn, changed: Callable[[Any], Any]) -> dict[str, Any]:
    """An equation's parameters with other programs in them, open or closed as they are.

    A Pallas kernel does not change: it describes blocks of memory.
    """
    if equation.primitive.name == "pallas_call":
        return equation.params
    return {name: _changed(value, changed) for name, value in equation.params.items()}


def _changed(value: Any, changed: Callable[[Any], Any]) -> Any:
    if isinstance(value, jex_core.ClosedJaxpr | jex_core.Jaxpr):
        return changed(value)
    if not isinstance(value, tuple):
        return value
    before = cast("tuple[Any, ...]", value)
    after = [_changed(one, changed) for one in before]
    if all(new is old for new, old in zip(after, before, strict=True)):
        return value
    # A linear solve names its programs.
    return type(value)(*after) if hasattr(value, "_fields") else tuple(after)


def _call(wrapper: Wrapper, name: str) -> Callable[[dict[str, Any]], Inside]:
    return lambda params: Call(wrapper, closed(params[name]))


def _scan(params: dict[str, Any]) -> Scan:
    if "num_consts" in params:  # JAX 0.10
        arity = params["num_consts"], params["num_carry"]
    else:
        consts, carry, _ = params["ft_in"].unpack()
        arity = len(consts), len(carry)
    return Scan(closed(params["jaxpr"]), *arity, params["length"])


def _while(params: dict[str, Any]) -> While:
    condition, body = closed(params["cond_jaxpr"]), closed(params["body_jaxpr"])
    return While(condition, body, params["cond_nconsts"], params["body_nconsts"])


def _linear_solve(params: dict[str, Any]) -> LinearSolve:
    solve, consts = closed(params["jaxprs"].solve), params["const_lengths"]
    before = consts.matvec + consts.vecmat
    return LinearSolve(solve, before, consts.solve, consts.transpose_solve)


def _shard_map(params: dict[str, Any]) -> ShardMap:
    # JAX 0.10 and 0.11 name them differently.
    axes = frozenset(params["manual_axes" if "manual_axes" in params else "newly_manual_axes"])
    num_devices = math.prod(params["mesh"].shape[axis] for axis in axes)
    specs = tuple(params["in_specs"]), tuple(params["out_specs"])
    return ShardMap(closed(params["jaxpr"]), axes, num_devices, *specs, params["check_vma"])


HOLDERS: dict[str, Callable[[dict[str, Any]], Inside]] = {
    jax_primitives.jit_p.name: _call("jit", "jaxpr"),
    jax_primitives.closed_call_p.name: _call("jit", "call_jaxpr"),
    jax_primitives.call_p.name: _call("jit", "call_jaxpr"),
    jax_primitives.remat_p.name: _call("remat", "jaxpr"),
    jax_primitives.custom_jvp_call_p.name: _call("custom_jvp", "call_jaxpr"),
    jax_primitives.custom_vjp_call_p.name: _call("custom_vjp", "call_jaxpr"),
    jax_primitives.scan_p.name: _scan,
    jax_primitives.while_p.name: _while,
    jax_primitives.cond_p.name: lambda params: Cond(tuple(map(closed, params["branches"]))),
    jax_primitives.linear_solve_p.name: _linear_solve,
    "custom_vmap_call": _call("custom_vmap", "call"),
    "shard_map": _shard_map,
}
