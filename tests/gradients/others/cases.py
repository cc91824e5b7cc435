"""Losses as others write them: what is shared by the files beside this one."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from equinox import nn
from jaxtyping import Array

from tests.gradients.engine.layers import bent, random_like
from tests.models import Case


class Rows(NamedTuple):
    """Integers below a limit, in place of numbers."""

    limit: int
    shape: tuple[int, ...] = ()


Shape = tuple[int, ...] | Rows


class Recipe(NamedTuple):
    """The name of a case, and what makes it when a test runs: collecting tests makes none."""

    name: str
    make: Callable[[], Case]


def drawing(*shapes: Shape) -> Callable[[np.random.Generator, int], tuple[Any, ...]]:
    """What draws a batch of the given shapes."""

    def draw(rng: np.random.Generator, size: int) -> tuple[Any, ...]:
        return tuple(
            jnp.asarray(rng.integers(0, s.limit, (size, *s.shape)), jnp.int32)
            if isinstance(s, Rows)
            else jnp.asarray(rng.normal(size=(size, *s)), jnp.float32)
            for s in shapes
        )

    return draw


def of_arrays(
    name: str,
    use: Callable[..., Array],
    shapes: str,
    *data: Shape,
    frozen: str = "",
    loss: bool = False,
) -> Recipe:
    """A case whose model is a dictionary of arrays.

    Args:
        name: of the case.
        use: from the dictionary and one example to any array; to a loss where `loss` says so.
        shapes: of the arrays, as `"w44 b4 s"`: a letter, and the lengths of its axes.
        data: of one example's arrays.
        frozen: the letters of those that are not trained.
    """

    def make() -> Case:
        rng = np.random.default_rng(5)
        model = {
            word[0]: jnp.asarray(0.6 * rng.normal(size=[int(n) for n in word[1:]]), jnp.float32)
            for word in shapes.split()
        }
        spec = {name: name not in frozen for name in model}
        fun = use if loss else lambda model, *x: bent(lambda: use(model, *x))
        return Case(name, model, fun, drawing(*data or ((3, 4),)), spec)

    return Recipe(name, make)


def of_module(
    name: str,
    make: Callable[[Array], Any],
    *data: Shape,
    loss: Callable[..., Array] = bent,
    spec: Any = eqx.is_inexact_array,
) -> Recipe:
    """A case whose model is a module, made from a key."""

    def case() -> Case:
        return Case(name, random_like(make(jax.random.key(3))), loss, drawing(*data), spec)

    return Recipe(name, case)


class Maker(eqx.Module):
    """A tree of modules by name, and what is done with them."""

    parts: dict[str, Any]
    use: Callable[..., Array] = eqx.field(static=True)

    def __call__(self, *inputs: Array) -> Array:
        return self.use(self.parts, *inputs)


def made(use: Callable[..., Array], **makers: Callable[[Array], Any]) -> Callable[[Array], Maker]:
    """What makes a network of parts, each from a key of its own."""

    def make(key: Array) -> Maker:
        keys = jax.random.split(key, len(makers))
        return Maker({n: f(k) for (n, f), k in zip(makers.items(), keys, strict=True)}, use)

    return make


def linear(*sizes: Any, **options: Any) -> Callable[[Array], nn.Linear]:
    return lambda key: nn.Linear(*sizes, key=key, **options)


def mlp(*sizes: Any) -> Callable[[Array], nn.MLP]:
    return lambda key: nn.MLP(*sizes, activation=jnp.tanh, key=key)


def array(*shape: int) -> Callable[[Array], Array]:
    return lambda key: 0.5 * jax.random.normal(key, shape)


def stacked(make: Callable[[Array], Any], depth: int) -> Callable[[Array], Any]:
    return lambda key: eqx.filter_vmap(make)(jax.random.split(key, depth))


def on_all(layer: Any, x: Array) -> Array:
    return jax.vmap(layer)(x)
