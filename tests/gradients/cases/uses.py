"""Every arrangement in which a parameter is multiplied by data, and ways that it gets there.

Each row is a use of one leaf: from the parameter and its data to anything; the parameter's shape;
the data's, or rows.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tests.gradients.cases.tables import of_leaf

TOKENS, WIDTH, WORDS = 4, 6, 9
# Repeated rows, negative ones, and rows that are not there (in a table of four).
ROWS = np.array([[0, 2, 2, 2, 1], [-1, 3, -4, 0, 3], [1, -9, 7, 4, 1]], np.int32)
FOUND = ROWS % 4


def convolve(w, x, strides=None, padding="SAME", **options):
    strides = strides or (1,) * (w.ndim - 2)
    return lax.conv_general_dilated(x, w, strides, padding, **options)


def over_slices(body, reverse=False):
    """Slices of the parameter one after the other: layers that are stacked."""
    return lambda w, x: lax.scan(lambda x, w: (body(w, x), None), x, w, reverse=reverse)[0]


def over_time(body, reverse=False):
    """All of the parameter at every step: a recurrent network."""

    def use(w, x):
        def step(state, now):
            state = body(w, jnp.tanh(state + now))
            return state, state

        return lax.scan(step, x[0], x, reverse=reverse)[1]

    return use


def contract(w, x):
    return jnp.sin(x @ w)


def cut_in_three(w, x):
    q, k, v = (jax.vmap(lambda x, w=w: w @ x)(x) for w in jnp.split(w, 3))
    return jax.nn.softmax(q @ k.T) @ v


def blocks(w, x):
    """Blocks of one matrix: reshaped outside, turned inside, cut again."""
    inner = over_slices(lambda w, x: contract(w.T, x))
    return over_slices(lambda w, x: inner(w.reshape(2, 4, 4), x))(w[1:].reshape(2, 8, 4), x)


OFFSET_IN_FRONT = lax.GatherDimensionNumbers(
    offset_dims=(0, 2), collapsed_slice_dims=(0,), start_index_map=(0,)
)
Shape = tuple[int, ...]
Use = Callable[[Any, Any], Any]

_FACTORED: dict[str, dict[str, tuple[Use, Shape, Any]]] = {
    "contractions": {
        "matrix, vector": (lambda w, x: w @ x, (3, 4), (4,)),
        "tokens": (lambda w, x: x @ w.T, (3, 4), (5, 4)),
        "batched": (
            lambda w, x: lax.dot_general(x, w, (((2,), (2,)), ((1,), (0,)))), (2, 3, 4), (5, 2, 4),
        ),
        "two batch dimensions": (
            lambda w, x: lax.dot_general(w, x, (((2,), (3,)), ((3, 1), (4, 0)))),
            (2, 3, 4, 2), (3, 2, 2, 4, 2),
        ),
        "all contracted": (lambda w, x: jnp.vdot(w, x), (2, 3), (2, 3)),
        "more dimensions than the data": (
            lambda w, x: lax.dot_general(w, x, (((2,), (1,)), ((), ()))), (4, 4, 3), (4, 3),
        ),
        "experts": (lambda w, x: jnp.einsum("eio,tei->teo", w, x), (2, 3, 4), (5, 2, 3)),
        **{f"data of {dtype}": (
            lambda w, t, dtype=dtype: (t[:, None] % np.array([2, 3, 4])).astype(dtype) @ w,
            (3, 4), FOUND,
        ) for dtype in ("bool", "uint8", "int32")},
    },
    "convolutions": {
        "NHWC": (
            lambda w, x: convolve(
                w, x, (1, 2), rhs_dilation=(2, 1), dimension_numbers=("NHWC", "HWIO", "NHWC")
            ), (2, 2, 2, 3), (1, 4, 3, 2),
        ),
        "three dimensions": (
            lambda w, x: lax.conv_general_dilated(
                x, w, (1, 2, 1), [(1, 0), (0, 2), (-1, 1)], (2, 1, 1), (1, 1, 2),
                feature_group_count=2,
            ), (4, 1, 2, 1, 2), (1, 2, 2, 2, 3),
        ),
        "transposed": (
            lambda w, x: lax.conv_transpose(x, w, (2, 1), "SAME", transpose_kernel=True),
            (2, 3, 3, 2), (1, 3, 2, 2),
        ),
        "many images": (
            lambda w, x: jax.vmap(lambda x: convolve(w, x))(x), (3, 2, 2), (2, 1, 2, 4),
        ),
        "a kernel for each": (
            lambda w, x: jax.vmap(convolve)(w, x), (2, 3, 2, 2), (2, 1, 2, 4),
        ),
        "twice": (
            lambda w, x: convolve(w, jnp.sin(convolve(w, x))), (4, 4, 3), (1, 4, 6),
        ),
    },
    "lookups": {
        "take, clip": (lambda w, t: jnp.take(w, t, axis=0, mode="clip"), (4, 3), ROWS),
        "take, wrap": (lambda w, t: jnp.take(w, t, axis=0, mode="wrap"), (4, 3), ROWS),
        **{f"get, {mode}": (
            lambda w, t, mode=mode: w.at[t].get(mode=mode, fill_value=0), (4, 3), rows,
        ) for mode, rows in (("clip", ROWS), ("drop", ROWS), ("promise_in_bounds", FOUND))},
        "filled in": (
            lambda w, t: w.at[7 + 0 * t].get(mode="fill", fill_value=2.0) * w[t], (4, 3), FOUND,
        ),
        "promised to be there": (lambda w, t: w[t], (4, 3), ROWS),
        "vmap": (lambda w, t: jax.vmap(lambda t: w[t])(t), (4, 3), FOUND),
        "offset in front": (
            lambda w, t: lax.gather(w, t[:, None], OFFSET_IN_FRONT, (1, 2, 3), mode="clip"),
            (4, 2, 3), ROWS,
        ),
        "dynamic slice": (
            lambda w, t: lax.dynamic_slice(w, (t[1], 0 * t[1]), (1, 3)), (4, 3), ROWS,
        ),
        "more rows than bytes count": (
            lambda w, t: w.at[t.astype(jnp.uint8)].get(mode="clip"), (300, 2), FOUND,
        ),
        "far beyond": (  # negative ones, if they had a sign
            lambda w, t: w.at[t.astype(jnp.uint32) << 30].get(mode="clip"), (4, 3), FOUND,
        ),
        "slice far beyond": (
            lambda w, t: lax.dynamic_slice_in_dim(w, t[1].astype(jnp.uint32) << 30, 1),
            (4, 3), FOUND,
        ),
        "of a part": (lambda w, t: w.T[1:][t], (5, 5), FOUND),
    },
    "views": {
        "transpose": (lambda w, x: x @ w.T, (4, 3), (2, 3)),
        "squeeze": (lambda w, x: x @ w.squeeze((0, 2)), (1, 3, 1, 4), (2, 3)),
        "rev": (lambda w, x: x @ w[::-1, ::-1], (3, 4), (2, 3)),
        "slice": (lambda w, x: x @ w[1:4, 2:], (5, 6), (2, 3)),
        "all parts": (
            lambda w, x: jnp.tanh(x @ w[:3]) * (x @ w[3:6]) + jnp.sin(x @ w[6:]), (9, 4), (2, 3),
        ),
        "name": (lambda w, x: x @ checkpoint_name(w, "weight"), (3, 4), (2, 3)),
        "jit": (lambda w, x: x @ jax.jit(lambda w: (w[1:], w.T))(w)[1], (4, 3), (2, 3)),
    },
    "scans": {
        "slices, reversed": (over_slices(contract, reverse=True), (3, 4, 4), (2, 4)),
        "time, reversed": (over_time(contract, reverse=True), (4, 4), (3, 2, 4)),
        "time of slices": (over_time(over_slices(contract, reverse=True)), (2, 4, 4), (3, 4)),
        "blocks": (blocks, (5, 16), (4,)),
    },
    "more scans": {
        "kernels": (over_slices(lambda w, x: jnp.sin(convolve(w, x))), (3, 2, 2, 3), (1, 2, 4)),
        "time in time": (over_time(over_time(contract)), (3, 3), (2, 2, 3)),
        "checkpoints": (
            jax.checkpoint(over_slices(jax.checkpoint(
                contract, policy=jax.checkpoint_policies.dots_saveable))), (3, 4, 4), (2, 4),
        ),
    },
    "several uses": {
        "turned": (lambda w, x: contract(w, x) @ w.T, (WIDTH, WORDS), (TOKENS, WIDTH)),
        "embedding and head": (lambda w, t: jnp.tanh(w[t]) @ w.T, (5, 3), FOUND),
        "two lookups": (lambda w, t: w[t] * jnp.sin(w[t[::-1]]), (4, 3), FOUND),
        "time and outside": (
            lambda w, x: over_time(lambda w, x: w @ x)(w, contract(w, x)),
            (WIDTH, WIDTH), (TOKENS, WIDTH),
        ),
        "rows apart": (cut_in_three, (3 * WIDTH, WIDTH), (TOKENS, WIDTH)),
    },
    "more several uses": {
        "same way": (lambda w, x: contract(w, x) @ w, (WIDTH, WIDTH), (TOKENS, WIDTH)),
        "opposite": (lambda w, x: x @ w - 2 * (x @ w.T).T, (1, 1), (1, 1)),
        "embedding, upright": (lambda w, t: jnp.sin(w[t]) * jnp.sin(w[t] @ w.T @ w), (9, 3), FOUND),
        "rows and columns": (lambda w, t: jnp.sin(w[t]) * w.T[t[::-1]], (4, 4), FOUND),
    },
}  # fmt: skip


@jax.custom_vjp
def doubled(w, x):
    """Its rule says three times what the derivative is, and is not looked into."""
    return 2 * w * x


doubled.defvjp(lambda w, x: (doubled(w, x), (w, x)), lambda kept, g: (6 * g * kept[1], g * kept[0]))


@jax.custom_jvp
def slope(w, x):
    return jnp.where(x > 0, x, w * x)


slope.defjvps(lambda d, out, w, x: jnp.where(x > 0, 0, d * x), lambda d, out, w, x: 2 * d)


def step(w, x):
    return jnp.sin(lax.cond(x[0] > 0, lambda w, x: w @ x, lambda w, x: x - w[0], w, x))


_FORMED: dict[str, dict[str, tuple[Use, Shape, Any]]] = {
    "used by more than products": {
        "scalar": (lambda w, x: x @ jnp.full((3, 4), w), (), (2, 3)),
        "scanned over and closed over": (
            lambda w, x: lax.scan(lambda x, row: (jnp.sin(w @ x) * row, None), x, w)[0],
            (4, 4), (4,),
        ),
        "cond": (lambda w, x: jnp.sin(lax.cond(x[0] > 0, lambda: w * x, lambda: x)), (3,), (3,)),
        "one operand twice": (
            lambda w, x: lax.cond(
                x[0, 0] > 0, lambda a, b: a * b.T, lambda a, b: a - 2 * b, w, w.T
            ), (3, 3), (3, 3),
        ),
        "custom_vjp": (lambda w, x: w * x + doubled(w[::-1], x), (3,), (3,)),
        "custom_jvp": (lambda w, x: slope(w, jnp.sin(x)), (3,), (3,)),
        "solve": (
            lambda w, x: lax.linalg.triangular_solve(w, x, left_side=True), (3, 3), (3, 2),
        ),
        "complex": (lambda w, x: jnp.real((x + 1j * x**2) * w) ** 2, (3,), (3,)),
        "complex product": (lambda w, x: jnp.imag(w[None] @ (x + 1j * jnp.cos(x))), (3,), (3,)),
        "carried": (lambda w, x: lax.scan(lambda c, x: (jnp.sin(c + x), c * x), w, x)[1],
                    (3,), (2, 3)),
        "branch in time": (jax.checkpoint(over_time(jax.jit(step))), (3, 3), (4, 3)),
    },
    "uses that overlap": {
        "slices": (lambda w, x: jnp.sin(x @ w[:3]) * (x @ w[1:]), (4, 2), (2, 3)),
        "other order": (
            lambda w, x: (x @ w) @ (
                x @ w.reshape(2, 3, WIDTH).transpose(1, 0, 2).reshape(6, -1)).T,
            (WIDTH, WIDTH), (TOKENS, WIDTH),
        ),
        "reversed": (lambda w, x: contract(w, x) @ w[::-1], (WIDTH, WIDTH), (TOKENS, WIDTH)),
        "columns apart": (
            lambda w, x: (x @ w[:, :5]) @ jnp.sin(x @ w[:, 5:]).T, (WIDTH, 10), (TOKENS, WIDTH),
        ),
        "second index out of bounds": (
            lambda w, t: w.at[t, t].get(mode="fill", fill_value=0), (4, 1), FOUND,
        ),
    },
}  # fmt: skip


def _made(tables: dict[str, dict[str, tuple[Use, Shape, Any]]]) -> dict[str, Any]:
    return {
        kind: {name: of_leaf(*row) for name, row in table.items()} for kind, table in tables.items()
    }


FACTORED = _made(_FACTORED)
"""The engine finds the norm of every leaf without its gradient."""

FORMED = _made(_FORMED)
"""Every example's gradient is made."""
