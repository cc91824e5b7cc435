"""Weights that are computed from parameters alone, and terms of a loss that depend on no data."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from tests.gradients.cases.tables import Rows, Table, bent, of_arrays

MASK = (np.tril(np.ones((4, 4)), -1) + np.eye(4)[::-1]).astype(np.float32)


@jax.custom_vjp
def rounded(w: Array) -> Array:
    """Rounds; gradients pass as if it did not."""
    return jnp.round(4 * w) / 4


rounded.defvjp(lambda w: (rounded(w), None), lambda _, g: (g,))


def norm(w, axis=None):
    return jnp.sqrt(jnp.sum(w**2, axis, keepdims=True))


# From two matrices, a vector and a number to a matrix that tokens are multiplied with.
_WEIGHTS = {
    "mask": lambda m: m["w"] * MASK,
    "set": lambda m: m["w"].at[jnp.arange(4), jnp.arange(4)].set(0),
    "concatenate": lambda m: jnp.concatenate([m["w"], m["v"]], 1),
    "scaled by exp": lambda m: m["w"] * jnp.exp(m["s"]),
    "weight norm": lambda m: m["b"] * m["w"] / norm(m["w"], 0),
    "cayley": lambda m: jnp.linalg.solve(
        jnp.eye(4, dtype=m["w"].dtype) + m["w"] - m["w"].T, m["v"]
    ),
    "straight through": lambda m: m["w"] + lax.stop_gradient(jnp.round(m["w"]) - m["w"]),
    "quantised": lambda m: rounded(m["w"]) * jnp.exp(m["s"]),
    "hypernetwork": lambda m: (jnp.tanh(m["b"] @ m["w"]) @ m["v"])[:, None] * m["w"],
    "scanned": lambda m: lax.scan(lambda c, w: (c + jnp.tanh(w), c * w), m["b"], m["w"])[1],
    "in a cond on itself": lambda m: lax.cond(m["s"] > 0, jnp.sin, jnp.cos, m["w"]),
    "remat": lambda m: jax.checkpoint(lambda w, v: jnp.exp(w) * v)(m["w"], m["v"]),
    "nothing": lambda m: 0 * m["w"] + m["v"],
}  # fmt: skip


def _product(weight):
    return of_arrays(lambda m, x: jnp.tanh(x) @ weight(m), "w44 v44 b4 s")


DERIVED: Table = {name: _product(weight) for name, weight in _WEIGHTS.items()}

# What parameters become is met otherwise than by one product.
MET: Table = {
    "fused bias": of_arrays(lambda m, x: jnp.pad(x, ((0, 0), (0, 1)), constant_values=1)
        @ jnp.concatenate([m["w"], m["b"][None]]), "w44 b4"),
    "tied, masked": of_arrays(
        lambda m, x: jnp.tanh(x @ (m["w"] * MASK)) @ (m["w"] * MASK).T, "w44"),
    "complex": of_arrays(lambda m, x: jnp.real(
        lax.complex(x, jnp.cos(x)) @ lax.complex(m["w"], m["v"])), "w44 v44"),
    "mask by data": of_arrays(lambda m, x: x[0] @ (m["w"] * (x[0][:, None] > 0)), "w44"),
    "stopped target": of_arrays(lambda m, x: (
        x @ m["w"] - lax.stop_gradient(jnp.sin(x) @ m["w"])) ** 2, "w44"),
    "low rank, frozen": of_arrays(
        lambda m, x: x @ (m["w"] + m["a"] @ m["c"]), "w44 a42 c24", frozen="w"),
    "low rank, beside a frozen one": of_arrays(
        lambda m, x: x @ m["w"] + x @ m["a"] @ m["c"], "w44 a42 c24", frozen="w"),
    "layers, masked": of_arrays(lambda m, x: lax.scan(
        lambda h, w: (jnp.tanh(h @ (w * MASK)), None), x, m["e"])[0], "e344"),
    "lookup, derived": of_arrays(
        lambda m, t: (jnp.exp(m["w"]) * MASK)[t], "w44", Rows(4, (3,))),
    "rows added to a table": of_arrays(
        lambda m, t, x: m["w"].at[t].add(x), "w54", Rows(5, (3,)), (3, 4)),
    "matrices looked up": of_arrays(lambda m, t, x: jnp.einsum(
        "tk,tkp->tp", x, m["e"][t]), "e344", Rows(3, (3,)), (3, 4)),
}  # fmt: skip


# Terms of a loss.


def fit(m, x):
    return bent(lambda: jnp.tanh(x @ m["w"] + m["b"]) @ m["v"])


def squares(tree):
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))


def in_a_scan(m, x):
    """Each layer adds the term of its own weights."""

    def layer(carry, w):
        h, penalty = carry
        return (jnp.tanh(h @ w), penalty + jnp.sum(w**2)), None

    (h, penalty), _ = lax.scan(layer, (x, jnp.zeros((), x.dtype)), m["e"])
    return bent(lambda: h) + 0.1 * penalty


_TERMS = {
    "squares": lambda m, x: fit(m, x) + 0.1 * squares(m),
    "two that meet": lambda m, x: fit(m, x) + jnp.sum(m["w"] * m["v"]),
    "times the loss": lambda m, x: fit(m, x) * (1 + squares(m)),
    "in a cond by data": lambda m, x: fit(m, x) + lax.cond(
        x[0, 0] > 0, squares, lambda m: 0 * m["b"][0], m),
    "nothing else": lambda m, x: squares(m) + 0 * jnp.sum(x),
    "against the data": lambda m, x: (
        jnp.sum((x @ m["w"]) ** 2) / 2 - jnp.sum(jnp.mean(x**2) * m["w"] ** 2) / 2),
}  # fmt: skip

TERMS: Table = {
    **{name: of_arrays(loss, "w44 b4 v44", loss=True) for name, loss in _TERMS.items()},
    "in a scan": of_arrays(in_a_scan, "e344", loss=True),
}
