"""Runs a checked and traced call, on one device or, with sharding rules, on a mesh.

In a traced program it is one equation, whose mark states the bounds of its sums.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.core
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from ..paths import dotted
from ..programs import in_marked_equation, mark_on
from ..sharding import (
    Cut,
    Shard,
    ShardingRules,
    agreement,
    check_context,
    cut_of,
    over_devices,
    whole,
)
from ..trees import PyTree
from .arguments import Configuration, Examples
from .blocks import BLOCK, added_roundoff
from .choice import Choice, LeafCost
from .clip import PerExample, TracedLoss
from .gram import weighted_parts
from .microbatches import over_microbatches
from .norms import has_float64, product_roundoff, unit_roundoff
from .uses import parts_of_uses


class Mark(NamedTuple):
    """What the engine states of one equation, a jitted call, that holds all of its work on a batch.

    Operands are, in this order and behind what JAX puts in front: arrays that examples share
    (parameters, other arrays of the model, constants, a traced clip norm), arrays with examples in
    front, one key an example, the mask. Results are the clipped sum's leaves, then values with
    examples in front.

    Attributes:
        bounds: for each clip norm, the L2 norm that one example adds at most to its leaves' sums;
            then for the count of a quantile, which is a leaf of its own.
        groups: for each leaf the index of its bound.
        ranks: how many dimensions each leaf has.
        num_shared: how many operands examples share.
        num_batched: how many operands have examples in front, without keys and mask.
        has_keys: whether there are keys.
        has_mask: whether there is a mask.
        num_examples: the length of the batch, padding included.
        num_results: how many results there are, values of single examples included.
        unit: of what each example is all rows, a `dp.Users`; None where it is one row.
    """

    bounds: tuple[float, ...]
    groups: tuple[int, ...]
    ranks: tuple[int, ...]
    num_shared: int
    num_batched: int
    has_keys: bool
    has_mask: bool
    num_examples: int
    num_results: int
    unit: Any

    @property
    def num_operands(self) -> int:
        """The number of operands of the engine."""
        return self.num_shared + self.num_batched + self.has_keys + self.has_mask


def mark_of(equation: jex_core.JaxprEqn) -> Mark | None:
    """The mark that an equation carries; None without."""
    mark = mark_on(equation)
    return mark if isinstance(mark, Mark) else None


class CallSpecs(NamedTuple):
    """How a call's arrays are spread over a mesh.

    Attributes:
        params: each trainable leaf.
        frozen: each other array of the model.
        sums: the gradient of each trainable leaf.
        of_one: all arrays that the loss of one example takes.
        cuts: how each of params and frozen is cut over the example axes; None where it is not.
    """

    params: list[PartitionSpec]
    frozen: list[PartitionSpec]
    sums: list[PartitionSpec]
    of_one: list[PartitionSpec]
    cuts: list[Cut | None]


class Prepared(NamedTuple):
    """A call, checked and traced; with shapes for its arrays where [`described`][] gave it.

    Attributes:
        traced: the loss of one example, with its arrays and uses.
        examples: the batch.
        choice: the method, and how many examples at once on a device.
        costs: how each trainable leaf is treated, and what that costs for one example.
        activations: a rough estimate of the bytes that one example's forward pass saves for its
            backward pass.
        structure: of the trainable leaves.
        specs: with sharding rules, how arrays are spread.
        num_shards: how many parts the batch is divided into.
    """

    traced: TracedLoss
    examples: Examples
    choice: Choice
    costs: list[LeafCost]
    activations: int
    structure: Any
    specs: CallSpecs | None
    num_shards: int

    @property
    def paths(self) -> list[str]:
        """The path of each trainable leaf in the model."""
        leaves = jax.tree_util.tree_leaves_with_path(self.structure.unflatten(self.traced.params))
        return [dotted(path) for path, _ in leaves]

    @property
    def reasons(self) -> list[str]:
        """Why each trainable leaf is treated as it is, and when a device needs all of it."""
        stay = parts_that_stay(self.traced)
        gathered = ("all of it is gathered at the beginning", "it is gathered where it is used")
        cuts = [None] * len(self.costs) if self.specs is None else self.specs.cuts
        return [
            f"{cost.reason}; {gathered[leaf in stay]}" if cut is not None else cost.reason
            for leaf, (cost, cut) in enumerate(zip(self.costs, cuts, strict=False))
        ]

    @property
    def sums(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the gradients, in the accumulate dtype."""
        dtype = self.traced.accumulate_dtype
        return [jax.ShapeDtypeStruct(leaf.shape, dtype) for leaf in self.traced.params]

    @property
    def of_device(self) -> int:
        """The number of the batch's examples on a device."""
        return self.examples.num_examples // self.num_shards

    @property
    def at_once(self) -> int:
        """The number of examples that a device processes at once."""
        return min(self.choice.microbatch_size or self.of_device, self.of_device)

    @property
    def is_wide(self) -> bool:
        """Whether devices' sums are added in float64: in float32 that would cost 1 % or more.

        Not the parts that are scattered in every microbatch.
        """
        dtype, devices = self.traced.accumulate_dtype, self.num_shards
        moved = 2 * self.of_device * devices * (devices - 1) * unit_roundoff(dtype)
        return moved > 0.01 and dtype == jnp.float32 and has_float64()

    def drift(self, is_divided: bool) -> float:
        """How far rounding moves the sum at most if one example leaves the batch, in clip norms.

        Beyond that example's own gradient. Guarantee, for batches in random order, as those of
        `PoissonSampler`: `privacy/finite_precision.md`. It is 0 for a dtype narrower than float32,
        whose policy says that it is unsafe.

        Args:
            is_divided: whether the sum is divided by a number.
        """
        dtype, size, devices = self.traced.accumulate_dtype, self.at_once, self.num_shards
        if size == 0 or jnp.finfo(dtype).nmant < 23:
            return 0.0
        u, count, block = unit_roundoff(dtype), -(-self.of_device // size), min(size, BLOCK)
        # On each host one example takes the place of another, which becomes the last: of blocks and
        # of microbatches at most two hold other examples.
        moves = 2 * jax.process_count()
        blocks = min(moves, count * devices * -(-size // block))
        # Devices whose sums are added up in every microbatch.
        together = devices if any(self.traced.cuts) else 1
        microbatches = min(moves, count * devices // together)
        of_blocks = added_roundoff(-(-size // block), size, dtype) + (together - 1) * u
        parts = [parts_of_uses((use,), dtype) for use in self.traced.uses.at.values()]
        errors = [product_roundoff(dtype, parts=weighted_parts(its)) for its in (0, *parts)]
        off = blocks * block * (block - 1) * max(errors)
        off += microbatches * together * size * of_blocks
        across = (1 if self.is_wide else devices - 1) + 4 * is_divided
        in_all = added_roundoff(count, self.of_device, dtype) + across * u
        return 2.002 * (off + self.of_device * devices * in_all)


def specs_of(
    rules: ShardingRules,
    model: PyTree[Any],
    params: PyTree[Array],
    frozen: PyTree[Any],
    examples: Examples,
) -> CallSpecs:
    """How the rules spread a call's arrays.

    Raises:
        ValueError: the rules do not fit the mesh in context, the model, or the batch.
    """
    check_context(rules)
    rules.check_examples(examples.num_examples, (examples.batch, examples.is_padding_example))
    specs = rules.specs(model)

    def of(part: PyTree[Any]) -> list[PartitionSpec]:
        def spec(leaf: Any, found: PartitionSpec | None) -> PartitionSpec | None:
            return None if leaf is None else found or PartitionSpec()

        return jax.tree.leaves(jax.tree.map(spec, part, specs, is_leaf=lambda x: x is None))

    of_params, of_frozen = of(params), of(frozen)
    shapes = [leaf.shape for leaf in jax.tree.leaves(params)]
    sums = list(map(rules.accumulator_spec, of_params, shapes))
    shared, arrays = [*of_params, *of_frozen], jax.tree.leaves((params, frozen))
    cuts = [cut_of(rules, spec, x.ndim) for spec, x in zip(shared, arrays, strict=True)]
    return CallSpecs(of_params, of_frozen, sums, [*shared, *examples.specs()], cuts)


Results: TypeAlias = tuple[list[Array], PerExample]
"""Sums of clipped gradients, and the values of single examples."""

ClippedSum: TypeAlias = Callable[[TracedLoss, str, list[Array], Array], Results]
"""`clipped_sum` in `methods.py`: it takes a loss, a method, a microbatch and its padding mask."""


def run(clipped_sum: ClippedSum, prepared: Prepared, configuration: Configuration) -> Results:
    """Sums the clipped gradients of a batch; in a traced program that is one marked equation."""
    traced, examples = prepared.traced, prepared.examples
    # Constants stay constants: a derivative rule may read them as numbers.
    consts = traced.consts
    closed_over = [const for const in consts if isinstance(const, jax.core.Tracer)]
    shared = traced.params, traced.frozen, closed_over
    clipping = traced.clipping
    counts = range(len(clipping.clip_norms), len(clipping.bounds))
    groups = (*traced.groups, *counts)
    mark = Mark(
        clipping.bounds,
        groups,
        (*(param.ndim for param in traced.params), *[0] * len(counts)),
        len(jax.tree.leaves(shared)),
        len(jax.tree.leaves(examples.batch)),
        examples.keys is not None,
        examples.is_padding_example is not None,
        examples.num_examples,
        len(groups) + 1 + len(clipping.clip_norms) + traced.program.aux.num_leaves,
        configuration.unit,
    )

    def function(operands: Any) -> Results:
        (params, frozen, closed_over), *batch = operands
        left = iter(closed_over)
        known = [next(left) if isinstance(x, jax.core.Tracer) else x for x in consts]
        here = traced.with_arrays(params, frozen, known)
        its_own = examples._replace(batch=batch[0], keys=batch[1], is_padding_example=batch[2])
        its = prepared._replace(traced=here, examples=its_own)
        return _spread(clipped_sum, its, configuration)

    batch = examples.batch, examples.keys, examples.is_padding_example
    return in_marked_equation("eqx_dp_clipped_sum", mark, function, (shared, *batch))


def _spread(clipped_sum: ClippedSum, prepared: Prepared, configuration: Configuration) -> Results:
    """Applies the method to a batch, one microbatch at a time, on every device to its own part."""
    traced, examples, specs = prepared.traced, prepared.examples, prepared.specs
    rules = configuration.sharding
    on_device = functools.partial(_on_device, clipped_sum, configuration)
    if rules is None or specs is None:
        return on_device(prepared, examples.leaves, examples.is_padding_example)

    # All arrays are arguments: closed-over arrays would not be spread.
    consts, num_params = list(map(jnp.asarray, traced.consts)), len(traced.params)
    mask = [] if examples.is_padding_example is None else [examples.is_padding_example]

    may_stay, clipping = parts_that_stay(traced), traced.clipping
    num_counts = len(clipping.bounds) - len(clipping.clip_norms)

    def function(shared: list[Any], batch: list[Array]) -> Results:
        # What may not stay is whole on a device from the start.
        shared = [x if i in may_stay else whole(x) for i, x in enumerate(shared)]
        params, rest = shared[:num_params], shared[num_params:]
        frozen, consts = rest[: len(traced.frozen)], rest[len(traced.frozen) :]
        here = traced.with_arrays(params, frozen, consts)
        leaves, padding = (batch[:-1], batch[-1]) if mask else (batch, None)
        return on_device(prepared._replace(traced=here), leaves, padding)

    return over_devices(
        function,
        rules,
        [*map(whole, (*traced.params, *traced.frozen)), *consts],
        [*specs.params, *specs.frozen, *[PartitionSpec()] * len(consts)],
        [*examples.leaves, *mask],
        [*specs.sums, *[PartitionSpec()] * num_counts],
        [*traced.cuts, *[None] * num_counts],
        prepared.is_wide,
    )


def parts_that_stay(traced: TracedLoss) -> set[int]:
    """The arrays of the model that a device does not need to hold whole all the time.

    They are gathered where they are used. The others, the formed leaves, are gathered once, at the
    beginning.
    """
    return set(range(len(traced.params) + len(traced.frozen))) - set(traced.uses.formed)


def _on_device(
    clipped_sum: ClippedSum,
    configuration: Configuration,
    prepared: Prepared,
    leaves: list[Array],
    mask: Array | None,
) -> Results:
    """The sums of a device's examples, and their per-example values."""
    traced, choice = prepared.traced, prepared.choice
    clipping = traced.clipping._replace(drift=prepared.drift(configuration.normalize_by != 1))
    traced = traced._replace(clipping=clipping)

    def step(leaves: list[Array], is_padding: Array) -> Results:
        return clipped_sum(traced, choice.method, leaves, is_padding)

    shared = (*traced.params, *traced.frozen)
    is_meeting = any(traced.cuts) or any(isinstance(x, Shard) for x in shared)
    agree = agreement(configuration.sharding, is_meeting)
    size = choice.microbatch_size
    return over_microbatches(step, leaves, mask, len(leaves[0]), size, agree)
