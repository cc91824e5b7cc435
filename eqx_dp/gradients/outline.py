"""What a call of a clipped gradient consists of, for those who work out what it will cost."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jaxtyping import PyTree

from ..sharding import ShardingRules, inside
from .calls import (
    Configuration,
    PerExample,
    Prepared,
    checked_method,
    checked_microbatch_size,
)
from .clipped_grad import ClippedGrad
from .explain import costs_of, is_array_or_shape, on_shapes, paths_of
from .program import Program
from .uses import contraction, lookup


class LeafOutline(NamedTuple):
    """One trainable leaf; figures are for one example.

    Attributes:
        path: where it stands in the model.
        size: how many entries it has.
        norm_flops: floating-point operations for the norm of its gradient.
        sum_flops: the same for the weighted sum, with what forms the gradients that it adds up.
        is_formed: whether each example's gradient is formed, and then added up; else the sum over
            examples is part of the contraction that the ordinary backward pass does too.
        steps: how many vectors of data it meets at most, the tokens of a sequence, say; 0 where it
            is not used in contractions and lookups alone.
    """

    path: str
    size: int
    norm_flops: float
    sum_flops: float
    is_formed: bool
    steps: int


class Outline(NamedTuple):
    """A call, traced and not computed.

    Attributes:
        loss: the loss of one example: from the trainable leaves, the other arrays and one example.
        gradient: its value and its gradient with respect to the trainable leaves.
        params: shapes of the trainable leaves, in the compute dtype.
        frozen: shapes of the model's other arrays.
        examples: shapes of the batch, examples in front.
        leaves: what each trainable leaf costs.
        sums: shapes of the gradients, in the accumulate dtype.
        method: the method that was chosen.
        microbatch_size: how many examples at once on a device; None for all.
        held: bytes that the method holds for one example, by estimate.
        num_examples: the batch.
        num_shards: how many parts the batch is divided into, by sharding rules.
    """

    loss: jex_core.ClosedJaxpr
    gradient: jex_core.ClosedJaxpr
    params: list[jax.ShapeDtypeStruct]
    frozen: list[jax.ShapeDtypeStruct]
    examples: list[jax.ShapeDtypeStruct]
    leaves: tuple[LeafOutline, ...]
    sums: list[jax.ShapeDtypeStruct]
    method: str
    microbatch_size: int | None
    held: int
    num_examples: int
    num_shards: int

    @property
    def of_device(self) -> int:
        """How many examples of the batch a device has."""
        return self.num_examples // self.num_shards

    @property
    def at_once(self) -> int:
        """How many of them it processes at once."""
        return min(self.microbatch_size or self.of_device, self.of_device)


def outline(
    grad_fn: ClippedGrad[Any],
    model: PyTree[Any],
    batch: tuple[PyTree[Any], ...],
    key: Any = None,
    is_padding_example: Any = None,
) -> Outline:
    """Traces a call, on shapes alone.

    Args:
        grad_fn: what `filter_clipped_grad` returned.
        model: the model. Here and in the batch, `jax.ShapeDtypeStruct` may stand for arrays.
        batch: the positional arguments behind it.
        key: as for `grad_fn`.
        is_padding_example: as for `grad_fn`; it changes nothing.

    Raises:
        ValueError: `grad_fn` is something else; and as `grad_fn`.
    """
    return on_shapes(
        lambda prepared: _outlined(prepared, grad_fn.sharding),
        grad_fn,
        model,
        batch,
        key,
        is_padding_example,
    )


def variant(
    grad_fn: ClippedGrad[Any],
    *,
    method: str | None = None,
    microbatch_size: int | None = None,
) -> ClippedGrad[PyTree[Any]]:
    """The same clipped gradient by another method or microbatch; it returns gradients alone.

    Args:
        grad_fn: what `filter_clipped_grad` returned.
        method: None for its own.
        microbatch_size: likewise.

    Raises:
        ValueError: as `filter_clipped_grad`.
    """
    parts: Any = vars(grad_fn)
    configuration: Configuration = parts["_configuration"]
    changed = configuration._replace(
        method=configuration.method if method is None else checked_method(method),
        microbatch_size=(
            configuration.microbatch_size
            if microbatch_size is None
            else checked_microbatch_size(microbatch_size)
        ),
    )
    return ClippedGrad(
        parts["_fun"], parts["_filter_spec"], changed, _gradients_alone, parts["_mask"]
    )


def _gradients_alone(per_example: PerExample, gradients: PyTree[Any]) -> PyTree[Any]:
    del per_example
    return gradients


def trainable(grad_fn: ClippedGrad[Any], model: PyTree[Any]) -> PyTree[Any]:
    """Shapes of a model's trainable leaves, None elsewhere.

    Args:
        grad_fn: what `filter_clipped_grad` returned.
        model: with `jax.ShapeDtypeStruct` for arrays, if wanted.
    """
    arrays, static = eqx.partition(model, is_array_or_shape)
    return jax.eval_shape(lambda arrays: grad_fn.trainable(eqx.combine(arrays, static)), arrays)


def _outlined(prepared: Prepared, rules: ShardingRules | None) -> Outline:
    task, choice = prepared.task, prepared.choice
    leaves = tuple(
        LeafOutline(
            path,
            param.size,
            cost.norm_flops,
            cost.sum_flops,
            cost.way in ("kept", "whole"),
            _steps(prepared, leaf),
        )
        for leaf, (path, param, cost) in enumerate(
            zip(paths_of(prepared), task.params, costs_of(prepared), strict=True)
        )
    )
    return Outline(
        task.program.jaxpr,
        _gradient(task.program, len(task.params), rules),
        _shapes(task.params),
        _shapes(task.frozen),
        _shapes(prepared.examples.leaves),
        leaves,
        _shapes([task.accumulated(leaf) for leaf in range(len(task.params))]),
        choice.method,
        choice.microbatch_size,
        choice.held,
        prepared.examples.num_examples,
        prepared.num_shards,
    )


def _gradient(
    program: Program, num_params: int, rules: ShardingRules | None
) -> jex_core.ClosedJaxpr:
    def value_and_grad(*flat: Any) -> Any:
        rest = list(flat[num_params:])
        loss, pullback, _ = jax.vjp(
            lambda params: program(params, [], rest), list(flat[:num_params]), has_aux=True
        )
        return loss, pullback(jnp.ones_like(loss))

    inputs = _shapes(program.jaxpr.in_avals)
    if rules is None:
        return jax.make_jaxpr(value_and_grad)(*inputs)
    with inside(rules):
        return jax.make_jaxpr(value_and_grad)(*inputs)


def _shapes(arrays: list[Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]


def _steps(prepared: Prepared, leaf: int) -> int:
    uses = prepared.task.uses.of[leaf].values()
    if any(use.kind is not contraction and use.kind is not lookup for use in uses):
        return 0
    return max((use.steps for use in uses), default=0)
