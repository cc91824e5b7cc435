"""What every method of the engine is given for a microbatch, and what it gives back."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ...precision import stage
from ..activations import activation_bytes
from ..clip import Clipping, clip_factors, combined_norms, norm_error
from ..cost import LeafCost
from ..leaves import LeafForm, LeafGradient, from_per_example, leaf_gradient
from ..loss_scale import LossScaling
from ..program import Program
from ..taps import Address, Uses


class TracedLoss(NamedTuple):
    """What stays the same from microbatch to microbatch.

    Attributes:
        program: the loss of one example.
        uses: those of every trainable leaf.
        params: the trainable leaves, in the compute dtype.
        frozen: the other arrays of the model.
        clipping: the clip norms.
        groups: for each trainable leaf the index of its clip norm.
        accumulate_dtype: dtype of norms, factors and sums.
        loss_scale: what each example's loss is multiplied by before the backward pass.
        costs: how each leaf is treated, and what that costs for one example.
    """

    program: Program
    uses: Uses
    params: list[Array]
    frozen: list[Array]
    clipping: Clipping
    groups: list[int]
    accumulate_dtype: np.dtype[Any]
    loss_scale: LossScaling
    costs: list[LeafCost]

    @property
    def consts(self) -> list[Any]:
        """The arrays that the programs close over."""
        probe = self.loss_scale.probe
        return [*self.program.jaxpr.consts, *(probe.program.jaxpr.consts if probe else ())]

    def with_arrays(
        self, params: list[Array], frozen: list[Array], consts: list[Any]
    ) -> "TracedLoss":
        """The same loss with other arrays: those that live on one device."""
        own = len(self.program.jaxpr.consts)
        scaling, program = self.loss_scale, self.program.with_consts(consts[:own])
        if scaling.probe is not None:
            probe = scaling.probe
            probe = probe._replace(program=probe.program.with_consts(consts[own:]))
            scaling = scaling._replace(probe=probe)
        return self._replace(params=params, frozen=frozen, program=program, loss_scale=scaling)

    @property
    def activations(self) -> int:
        """Bytes that one example's forward pass leaves for its backward pass, roughly."""
        return activation_bytes(self.program, len(self.params) + len(self.frozen))

    def accumulated(self, leaf: int) -> jax.ShapeDtypeStruct:
        """Shape of a trainable leaf, with the accumulate dtype."""
        return jax.ShapeDtypeStruct(self.params[leaf].shape, self.accumulate_dtype)


class ClippedSum(NamedTuple):
    """What a method makes of a microbatch.

    Attributes:
        grads: for each trainable leaf the sum of clipped gradients, in the accumulate dtype.
        loss: one loss an example.
        grad_norms: for each clip norm one norm an example, before clipping.
        aux: the leaves of aux, examples in front.
    """

    grads: list[Float[Array, "..."]]
    loss: Float[Array, " batch"]
    grad_norms: list[Float[Array, " batch"]]
    aux: list[Array]


Method: TypeAlias = Callable[[TracedLoss, list[Array], Bool[Array, " batch"]], ClippedSum]
"""`method(traced, examples, is_padding_example)`; the leaves of examples have examples in front."""


def held_gradient(
    traced: TracedLoss,
    leaf: int,
    residuals: dict[Address, Any],
    cotangents: dict[Address, Any],
    grads: dict[int, Array],
    num_examples: int,
) -> LeafGradient:
    """The gradient of one leaf, in the form that its way gives, from what is held for a batch.

    Args:
        traced: the loss.
        leaf: which leaf.
        residuals: of each use, examples in front.
        cotangents: of each use's result, likewise.
        grads: each example's gradient of the leaves that are `whole`.
        num_examples: the batch.
    """
    way, shape, dtype = traced.costs[leaf].way, traced.params[leaf].shape, traced.accumulate_dtype
    if way == "whole":
        return from_per_example(grads[leaf].astype(dtype))
    if way == "unused":
        return from_per_example(jnp.zeros((num_examples, *shape), dtype))
    uses = traced.uses.of[leaf]
    form = LeafForm(shape, tuple(uses.values()), way, dtype)
    return leaf_gradient(form, [(residuals[at], cotangents[at]) for at in uses])


class Clip(NamedTuple):
    """What becomes of each example's gradient.

    Attributes:
        norms: for each clip norm one norm an example, before clipping.
        factors: for each clip norm what each example's gradient is multiplied by, as it came out of
            the backward pass: the loss scale is undone with it.
        contributes: the examples that add anything at all.
    """

    norms: list[Float[Array, " batch"]]
    factors: list[Float[Array, " batch"]]
    contributes: Bool[Array, " batch"]


def clip(
    traced: TracedLoss,
    norms: list[Float[Array, " batch"]],
    bounds: list[Float[Array, " batch"]],
    loss: Float[Array, " batch"],
    scales: Float[Array, " batch"] | None,
    is_padding_example: Bool[Array, " batch"],
) -> Clip:
    """From the norms of every leaf, and bounds on what is added of it, to clip factors.

    Norms and bounds are those of gradients of the scaled loss. Scales are powers of two, so to
    undo them is exact; what becomes too small for that is rounded away from harm, bounds up to the
    smallest normal number and factors down to zero.
    """
    clipping, dtype = traced.clipping, traced.accumulate_dtype
    tiny = jnp.finfo(dtype).tiny

    def by_group(values: list[Array]) -> list[Float[Array, " batch"]]:
        return [
            combined_norms(
                [value for value, its in zip(values, traced.groups, strict=True) if its == group],
                loss.shape,
                dtype,
            )
            for group in range(len(clipping.clip_norms))
        ]

    of_groups = by_group(norms)
    error = norm_error(len(norms), dtype)
    of_sums = [bound * (1 + error) for bound in by_group(bounds)]
    if scales is not None:
        of_groups = [norm / scales for norm in of_groups]
        of_sums = [jnp.where(b > 0, jnp.maximum(b / scales, tiny), b) for b in of_sums]
    factors = [
        clip_factors(bound, clip_norm, clipping.rescale_to_unit_norm)
        for bound, clip_norm in zip(of_sums, clipping.clip_norms, strict=True)
    ]
    contributes = jnp.isfinite(loss) & ~is_padding_example
    # Where terms that overflow cancel, the norm may be finite, and what is added still not known.
    for size in (*of_groups, *of_sums):
        contributes &= jnp.isfinite(size)
    if scales is not None:
        unscaled = [factor / scales for factor in factors]
        factors = [jnp.where(factor >= tiny, factor, 0) for factor in unscaled]
    return Clip(of_groups, factors, contributes)


def clip_and_sum(
    traced: TracedLoss,
    leaves: list[LeafGradient],
    loss: Float[Array, " batch"],
    aux: list[Array],
    scales: Float[Array, " batch"] | None,
    is_padding_example: Bool[Array, " batch"],
) -> ClippedSum:
    """Clips every example's gradient, group by group, and sums.

    Guarantee: an example adds a gradient whose norm, group by group, measured exactly, is at most
    the clip norm (`clip_factors` has the proof, from the bounds that `leaves` gives), and
    exactly zero if it is padding or if its loss or the norm of its gradient in any group is not
    finite. (In float32 for clip norms from 1e-30, and from about 1e-21 where a leaf's way is
    `inner_products`: nearer to the end of the range products lose digits to underflow, which no
    relative bound makes up for; `gram.md` says how many.)
    """
    norms, bounds = [leaf.norm for leaf in leaves], [leaf.bound for leaf in leaves]
    with stage("norm"):
        clipped = clip(traced, norms, bounds, loss, scales, is_padding_example)
    with stage("sum"):
        sums = [
            leaf.sum(clipped.factors[group], clipped.contributes)
            for leaf, group in zip(leaves, traced.groups, strict=True)
        ]
    return ClippedSum(sums, loss, clipped.norms, aux)
