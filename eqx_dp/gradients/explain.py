"""What the engine makes of a model: a row for every trainable leaf."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar, cast

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, PyTree

from ..privacy import PrivacyPlan, SampleSize
from ..shown import shown
from .calls import Prepared
from .choice import Choice, Work
from .clipped_grad import ClippedGrad
from .cost import LeafCost

_Found = TypeVar("_Found")


class Row(NamedTuple):
    """How one trainable leaf is treated; figures are for the whole batch, bytes for a device.

    Attributes:
        path: where the leaf stands in the model.
        kinds: the kinds of its uses, one an equation.
        way: how its norm and its sum are found: `"ghost"` (without forming per-example
            gradients), `"kept"` (forming them from their factors), `"whole"` (differentiating
            example by example), or `"unused"`.
        flops: floating-point operations for norms and weighted sum.
        bytes: what is held until the clip factors are known (by `"ghost"` as a method: what
            book-keeping would hold).
        reason: why this way.
    """

    path: str
    kinds: tuple[str, ...]
    way: str
    flops: float
    bytes: int
    reason: str


class Explanation(NamedTuple):
    """The rows of [`explain`][], and what was chosen for the batch.

    Attributes:
        rows: one for every trainable leaf, in the model's order.
        method: the method.
        microbatch_size: how many examples at once; None for the whole batch.
        num_examples: the batch.
        num_shards: how many parts the batch is divided into, by sharding rules.
        reason: why.
        sample: how many of the slots hold an example; None without a plan.
        work: what a device is expected to do in a step.
    """

    rows: tuple[Row, ...]
    method: str
    microbatch_size: int | None
    num_examples: int
    num_shards: int
    reason: str
    sample: SampleSize | None
    work: Work

    def __str__(self) -> str:
        head = ("path", "kinds", "way", "flops", "bytes", "reason")
        total = Row(
            "total",
            (),
            "",
            sum(row.flops for row in self.rows),
            sum(row.bytes for row in self.rows),
            f"method {self.method}, {self._at_once()}: {self.reason}",
        )
        lines = [head, *(_cells(row) for row in (*self.rows, total))]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head) - 1)]
        table = ["  ".join([*map(str.ljust, line, widths), line[-1]]) for line in lines]
        return "\n".join([*table, *self._expected()])

    def _expected(self) -> Iterator[str]:
        """What a plan's sampling means for a step."""
        if self.sample is None:
            return
        of_device = self.sample.slots // self.num_shards
        size = max(1, min(self.microbatch_size or of_device, of_device))
        count = self.sample.microbatches(size, of_device)
        yield (
            f"batch: {self.sample.slots} slots, of which {self.sample.mean:.1f} are expected to "
            f"hold an example; {count:.2f} microbatches of {size} are expected to be computed"
        )
        total = self.work.total or 1.0  # nothing is done for leaves without entries
        shares = [f"{name} {value / total:.0%}" for name, value in self._parts()]
        yield f"expected time of a step, without the optimizer: {', '.join(shares)}"

    def _parts(self) -> Iterator[tuple[str, float]]:
        yield "gradient", self.work.gradient
        yield "padding", self.work.padding
        yield "sums over microbatches", self.work.passes
        yield "noise", self.work.noise

    def _at_once(self) -> str:
        own = self.num_examples // self.num_shards
        where = f" on each of {self.num_shards} parts of the mesh" if self.num_shards > 1 else ""
        if self.microbatch_size is None or self.microbatch_size >= own:
            return f"all {own} examples{where} at once"
        return f"{self.microbatch_size} of {own} examples{where} at once"


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.path,
        "+".join(row.kinds),
        row.way,
        f"{row.flops:.2e}",
        f"{row.bytes / 2**20:.2f} MiB",
        row.reason,
    )


def explain(
    grad_fn: ClippedGrad[Any],
    model: PyTree[Any],
    *batch: PyTree[Any],
    key: Any = None,
    is_padding_example: Any = None,
    plan: PrivacyPlan | None = None,
) -> Explanation:
    """Says how the engine finds the norm and the sum of every trainable leaf, and what that costs.

    Nothing is computed: the loss is traced, on shapes alone.

    Args:
        grad_fn: what `filter_clipped_grad` returned.
        model: the model. Here and in the batch, `jax.ShapeDtypeStruct` may stand for arrays.
        *batch: the batch, as for `grad_fn`.
        key: as for `grad_fn`.
        is_padding_example: as for `grad_fn`; it changes nothing.
        plan: the plan whose samples the batches are, and the batch as long as a sampler's
            `capacity`; needed only where `plan.privatizer` has not been given `grad_fn`.

    Returns:
        A table: `rows`, each with `path`, `kinds`, `way`, `flops`, `bytes`, `reason`;
        `str()` prints it, with the totals, the method that was chosen, and why. With a plan also
        how many slots are expected to hold an example, how many microbatches are expected to be
        computed, and what a step's time is expected to be made of, by formula.

    Raises:
        ValueError: `grad_fn` is something else; and as `grad_fn`.
    """
    if plan is not None and isinstance(cast(object, grad_fn), ClippedGrad):
        grad_fn = grad_fn.of_samples(plan.sampling)
    return on_shapes(_explained, grad_fn, model, batch, key, is_padding_example)


def on_shapes(
    look: Callable[[Prepared], _Found],
    grad_fn: ClippedGrad[Any],
    model: PyTree[Any],
    batch: tuple[PyTree[Any], ...],
    key: Any,
    is_padding_example: Any,
) -> _Found:
    """Looks at a call that is checked and traced, but not computed.

    Args:
        look: from the call to what is wanted of it: no arrays, for there are none.
        grad_fn: as for [`explain`][], and so the others.
        model: with `jax.ShapeDtypeStruct` for arrays, if wanted.
        batch: the positional arguments behind it.
        key: one key or None.
        is_padding_example: the mask or None.

    Raises:
        ValueError: as [`explain`][].
    """
    if not isinstance(cast(object, grad_fn), ClippedGrad):
        raise ValueError(
            "grad_fn must be what filter_clipped_grad or filter_value_and_clipped_grad returned, "
            f"before it is wrapped in jit or anything else; found {shown(grad_fn)}."
        )
    arrays, static = eqx.partition((model, batch, key, is_padding_example), is_array_or_shape)
    found: list[_Found] = []

    def prepare(arrays: PyTree[Array]) -> None:
        found.append(look(grad_fn.prepare(*eqx.combine(arrays, static))))

    jax.eval_shape(prepare, arrays)
    return found[0]


def is_array_or_shape(x: Any) -> bool:
    """Whether a leaf is an array, or stands for one."""
    return eqx.is_array(x) or isinstance(x, np.ndarray | jax.ShapeDtypeStruct)


def paths_of(prepared: Prepared) -> list[str]:
    """Where each trainable leaf stands in the model."""
    params = prepared.structure.unflatten(prepared.task.params)
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]


def costs_of(prepared: Prepared) -> list[LeafCost]:
    """What each trainable leaf costs by the method that was chosen."""
    task = prepared.task
    if prepared.choice.method != "per_example":
        return task.costs
    return [_formed(cost, param.size) for cost, param in zip(task.costs, task.params, strict=True)]


def _explained(prepared: Prepared) -> Explanation:
    choice, num_examples = prepared.choice, prepared.examples.num_examples
    paths, costs = paths_of(prepared), costs_of(prepared)
    shards = prepared.num_shards
    rows = tuple(
        _row(path, cost, choice, num_examples, num_examples // shards)
        for path, cost in zip(paths, costs, strict=True)
    )
    return Explanation(
        rows,
        choice.method,
        choice.microbatch_size,
        num_examples,
        shards,
        choice.reason,
        choice.batch.sample,
        choice.work,
    )


def _formed(cost: LeafCost, size: int) -> LeafCost:
    """The cost of a leaf whose gradient is differentiated example by example, as any other."""
    if cost.way == "unused":
        return cost
    if cost.way == "whole":
        return cost._replace(bytes=4 * size)
    reason = "each example's gradient is formed by the backward pass itself"
    return LeafCost(cost.kinds, "whole", 2 * size, 2 * size, 4 * size, reason)


def _row(path: str, cost: LeafCost, choice: Choice, num_examples: int, on_a_device: int) -> Row:
    at_once = min(choice.microbatch_size or on_a_device, on_a_device)
    return Row(
        path,
        cost.kinds,
        cost.way,
        cost.flops * num_examples,
        cost.bytes * at_once,
        cost.reason,
    )
