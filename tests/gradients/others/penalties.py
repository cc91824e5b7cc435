"""Terms of a loss that depend on parameters alone, or on hardly anything else."""

import jax
import jax.numpy as jnp
import optax
from jax import lax

from tests.gradients.engine.layers import bent
from tests.gradients.others.cases import of_arrays


def fit(m, x):
    return bent(lambda: jnp.tanh(x @ m["w"] + m["b"]) @ m["v"])


def squares(tree):
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))


def orthogonality(w):
    return jnp.sum((w.T @ w - jnp.eye(w.shape[1], dtype=w.dtype)) ** 2)


def in_a_scan(m, x):
    """Each layer adds the term of its own weights."""

    def layer(carry, w):
        h, penalty = carry
        return (jnp.tanh(h @ w), penalty + jnp.sum(w**2)), None

    (h, penalty), _ = lax.scan(layer, (x, jnp.zeros((), x.dtype)), m["e"])
    return bent(lambda: h) + 0.1 * penalty


def at_every_step(m, x):
    def step(h, x):
        return jnp.tanh(h @ m["w"] + x), 0.1 * jnp.sum(m["w"] ** 2) + jnp.sum(h)

    return jnp.sum(lax.scan(step, x[0], x)[1])


# Terms of the model `fit` has, beside its own loss.
TERMS = {
    "squares of one": lambda m: 0.1 * jnp.sum(m["w"] ** 2),
    "squares of all": lambda m: 0.1 * squares(m),
    "squares by product": lambda m: 0.1 * jnp.sum(m["w"] * m["w"]),
    "squares by vdot": lambda m: 0.1 * jnp.vdot(m["w"], m["w"]),
    "squares by optax": lambda m: 0.1 * optax.tree.norm(m, squared=True),
    "norm of all": lambda m: optax.tree.norm(m),
    "norm of each": lambda m: sum(jnp.linalg.norm(x) for x in jax.tree.leaves(m)),
    "norms of rows": lambda m: jnp.sum(jnp.linalg.norm(m["w"], axis=1)),
    "absolutes": lambda m: 0.1 * sum(jnp.sum(jnp.abs(x)) for x in jax.tree.leaves(m)),
    "elastic net": lambda m: 0.1 * squares(m) + 0.1 * jnp.sum(jnp.abs(m["w"])),
    "sum": lambda m: jnp.sum(m["w"]) + jnp.mean(m["b"]),
    "orthogonality": lambda m: 0.1 * orthogonality(m["w"]),
    "orthogonality of all": lambda m: 0.1 * (orthogonality(m["w"]) + orthogonality(m["v"])),
    "log determinant": lambda m: jnp.linalg.slogdet(m["w"])[1],
    "nuclear norm": lambda m: jnp.sum(jnp.linalg.svd(m["w"], compute_uv=False)),
    "entropy": lambda m: jnp.sum(jax.nn.softmax(m["b"]) * jax.nn.log_softmax(m["b"])),
    "largest": lambda m: jnp.max(jnp.abs(m["w"])),
    "two that meet": lambda m: jnp.sum(m["w"] * m["v"]),
    "parameters alike": lambda m: 0.1 * jnp.sum((m["w"] - m["v"]) ** 2),
    "barrier": lambda m: -jnp.sum(jax.nn.log_sigmoid(m["w"])),
    "smooth": lambda m: jnp.sum(jnp.diff(m["w"], axis=0) ** 2),
    "stopped": lambda m: lax.stop_gradient(squares(m)),
    "huge": lambda m: 1e6 * squares(m),
    "tiny": lambda m: 1e-12 * squares(m),
    "jit": lambda m: jax.jit(squares)(m),
    "remat": lambda m: jax.checkpoint(squares)(m),
    "twice": lambda m: squares(m) + 0.5 * jnp.sum(m["w"] ** 4),
    "in a cond on itself": lambda m: lax.cond(m["b"][0] > 0, squares, lambda m: jnp.sum(m["w"]), m),
    "by vmap": lambda m: jnp.sum(jax.vmap(jnp.vdot)(m["w"], m["v"])),
    "in a loop": lambda m: lax.fori_loop(0, 3, lambda i, p: p + jnp.sum(m["w"] ** 2),
        0 * m["b"][0]),
    "masked": lambda m: jnp.sum(jnp.where(jnp.arange(4) > 1, m["b"], 0) ** 2),
}  # fmt: skip

# Those that do not stand for themselves.
WITHIN = {
    "proximal": (lambda m, x: fit(m, x) + 0.3 * jnp.sum((m["w"] - m["a"]) ** 2), "w44 b4 v44 a44"),
    "consolidation": (
        lambda m, x: fit(m, x) + 0.3 * jnp.sum(m["c"] ** 2 * (m["w"] - m["a"]) ** 2),
        "w44 b4 v44 a44 c44",
    ),
    "weighted by data": (lambda m, x: fit(m, x) + jnp.mean(x**2) * squares(m), "w44 b4 v44"),
    "times the loss": (lambda m, x: fit(m, x) * (1 + squares(m)), "w44 b4 v44"),
    "under a root": (lambda m, x: jnp.sqrt(fit(m, x) ** 2 + squares(m)), "w44 b4 v44"),
    "divided by": (lambda m, x: fit(m, x) / squares(m), "w44 b4 v44"),
    "in a cond by data": (
        lambda m, x: fit(m, x) + lax.cond(x[0, 0] > 0, squares, lambda m: 0 * m["b"][0], m),
        "w44 b4 v44",
    ),
    "selected by data": (
        lambda m, x: fit(m, x) + jnp.where(x[0, 0] > 0, squares(m), 0), "w44 b4 v44",
    ),
    "largest of both": (lambda m, x: jnp.maximum(fit(m, x), squares(m)), "w44 b4 v44"),
    "per token": (
        lambda m, x: jnp.sum(jax.vmap(lambda x: jnp.sum(jnp.tanh(x @ m["w"])) + squares(m))(x)),
        "w44",
    ),
    "in a scan": (in_a_scan, "e344"),
    "at every step": (at_every_step, "w44"),
    "of what the data uses not": (lambda m, x: fit(m, x) + squares(m["z"]), "w44 b4 v44 z3"),
    "nothing else": (lambda m, x: squares(m) + 0 * jnp.sum(x), "w44 b4"),
    "nothing else, no data": (lambda m, x: squares(m), "w44 b4"),
    "divergence of a posterior": (
        lambda m, x: bent(lambda: x @ (m["w"] + 0.1 * jnp.exp(m["c"])))
        + 0.5 * jnp.sum(m["w"] ** 2 + jnp.exp(2 * m["c"]) - 2 * m["c"] - 1),
        "w44 c44",
    ),
    "of a derived weight": (
        lambda m, x: (lambda w: bent(lambda: x @ w) + orthogonality(w))(jnp.tanh(m["w"])), "w44",
    ),
    "against the data": (
        # At tokens that are zero but for a few, next to nothing of some gradients is left.
        lambda m, x: jnp.sum((x @ m["w"]) ** 2) / 2 - jnp.sum(jnp.mean(x**2) * m["w"] ** 2) / 2,
        "w44",
    ),
    "target that moves": (
        lambda m, x: jnp.sum((fit(m, x) - lax.stop_gradient(fit(m, jnp.cos(x)))) ** 2),
        "w44 b4 v44",
    ),
    "target of other parameters": (
        lambda m, x: (fit(m, x) - lax.stop_gradient(jnp.sum(jnp.tanh(x @ m["a"])))) ** 2,
        "w44 b4 v44 a44",
    ),
}  # fmt: skip


def _beside(term):
    return lambda m, x: fit(m, x) + term(m)


CASES = (
    *(
        of_arrays(f"penalty: {name}", _beside(term), "w44 b4 v44", loss=True)
        for name, term in TERMS.items()
    ),
    *(
        of_arrays(
            f"penalty: {name}",
            use,
            shapes,
            loss=True,
            frozen="ac" if name in ("proximal", "consolidation") else "",
        )
        for name, (use, shapes) in WITHIN.items()
    ),
)
