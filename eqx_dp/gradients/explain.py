"""What the engine makes of a model: a row for every trainable leaf."""

from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from .clipped_grad import ClippedGrad
from .cost import Choice, LeafCost


class Row(NamedTuple):
    """How one trainable leaf is treated; figures are for the whole batch.

    Attributes:
        path: where the leaf stands in the model.
        kinds: the kinds of its sites, one an equation that uses it.
        way: how its norm and its sum are found: ``"ghost"`` (without forming per-example
            gradients), ``"kept"`` (forming them from their factors), ``"whole"`` (differentiating
            example by example), or ``"unused"``.
        flops: floating-point operations for norms and weighted sum.
        bytes: what is held until the clip factors are known (by ``"ghost"`` as a method: what
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
        reason: why.
    """

    rows: tuple[Row, ...]
    method: str
    microbatch_size: int | None
    num_examples: int
    reason: str

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
        return "\n".join("  ".join([*map(str.ljust, line, widths), line[-1]]) for line in lines)

    def _at_once(self) -> str:
        if self.microbatch_size is None or self.microbatch_size >= self.num_examples:
            return f"all {self.num_examples} examples at once"
        return f"{self.microbatch_size} of {self.num_examples} examples at once"


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
) -> Explanation:
    """Says how the engine finds the norm and the sum of every trainable leaf, and what that costs.

    Nothing is computed: the loss is traced, on shapes alone.

    Args:
        grad_fn: what ``filter_clipped_grad`` returned.
        model: the model.
        *batch: the batch, as for ``grad_fn``.
        key: as for ``grad_fn``.

    Returns:
        A table: ``rows``, each with ``path``, ``kinds``, ``way``, ``flops``, ``bytes``, ``reason``;
        ``str()`` prints it, with the totals, the method that was chosen, and why.

    Raises:
        ValueError: as ``grad_fn``.
    """
    task, examples, choice, structure, _ = grad_fn.prepare(model, batch, key, None)
    costs = task.costs
    paths = [
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(structure.unflatten(task.params))
    ]
    if choice.method == "per_example":
        costs = [_formed(cost, param.size) for cost, param in zip(costs, task.params, strict=True)]
    rows = tuple(
        _row(path, cost, choice, examples.num_examples)
        for path, cost in zip(paths, costs, strict=True)
    )
    return Explanation(
        rows, choice.method, choice.microbatch_size, examples.num_examples, choice.reason
    )


def _formed(cost: LeafCost, size: int) -> LeafCost:
    """The cost of a leaf whose gradient is differentiated example by example, as any other."""
    if cost.way == "unused":
        return cost
    return cost._replace(way="whole", flops=4 * size, bytes=4 * size)


def _row(path: str, cost: LeafCost, choice: Choice, num_examples: int) -> Row:
    at_once = min(choice.microbatch_size or num_examples, num_examples)
    return Row(
        path,
        cost.kinds,
        cost.way,
        cost.flops * num_examples,
        cost.bytes * at_once,
        cost.reason,
    )
