"""How the engine treats a call, by shapes alone: a row for every trainable leaf."""

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar, cast

import equinox as eqx
import jax
import jax.extend.core as jex_core

from ..device import made_for
from ..expected import expect
from ..isolation import warn_if_zero
from ..precision import agreed_policy
from ..privacy import PrivacyPlan, SampleSize
from ..programs import matmul_flops
from ..sharding import ShardingRules, on_device
from ..shown import shown
from ..tables import Part, tabular
from ..trees import PyTree
from .calls import Prepared
from .clipped_grad import ClippedGrad

_Result = TypeVar("_Result")


class Row(NamedTuple):
    """How the chosen method treats one trainable leaf.

    Attributes:
        path: where the leaf stands in the model.
        uses: the kinds of its uses, one an equation that multiplies it by data; with the dtype that
            it is cast to, if that is narrower than the compute dtype: `contraction[float8_e4m3fn]`.
        way: `"factored"` (norm and sum come from the inputs and cotangents of its uses), `"formed"`
            (each example's gradient is made), or `"unused"`.
        reason: why; of a parameter that is spread over example axes, when a device needs all of it
            as well.
        param_dtype: the dtype that it is stored in.
        compute_dtype: the dtype in which it enters the loss.
        accumulate_dtype: the dtype of its norms and its sum.
        flops: floating-point operations for its norms and its weighted sum, for the whole batch.
        bytes: memory that a device holds for it until the clip factors are known (with the method
            `"ghost"`: of a factored leaf, what book-keeping would hold).
    """

    path: str
    uses: tuple[str, ...]
    way: str
    reason: str
    param_dtype: str
    compute_dtype: str
    accumulate_dtype: str
    flops: float
    bytes: int


@tabular
class Explanation(NamedTuple):
    """What [`explain`][] returns; `str()` is a table.

    Attributes:
        rows: one for every trainable leaf, in the model's order.
        method: the method.
        microbatch_size: how many examples at once; None for the whole batch.
        num_examples: the batch.
        num_shards: how many parts the batch is divided into, by sharding rules.
        reason: why.
        sample: how many slots are expected to hold an example; None without a plan.
        flops: floating-point operations of the whole batch: of contractions and convolutions in
            the loss and its gradient, without clipping, from the traced program; `"ghost"` takes
            those of cotangents twice.
        across: the dtype in which sums are added over the parts of the batch, unless these are
            scattered in every microbatch.
        reserve: the share of the clip norm that is left for the rounding of the sum (rho in
            `privacy/finite_precision.md`), on the devices of the sharding rules; 0 where nothing is
            proven, as with an accumulate dtype narrower than float32.
    """

    rows: tuple[Row, ...]
    method: str
    microbatch_size: int | None
    num_examples: int
    num_shards: int
    reason: str
    sample: SampleSize | None
    flops: float
    across: str
    reserve: float

    def _parts(self) -> Iterator[Part]:
        why = f"method {self.method}, {self._at_once()}: {self.reason}"
        flops, size = sum(row.flops for row in self.rows), sum(row.bytes for row in self.rows)
        total = Row("total", (), "", why, "", "", "", flops, size)
        yield [_HEAD, *map(_cells, (*self.rows, total))]
        meets = f", of {self.num_shards} parts in {self.across}" if self.num_shards > 1 else ""
        yield (
            f"gradient without clipping: {self.flops:.3e} FLOPs; sum over examples{meets}: "
            f"{self.reserve:.2%} of the clip norm is left for rounding"
        )
        if self.sample is not None:
            of_device = self.sample.slots // self.num_shards
            size = max(1, min(self.microbatch_size or of_device, of_device))
            passes = self.sample.microbatches(size, of_device)
            yield (
                f"batch: {self.sample.slots} slots, of which {self.sample.mean:.1f} are expected "
                f"to hold an example, in {passes:.2f} microbatches of {size}"
            )

    def _at_once(self) -> str:
        own = self.num_examples // self.num_shards
        where = f" on each of {self.num_shards} parts of the mesh" if self.num_shards > 1 else ""
        if self.microbatch_size is None or self.microbatch_size >= own:
            return f"all {own} examples{where} at once"
        return f"{self.microbatch_size} of {own} examples{where} at once"


_HEAD = ("leaf", "uses", "way", "why", "params", "compute", "accumulate", "FLOPs", "bytes")


def _cells(row: Row) -> tuple[str, ...]:
    path, uses, way, *texts, flops, size = row
    return path, "+".join(uses), way, *texts, f"{flops:.2e}", f"{size / 2**20:.2f} MiB"


def explain(
    grad_fn: ClippedGrad[Any],
    model: PyTree[Any],
    *batch: PyTree[Any],
    key: Any = None,
    is_padding_example: Any = None,
    plan: PrivacyPlan | None = None,
) -> Explanation:
    """Explains how the engine finds the norm and the sum of every trainable leaf, and their cost.

    The loss is traced, on shapes alone. Nothing is computed, but for a loss with `keep_batch_dim`
    and without sharding rules: its gradient on a made-up row with made-up parameters, if these are
    at most 2^24 numbers and it has no loop of unknown length.

    Args:
        grad_fn: what `filter_clipped_grad` returned.
        model: the model. Here and in the batch, `jax.ShapeDtypeStruct` may stand for arrays.
        *batch: the batch, as for `grad_fn`.
        key: as for `grad_fn`.
        is_padding_example: as for `grad_fn`; it changes nothing.
        plan: the plan that batches are drawn by; the batch must then be as long as its sampler's
            `capacity`. Not needed for the `grad_fn` of a step of `make_step`, which knows it.

    Returns:
        An [`Explanation`][]: `rows`, each with `path`, `uses`, `way`, `reason`, `param_dtype`,
        `compute_dtype`, `accumulate_dtype`, `flops`, `bytes`; `str()` prints them, with the totals,
        the chosen method and the reason, and the `flops` of the gradient. With a plan it also
        prints the expected numbers of slots that hold an example and of microbatches that are
        computed.

    Raises:
        ValueError: `grad_fn` is something else; and as for `grad_fn`.

    Warns:
        UserWarning: that gradient is zero: the loss compares rows, and only noise would train.
    """
    if plan is not None:
        expect("plan", plan, PrivacyPlan, "a dp.PrivacyPlan, or None")
        grad_fn = checked_grad_fn(grad_fn).of_samples(plan.batches)
    found = described(grad_fn, model, batch, key, is_padding_example)
    choice, num_examples = found.choice, found.examples.num_examples
    gradient = _gradient(found, grad_fn.sharding)
    configuration = grad_fn._configuration  # pyright: ignore[reportPrivateUsage]
    if configuration.keep_batch_dim and configuration.sharding is None:
        warn_if_zero(gradient)
    traced, rows, policy = found.traced, list[Row](), agreed_policy(model, grad_fn.policy)
    params = eqx.filter_eval_shape(grad_fn.trainable, model)
    params = params if policy is None else eqx.filter_eval_shape(policy.cast_to_param, params)
    stored = jax.tree.leaves(params)
    for path, cost, why, param, at_rest in zip(
        found.paths, found.costs, found.reasons, traced.params, stored, strict=True
    ):
        dtypes = (str(at_rest.dtype), str(param.dtype), str(traced.accumulate_dtype))
        flops, size = cost.flops * num_examples, cost.bytes * found.at_once
        rows.append(Row(path, cost.uses, cost.way, why, *dtypes, flops, size))
    at_once = choice.method, choice.microbatch_size, num_examples, found.num_shards
    flops = float(num_examples * matmul_flops(gradient))
    with made_for(grad_fn.sharding):
        across = "float64" if found.is_wide else str(traced.accumulate_dtype)
        reserve = found.drift(configuration.normalize_by != 1)
    reason, sample = choice.reason, choice.batch.sample
    return Explanation(tuple(rows), *at_once, reason, sample, flops, across, reserve)


def _gradient(call: Prepared, rules: ShardingRules | None) -> jex_core.ClosedJaxpr:
    """The gradient of the loss of one example, traced on shapes."""
    program, count = call.traced.program, len(call.sums)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in program.jaxpr.in_avals]
    run: Any = jex_core.jaxpr_as_fun(program.run())
    of_one = jax.grad(lambda params, rest: run(*params, *rest)[0])
    with on_device(rules):
        return jax.make_jaxpr(of_one)(shapes[:count], shapes[count:])


def described(
    grad_fn: ClippedGrad[Any],
    model: PyTree[Any],
    batch: tuple[PyTree[Any], ...],
    key: Any = None,
    is_padding_example: Any = None,
) -> Prepared:
    """Checks and traces a call on shapes alone; reports are made from the result.

    Its arguments are those of [`explain`][], the batch in one tuple. The result has shapes in the
    place of arrays.

    Raises:
        ValueError: `grad_fn` is something else; and as `grad_fn`.
    """
    checked_grad_fn(grad_fn)
    found: list[Prepared] = []

    def prepare(*call: Any) -> None:
        with made_for(grad_fn.sharding):
            prepared = grad_fn._prepare(*call)  # pyright: ignore[reportPrivateUsage]
        arrays = (prepared.traced.params, prepared.traced.frozen, prepared.examples)
        params, frozen, examples = jax.tree.map(_shape, arrays)
        traced = prepared.traced._replace(params=params, frozen=frozen)
        found.append(prepared._replace(traced=traced, examples=examples))

    eqx.filter_eval_shape(prepare, model, batch, key, is_padding_example)
    return found[0]


def checked_grad_fn(grad_fn: ClippedGrad[_Result]) -> ClippedGrad[_Result]:
    """What `filter_clipped_grad` returned, as it is.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(cast(object, grad_fn), ClippedGrad):
        inside = getattr(grad_fn, "grad_fn", None)
        advice = " Give its .grad_fn." if isinstance(inside, ClippedGrad) else ""
        raise ValueError(
            "grad_fn must be what filter_clipped_grad or filter_value_and_clipped_grad returned, "
            f"before it is wrapped in jit or anything else; found {shown(grad_fn)}.{advice}"
        )
    return grad_fn


def _shape(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if eqx.is_array(x) else x
