"""What each way to the gradient of a leaf costs, and which one to take."""

import math
from typing import NamedTuple

import jax

from ..device import is_cpu
from .clip import few
from .cross_terms import overlaps
from .leaves import Way
from .taps import Uses
from .uses import ParamUse, contraction, lookup, shift, vjp


def move() -> int:
    """What moving one number to or from memory costs, in floating-point operations.

    See `choice.py` for where the figures are from.
    """
    return 16 if is_cpu() else 64


# Numbers moved for an entry of a gradient that is formed: it is written, read twice for its norm
# (the largest entry, the squares) and once for the sum. To sum more than a few, copies are made.
# Measured on two CPU cores, matrices of 256 to 1024 squared: 3 to 5 with up to 8 examples at once,
# 14 to 24 with 16 and 64; an MLP of 0.1 million entries takes 1.6 times as long at 32 as at 8.
# Copies of a few MiB (bytes) stay in the caches: a GRU of 13,000 is faster at 64 (3 MiB) than at 8.
_OF_FEW, _OF_MANY, _CACHES = 4, 12, 2**22
# The same for an iteration of a scan, where the backward pass itself adds up each example's
# gradient. Measured with that GRU, 48 steps: 14 for all of them.
_AGAIN = 0.3
# The same where it is not known yet how many there will be.
_OF_SOME = 6
# The same of a gradient that stays in the cache of a core (bytes), where only operations count.
_OF_CACHED, _CACHE = 3, 2**15
# The same for an entry of a value that is derived from the parameter, beside its gradient: where
# the backward pass of each example goes through it, and where gradients do so a few at a time.
# Measured with a CNN of weight norm, 50,000 entries: 20 and 6.
_THROUGH, _THROUGH_A_FEW = 20, 6
# The same for a number that a use meets (its inputs and cotangents), where inner products make the
# norm: both are brought to a common scale, and masked and weighted for the sum. Measured likewise,
# for 16 to 128 steps: 10 to 14. Beside a gradient that is formed they are read once more.
_MET = 11


class LeafCost(NamedTuple):
    """How one leaf is treated, and what that costs for one example.

    Attributes:
        kinds: the kinds of its uses, one an equation.
        way: how its norm and its sum are found, as in `Row`.
        norm_flops: floating-point operations for the norm.
        sum_flops: the same for the weighted sum, with what forms the gradients that it adds up.
        bytes: what is held for it until the clip factor is known.
        reason: why this way.
        times: iterations of scans that use all of it again.
        copies: how often an example's gradient is there at once, where it is differentiated: a scan
            over slices of the parameter puts the slices in front of the examples.
        through: entries of the values that its gradient goes through.
    """

    kinds: tuple[str, ...]
    way: Way
    norm_flops: float
    sum_flops: float
    bytes: int
    reason: str
    times: int = 0
    copies: int = 1
    through: int = 0

    @property
    def flops(self) -> float:
        """Floating-point operations for norm and weighted sum."""
        return float(self.norm_flops + self.sum_flops)

    def moved(self, size: int, at_once: int) -> float:
        """Numbers moved for one example, beside those that an ordinary gradient moves.

        Args:
            size: entries of the leaf.
            at_once: examples in a microbatch.
        """
        if self.way == "unused":
            return 0.0
        if self.way == "inner_products":
            return _MET * self.bytes / 4
        is_few = at_once <= few(size) or 4 * size * at_once <= _CACHES
        met = self.bytes / 4 - size
        again = _AGAIN * self.times if self.way == "whole" else 0
        through = self.through * (_THROUGH if self.way == "whole" else _THROUGH_A_FEW)
        return float(met + size * ((_OF_FEW if is_few else _OF_MANY) + again) + through)

    def differentiated(self, size: int) -> "LeafCost":
        """The same where each example's gradient of so many entries is differentiated anyway."""
        if self.way == "unused":
            return self
        reason = "each example's gradient is formed by the backward pass itself"
        reason = self.reason if self.way == "whole" else reason
        held = 4 * size * self.copies
        return self._replace(
            way="whole", norm_flops=2 * size, sum_flops=2 * size, bytes=held, reason=reason
        )


def leaf_cost(found: Uses, leaf: int, parameter: jax.Array | jax.ShapeDtypeStruct) -> LeafCost:
    """Chooses the way of one leaf. It depends on shapes and on the platform alone."""
    times = 0
    for use in found.of[leaf].values():
        lengths = [n for n, its in zip(use.result.shape, use.scans, strict=False) if its == "time"]
        times += math.prod(lengths) if lengths else 0
    is_stacked = any("slices" in use.scans for use in found.of[leaf].values())
    copies = 2 if is_stacked else 1
    return _cheapest(found, leaf, parameter)._replace(times=times, copies=copies)


def _cheapest(found: Uses, leaf: int, parameter: jax.Array | jax.ShapeDtypeStruct) -> LeafCost:
    """The way, and what it costs."""
    size = parameter.size
    if leaf in found.whole:
        return LeafCost((), "whole", 2 * size, 2 * size, 4 * size, found.whole[leaf])
    uses = tuple(found.of[leaf].values())
    if not uses:
        return LeafCost((), "unused", 0, 0, 0, "the loss does not depend on it")
    kinds = tuple(use.name for use in uses)
    held = sum(_bytes((use.result, use.residuals)) for use in uses)
    sets = overlaps(uses, parameter.shape)
    if sets is None:
        reason = _reason_to_form(uses)
        forming = sum(2 * math.prod(use.result.shape) for use in uses)
        return LeafCost(kinds, "kept", 2 * size, forming + 2 * size, held + 4 * size, reason)
    of_sets = [[(_sizes(uses[m.use]), m.transposed) for m in members] for members in sets]
    only_rows = all(use.kind is lookup for use in uses)
    entries = sum(math.prod(first.matrices) for (first, _), *_ in of_sets)
    forming = sum(use.outer for of_set in of_sets for use, _ in of_set)
    inner = sum(map(_inner_products, of_sets))
    if only_rows or inner == 0 or _is_cheaper(inner, held, entries):
        reason = (
            "only the rows that were looked up count"
            if only_rows
            else f"{_told(uses)}: |x| |g| is the norm"
            if inner == 0
            else f"{_told(uses)}: their inner products are cheaper than {entries:,} entries"
        )
        # Where there is one outer product, its norm is that of its two factors.
        first = [use.matrices for (use, _), *_ in of_sets]
        of_factors = sum(2 * groups * (x + g) for groups, x, g in first)
        return LeafCost(kinds, "inner_products", inner or of_factors, forming, held, reason)
    reason = f"{_told(uses)}: forming {entries:,} entries is cheaper than inner products of steps"
    held += 4 * entries
    return LeafCost(kinds, "kept", 2 * entries, forming + 2 * entries, held, reason)


def _reason_to_form(uses: tuple[ParamUse, ...]) -> str:
    if len(uses) > 1:
        return f"{len(uses)} uses: their gradients are added up"
    added = [use.operation.primitive for use in uses if use.kind is vjp]
    unknown = [name for name in added if name not in shift.PRIMITIVES]
    if unknown:
        return f"no kind of use knows '{unknown[0]}'"
    return "added up by the scan's backward pass" if added else "no larger than what it meets"


def num_steps(found: Uses, leaf: int) -> int:
    """How many vectors of data a leaf meets at most, the tokens of a sequence, say.

    It is 0 where the leaf is not used in contractions and lookups alone.
    """
    uses = found.of[leaf].values()
    if any(use.kind is not contraction and use.kind is not lookup for use in uses):
        return 0
    return max((use.steps for use in uses), default=0)


def _is_cheaper(inner: int, held: int, entries: int) -> bool:
    """Whether inner products of steps are cheaper than forming the gradient.

    Args:
        inner: floating-point operations for them.
        held: bytes that the uses meet.
        entries: of the gradient.
    """
    if 4 * entries <= _CACHE:
        return inner <= move() * _OF_CACHED * entries
    return inner + move() * _MET * held / 4 <= move() * _OF_SOME * entries


class _Sizes(NamedTuple):
    """What one example's gradient is made of at a use of matrices.

    Attributes:
        matrices: its shape: groups, features in and out.
        steps: how many outer products there are in each group.
        is_lookup: whether these are rows, each added where it was looked up.
    """

    matrices: tuple[int, ...]
    steps: int
    is_lookup: bool

    @property
    def outer(self) -> int:
        """Floating-point operations for adding up all outer products."""
        groups, features_in, features_out = self.matrices
        return 2 * groups * self.steps * (1 if self.is_lookup else features_in) * features_out


def _sizes(use: ParamUse) -> _Sizes:
    assert use.matrices is not None
    return _Sizes(use.matrices.shape, use.steps, use.kind is lookup)


def _told(uses: tuple[ParamUse, ...]) -> str:
    count = f"{len(uses)} uses, " if len(uses) > 1 else ""
    total = sum(use.steps for use in uses)
    return f"{count}{'one step' if total == 1 else f'{total} steps'}"


def _inner_products(uses: list[tuple[_Sizes, bool]]) -> int:
    """Floating-point operations for the inner products of all steps of uses that overlap."""
    if all(use.is_lookup for use, _ in uses):
        steps = sum(use.steps for use, _ in uses)
        first, _ = uses[0]
        groups, _, entry = first.matrices
        return 2 * groups * steps**2 * entry
    if sum(use.steps for use, _ in uses) == 1:
        return 0
    flops = 0
    for i, (one, one_transposed) in enumerate(uses):
        for other, transposed in uses[: i + 1]:
            # Rows of a lookup are compared, or picked from the other side: next to nothing.
            sides = zip(_widths(one, one_transposed), _widths(other, transposed), strict=True)
            width = sum(min(pair) for pair in sides)
            flops += 2 * one.matrices[0] * one.steps * other.steps * width
    return flops


def _widths(use: _Sizes, transposed: bool) -> tuple[int, int]:
    _, features_in, features_out = use.matrices
    features_in = 0 if use.is_lookup else features_in
    return (features_out, features_in) if transposed else (features_in, features_out)


def _bytes(shapes: object) -> int:
    return sum(
        math.prod(s.shape) * s.dtype.itemsize
        for s in jax.tree.leaves(shapes)
        if isinstance(s, jax.ShapeDtypeStruct)
    )
