"""What every method of the engine is given for a microbatch, and what it gives back."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ...precision import stage
from ...sharding import Cut, Shard, whole
from ..activations import activation_bytes
from ..clip import Clipping, clip_factors
from ..computed_again import again_or_held
from ..cost import LeafCost
from ..joined import joined
from ..layouts import layout_of
from ..leaves import LeafGradient, norm_and_bound
from ..loss_scale import LossScaling
from ..mapped import Map, map_of
from ..penalties import Penalties, of_penalties
from ..program import Program
from ..split import Shared, Split
from ..taps import Uses
from ..targets import Target


class Outside(NamedTuple):
    """What is evaluated once for all examples.

    Attributes:
        shared: what the program of one example takes.
        derivatives: of the targets that are a value's entry by entry, of each entry; a function,
            since to compute some where they are needed takes less than to hold them.
        penalties: of the targets that have some, their gradients, likewise.
        maps: of the targets that are mapped, from the value's gradient.
    """

    shared: Shared
    derivatives: dict[int, Callable[[], Array]]
    penalties: dict[int, Callable[[], Penalties]]
    maps: dict[int, Map]


class TracedLoss(NamedTuple):
    """What stays the same from microbatch to microbatch.

    Attributes:
        split: the loss of one example, and what depends on parameters alone in it.
        uses: those of every root: of trainable leaves, then of values derived from them.
        params: the trainable leaves, in the compute dtype.
        frozen: the other arrays of the model.
        clipping: the clip norms.
        groups: for each trainable leaf the index of its clip norm.
        accumulate_dtype: dtype of norms, factors and sums.
        loss_scale: what each example's loss is multiplied by before the backward pass.
        costs: how each leaf is treated, and what that costs for one example.
        targets: what is measured and summed as one.
        outside: what is evaluated once for all examples; None until it is.
        cuts: for each trainable leaf, how its sum is scattered over devices as soon as it is known;
            None where it is not. Empty without sharding rules.
    """

    split: Split
    uses: Uses
    params: list[Array | Shard]
    frozen: list[Array | Shard]
    clipping: Clipping
    groups: list[int]
    accumulate_dtype: np.dtype[Any]
    loss_scale: LossScaling
    costs: list[LeafCost]
    targets: list[Target]
    outside: Outside | None = None
    cuts: tuple[Cut | None, ...] = ()

    @property
    def program(self) -> Program:
        """The loss of one example."""
        return self.split.whole

    @property
    def shared(self) -> Shared:
        """What the program of one example takes, and all examples share."""
        assert self.outside is not None
        return self.outside.shared

    def evaluated(self) -> "TracedLoss":
        """The same, with what depends on parameters alone."""
        with stage("loss"):
            shared, targets = self.split.shared(self.params, self.frozen), self.targets
            derivatives = {
                index: self._derivative(target, shared)
                for index, target in enumerate(targets)
                if target.relation == "entrywise"
            }
            roots = {root for target in targets for root in target.penalties}
            gradients = {root: self._gradients(root, shared) for root in sorted(roots)}
            penalties = {
                index: functools.partial(_penalties, target, gradients)
                for index, target in enumerate(targets)
                if target.penalties
            }
            maps = {
                index: self._map(target, shared)
                for index, target in enumerate(targets)
                if target.relation == "mapped"
            }
        return self._replace(outside=Outside(shared, derivatives, penalties, maps))

    def _map(self, target: Target, shared: Shared) -> Map:
        """From the gradient with respect to a value to that of a parameter."""
        (leaf,), (root,), dtype = target.leaves, target.roots, self.accumulate_dtype
        return map_of(self.split, leaf, root, shared, whole(self.params[leaf]), dtype)

    def _derivative(self, target: Target, shared: Shared) -> Callable[[], Array]:
        """The derivative of each entry of a derived value in the entry that it comes from.

        In reverse mode where these are all entries in their order, as `jax.grad` has it: where an
        infinite slope is selected away, forward mode multiplies it by zero.
        """
        function = self.split.of_leaves(target.leaves, target.roots, shared)
        values = [whole(self.params[leaf]) for leaf in target.leaves]
        entries = self.split.derived[target.roots[0] - len(self.params)].entries
        is_in_order = entries is not None and entries.layout == layout_of(values[0].shape)

        def found() -> list[Array]:
            if is_in_order:
                value, pullback = jax.vjp(function, values)
                ((found,),) = pullback([jnp.ones_like(x) for x in value])
            else:
                _, (found,) = jax.jvp(function, (values,), ([jnp.ones_like(x) for x in values],))
            return [found.astype(self.accumulate_dtype)]

        (derivative,) = again_or_held(found, self.accumulate_dtype)
        return derivative

    def _gradients(self, root: int, shared: Shared) -> dict[int, Callable[[], Array]]:
        """The gradient of a penalty with respect to all parameters that it depends on."""
        leaves = sorted(self.split.derived[root - len(self.params)].leaves)
        function = self.split.of_leaves(leaves, [root], shared)
        at = [whole(self.params[leaf]) for leaf in leaves]

        def found() -> list[Array]:
            values, pullback = jax.vjp(function, at)
            (found,) = pullback([jnp.ones_like(value) for value in values])
            return [gradient.astype(self.accumulate_dtype) for gradient in found]

        return dict(zip(leaves, again_or_held(found, self.accumulate_dtype), strict=True))

    @property
    def consts(self) -> list[Any]:
        """The arrays that the programs close over."""
        probe = self.loss_scale.probe
        return [*self.split.consts, *(probe.split.consts if probe else ())]

    def with_arrays(
        self, params: list[Array | Shard], frozen: list[Array | Shard], consts: list[Any]
    ) -> "TracedLoss":
        """The same loss with other arrays: those that live on one device."""
        own = len(self.split.consts)
        scaling, split = self.loss_scale, self.split.with_consts(consts[:own])
        if scaling.probe is not None:
            probe = scaling.probe
            probe = probe._replace(split=probe.split.with_consts(consts[own:]))
            scaling = scaling._replace(probe=probe)
        return self._replace(params=params, frozen=frozen, split=split, loss_scale=scaling)

    @property
    def activations(self) -> int:
        """Bytes that one example's forward pass leaves for its backward pass, roughly."""
        return activation_bytes(self.program, len(self.params), len(self.frozen))

    def root(self, root: int) -> Any:
        """Shape and dtype of a root."""
        own = len(self.params)
        return self.params[root] if root < own else self.split.derived[root - own].value

    def sum_of(self, target: Target) -> Any:
        """Shape of a target's sum."""
        return self.root(target.roots[0] if target.relation == "itself" else target.leaves[0])

    def of_leaves(self, totals: list[Array]) -> list[Array]:
        """The sum of every leaf, from that of every target."""
        shapes, found = [param.shape for param in self.params], dict[int, Array]()
        for target, total in zip(self.targets, totals, strict=True):
            leaves, root = target.leaves, target.roots[0]
            if target.relation == "itself" and root >= len(shapes):
                joined = self.split.derived[root - len(shapes)].joined
                assert joined is not None
                found.update(zip(leaves, joined.pulled_back(total, shapes), strict=True))
            else:
                found[leaves[0]] = total
        return [found[leaf] for leaf in range(len(shapes))]

    def accumulated(self, leaf: int) -> jax.ShapeDtypeStruct:
        """Shape of a trainable leaf, with the accumulate dtype."""
        return jax.ShapeDtypeStruct(self.params[leaf].shape, self.accumulate_dtype)

    def cut(self, leaf: int) -> Cut | None:
        """How the sum of a trainable leaf is scattered over devices as soon as it is known."""
        return self.cuts[leaf] if self.cuts else None

    def summed(self, leaf: int) -> jax.ShapeDtypeStruct:
        """Shape of what a device holds of a leaf's sum."""
        its, cut = self.accumulated(leaf), self.cut(leaf)
        return its if cut is None else its.update(shape=cut.local(its.shape))

    def no_sums(self) -> list[Array]:
        """Zeros, as a device holds the sums of all leaves."""
        zeros = [jnp.zeros(x.shape, x.dtype) for x in map(self.summed, range(len(self.params)))]
        cuts = map(self.cut, range(len(self.params)))  # branches must agree on where they live
        return [x if cut is None else cut.kept(x) for x, cut in zip(zeros, cuts, strict=True)]

    @property
    def parts(self) -> dict[int, Shard]:
        """The arrays of which a device holds a part, by their place among all that are shared."""
        shared = (*self.shared.roots, *self.shared.fixed)
        return {i: x for i, x in enumerate(shared) if isinstance(x, Shard)}

    def with_parts(self, parts: dict[int, Shard]) -> "TracedLoss":
        """The same with other values in their place."""
        if not parts:
            return self
        assert self.outside is not None
        roots = len(self.shared.roots)
        shared = [parts.get(i, x) for i, x in enumerate((*self.shared.roots, *self.shared.fixed))]
        outside = self.outside._replace(shared=Shared(shared[:roots], shared[roots:]))
        return self._replace(outside=outside)

    def scattered(self, sums: list[Array]) -> list[Array]:
        """The sums of all leaves, of which a device keeps its part.

        Guarantee: they are added over devices in the dtype that they come in, the accumulate dtype.

        Args:
            sums: of each leaf over this device's examples; those that have the shape of a part
                already are left as they are.
        """
        return [
            total if cut is None or total.shape == self.summed(leaf).shape else cut.scattered(total)
            for leaf, total in enumerate(sums)
            for cut in [self.cut(leaf)]
        ]


def _penalties(target: Target, gradients: dict[int, dict[int, Callable[[], Array]]]) -> Penalties:
    """Those of a target, from the gradients of all."""
    (leaf,) = target.leaves
    return of_penalties([gradients[root][leaf]() for root in target.penalties])


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


class Clip(NamedTuple):
    """What becomes of each example's gradient.

    Attributes:
        norms: for each clip norm one norm an example, before clipping.
        factors: for each clip norm what each example's gradient is multiplied by, as it came out of
            the backward pass: the loss scale is undone with it. Zero where an example adds nothing.
    """

    norms: list[Float[Array, " batch"]]
    factors: list[Float[Array, " batch"]]


def clip(
    traced: TracedLoss,
    known: list[tuple[Float[Array, " batch"], Float[Array, " batch"]]],
    loss: Float[Array, " batch"],
    scales: Float[Array, " batch"] | None,
    is_padding_example: Bool[Array, " batch"],
) -> Clip:
    """From the norms of every group of leaves, and bounds on what is added of it, to clip factors.

    Norms and bounds are those of gradients of the scaled loss. Scales are powers of two, so to
    undo them is exact; what becomes too small for that is rounded away from harm, bounds up to the
    smallest normal number and factors down to zero.
    """
    clipping, dtype = traced.clipping, traced.accumulate_dtype
    tiny = jnp.finfo(dtype).tiny
    of_groups, of_sums = ([of[i] for of in known] for i in range(2))
    if scales is not None:
        of_groups = [norm / scales for norm in of_groups]
        of_sums = [jnp.where(b > 0, jnp.maximum(b / scales, tiny), b) for b in of_sums]
    contributes = jnp.isfinite(loss) & ~is_padding_example
    # Where terms that overflow cancel, the norm may be finite, and what is added still not known.
    for size in (*of_groups, *of_sums):
        contributes &= jnp.isfinite(size)
    factors = [
        clip_factors(bound, clip_norm, clipping.rescale_to_unit_norm, contributes)
        for bound, clip_norm in zip(of_sums, clipping.clip_norms, strict=True)
    ]
    if scales is not None:
        unscaled = [factor / scales for factor in factors]
        factors = [jnp.where(factor >= tiny, factor, 0) for factor in unscaled]
    return Clip(of_groups, factors)


def clip_and_sum(
    traced: TracedLoss,
    groups: list[int],
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
    batch, dtype = len(loss), traced.accumulate_dtype
    members = [
        [index for index, its in enumerate(groups) if its == group]
        for group in range(len(traced.clipping.clip_norms))
    ]
    with stage("norm"):
        parts = [joined([leaves[index] for index in its]) for its in members]
        known = [norm_and_bound(together, batch, dtype) for together, _ in parts]
        clipped = clip(traced, known, loss, scales, is_padding_example)
    sums: dict[int, Array] = {}
    with stage("sum"):
        for its, (together, of_all), factors in zip(members, parts, clipped.factors, strict=True):
            contributes = factors > 0
            totals = of_all([leaf.sum(factors, contributes) for leaf in together])
            sums.update(zip(its, totals, strict=True))
    return ClippedSum([sums[index] for index in range(len(leaves))], loss, clipped.norms, aux)
