"""Private data followed through a step, from its arguments to every result."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import jax.extend.core as jex_core
from jax.extend.core.primitives import dynamic_slice_p

from ..gradients import Mark, mark_of
from ..isolation import OPERAND_BY_OPERAND, shape_of
from ..precision.stages import stage_of
from ..programs import Cond, Scan, ShardMap, While, inside, named, programs_of
from . import loops, numbers, randomness, rows, sensitivity
from .doors import DOORS, Doors
from .flow import Context, Flow
from .privacy_report import Finding
from .releases import Drawn, Noised, Source, joint_bound
from .terms import UNKNOWN, Affine, Each, Key, Root, Term, Turns, plus
from .values import (
    Cut,
    Linear,
    Nothing,
    Path,
    Private,
    Public,
    Random,
    Reason,
    Rows,
    Sum,
    Value,
    either,
)

_DRAWS = named("random_bits random_gamma rng_bit_generator rng_uniform threefry2x32")
_SUMS_OF_DEVICES = named("psum psum_invariant unreduced_psum")
_ADDITIONS = named("add sub add_any")


class PrivacyFlow(Flow[Value]):
    """Follows private data, noise and keys, and notes what happens to them.

    Attributes:
        sources: the clipped sums of the engine's.
        draws: random bits, by where they are drawn.
        of_losses: keys that the engine gives to losses.
        releases: noise that is added to clipped sums, by where.
        counters: numbers that count the turns of loops.
        found: what breaks a rule, each once.
        unmasked: lines where the engine is called without a mask.
        models: numbers of arguments that came back private, and that the engine's model holds.
        shown: releases that leave the program beside its results.
    """

    nothing = Public()

    def __init__(self) -> None:
        super().__init__()
        self.sources: dict[Hashable, Source] = {}
        self.draws: dict[Path, Drawn] = {}
        self.of_losses: dict[Path, Drawn] = {}
        self.releases: dict[Path, Noised] = {}
        self.counters: dict[Hashable, Turns] = {}
        self.found: dict[Finding, None] = {}
        self.unmasked: dict[str, None] = {}
        self.models: set[int] = set()
        self.shown: frozenset[Path] = Nothing
        self._noise_of: dict[Path, frozenset[Path]] = {}
        self._releases_seen: dict[Path, Noised] = {}
        self._made: dict[Hashable, int] = {}
        self._lengths: dict[str, int] = {}

    def constant(self, value: Any) -> Value:
        """A constant or a literal."""
        return numbers.constant(value)

    def program(
        self, program: jex_core.ClosedJaxpr, inputs: Sequence[Value], context: Context
    ) -> list[Value]:
        """What is known of a program's results; two calls of one program are two things."""
        return self.equations(program, inputs, context)

    def joined(self, facts: Sequence[Value]) -> Value:
        """What is known of a value that is made of all of several, in whatever way."""
        private = [fact for fact in facts if isinstance(fact, Private | Sum)]
        if private:
            return _unknown(private, "nonlinear", "")
        return _made_of([x if isinstance(x, Public) else loops.as_public(x) for x in facts])

    def either(self, facts: Sequence[Value]) -> Value:
        """What is known of a value that is any of several, as a public value decides."""
        first = facts[0]
        if all(fact == first for fact in facts):
            return first
        sums = [fact for fact in facts if isinstance(fact, Sum)]
        if sums and all(isinstance(fact, Sum | Public) for fact in facts):
            return either(sums)
        found = self.joined(facts)
        if isinstance(found, Public):
            bounds = [x for x in facts if isinstance(x, Public)]
            terms = {x.term for x in bounds}
            if len(bounds) == len(facts):
                low, high = min(x.low for x in bounds), max(x.high for x in bounds)
                term = terms.pop() if len(terms) == 1 else None
                return replace(found, low=low, high=high, term=term)
        if isinstance(found, Private) and not sums:
            private = [fact for fact in facts if isinstance(fact, Private)]
            shared = frozenset[Rows].intersection(*(fact.rows for fact in private))
            cuts = frozenset[Cut].intersection(*(fact.cuts for fact in private))
            return replace(private[0], rows=shared, cuts=cuts)
        return found

    def holder(
        self, context: Context, equation: jex_core.JaxprEqn, inputs: list[Value]
    ) -> list[Value]:
        """What is known of an equation's results, whatever it holds."""
        mark = mark_of(equation)
        if mark is not None:
            return self._engine(context, equation, mark, inputs)
        match inside(equation):
            case Cond() as cond:
                return self._cond(context, cond, inputs)
            case Scan() as scan:
                consts, start, over = scan.split(inputs)
                turned = [self._turn(value, context) for value in over]
                found, stacked = self._turns(
                    context.turn(scan.length), scan.body, consts, start, turned, scan.length
                )
                return [*found, *(self._stacked(x, context, scan.length) for x in stacked)]
            case While() as loop:
                of_condition, of_body, start = loop.split(inputs)
                return self._while(context, loop, of_condition, of_body, start)
            case ShardMap() as spread:
                return self._shard_map(context, equation, spread, inputs)
            case None if programs_of(equation) and "update_jaxpr" not in equation.params:
                return self._unknown_program(context, equation, inputs)
            case _:
                return super().holder(context, equation, inputs)

    def equation(
        self, context: Context, equation: jex_core.JaxprEqn, inputs: list[Value]
    ) -> list[Value]:
        """What is known of the results of an equation that holds no program."""
        name, count = equation.primitive.name, len(equation.outvars)
        if name in DOORS:
            self._door(context, equation, inputs)
        if name in OPERAND_BY_OPERAND:
            return inputs
        if not count:
            return []
        if any(isinstance(value, Private) for value in inputs):
            return self._private(context, equation, inputs)
        if any(isinstance(value, Sum) for value in inputs):
            return [self._sum(context, equation, inputs)] * count
        if name in _DRAWS or stage_of(context.scope) == "bits":
            return [self._drawn(context, equation, inputs)] * count
        if any(isinstance(value, Random) for value in inputs):
            return self._random(context, equation, inputs)
        return self._public(context, equation, [x for x in inputs if isinstance(x, Public)])

    # Values of each kind.

    def _public(
        self, context: Context, equation: jex_core.JaxprEqn, inputs: list[Public]
    ) -> list[Value]:
        made = _made_of(inputs)
        known = frozenset[Path]().union(*(self._noise_of.get(r, Nothing) for r in made.releases))
        if made.noise & known:
            return [Private(reason="noise known", where=context.line)] * len(equation.outvars)
        found = numbers.result(equation, inputs) if len(equation.outvars) == 1 else Public()
        words = made.words
        if isinstance(found.term, Key):
            words = frozenset({found.term} if found.term.is_words else ())
        if found.term is None and not words:
            found = replace(found, term=self._value_number(equation, inputs))
        whole = replace(made, term=found.term, low=found.low, high=found.high, words=words)
        return [whole] * len(equation.outvars)

    def _value_number(self, equation: jex_core.JaxprEqn, inputs: list[Public]) -> Term | None:
        """A name for a whole number, the same for the same arithmetic on the same numbers."""
        dtype = getattr(equation.outvars[0].aval, "dtype", None)
        if dtype is None or dtype.kind not in "iub" or len(equation.outvars) > 1:
            return None
        terms = tuple(value.term for value in inputs)
        params = tuple(sorted((name, str(value)) for name, value in equation.params.items()))
        what: Hashable = equation.primitive.name, params, terms
        if None in terms or UNKNOWN in terms:
            what = id(equation)
        elif equation.primitive.name == "select_n" and self._counts_from_the_end(terms):
            return terms[1]
        number = self._made.setdefault(what, len(self._made))
        return Root(("made", number), frozenset[Hashable]().union(*map(numbers.varies, terms)))

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
        public = [x if isinstance(x, Public) else loops.as_public(x) for x in inputs]
        if found is None:
            return self._public(context, equation, public)
        beside = _made_of([x for x in inputs if isinstance(x, Public)])
        if beside.noise or beside.releases:
            again = self._more_noise(context, equation, inputs)
            return self._public(context, equation, public) if again is None else [again]
        if len(equation.outvars) > 1:
            return list(randomness.parts(equation, found))
        return [found]

    def _sum(self, context: Context, equation: jex_core.JaxprEqn, inputs: list[Value]) -> Value:
        name = equation.primitive.name
        noise = [value for value in inputs if isinstance(value, Random)]
        sums = [value for value in inputs if isinstance(value, Sum)]
        is_addition = name in _ADDITIONS and len(noise) == 1 and len(sums) == 1
        if is_addition and noise[0].kind == "normal" and _are_alike(equation):
            return self._release(context, sums[0], noise[0])
        if noise or any(isinstance(x, Public) and x.noise for x in inputs):
            if is_addition and context.is_final:
                is_repeated = noise[0].kind == "repeated" or not _are_alike(equation)
                self._other_noise(context, is_repeated)
            return _unknown(inputs, "nonlinear", context.line)
        if name in _SUMS_OF_DEVICES and len(inputs) == 1:
            return self._sum_of_devices(equation, sums[0])
        rule = sensitivity.RULES.get(name)
        found = None if rule is None else rule(equation, inputs)
        if found is not None:
            is_same = name in sensitivity.ENTRY_BY_ENTRY
            return found if is_same else replace(found, apart_along=None)
        is_rounded = sensitivity.is_rounded(equation)
        return _unknown(inputs, "rounded" if is_rounded else "nonlinear", context.line)

    def _release(self, context: Context, value: Sum, noise: Random) -> Public:
        path = context.path
        self._noise_of[path] = noise.draws
        self._releases_seen[path] = noised = Noised(
            value,
            noise.stddev,
            noise.draws,
            noise.part,
            context.line,
            context.loops,
            context.branches,
        )
        if context.is_final:
            self.releases[path] = noised
            self._check_turns(context, noise)
            if value.spread:
                self._note(
                    "noise",
                    f"each device along {sorted(value.spread)} adds noise to a sum of its own",
                    context.line,
                    "Sum over the devices first (jax.lax.psum), and add the noise once.",
                    is_decided=False,
                )
        return Public(releases=frozenset({path}), noised=path)

    def _more_noise(
        self, context: Context, equation: jex_core.JaxprEqn, inputs: list[Value]
    ) -> Public | None:
        """Independent noise on top of a release is one release with both; None of anything else."""
        noise = next(value for value in inputs if isinstance(value, Random))
        noisy = [x.noised for x in inputs if isinstance(x, Public) and x.noised is not None]
        if equation.primitive.name not in _ADDITIONS or not noisy or noise.kind != "normal":
            return None
        first = self._releases_seen[noisy[0]]
        if first.draws & noise.draws or not _are_alike(equation):
            return None
        both = Random(
            first.draws | noise.draws, "normal", 0.0, math.hypot(first.stddev, noise.stddev)
        )
        return self._release(context, first.value, both)

    def _check_turns(self, context: Context, noise: Random) -> None:
        """A loop that adds noise drawn outside of it adds the same noise in each turn."""
        for loop in context.loops:
            drawn = [self.draws[draw] for draw in noise.draws if draw in self.draws]
            if loop.path not in noise.turns and not all(loop in one.loops for one in drawn):
                self._note(
                    "fresh noise",
                    "a loop adds the same noise in every turn",
                    context.line,
                    "Draw the noise inside the loop, with a key of each turn's own.",
                )

    def _other_noise(self, context: Context, is_repeated: bool) -> None:
        self._note(
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
        whole = _unknown(inputs, None, context.line)
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
            results.append(replace(whole, rows=kept, cuts=cuts, where=where, reason=reason))
        return results

    def _places(self, equation: jex_core.JaxprEqn, inputs: list[Value]) -> rows.Places:
        terms = [value.term if isinstance(value, Public) else None for value in inputs[1:]]
        index: Hashable = id(equation) if None in terms else tuple(terms)
        changing = frozenset[Hashable]().union(*map(numbers.varies, terms))

        def own_turn(dim: int, length: int, whole: int) -> Hashable | None:
            if equation.primitive is not dynamic_slice_p:
                return None
            base, slope = terms[dim], 1
            if isinstance(base, Affine):
                base, slope = base.base, base.slope
            turns = self.counters.get(base.name) if isinstance(base, Root) else None
            if turns is None or slope * turns.change != length:
                return None
            return turns.loop if (turns.length or 0) * length == whole else None

        return rows.Places(index, changing - {"calls"}, own_turn)

    def _drawn(self, context: Context, equation: jex_core.JaxprEqn, inputs: list[Value]) -> Value:
        public = [value for value in inputs if isinstance(value, Public)]
        keys = [value.term for value in public if isinstance(value.term, Key)]
        words = frozenset[Key]().union(*(value.words for value in public))
        keys = keys or list(words)
        key = keys[0] if len(keys) == 1 else Key(UNKNOWN)
        if context.is_final:
            self.draws[context.path] = Drawn(key, context.line, context.loops, context.branches)
        draws = frozenset({context.path})
        if equation.primitive.name == "random_bits" or stage_of(context.scope) == "bits":
            bits = equation.params.get("bit_width", 8 * equation.outvars[0].aval.dtype.itemsize)  # pyright: ignore
            return Random(draws, "bits", float(bits))
        return Public(noise=draws)

    def _door(
        self, context: Context, equation: jex_core.JaxprEqn, inputs: Sequence[Value] = ()
    ) -> None:
        if context.is_final:
            public = [value for value in inputs if isinstance(value, Public)]
            self.shown |= Nothing.union(*(value.releases for value in public))
        if not context.is_final or (
            inputs and not any(isinstance(value, Private | Sum) for value in inputs)
        ):
            return
        self._note(
            "side door",
            f"a private value goes into '{equation.primitive.name}'",
            context.line,
            "What a host function, a print or a check sees is seen without noise. Take it out, or "
            "give it public values alone.",
        )

    def _note(
        self, rule: str, found: str, where: str, advice: str, is_decided: bool = True
    ) -> None:
        self.found[Finding(rule, found, where, advice, is_decided)] = None

    # The engine.

    def _engine(
        self, context: Context, equation: jex_core.JaxprEqn, mark: Mark, inputs: list[Value]
    ) -> list[Value]:
        first = len(inputs) - mark.num_operands
        ranks = [len(shape_of(variable)) for variable in equation.outvars]
        count = len(equation.outvars)
        if first < 0 or tuple(ranks[: len(mark.ranks)]) != mark.ranks:
            if context.is_final:
                self._note(
                    "release",
                    "the clipped gradient is mapped (vmap) or differentiated",
                    context.line,
                    "Its sensitivity is only known of a plain call. Loop over calls instead.",
                    is_decided=False,
                )
            return [_unknown(inputs, "nonlinear", context.line)] * count
        end = first + mark.num_shared
        shared, batch = inputs[:end], inputs[end : end + mark.num_batched]
        keys = inputs[end + mark.num_batched :][: mark.has_keys]
        mask = inputs[len(inputs) - mark.has_mask :] if mark.has_mask else []
        private = [x for x in (*shared, *batch, *mask) if isinstance(x, Private | Sum)]
        if context.is_final:
            self._walk_loss(context, equation, inputs)
            for value in keys:
                key = value.term if isinstance(value, Public) else None
                key = key if isinstance(key, Key) else Key(UNKNOWN)
                self.of_losses[context.path] = Drawn(
                    key, context.line, context.loops, context.branches
                )
        self._check_constants(context, batch)
        if not private:
            return [_made_of([x for x in inputs if isinstance(x, Public)])] * count
        examples = self._examples(context, mark, batch, mask)
        if examples is None or not self._has_public_model(context, shared):
            back = frozenset[int]().union(
                *(value.arguments for value in private if isinstance(value, Private))
            )
            return [Private(reason="mixed", where=context.line, arguments=back)] * count
        own, cuts = examples
        if not mark.has_mask and context.is_final:
            self.unmasked[context.line] = None
        spread = frozenset(
            axis
            for cut in cuts
            if isinstance(cut.start, tuple) and cut.start[:1] == ("devices",)
            for axis in cut.start[1]
        )
        for group, bound in enumerate(mark.bounds):
            self.sources[context.path, group] = Source(bound, cuts, context.line)
        sums = [
            Sum(frozenset({Linear((context.path, group), frozenset({leaf}), 1.0)}), spread=spread)
            for leaf, group in enumerate(mark.groups)
        ]
        values = Private(frozenset({own}), cuts, "data", context.line)
        return [*sums, *[values] * (count - len(sums))]

    def _walk_loss(
        self, context: Context, equation: jex_core.JaxprEqn, inputs: list[Value]
    ) -> None:
        held = inside(equation)
        assert held is not None
        doors = Doors(self._door)
        is_private = [isinstance(value, Private | Sum) for value in inputs]
        doors.program(held.body, is_private, context)  # pyright: ignore

    def _check_constants(self, context: Context, batch: list[Value]) -> None:
        if context.is_final and any(isinstance(x, Public) and x.is_constant for x in batch):
            self._note(
                "examples apart",
                "the engine's examples are constants of the program, and no private argument",
                context.line,
                "Do not close over private data: pass it as an argument that private= names.",
                is_decided=False,
            )

    def _examples(
        self, context: Context, mark: Mark, batch: list[Value], mask: list[Value]
    ) -> tuple[Rows, frozenset[Cut]] | None:
        """Which rows the engine's examples are; None, and a finding, where they are not apart."""
        private = [x for x in (*batch, *mask) if isinstance(x, Private | Sum)]
        axes: list[Rows] = []
        for value in private:
            own = [
                row
                for row in (value.rows if isinstance(value, Private) else ())
                if row.dim == 0 and row.inner == 1 and row.num_rows == mark.num_examples
            ]
            if not own:
                self._meet(context, value)
                return None
            axes.append(own[0])
        of_batch = axes[: len(axes) - len([x for x in mask if isinstance(x, Private)])]
        names = {row.axis for row in of_batch or axes}
        if len(names) > 1:
            self._meet(context, None)
            return None
        cuts = frozenset[Cut].intersection(
            *(value.cuts for value in private if isinstance(value, Private))
        )
        return axes[0], rows.of_batch(cuts, axes[0])

    def _meet(self, context: Context, value: Value | None) -> None:
        found, where, is_decided = "the engine's arguments hold rows of other examples", "", True
        if isinstance(value, Private) and value.reason == "taken":
            found = "rows are taken by indices that the step computes: one may be taken twice"
            where, is_decided = value.where, False
        elif value is not None:
            found = "rows of the data meet before the engine clips"
            where = value.where if isinstance(value, Private) else ""
        if context.is_final:
            self._note(
                "examples apart",
                found,
                where or context.line,
                "What one example adds to the clipped sum must depend on that example alone, and "
                "count once. Use constants that are known without the data, work within the "
                "example, and pass the sampler's indices as an argument.",
                is_decided,
            )

    def _has_public_model(self, context: Context, shared: list[Value]) -> bool:
        private = [value for value in shared if isinstance(value, Private | Sum)]
        if private and context.is_final:
            for value in private:
                self.models |= value.arguments if isinstance(value, Private) else set()
            self._note(
                "release",
                "the model that the engine differentiates is not released: private data is in it "
                "without noise, so the noise multiplier of its clipped sum is unbounded",
                context.line,
                "Add the plan's noise to every clipped sum before it reaches the model, or "
                "anything else that the loss reads.",
            )
        return not private

    # What holds programs.

    def _cond(self, context: Context, cond: Cond, inputs: list[Value]) -> list[Value]:
        which, *operands = inputs
        branches = list(cond.branches)
        if isinstance(which, Public) and which.low == which.high:
            index = min(max(int(which.low), 0), len(branches) - 1)
            return self.program(branches[index], operands, context)
        found = [
            self.program(
                branch,
                operands,
                context._replace(branches=(*context.branches, (context.path, i))),
            )
            for i, branch in enumerate(branches)
        ]
        if isinstance(which, Private | Sum):
            self._steered(context, "which branch is taken")
            return [self.joined([which, *facts]) for facts in zip(*found, strict=True)]
        if isinstance(which, Random) or which.noise:
            return [self.joined([which, *facts]) for facts in zip(*found, strict=True)]
        return [self.either(facts) for facts in zip(*self._one_source(context, found), strict=True)]

    def _one_source(self, context: Context, found: list[list[Value]]) -> list[list[Value]]:
        """Of sums that different branches make, as one clipped sum with the largest bound."""
        names = [
            {term.source for value in values if isinstance(value, Sum) for term in value.terms}
            for values in found
        ]
        known = [name for some in names for name in some]
        if len(set(map(frozenset, names))) == 1 or not all(name in self.sources for name in known):
            return found
        bounds = [joint_bound(values, self.sources) for values in found]
        sources = [self.sources[name] for name in known]
        cuts = frozenset[Cut].intersection(*(source.cuts for source in sources))
        self.sources[context.path, "either"] = Source(max(bounds), cuts, context.line)
        return [
            [
                replace(
                    value,
                    terms=frozenset({Linear((context.path, "either"), frozenset({i}), 1.0)}),
                )
                if isinstance(value, Sum)
                else value
                for i, value in enumerate(values)
            ]
            for values in found
        ]

    def _steered(self, context: Context, what: str) -> None:
        if context.is_final:
            self._note(
                "side door",
                f"private data decides {what}",
                context.line,
                "How long a step takes, and what it does, then tells of the data. Decide by public "
                "values, or compute both and select (jnp.where) inside the loss.",
            )

    def _while(
        self,
        context: Context,
        loop: While,
        of_condition: list[Value],
        of_body: list[Value],
        start: list[Value],
    ) -> list[Value]:
        turn = context.turn(None)
        carry, _ = self._turns(turn, loop.body, of_body, start, [], None)
        (goes_on,) = self.program(loop.condition, [*of_condition, *carry], turn)
        if isinstance(goes_on, Private | Sum):
            self._steered(context, "how long a loop runs")
            return [self.joined([goes_on, value]) for value in carry]
        if isinstance(goes_on, Random) or goes_on.noise:
            return [self.joined([goes_on, value]) for value in carry]
        return carry

    def _turns(
        self,
        context: Context,
        body: jex_core.ClosedJaxpr,
        consts: list[Value],
        start: list[Value],
        slices: list[Value],
        length: int | None,
    ) -> tuple[list[Value], list[Value]]:
        """What a loop carries in the end, and what its turns give beside."""
        loop, size = context.loops[-1].path, len(start)
        before, variables = context._replace(is_final=False), body.jaxpr.invars[len(consts) :]
        places = [
            loops.carried(loop, i, value, body.jaxpr.outvars[i] is variables[i])
            for i, value in enumerate(start)
        ]

        def turn(carry: list[Value], context: Context) -> list[Value]:
            return self.program(body, [*consts, *carry, *slices], context)

        while True:
            after = turn([place.symbol for place in places], before)[:size]
            seen = [place.seen(value) for place, value in zip(places, after, strict=True)]
            if seen == places:
                break
            places = seen
        # Counters are known now, and with them what turns take of the rows.
        for place, value in zip(places, after, strict=True):
            _, turns = loops.counted(place, value, loop, length)
            if turns is not None:
                self.counters[place.name] = turns
        ways = [
            loops.counted(place, value, loop, length)[0]
            for place, value in zip(places, after, strict=True)
        ]
        known = [
            place.symbol if way is None else way.inside
            for place, way in zip(places, ways, strict=True)
        ]
        after = turn(known, before)[:size]
        inside_sums, done = loops.sums_of_turns(places, after, self.sources, loop, length)
        known = [
            inside_sums.get(place.name, value) for place, value in zip(places, known, strict=True)
        ]
        results = turn(known, context)
        ends = [
            done.get(place.name) or (self._ended(place, value) if way is None else way.after)
            for place, way, value in zip(places, ways, results, strict=False)
        ]
        return [value for value in ends if value is not None], results[size:]

    def _ended(self, place: loops.Carried, value: Value) -> Value:
        """What is left of what nothing special is known of."""
        found = self.either([place.start, value]) if place.start != value else value
        return replace(found, term=None) if isinstance(found, Public) else found

    def _turn(self, value: Value, context: Context) -> Value:
        """What a turn of a loop sees of an array that it goes over."""
        match value:
            case Public():
                return loops.turn_of(value, context.path)
            case Private():
                kept, cuts = rows.sliced(value.rows, context.path)
                return replace(value, rows=kept, cuts=value.cuts | cuts)
            case Random():
                return replace(value, turns=value.turns | {context.path}, part=None)
            case Sum():
                return replace(value, turns=value.turns | {context.path}, apart_along=None)

    def _stacked(self, value: Value, context: Context, length: int) -> Value:
        """The results of all turns, side by side."""
        loop = context.path
        match value:
            case Public():
                return replace(value, term=None)
            case Random():
                return loops.as_public(value)
            case Sum():
                names = {term.source for term in value.terms}
                has_own = all(
                    any(cut.start == loop for cut in self.sources[name].cuts)
                    for name in names
                    if name in self.sources
                )
                if has_own:
                    return replace(value, turns=value.turns - {loop}, apart_along=0)
                is_cut = loop in value.turns
                whole = value if is_cut else value.scaled(math.sqrt(length))
                return replace(whole, turns=value.turns - {loop}, apart_along=None)
            case Private():
                own = [cut for cut in value.cuts if cut.start == loop]
                stacked = {row._replace(dim=row.dim + 1) for row in value.rows}
                stacked |= {Rows(cut.axis, 0, 1, length) for cut in own[:1]}
                return replace(value, rows=frozenset(stacked), cuts=value.cuts - set(own))

    def _shard_map(
        self,
        context: Context,
        equation: jex_core.JaxprEqn,
        spread: ShardMap,
        inputs: list[Value],
    ) -> list[Value]:
        mesh = equation.params["mesh"]
        self._lengths.update({axis: mesh.shape[axis] for axis in spread.axes})
        cut = [
            rows.on_devices(value, spec, self._lengths)
            for value, spec in zip(inputs, spread.in_specs, strict=True)
        ]
        context = context._replace(times=context.times * spread.num_devices)
        found = self.program(spread.body, cut, context)
        return [
            rows.off_devices(value, spec, self._lengths)
            for value, spec in zip(found, spread.out_specs, strict=True)
        ]

    def _sum_of_devices(self, equation: jex_core.JaxprEqn, value: Sum) -> Sum:
        """A sum over devices. Where each has rows of its own, an example is on one of them."""
        axes = [axis for axis in equation.params["axes"] if isinstance(axis, str)]
        others = [axis for axis in axes if axis not in value.spread]
        factor = math.prod(self._lengths.get(axis, math.inf) for axis in others)
        return replace(value.scaled(factor), spread=value.spread - set(axes))

    def _unknown_program(
        self, context: Context, equation: jex_core.JaxprEqn, inputs: list[Value]
    ) -> list[Value]:
        """Nothing is known of what it makes: a kernel, or a reduction by the user's function."""
        if equation.primitive.name in DOORS:
            self._door(context, equation, inputs)
        return [self.joined(inputs)] * len(equation.outvars)


def _are_alike(equation: jex_core.JaxprEqn) -> bool:
    """Whether both operands and the result have one shape, and hold real floats."""
    variables = [*equation.invars, equation.outvars[0]]
    return len({shape_of(v) for v in variables}) == 1 and all(map(sensitivity.is_float, variables))


def _made_of(inputs: Sequence[Public]) -> Public:
    """A public value that is made of others."""
    return Public(
        releases=Nothing.union(*(value.releases for value in inputs)),
        noise=Nothing.union(*(value.noise for value in inputs)),
        words=frozenset[Key]().union(*(value.words for value in inputs)),
        is_constant=any(value.is_constant for value in inputs),
    )


def _unknown(inputs: Sequence[Value], reason: Reason | None, line: str) -> Private:
    """A value made of others of which at least one is private."""
    private = [value for value in inputs if isinstance(value, Private)]
    arguments = frozenset[int]().union(*(value.arguments for value in private))
    noised = next((value.noised for value in private if value.noised is not None), None)
    has_sum = any(isinstance(value, Sum) for value in inputs)
    known = [value for value in private if value.reason != "data"]
    if not known and not has_sum and reason is None:
        known = private
    if known:
        whole = replace(known[0], rows=frozenset(), cuts=frozenset())
        return replace(whole, arguments=arguments, noised=noised)
    return Private(reason=reason or "nonlinear", where=line, arguments=arguments, noised=noised)
