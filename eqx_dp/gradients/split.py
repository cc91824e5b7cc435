"""A loss in two programs: what depends on parameters alone, and what one example needs beside."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
from jaxtyping import Array

from ..programs import (
    Call,
    Scan,
    evaluated,
    inside,
    interpret,
    literal_value,
    rematerialised,
    scanned,
)
from ..programs import at as named
from ..sharding import Shard
from .derived import Derived, Fixed, Key, Search, search
from .program import Program


class Shared(NamedTuple):
    """The values that the program of one example takes, and all examples share.

    Attributes:
        roots: the trainable leaves, then the values derived from them.
        fixed: the other arrays of the model, then values that no gradient goes through.

    Of arrays of the model a device may hold a part.
    """

    roots: list[Array | Shard]
    fixed: list[Array | Shard]


class Split(NamedTuple):
    """The two programs of a loss.

    Attributes:
        whole: the loss as it was.
        program: of one example: inputs are those of `Shared`, then the example's.
        outside: from trainable leaves and other arrays to the derived values, and those that no
            gradient goes through; None where there are none.
        derived: the derived values.
    """

    whole: Program
    program: Program
    outside: jex_core.ClosedJaxpr | None
    derived: tuple[Derived, ...]

    @property
    def consts(self) -> list[Any]:
        """The arrays that the programs close over."""
        consts = list(self.whole.jaxpr.consts)
        if self.outside is None:
            return consts
        return [*consts, *self.program.jaxpr.consts, *self.outside.consts]

    def with_consts(self, consts: list[Any]) -> "Split":
        """The same programs, closed over other arrays."""
        values = iter(consts)

        def take(program: jex_core.ClosedJaxpr) -> list[Any]:
            return list(itertools.islice(values, len(program.consts)))

        whole = self.whole.with_consts(take(self.whole.jaxpr))
        if self.outside is None:
            return self._replace(whole=whole, program=whole)
        program = self.program.with_consts(take(self.program.jaxpr))
        outside = jex_core.ClosedJaxpr(self.outside.jaxpr, take(self.outside))
        return Split(whole, program, outside, self.derived)

    def is_met_outside(self, place: int) -> bool:
        """Whether a value is derived from an array of the model, by its place among all."""
        if self.outside is None:
            return False
        jaxpr = self.outside.jaxpr
        array = jaxpr.invars[place]
        return any(array in equation.invars for equation in jaxpr.eqns) or array in jaxpr.outvars

    def shared(self, params: Sequence[Array | Shard], frozen: Sequence[Array | Shard]) -> Shared:
        """Evaluates what depends on parameters alone, once."""
        if self.outside is None:
            return Shared([*params], [*frozen])
        run: Callable[..., list[Array]] = jex_core.jaxpr_as_fun(self._narrowed(self.outside))
        found = run(*map(_or_part, (*params, *frozen)))
        num_roots = len(self.derived)
        return Shared([*params, *found[:num_roots]], [*frozen, *found[num_roots:]])

    def _narrowed(self, program: jex_core.ClosedJaxpr) -> jex_core.ClosedJaxpr:
        """What is evaluated of what depends on parameters alone."""
        return self.program._replace(jaxpr=program).run()

    def of_leaves(
        self, leaves: Sequence[int], roots: Sequence[int], shared: Shared
    ) -> Callable[[list[Array]], list[Array]]:
        """Some derived values as a function of some parameters, all else being what it is."""
        assert self.outside is not None
        num_leaves = len(shared.roots) - len(self.derived)
        needed = pruned(self.outside, [root - num_leaves for root in roots])
        run: Callable[..., list[Array]] = jex_core.jaxpr_as_fun(self._narrowed(needed))
        params = shared.roots[:num_leaves]
        frozen = shared.fixed[: len(self.outside.in_avals) - num_leaves]

        def function(values: list[Array]) -> list[Array]:
            changed = dict(zip(leaves, values, strict=True))
            own = (changed.get(i, x) for i, x in enumerate(params))
            return run(*map(_or_part, (*own, *frozen)))

        return function


def _or_part(x: Array | Shard) -> Array:
    """An array; in the place of one that nothing is derived from, a part will do."""
    return x.part if isinstance(x, Shard) else x


def split(program: Program, num_leaves: int, num_fixed: int) -> Split:
    """Takes what depends on parameters alone out of a loss.

    Args:
        program: the loss of one example.
        num_leaves: how many of its inputs, the first, are trainable leaves.
        num_fixed: how many behind those are the same for every example.
    """
    found, outputs = search(program, num_leaves, num_fixed)
    # What leaves as aux has no gradient: it comes from outside, as if of one more equation.
    aux = {
        place: (len(program.jaxpr.eqns), place)
        for place, fact in enumerate(outputs)
        if place > 0 and fact is not None and fact != Fixed(fact.over)
    }
    if not found.moved and not aux:
        return Split(program, program, None, ())
    derived = tuple(its for its in found.derived if its.key in found.met)
    keys = [its.key for its in derived]
    keys += [*(key for key in found.met if key not in {*keys}), *aux.values()]
    num_shared = num_leaves + num_fixed

    def outside(*shared: Array) -> list[Array]:
        batch = [None] * (len(program.jaxpr.in_avals) - num_shared)
        results, values = _Outside(found).program(program.jaxpr, [*shared, *batch], ())
        values.update({key: results[place] for place, key in aux.items()})
        return [values[key] for key in keys]

    def of_example(*inputs: Array) -> list[Array]:
        values = iter(inputs)

        def take(count: int) -> list[Array]:
            return list(itertools.islice(values, count))

        leaves, roots = take(num_leaves), take(len(derived))
        frozen, fixed = take(num_fixed), take(len(keys) - len(derived))
        given = dict(zip(keys, [*roots, *fixed], strict=True))
        arguments = [*leaves, *frozen, *values]
        results = _OfExample(found).program(program.jaxpr, arguments, given, ())
        return [given[aux[i]] if i in aux else result for i, result in enumerate(results)]

    avals: list[Any] = program.jaxpr.in_avals
    made = jax.make_jaxpr(outside)(*avals[:num_shared])
    cut, more = len(derived), made.out_avals
    inputs = [
        *[*avals[:num_leaves], *more[:cut]],
        *[*avals[num_leaves:num_shared], *more[cut:]],
        *avals[num_shared:],
    ]
    rest = jax.make_jaxpr(of_example)(*inputs)
    needed = pruned(made, range(len(keys)))
    return Split(program, program._replace(jaxpr=rest), needed, derived)


def pruned(program: jex_core.ClosedJaxpr, wanted: Sequence[int]) -> jex_core.ClosedJaxpr:
    """The equations that some of a program's results need, from all of its inputs."""
    jaxpr = program.jaxpr
    results = [jaxpr.outvars[place] for place in wanted]
    needed: set[Any] = {x for x in results if isinstance(x, jex_core.Var)}
    kept: list[jex_core.JaxprEqn] = []
    for equation in reversed(jaxpr.eqns):
        if needed.isdisjoint(equation.outvars):
            continue
        kept.insert(0, equation)
        needed.update(x for x in equation.invars if isinstance(x, jex_core.Var))
    name = jex_core.DebugInfo("derived", "outside", None, None)
    alone = jex_core.Jaxpr(
        jaxpr.constvars, jaxpr.invars, results, kept, jaxpr.effects, debug_info=name
    )
    return jex_core.ClosedJaxpr(alone, program.consts)


class _Outside(NamedTuple):
    """Evaluates what depends on no example; None stands for what does.

    Attributes:
        found: what is derived, and where it meets data.
    """

    found: Search

    def program(
        self, program: jex_core.ClosedJaxpr, inputs: Sequence[Any], address: Key
    ) -> tuple[list[Any], dict[Key, Any]]:
        """The results, and the values that data meet."""
        indices, values = itertools.count(), dict[Key, Any]()

        def of_equation(equation: jex_core.JaxprEqn, inputs: list[Any]) -> list[Any]:
            here = (*address, next(indices))
            with named(equation):
                outputs, more = self.equation(equation, inputs, here)
            values.update(more)
            keys = [(*here, place) for place in range(len(outputs))]
            met = zip(keys, outputs, strict=True)
            values.update({key: x for key, x in met if key in self.found.met and x is not None})
            return outputs

        outputs = interpret(program.jaxpr, program.consts, inputs, of_equation, literal_value)
        return outputs, values

    def equation(
        self, equation: jex_core.JaxprEqn, inputs: list[Any], address: Key
    ) -> tuple[list[Any], dict[Key, Any]]:
        data: list[Any] = [None] * len(equation.outvars)
        is_data = address in self.found.data
        match inside(equation):
            case Call("jit" | "remat", body):
                outputs, values = self.program(body, inputs, address)
                return data if is_data else outputs, values
            case Scan() as scan if is_data:
                return data, self.scan(scan, inputs, address)
            case _:
                pass
        if is_data or any(x is None for x in inputs):
            return data, {}
        return evaluated(equation, inputs), {}

    def scan(self, scan: Scan, inputs: list[Any], address: Key) -> dict[Key, Any]:
        """All steps at once: no step needs another one's results."""
        below = {key: over for key, over in self.found.met.items() if _is_below(key, address)}
        if not below:
            return {}
        consts, carry, slices = scan.split(inputs)
        start = [*consts, *[None] * len(carry)]

        def step(slices: list[Any]) -> dict[Key, Any]:
            return self.program(scan.body, [*start, *slices], address)[1]

        if all(x is None for x in slices):
            return step(slices)
        axes = {key: 0 if address in over else None for key, over in below.items()}
        return jax.vmap(step, out_axes=axes, axis_size=scan.length)(slices)


class _OfExample(NamedTuple):
    """Evaluates what is left of a loss; None stands for what is not needed there.

    Attributes:
        found: what is derived, and where it meets data.
    """

    found: Search

    def program(
        self,
        program: jex_core.ClosedJaxpr,
        inputs: Sequence[Any],
        given: dict[Key, Any],
        address: Key,
    ) -> list[Any]:
        """The results, from the inputs and the values that come from outside."""
        indices = itertools.count()

        def of_equation(equation: jex_core.JaxprEqn, inputs: list[Any]) -> list[Any]:
            here = (*address, next(indices))
            if here in self.found.moved:
                return [given.get((*here, place)) for place in range(len(equation.outvars))]
            is_missing = any(x is None for x in inputs)
            if is_missing or any(_is_below(key, here) for key in self.found.moved):
                return self.inside(equation, inputs, given, here)
            return evaluated(equation, inputs)

        return interpret(program.jaxpr, program.consts, inputs, of_equation, literal_value)

    def inside(
        self, equation: jex_core.JaxprEqn, inputs: list[Any], given: dict[Key, Any], address: Key
    ) -> list[Any]:
        """An equation that holds derived values, or rearranges one that is not needed."""
        below = {key: x for key, x in given.items() if _is_below(key, address)}

        def run(body: jex_core.ClosedJaxpr, inputs: list[Any], given: Any) -> tuple[Any, None]:
            return self.program(body, inputs, given, address), None

        is_data = address in self.found.data
        with named(equation):
            match inside(equation):
                case Call("remat", body) if is_data:
                    return rematerialised(
                        equation, lambda inputs, given: run(body, inputs, given), inputs, below
                    )[0]
                case Call(body=body):
                    return run(body, inputs, below)[0]
                case Scan(body=body) as scan if is_data:
                    slices = {key: x for key, x in below.items() if address in self.found.met[key]}
                    return scanned(
                        equation,
                        scan,
                        lambda inputs, now: run(body, inputs, {**below, **now}),
                        inputs,
                        slices,
                    )[0]
                case _:
                    return [None] * len(equation.outvars)


def _is_below(key: Key, address: Key) -> bool:
    return key[: len(address)] == address and len(key) > len(address)
