"""How large the values of a backward pass become: a walk through a pullback, on values.

A pullback is linear in its seed. What descends from the seed is multiplied by a loss scale, what
does not (a forward pass that is computed again) is not. One table of rules for equations that hold
programs of their own, one loop, one default.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..programs import scan_arity
from .views import apply

_NARROW = frozenset({"float16", "bfloat16"})
# They make nothing larger than what they are given, which was looked at already.
_REARRANGES = frozenset(
    {"broadcast_in_dim", "copy", "expand_dims", "neg", "pad", "reshape", "rev", "select_n"}
    | {"slice", "split", "squeeze", "transpose", "concatenate", "optimization_barrier"}
)


class Largest(NamedTuple):
    """The largest magnitudes among values that descend from the seed.

    Attributes:
        narrow: of those in float16 or bfloat16.
        wide: of those in other floating-point dtypes.
    """

    narrow: Float[Array, ""]
    wide: Float[Array, ""]


def is_narrow(dtype: Any) -> bool:
    """Whether a dtype is float16, or bfloat16, which stands for it in a probe."""
    return str(dtype) in _NARROW


def pulled_back(pullback: Callable[[Array], Any], seed: Float[Array, ""]) -> tuple[Any, Largest]:
    """Evaluates a pullback, and says how large the values on the way are, the seed included.

    Args:
        pullback: as of ``jax.vjp``.
        seed: the cotangent of the loss.

    Returns:
        What the pullback returns, and the magnitudes.
    """
    traced, shapes = jax.make_jaxpr(pullback, return_shape=True)(seed)
    walk = _Walk()
    walk.look(seed)
    outputs, _ = walk.jaxpr(traced.jaxpr, traced.consts, [seed], [True])
    return jax.tree.unflatten(jax.tree.structure(shapes), outputs), walk.largest()


_Found: TypeAlias = tuple[list[Any], list[bool]]
"""Values, and which of them descend from the seed."""


class _Walk:
    """One pass through a program, through the programs inside it."""

    def __init__(self):
        self.seen: list[Largest] = []

    def largest(self) -> Largest:
        """The largest of all that was seen; zero where there was nothing."""
        nothing = Largest(jnp.zeros(()), jnp.zeros(()))
        parts = zip(*[nothing, *self.seen], strict=True)
        return Largest(*(jnp.max(jnp.stack(part)) for part in parts))

    def look(self, value: Any) -> None:
        """Notes how large a value is that descends from the seed."""
        if not jnp.issubdtype(value.dtype, jnp.floating):
            return
        size = jnp.max(jnp.abs(value.astype(jnp.float32)), initial=0)
        zero = jnp.zeros_like(size)
        self.seen.append(Largest(size, zero) if is_narrow(value.dtype) else Largest(zero, size))

    def jaxpr(
        self,
        jaxpr: jex_core.Jaxpr,
        consts: Sequence[Any],
        inputs: Sequence[Any],
        scaled: Sequence[bool],
    ) -> _Found:
        """Evaluates a jaxpr; ``scaled`` says which inputs descend from the seed."""
        variables = [*jaxpr.constvars, *jaxpr.invars]
        values: dict[Any, Any] = dict(zip(variables, [*consts, *inputs], strict=True))
        flags: dict[Any, bool] = dict(zip(jaxpr.invars, scaled, strict=True))

        def read(variable: Any) -> tuple[Any, bool]:
            if isinstance(variable, jex_core.Literal):
                return variable.val, False
            return values[variable], flags.get(variable, False)

        for equation in jaxpr.eqns:
            found = list(map(read, equation.invars))
            outputs, come = self.equation(equation, [x for x, _ in found], [f for _, f in found])
            values.update(zip(equation.outvars, outputs, strict=True))
            flags.update(zip(equation.outvars, come, strict=True))
        results = list(map(read, jaxpr.outvars))
        return [x for x, _ in results], [f for _, f in results]

    def equation(
        self, equation: jex_core.JaxprEqn, inputs: list[Any], scaled: list[bool]
    ) -> _Found:
        """Evaluates one equation: plainly, or by going into it."""
        name = equation.primitive.name
        if not any(scaled):
            return apply(equation, inputs), [False] * len(equation.outvars)
        if name in _INTO:
            return _INTO[name](self, equation, inputs, scaled)
        outputs = apply(equation, inputs)
        if name not in _REARRANGES:
            for output in outputs:
                self.look(output)
        return outputs, [True] * len(equation.outvars)


def _descend(jaxpr: jex_core.Jaxpr, scaled: Sequence[bool]) -> list[bool]:
    """Which outputs of a program descend from the seed, programs inside it taken whole."""
    flags: dict[Any, bool] = dict(zip(jaxpr.invars, scaled, strict=True))

    def read(variable: Any) -> bool:
        return not isinstance(variable, jex_core.Literal) and flags.get(variable, False)

    for equation in jaxpr.eqns:
        flags.update(dict.fromkeys(equation.outvars, any(map(read, equation.invars))))
    return list(map(read, jaxpr.outvars))


def _carried(
    body: jex_core.Jaxpr, around: list[bool], carry: list[bool], rest: list[bool]
) -> list[bool]:
    """Which results of a loop descend from the seed: those it carries, going round, then others."""
    while True:
        outputs = _descend(body, [*around, *carry, *rest])
        found = [a or b for a, b in zip(carry, outputs, strict=False)]
        if found == carry:
            return [*carry, *outputs[len(carry) :]]
        carry = found


_Into: TypeAlias = Callable[[_Walk, jex_core.JaxprEqn, list[Any], list[bool]], _Found]


def _inline(
    walk: _Walk, equation: jex_core.JaxprEqn, inputs: list[Any], scaled: list[bool]
) -> _Found:
    """A call, of a function with a derivative of its own too, is evaluated where it stands."""
    params = equation.params
    inner = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
    return walk.jaxpr(inner.jaxpr, inner.consts, inputs, scaled)


def _remat(
    walk: _Walk, equation: jex_core.JaxprEqn, inputs: list[Any], scaled: list[bool]
) -> _Found:
    """What is computed again is not to be found equal to what was computed before, and held."""
    if equation.params["prevent_cse"]:
        inputs = list(jax.lax.optimization_barrier(inputs))
    return walk.jaxpr(equation.params["jaxpr"], (), inputs, scaled)


def _scan(
    walk: _Walk, equation: jex_core.JaxprEqn, inputs: list[Any], scaled: list[bool]
) -> _Found:
    """A scan stays one; how large values are comes out of every step."""
    params = equation.params
    inner: jex_core.ClosedJaxpr = params["jaxpr"]
    num_consts, num_carry = scan_arity(params)
    end = num_consts + num_carry
    consts = inputs[:num_consts]
    around, carry, rest = scaled[:num_consts], scaled[num_consts:end], scaled[end:]
    flags = _carried(inner.jaxpr, around, carry, rest)
    of_body = [*around, *flags[:num_carry], *rest]

    def body(carry: list[Any], now: list[Any]) -> tuple[list[Any], Any]:
        inside = _Walk()
        outputs, _ = inside.jaxpr(inner.jaxpr, inner.consts, [*consts, *carry, *now], of_body)
        return outputs[:num_carry], (outputs[num_carry:], inside.largest())

    last, (outputs, seen) = jax.lax.scan(
        body,
        inputs[num_consts:end],
        inputs[end:],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    walk.seen.append(Largest(*(jnp.max(size, initial=0) for size in seen)))
    return [*last, *outputs], flags


def _while(
    walk: _Walk, equation: jex_core.JaxprEqn, inputs: list[Any], scaled: list[bool]
) -> _Found:
    """A loop of unknown length carries how large values are."""
    params = equation.params
    of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
    start = of_cond + of_body
    inner, goes_on = params["body_jaxpr"], jex_core.jaxpr_as_fun(params["cond_jaxpr"])
    flags = _carried(inner.jaxpr, scaled[of_cond:start], scaled[start:], [])
    around, cond_consts = inputs[of_cond:start], inputs[:of_cond]

    def body(state: tuple[list[Any], Largest]) -> tuple[list[Any], Largest]:
        carry, seen = state
        inside = _Walk()
        inside.seen.append(seen)
        its_flags = [*scaled[of_cond:start], *flags]
        outputs, _ = inside.jaxpr(inner.jaxpr, inner.consts, [*around, *carry], its_flags)
        return outputs, inside.largest()

    outputs, seen = jax.lax.while_loop(
        lambda state: goes_on(*cond_consts, *state[0])[0],
        body,
        (inputs[start:], _Walk().largest()),
    )
    walk.seen.append(seen)
    return outputs, flags


def _cond(
    walk: _Walk, equation: jex_core.JaxprEqn, inputs: list[Any], scaled: list[bool]
) -> _Found:
    """The branch that is taken counts."""
    branches: Sequence[jex_core.ClosedJaxpr] = equation.params["branches"]

    def taken(branch: jex_core.ClosedJaxpr) -> Callable[..., tuple[list[Any], Largest]]:
        def run(*operands: Any) -> tuple[list[Any], Largest]:
            inside = _Walk()
            outputs, _ = inside.jaxpr(branch.jaxpr, branch.consts, operands, scaled[1:])
            return outputs, inside.largest()

        return run

    outputs, seen = jax.lax.switch(inputs[0], list(map(taken, branches)), *inputs[1:])
    walk.seen.append(seen)
    flags = [_descend(branch.jaxpr, scaled[1:]) for branch in branches]
    return outputs, [any(its) for its in zip(*flags, strict=True)]


_INTO: dict[str, _Into] = {
    "jit": _inline,
    "pjit": _inline,
    "closed_call": _inline,
    "custom_jvp_call": _inline,
    "custom_vjp_call": _inline,
    "checkpoint": _remat,
    "remat2": _remat,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
