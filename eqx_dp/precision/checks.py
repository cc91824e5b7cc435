"""What every equation of a private step is held against, and what is counted on the way."""

import math
from typing import Any, NamedTuple

import jax.extend.core as jex_core
import jax.numpy as jnp

from .flow import NOTHING, Draw, Facts, Here, joined
from .held import bits_dropped, held_in
from .policy import ModuleRule, Policy
from .products import CONTRACTIONS, narrowest_inside
from .stages import is_backward, rules_at, stage_of
from .widths import Width, width_of, width_of_number


class Violation(NamedTuple):
    """One thing that runs otherwise than declared.

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


class Use(NamedTuple):
    """What the program does at one stage in one dtype.

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
    "probe": "loss scale probe",
    "norm": "clip norm",
    "sum": "sum over examples",
    "microbatches": "sum over microbatches",
    "devices": "sum over devices",
    "draw": "noise draw",
    "noise": "noise addition",
}

# What is computed from a model.
_OF_MODEL = ("cast", "probe", "loss")
_ACCUMULATING = ("norm", "sum", "microbatches", "devices")

_SCATTERED = frozenset({"scatter-add", "scatter_add"})
_ADDITIONS = frozenset({"add", "add_any", "sub", *_SCATTERED})
# What puts noise beside a sum, for a later equation to add up.
_JOINS = frozenset({"concatenate", "stack", "dynamic_update_slice"})
_SUMS = frozenset({*CONTRACTIONS, *_ADDITIONS, "reduce_sum"})
_ARITHMETIC = frozenset(
    {
        *_SUMS,
        *("mul", "div", "sqrt", "rsqrt", "square", "integer_pow", "pow", "exp", "log", "exp2"),
        *("expm1", "log1p", "cbrt", "logistic", "tanh", "erf", "reduce_prod", "cumprod"),
        *(
            "cumsum",
            "cumlogsumexp",
            "reduce_window_sum",
            "reduce_precision",
            "select_and_scatter_add",
        ),
    }
)
_DRAWS = frozenset({"random_bits", "rng_bit_generator", "rng_uniform", "threefry2x32"})
_COLLECTIVE_SUMS = frozenset(
    {"psum", "psum2", "psum_invariant", "unreduced_psum", "reduce_scatter"}
)
_COLLECTIVES = _COLLECTIVE_SUMS | {
    *("all_gather", "all_gather_invariant", "all_to_all", "ppermute", "pmax", "pmin"),
}
# Digits of float32 that a contraction keeps, as `matmul_precision` says.
_KEPT = {"default": 7, "tensorfloat32": 10, "highest": 23}
# These hand on several values side by side.
_SIDE_BY_SIDE = frozenset({*_COLLECTIVES, "optimization_barrier", "device_put", "pvary", "pcast"})


class Check:
    """Holds equations against a policy; a `Visitor`."""

    def __init__(self, policy: Policy):
        self.violations: dict[Violation, None] = {}
        self.uses: dict[tuple[str, str, str, str], tuple[int, int]] = {}
        self.stages: set[str] = set()
        self._at_work: set[str] = set()
        self._policy = policy
        self._compute = _width(policy.compute_dtype)
        self._accumulate = _width(policy.accumulate_dtype)
        self._noise = _width(policy.noise_dtype)
        self._rules = {rule.match: rule for rule in policy.modules}

    def equation(self, here: Here, equation: jex_core.JaxprEqn, inputs: list[Facts]) -> list[Facts]:
        """Judges one equation, and says what is known of its results."""
        name, stage = equation.primitive.name, stage_of(here.scope)
        if stage is not None:
            self.stages.add(stage)
        if stage == "loss" and self._rules:
            self._at_work.update(rules_at(here.scope))
        if here.recording and name in CONTRACTIONS:
            self._contraction(here, equation, stage)
        if here.recording and stage in _ACCUMULATING:
            self._accumulates(here, equation, stage)
        if here.recording and name in _COLLECTIVES:
            self._collective(here, equation, inputs, stage)
        if stage in _OF_MODEL:  # whatever sums were added to it
            return [NOTHING] * len(equation.outvars)
        if name in _DRAWS or stage == "bits":
            return [_drawn(here, equation)] * len(equation.outvars)
        if stage == "sum":
            return [Facts(clipped=True)] * len(equation.outvars)
        noise = _noise_added(equation, inputs, stage)
        if noise is not None:
            if here.recording:
                self._addition(here, equation, noise)
            if _is_everywhere(equation):
                return [NOTHING]
        if name in _SIDE_BY_SIDE and len(inputs) == len(equation.outvars):
            found = inputs
        else:
            found = [joined(inputs)] * len(equation.outvars)
        # Inside the engine's own stages, `_accumulates` is the judge.
        is_cut = stage not in _ACCUMULATING and self._has_wide_sum(equation, inputs)
        return [
            self._passed_on(here, equation, result, facts, is_cut)
            for result, facts in zip(equation.outvars, found, strict=True)
        ]

    def idle_rules(self) -> None:
        """Judges, once all is seen, rules that no module of the loss runs under."""
        for rule in self._policy.modules if "loss" in self.stages else ():
            if rule.match not in self._at_work:
                declared = f"{rule.match}={rule.compute_dtype}"
                found = "no call of a module under this rule"
                self._violation("module rule", declared, found, "anywhere in the loss")

    def carried(self, here: Here, variable: Any, facts: Facts) -> None:
        """Judges what a loop carries: a total that microbatches are added to is wide."""
        width = _width_of(variable)
        if facts.clipped and width is not None and width.narrower(self._accumulate):
            self._violation(
                "sum over microbatches", self._accumulate, f"{width.name} carried by a loop", here
            )

    def _violation(self, stage: str, declared: Width | str, found: str, here: Here | str) -> None:
        where = here if isinstance(here, str) else here.where
        name = declared if isinstance(declared, str) else declared.name
        self.violations[Violation(stage, name, found, where)] = None

    def _use(self, kind: str, stage: str, dtype: str, amount: int, here: Here, where: str) -> None:
        key = kind, stage, dtype, where
        before = self.uses.get(key, (0, 0))
        self.uses[key] = before[0] + amount * here.times, before[1] + here.times

    def _contraction(self, here: Here, equation: jex_core.JaxprEqn, stage: str | None) -> None:
        operands = [w for v in equation.invars[:2] if (w := _width_of(v)) is not None]
        if len(operands) < 2:  # of integers
            return
        dtype = " x ".join(dict.fromkeys(operand.name for operand in operands))
        shown = _STAGES.get(stage or "", "outside of the engine")
        if stage == "loss":
            rule = self._rule(here.scope)
            shown = "backward" if is_backward(here.scope) else "forward"
            self._runs_as_declared(here, equation, operands, rule, shown)
            self._is_as_precise(here, equation, shown)
            shown += "" if rule is None else f" in {rule.match}"
        self._use("contraction", shown, dtype, _flops(equation), here, "")

    def _runs_as_declared(
        self,
        here: Here,
        equation: jex_core.JaxprEqn,
        operands: list[Width],
        rule: ModuleRule | None,
        shown: str,
    ) -> None:
        """A contraction in the loss is in the compute dtype.

        Going back through a contraction that was asked for a wide result, JAX itself mixes the
        compute dtype with the wider one: there, one side has to be in it.
        """
        if any(jnp.issubdtype(_dtype(v), jnp.complexfloating) for v in equation.invars):
            return  # there is no complex number of half precision
        declared = self._compute if rule is None else _width(rule.compute_dtype)
        name = declared.name + ("" if rule is None else f" (in {rule.match})")
        result = _width_of(equation.outvars[0])
        for operand in [*operands, *([] if result is None else [result])]:
            if operand.narrower(declared):
                self._violation(shown, name, f"{operand.name}, narrower", here)
                return
        as_declared = [operand.name == declared.name for operand in operands]
        if not (any(as_declared) if shown == "backward" else all(as_declared)):
            found = " x ".join(dict.fromkeys(operand.name for operand in operands))
            self._violation(shown, name, f"{found}, wider", here)

    def _is_as_precise(self, here: Here, equation: jex_core.JaxprEqn, shown: str) -> None:
        """A contraction in the loss keeps its operands; of float32, as `matmul_precision` says."""
        inside = narrowest_inside(equation)
        if inside is None:
            return
        precision = self._policy.matmul_precision
        of_float32 = any(_dtype(v) == jnp.float32 for v in equation.invars[:2])
        if not of_float32 or inside.digits < _KEPT[precision]:
            self._violation(shown, f"matmul_precision {precision}", inside.name, here)

    def _rule(self, scope: str) -> ModuleRule | None:
        """The rule of the policy that governs a place: that of the innermost matched module."""
        known = [self._rules[match] for match in rules_at(scope) if match in self._rules]
        return known[-1] if known else None

    def _accumulates(self, here: Here, equation: jex_core.JaxprEqn, stage: str) -> None:
        """Between the gradients of single examples and their sum, what is computed is wide."""
        name, shown = equation.primitive.name, _STAGES[stage]
        for variable in equation.outvars:
            width = held_in(equation, variable)
            if width is None:
                continue
            if name in _SUMS and stage in ("sum", "microbatches"):
                size = math.prod(_shape(variable))
                self._use("sum over examples", shown, width.name, size, here, here.where)
            is_cast = name == "convert_element_type"
            before = _width_of(equation.invars[0]) if is_cast else None
            narrows = before is not None and not before.narrower(self._accumulate)
            if (narrows or name in _ARITHMETIC) and width.narrower(self._accumulate):
                self._violation(shown, self._accumulate, width.name, here)

    def _collective(
        self, here: Here, equation: jex_core.JaxprEqn, inputs: list[Facts], stage: str | None
    ) -> None:
        name = equation.primitive.name
        for variable, facts in zip(equation.invars, inputs, strict=True):
            width = _width_of(variable)
            if width is None:
                continue
            shown = "sum over devices" if facts.clipped or stage == "devices" else "other"
            size = math.prod(_shape(variable))
            self._use("collective", f"{name}: {shown}", width.name, size, here, here.where)
            is_sum = facts.clipped and name in _COLLECTIVE_SUMS
            if is_sum and width.narrower(self._accumulate):
                self._violation("sum over devices", self._accumulate, width.name, here)

    def _passed_on(
        self, here: Here, equation: jex_core.JaxprEqn, result: Any, facts: Facts, is_cut: bool
    ) -> Facts:
        """What is known of a result; of a clipped sum, whether it is made narrower here."""
        width, dropped = held_in(equation, result), bits_dropped(equation, result)
        if is_cut and here.recording and facts.clipped:
            if width is not None and width.narrower(self._accumulate):
                dropped = width.name
            if dropped is not None:
                self._violation("between clip and noise", self._accumulate, dropped, here)
        return facts if width is None else facts.narrowed(width, here.where)

    def _has_wide_sum(self, equation: jex_core.JaxprEqn, inputs: list[Facts]) -> bool:
        """Whether an equation is given a clipped sum as wide as declared, or in wide integers."""
        widths = [width_of_number(getattr(v.aval, "dtype", None)) for v in equation.invars]
        return any(
            facts.clipped and width is not None and not width.narrower(self._accumulate)
            for facts, width in zip(inputs, widths, strict=True)
        )

    def _addition(self, here: Here, equation: jex_core.JaxprEqn, noise: Facts) -> None:
        """Noise is drawn, scaled and added wide."""
        variable = equation.outvars[0]
        width = _width_of(variable)
        if width is not None:
            size = math.prod(_shape(variable))
            self._use("noise addition", "noise addition", width.name, size, here, here.where)
            if width.narrower(self._noise):
                self._violation("noise addition", self._noise, width.name, here)
        narrowest = noise.narrowest
        for draw in sorted(noise.draws):
            dtype = f"{draw.bits} bits" if narrowest is None else narrowest.width.name
            self._use("draw", "noise draw", dtype, draw.size, here, draw.where)
            if draw.bits <= self._noise.digits:
                found = f"{draw.bits} random bits a number"
                self._violation("noise draw", self._noise, found, draw.where)
        if narrowest is not None and narrowest.width.narrower(self._noise):
            self._violation("noise draw", self._noise, narrowest.width.name, narrowest.where)


def _drawn(here: Here, equation: jex_core.JaxprEqn) -> Facts:
    variable = equation.outvars[-1]  # of several, the first is the generator's next state
    bits = equation.params.get("bit_width", 8 * _dtype(variable).itemsize)
    draw = Draw(here.where, int(bits), math.prod(_shape(variable)))
    return Facts(draws=frozenset({draw}))


def _noise_added(
    equation: jex_core.JaxprEqn, inputs: list[Facts], stage: str | None
) -> Facts | None:
    """What is known of the noise, where an equation adds some to a sum, or puts it beside one.

    Integers that are added to the bits of a sum, as stochastic rounding does, are no noise.
    """
    if equation.primitive.name not in _ADDITIONS | _JOINS or _width_of(equation.outvars[0]) is None:
        return None
    drawn = [
        facts
        for facts, variable in zip(inputs, equation.invars, strict=True)
        if facts.draws and not facts.clipped and _width_of(variable) is not None
    ]
    if len(drawn) == 1 and (stage == "noise" or any(facts.clipped for facts in inputs)):
        return drawn[0]
    return None


def _is_everywhere(equation: jex_core.JaxprEqn) -> bool:
    """Whether an equation that adds noise to a sum adds it to every entry."""
    name = equation.primitive.name
    if name in _SCATTERED:
        return _shape(equation.invars[0]) == _shape(equation.invars[2])
    return name not in _JOINS


def _flops(equation: jex_core.JaxprEqn) -> int:
    """Multiplications and additions of a contraction."""
    left, right = (_shape(v) for v in equation.invars[:2])
    out = math.prod(_shape(equation.outvars[0]))
    numbers: Any = equation.params.get("dimension_numbers")
    match equation.primitive.name:
        case "dot_general":
            return 2 * out * math.prod(left[i] for i in numbers[0][0])
        case "conv_general_dilated":
            return 2 * out * (math.prod(right) // max(1, right[numbers.rhs_spec[0]]))
        case _:  # ragged: as if every row met one group
            return 2 * out * left[-1]


def _dtype(variable: Any) -> Any:
    return variable.aval.dtype


def _shape(variable: Any) -> tuple[int, ...]:
    return tuple(variable.aval.shape)


def _width(dtype: Any) -> Width:
    width = width_of(dtype)
    assert width is not None
    return width


def _width_of(variable: Any) -> Width | None:
    return width_of(getattr(variable.aval, "dtype", None))
