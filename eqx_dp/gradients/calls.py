"""A call that is checked and traced, run on one device or, by sharding rules, on a mesh."""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, PyTree

from ..precision import Policy
from ..sharding import ShardingRules, agreed, check_context, over_devices
from ..shown import shown
from .choice import Choice
from .clip import Clipping
from .examples import Examples
from .methods import METHODS, Task
from .microbatches import over_microbatches


class PerExample(NamedTuple):
    """Values of each example before clipping. They are **not private**.

    To log, store or decide anything by them is another release, which no plan accounts for. In
    padding slots all values are zero.

    Attributes:
        loss: the loss, in the policy's output dtype.
        grad_norm: the L2 norm of the gradient, in the accumulate dtype; NaN or inf if the gradient
            is not finite. With a tree of clip norms, a tree of that structure with one norm for
            each group.
        aux: the aux that the loss returned, examples along the leading axis; None without
            `has_aux`.
    """

    loss: Float[Array, " batch"]
    grad_norm: PyTree[Float[Array, " batch"]]
    aux: PyTree[Any]


class Configuration(NamedTuple):
    """Everything that `filter_clipped_grad` was told beside the loss."""

    clipping: Clipping
    policy: Policy | None
    has_aux: bool
    keep_batch_dim: bool
    sharding: ShardingRules | None
    normalize_by: float
    microbatch_size: int | None
    method: str


def checked_method(method: object) -> str:
    """The name of a method, or "auto".

    Raises:
        ValueError: it is none.
    """
    if not isinstance(method, str) or method not in ("auto", *METHODS):
        allowed = ", ".join(map(repr, ("auto", *METHODS)))
        raise ValueError(f"method must be one of {allowed}, found {shown(method)}.")
    return method


def checked_microbatch_size(size: object) -> int | None:
    """How many examples at once, or None.

    Raises:
        ValueError: it is neither.
    """
    if size is None:
        return None
    if not isinstance(size, int | np.integer) or isinstance(size, bool) or size < 1:
        raise ValueError(
            f"microbatch_size must be an integer >= 1, or None for the whole batch at once; found "
            f"{shown(size)}."
        )
    return int(size)


class Places(NamedTuple):
    """Where a call's arrays live.

    Attributes:
        params: of each trainable leaf.
        frozen: of each other array of the model.
        sums: of the gradient of each trainable leaf.
        traced: of all arrays that the loss of one example takes.
    """

    params: list[PartitionSpec]
    frozen: list[PartitionSpec]
    sums: list[PartitionSpec]
    traced: list[PartitionSpec]


class Prepared(NamedTuple):
    """A call, checked and traced.

    Attributes:
        task: what the engine works on.
        examples: the batch.
        choice: the method, and how many examples at once on a device.
        structure: of the trainable leaves.
        places: with sharding rules, where arrays live.
        num_shards: how many parts the batch is divided into.
    """

    task: Task
    examples: Examples
    choice: Choice
    structure: Any
    places: Places | None
    num_shards: int

    def with_key(self, key: Any) -> "Prepared":
        """The same call with another key of the same kind, split into one key an example."""
        keys = jax.random.split(key, self.examples.num_examples)
        return self._replace(examples=self.examples._replace(keys=keys))


def places_of(
    rules: ShardingRules,
    model: PyTree[Any],
    params: PyTree[Array],
    frozen: PyTree[Any],
    examples: Examples,
) -> Places:
    """Where the rules put a call's arrays.

    Raises:
        ValueError: the rules do not fit the mesh in context, the model, or the batch.
    """
    check_context(rules)
    rules.check_examples(examples.num_examples)
    specs = rules.specs(model)

    def of(part: PyTree[Any]) -> list[PartitionSpec]:
        def spec(leaf: Any, found: PartitionSpec | None) -> PartitionSpec | None:
            return None if leaf is None else found or PartitionSpec()

        return jax.tree.leaves(jax.tree.map(spec, part, specs, is_leaf=lambda x: x is None))

    of_params, of_frozen = of(params), of(frozen)
    shapes = [leaf.shape for leaf in jax.tree.leaves(params)]
    sums = list(map(rules.accumulator_spec, of_params, shapes))
    return Places(of_params, of_frozen, sums, [*of_params, *of_frozen, *examples.specs()])


def run(prepared: Prepared, configuration: Configuration) -> tuple[PerExample, list[Array]]:
    """Sends a batch through the method, a microbatch at a time, on every device its own part."""
    task, examples, choice, _, places, _ = prepared
    rules = configuration.sharding
    if rules is None or places is None:
        sums, per_example = _on_device(
            task, configuration, choice, examples.leaves, examples.is_padding_example
        )
        return per_example, sums

    # All arrays go in as arguments: what is closed over would not be spread.
    consts, num_params = task.consts, len(task.params)
    mask = [] if examples.is_padding_example is None else [examples.is_padding_example]

    def function(shared: list[Array], batch: list[Array]) -> tuple[list[Array], PerExample]:
        params, rest = shared[:num_params], shared[num_params:]
        frozen, consts = rest[: len(task.frozen)], rest[len(task.frozen) :]
        here = task.with_arrays(params, frozen, consts)
        leaves, padding = (batch[:-1], batch[-1]) if mask else (batch, None)
        return _on_device(here, configuration, choice, leaves, padding)

    sums, per_example = over_devices(
        function,
        rules,
        [*task.params, *task.frozen, *consts],
        [*places.params, *places.frozen, *[PartitionSpec()] * len(consts)],
        [*examples.leaves, *mask],
        places.sums,
    )
    return per_example, sums


def _on_device(
    task: Task,
    configuration: Configuration,
    choice: Choice,
    leaves: list[Array],
    is_padding_example: Bool[Array, " batch"] | None,
) -> tuple[list[Array], PerExample]:
    """The sums of a device's examples, and their per-example values."""
    method = METHODS[choice.method]

    def step(leaves: list[Array], is_padding: Array) -> tuple[list[Array], PerExample]:
        result = method(task, leaves, is_padding)
        grad_norm = configuration.clipping.structure.unflatten(result.grad_norms)
        aux = task.program.aux.unflatten(result.aux)
        return result.grads, PerExample(result.loss, grad_norm, aux)

    rules, of_device = configuration.sharding, (len(leaves[0]), choice.microbatch_size)
    if rules is None:
        return over_microbatches(step, leaves, is_padding_example, *of_device)
    agree = functools.partial(agreed, rules)
    return over_microbatches(step, leaves, is_padding_example, *of_device, agree)
