"""Gaussian noise on one leaf or many: certified, or as JAX draws it."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Shaped, UInt32

from ..precision import Policy, stage
from .chacha import NOISE, block, chacha_key, positions
from .inverse_normal import WORDS, tail_probability, tail_quantile
from .strategies import Banded
from .stream import Counter, NoiseStream, earlier

GRID_BITS = 5
"""The grid is 2^-5 to 2^-6 of the standard deviation."""

Past: TypeAlias = Sequence[tuple[UInt32[Array, "..."], UInt32[Array, "..."]]]
"""What one step keeps of each leaf: float64, in two words, because states hold no float64."""

_TOGETHER = 2**16
"""Leaves of at most this many entries share a kernel, because each kernel takes time to compile."""


class Leaf(NamedTuple):
    """A leaf of a sum, and what its noise follows from.

    Attributes:
        gradient: the sum.
        number: its place among the leaves of the sum.
        dtype: of the noise.
        result: dtype of the noisy sum.
        sharding: where it is on a mesh with Explicit axes; else None.
    """

    gradient: Float[Array, "..."]
    number: int
    dtype: Any
    result: Any
    sharding: NamedSharding | None


def can_certify(policy: Policy | None) -> bool:
    """Whether noise can be certified: in a noise dtype of float32, or wider.

    `noise_key` refuses platforms where the proof does not hold.
    """
    return policy is None or jnp.finfo(policy.noise_dtype).nmant >= 23


def grid_of(stddev: float) -> float:
    """The distance between two values that the noisy sum can take: a power of two."""
    return 2.0 ** (math.frexp(stddev)[1] - 1 - GRID_BITS)


def with_certified_noise(
    leaves: Sequence[Leaf],
    stream: NoiseStream,
    stddev: float,
    is_apart: bool,
    correlation: Banded,
    past: Sequence[Past],
) -> tuple[list[Float[Array, "..."]], Past]:
    """Adds noise whose distribution is known: `finite_precision.md`, `correlated_noise.md`.

    Each entry takes 257 bits of a block of ChaCha under the stream's key. What the block encrypts
    is the position in the leaf, the stream's counter, and the leaf's number.

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
    with jax.enable_x64(True):
        words, rounds = chacha_key(stream.key)
        results: dict[int, Any] = {}
        drawn: dict[int, Any] = {}
        alike: dict[Any, list[int]] = {}
        for i, leaf in enumerate(leaves):
            is_small = leaf.gradient.size <= _TOGETHER and not is_apart and leaf.sharding is None
            alike.setdefault((leaf.gradient.dtype, leaf.result) if is_small else i, []).append(i)
        for group in alike.values():
            first = leaves[group[0]]
            names = NOISE | np.array([leaves[i].number for i in group], np.uint32)
            result = np.dtype(first.result)
            noised = functools.partial(
                _noised, stddev=stddev, correlation=correlation, result=result, rounds=rounds
            )
            if first.sharding is not None:
                axes, where = first.sharding.mesh.explicit_axes, [first.sharding]
                places = where, where if past else []
                noised = cast(Any, jax.sharding).auto_axes(noised, axes=axes, out_sharding=places)
            gradients = [leaves[i].gradient for i in group]
            before = [[kept[i] for i in group] for kept in past]
            found, fresh = noised(words, stream.counter, names, gradients, before)
            results |= dict(zip(group, found, strict=True))
            drawn |= dict(zip(group, fresh, strict=False))
        return [results[i] for i in range(len(leaves))], [drawn[i] for i in sorted(drawn)]


@functools.partial(jax.jit, static_argnames=("stddev", "correlation", "result", "rounds"))
def _noised(
    key: UInt32[Array, " 8"],
    counter: Counter,
    names: UInt32[Array, " leaves"],
    gradients: list[Float[Array, "..."]],
    past: list[Past],
    *,
    stddev: float,
    correlation: Banded,
    result: Any,
    rounds: int,
) -> tuple[list[Float[Array, "..."]], Past]:
    """Adds noise to one leaf, or to several side by side; with `past`, returns what to keep, too.

    Of a quotient of power series noising / strategy, what is kept is the draw divided by the
    denominator alone ("direct form II" of signal processing): noise is the numerator times that.
    """
    shapes = [gradient.shape for gradient in gradients]
    with stage("grid"):
        gradient = _side_by_side(gradients)
    position = _side_by_side([positions(shape) for shape in shapes])
    name = _side_by_side([jnp.full(shape, name) for shape, name in zip(shapes, names, strict=True)])

    def draw(counter: Counter) -> Float[Array, "..."]:
        low, high = counter
        with stage("bits"):
            sign, *words = block([*key], position, (low, name, high), rounds)[: 1 + WORDS]
            size = tail_quantile(tail_probability(words))
            # One use of the size, so that it is not kept.
            return jnp.where(sign >> 31 == 0, 1.0, -1.0) * size

    if past:
        before = [_float_of(*map(_side_by_side, zip(*kept, strict=True))) for kept in past]

        def of_earlier(weights: Sequence[float]) -> Any:
            return sum(weight * x for weight, x in zip(weights[1:], before, strict=False))

        fresh = computed_once(draw(counter) - of_earlier(correlation.strategy))
        noise = fresh + of_earlier(correlation.noising)
    else:
        noise = fresh = _weighted(draw, counter, correlation.noising, gradient.shape)
    noisy = computed_once(_on_grid(gradient, noise, stddev).astype(result))

    def apart(x: Float[Array, "..."]) -> list[Float[Array, "..."]]:
        if len(gradients) == 1:
            return [x]
        ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
        return [part.reshape(shape) for part, shape in zip(jnp.split(x, ends), shapes, strict=True)]

    return apart(noisy), [*zip(*map(apart, _words_of(fresh)), strict=True)] if past else []


def _words_of(x: Float[Array, "*shape"]) -> tuple[UInt32[Array, "*shape"], UInt32[Array, "*shape"]]:
    """The bits of a float64."""
    bits = x.view(jnp.uint64)
    return (bits >> np.uint64(32)).astype(jnp.uint32), bits.astype(jnp.uint32)


def _float_of(high: UInt32[Array, "*n"], low: UInt32[Array, "*n"]) -> Float[Array, "*n"]:
    """The float64 of these bits."""
    return ((high.astype(jnp.uint64) << np.uint64(32)) | low).view(jnp.float64)


def _side_by_side(arrays: Sequence[Shaped[Array, "..."]]) -> Shaped[Array, "..."]:
    """Joins arrays, once: XLA would repeat the code of the cipher for each in every kernel."""
    return computed_once(jnp.concatenate([*map(jnp.ravel, arrays)])) if arrays[1:] else arrays[0]


def _weighted(
    draw: Callable[[Counter], Float[Array, "*shape"]],
    counter: Counter,
    noising: tuple[float, ...],
    shape: tuple[int, ...],
) -> Float[Array, "*shape"]:
    """The weighted sum of this draw and of those before."""
    if len(noising) == 1:
        return draw(counter)
    weights = jnp.asarray(noising, jnp.float64)

    def body(back: Any, total: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        before, was_drawn = earlier(counter, back.astype(jnp.uint32))
        return total + jnp.where(was_drawn, weights[back], 0) * draw(before)

    return jax.lax.fori_loop(0, len(noising), body, jnp.zeros(shape, jnp.float64))


def _on_grid(
    gradient: Float[Array, "*shape"], noise: Float[Array, "*shape"], stddev: float
) -> Float[Array, "*shape"]:
    """The multiple of the grid that is nearest to the sum plus noise, in float64."""
    grid = grid_of(stddev)
    with stage("draw"):
        noise = (stddev / grid) * noise
    with stage("noise"):
        # In units of the grid, and exactly, the sum is a whole number and a remainder.
        scaled = gradient.astype(jnp.float64) * (1 / grid)
        whole = jnp.round(scaled)
        steps = jnp.round((scaled - whole) + noise)
    with stage("grid"):
        return (whole + steps) * grid


def with_noise_of_jax(
    leaves: Sequence[Leaf], stream: NoiseStream, stddev: float
) -> list[Float[Array, "..."]]:
    """Adds what `jax.random.normal` draws, in the dtype of the noise."""

    def noisy(leaf: Leaf) -> Float[Array, "..."]:
        own = stream.key
        for word in (*stream.counter, np.uint32(leaf.number)):
            own = jax.random.fold_in(own, word)
        with stage("draw"):
            shape, where = leaf.gradient.shape, leaf.sharding
            noise = jax.random.normal(own, shape, leaf.dtype, out_sharding=where)
            noise = jnp.asarray(stddev, leaf.dtype) * noise
        with stage("noise"):
            return computed_once(leaf.gradient.astype(leaf.result) + noise.astype(leaf.result))

    return [noisy(leaf) for leaf in leaves]


def computed_once(x: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
    """Returns `x`, bit for bit. XLA computes it once, however many operations read it.

    XLA repeats cheap operations in every kernel that reads their result, and treats the cipher as
    cheap; Adam's moments and update are three kernels. It does not repeat divisions. This one
    divides by 1. XLA cannot see that (a number with its lowest bit set is not 0), but LLVM, which
    generates the machine code, can, and removes it. `jax.lax.optimization_barrier` does not help on
    a CPU, where it is removed before kernels are formed.
    """
    integer = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(x, integer)
    return jax.lax.div(x, ((bits | 1) != 0).astype(x.dtype))
