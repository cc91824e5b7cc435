"""Which products of a loss are multiplied in a narrow dtype, and the program that does so."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.extend.core.primitives import conv_general_dilated_p, dot_general_p

from ..precision import Matmul, Policy
from ..precision.stages import rules_at
from ..programs import Call, Cond, Scan, While, has_free_dimensions, inlined, inside, with_programs
from .scaled_products import scaled_product

Address: TypeAlias = tuple[int, ...]

_FLOATS = frozenset(map(jnp.dtype, (jnp.bfloat16, jnp.float16, jnp.float32)))


class Narrow(NamedTuple):
    """What a policy says of the products of a loss.

    Attributes:
        matmul: what they are multiplied in.
        rules: the patterns of the policy's module rules; whether each keeps products wide.
    """

    matmul: Matmul
    rules: tuple[tuple[str, bool], ...]

    def is_wide(self, scope: str, around: bool) -> bool:
        """Whether products under a name stack are wide: the innermost rule says so."""
        known = dict(self.rules)
        return next((known[m] for m in reversed(rules_at(scope)) if m in known), around)

    def program(self, program: jex_core.ClosedJaxpr) -> jex_core.ClosedJaxpr:
        """The program with narrow products, every equation in the place of one.

        Products inside of functions with derivative rules of their own stay as they are, and so do
        those in a `shard_map`.
        """

        def product(equation: jex_core.JaxprEqn) -> list[jex_core.JaxprEqn]:
            return inlined(scaled_product(equation, self.matmul), equation)

        return _Rewriting(self, product).program(program, False)

    def wide_alone(self, program: jex_core.ClosedJaxpr) -> jex_core.ClosedJaxpr:
        """The program without its narrow products, to count the operations of the others."""
        return _Rewriting(self, lambda _: []).program(program, False)

    def addresses(self, program: jex_core.ClosedJaxpr) -> Iterator[Address]:
        """Where the narrow products stand, but for those in branches and while loops."""
        return self._addresses(program.jaxpr, False)

    def _addresses(self, jaxpr: jex_core.Jaxpr, around: bool) -> Iterator[Address]:
        for index, equation in enumerate(jaxpr.eqns):
            is_wide = self.is_wide(str(equation.source_info.name_stack), around)
            match inside(equation):
                case Call("jit" | "remat", body) | Scan(body=body):
                    for address in self._addresses(body.jaxpr, is_wide):
                        yield index, *address
                case _:
                    if not is_wide and _is_product(equation):
                        yield (index,)


def narrow_products(policy: Policy | None) -> Narrow | None:
    """What a policy says of products; None where they stay in the compute dtype."""
    if policy is None or policy.matmul is None:
        return None
    return Narrow(policy.matmul, tuple((r.match, r.matmul is not None) for r in policy.modules))


@dataclasses.dataclass
class _Rewriting:
    """Rewrites each program once for each answer to whether products around it are wide."""

    narrow: Narrow
    product: Callable[[jex_core.JaxprEqn], list[jex_core.JaxprEqn]]
    done: dict[tuple[Any, bool], Any] = dataclasses.field(default_factory=dict[Any, Any])

    def program(self, program: Any, is_wide: bool) -> Any:
        """A program, open or closed; itself if there is nothing to do."""
        key = program, is_wide
        if key not in self.done:
            self.done[key] = self._rewritten(program, is_wide)
        return self.done[key]

    def _rewritten(self, program: Any, is_wide: bool) -> Any:
        jaxpr = getattr(program, "jaxpr", program)
        if jaxpr is not program:
            new = self.program(jaxpr, is_wide)
            return program if new is jaxpr else jex_core.ClosedJaxpr(new, program.consts)
        new = [one for equation in jaxpr.eqns for one in self._of_equation(equation, is_wide)]
        is_same = len(new) == len(jaxpr.eqns) and all(map(lambda a, b: a is b, new, jaxpr.eqns))
        return jaxpr if is_same else jaxpr.replace(eqns=new)

    def _of_equation(self, equation: jex_core.JaxprEqn, around: bool) -> list[jex_core.JaxprEqn]:
        is_wide = self.narrow.is_wide(str(equation.source_info.name_stack), around)
        match inside(equation):
            case None if not is_wide and _is_product(equation):
                return self.product(equation)
            case Call("jit" | "remat") | Scan() | Cond() | While():
                params = with_programs(equation, lambda program: self.program(program, is_wide))
            case _:
                return [equation]
        if all(params[name] is value for name, value in equation.params.items()):
            return [equation]
        return [equation.replace(params=params)]


def _is_product(equation: jex_core.JaxprEqn) -> bool:
    """Whether an equation multiplies matrices of real numbers: inner products of vectors do not."""
    if equation.primitive not in (dot_general_p, conv_general_dilated_p):
        return False
    avals: list[Any] = [variable.aval for variable in (*equation.invars, *equation.outvars)]
    if any(aval.dtype not in _FLOATS or 0 in aval.shape for aval in avals):
        return False
    return has_free_dimensions(equation)
