"""Equations that hold no program: what they make of public, random, summed and private values."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import jax.extend.core as jex_core
from jax.extend.core.primitives import dynamic_slice_p

from ..isolation import OPERAND_BY_OPERAND, dtype_of, shape_of
from ..precision.stages import stage_of
from ..programs import COLLECTIVES, SUMS_OF_DEVICES, named
from . import numbers, random_keys, randomness, rows, sensitivity
from .doors import DOORS
from .flow import Context, Flow
from .record import Record
from .releases import Drawn, Noised
from .terms import UNKNOWN, Affine, Each, Key, Root, Term, plus, varies
from .values import (
    Nothing,
    Path,
    Private,
    Public,
    Random,
    Rows,
    Sum,
    Value,
    as_public,
    made_of,
    unknown,
    words_of,
)

_DRAWS = named("random_bits random_gamma rng_bit_generator rng_uniform threefry2x32")
_ADDITIONS = named("add sub add_any")


class Equations(Flow[Value]):
    """Follows values through equations, and notes noise that is added and what leaves.

    Attributes:
        record: what was noted.
        lengths: of the mesh axes around, by name.
    """

    nothing = Public()

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record
        self.lengths: dict[str, int] = {}
        self._noised: dict[Path, Noised] = {}
        self._made: dict[Hashable, int] = {}
        self._on_devices: set[Path] = set()

    def constant(self, value: Any) -> Value:
        """A constant or a literal."""
        return numbers.constant(value)

    def joined(self, facts: Sequence[Value]) -> Value:
        """What is known of a value that is made of all of several, in whatever way."""
        public = [fact for fact in facts if isinstance(fact, Public | Random)]
        if len(public) < len(facts):
            return unknown(facts, "nonlinear", "")
        return made_of([as_public(fact) for fact in public])

    def equation(
        self, context: Context, equation: jex_core.JaxprEqn, inputs: list[Value]
    ) -> list[Value]:
        """What is known of the results of an equation that holds no program."""
        name, count = equation.primitive.name, len(equation.outvars)
        if name in DOORS:
            self.record.door(context, equation, inputs)
        if name in COLLECTIVES:
            self.put_together(context, inputs)
        if name in OPERAND_BY_OPERAND:
            return inputs
        if not count:
            return []
        if any(isinstance(value, Private | Sum) for value in inputs):
            self.record.meet(context, inputs)
        if any(isinstance(value, Private) for value in inputs):
            return self._private(context, equation, inputs)
        if any(isinstance(value, Sum) for value in inputs):
            return [self._sum(context, equation, inputs)] * count
        if name in _DRAWS or stage_of(context.scope) == "bits":
            return [self._drawn(context, equation, inputs)] * count
        if any(isinstance(value, Random) for value in inputs):
            return self._random(context, equation, inputs)
        return self._public(context, equation, [x for x in inputs if isinstance(x, Public)])

    def _public(
        self, context: Context, equation: jex_core.JaxprEqn, inputs: list[Public]
    ) -> list[Value]:
        made = made_of(inputs)
        known = (self._noised[path].draws for path in made.releases if path in self._noised)
        if made.noise & Nothing.union(*known):
            return [Private(reason="noise known", where=context.line)] * len(equation.outvars)
        if equation.primitive.name == "unstack":
            return [
                replace(made, term=one.term, low=one.low, high=one.high, words=words_of(one, made))
                for one in numbers.unstacked(equation, inputs[0])
            ]
        found = numbers.result(equation, inputs) if len(equation.outvars) == 1 else Public()
        words = words_of(found, made)
        if found.term is None and not words:
            found = replace(found, term=self._value_number(context, equation, inputs))
        along = numbers.varies_along(equation, inputs) if equation.outvars else frozenset[int]()
        whole = replace(
            made, term=found.term, low=found.low, high=found.high, words=words, along=along
        )
        return [whole] * len(equation.outvars)

    def _value_number(
        self, context: Context, equation: jex_core.JaxprEqn, inputs: list[Public]
    ) -> Term | None:
        """A name for a whole number, the same for the same arithmetic on the same numbers."""
        dtype = dtype_of(equation.outvars[0])
        if getattr(dtype, "kind", "") not in tuple("iub") or len(equation.outvars) > 1:
            return None
        if equation.primitive.name == "axis_index":
            return UNKNOWN  # another one on each device
        terms = tuple(value.term for value in inputs)
        params = tuple(sorted((name, str(value)) for name, value in equation.params.items()))
        what: Hashable = equation.primitive.name, params, terms
        if None in terms or UNKNOWN in terms:
            return Root(("made", context.path), frozenset(loop.path for loop in context.loops))
        if equation.primitive.name == "select_n" and self._counts_from_the_end(terms):
            return terms[1]
        number = self._made.setdefault(what, len(self._made))
        return Root(("made", number), frozenset[Hashable]().union(*map(varies, terms)))

    def _counts_from_the_end(self, terms: Sequence[Term | None]) -> bool:
        """Whether a selection only makes a negative index one from the end, as indexing does."""
        match terms:
            case [Root(("made", number), _), (Root() | Each()) as index, Affine() as after]:
                is_negative = self._made.get(("lt", (), (index, numbers.ZERO))) == number
                return is_negative and after == plus(index, 1, after.offset)
            case _:
                return False

    def _random(
        self, context: Context, equation: jex_core.JaxprEqn, inputs: list[Value]
    ) -> list[Value]:
        rule = randomness.RULES.get(equation.primitive.name)
        found = None if rule is None else rule(equation, inputs)
        zeros = [x for x in inputs if isinstance(x, Public) and x.low == x.high == 0]
        if zeros and equation.primitive.name == "mul":
            return [Public(low=0.0, high=0.0)]
        public = [as_public(x) for x in inputs if isinstance(x, Public | Random)]
        if found is None:
            return self._public(context, equation, public)
        beside = made_of([x for x in inputs if isinstance(x, Public)])
        if beside.noise or beside.releases:
            again = self._more_noise(context, equation, inputs)
            return self._public(context, equation, public) if again is None else [again]
        if len(equation.outvars) > 1 and isinstance(inputs[0], Random):
            return list(randomness.parts(equation, inputs[0]))
        return [found]

    def _sum(self, context: Context, equation: jex_core.JaxprEqn, inputs: list[Value]) -> Value:
        name = equation.primitive.name
        noise = [value for value in inputs if isinstance(value, Random)]
        sums = [value for value in inputs if isinstance(value, Sum)]
        is_addition = name in _ADDITIONS and len(noise) == 1 and len(sums) == 1
        if is_addition and noise[0].kind == "normal" and _are_alike(equation):
            return self._release(context, sums[0], noise[0])
        if noise or any(isinstance(x, Public) and x.noise for x in inputs):
            if name in _ADDITIONS and len(sums) == 1 and context.is_final:
                is_known = is_addition and (noise[0].kind == "repeated" or not _are_alike(equation))
                self._other_noise(context, is_known)
            return unknown(inputs, "nonlinear", context.line)
        if name in SUMS_OF_DEVICES and len(inputs) == 1:
            return self._sum_of_devices(equation, sums[0])
        rule = sensitivity.RULES.get(name)
        found = None if rule is None else rule(equation, inputs)
        if found is not None:
            public = made_of([value for value in inputs if isinstance(value, Public)])
            is_even = found.is_even and sensitivity.is_even(equation, inputs)
            is_even = is_even and not self._is_laid_out_alone(equation, inputs)
            is_same = is_even and sensitivity.is_entry_by_entry(equation)
            return replace(
                found,
                apart_along=found.apart_along if is_same else None,
                releases=found.releases | public.releases,
                is_even=is_even,
            )
        if sensitivity.is_rounded(equation):
            return unknown(inputs, "rounded", context.line)
        is_unbounded = name in sensitivity.UNBOUNDED
        return unknown(inputs, "nonlinear" if is_unbounded else "unknown", context.line)

    def _is_laid_out_alone(self, equation: jex_core.JaxprEqn, inputs: list[Value]) -> bool:
        """Whether entries of a part of a batch change places, without those of other parts."""
        if equation.primitive.name not in sensitivity.LAY_OUT:
            return False
        names = [{term.source for term in x.terms} for x in inputs if isinstance(x, Sum)]
        known = self.record.sources
        is_of_parts = any(
            isinstance(cut.start, int)
            for some in names
            for name in some
            if name in known
            for cut in known[name].cuts
        )
        return is_of_parts and (len(set(map(frozenset, names))) > 1 or len(names[0]) < 2)

    def _release(self, context: Context, value: Sum, noise: Random) -> Public:
        path = context.path
        if self.lengths:
            self._on_devices.add(path)
        noised = Noised(value, noise.stddev, noise.draws, noise.part, context)
        self._noised[path] = noised
        if context.is_final:
            self.record.releases[path] = noised
            self._check_turns(context, noise)
            self._check_devices(context, value, noise)
            if value.kept_in & {loop.path for loop in context.loops}:
                self.record.note(
                    "noise",
                    "a loop adds noise to clipped sums of earlier turns",
                    context.line,
                    "What an example adds is then released several times. Add the noise to the "
                    "clipped sum of each turn, before it is added up.",
                    is_decided=False,
                )
        return Public(releases=value.releases | {path}, noised=path)

    def _check_devices(self, context: Context, value: Sum, noise: Random) -> None:
        """In a shard_map one noise is for one sum over all devices."""
        drawn = [self.record.draws[draw] for draw in noise.draws if draw in self.record.draws]
        if value.spread or (self.lengths and any(UNKNOWN in one.key.path for one in drawn)):
            self.record.note(
                "noise",
                f"devices along {sorted(value.spread or self.lengths)} add noise of their own",
                context.line,
                "Sum over the devices first (jax.lax.psum), and add the same noise on all of them.",
                is_decided=False,
            )

    def _more_noise(
        self, context: Context, equation: jex_core.JaxprEqn, inputs: list[Value]
    ) -> Public | None:
        """Independent noise on top of a release is one release with both; None of anything else."""
        noise = next(value for value in inputs if isinstance(value, Random))
        noisy = [x.noised for x in inputs if isinstance(x, Public) and x.noised is not None]
        if equation.primitive.name not in _ADDITIONS or not noisy or noise.kind != "normal":
            return None
        first = self._noised[noisy[0]]
        if first.draws & noise.draws or not _are_alike(equation):
            return None
        both = Random(
            first.draws | noise.draws, "normal", 0.0, math.hypot(first.stddev, noise.stddev)
        )
        return self._release(context, first.value, both)

    def _check_turns(self, context: Context, noise: Random) -> None:
        """A loop that adds noise drawn outside of it adds the same noise in each turn."""
        for loop in context.loops:
            drawn = [self.record.draws[draw] for draw in noise.draws if draw in self.record.draws]
            if loop.path not in noise.turns and not all(loop in one.at.loops for one in drawn):
                self.record.note(
                    "fresh noise",
                    "a loop adds the same noise in every turn",
                    context.line,
                    "Draw the noise inside the loop, with a key of each turn's own.",
                )

    def _other_noise(self, context: Context, is_repeated: bool) -> None:
        self.record.note(
            "noise",
            "one random number is added to several entries of the clipped sum"
            if is_repeated
            else "what is added to the clipped sum is random, and not independent normal noise",
            context.line,
            "Only independent normal numbers, one an entry, are accounted for: take "
            "plan.privatizer, or jax.random.normal of the leaf's shape times a constant.",
            is_decided=is_repeated,
        )

    def _private(
        self, context: Context, equation: jex_core.JaxprEqn, inputs: list[Value]
    ) -> list[Value]:
        noise = [value for value in inputs if isinstance(value, Random)]
        whole = unknown(inputs, None, context.line)
        if noise and equation.primitive.name in _ADDITIONS and whole.noised is None:
            whole = replace(whole, noised=(noise[0].stddev, context.line))
        if whole.reason == "taken" and any(isinstance(x, Private) and x.rows for x in inputs):
            whole = replace(whole, reason="data", where=context.line)
        if any(isinstance(value, Sum) for value in inputs):
            return [replace(whole, rows=frozenset(), cuts=frozenset())] * len(equation.outvars)
        before = {row.axis for value in inputs if isinstance(value, Private) for row in value.rows}
        results: list[Value] = []
        for kept, cuts in rows.moved(equation, inputs, self._places(equation, inputs)):
            is_lost = whole.reason == "data" and len({row.axis for row in kept}) < len(before)
            where = context.line if is_lost else whole.where
            is_taken = is_lost and rows.may_repeat(equation, inputs)
            reason = "taken" if is_taken else whole.reason
            if rows.by_slot(equation, inputs, kept):
                kept, reason, where = frozenset[Rows](), "slots", context.line
            results.append(replace(whole, rows=kept, cuts=cuts, where=where, reason=reason))
        return results

    def _places(self, equation: jex_core.JaxprEqn, inputs: list[Value]) -> rows.Places:
        terms = [value.term if isinstance(value, Public) else None for value in inputs[1:]]
        index: Hashable = id(equation) if None in terms else tuple(terms)
        changing = frozenset[Hashable]().union(*map(varies, terms))

        def own_turn(dim: int, length: int, whole: int) -> Hashable | None:
            if equation.primitive is not dynamic_slice_p:
                return None
            base, slope, offset = terms[dim], 1, 0
            if isinstance(base, Affine):
                base, slope, offset = base
            turns = self.record.counters.get(base.name) if isinstance(base, Root) else None
            if turns is None or slope * turns.change != length:
                return None
            if plus(turns.start, slope, offset) != numbers.ZERO:
                return None
            return turns.loop if (turns.length or 0) * length == whole else None

        return rows.Places(index, changing - {"calls"}, own_turn)

    def _drawn(self, context: Context, equation: jex_core.JaxprEqn, inputs: list[Value]) -> Value:
        public = [value for value in inputs if isinstance(value, Public)]
        keys = [value.term for value in public if isinstance(value.term, Key)]
        keys = keys or list(frozenset[Key]().union(*(value.words for value in public)))
        key = keys[0] if len(keys) == 1 else Key(UNKNOWN)
        if context.is_final:
            self.record.draws[context.path] = Drawn(key, context)
        draws = frozenset({context.path})
        is_bits = stage_of(context.scope) == "bits"
        if is_bits and not key.along:
            return Random(draws, "bits", 8.0 * dtype_of(equation.outvars[0]).itemsize)
        lengths = shape_of(equation.invars[0])
        if equation.primitive.name == "random_bits" and random_keys.all_differ(key, lengths):
            return Random(draws, "bits", float(equation.params["bit_width"]))
        return Public(noise=draws)

    def put_together(self, context: Context, values: Sequence[Value]) -> None:
        """Notes releases that devices made and that are put together: some may have one noise."""
        inside = (value.releases for value in values if isinstance(value, Public))
        known = {path for paths in inside for path in paths if path in self._on_devices}
        if known and context.is_final:
            self.record.note(
                "noise",
                "what devices add noise to is put together, and it is not known whether each has "
                "numbers of its own, with noise of its own",
                context.line,
                "Add noise where all devices hold the same, with one key, or outside of shard_map.",
                is_decided=False,
            )

    def _sum_of_devices(self, equation: jex_core.JaxprEqn, value: Sum) -> Value:
        """A sum over devices. Where each has rows of its own, an example is on one of them."""
        if equation.params.get("axis_index_groups") is not None:
            return unknown([value], "unknown", "")
        axes = [axis for axis in equation.params["axes"] if isinstance(axis, str)]
        others = [axis for axis in axes if axis not in value.spread]
        factor = float(math.prod(self.lengths.get(axis, math.inf) for axis in others))
        return replace(value.scaled(factor), spread=value.spread - set(axes))


def _are_alike(equation: jex_core.JaxprEqn) -> bool:
    """Whether both operands and the result have one shape, and hold real floats."""
    variables = [*equation.invars, equation.outvars[0]]
    return len({shape_of(v) for v in variables}) == 1 and all(map(sensitivity.is_float, variables))
