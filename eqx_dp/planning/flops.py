"""Where the floating-point operations of a private training step go, before it runs."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.extend.core as jex_core
import jax.numpy as jnp

from ..gradients import ClippedGrad, Prepared, described
from ..privacy import gaussian_privatizer
from ..programs import Scan, While, equations, inside, matmul_flops
from ..sharding import ShardingRules, on_device
from ..tables import Part, tabular
from ..trees import PyTree, is_array_or_shape

# For one Gaussian number by JAX's threefry, integer operations included: 115 for its bits (20
# rounds of five, and the key added five times); and 65 by the compiler's own count for what makes
# them uniform, the inverse error function (polynomials of degree 8), the scale and the addition.
_NOISE = 180


class FlopRow(NamedTuple):
    """One stage of a step, for the whole batch.

    Attributes:
        stage: its name.
        formula: what was counted.
        flops: floating-point operations, a multiplication and an addition being two.
        share: part of the whole step, between 0 and 1.
    """

    stage: str
    formula: str
    flops: float
    share: float


class ProgramRow(NamedTuple):
    """One compiled program, for the whole batch.

    Attributes:
        program: what it computes.
        flops: the same by the formulas of the rows.
        compiled: the compiler's count; None if it gives none.
        note: what the compiler's count leaves out.
    """

    program: str
    flops: float
    compiled: float | None
    note: str


@tabular
class FlopReport(NamedTuple):
    """The stages of a private training step, as [`flop_report`][] finds them.

    Attributes:
        rows: the stages: forward, backward, with the method ghost the second pass, norms,
            accumulation, noise.
        programs: what the compiler counts; empty without `compiled`, and with sharding rules.
        textbook: 6 N D of the textbook; None if a parameter of the model is used in other ways
            than contractions and lookups.
        num_examples: the batch, B.
        num_tokens: N, the vectors of data in the batch that the model's matrices multiply.
        num_params: D, the model's floating-point entries.
        num_trainable: D', those that are trained.
        method: the method of the engine.
    """

    rows: tuple[FlopRow, ...]
    programs: tuple[ProgramRow, ...]
    textbook: float | None
    num_examples: int
    num_tokens: int
    num_params: int
    num_trainable: int
    method: str

    def row(self, stage: str) -> FlopRow:
        """The row of a stage, by name.

        Args:
            stage: `"forward"`, `"backward"`, `"norms"`, `"accumulation"` or `"noise"`.

        Raises:
            ValueError: there is none of that name.
        """
        for row in self.rows:
            if row.stage == stage:
                return row
        raise ValueError(
            f"stage must be one of {', '.join(row.stage for row in self.rows)}; found {stage!r}."
        )

    @property
    def flops(self) -> float:
        """Floating-point operations of the whole step."""
        return sum(row.flops for row in self.rows)

    def _parts(self) -> Iterator[Part]:
        total = FlopRow("total", "", self.flops, 1.0)
        stages = [
            (row.stage, f"{row.flops:.3e}", f"{100 * row.share:.3f} %", row.formula)
            for row in (*self.rows, total)
        ]
        yield (
            f"B = {self.num_examples:,} examples, D = {self.num_params:,} parameters, D' = "
            f"{self.num_trainable:,} of them trained, method {self.method}"
        )
        yield ""
        yield [("stage", "FLOPs", "share", "formula"), *stages]
        if self.textbook is not None:
            ordinary = self.row("forward").flops + self.row("backward").flops
            of = "6 N D" if self.num_trainable == self.num_params else "4 N D + 2 N D'"
            yield ""
            yield (
                f"textbook: {of} = {self.textbook:.3e} with N = {self.num_tokens:,} tokens; "
                f"forward and backward are {ordinary / self.textbook:.2f} of it"
            )
        if self.programs:
            programs = [
                (name, f"{flops:.3e}", "-" if compiled is None else f"{compiled:.3e}", note)
                for name, flops, compiled, note in self.programs
            ]
            yield ""
            yield [("program", "by formula", "compiled", "note"), *programs]


def flop_report(
    grad_fn: ClippedGrad[Any],
    model: PyTree[Any],
    *batch: PyTree[Any],
    key: Any = None,
    is_padding_example: Any = None,
    compiled: bool = True,
) -> FlopReport:
    """Counts the floating-point operations of a private training step, stage by stage.

    Nothing is computed: the loss is traced on shapes; with `compiled` it is compiled as well.

    | stage | by formula |
    |---|---|
    | forward | contractions and convolutions of the loss, from the traced program |
    | backward | those of its gradient, less the forward ones; frozen parameters have none |
    | second pass | backward again, by the method ghost; forward, too, if parameters are in parts |
    | norms | of each example's gradient, by the way that the engine takes for each leaf |
    | accumulation | B D': an addition for each example and trained parameter |
    | noise | 180 D': a Gaussian for each trained parameter, integer operations included |

    If no example's gradient is formed, the backward pass's contractions do the accumulation, and it
    is counted in both rows. By a policy with `[matmul]`, the formula of the forward row says what
    part of the operations has operands in the narrow dtype.

    For a transformer with N tokens and D parameters, forward and backward are about 6 N D (Kaplan
    et al. 2020, section 2.1); if D' parameters are trained, 4 N D + 2 N D'. Attention has no
    parameters and is added to that; an embedding that is looked up has parameters and no
    contraction. Accumulation and noise do not grow with the length of a sequence. They are small
    beside 6 N D, so they can be in a wide dtype at little cost.

    The compiler also counts everything else (activations, softmax, casts, the drawing of bits), but
    the body of a loop only once. If a program has a loop, its row says so. Microbatches are not
    such a loop here: one microbatch is compiled, and its count is multiplied by their number.

    Args:
        grad_fn: what `filter_clipped_grad` returned.
        model: the model. Here and in the batch, `jax.ShapeDtypeStruct` may stand for arrays.
        *batch: the batch, as for `grad_fn`.
        key: as for `grad_fn`.
        is_padding_example: as for `grad_fn`; it changes nothing.
        compiled: whether to compile the step and ask the compiler for its count. It is not asked
            if there are sharding rules.

    Returns:
        The report: `rows`, each with `stage`, `formula`, `flops`, `share`; `programs`;
        `str()` is a table. `report.row("noise")` returns one row.

    Raises:
        ValueError: `grad_fn` is something else; and as for `grad_fn`.
    """
    call = described(grad_fn, model, batch, key, is_padding_example)
    num_examples = call.examples.num_examples
    rows = _rows(call, grad_fn.sharding)
    compile_ = compiled and grad_fn.sharding is None and num_examples > 0
    arrays = jax.tree.leaves(eqx.filter(model, is_array_or_shape))
    params = sum(x.size for x in arrays if jnp.issubdtype(x.dtype, jnp.floating))
    trained = sum(x.size for x in call.sums)
    steps = max(cost.steps for cost in call.costs)
    if "conv_general_dilated" in _primitives(call.traced.program.jaxpr):
        steps = 0  # the textbook speaks of matrices that meet the vectors of a sequence, or one
    tokens = num_examples * steps
    return FlopReport(
        rows,
        _programs(grad_fn, call, rows, (model, batch, key)) if compile_ else (),
        tokens * (4.0 * params + 2.0 * trained) or None,
        num_examples,
        tokens,
        params,
        trained,
        call.choice.method,
    )


def _rows(call: Prepared, rules: ShardingRules | None) -> tuple[FlopRow, ...]:
    batch, program, num_params = call.examples.num_examples, call.traced.program, len(call.sums)
    trained = sum(x.size for x in call.sums)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in program.jaxpr.in_avals]
    of_one = jax.grad(lambda params, rest: program(params, [], rest)[0])
    with on_device(rules):
        gradient = jax.make_jaxpr(of_one)(shapes[:num_params], shapes[num_params:])
    forward = batch * matmul_flops(program.jaxpr)
    backward = batch * matmul_flops(gradient) - forward
    norms = batch * sum(cost.norm_flops for cost in call.costs)
    stages = [
        ("forward", f"contractions and convolutions of the loss{_narrow(call)}", forward),
        ("backward", "those of its gradient", backward),
        ("norms", "of each example's gradient", norms),
        ("accumulation", "B D'", batch * trained),
        ("noise", f"{_NOISE} D'", _NOISE * trained),
    ]
    if call.choice.method == "ghost":
        is_in_parts = call.specs is not None and any(call.specs.is_cut)
        formula, again = (
            ("forward and backward again", forward + backward)
            if is_in_parts
            else ("backward again", backward)
        )
        stages.insert(2, ("second pass", formula, again))
    total = sum(flops for _, _, flops in stages)
    return tuple(
        FlopRow(stage, formula, float(flops), flops / total) for stage, formula, flops in stages
    )


def _narrow(call: Prepared) -> str:
    """How many of the forward operations are in a narrow dtype, in words."""
    program = call.traced.program
    if program.narrow is None:
        return ""
    forward = matmul_flops(program.jaxpr)
    wide = matmul_flops(program.narrow.wide_alone(program.jaxpr))
    share = (forward - wide) / forward if forward else 0.0
    return f", {100 * share:.0f} % of them in {program.narrow.matmul.forward}"


# What the compiler counts.


def _programs(
    grad_fn: ClippedGrad[Any],
    call: Prepared,
    rows: tuple[FlopRow, ...],
    arguments: tuple[PyTree[Any], tuple[PyTree[Any], ...], Any],
) -> tuple[ProgramRow, ...]:
    by_stage = {row.stage: row.flops for row in rows}
    ordinary, noise = by_stage["forward"] + by_stage["backward"], by_stage["noise"]
    num_examples = call.examples.num_examples
    # Where no example's gradient is formed, the backward pass's contractions add them up.
    leaves = zip(call.costs, call.sums, strict=True)
    within = sum(x.size for cost, x in leaves if cost.way != "formed")

    def loss(params: list[Any], frozen: list[Any], examples: list[Any]) -> Any:
        losses = jax.vmap(lambda *x: call.traced.program(params, frozen, list(x))[0])(*examples)
        return jnp.sum(losses)

    inputs = (call.traced.params, call.traced.frozen, call.examples.leaves)
    step = sum(by_stage.values()) - noise - float(num_examples * within)
    clipped = _of_microbatch(grad_fn, arguments, call.at_once)
    return (
        _program("loss", by_stage["forward"], loss, inputs),
        _program("its gradient, without clipping", ordinary, jax.grad(loss), inputs),
        _program("clipped gradient", step, *clipped, times=-(-num_examples // call.at_once)),
        _program("noise", noise, _noised, (call.sums, jax.eval_shape(lambda: jax.random.key(0)))),
    )


def _program(
    name: str, flops: float, function: Callable[..., Any], inputs: tuple[Any, ...], times: int = 1
) -> ProgramRow:
    traced = jax.jit(function).trace(*inputs)
    program = traced.lower().compile()
    counted = (program.cost_analysis() or {}).get("flops")
    notes = [f"{times} microbatches of one program"] if times > 1 else []
    if " while(" in (program.as_text() or ""):
        what = ", ".join(sorted(set(_loops(traced.jaxpr))))
        what = f" ({what})" if what else ""
        notes.append(f"a loop's body is counted once{what}")
    return ProgramRow(
        name, flops, None if counted is None else float(counted) * times, "; ".join(notes)
    )


def _of_microbatch(
    grad_fn: ClippedGrad[Any],
    arguments: tuple[PyTree[Any], tuple[PyTree[Any], ...], Any],
    size: int,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The clipped gradient of so many examples, as a function of arrays alone."""
    arrays, static = eqx.partition(arguments, is_array_or_shape)
    of_batch = grad_fn.variant().of_samples(None)

    def clipped(arrays: PyTree[Any]) -> Any:
        model, batch, key = eqx.combine(arrays, static)
        return of_batch(model, *batch, key=key)

    model, batch, key = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    few = jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), batch)
    return clipped, ((model, few, key),)


def _noised(sums: list[Any], key: Any) -> Any:
    privatizer = gaussian_privatizer(stddev=1.0, key=key)
    noisy, _ = privatizer.update(sums, privatizer.init(sums))
    return noisy


def _primitives(program: jex_core.ClosedJaxpr | jex_core.Jaxpr) -> frozenset[str]:
    """The names of all primitives in a program."""
    return frozenset(equation.primitive.name for equation in equations(program))


def _loops(program: jex_core.ClosedJaxpr | jex_core.Jaxpr) -> Iterator[str]:
    """Names the loops of a program: every scan of more than one step, every while."""
    for equation in equations(program):
        match inside(equation):
            case Scan(length=length) if length > 1:
                yield f"a scan of {length} steps"
            case While():
                yield "a while_loop"
            case _:
                pass
