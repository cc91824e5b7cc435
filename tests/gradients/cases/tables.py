"""What tables of losses are made of: a row is a name, and what makes a case of it.

All cases of a table are one loss in which each has a model, data and a clip norm of its own, so
that they are compiled once.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tests.models import Case

Make: TypeAlias = Callable[[str], Case]
Table: TypeAlias = dict[str, Make]


def joined(table: Table) -> Case:
    """All cases of a table as one, whose model and batch are dictionaries by their names."""
    cases = [make(name) for name, make in table.items()]

    def loss(model: dict[str, Any], example: dict[str, Any]) -> Array:
        return sum(case.loss(model[case.name], *example[case.name]) for case in cases)

    return Case(
        "+".join(table),
        {case.name: case.model for case in cases},
        loss,
        lambda rng, size: ({case.name: case.batch(size) for case in cases},),
        {case.name: case.filter_spec for case in cases},
    )


def bent(model: Callable[..., Array], *inputs: Array) -> Array:
    """A loss that tells every output of a layer from its neighbors, and bends each."""
    output = model(*inputs)
    weights = 1 + jnp.arange(output.size, dtype=output.dtype).reshape(output.shape) % 3
    return jnp.sum(weights * (jnp.sin(output) + output / 2))


def random_like(model: Any) -> Any:
    """The model with every parameter random: ones and zeros of a fresh norm layer hide mistakes."""
    rng = np.random.default_rng(0)

    def draw(leaf: Any) -> Any:
        if not eqx.is_inexact_array(leaf):
            return leaf
        return leaf + jnp.asarray(0.3 * rng.normal(size=leaf.shape), leaf.dtype)

    return jax.tree.map(draw, model)


class Rows(NamedTuple):
    """Integers below a limit, in place of numbers."""

    limit: int
    shape: tuple[int, ...] = ()


Shape: TypeAlias = tuple[int, ...] | Rows | np.ndarray


def drawing(*shapes: Shape) -> Callable[[np.random.Generator, int], tuple[Any, ...]]:
    """What draws a batch of the given shapes; of an array it is that, repeated."""

    def draw(rng: np.random.Generator, size: int) -> tuple[Any, ...]:
        def one(shape: Shape) -> Array:
            match shape:
                case Rows(limit, its):
                    return jnp.asarray(rng.integers(0, limit, (size, *its)), jnp.int32)
                case np.ndarray():
                    return jnp.asarray(np.resize(shape, (size, *shape.shape[1:])))
                case _:
                    return jnp.asarray(rng.normal(size=(size, *shape)), jnp.float32)

        return tuple(map(one, shapes))

    return draw


def of_leaf(use: Callable[..., Array], shape: tuple[int, ...], data: Shape) -> Make:
    """A case whose model is one array."""

    def make(name: str) -> Case:
        leaf = jnp.asarray(np.random.default_rng(5).normal(size=shape), jnp.float32)
        return Case(name, leaf, lambda w, x: bent(use, w, x), drawing(data))

    return make


def of_arrays(
    use: Callable[..., Array], shapes: str, *data: Shape, frozen: str = "", loss: bool = False
) -> Make:
    """A case whose model is a dictionary of arrays.

    Args:
        use: from the dictionary and one example to any array; to a loss where `loss` says so.
        shapes: of the arrays, as `"w44 b4 s"`: a letter, and the lengths of its axes.
        data: of one example's arrays.
        frozen: the letters of those that are not trained.
        loss: whether `use` is a loss.
    """

    def make(name: str) -> Case:
        rng = np.random.default_rng(5)
        model = {
            word[0]: jnp.asarray(0.6 * rng.normal(size=[int(n) for n in word[1:]]), jnp.float32)
            for word in shapes.split()
        }
        spec = {letter: letter not in frozen for letter in model}
        fun = use if loss else lambda model, *x: bent(use, model, *x)
        return Case(name, model, fun, drawing(*data or ((3, 4),)), spec)

    return make


def of_module(
    make: Callable[[Array], Any],
    *data: Shape,
    loss: Callable[..., Array] = bent,
    spec: Any = eqx.is_inexact_array,
) -> Make:
    """A case whose model is a module, made from a key."""

    def case(name: str) -> Case:
        return Case(name, random_like(make(jax.random.key(3))), loss, drawing(*data), spec)

    return case


def on_all(layer: Any, x: Array) -> Array:
    return jax.vmap(layer)(x)
