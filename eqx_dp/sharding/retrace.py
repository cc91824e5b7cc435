"""A loss's program, traced again for the inside of the boundary, its constraints moved with it.

The constraints of a loss describe a batch on the whole mesh. Inside, a device holds its own
examples, and the axes that examples are spread over do not exist. So the program is evaluated
equation by equation while it is traced again under the inner mesh: constraints lose their example
axes, and on Explicit axes types lose their sharding, because inside all axes are Auto.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from ..programs import (
    PLACEMENTS,
    Call,
    Rule,
    RuleOf,
    ShardMap,
    at,
    bound,
    closed,
    inside,
    interpret,
    literal_value,
    open_jaxpr,
    result_sharding,
    source_line,
    with_programs,
    with_rules,
)
from .axes import axes_text
from .batch_of_two import BatchOfTwo
from .constraints import demands, without_examples
from .rules import ShardingRules


class Retrace(NamedTuple):
    """Evaluates a program as it will be inside the boundary.

    Attributes:
        rules: the sharding rules.
        mesh: the one inside: example axes Manual, the others Auto.
        batch_of_two: finds the dimensions that carry examples.
        outside: enters the context in which the program was traced.
    """

    rules: ShardingRules
    mesh: AbstractMesh
    batch_of_two: BatchOfTwo
    outside: Callable[[], AbstractContextManager[Any]]

    def run(self, program: jex_core.ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
        """Evaluates a program."""
        return interpret(program.jaxpr, program.consts, inputs, self._equation, literal_value)

    def _equation(self, equation: jex_core.JaxprEqn, inputs: list[Any]) -> list[Any]:
        """Evaluates one equation, and moves what it demands of its operands and results."""
        specs = self._moved(equation)
        with at(equation):  # the user's own line and scopes stay
            inputs = [self._spread(x, specs.get(i)) for i, x in enumerate(inputs)]
            if specs and equation.primitive.name in PLACEMENTS:
                results = inputs
            else:
                results = self._results(equation, inputs)
            if not specs and (goes := result_sharding(equation)) is not None and any(goes.spec):
                specs = {len(inputs): goes.spec}
            return [self._spread(x, specs.get(i)) for i, x in enumerate(results, len(inputs))]

    def _moved(self, equation: jex_core.JaxprEqn) -> dict[int, PartitionSpec]:
        """The inner form of each sharding; it must be movable at each place of the equation."""
        moved: dict[int, PartitionSpec] = {}
        for position, sharding in demands(equation, self.rules.examples).items():
            both = equation, *self.batch_of_two.partners(equation)
            avals: list[Any] = [[*each.invars, *each.outvars][position].aval for each in both]
            one, *twos = (aval.shape for aval in avals)
            for two in twos:
                moved[position] = without_examples(equation, sharding, one, two, self.rules)
        return moved

    def _spread(self, x: Any, spec: PartitionSpec | None) -> Any:
        """Spreads a value over the inner axes."""
        if spec is None or AxisType.Auto not in self.mesh.axis_types:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def _results(self, equation: jex_core.JaxprEqn, inputs: list[Any]) -> list[Any]:
        """The results of an equation, without its demands."""
        match inside(equation):
            case Call("jit", body):
                return self.run(body, inputs)
            case Call("high", body) if _has_no_gradient(equation):  # its types name the outer mesh
                return self.run(body, inputs)
            case ShardMap() as spread:
                raise ValueError(
                    f"The loss holds a shard_map over {axes_text(sorted(spread.axes))}, at "
                    f"{source_line(equation)}. With sharding rules the loss runs on each device's "
                    "own examples, one at a time: take the shard_map out. Over other axes the "
                    "compiler divides the work, by the parameters' specs and by constraints in the "
                    "loss (jax.lax.with_sharding_constraint, jax.sharding.reshard)."
                )
            case _:
                rules = with_rules(equation, functools.partial(self._rule, equation))
                params = with_programs(equation, self._program) | rules
                without = {k: None for k, v in params.items() if isinstance(v, NamedSharding)}
                return bound(equation, params | without, inputs)

    def _program(self, program: Any) -> Any:
        """A program inside an equation, traced again; open or closed as it is."""
        traced = self._traced(closed(program))
        return traced if closed(program) is program else open_jaxpr(traced)

    def _traced(self, program: jex_core.ClosedJaxpr) -> jex_core.ClosedJaxpr:
        whole = NamedSharding(self.mesh, PartitionSpec())
        structs = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type, sharding=whole)
            for x in program.in_avals
        ]
        return closed(jax.make_jaxpr(lambda *inputs: self.run(program, inputs))(*structs))

    def _rule(self, equation: jex_core.JaxprEqn, rule_of: RuleOf) -> Rule:
        """A derivative rule: it is traced outside, as the loss was, and then again."""

        def traced(equation: jex_core.JaxprEqn) -> Rule:
            with self.outside():
                return rule_of(equation)

        def twos() -> list[jex_core.Jaxpr]:
            partners = self.batch_of_two.partners(equation)
            return [traced(partner)[0].jaxpr for partner in partners]

        program, beside = traced(equation)
        self.batch_of_two.add(program.jaxpr, twos)
        return self._traced(program), beside


def _has_no_gradient(equation: Any) -> bool:
    """Whether all results are whole numbers or booleans."""
    return all(variable.aval.dtype.kind in "biu" for variable in equation.outvars)
