"""What a run computes, as text, and what follows from its seed and from that text."""

import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PRNGKeyArray, PyTree

from ..gradients import Prepared
from ..privacy import Secret, digest, is_partitionable, key_from_secret
from ..sharding import ShardingRules, on_device
from .extra import updated
from .program_text import program_text

_ROOT = "make_step"


class Texts(NamedTuple):
    """The programs that a step is made of."""

    loss: str
    optimizer: str


def texts_of(
    prepared: Prepared,
    rules: ShardingRules | None,
    optimizer: optax.GradientTransformation,
    params: PyTree[Any],
    extra: Mapping[str, Any],
) -> Texts:
    """What a step computes: the same on any number of devices, for any length of batch.

    It is that of a prepared call of the clipped gradient, and of an optimizer without noise, for
    parameters as it sees them. A ValueError if `extra` lacks what its update wants.
    """
    traced = prepared.traced
    with on_device(rules):
        loss = f"trained: {len(traced.params)}\n{program_text(traced.program.jaxpr)}"
    if not is_partitionable():  # then noise and keys are others
        loss = f"jax_threefry_partitionable: False\n{loss}"
    shapes = jax.tree.map(shape_of, params)
    grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, traced.accumulate_dtype), shapes)
    return Texts(loss, _optimizer_text(optimizer, shapes, grads, jax.tree.map(shape_of, extra)))


def probe_text(optimizer: optax.GradientTransformation) -> str:
    """An optimizer's programs on a matrix and a vector; empty where it cannot work on those."""
    probe = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((3, 2), (2,))]
    try:
        return _optimizer_text(optimizer, probe, probe, {})
    except Exception:  # whatever it says about a tree that is not the model's
        return ""


def _optimizer_text(
    optimizer: optax.GradientTransformation,
    params: PyTree[jax.ShapeDtypeStruct],
    grads: PyTree[jax.ShapeDtypeStruct],
    extra: Mapping[str, Any],
) -> str:
    """The programs of an optimizer's first state and update; one of them holds its rates."""

    def update(grads: Any, state: Any, params: Any, extra: Any) -> Any:
        return updated(optimizer, grads, state, params, extra)

    first, state, constants = _first_state(optimizer, params)
    later, *_ = _traced(update, grads, eqx.combine(state, constants), params, extra)
    return f"init: {first}\nupdate: {later}"


def _first_state(
    optimizer: optax.GradientTransformation, params: PyTree[jax.ShapeDtypeStruct]
) -> tuple[str, Any, Any]:
    try:
        return _traced(optimizer.init, params)
    except jax.errors.JAXTypeError:  # it reads numbers, as it may outside of jit: here, zeros
        with jax.ensure_compile_time_eval():
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
            state = optimizer.init(zeros)
        return _traced(lambda: state)


def _traced(function: Callable[..., Any], *args: Any) -> tuple[str, Any, Any]:
    """A function's program, and its result: shapes, and what is no array."""
    traced: Any = eqx.filter_make_jaxpr(function)
    program, shapes, rest = traced(*args)
    others = [leaf for leaf in jax.tree.leaves(rest) if isinstance(leaf, bool | int | float | str)]
    return f"{program_text(program)} {others}", shapes, rest


def shape_of(leaf: Any, length: int | None = None) -> Any:
    """An array's shape, with the dtype that it has in a computation; anything else as it is.

    The first axis is of the given length, if one is given.
    """
    if not isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return leaf
    shape = leaf.shape if length is None or not leaf.shape else (length, *leaf.shape[1:])
    return jax.ShapeDtypeStruct(
        shape, jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
    )


# A run has one seed; everything random in it has a stream of its own that follows from it.


def key_of(
    seed: Secret, stream: Literal["noise", "loss", "rounding"], run: str = ""
) -> PRNGKeyArray:
    """The root key of a stream, for one run."""
    return key_from_secret(seed, _ROOT, stream, run)


def keyed_digest(seed: Secret, *texts: str) -> str:
    """Tells whether texts are the same, to those who know the seed alone.

    Others learn nothing: not what the texts say, guessed or not, and not the seed.
    """
    return digest(_slow(seed, b"eqx_dp: keyed digest"), texts, size=16).hex()


def fingerprint(seed: Secret, salt: bytes) -> str:
    """Tells whether two runs have the same seed, and does not tell the seed."""
    return _slow(seed, salt)[:16].hex()


@functools.lru_cache(maxsize=16)
def _slow(seed: Secret, salt: bytes) -> bytes:
    """A hash of a seed that takes 50 ms and 16 MiB (scrypt, RFC 7914): small seeds can be tried."""
    secret = digest(seed, (_ROOT, "fingerprint"), size=64)
    return hashlib.scrypt(secret, salt=salt, n=2**14, r=8, p=1, dklen=32)
