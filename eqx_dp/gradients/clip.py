"""The traced loss, and the way from norms to clip factors and sums."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ..isolation import run_apart
from ..precision import stage
from ..sharding import Cut, Shard
from ..shown import shapes
from ..trees import PyTree
from .blocks import in_blocks
from .clipping import AutoS, Clipping, Quantile
from .leaves import LeafGradient, Measure, norm_and_bound
from .norms import product_roundoff, unit_roundoff
from .program import Program
from .uses import Uses


class TracedLoss(NamedTuple):
    """What stays the same from microbatch to microbatch.

    Attributes:
        program: the loss of one example.
        uses: the uses of every trainable leaf, and which leaves are formed.
        params: the trainable leaves, in the compute dtype.
        frozen: the other arrays of the model.
        clipping: the clip norms.
        groups: for each trainable leaf the index of its clip norm.
        accumulate_dtype: dtype of norms, factors and sums.
        loss_scale: the power of two that each example's loss is multiplied by.
        cuts: for each trainable leaf, how its sum is scattered over devices as soon as it is known;
            None where it is not.
    """

    program: Program
    uses: Uses
    params: list[Array | Shard]
    frozen: list[Array | Shard]
    clipping: Clipping
    groups: list[int]
    accumulate_dtype: np.dtype[Any]
    loss_scale: float
    cuts: list[Cut | None]

    @property
    def consts(self) -> list[Any]:
        """The arrays that the program closes over, and clip norms that are operands."""
        return [*self.program.jaxpr.consts, *self.clipping.arrays]

    def with_arrays(
        self, params: list[Array | Shard], frozen: list[Array | Shard], consts: list[Any]
    ) -> "TracedLoss":
        """The same loss with other arrays, such as those on one device."""
        count = len(self.program.jaxpr.consts)
        jaxpr = jex_core.ClosedJaxpr(self.program.jaxpr.jaxpr, consts[:count])
        program, clipping = self.program._replace(jaxpr=jaxpr), self.clipping
        clipping = clipping.with_arrays(consts[count:])
        return self._replace(params=params, frozen=frozen, program=program, clipping=clipping)

    def mapped(self, one: Callable[..., Any], *batch: Any, out_axes: Any = 0) -> Any:
        """Maps a function of one example over a batch, in which examples never meet."""
        jaxpr = self.program.jaxpr.jaxpr
        return run_apart(one, jaxpr, *batch, out_axes=out_axes)

    def scales(self, num_examples: int) -> Float[Array, " batch"] | None:
        """The factor of each example's loss; None if there is none."""
        if self.loss_scale == 1:
            return None
        return jnp.full(num_examples, self.loss_scale, self.accumulate_dtype)

    def scattered(self, sums: list[Array]) -> list[Array]:
        """The sums of all leaves; a device keeps its part of each.

        Guarantee: they are added over devices in their own dtype, the accumulate dtype.

        Args:
            sums: of each leaf over this device's examples; those that have the shape of a part
                already are left as they are, and so is a count behind them.
        """
        found: list[Array] = []
        for total, param, cut in zip(sums, self.params, self.cuts, strict=False):
            is_whole = cut is not None and total.shape != cut.local(param.shape)
            found.append(cut.scattered(total) if cut is not None and is_whole else total)
        return [*found, *sums[len(found) :]]


class PerExample(NamedTuple):
    """Values of each example before clipping. They are **not private**.

    Logging them, storing them, or deciding anything by them is another release, which no plan
    accounts for. In padding slots all values are zero.

    Attributes:
        loss: the loss, in the policy's output dtype.
        grad_norm: the L2 norm of the gradient, in the accumulate dtype; NaN or inf if the gradient
            is not finite (or, on accelerators, beyond 2^63). With a tree of clip norms, a tree of
            that structure with one norm for each group.
        aux: the aux that the loss returned, examples along the leading axis; None without
            `has_aux`.
    """

    loss: Float[Array, " batch"]
    grad_norm: PyTree[Float[Array, " batch"]]
    aux: PyTree[Any]

    def __repr__(self) -> str:  # no values: printed text may be kept
        loss, norm, aux = map(shapes, self)
        return f"PerExample(loss={loss}, grad_norm={norm}, aux={aux})"


class Clip(NamedTuple):
    """The norms and clip factors of each example's gradient.

    Attributes:
        norms: for each clip norm one norm per example, before clipping.
        factors: for each clip norm what each example's gradient is multiplied by, as it came out of
            the backward pass: the loss scale is undone with it. Zero where an example adds nothing.
        counts: what each example adds to the count of a quantile, if there is one.
    """

    norms: list[Float[Array, " batch"]]
    factors: list[Float[Array, " batch"]]
    counts: list[Float[Array, " batch"]]


def clip_factors(
    bounds: Float[Array, " batch"],
    clip_norm: float | Float[Array, ""],
    unit: float | None,
    contributes: Bool[Array, " batch"],
    drift: float,
    is_smooth: bool,
) -> Float[Array, " batch"]:
    """The factor that brings each gradient to a norm of at most `clip_norm` / (1 + `drift`).

    It is zero for an example that does not contribute.

    This is min(1, C / norm) of Abadi et al., "Deep Learning with Differential Privacy", 2016;
    rescaled, it is divided by C (De et al., "Unlocking High-Accuracy Differentially Private Image
    Classification through Scale", 2022) and multiplied by `unit`; smooth, it is 1 / (norm + C)
    (Bu et al., "Automatic Clipping", 2022).

    Guarantee: with `bound` an upper bound on the true norm of what is multiplied, factor x gradient
        has, rounded entry by entry and divided by `normalize_by`, a norm of at most C (rescaled or
        smooth: at most `unit`, for any C >= 0, known or traced).
    Proof: with p u the error of a product (`product_roundoff`), the quotient is off by 4 u, the
    product by p u, the division by `normalize_by` by 4 u: 8 + p in all. Room of at least 8 + p is
    added to the bound (of which its own rounding takes 1), and as much is taken off C. Products of
    errors take less than one more, and the sum of bound and C is off by u. With `drift`,
    C / (1 + drift) stands for C everywhere, and `unit` likewise. Factors
    are zero or normal numbers, whose relative error is as said whether or not a machine keeps
    smaller numbers.

    No comparison of bounds chooses between numerators or denominators: a compiler may compute a
    bound twice, rounded in two ways, and two comparisons may then disagree. Here they would only
    move the factor by what rounding moves the bound.

    | clip norm C | bound | factor | rescaled | smooth |
    |---|---|---|---|---|
    | 0 | any | 0 | 1 / bound, the limit of C to 0; 0 where the bound is 0 | the same |
    | inf | finite | 1 | 0 | 0 |
    | any | <= C, but for the room | 1 | 1 / C | 1 / (bound + C) |
    | any | larger | C / bound | 1 / bound | 1 / (bound + C) |
    | any | the factor is below twice the smallest normal number | exactly 0 | the same | the same |
    | any | NaN or inf: it must not contribute | as if finite | the same | the same |

    Args:
        bounds: of each example.
        clip_norm: C >= 0; gamma if smooth. It may be an array where the factor is rescaled.
        unit: the bound of what a rescaled or smooth factor makes; None for C.
        contributes: whether an example does.
        drift: see `Prepared.drift`.
        is_smooth: whether this is AUTO-S.
    """
    dtype, roundoff = bounds.dtype, unit_roundoff(bounds.dtype)
    tiny = float(jnp.finfo(dtype).tiny)
    # An even number, so that 1 + room is a number of the dtype.
    room = 2 * math.ceil((9 + product_roundoff(bounds.dtype) / roundoff) / 2) * roundoff
    margin = _round_down((1 - room) / (1 + drift), bounds.dtype)
    bounds = bounds * (1 + room)
    if unit is not None:
        is_array = isinstance(clip_norm, Array)
        clip = clip_norm.astype(dtype) if is_array else _round_down(clip_norm, dtype)
        denominator = bounds + clip if is_smooth else jnp.maximum(bounds, clip)
        numerator = jnp.where(denominator > 0, _round_down(margin * unit, bounds.dtype), 0)
    elif clip_norm == math.inf:
        numerator = denominator = jnp.ones_like(bounds)
    else:
        less = _round_down(float(clip_norm) * margin, bounds.dtype)
        numerator, denominator = jnp.full_like(bounds, less), jnp.maximum(bounds, less)
    # The inverse of a smaller number may overflow.
    denominator = jnp.maximum(denominator, tiny)
    numerator = jnp.where(numerator < denominator * (2 * tiny), 0, numerator)
    # The division comes last: the compiler repeats anything else in the sum of every leaf.
    nothing, infinite = jnp.zeros_like(bounds), jnp.full_like(bounds, jnp.inf)
    numerator = jnp.where(contributes, numerator, nothing)
    return numerator / jnp.where(contributes, denominator, infinite)


def _round_down(value: float, dtype: np.dtype[Any]) -> float:
    """Rounds a clip norm down to the dtype, so that it never grows."""
    with np.errstate(over="ignore"):
        rounded = np.asarray(value, dtype)
    return float(np.nextafter(rounded, np.zeros((), dtype)) if float(rounded) > value else rounded)


def clip(
    traced: TracedLoss,
    measures: list[Measure],
    loss: Float[Array, " batch"],
    scales: Float[Array, " batch"] | None,
    is_padding_example: Bool[Array, " batch"],
) -> Clip:
    """From the norms of every group of leaves, and bounds on what is added of it, to clip factors.

    Norms and bounds are those of gradients of the scaled loss. Scales are powers of two, so to
    undo them is exact; values that underflow are rounded in the safe direction, bounds up to the
    smallest normal number and factors down to zero. A factor that would be infinite is zero,
    too: only a gradient below the normal range has one, on machines that keep such numbers.
    """
    clipping, dtype = traced.clipping, traced.accumulate_dtype
    tiny = jnp.finfo(dtype).tiny
    of_groups, of_sums = ([of[i] for of in measures] for i in range(2))
    if scales is not None:
        of_groups = [norm / scales for norm in of_groups]
        of_sums = [jnp.where(b > 0, jnp.maximum(b / scales, tiny), b) for b in of_sums]
    contributes = jnp.isfinite(loss) & ~is_padding_example
    # If terms that overflow cancel, the norm may be finite although the sum is unknown.
    for size in (*of_groups, *of_sums):
        contributes &= jnp.isfinite(size)
    unit, is_smooth = clipping.unit, isinstance(clipping.rule, AutoS)
    factors = [
        clip_factors(bound, clip_norm, unit, contributes, clipping.drift, is_smooth)
        for bound, clip_norm in zip(of_sums, clipping.clip_norms, strict=True)
    ]
    if scales is not None:
        unscaled = [factor / scales for factor in factors]
        factors = [jnp.where((x >= tiny) & jnp.isfinite(x), x, 0) for x in unscaled]
    return Clip(of_groups, factors, _counts(clipping, of_groups, contributes))


def _counts(
    clipping: Clipping, norms: list[Float[Array, " batch"]], contributes: Bool[Array, " batch"]
) -> list[Float[Array, " batch"]]:
    """What each example adds to the count of a quantile; an empty list if there is none.

    Guarantee: its magnitude is at most weight / 2 / (1 + drift), whatever norms and clip norm are,
        and zero for an example that does not contribute.
    """
    if not isinstance(clipping.rule, Quantile):
        return []
    (norm,), (clip_norm,) = norms, clipping.clip_norms
    half = _round_down(clipping.rule.weight / 2 / (1 + clipping.drift), norm.dtype)
    counts = jnp.where(norm <= clip_norm, half, -half).astype(norm.dtype)
    return [jnp.where(contributes, counts, 0)]


def clip_and_sum(
    traced: TracedLoss,
    leaves: list[LeafGradient],
    loss: Float[Array, " batch"],
    scales: Float[Array, " batch"] | None,
    is_padding_example: Bool[Array, " batch"],
) -> tuple[list[Float[Array, "..."]], Clip]:
    """Clips every example's gradient, group by group, and sums; behind the sums is any count.

    Guarantee: an example adds a gradient whose norm, group by group, measured exactly, is at most
    the clip norm / (1 + drift) (`clip_factors` has the proof, from the bounds that `leaves` gives).
    It adds exactly zero if it is padding, or if its loss or the norm of its gradient in any group
    is not finite. (Nearer to the ends of the range, where products lose digits to underflow, which
    no relative bound makes up for, `check_sum_range` refuses the call.)
    """
    batch, dtype = len(loss), traced.accumulate_dtype
    groups, count = traced.groups, len(traced.clipping.clip_norms)
    members = [[x for x, its in zip(leaves, groups, strict=True) if its == i] for i in range(count)]
    with stage("norm"):
        measures = [norm_and_bound(group, batch, dtype) for group in members]
        clipped = clip(traced, measures, loss, scales, is_padding_example)
    factors = [clipped.factors[group] for group in groups]
    with stage("sum"):
        totals = [leaf.sum(of, of > 0) for leaf, of in zip(leaves, factors, strict=True)]
        totals += [in_blocks(jnp.sum, each, dtype) for each in clipped.counts]
    return totals, clipped
