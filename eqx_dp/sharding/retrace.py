"""A loss's program, traced again for the inside of the boundary, its constraints moved with it.

What a loss says about sharding, it says about a batch on the whole mesh. Inside, a device holds
examples of its own, and the axes that examples are spread over are gone. So the program is
evaluated equation by equation while it is traced again under the inner mesh: constraints are
replaced by what is left of them, and on Explicit axes types lose their sharding, since inside all
axes are Auto.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
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
from .batch_of_two import BatchOfTwo
from .constraints import Constraint, demands
from .rules import ShardingRules


class Retrace(NamedTuple):
    """Evaluates a program as it is to be inside the boundary.

    Attributes:
        rules: the sharding rules.
        mesh: the one inside: example axes Manual, the others Auto.
        batch_of_two: tells which dimensions carry examples.
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
        specs = {
            position: self._moved(equation, position, sharding)
            for position, sharding in demands(equation, self.rules.examples).items()
        }
        with at(equation):  # the user's own line and scopes stay
            inputs = [self._spread(x, specs.get(i)) for i, x in enumerate(inputs)]
            results = self._results(equation, inputs, is_demanding=bool(specs))
            return [self._spread(x, specs.get(i)) for i, x in enumerate(results, len(inputs))]

    def _moved(self, equation: jex_core.JaxprEqn, position: int, sharding: Any) -> PartitionSpec:
        """What is left of a sharding inside; it must be movable wherever the equation stands."""
        avals: list[Any] = [
            [*each.invars, *each.outvars][position].aval
            for each in (equation, *self.batch_of_two.partners(equation))
        ]
        one, *twos = (aval.shape for aval in avals)
        spec, *_ = [
            Constraint(equation, sharding, one, two).without_examples(self.rules) for two in twos
        ]
        return spec

    def _spread(self, x: Any, spec: PartitionSpec | None) -> Any:
        """Spreads a value over the axes that there are inside."""
        if spec is None or AxisType.Auto not in self.mesh.axis_types:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def _results(
        self, equation: jex_core.JaxprEqn, inputs: list[Any], *, is_demanding: bool
    ) -> list[Any]:
        """The results of an equation, apart from what it demands."""
        if equation.primitive.name in PLACEMENTS and is_demanding:
            return inputs
        match inside(equation):
            case Call("jit", body):
                return self.run(body, inputs)
            case ShardMap() as spread:
                return self._shard_map(equation, spread, inputs)
            case _:
                pass
        params = with_programs(equation, self._program) | with_rules(
            equation, partial(self._rule, equation)
        )
        params = {k: None if isinstance(v, NamedSharding) else v for k, v in params.items()}
        results = bound(equation, params, inputs)
        goes = result_sharding(equation)
        if goes is None or is_demanding or not any(goes.spec):
            return results
        return [self._spread(results[0], goes.spec)]

    def _program(self, program: Any) -> Any:
        """A program inside an equation, traced again; open or closed as it is."""
        traced = self._traced(closed(program))
        return traced if closed(program) is program else open_jaxpr(traced)

    def _traced(self, program: jex_core.ClosedJaxpr) -> jex_core.ClosedJaxpr:
        structs = [
            jax.ShapeDtypeStruct(
                aval.shape,
                aval.dtype,
                weak_type=aval.weak_type,
                sharding=NamedSharding(self.mesh, PartitionSpec()),
                manual_axis_type=aval.manual_axis_type,  # the axes of a shard_map around
            )
            for aval in program.in_avals
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

    def _shard_map(
        self, equation: jex_core.JaxprEqn, spread: ShardMap, inputs: list[Any]
    ) -> list[Any]:
        """A shard_map over axes that there are inside stays one."""
        taken = sorted(spread.axes & set(self.rules.examples))
        if taken:
            raise ValueError(
                f"The loss holds a shard_map over {', '.join(map(repr, taken))}, over which the "
                f"rules spread examples, at {source_line(equation)} (in_specs {spread.in_specs}). "
                "The loss runs on each device's own examples, one at a time. Take the shard_map "
                "out, or map over the other axes alone: jax.shard_map(..., axis_names={'model'}) "
                "with specs that do not name the example axes."
            )
        mapped = jax.shard_map(
            lambda *values: self._within(spread.axes).run(spread.body, values),
            mesh=self.mesh,
            in_specs=spread.in_specs,
            out_specs=list(spread.out_specs),
            axis_names=set(spread.axes),
            check_vma=spread.check_vma,
        )
        return list(mapped(*inputs))

    def _within(self, axes: Iterable[str]) -> "Retrace":
        """The same, on a device of a shard_map over axes."""
        manual = dict.fromkeys(axes, AxisType.Manual)

        @contextmanager
        def outside() -> Generator[None]:
            with self.outside():
                mesh = jax.sharding.get_abstract_mesh().update_axis_types(manual)
                with jax.sharding.use_abstract_mesh(mesh):
                    yield

        return self._replace(mesh=self.mesh.update_axis_types(manual), outside=outside)
