"""Arithmetic of accelerators, in NumPy: a traced program is run as the worst machine would run it.

The machine keeps numbers below the normal range, divides and takes roots to within two units in the
last place, multiplies in narrow formats, and adds in any order. Errors are as large as they may be:

| operation | the result is |
|---|---|
| addition, multiplication | rounded to nearest |
| division, square root | rounded to nearest, and then moved by 2 units, all one way |
| a sum of n terms | the exact one, off by n - 1 roundings of all terms' absolute values |
| a contraction of n products | likewise, by n errors of a product; of bfloat16, by 4 n roundings |

Which way sums are off is drawn for each entry of each equation: an equation that runs twice gives
the same twice, as one kernel does, and another equation, which is compiled apart, something else.
So does an equation of a function that is called in two places.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.extend.core as jex_core
import numpy as np
from jax import lax

from eqx_dp.programs import Call, Cond, Scan, While, inside, interpret, literal_value

U, BFLOAT16 = 2.0**-24, np.dtype(jax.numpy.bfloat16)
_SUMMED = (np.dtype("float32"), BFLOAT16)
_UFUNCS = {
    "abs": np.abs, "add": np.add, "add_any": np.add, "and": np.bitwise_and, "eq": np.equal,
    "ge": np.greater_equal, "gt": np.greater, "is_finite": np.isfinite, "le": np.less_equal,
    "lt": np.less, "max": np.maximum, "min": np.minimum, "mul": np.multiply, "ne": np.not_equal,
    "neg": np.negative, "not": np.invert, "or": np.bitwise_or, "square": np.square,
    "sqrt": np.sqrt, "sub": np.subtract,
}  # fmt: skip


@dataclass
class Machine:
    """One way to be off.

    Attributes:
        up: whether quotients and roots are too large, or too small.
        product: the relative error of a product in a contraction.
        seed: of the directions in which sums are off.
        wanders: whether a scatter that runs twice gives something else the second time, as kernels
            do that add with atomic operations.
    """

    up: bool = True
    product: float = U
    seed: int = 0
    wanders: bool = False
    _runs: int = 0
    _places: dict[tuple[int, ...], Any] = field(default_factory=dict)
    _path: tuple[int, ...] = ()

    def __call__(self, function: Any, *args: Any) -> Any:
        """Traces a function and runs it."""
        program, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        found = self.run(program, [np.asarray(x) for x in jax.tree.leaves(args)])
        return jax.tree.unflatten(jax.tree.structure(shape), found)

    def run(self, program: jex_core.ClosedJaxpr, values: list[Any]) -> list[Any]:
        """Runs a program that is traced."""
        with np.errstate(all="ignore"), jax.enable_x64(True):
            return self._run(program, values)

    def _run(self, program: jex_core.ClosedJaxpr, values: list[Any]) -> list[Any]:
        return interpret(program.jaxpr, program.consts, values, self._equation, literal_value)

    def _equation(self, equation: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
        outside, self._path = self._path, (*self._path, id(equation))
        found = self._results(equation, list(map(_numpy, values)))
        self._path = outside
        return found

    def _results(self, equation: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
        name, params = equation.primitive.name, equation.params
        match inside(equation):
            case Call(body=body):
                return self._run(body, values)
            case Cond(branches=branches):
                return self._run(branches[int(values[0])], values[1:])
            case Scan() as scan:
                return step_by_step(scan, params["reverse"], self._run, values, _stacked)
            case While() as loop:
                of_cond, of_body, carry = loop.split(values)
                while self._run(loop.condition, [*of_cond, *carry])[0]:
                    carry = self._run(loop.body, [*of_body, *carry])
                return carry
            case _:
                pass
        is_float = bool(values) and getattr(values[0], "dtype", None) == np.float32
        if name == "optimization_barrier":
            return values
        if name in _UFUNCS:
            return [np.asarray(_UFUNCS[name](*values)).astype(equation.outvars[0].aval.dtype)]
        if name == "select_n":
            which, *cases = values
            return [np.choose(np.broadcast_to(which, cases[0].shape).astype(int), cases)]
        if name == "integer_pow" and is_float and params["y"] == 2:
            return [np.square(values[0])]
        if name == "div" and is_float:
            return [self._moved(np.float64(values[0]) / np.float64(values[1]))]
        if name == "sqrt" and is_float:
            return [self._moved(np.sqrt(np.float64(values[0])))]
        if name == "reduce_sum" and is_float:
            terms = np.prod([values[0].shape[axis] for axis in params["axes"]])
            return [self._summed(equation, values, (max(terms, 1) - 1) * U)]
        if name == "dot_general" and (is_float or values[0].dtype == BFLOAT16):
            (contracted, _), _ = params["dimension_numbers"]
            terms = np.prod([values[0].shape[axis] for axis in contracted])
            error = terms * (self.product if is_float else 4 * U)
            result = self._summed(equation, values, error)
            return [result.astype(equation.outvars[0].aval.dtype)]
        if name == "scatter-add" and is_float:
            ones = [np.zeros_like(values[0]), values[1], np.ones_like(values[2])]
            return [self._summed(equation, values, np.maximum(_exactly(equation, ones), 0) * U)]
        found = equation.primitive.bind(*values, **equation.primitive.get_bind_params(params))
        return list(found) if equation.primitive.multiple_results else [found]

    def _moved(self, exact: Any) -> Any:
        """Rounded and two units off; below the normal range, to the next number."""
        near = np.float32(exact)
        towards = np.float32(np.inf if self.up else 0)
        moved = np.nextafter(np.nextafter(near, towards), towards)
        is_small = np.abs(exact) < np.finfo(np.float32).tiny
        is_below = np.abs(np.float64(near)) < np.abs(exact)
        beside = np.where(is_below & self.up, np.nextafter(near, towards), near)
        keeps = (exact == 0) | ~np.isfinite(exact)
        return np.where(keeps, near, np.where(is_small, beside, moved)).astype(np.float32)

    def _summed(self, equation: jex_core.JaxprEqn, values: list[Any], error: Any) -> Any:
        """A sum that is off by a part of the sum of absolute values."""
        exact = _exactly(equation, values)
        sizes = _exactly(equation, [np.abs(x) if x.dtype in _SUMMED else x for x in values])
        # An equation is known by itself, which has to be held for its address to be its own.
        place, _ = self._places.setdefault(self._path, (len(self._places), equation))
        is_atomic = self.wanders and equation.primitive is lax.scatter_add_p
        self._runs += is_atomic
        rng = np.random.default_rng([self.seed, place, self._runs if is_atomic else 0])
        signs = rng.choice([-1.0, 1.0], size=exact.shape)
        off = exact + signs * error * sizes
        # What goes into the sum alone, and so is exact, stays.
        stays = (np.abs(exact) == sizes) & (error == 0)
        return np.where(stays, exact, off).astype(np.float32)


def step_by_step(
    scan: Scan,
    is_reverse: bool,
    run: Callable[[jex_core.ClosedJaxpr, list[Any]], list[Any]],
    values: list[Any],
    stack: Callable[[Sequence[Any]], Any] = jax.numpy.stack,
) -> list[Any]:
    """The results of a scan whose steps are run one after the other."""
    consts, carry, over = scan.split(values)
    turns, made = range(scan.length), list[list[Any]]()
    for i in reversed(turns) if is_reverse else turns:
        found = run(scan.body, [*consts, *carry, *(x[i] for x in over)])
        carry = found[: scan.num_carry]
        made.append(found[scan.num_carry :])
    made = made[::-1] if is_reverse else made
    return [*carry, *map(stack, zip(*made, strict=True))]


def _stacked(values: Sequence[Any]) -> Any:
    return np.stack(list(map(_numpy, values)))


def _exactly(equation: jex_core.JaxprEqn, values: list[Any]) -> Any:
    """The result of a linear equation in float64."""
    wide = [np.float64(x) if x.dtype in _SUMMED else x for x in values]
    with jax.enable_x64(True):
        if equation.primitive is lax.dot_general_p:
            numbers = equation.params["dimension_numbers"]
            return np.asarray(lax.dot_general(*wide, numbers))
        params = equation.params
        if equation.primitive is lax.scatter_add_p:
            numbers, mode = params["dimension_numbers"], params["mode"]
            return np.asarray(lax.scatter_add(*wide, numbers, mode=mode))
        return np.asarray(equation.primitive.bind(*wide, **params))


def _numpy(x: Any) -> Any:
    is_key = isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return x if is_key else np.asarray(x)
