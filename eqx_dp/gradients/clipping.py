"""Ways to clip: values that `l2_clip_norm=` takes, and how each group of leaves is clipped."""

import dataclasses
import math
import numbers
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..expected import real_number
from ..losses import ClippingRule
from ..paths import below
from ..shown import shown
from ..trees import PyTree


@dataclasses.dataclass(frozen=True)
class AutoS(ClippingRule):
    """Automatic clipping: each gradient g is multiplied by 1 / (|g| + gamma), without a clip norm.

    This is AUTO-S of Bu et al., "Automatic Clipping: Differentially Private Deep Learning Made
    Easier and Stronger", 2022 (arXiv 2206.07136). A clipped gradient's norm |g| / (|g| + gamma) is
    below 1, so `l2_norm_bound` is 1 / `normalize_by`, with or without `rescale_to_unit_norm`.

    | gradient | adds |
    |---|---|
    | zero | zero |
    | much longer than gamma | its direction, of norm almost 1 |
    | much shorter than gamma | g / gamma |
    | gamma is 0 | its direction, whatever its norm (AUTO-V) |

    Args:
        gamma: the norm at which a gradient counts half, a finite number >= 0.

    Raises:
        ValueError: `gamma` is out of its range.
    """

    gamma: float = 0.01

    def __post_init__(self) -> None:
        real_number("gamma", self.gamma, lambda x: x >= 0, "at least 0")


@dataclasses.dataclass(frozen=True)
class PerLayer(ClippingRule):
    """Per-layer clipping with one budget: of n trainable leaves, each is clipped to C / sqrt(n).

    Norms of leaves add in squares, so `l2_norm_bound` is C / `normalize_by` (1 / `normalize_by`
    with `rescale_to_unit_norm`, which divides by C), whatever the model. A leaf with long gradients
    cannot take the others' share (McMahan et al., "Learning Differentially Private Recurrent
    Language Models", 2018, "per-layer clipping"). A tree of clip norms divides a budget unevenly.

    Args:
        clip_norm: C, a finite number >= 0.

    Raises:
        ValueError: `clip_norm` is out of its range.
    """

    clip_norm: float

    def __post_init__(self) -> None:
        real_number("clip_norm", self.clip_norm, lambda x: x >= 0, "at least 0")


@dataclasses.dataclass(frozen=True)
class Quantile(ClippingRule):
    """A clip norm that follows a quantile of the gradients' norms, found privately.

    This is adaptive clipping of Andrew et al., "Differentially Private Learning with Adaptive
    Clipping", 2021 (arXiv 1905.03871). The clip norm is an operand of each call:

    ```python
    quantile = dp.clipping.Quantile(0.5, clip_norm=1.0)
    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=quantile, normalize_by=expected_size)
    noise = plan.privatizer(grad_fn)
    clip_norm = jnp.float32(quantile.clip_norm)
    ...
    released = grad_fn(model, *batch, clip_norm=clip_norm, is_padding_example=mask)
    (grads, count), noise_state = noise.update(released, noise_state)
    clip_norm = quantile.next(clip_norm, count)
    ```

    Guarantee: what one example adds to `(gradients, count)`, taken as one vector, has a norm of at
        most sqrt(1 + weight^2 / 4) / `normalize_by`, which is `l2_norm_bound`, for every value of
        `clip_norm`. Gradients are rescaled to unit norm, and to `count` an example adds weight / 2
        if its norm is at most the clip norm, otherwise -weight / 2; exactly zero if it adds no
        gradient. One Gaussian release covers both, so a plan accounts for nothing more, provided
        that `clip_norm` follows from public numbers and earlier releases alone.

    | `clip_norm` of a call | treated as |
    |---|---|
    | None | the first one |
    | negative, NaN | 0: every gradient is divided by its norm |
    | inf | gradients add zero; they count |

    Args:
        quantile: the share of gradients that the clip norm should leave unclipped, in [0, 1].
        clip_norm: the first clip norm, > 0.
        learning_rate: of the clip norm's logarithm, > 0. A step changes the clip norm by at most
            exp(`learning_rate`). The default is twice that of the paper: a first clip norm that is
            100 times too large or too small is corrected within about 25 steps.
        weight: of the count, in (0, 1]. The noise on the share of a batch of B examples has the
            standard deviation noise multiplier x `l2_norm_bound` / (`weight` B).

    Raises:
        ValueError: a number is out of its range.
    """

    quantile: float = 0.5
    clip_norm: float = 1.0
    learning_rate: float = 0.4
    weight: float = 0.125

    def __post_init__(self) -> None:
        real_number("quantile", self.quantile, lambda x: 0 <= x <= 1, "in [0, 1]")
        real_number("weight", self.weight, lambda x: 0 < x <= 1, "in (0, 1]")
        for name in ("clip_norm", "learning_rate"):
            real_number(name, getattr(self, name), lambda x: x > 0, "greater than 0")

    def next(
        self, clip_norm: Float[Array, ""], noisy_count: Float[Array, ""], expected_batch: float = 1
    ) -> Float[Array, ""]:
        """The next clip norm: C exp(-`learning_rate` (share - `quantile`)). It is post-processing.

        Args:
            clip_norm: the clip norm C of the call.
            noisy_count: the released count, with its noise.
            expected_batch: the expected number of examples / `normalize_by`: 1 where the sum is
                divided by the expected batch size.

        Returns:
            A number between 1e-12 and 1e12. The share of gradients of norm at most C, estimated as
            count / (weight x `expected_batch`) + 1/2, is brought to [0, 1] first.
        """
        share = jnp.clip(noisy_count / (self.weight * expected_batch) + 0.5, 0, 1)
        change = jnp.exp(-self.learning_rate * (share - self.quantile))
        return jnp.clip(clip_norm * change, 1e-12, 1e12).astype(jnp.result_type(clip_norm))


class Clipping(NamedTuple):
    """How each group of leaves is clipped: one group for a single clip norm, several for a tree.

    Attributes:
        clip_norms: the L2 bound of each group's clipped gradient; gamma of AUTO-S. A traced one is
            an array.
        structure: the tree that the user gave, with one leaf a group.
        rescale_to_unit_norm: whether each clipped group is divided by its clip norm.
        rule: what stands for the clip norm; None for numbers.
        drift: see `Prepared.drift`. Clipped gradients are so much shorter, and the bounds hold
            with it.
    """

    clip_norms: tuple[Any, ...]
    structure: Any
    rescale_to_unit_norm: bool
    rule: ClippingRule | None = None
    drift: float = 0.0

    @property
    def l2_norm_bound(self) -> float:
        """The L2 norm that one example's clipped gradient cannot exceed, over all groups.

        Groups are orthogonal, so their bounds add in squares.
        """
        return math.hypot(*self.bounds)

    @property
    def bounds(self) -> tuple[float, ...]:
        """The bound of each group, and then that of the count of a quantile."""
        of_groups = tuple(self.unit or norm for norm in self.clip_norms)
        return (*of_groups, self.rule.weight / 2) if isinstance(self.rule, Quantile) else of_groups

    @property
    def unit(self) -> float | None:
        """The bound of each rescaled group of leaves; None if its bound is the clip norm."""
        if not self.rescale_to_unit_norm:
            return None
        return len(self.clip_norms) ** -0.5 if isinstance(self.rule, PerLayer) else 1.0

    @property
    def arrays(self) -> list[Array]:
        """The clip norms that are operands of the call."""
        return [norm for norm in self.clip_norms if eqx.is_array(norm)]

    def with_arrays(self, arrays: list[Array]) -> "Clipping":
        """This clipping with other clip norms as operands."""
        return self._replace(clip_norms=tuple(arrays) or self.clip_norms)

    def of_call(self, params: PyTree[Array], clip_norm: Any) -> tuple["Clipping", list[int]]:
        """The clipping of a call, and the group of every leaf of `params`, in their order.

        Raises:
            ValueError: as [`groups`][]; a clip norm is given and there is no quantile, or it is no
                real number.
        """
        clipping = self
        if clip_norm is not None:
            if not isinstance(self.rule, Quantile):
                raise ValueError(
                    "clip_norm was given to a call, but l2_clip_norm is no dp.clipping.Quantile: "
                    "leave it out, or make the function with one."
                )
            if jnp.ndim(clip_norm) or not _is_real(clip_norm):
                raise ValueError(f"clip_norm must be a real number, found {shown(clip_norm)}.")
            known = jnp.asarray(clip_norm, float)
            clipping = self.with_arrays([jnp.where(known > 0, known, 0)])
        elif isinstance(self.rule, PerLayer):
            structure = jax.tree.structure(params)
            norms = (self.clip_norms[0] / math.sqrt(structure.num_leaves),) * structure.num_leaves
            clipping = self._replace(clip_norms=norms, structure=structure)
        return clipping, clipping.groups(params)

    def groups(self, params: PyTree[Array]) -> list[int]:
        """Finds the group of every leaf of `params`, in the order of its leaves.

        Raises:
            ValueError: the tree of clip norms is no prefix of the tree of trainable parameters.
        """
        indices = self.structure.unflatten(range(len(self.clip_norms)))
        is_none = lambda i: i is None  # noqa: E731
        indices = jax.tree.map(lambda i: _NO_GROUP if i is None else i, indices, is_leaf=is_none)
        try:
            groups = jax.tree.broadcast(indices, params)
        except ValueError as error:
            raise ValueError(f"{_NO_PREFIX} {error}") from error
        for path, group in jax.tree_util.tree_leaves_with_path(groups):
            if group == _NO_GROUP:
                where = below("model", path)
                raise ValueError(f"{_NO_PREFIX} {where} is trained and has no clip norm.")
        return jax.tree.leaves(groups)


_NO_GROUP = -1
_NO_PREFIX = (
    "l2_clip_norm is no prefix of the trainable parameters' tree. Give one number, or a tree whose "
    "numbers each stand where a trainable leaf or a whole subtree of the model stands "
    "(jax.tree_util's prefix rule)."
)


def parse_clip_norm(l2_clip_norm: PyTree[Any], rescale_to_unit_norm: bool) -> Clipping:
    """Reads a clip norm, or a tree of them, as the user gave it.

    Leaves of the tree that are neither numbers nor arrays (such as an activation function of the
    model that the tree was made from) have no clip norm. A trainable leaf without one is refused
    once the model is known.

    Raises:
        ValueError: a clip norm is negative, NaN, or not a number; or there is none at all.
    """
    if isinstance(l2_clip_norm, ClippingRule):
        is_unit = rescale_to_unit_norm or not isinstance(l2_clip_norm, PerLayer)
        number = getattr(l2_clip_norm, "gamma" if isinstance(l2_clip_norm, AutoS) else "clip_norm")
        return Clipping((float(number),), jax.tree.structure(0), is_unit, l2_clip_norm)
    norms = jax.tree_util.tree_map_with_path(_parse_one, l2_clip_norm)
    clip_norms, structure = jax.tree.flatten(norms)
    if not clip_norms:
        raise ValueError(
            f"l2_clip_norm holds no number: found {shown(l2_clip_norm)}. Give a number of at "
            "least 0."
        )
    return Clipping(tuple(clip_norms), structure, rescale_to_unit_norm)


def _parse_one(path: tuple[Any, ...], leaf: Any) -> float | None:
    where = below("l2_clip_norm", path)
    if isinstance(leaf, jax.core.Tracer):
        raise ValueError(
            f"{where} is a traced value. The clip norm decides the sensitivity, so it has to be a "
            "known number: pass a Python float, or mark the argument as static. A clip norm that "
            "changes is dp.clipping.Quantile."
        )
    if isinstance(leaf, ClippingRule):
        raise ValueError(f"{where} is {leaf}, which stands for the whole model: give it alone.")
    if isinstance(leaf, numbers.Real) or (eqx.is_array_like(leaf) and np.ndim(leaf) == 0):
        if not _is_real(leaf):
            raise ValueError(f"{where} must be a real number, found {shown(leaf)}.")
        value = float(leaf)
        if not value >= 0:
            raise ValueError(f"{where} must be at least 0 (inf for no clipping), found {value}.")
        return value
    if eqx.is_array(leaf):
        raise ValueError(
            f"{where} is an array of shape {leaf.shape}; a clip norm is one number. Replace every "
            "trainable leaf, or a subtree above it, by a number, and the other arrays by None."
        )
    return None


def _is_real(number: Any) -> bool:
    return not isinstance(number, bool | np.bool_) and not jnp.iscomplexobj(number)
