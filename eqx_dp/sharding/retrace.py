"""A program traced anew for the inside of the boundary, its sharding constraints moved with it.

What a loss says about sharding, it says about a batch on the whole mesh. Inside, a device holds
examples of its own, and the axes that examples are spread over are gone. So the program is
evaluated equation by equation while it is traced again under the inner mesh: constraints are
replaced by what is left of them, and on Explicit axes types lose their sharding, since inside all
axes are Auto.

This file, alone, knows how JAX's equations hold shardings and the Python code of derivative rules,
which are no public interface; it was written for JAX 0.10 and 0.11.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias, cast

import equinox as eqx
import jax
import jax.extend.core as jex_core
import jax.extend.linear_util as lu
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from ..programs import ShardMap, at, inside, interpret, literal_value, programs_of, source_line
from .constraints import Constraint
from .rules import ShardingRules, axes_of

# The derivative rules of custom_jvp_call and custom_vjp_call, traced when they are asked for.
_RULES = ("jvp_jaxpr_fun", "fwd_jaxpr_thunk")


class Twin:
    """The same program for a batch of two, to see which dimensions carry examples.

    Traced when a constraint asks for it, and not at all without one.
    """

    def __init__(
        self,
        one: jex_core.Jaxpr,
        trace_two: Callable[[], jex_core.Jaxpr],
        examples: tuple[str, ...],
    ):
        self._one = one
        self._trace_two = trace_two
        self._examples = examples
        self._partners: dict[int, list[jex_core.JaxprEqn]] | None = None
        # Equations are told apart by identity, so programs that were paired must not go away.
        self._paired: list[jex_core.Jaxpr] = []

    def of(self, equation: jex_core.JaxprEqn) -> list[jex_core.JaxprEqn]:
        """The equations that stand in the batch of two where this one stands in the batch of one.

        They are several where a jitted function is called at several places: its equations are one
        and the same at all of them in the batch of one, though not in that of two.

        Raises:
            ValueError: the programs differ in more than lengths.
        """
        if self._partners is None:
            self._partners = {}
            self.pair(self._one, self._trace_two())
        return self._partners[id(equation)]

    def pair(self, one: jex_core.Jaxpr, two: jex_core.Jaxpr) -> None:
        """Finds the partners of all equations that speak of sharding, or hold what may."""
        assert self._partners is not None
        self._paired.append(one)
        ours, theirs = (list(_of_interest(jaxpr, self._examples)) for jaxpr in (one, two))
        if [e.primitive.name for e in ours] != [e.primitive.name for e in theirs]:
            raise ValueError(
                "The loss constrains shardings in one way for a batch of one example and in "
                "another for a batch of two, so it is unknown which dimensions carry examples. "
                "The constraints must not depend on the length of the batch."
            )
        for equation, partner in zip(ours, theirs, strict=True):
            self._partners.setdefault(id(equation), []).append(partner)


def _of_interest(jaxpr: jex_core.Jaxpr, examples: tuple[str, ...]) -> Iterator[jex_core.JaxprEqn]:
    for equation in jaxpr.eqns:
        if _demands(equation, examples) or any(rule in equation.params for rule in _RULES):
            yield equation
        for inner in programs_of(equation):
            yield from _of_interest(inner, examples)


def _demands(equation: jex_core.JaxprEqn, examples: tuple[str, ...]) -> list[tuple[Any, Any]]:
    """Pairs of a variable and the sharding that an equation demands for it.

    On Explicit axes an equation may say where its result goes, as an einsum does with out_sharding.
    JAX fills that in by itself, too, but never with an example axis: types do not speak of them.
    """
    params, name = equation.params, equation.primitive.name
    if name == "sharding_constraint":
        return [(equation.outvars[0], params["sharding"])]
    if name == "reshard":
        return [(equation.outvars[0], params["dst_sharding"])]
    if name == "device_put":
        found = zip(equation.outvars, params["devices"], strict=True)
    elif name in ("jit", "pjit"):
        variables = [*equation.invars, *equation.outvars]
        found = zip(variables, [*params["in_shardings"], *params["out_shardings"]], strict=True)
    else:
        return [
            (equation.outvars[0], hint)
            for hint in _hints(equation)
            if any(set(axes_of(entry)) & set(examples) for entry in hint.spec)
        ]
    return [(v, sharding) for v, sharding in found if isinstance(sharding, NamedSharding)]


def _hints(equation: jex_core.JaxprEqn) -> list[NamedSharding]:
    """Where an equation says that its one result goes."""
    if len(equation.outvars) != 1:
        return []
    return [value for value in equation.params.values() if isinstance(value, NamedSharding)]


def constraints_of(jaxpr: jex_core.Jaxpr) -> list[str]:
    """What a program says about sharding, told for an error."""
    return [
        f"{equation.primitive.name} with spec {getattr(sharding, 'spec', sharding)} at "
        f"{source_line(equation)}"
        for equation in _of_interest(jaxpr, ())
        for _, sharding in _demands(equation, ())
    ]


class Retrace(NamedTuple):
    """Evaluates a program as it is to be inside the boundary.

    Attributes:
        rules: the sharding rules.
        inner: the mesh inside: example axes Manual, the others Auto.
        twin: the program for a batch of two.
        outside: enters the context in which the program was traced.
    """

    rules: ShardingRules
    inner: AbstractMesh
    twin: Twin
    outside: Callable[[], AbstractContextManager[Any]]

    def run(self, jaxpr: jex_core.Jaxpr, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """Evaluates a jaxpr."""
        return interpret(jaxpr, consts, inputs, self.equation, literal_value)

    def equation(self, equation: jex_core.JaxprEqn, inputs: list[Any]) -> list[Any]:
        """Evaluates one equation."""
        handler = _HANDLERS.get(equation.primitive.name, _bind)
        with at(equation):  # the user's own line and scopes stay
            return handler(self, equation, inputs)

    def traced(self, jaxpr: jex_core.Jaxpr, consts: Sequence[Any] = ()) -> jex_core.ClosedJaxpr:
        """Traces a jaxpr inside another again."""
        structs = [_without_sharding(variable.aval) for variable in jaxpr.invars]
        return jax.make_jaxpr(lambda *inputs: self.run(jaxpr, consts, inputs))(*structs)

    def constrain(self, x: Any, constraints: list[Constraint]) -> Any:
        """Applies what is left of a constraint, wherever it stands."""
        spec, *_ = [constraint.inside(self.rules) for constraint in constraints]
        return self.spread(x, spec)

    def spread(self, x: Any, spec: PartitionSpec) -> Any:
        """Spreads a value over the axes that are there inside; nothing to do if there are none."""
        if set(self.rules.mesh.axis_names) <= set(self.rules.examples):
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.inner, spec))

    def demands(self, equation: jex_core.JaxprEqn) -> list[tuple[Any, Any]]:
        """Pairs of a variable and the sharding that an equation demands for it."""
        return _demands(equation, self.rules.examples)

    def constraints(
        self, equation: jex_core.JaxprEqn, index: int, variable: Any, sharding: Any
    ) -> list[Constraint]:
        """The constraint on a variable, the `index`-th of those that an equation states.

        One for each place where the equation stands.
        """
        partners = [self.demands(partner)[index][0] for partner in self.twin.of(equation)]
        one = variable.aval.shape
        return [Constraint(equation, sharding, one, partner.aval.shape) for partner in partners]


def _without_sharding(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


_Handler: TypeAlias = Callable[[Retrace, jex_core.JaxprEqn, list[Any]], list[Any]]


def _bind(retrace: Retrace, equation: jex_core.JaxprEqn, inputs: list[Any]) -> list[Any]:
    """Any other equation: functions inside it are traced again, and types lose their sharding."""
    params = {
        name: _inside(retrace, equation, name, value) for name, value in equation.params.items()
    }
    outputs = _bound(equation, params, inputs)
    demands = retrace.demands(equation)
    for index, (variable, sharding) in enumerate(demands):
        outputs = [
            retrace.constrain(outputs[0], retrace.constraints(equation, index, variable, sharding))
        ]
    for hint in [] if demands else _hints(equation):
        outputs = [retrace.spread(outputs[0], hint.spec)] if any(hint.spec) else outputs
    return outputs


def _bound(equation: jex_core.JaxprEqn, params: dict[str, Any], inputs: list[Any]) -> list[Any]:
    params = equation.primitive.get_bind_params(params)
    outputs: Any = equation.primitive.bind(*inputs, **params)
    return list(outputs) if equation.primitive.multiple_results else [outputs]


def _inside(retrace: Retrace, equation: jex_core.JaxprEqn, name: str, value: Any) -> Any:
    """A parameter of an equation, as it is to be inside the boundary."""
    if name in _RULES:
        return _Rule(retrace, equation, name, [])
    if isinstance(value, jex_core.ClosedJaxpr):
        return retrace.traced(value.jaxpr, value.consts)
    if isinstance(value, jex_core.Jaxpr):
        traced = retrace.traced(value)
        assert not traced.consts
        return traced.jaxpr
    if isinstance(value, NamedSharding):
        return None
    if isinstance(value, tuple) and any(
        isinstance(one, jex_core.ClosedJaxpr) for one in cast(tuple[Any, ...], value)
    ):
        return tuple(_inside(retrace, equation, "", one) for one in cast(tuple[Any, ...], value))
    return value


class _Rule(NamedTuple):
    """A derivative rule that is traced again when it is asked for.

    Attributes:
        retrace: how.
        equation: whose rule it is.
        name: under which name.
        traced: what it was in the outer context, and for which inputs, once it has been asked for.
    """

    retrace: Retrace
    equation: jex_core.JaxprEqn
    name: str
    traced: list[tuple[jex_core.Jaxpr, tuple[bool, ...]]]

    @property
    def debug_info(self) -> Any:
        return self.equation.params[self.name].debug_info

    def call_wrapped(self, *zeros: bool) -> tuple[Any, ...]:
        with self.retrace.outside():
            jaxpr, consts, *rest = self.equation.params[self.name].call_wrapped(*zeros)
        self.traced.append((jaxpr, zeros))
        if any(map(self.retrace.demands, _of_interest(jaxpr, self.retrace.rules.examples))):
            for of_two in self.retrace.twin.of(self.equation):
                with self.retrace.outside():
                    two = of_two.params[self.name].call_wrapped(*zeros)[0]
                self.retrace.twin.pair(jaxpr, two)
        traced = self.retrace.traced(jaxpr, consts)
        return (traced.jaxpr, traced.consts, *rest)


def _custom_vjp(retrace: Retrace, equation: jex_core.JaxprEqn, inputs: list[Any]) -> list[Any]:
    """A function with a backward rule: Python code that runs when it is needed, by then inside.

    So it is traced in the outer context, as the loss was, and then as everything else.
    """
    forward = _Rule(retrace, equation, "fwd_jaxpr_thunk", [])

    def run(*values: Any) -> Any:
        jaxpr, zeros = forward.traced[-1]
        with retrace.outside():
            traced, beside = _backward(retrace, equation, jaxpr)
        if any(map(retrace.demands, _of_interest(traced.jaxpr, retrace.rules.examples))):
            for of_two in retrace.twin.of(equation):
                with retrace.outside():
                    two = of_two.params["fwd_jaxpr_thunk"].call_wrapped(*zeros)[0]
                    two, _ = _backward(retrace, of_two, two)
                retrace.twin.pair(traced.jaxpr, two.jaxpr)
        cotangents = retrace.run(traced.jaxpr, traced.consts, values)
        return (cotangents, *beside) if beside else cotangents

    params = {
        **{
            name: _inside(retrace, equation, name, value) for name, value in equation.params.items()
        },
        "fwd_jaxpr_thunk": forward,
        "bwd": lu.wrap_init(run, debug_info=equation.params["bwd"].debug_info),
    }
    return _bound(equation, params, inputs)


def _backward(
    retrace: Retrace, equation: jex_core.JaxprEqn, forward: jex_core.Jaxpr
) -> tuple[jex_core.ClosedJaxpr, list[Any]]:
    """Traces a backward rule on what its forward rule leaves it and the cotangents of results.

    Returns:
        The rule, and what it gives beside cotangents (in JAX 0.11, what it has logged).
    """
    _, _, forwarded = equation.params["out_trees"]()
    own = iter(forward.outvars)
    residuals = [next(own) if i is None else equation.invars[i] for i in forwarded]
    given: list[Any] = [*residuals, *equation.outvars]
    beside: list[Any] = []

    def rule(*values: Any) -> list[Any]:
        cotangents = equation.params["bwd"].call_wrapped(*values)
        if isinstance(cotangents, tuple):
            cotangents, *rest = cast(tuple[Any, ...], cotangents)
            beside.extend(rest)
        of = equation.invars[equation.params["num_consts"] :]
        return [
            x if eqx.is_array(x) else _zeros(variable.aval)
            for x, variable in zip(cotangents, of, strict=True)
        ]

    structs = [_without_sharding(variable.aval) for variable in given]
    if retrace.rules.is_explicit:  # there it is part of the type that the rule was made for
        structs = [
            struct.update(sharding=variable.aval.sharding)
            for struct, variable in zip(structs, given, strict=True)
        ]
    return jax.make_jaxpr(rule)(*structs), beside


def _zeros(aval: Any) -> Any:
    """A cotangent of zero; for integers, of the type that stands for there being none."""
    if jnp.issubdtype(aval.dtype, jnp.inexact):
        return jnp.zeros(aval.shape, aval.dtype)
    return np.zeros(aval.shape, jax.dtypes.float0)


def _constrained(retrace: Retrace, equation: jex_core.JaxprEqn, inputs: list[Any]) -> list[Any]:
    ((variable, sharding),) = retrace.demands(equation)
    if equation.params.get("layout") is not None:
        raise ValueError(
            f"The loss constrains a memory layout at "
            f"{source_line(equation)}, which the per-example boundary "
            "does not support. Constrain the sharding alone."
        )
    return [retrace.constrain(inputs[0], retrace.constraints(equation, 0, variable, sharding))]


def _put(retrace: Retrace, equation: jex_core.JaxprEqn, inputs: list[Any]) -> list[Any]:
    """`jax.device_put`: to a sharding of the mesh it is a constraint."""
    demands = retrace.demands(equation)
    if not demands:
        return _bind(retrace, equation, inputs)
    outputs = dict(zip(equation.outvars, inputs, strict=True))
    for index, (variable, sharding) in enumerate(demands):
        constraints = retrace.constraints(equation, index, variable, sharding)
        outputs[variable] = retrace.constrain(outputs[variable], constraints)
    return list(outputs.values())


def _jitted(retrace: Retrace, equation: jex_core.JaxprEqn, inputs: list[Any]) -> list[Any]:
    """A jitted function is evaluated where it is called; its shardings are constraints."""
    inner: jex_core.ClosedJaxpr = equation.params["jaxpr"]
    demands = retrace.demands(equation)
    variables = [*equation.invars, *equation.outvars]

    def meet(values: list[Any], first: int) -> list[Any]:
        # By position, as a variable may come in twice.
        said = [*equation.params["in_shardings"], *equation.params["out_shardings"]]
        index = sum(isinstance(sharding, NamedSharding) for sharding in said[:first])
        met: list[Any] = []
        for position, value in enumerate(values, first):
            if isinstance(said[position], NamedSharding):
                variable, sharding = variables[position], said[position]
                value = retrace.constrain(
                    value, retrace.constraints(equation, index, variable, sharding)
                )
                index += 1
            met.append(value)
        return met

    if not demands:
        return retrace.run(inner.jaxpr, inner.consts, inputs)
    outputs = retrace.run(inner.jaxpr, inner.consts, meet(inputs, 0))
    return meet(outputs, len(inputs))


def _shard_mapped(retrace: Retrace, equation: jex_core.JaxprEqn, inputs: list[Any]) -> list[Any]:
    """A shard_map over axes that are there inside stays one."""
    spread = inside(equation)
    assert isinstance(spread, ShardMap)
    taken = sorted(spread.axes & set(retrace.rules.examples))
    if taken:
        raise ValueError(
            f"The loss holds a shard_map over {', '.join(map(repr, taken))}, over which the rules "
            f"spread examples, at {source_line(equation)} (in_specs {spread.in_specs}). The loss "
            "runs on each device's own examples, one at a time. Take the shard_map out, or map "
            "over the other axes alone: jax.shard_map(..., axis_names={'model'}) with specs that "
            "do not name the example axes."
        )
    mapped = jax.shard_map(
        lambda *values: retrace.run(spread.body.jaxpr, (), values),
        mesh=retrace.inner,
        in_specs=spread.in_specs,
        out_specs=list(spread.out_specs),
        axis_names=set(spread.axes),
        check_vma=spread.check_vma,
    )
    return list(mapped(*inputs))


def _passed_on(retrace: Retrace, equation: jex_core.JaxprEqn, inputs: list[Any]) -> list[Any]:
    """Between kinds of axes there is nothing to do: inside, all are Auto."""
    del retrace, equation
    return inputs


_HANDLERS: dict[str, _Handler] = {
    "custom_vjp_call": _custom_vjp,
    "sharding_constraint": _constrained,
    "reshard": _constrained,
    "mesh_cast": _passed_on,
    "device_put": _put,
    "jit": _jitted,
    "pjit": _jitted,
    "shard_map": _shard_mapped,
}
