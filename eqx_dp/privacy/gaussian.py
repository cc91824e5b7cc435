"""Gaussian noise on one leaf or many, by integers alone."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, UInt32

from ..device import is_cpu
from ..precision import stage
from ..rewrites import apart, not_repeated, side_by_side, together
from .chacha import NOISE, ROUNDS, block, positions
from .grid import cells_of, in_cells, on_grid, rounded
from .integer_gaussian import WORDS, held, pair_of_normals, product
from .strategies import Banded
from .stream import Counter, NoiseStream, earlier

Past: TypeAlias = Sequence[tuple[UInt32[Array, "..."], UInt32[Array, "..."]]]
"""What one step keeps of each leaf: int64, in two words, because states hold no int64."""

LEAF_BITS = 20
"""A tree has at most 2^20 leaves; the bits beyond number the pairs of a leaf."""

_MOST_NORM = 7
"""Correlated noise has at most 7 times the standard deviation of a draw."""

_TOGETHER = 2**16
"""Leaves of at most this many entries share a kernel, because each kernel takes time to compile."""

_STACKED = 2**24
"""So do leaves of one shape, of at most this many entries together: a stack is a copy. Leaves on
Explicit axes do not: each has a sharding of its own."""


class Leaf(NamedTuple):
    """A leaf of a sum, and what its noise follows from.

    Attributes:
        gradient: the sum.
        number: its place among the leaves of the sum.
        result: dtype of the noisy sum. If it is narrower than float32, noise is added in float32,
            and the noisy sum is rounded, which is post-processing.
        sharding: where it is on a mesh with Explicit axes; else None.
    """

    gradient: Float[Array, "..."]
    number: int
    result: Any
    sharding: NamedSharding | None


def with_noise(
    leaves: Sequence[Leaf],
    stream: NoiseStream,
    stddev: float,
    is_apart: bool,
    correlation: Banded,
    past: Sequence[Past],
) -> tuple[list[Float[Array, "..."]], Past]:
    """Adds noise whose distribution is known: `finite_precision.md`, `correlated_noise.md`.

    Two entries share a block of ChaCha under the stream's key: entry i and entry i + h of a leaf,
    where h is half of its entries, or up to 64 more (`_pairs`). What the block encrypts is i, the
    stream's counter, and the leaf's number.

    Args:
        leaves: what noise is added to.
        stream: of the noise, as it is before this draw.
        stddev: of the noise.
        is_apart: whether small leaves may be on other devices than each other.
        correlation: how noise depends on that of draws before. Before draw 0 there is none.
        past: what the last steps kept, latest first, as this returned it: of `correlation.kept`
            steps.

    Returns:
        The noisy sums, and what this step keeps of each leaf (nothing without `past`).
    """
    with jax.enable_x64(True):  # for integers of 64 bits; no float64 is made
        words = jax.random.key_data(stream.key)
        results: dict[int, Any] = {}
        drawn: dict[int, Any] = {}
        is_by_entry = is_apart or jax.device_count() > 1 or not is_cpu()
        kinds: list[Any] = []
        for i, leaf in enumerate(leaves):
            is_small = leaf.gradient.size <= _TOGETHER and not is_apart and leaf.sharding is None
            shape = leaf.gradient.shape if is_by_entry and leaf.sharding is None else i
            kinds.append((leaf.gradient.dtype, leaf.result, None if is_small else shape))
        for group in together(kinds, [leaf.gradient.size for leaf in leaves], _STACKED):
            first = leaves[group[0]]
            names = NOISE | np.array([leaves[i].number for i in group], np.uint32)
            is_divided = is_apart or first.sharding is not None or jax.device_count() > 1
            noised = functools.partial(
                _noised,
                stddev=stddev,
                correlation=correlation,
                dtype=jnp.promote_types(first.result, jnp.float32),
                is_divided=is_divided or correlation.is_correlated,
            )
            if first.sharding is not None:
                axes, where = first.sharding.mesh.explicit_axes, [first.sharding]
                places = where, where if past else []
                noised = cast(Any, jax.sharding).auto_axes(noised, axes=axes, out_sharding=places)
            gradients = [leaves[i].gradient for i in group]
            before = [[kept[i] for i in group] for kept in past]
            found, fresh = noised(words, stream.counter, names, gradients, before)
            with stage("grid"):
                rounded_sums = [x.astype(first.result) for x in found]
            results |= dict(zip(group, rounded_sums, strict=True))
            drawn |= dict(zip(group, fresh, strict=False))
        return [results[i] for i in range(len(leaves))], [drawn[i] for i in sorted(drawn)]


@functools.partial(jax.jit, static_argnames=("stddev", "correlation", "dtype", "is_divided"))
def _noised(
    key: UInt32[Array, " 8"],
    counter: Counter,
    names: UInt32[Array, " leaves"],
    gradients: list[Float[Array, "..."]],
    past: list[Past],
    *,
    stddev: float,
    correlation: Banded,
    dtype: Any,
    is_divided: bool,
) -> tuple[list[Float[Array, "..."]], Past]:
    """Adds noise to one leaf, or to several side by side; with `past`, returns what to keep, too.

    Every entry can encrypt the block of its pair by itself. Then a device needs no other's entries,
    and all is one kernel without memory beside it; on a GPU two, between which whole cells are in
    the memory of a float32 result (`held`). On a CPU that is slower than to draw pairs, which takes
    six bytes an entry.
    """
    with stage("grid"):
        sums = [gradient.astype(dtype) for gradient in gradients]

    def normals(counter: Counter, position: Any, name: Any) -> tuple[Any, Any]:
        low, high = counter
        with stage("bits"):
            words = block([*key], position, (low, name, high), ROUNDS)
            return pair_of_normals(words[:WORDS], cells_of(stddev))

    def by_entry(
        counter: Counter, names: Any, sums: list[Any], past: list[Past]
    ) -> tuple[list[Any], Past]:
        shapes = [x.shape for x in sums]
        if len({*shapes}) == 1:  # one leaf, or a stack: positions are those of one
            its_own = names.reshape(-1, *[1] * len(shapes[0])) if sums[1:] else names[0]
            position, name, is_second = _places(shapes[0], its_own)
        else:
            placed = [_places(*each) for each in zip(shapes, names, strict=True)]
            position, name, is_second = map(side_by_side, zip(*placed, strict=True))
        with stage("grid"):
            total = side_by_side(sums)

        def draw(counter: Counter) -> Any:
            first, second = normals(counter, position, name)
            with stage("bits"):
                return jnp.where(is_second == 1, second, first)

        noise, fresh = _correlated(draw, counter, correlation, past)
        kept = [*zip(*(apart(x, shapes) for x in _words_of(fresh)), strict=True)] if past else []
        cells = held(_cells(total, noise, stddev).astype(jnp.int32)).astype(jnp.int64)
        return apart(_noisy(total, cells, stddev), shapes), kept

    def by_pair(
        counter: Counter, names: Any, sums: list[Any], past: list[Past]
    ) -> tuple[list[Any], Past]:
        halves = [_pairs(x.size) for x in sums]
        position = side_by_side([jnp.arange(half, dtype=jnp.uint32) for half in halves]).ravel()
        name = [jnp.full(half, name) for half, name in zip(halves, names, strict=True)]
        with stage("grid"):
            flat = [jnp.pad(x.ravel(), (0, 2 * _pairs(x.size) - x.size)) for x in sums]
            # What makes the sums is a kernel of its own: in one with the cipher, where rows have
            # 2^k entries, LLVM vectorizes neither.
            total = not_repeated(jnp.concatenate([x.reshape(2, -1) for x in flat], axis=1))
        pair = normals(counter, position, side_by_side(name).ravel())
        cells, others = (
            _cells(*each, stddev).astype(jnp.uint32) for each in zip(total, pair, strict=True)
        )
        with stage("grid"):  # 16 bits each: an array of both is held
            mask, place = np.uint32(2**16 - 1), np.array([[0], [16]], np.uint32)
            both = not_repeated((cells & mask) | (others << np.uint32(16)))
            moved = ((both[None] >> place) & mask).astype(jnp.int16).astype(jnp.int64)
        ends = np.cumsum(halves)[:-1]
        if all(x.size == 2 * half for x, half in zip(sums, halves, strict=True)):
            parts = jnp.split(_noisy(total, moved, stddev), ends, axis=1)
        else:  # in one kernel with a cut, LLVM vectorizes nothing
            noisy = [_noisy(*row, stddev) for row in zip(total, moved, strict=True)]
            halved = zip(*(jnp.split(row, ends) for row in noisy), strict=True)
            parts = [jnp.concatenate(two)[: x.size] for two, x in zip(halved, sums, strict=True)]
        return [part.reshape(x.shape) for part, x in zip(parts, sums, strict=True)], []

    operands = counter, names, sums, past
    if is_divided or max(x.size for x in sums) > 2**32:
        return by_entry(*operands)
    return jax.lax.platform_dependent(*operands, cpu=by_pair, default=by_entry)


def _pairs(size: int) -> int:
    """How many pairs a leaf takes: a multiple of 64, as compilers for CPUs vectorize no odd rest.

    A leaf of 932,362 entries, half of which is odd, took four times as long without that.
    """
    return -(-size // 128) * 64


def _places(shape: tuple[int, ...], name: Any) -> tuple[Any, Any, Any]:
    """For each entry of a leaf: the number of its pair, in two words, and whether it is the second.

    The upper word is a part of the leaf's name.
    """
    size = math.prod(shape)
    position = positions(shape, jnp.uint32 if size <= 2**32 else jnp.uint64)
    half = position.dtype.type(_pairs(size))
    is_second = position >= half
    pair = jnp.where(is_second, position - half, position)
    if size > 2**32:
        name = name | ((pair >> np.uint64(32)).astype(jnp.uint32) << np.uint32(LEAF_BITS))
    found = jnp.broadcast_arrays(pair.astype(jnp.uint32), name, is_second.astype(jnp.uint32))
    return found[0], found[1], found[2]


def _cells(x: Float[Array, "*shape"], noise: Any, stddev: float) -> Any:
    """How many whole cells are added: noise, with what the sum has beyond whole cells, rounded."""
    with stage("grid"):
        _, fraction = in_cells(x, stddev)
    with stage("noise"):
        moved = fraction + noise
    with stage("grid"):
        return rounded(moved)


def _noisy(x: Float[Array, "*shape"], cells: Any, stddev: float) -> Float[Array, "*shape"]:
    """The multiple of the grid that is so many cells from the whole cells of the sum."""
    with stage("grid"):
        return not_repeated(on_grid(in_cells(x, stddev)[0] + cells, x, stddev))


def _correlated(
    draw: Callable[[Counter], Any], counter: Counter, correlation: Banded, past: list[Past]
) -> tuple[Any, Any]:
    """The weighted sum of this draw and of those before; and what is kept of it.

    Of a quotient of power series noising / strategy, what is kept is the draw divided by the
    denominator alone ("direct form II" of signal processing): noise is the numerator times that.
    All weights but the first take something back.
    """
    most = max(map(abs, (*correlation.noising, *correlation.strategy)))
    both = correlation, Banded(strategy=correlation.strategy)
    if most > 1 or max(np.linalg.norm(one.weights(2**12)) for one in both) > _MOST_NORM:
        raise ValueError(
            f"{correlation} has weights above 1, or adds up draws to more than {_MOST_NORM} "
            "standard deviations: integers have no room. Take dp.Banded.bisr or lambda_cgd."
        )
    if past:
        before = [_number_of(*map(side_by_side, zip(*kept, strict=True))) for kept in past]

        def of_earlier(weights: Sequence[float]) -> Any:
            sizes = map(_weight, weights[1:])
            return sum(_times(size, x) for size, x in zip(sizes, before, strict=False))

        with stage("bits"):
            fresh = not_repeated(draw(counter) - of_earlier(correlation.strategy))
            return fresh - of_earlier(correlation.noising), fresh
    noise, sizes = draw(counter), jnp.array([*map(_weight, correlation.noising)], jnp.uint64)

    def body(back: Any, total: Any) -> Any:
        before, was_drawn = earlier(counter, back.astype(jnp.uint32))
        with stage("bits"):
            return total - _times(jnp.where(was_drawn, sizes[back], np.uint64(0)), draw(before))

    if len(correlation.noising) > 1:
        noise = jax.lax.fori_loop(1, len(correlation.noising), body, noise)
    return noise, noise


def _weight(weight: float) -> Any:
    """The size of a weight, at most 1, in units of 2^-64."""
    return np.uint64(min(round(abs(weight) * 2**64), 2**64 - 1))


def _times(weight: Any, x: Any) -> Any:
    size = product(jnp.abs(x).astype(jnp.uint64), weight).astype(jnp.int64)
    return jnp.where(x < 0, -size, size)


def _words_of(x: Any) -> tuple[UInt32[Array, "*shape"], UInt32[Array, "*shape"]]:
    """An int64 in two words, the upper one first."""
    bits = x.astype(jnp.uint64)
    return (bits >> np.uint64(32)).astype(jnp.uint32), bits.astype(jnp.uint32)


def _number_of(high: UInt32[Array, "*n"], low: UInt32[Array, "*n"]) -> Any:
    """The int64 of these words."""
    return ((high.astype(jnp.uint64) << np.uint64(32)) | low.astype(jnp.uint64)).astype(jnp.int64)
