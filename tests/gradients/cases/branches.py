"""Parameters inside of branches, loops, checkpoints, derivative rules and solvers."""

from typing import Any

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from tests.gradients.cases.tables import Rows, Table, of_arrays

SAVE_NAMED = jax.checkpoint_policies.save_only_these_names("kept")


@jax.custom_vjp
def product(w: Array, x: Array) -> Array:
    return jnp.tanh(x @ w)


def _backward(kept: Any, g: Array) -> tuple[Array, Array]:
    w, x, y = kept
    g = g * (1 - y**2)
    return x.T @ g, g @ w.T


product.defvjp(lambda w, x: (product(w, x), (w, x, product(w, x))), _backward)


@jax.custom_jvp
def bend(w: Array, x: Array) -> Array:
    return jnp.sin(x @ w)


bend.defjvp(lambda at, d: (bend(*at), jnp.cos(at[1] @ at[0]) * (d[1] @ at[0] + at[1] @ d[0])))


@jax.custom_vjp
def reverses(x: Array) -> Array:
    """The identity; gradients come back with the other sign."""
    return x


reverses.defvjp(lambda x: (x, None), lambda _, g: (-g,))


@eqx.filter_custom_vjp
def filtered(m: Any, x: Array) -> Array:
    return jnp.tanh(x @ m["w"]) + m["b"]


@filtered.def_fwd
def _(perturbed: Any, m: Any, x: Array) -> Any:
    del perturbed
    return filtered(m, x), jnp.tanh(x @ m["w"])


@filtered.def_bwd
def _(kept: Array, g: Array, perturbed: Any, m: Any, x: Array) -> Any:
    del perturbed
    return {"w": x.T @ (g * (1 - kept**2)), "b": g.sum(0)}


def by_equinox(m: Any, x: Array) -> Array:
    options = {"max_steps": 4, "kind": "checkpointed", "checkpoints": 2}
    body = lambda s: (s[0] + 1, jnp.tanh(s[1] @ m["w"]))  # noqa: E731
    return eqxi.while_loop(lambda s: s[0] < 3, body, (0, x), **options)[1]


def until_small(m: Any, x: Array) -> Array:
    """As many steps as the data takes."""
    options = {"max_steps": 8, "kind": "checkpointed"}
    body = lambda s: 0.5 * jnp.tanh(s @ m["w"]) + 0.1  # noqa: E731
    return eqxi.while_loop(lambda s: jnp.sum(s**2) > 2, body, x, **options)


def energy(m: Any, x: Array) -> Array:
    return jnp.sum(jnp.sin(x @ m["w"]) @ m["b"])


def tuned_inside(m: Any, x: Array) -> Array:
    """A step of gradient descent on the example's own loss first."""
    inner = jax.grad(lambda m: jnp.sum((jnp.tanh(x @ m["w"]) + m["b"]) ** 2))(m)
    m = jax.tree.map(lambda w, g: w - 0.1 * g, m, inner)
    return jnp.tanh(jnp.cos(x) @ m["w"]) + m["b"]


def solved(m: Any, x: Array) -> Array:
    """By conjugate gradients, with a derivative of its own."""
    matrix = m["w"] @ m["w"].T + jnp.eye(4, dtype=x.dtype)
    return jax.scipy.sparse.linalg.cg(lambda v: matrix @ v, x[0], maxiter=8)[0]


BRANCHES: Table = {
    "cond by data": of_arrays(lambda m, x: lax.cond(
        x[0, 0] > 0, lambda x: jnp.tanh(x @ m["w"]), lambda x: jnp.sin(x @ m["v"]), x),
            "w44 v44"),
    "cond that returns parameters": of_arrays(lambda m, x: x @ lax.cond(
        x[0, 0] > 0, lambda: m["w"], lambda: m["v"]), "w44 v44"),
    "cond and outside": of_arrays(lambda m, x: lax.cond(
        x[0, 0] > 0, lambda x: jnp.tanh(x @ m["w"]), jnp.sin, x) @ m["w"], "w44"),
    "switch": of_arrays(lambda m, i, x: lax.switch(i, [
        lambda x: x @ m["w"], lambda x: jnp.tanh(x @ m["v"]), lambda x: x * m["b"]], x),
        "w44 v44 b4", Rows(3), (3, 4)),
    "cond in a scan": of_arrays(lambda m, x: lax.scan(lambda h, x: (lax.cond(
        x[0] > 0, lambda h: jnp.tanh(h @ m["w"] + x), lambda h: jnp.sin(h @ m["v"]), h), h),
        x[0], x)[1], "w44 v44"),
    "carried and changed": of_arrays(lambda m, x: lax.scan(
        lambda w, x: (w + 0.1 * jnp.outer(x, x @ w), x @ w), m["w"], x)[1], "w44"),
    "checkpointed loop": of_arrays(by_equinox, "w44"),
    "loop as long as data takes": of_arrays(until_small, "w44"),
    "solved by iteration": of_arrays(solved, "w44"),
}  # fmt: skip

RULES: Table = {
    "custom vjp": of_arrays(lambda m, x: product(m["w"], x), "w44"),
    "custom vjp in a scan": of_arrays(lambda m, x: lax.scan(
        lambda h, w: (product(w, h), None), x, m["e"])[0], "e344"),
    "custom jvp": of_arrays(lambda m, x: bend(m["w"], x), "w44"),
    "reversed gradient of parameters": of_arrays(
        lambda m, x: x @ reverses(m["w"]) + x @ m["w"] ** 2, "w44"),
    "filtered custom vjp": of_arrays(lambda m, x: filtered(m, lax.stop_gradient(x)), "w44 b4"),
    "named, saved": of_arrays(jax.checkpoint(lambda m, x: jnp.sin(checkpoint_name(
        jnp.tanh(x @ m["w"]), "kept") @ checkpoint_name(m["v"], "kept")), policy=SAVE_NAMED),
        "w44 v44"),
    "named, saved in a scan": of_arrays(lambda m, x: lax.scan(jax.checkpoint(
        lambda h, w: (jnp.tanh(checkpoint_name(h @ w, "kept")), None), policy=SAVE_NAMED),
        x, m["e"])[0], "e344"),
    "leaves a checkpoint": of_arrays(lambda m, x: x @ jax.checkpoint(lambda w: w.T)(m["w"]), "w44"),
}  # fmt: skip

OTHERS: Table = {
    "tuned inside": of_arrays(tuned_inside, "w44 b4"),
    "gradient of inputs": of_arrays(lambda m, x: jax.grad(lambda x: energy(m, x))(x), "w44 b4"),
    "vmap over parameters": of_arrays(lambda m, x: jax.vmap(
        lambda w, b: lax.scan(lambda h, x: (jnp.tanh(h @ w + x) * b, h), x[0], x)[1])(
        m["e"], m["a"]), "e344 a3"),
}  # fmt: skip
