"""Programs drawn at random, in which one parameter is used several times as a matrix."""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

TOKENS, WIDTH = 3, 4

View = Callable[[Array], Array]
Op = Callable[[Array, Array, Array], Array]


class Form(NamedTuple):
    """A parameter, the parts of it that programs use, and in what ways they do."""

    shape: tuple[int, ...]
    views: dict[str, View]
    ops: Literal["matrix", "stack", "lookup"] = "matrix"


FORMS = {
    "square": Form((4, 4), {"w": lambda w: w}),
    "wide": Form((4, 6), {"w": lambda w: w, "twice reversed": lambda w: w[::-1][::-1]}),
    "table": Form((9, 4), {"w": lambda w: w}),
    "looked up": Form((5, 4), {"w": lambda w: w}, "lookup"),
    "flat": Form((24,), {"(4, 6)": lambda w: w.reshape(4, 6), "(6, 4)": lambda w: w.reshape(6, 4)}),
    "folded": Form((4, 2, 3), {"reshape": lambda w: w.reshape(4, 6)}),
    "reversed": Form((4, 4), {"[::-1]": lambda w: w[::-1], "rev": lambda w: lax.rev(w, (0,))}),
    "rows": Form(
        (8, 4),
        {
            "[:4]": lambda w: w[:4],
            "[4:]": lambda w: w[4:],
            "split": lambda w: jnp.split(w, 2)[0],
            "reshape": lambda w: w.reshape(2, 4, 4)[1],
        },
    ),
    "columns": Form((4, 8), {"[:, :4]": lambda w: w[:, :4], "[:, 4:]": lambda w: w[:, 4:]}),
    "slices that overlap": Form(
        (6, 4),
        {
            "[1:5]": lambda w: w[1:5],
            "[:5][1:]": lambda w: w[:5][1:],
            "[2:6]": lambda w: w[2:6],
            "[:1]": lambda w: w[:1],
        },
    ),
    "slices of a stack": Form(
        (2, 4, 4),
        {
            "[0]": lambda w: w[0],
            "[1]": lambda w: w[1],
            "split": lambda w: jnp.split(w, 2)[0][0],
        },
    ),
    "stack": Form((2, 4, 4), {"w": lambda w: w}, "stack"),
    "stack in a matrix": Form((8, 4), {"reshape": lambda w: w.reshape(2, 4, 4)}, "stack"),
}  # fmt: skip


def _over_time(m: Array, h: Array, t: Array, reverse: bool = False) -> Array:
    def step(state: Array, now: Array) -> tuple[Array, Array]:
        state = jnp.tanh(now @ m + state)
        return state, state

    return lax.scan(step, jnp.zeros_like(h, shape=m.shape[1:]), h, reverse=reverse)[1]


def _again(m: Array, h: Array, t: Array) -> Array:
    return lax.fori_loop(0, 2, lambda _, h: jnp.sin(fitted(h, len(m)) @ m), fitted(h, m.shape[1]))


def _one_row(m: Array, h: Array, t: Array) -> Array:
    return lax.dynamic_index_in_dim(m, t[0]) * jnp.cos(fitted(h, m.shape[1]))


# What is made of tokens `(time, in)` by a matrix `(in, out)`: tokens `(time, out)`.
MATRIX_OPS: dict[str, Op] = {
    "product": lambda m, h, t: h @ m,
    "from the left": lambda m, h, t: (m.T @ h.T).T,
    "two contracted": lambda m, h, t: (
        jnp.tensordot(fold(h), m.reshape(2, -1, m.shape[1]), 2) if len(m) % 2 == 0 else h @ m
    ),
    "two free": lambda m, h, t: (
        jnp.einsum("tk,kab->tab", h, fold(m)).reshape(len(h), -1) if m.shape[1] % 2 == 0 else h @ m
    ),
    "convolution": lambda m, h, t: lax.conv(h.T[None], m.T[:, :, None], (1,), "SAME")[0].T,
    "lookup": lambda m, h, t: m[t % len(m)] * jnp.cos(fitted(h, m.shape[1])),
    "lookup that drops": lambda m, h, t: (
        m.at[t].get(mode="fill", fill_value=0) + fitted(h, m.shape[1])
    ),
    "one row": _one_row,
    "time": _over_time,
    "time, reversed": functools.partial(_over_time, reverse=True),
    "again": _again,
}


def _layers(w: Array, h: Array, t: Array, reverse: bool = False) -> Array:
    return lax.scan(lambda h, m: (jnp.sin(h @ m), None), h, w, reverse=reverse)[0]


def _layers_over_time(w: Array, h: Array, t: Array) -> Array:
    def step(state: Array, now: Array) -> tuple[Array, Array]:
        state = _layers(w, jnp.tanh(state + now), t)
        return state, state

    return lax.scan(step, jnp.zeros_like(h[0]), h)[1]


def _groups(w: Array, h: Array, t: Array) -> Array:
    return jnp.sum(jnp.einsum("gtk,gkp->gtp", jnp.stack([h, jnp.sin(h + 1)]), w), axis=0)


def _looked_up_layers(w: Array, h: Array, t: Array) -> Array:
    return lax.scan(lambda h, m: (h * m[t % len(m)], None), h, w)[0]


# The same by a stack of square matrices.
STACK_OPS: dict[str, Op] = {
    "layers": _layers,
    "layers, reversed": functools.partial(_layers, reverse=True),
    "layers over time": _layers_over_time,
    "groups": _groups,
    "lookups": _looked_up_layers,
}

OPS = {
    "matrix": MATRIX_OPS,
    "stack": STACK_OPS,
    "lookup": {name: op for name, op in MATRIX_OPS.items() if "look" in name or "row" in name},
}

BENDS: dict[str, Callable[[Array, Array], Array]] = {
    "sin": lambda y, h: jnp.sin(y),
    "gate": lambda y, h: y * jnp.cos(h),
    "residual": lambda y, h: h + jnp.tanh(y),
}

WRAPS: dict[str, Callable[[Op], Op]] = {
    "": lambda op: op,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "remat in jit": lambda op: jax.jit(jax.checkpoint(op)),
}


def fold(h: Array) -> Array:
    """Takes the last axis apart in two."""
    return h.reshape(len(h), 2, -1)


def fitted(h: Array, width: int) -> Array:
    """Tokens of another width."""
    return jnp.tile(h, (1, -(-width // h.shape[1])))[:, :width]


class Use(NamedTuple):
    """One step of a program."""

    view: str
    op: str
    is_transposed: bool
    is_negative: bool
    wrap: str
    bend: str


class CrossProgram(NamedTuple):
    """A program of one parameter; equal ones are the same."""

    form: str
    uses: tuple[Use, ...]

    def __call__(self, copies: list[Array], x: Array, t: Array) -> Array:
        """The outputs for one example, of a copy of the parameter for each use."""
        form, h = FORMS[self.form], x
        for use, w in zip(self.uses, copies, strict=True):
            m = form.views[use.view](w)
            m = jnp.swapaxes(m, -1, -2) if use.is_transposed else m
            m = -m if use.is_negative else m
            y = WRAPS[use.wrap](OPS[form.ops][use.op])(m, fitted(h, m.shape[-2]), t)
            h = BENDS[use.bend](y, fitted(h, m.shape[-1]))
        return h


def drawn(rng: np.random.Generator) -> CrossProgram:
    """A program with two or three uses, seldom four."""

    def one(of: dict[str, object]) -> str:
        return list(of)[rng.integers(len(of))]

    name = one(FORMS)
    form = FORMS[name]
    uses = tuple(
        Use(
            one(form.views),
            one(OPS[form.ops]),
            form.ops != "lookup" and bool(rng.integers(2)),
            bool(rng.integers(2)),
            one(WRAPS) if rng.integers(3) == 0 else "",
            one(BENDS),
        )
        for _ in range(rng.choice([2, 2, 2, 2, 3, 3, 4]))
    )
    return CrossProgram(name, uses)


def batch_of(seed: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, rows and cotangents, examples in front."""
    rng = np.random.default_rng(seed)
    x, cotangents = rng.normal(size=(2, size, TOKENS, WIDTH))
    return x, rng.integers(0, WIDTH + 2, (size, TOKENS)).astype(np.int32), cotangents
