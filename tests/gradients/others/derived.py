"""Weights that are computed from parameters alone."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from tests.gradients.others.cases import Rows, of_arrays

MASK = (np.tril(np.ones((4, 4)), -1) + np.eye(4)[::-1]).astype(np.float32)
KEPT = MASK > 0


@jax.custom_vjp
def rounded(w: Array) -> Array:
    """Rounds; gradients pass as if it did not."""
    return jnp.round(4 * w) / 4


rounded.defvjp(lambda w: (rounded(w), None), lambda _, g: (g,))


@jax.custom_jvp
def signs(w: Array) -> Array:
    return jnp.where(w > 0, 1.0, -1.0).astype(w.dtype)


signs.defjvp(lambda w, dw: (signs(*w), dw[0] * (abs(w[0]) < 1)))


def norm(w, axis=None):
    return jnp.sqrt(jnp.sum(w**2, axis, keepdims=True))


def spectral(w, through):
    u = jnp.ones_like(w[0])
    for _ in range(3):
        v = w @ u
        u = w.T @ (v / norm(v))
        u = u / norm(u)
    u = u if through else lax.stop_gradient(u)
    return w / norm(w @ u)


def spectral_in_a_loop(w):
    def step(_, u):
        v = w.T @ (w @ u)
        return v / norm(v)

    u = lax.fori_loop(0, 3, step, jnp.ones_like(w[0]))
    return w / norm(w @ u)


def spline(w, x):
    """A piecewise linear map whose knots and slopes are a parameter's softmax and softplus."""
    knots = jnp.cumsum(jax.nn.softmax(w[0])) * 4 - 2
    slopes = jax.nn.softplus(w[1])
    return jnp.sum(slopes * jax.nn.relu(x[..., None] - knots), -1)


# From two matrices, a vector and a number to a matrix that tokens are multiplied with.
WEIGHTS = {
    "mask": lambda m: m["w"] * MASK,
    "mask of bools": lambda m: m["w"] * KEPT,
    "where": lambda m: jnp.where(KEPT, m["w"], 0),
    "where, other": lambda m: jnp.where(KEPT, m["w"], m["v"]),
    "tril": lambda m: jnp.tril(m["w"]),
    "triangular": lambda m: jnp.tril(m["w"], -1) + jnp.eye(4, dtype=m["w"].dtype),
    "triangular and diagonal": lambda m: jnp.triu(m["w"], 1) + jnp.diag(jnp.exp(m["b"])),
    "diagonal": lambda m: jnp.diag(m["b"]),
    "set": lambda m: m["w"].at[jnp.arange(4), jnp.arange(4)].set(0),
    "concatenate": lambda m: jnp.concatenate([m["w"], m["v"]], 1),
    "stack": lambda m: jnp.stack([m["w"], m["v"]], 1).reshape(4, 8),
    "blocks": lambda m: jnp.block([[m["w"], m["v"]], [m["v"].T, m["w"]]])[:4],
    "padded": lambda m: jnp.pad(m["w"][1:], ((0, 1), (2, 0))),
    "with itself": lambda m: jnp.concatenate([m["w"], m["w"].T], 1),
    "with constants": lambda m: jnp.concatenate([m["w"][:3], jnp.ones((1, 4), m["w"].dtype)]),
    "rolled": lambda m: jnp.roll(m["w"], 1, 0) + jnp.flip(m["w"], 1),
    "circulant": lambda m: m["b"][(np.arange(4)[:, None] - np.arange(4)) % 4],
    "toeplitz": lambda m: m["w"].ravel()[np.arange(4)[:, None] + np.arange(4)],
    "exp": lambda m: jnp.exp(m["w"]),
    "exp, masked": lambda m: jnp.exp(m["w"]) * MASK + m["v"] * (1 - MASK),
    "softplus": lambda m: jax.nn.softplus(m["w"]),
    "abs": lambda m: jnp.abs(m["w"]),
    "square": lambda m: m["w"] ** 2,
    "product with itself": lambda m: m["w"] * m["w"],
    "product": lambda m: m["w"] * m["v"],
    "quotient": lambda m: m["w"] / (2 + jnp.cos(m["v"])),
    "sum": lambda m: m["w"] + m["v"],
    "difference": lambda m: m["w"] - m["v"].T,
    "maximum": lambda m: jnp.maximum(m["w"], m["v"]),
    "clipped": lambda m: jnp.clip(m["w"], -0.5, 0.5),
    "scaled": lambda m: m["s"] * m["w"],
    "scaled by exp": lambda m: m["w"] * jnp.exp(m["s"]),
    "centred": lambda m: m["w"] - jnp.mean(m["w"], 0),
    "standardised": lambda m: (m["w"] - jnp.mean(m["w"], 0)) / (jnp.std(m["w"], 0) + 1e-3),
    "weight norm": lambda m: m["b"] * m["w"] / norm(m["w"], 0),
    "weight norm of rows": lambda m: m["b"][:, None] * m["w"] / norm(m["w"], 1),
    "weight norm, masked": lambda m: (
        jnp.exp(m["b"]) * (m["w"] * MASK) / (norm(m["w"] * MASK, 0) + 0.1)
    ),
    "spectral": lambda m: spectral(m["w"], True),
    "spectral, stopped": lambda m: spectral(m["w"], False),
    "spectral in a loop": lambda m: spectral_in_a_loop(m["w"]),
    "low rank": lambda m: m["w"][:, :2] @ m["v"][:2],
    "low rank and diagonal": lambda m: m["w"][:, :1] @ m["v"][:1] + jnp.diag(m["b"]),
    "merged": lambda m: m["w"] + 0.5 * (m["v"][:, :2] @ m["v"][2:]),
    "outer": lambda m: jnp.outer(m["b"], m["w"][0]),
    "kronecker": lambda m: jnp.kron(m["w"][:2, :2], m["v"][:2, :2]),
    "gram": lambda m: m["w"].T @ m["w"],
    "expm": lambda m: jax.scipy.linalg.expm(m["w"] - m["w"].T),
    "cayley": lambda m: jnp.linalg.solve(
        jnp.eye(4, dtype=m["w"].dtype) + m["w"] - m["w"].T, m["v"]
    ),
    "qr": lambda m: jnp.linalg.qr(m["w"])[0],
    "cholesky": lambda m: jnp.linalg.cholesky(m["w"] @ m["w"].T + 2 * jnp.eye(4,
        dtype=m["w"].dtype)),
    "mixed": lambda m: jnp.einsum("e,eij->ij", jax.nn.softmax(m["b"][:2]), jnp.stack([m["w"],
        m["v"]])),
    "attends to itself": lambda m: jax.nn.softmax(m["w"] @ m["v"].T) @ m["v"],
    "straight through": lambda m: m["w"] + lax.stop_gradient(jnp.round(m["w"]) - m["w"]),
    "quantised": lambda m: rounded(m["w"]) * jnp.exp(m["s"]),
    "binary": lambda m: signs(m["w"]) * jnp.mean(jnp.abs(m["w"])),
    "hypernetwork": lambda m: (jnp.tanh(m["b"] @ m["w"]) @ m["v"])[:, None] * m["w"],
    "cumulative": lambda m: jnp.cumsum(jax.nn.softplus(m["w"]), 1),
    "sorted": lambda m: jnp.sort(m["w"], 1),
    "scanned": lambda m: lax.scan(lambda c, w: (c + jnp.tanh(w), c * w), m["b"], m["w"])[1],
    "in a cond on itself": lambda m: lax.cond(m["s"] > 0, jnp.sin, jnp.cos, m["w"]),
    "remat": lambda m: jax.checkpoint(lambda w, v: jnp.exp(w) * v)(m["w"], m["v"]),
    "jit": lambda m: jax.jit(lambda w: (w.T, jnp.exp(w)))(m["w"])[1],
    "nothing": lambda m: 0 * m["w"] + m["v"],
    "unused on the way": lambda m: m["w"] + 0 * lax.stop_gradient(m["v"]),
    "integers": lambda m: m["w"] * m["v"].astype(jnp.int32).astype(m["w"].dtype),
}  # fmt: skip


def _product(name, weight):
    return of_arrays(f"weights: {name}", lambda m, x: jnp.tanh(x) @ weight(m), "w44 v44 b4 s")


# Of parameters and data: what parameters become is met otherwise than by one product.
OTHERS = {
    "bias of a sum": (lambda m, x: x + m["w"].sum(0), "w44"),
    "shift by exp": (lambda m, x: x * jnp.exp(m["b"]) + jnp.sin(m["c"]), "b4 c4"),
    "temperature": (lambda m, x: jax.nn.log_softmax(x @ m["w"] * jnp.exp(m["s"])), "w44 s"),
    "fused bias": (lambda m, x: jnp.pad(x, ((0, 0), (0, 1)), constant_values=1)
        @ jnp.concatenate([m["w"], m["b"][None]]), "w44 b4"),
    "token in front": (lambda m, x: jnp.concatenate([m["a"], x]) @ m["w"], "a24 w44"),
    "token in front, broadcast": (
        lambda m, x: jnp.concatenate([jnp.broadcast_to(m["b"], (2, 4)), x]) @ m["w"], "b4 w44"),
    "learned queries": (
        lambda m, x: jax.nn.softmax((m["a"] @ m["w"]) @ (x @ m["v"]).T) @ x, "a24 w44 v44"),
    "tied": (lambda m, x: jnp.tanh(x @ m["w"] + m["b"]) @ m["w"].T, "w43 b3"),
    "tied, masked": (lambda m, x: jnp.tanh(x @ (m["w"] * MASK)) @ (m["w"] * MASK).T, "w44"),
    "tied, one masked": (lambda m, x: jnp.tanh(x @ (m["w"] * MASK)) @ m["w"], "w44"),
    "tied, exp": (lambda m, x: jnp.tanh(x @ jnp.exp(m["w"])) @ jnp.exp(m["w"]).T, "w44"),
    "tied, both ways": (lambda m, x: jnp.tanh(x @ m["w"]) @ jnp.exp(m["w"]).T, "w44"),
    "shared scale": (lambda m, x: jnp.tanh(x @ (m["s"] * m["w"])) @ (m["s"] * m["v"]), "w44 v44 s"),
    "scale and rows": (lambda m, x: x * m["w"][0] + x @ m["w"], "w44"),
    "complex": (lambda m, x: jnp.real(lax.complex(x, jnp.cos(x)) @ lax.complex(m["w"], m["v"])),
        "w44 v44"),
    "complex by sum": (lambda m, x: jnp.abs(x @ (m["w"] + 1j * m["v"])) ** 2, "w44 v44"),
    "complex by cast": (lambda m, x: jnp.imag((x + 1j * jnp.sin(x)) @ (m["w"] + 0j)), "w44"),
    "spectral convolution": (
        lambda m, x: jnp.fft.irfft(jnp.fft.rfft(x) * lax.complex(m["a"], m["c"]), 4), "a3 c3"),
    "filter in frequency": (
        lambda m, x: jnp.real(jnp.fft.ifft(jnp.fft.fft(x) * jnp.fft.fft(m["b"]))), "b4"),
    "phases": (lambda m, x: jnp.real(jnp.exp(1j * m["b"]) * (x + 1j * x**2)), "b4"),
    "recurrent, complex": (lambda m, x: jnp.real(lax.associative_scan(
        lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]),
        (jnp.broadcast_to(jnp.exp(-jnp.exp(m["b"]) + 1j * m["c"]), x.shape), x + 0j))[1]), "b4 c4"),
    "learned frequencies": (lambda m, x: jnp.sin(x[..., None] * m["b"] * jnp.pi), "b4"),
    "learned power": (lambda m, x: (jnp.abs(x) + 0.1) ** jnp.exp(m["b"]), "b4"),
    "learned start": (lambda m, x: lax.scan(
        lambda h, x: (jnp.tanh(h @ m["w"] + x), h), m["b"], x)[1], "w44 b4"),
    "learned start, tied": (lambda m, x: lax.scan(
        lambda h, x: (jnp.tanh(h @ m["w"] + x), h), m["w"][0], x)[1], "w44"),
    "spline": (lambda m, x: spline(m["a"], x), "a25"),
    "gate": (lambda m, x: jax.nn.sigmoid(m["b"]) * x + jax.nn.sigmoid(-m["b"]) * jnp.sin(x), "b4"),
    "swish": (lambda m, x: x * jax.nn.sigmoid(m["b"] * x), "b4"),
    "snake": (lambda m, x: x + jnp.sin(m["b"] * x) ** 2 / (m["b"] ** 2 + 1), "b4"),
    "prelu": (lambda m, x: jnp.where(x > 0, x, m["s"] * x), "s"),
    "chosen by data": (lambda m, x: jnp.where(x[:, :1] > 0, m["b"], m["c"]) * x, "b4 c4"),
    "mask by data": (lambda m, x: x[0] @ (m["w"] * (x[0][:, None] > 0)), "w44"),
    "stopped target": (lambda m, x: (x @ m["w"] - lax.stop_gradient(jnp.sin(x) @ m["w"])) ** 2,
        "w44"),
    "stopped alone": (lambda m, x: x @ lax.stop_gradient(m["w"]) + x * m["b"], "w44 b4"),
    "stopped scale": (lambda m, x: x @ (m["w"] / lax.stop_gradient(norm(m["w"]))), "w44"),
    "low rank beside": (lambda m, x: x @ m["w"] + (x @ m["a"]) @ m["c"], "w44 a42 c24"),
    "low rank merged, frozen": (lambda m, x: x @ (m["w"] + m["a"] @ m["c"]), "w44 a42 c24"),
    "direction and magnitude": (lambda m, x: x @ (
        m["b"] * (m["w"] + m["a"] @ m["c"]) / norm(m["w"] + m["a"] @ m["c"], 0)), "w44 a42 c24 b4"),
    "ensemble": (lambda m, x: jax.vmap(lambda w: jnp.tanh(x @ w))(m["e"]).mean(0), "e344"),
    "ensemble of derived": (
        lambda m, x: jax.vmap(lambda w, s: jnp.tanh(x @ (w * jnp.exp(s))))(m["e"], m["a"]),
            "e344 a3"),
    "kernel standardised": (lambda m, x: lax.conv(
        x[None], (m["k"] - m["k"].mean((1, 2), keepdims=True))
        / (m["k"].std((1, 2), keepdims=True) + 1e-2), (1,), "SAME"), "k232"),
    "kernel masked": (lambda m, x: lax.conv(
        x[None], m["k"] * np.array([1.0, 0.0], np.float32), (1,), "SAME"), "k232"),
    "layers, masked": (lambda m, x: lax.scan(
        lambda h, w: (jnp.tanh(h @ (w * MASK)), None), x, m["e"])[0], "e344"),
    "layers, masked outside": (lambda m, x: lax.scan(
        lambda h, w: (jnp.tanh(h @ w), None), x, m["e"] * MASK)[0], "e344"),
    "layers, scaled": (lambda m, x: lax.scan(
        lambda h, w: (jnp.tanh(h @ (w[0] * jnp.exp(w[1]))), None), x, (m["e"], m["a"]))[0],
            "e344 a3"),
    "layers, shared": (lambda m, x: lax.scan(
        lambda h, w: (jnp.tanh(h @ (m["w"] + w)), None), x, m["e"])[0], "e344 w44"),
    "over time, derived inside": (lambda m, x: lax.scan(
        lambda h, x: (jnp.tanh(h @ jnp.exp(m["w"]) + x), h), x[0], x)[1], "w44"),
    "over time, derived outside": (lambda m, x: (lambda w: lax.scan(
        lambda h, x: (jnp.tanh(h @ w + x), h), x[0], x)[1])(jnp.exp(m["w"])), "w44"),
}  # fmt: skip

CASES = (
    *(_product(name, weight) for name, weight in WEIGHTS.items()),
    *(
        of_arrays(name, use, shapes, frozen="w" if name.endswith("frozen") else "")
        for name, (use, shapes) in OTHERS.items()
    ),
    of_arrays(
        "lookup, derived", lambda m, t: (jnp.exp(m["w"]) * MASK)[t], "w44", Rows(4, (3,))
    ),
    of_arrays("lookup of a concatenation",
        lambda m, t, x: jnp.concatenate([m["w"], m["a"]])[t] * x, "w44 a24", Rows(6, (3,)), (3, 4)),
    of_arrays("lookup, normalised, tied", lambda m, t: (lambda w: jnp.tanh(w[t]) @ w.T)(
        m["w"] / norm(m["w"], 1)), "w54", Rows(5, (3,))),
    of_arrays("window of a table", lambda m, i, x: lax.dynamic_slice_in_dim(
        m["w"], i, 3) * x, "w84", Rows(7), (3, 4)),
    of_arrays("window of a derived table", lambda m, i, x: lax.dynamic_slice_in_dim(
        jnp.sin(m["w"]), i, 3) + x, "w84", Rows(7), (3, 4)),
    of_arrays("rows added to a table", lambda m, t, x: m["w"].at[t].add(x),
        "w54", Rows(5, (3,)), (3, 4)),
    of_arrays("matrices looked up", lambda m, t, x: jnp.einsum("tk,tkp->tp", x, m["e"][t]),
        "e344", Rows(3, (3,)), (3, 4)),
    of_arrays("one hot", lambda m, t, x: jax.nn.one_hot(t, 5, dtype=x.dtype) @ m["w"] * x,
        "w54", Rows(5, (3,)), (3, 4)),
)  # fmt: skip
