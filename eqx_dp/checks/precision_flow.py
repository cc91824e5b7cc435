"""Facts about a step's values for precision, and the checks of each equation."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.extend.core.primitives import convert_element_type_p, select_n_p

from ..gradients import mark_of
from ..precision import Matmul, ModuleRule, Policy
from ..precision.stages import is_backward, is_in_narrow_product, rules_at, stage_of
from ..programs import (
    COLLECTIVES,
    REARRANGED,
    SUMS_OF_DEVICES,
    Context,
    Flow,
    equation_flops,
    has_free_dimensions,
    named,
)
from . import widths
from .variables import dtype_of, size_of
from .widths import CONTRACTIONS, Draw, Facts, Width, known_width, width_of_variable


class Violation(NamedTuple):
    """An operation that is not as declared.

    Attributes:
        stage: where in the step.
        declared: what the policy says.
        found: what the program does.
        where: the source line.
    """

    stage: str
    declared: str
    found: str
    where: str


class Operation(NamedTuple):
    """The operations of the program at one stage in one dtype.

    Attributes:
        kind: `"contraction"`, `"sum over examples"`, `"collective"`, `"draw"`, `"noise addition"`.
        stage: where in the step; under a module rule, with the rule's pattern.
        dtype: of the operands; of the result of a sum.
        amount: FLOPs of contractions, else numbers.
        times: how often an equation of this kind runs.
        where: the source line; empty for contractions, which are added up.
    """

    kind: str
    stage: str
    dtype: str
    amount: int
    times: int
    where: str


_STAGES = {
    "norm": "clip norm",
    "sum": "sum over examples",
    "microbatches": "sum over microbatches",
    "devices": "sum over devices",
    "draw": "noise draw",
    "noise": "noise addition",
}
_ACCUMULATING = ("norm", "sum", "microbatches", "devices")

_ADDITIONS = named("add add_any sub")
_SUMS = CONTRACTIONS | _ADDITIONS | named("reduce_sum scatter-add")
_ARITHMETIC = _SUMS | named(
    """mul div sqrt rsqrt square integer_pow pow exp log exp2 expm1 log1p cbrt logistic tanh erf
    reduce_prod cumprod cumsum cumlogsumexp reduce_window_sum reduce_precision
    select_and_scatter_add"""
)
_STATISTICS = named("reduce_sum rsqrt sqrt")
_CASTS = named("convert_element_type bitcast_convert_type")
_DRAWS = named("random_bits rng_bit_generator rng_uniform threefry2x32")
# These pass several values on, side by side.
_SIDE_BY_SIDE = COLLECTIVES | named("optimization_barrier device_put pvary")
# Digits of float32 that a contraction keeps, as `matmul_precision` says.
_KEPT = {"default": 7, "tensorfloat32": 10, "highest": 23}


class _Case(NamedTuple):
    """One equation and its context."""

    context: Context
    equation: JaxprEqn
    inputs: list[Facts]
    stage: str | None


class PrecisionFlow(Flow[Facts]):
    """Follows clipped sums and noise through a step, and checks every equation against a policy.

    Attributes:
        policy: what is declared.
        names: dotted paths of the program's arguments.
        violations: each once, in the order in which they were found.
        stages: those that were met.
        trained: the program's arguments that the engine trains.
    """

    nothing = Facts()

    def __init__(self, policy: Policy, names: Sequence[str]):
        super().__init__()
        self.names = names
        self.violations: dict[Violation, None] = {}
        self.stages: set[str] = set()
        self.trained: set[int] = set()
        self._counts: dict[tuple[str, str, str, str], tuple[int, int]] = {}
        self._rules_met: set[str] = set()
        self.policy = policy
        self._accumulate = known_width(policy.accumulate_dtype)
        self._noise = known_width(policy.noise_dtype)
        self._rules = {rule.match: rule for rule in policy.modules}

    @property
    def operations(self) -> tuple[Operation, ...]:
        """The dtype of each operation, sorted."""
        return tuple(sorted(Operation(*k[:3], *found, k[3]) for k, found in self._counts.items()))

    def joined(self, facts: Sequence[Facts]) -> Facts:
        """If a value contains a clipped sum, no other fact is kept."""
        found = [one for one in facts if one.clipped] or list(facts)
        draws = frozenset[Draw]().union(*(one.draws for one in found))
        narrowest = widths.narrowest_of(one.narrowest for one in found)
        arguments = frozenset[int]().union(*(one.arguments for one in facts))
        return Facts(any(one.clipped for one in found), draws, narrowest, arguments)

    def holder(self, context: Context, equation: JaxprEqn, inputs: list[Facts]) -> list[Facts]:
        """Notes what the engine trains; what is made of several arguments is none of them."""
        mark = mark_of(equation)
        for facts in () if mark is None else inputs[-mark.num_operands :][: len(mark.groups)]:
            self.trained |= facts.arguments if len(facts.arguments) == 1 else set()
        return super().holder(context, equation, inputs)

    def equation(self, context: Context, equation: JaxprEqn, inputs: list[Facts]) -> list[Facts]:
        """Checks one equation, and returns the facts about its results."""
        name, stage, count = equation.primitive.name, stage_of(context.scope), len(equation.outvars)
        case = _Case(context, equation, inputs, stage)
        if stage is not None:
            self.stages.add(stage)
        if stage == "loss" and self._rules:
            self._rules_met.update(rules_at(context.scope))
        if context.is_final:
            if name in CONTRACTIONS:
                self._contraction(case)
            if stage == "loss" and equation.primitive is convert_element_type_p:
                self._operand_cast(case)
            if stage == "loss" and name in _STATISTICS and not is_backward(context.scope):
                self._statistic(case)
            if stage in _ACCUMULATING:
                self._accumulates(case, stage)
            if name in COLLECTIVES:
                self._collective(case)
        if name == "eqx_dp_noise_key":  # the key, as it is
            return inputs[:1]
        if stage == "cast":
            return [Facts(arguments=self.joined(inputs).arguments)] * count
        if stage in ("loss", "grid"):  # whatever sums were added to it
            own = inputs[0].arguments if name in REARRANGED else frozenset[int]()
            return [Facts(arguments=own)] * count
        if name in _DRAWS or stage == "bits":
            return [_drawn(context, equation, self.joined(inputs).arguments)] * count
        if stage == "sum":
            return [Facts(clipped=True)] * count
        noise = _noise_added(case)
        if noise is not None:
            if context.is_final:
                self._addition(case, noise)
            return [Facts()]
        return self._passed_on(case)

    def idle_rules(self) -> None:
        """Checks, once all is seen, that some module of the loss runs under each rule."""
        for rule in self.policy.modules if "loss" in self.stages else ():
            if rule.match not in self._rules_met and not rule.optional:
                declared, found = f"{rule.match}={rule.compute_dtype}", "no call of a module"
                self._violation("module rule", declared, found, "anywhere in the loss")

    def _violation(self, stage: str, declared: str, found: str, line: str) -> None:
        self.violations[Violation(stage, declared, found, line)] = None

    def _at_least(self, declared: Width, width: Width | None, stage: str, line: str) -> None:
        """Reports a dtype that is narrower than declared."""
        if width is not None and width.narrower(declared):
            self._violation(stage, declared.name, width.name, line)

    def _count(
        self, context: Context, kind: str, stage: str, dtype: str, amount: int, line: str
    ) -> None:
        key = kind, stage, dtype, line
        amounts, times = self._counts.get(key, (0, 0))
        self._counts[key] = amounts + amount * context.times, times + context.times

    def _contraction(self, case: _Case) -> None:
        equation, scope = case.equation, case.context.scope
        operands = [w for v in equation.invars[:2] if (w := width_of_variable(v)) is not None]
        if len(operands) < 2:  # of integers
            return
        shown = _STAGES.get(case.stage or "", "outside of the engine")
        if case.stage == "loss":
            rule = self._rule_at(scope)
            shown = "backward" if is_backward(scope) else "forward"
            self._runs_as_declared(case, operands, rule, shown)
            self._is_as_precise(case, shown)
            shown += "" if rule is None else f" in {rule.match}"
        flops = equation_flops(equation)
        self._count(case.context, "contraction", shown, widths.shown_product(operands), flops, "")

    def _rule_at(self, scope: str) -> ModuleRule | None:
        """The rule of the innermost module that has one."""
        known = [self._rules[match] for match in rules_at(scope) if match in self._rules]
        return known[-1] if known else None

    def _where(self, case: _Case) -> str:
        """The source line, and the path of the module whose parameter is at work there."""
        own = [i for facts in case.inputs for i in facts.arguments & self.trained]
        modules = dict.fromkeys(self.names[i].rpartition(".")[0] for i in own)
        return " in ".join([case.context.line, *filter(None, modules)])

    def _statistic(self, case: _Case) -> None:
        """Sums and roots in a module with a wide rule, as those of a norm layer, are as wide."""
        rule, width = self._rule_at(case.context.scope), width_of_variable(case.equation.invars[0])
        if rule is not None and width and width.narrower(known_width(rule.compute_dtype)):
            name = f"{known_width(rule.compute_dtype).name} (in {rule.match})"
            found = f"{case.equation.primitive.name} of {width.name}, narrower"
            self._violation("forward", name, found, self._where(case))

    def _runs_as_declared(
        self, case: _Case, operands: list[Width], rule: ModuleRule | None, shown: str
    ) -> None:
        """A contraction in the loss is in the compute dtype.

        Going back through a contraction that was asked for a wide result, JAX itself mixes the
        compute dtype with the wider one: there, one side has to be in it.
        """
        equation, line = case.equation, self._where(case)
        if any(jnp.issubdtype(dtype_of(v), jnp.complexfloating) for v in equation.invars):
            return  # there is no complex number of half precision
        declared = known_width((rule or self.policy).compute_dtype)
        matmul = None if rule is not None and rule.is_wide else self.policy.matmul
        if matmul is not None and (has_free_dimensions(equation) or widths.is_float8(operands)):
            self._runs_narrow(case, operands, matmul, shown)
            return
        name = declared.name + ("" if rule is None else f" (in {rule.match})")
        formats = [*operands, width_of_variable(equation.outvars[0])]
        narrower = [width.name for width in formats if width and width.narrower(declared)]
        as_declared = [operand.name == declared.name for operand in operands]
        if narrower:
            self._violation(shown, name, f"{narrower[0]}, narrower", line)
        elif not (any(as_declared) if shown == "backward" else all(as_declared)):
            hint = " (as jnp.zeros(n) and random.normal(key) are: give x.dtype)" * any(as_declared)
            self._violation(shown, name, f"{widths.shown_product(operands)}, wider{hint}", line)

    def _runs_narrow(self, case: _Case, operands: list[Width], matmul: Matmul, shown: str) -> None:
        """A product of matrices in the loss is the engine's, in the dtypes of `matmul`."""
        line, found = self._where(case), widths.shown_product(operands)
        names = {str(matmul.forward)} | ({str(matmul.backward)} if shown == "backward" else set())
        name = f"{' or '.join(sorted(names))}, scaling {matmul.scaling}"
        result, dtypes = width_of_variable(case.equation.outvars[0]), {x.name for x in operands}
        if not is_in_narrow_product(case.context.scope):
            self._violation(shown, name, f"{found}, not scaled by the engine", line)
        elif result is not None and result.narrower(known_width(jnp.float32)):
            self._violation(shown, f"{name}, summed in float32", f"sums in {result.name}", line)
        # If a primitive does not take two formats, both become one that holds both.
        elif not dtypes <= names and (len(names) == 1 or len(dtypes) > 1):
            self._violation(shown, name, found, line)

    def _operand_cast(self, case: _Case) -> None:
        """If operands are scaled, only the engine, which sees one example, may cast to 8 bits.

        A scale of the user's could come from a batch, or from earlier steps.
        """
        matmul, width = self.policy.matmul, width_of_variable(case.equation.outvars[0])
        by_user = not is_in_narrow_product(case.context.scope)
        if matmul and matmul.scaling != "none" and by_user and width and widths.is_float8([width]):
            found = f"a cast to {width.name} with a scale that the engine did not choose, or none"
            self._violation("operand", f"scaling {matmul.scaling}", found, case.context.line)

    def _is_as_precise(self, case: _Case, shown: str) -> None:
        """A contraction in the loss keeps its operands; of float32, as `matmul_precision` says."""
        inside, declared = widths.narrowest_inside(case.equation), self.policy.matmul_precision
        if inside is not None and inside.digits < _KEPT[declared]:
            self._violation(shown, f"matmul_precision {declared}", inside.name, self._where(case))

    def _accumulates(self, case: _Case, stage: str) -> None:
        """Every value between the gradients of single examples and their sum is wide."""
        equation, line, shown = case.equation, case.context.line, _STAGES[stage]
        name, is_cast = equation.primitive.name, equation.primitive is convert_element_type_p
        before = width_of_variable(equation.invars[0]) if is_cast else None
        narrows = before is not None and not before.narrower(self._accumulate)
        for variable in equation.outvars:
            width = widths.width_of_result(equation, variable)
            if width is None:
                continue
            if name in _SUMS and stage in ("sum", "microbatches"):
                size = size_of(variable)
                self._count(case.context, "sum over examples", shown, width.name, size, line)
            # Parts of a wide number are narrow; their products are not.
            is_part = is_in_narrow_product(case.context.scope) and name not in widths.CONTRACTIONS
            if (narrows or name in _ARITHMETIC) and not is_part:
                self._at_least(self._accumulate, width, shown, line)

    def _collective(self, case: _Case) -> None:
        """Sums of clipped sums over devices are wide."""
        name, line = case.equation.primitive.name, case.context.line
        for variable, facts in zip(case.equation.invars, case.inputs, strict=True):
            width = width_of_variable(variable)
            if width is None:
                continue
            is_ours = facts.clipped or case.stage == "devices"
            shown = f"{name}: {_STAGES['devices'] if is_ours else 'other'}"
            self._count(case.context, "collective", shown, width.name, size_of(variable), line)
            if facts.clipped and name in SUMS_OF_DEVICES | {"reduce_scatter"}:
                self._at_least(self._accumulate, width, _STAGES["devices"], line)

    def _addition(self, case: _Case, noise: Facts) -> None:
        """Noise is drawn, scaled and added wide."""
        variable, shown, line = case.equation.outvars[0], _STAGES["noise"], case.context.line
        self._count(case.context, shown, shown, str(dtype_of(variable)), size_of(variable), line)
        self._at_least(self._noise, width_of_variable(variable), shown, line)
        narrowest, shown = noise.narrowest, _STAGES["draw"]
        for draw in sorted(noise.draws):
            dtype = f"{draw.bits} bits" if narrowest is None else narrowest.name
            self._count(case.context, "draw", shown, dtype, draw.size, draw.line)
            if draw.bits <= self._noise.digits:
                found = f"{draw.bits} random bits a number"
                self._violation(shown, self._noise.name, found, draw.line)
        self._at_least(self._noise, narrowest, shown, line)

    def _passed_on(self, case: _Case) -> list[Facts]:
        """The facts about results that depend on operands.

        A clipped sum that came in as wide as declared must not be made narrower. (Inside the
        engine's own stages, `_accumulates` checks this.)
        """
        context, equation, found, _ = case
        shown = "between clip and noise"
        is_watched = context.is_final and case.stage not in _ACCUMULATING
        is_watched = is_watched and any(
            facts.clipped and width is not None and not width.narrower(self._accumulate)
            for facts, width in zip(found, map(width_of_variable, equation.invars), strict=True)
        )
        if equation.primitive is select_n_p and any(f.clipped or f.draws for f in found[1:]):
            # A choice descends from what there is to choose, if anything is known of that.
            found = found[1:]
        if equation.primitive.name not in _SIDE_BY_SIDE or len(found) != len(equation.outvars):
            found = [self.joined(found)] * len(equation.outvars)
        results: list[Facts] = []
        for variable, facts in zip(equation.outvars, found, strict=True):
            width, dtype = widths.width_of_result(equation, variable), dtype_of(variable)
            if is_watched and facts.clipped:
                if equation.primitive.name in _CASTS and width is None:
                    self._violation(shown, self._accumulate.name, str(dtype), context.line)
                self._at_least(self._accumulate, width, shown, context.line)
            results.append(facts.through(width))
        return results


def _drawn(context: Context, equation: JaxprEqn, arguments: frozenset[int]) -> Facts:
    variable = equation.outvars[-1]  # of several, the first is the generator's next state
    bits = equation.params.get("bit_width", 8 * dtype_of(variable).itemsize)
    draws = frozenset({Draw(context.line, int(bits), size_of(variable), arguments)})
    return Facts(draws=draws, arguments=arguments)


def _noise_added(case: _Case) -> Facts | None:
    """The facts about the noise, if an equation adds noise to a sum.

    Integers that are added to the bits of a sum, as stochastic rounding does, are no noise; those
    of the engine's own noise are.
    """
    _, equation, inputs, stage = case
    if equation.primitive.name not in _ADDITIONS:
        return None
    is_ours = stage == "noise"
    is_float = is_ours or width_of_variable(equation.outvars[0]) is not None
    drawn = [facts for facts in inputs if facts.draws and not facts.clipped]
    is_added = is_float and (is_ours or any(facts.clipped for facts in inputs))
    return drawn[0] if is_added and len(drawn) == 1 else None
