"""What one call is given beside the model: a batch, a key, padding."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, PyTree

from ..paths import below
from ..precision import Policy
from ..privacy import Sampling
from ..shown import shown
from .trained import STATE_ADVICE, is_state

_KEY_ADVICE = (
    "Give it by name, grad_fn(model, *batch, key=key): it is then split into one key an example. "
    "A key that is given by position is taken for data, and a key that the loss closes over is the "
    "same for all examples."
)


def check_mask(sampling: Sampling | None, is_padding_example: object) -> None:
    """Raises a ValueError if batches are samples and there is no mask.

    Args:
        sampling: how batches are drawn; None for batches without padding.
        is_padding_example: as for the call.
    """
    if sampling is not None and is_padding_example is None:
        raise ValueError(
            "is_padding_example is missing. This gradient is of samples, and a sampled batch has "
            "padding, whose index is -1: without the mask the last example would count in every "
            "padding slot. Hand on the mask that sampler.take or sampler.batch returns; for a "
            "batch without padding, np.zeros(length, bool)."
        )


class Examples(NamedTuple):
    """A batch, ready to be mapped over.

    Attributes:
        batch: the positional arguments after the model, examples in front of every leaf.
        keys: one key an example, or None.
        is_padding_example: True where a slot holds no real example, or None.
        num_examples: the length of the batch, padding included.
        are_keys_in_order: whether the i-th key is that of the i-th real example, not of its slot.
    """

    batch: tuple[PyTree[Array], ...]
    keys: Array | None
    is_padding_example: Array | None
    num_examples: int
    are_keys_in_order: bool = False

    @property
    def leaves(self) -> list[Any]:
        """All arrays that have examples in front, or their shapes."""
        return jax.tree.leaves((self.batch, self.keys))

    def specs(self) -> list[PartitionSpec]:
        """Where one example of each leaf lives: as its type says, replicated if that is silent."""

        def spec(x: Array) -> PartitionSpec:
            _, *entries = (*jax.typeof(x).sharding.spec, *[None] * x.ndim)
            return PartitionSpec(*entries[: x.ndim - 1])

        return [spec(x) for x in self.leaves]

    def one(self) -> tuple[tuple[PyTree[Any], ...], Any]:
        """Shapes and dtypes of one example and of its key."""
        return jax.tree.map(_without_example_axis, (self.batch, self.keys))


def read_examples(
    batch: tuple[PyTree[Any], ...], key: Any, is_padding_example: Any, policy: Policy | None
) -> Examples:
    """Checks a batch and brings it into the policy's compute dtype.

    Raises:
        ValueError: there is no batch; it holds an `eqx.nn.State` or a key for all examples; a
            leaf is no array of numbers or has no example axis; leading axes differ; the key is not
            a single key; the padding mask is no boolean vector of the batch's length.
    """
    for index, argument in enumerate(batch):
        if any(is_state(node) for node in jax.tree.leaves(argument, is_leaf=is_state)):
            raise ValueError(
                f"batch argument {index} holds an eqx.nn.State, which all examples share and which "
                f"has no axis of examples. {STATE_ADVICE}"
            )
    if not jax.tree.leaves(batch):
        raise ValueError(
            "No batch: give at least one argument after the model, with examples along its "
            "leading axis."
        )
    lengths = {
        argument_name(path): _length(argument_name(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
    }
    if len(set(lengths.values())) > 1:
        raise ValueError(_differing(batch, lengths))

    num_examples = next(iter(lengths.values()))
    batch = jax.tree.map(jnp.asarray, batch)
    if policy is not None:
        batch = policy.cast_to_compute(batch)
    return Examples(
        batch,
        None if key is None else _split(key, num_examples),
        None if is_padding_example is None else _read_mask(is_padding_example, num_examples),
        num_examples,
    )


def _length(where: str, leaf: Any) -> int:
    """How many examples an argument's leaf holds."""
    if not eqx.is_array(leaf) and not isinstance(leaf, np.ndarray):
        raise ValueError(
            f"{where} is of type {type(leaf).__name__}, not a JAX or numpy array. The model comes "
            "first, and every argument after it has examples along its leading axis: stack "
            "examples that are in a list (jnp.stack); close over anything else (functools.partial, "
            "a lambda)."
        )
    if isinstance(leaf.dtype, np.dtype) and leaf.dtype.kind in "OSUMm":
        raise ValueError(
            f"{where} is {shown(leaf)}, which JAX cannot compute with. Turn it into numbers, or "
            "leave it out."
        )
    if leaf.ndim > 0:
        return leaf.shape[0]
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise ValueError(f"{where} is a PRNG key. {_KEY_ADVICE}")
    raise ValueError(
        f"{where} is a scalar: it has no leading axis of examples. The clipped gradient takes a "
        "whole batch, not one example; close over what all examples share."
    )


def _differing(batch: tuple[PyTree[Any], ...], lengths: dict[str, int]) -> str:
    """What an error says of leading axes that differ."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if leaf.dtype == jnp.uint32 and leaf.shape in ((2,), (4,)):
            return f"{argument_name(path)} looks like a PRNG key ({shown(leaf)}). {_KEY_ADVICE}"
    told = ", ".join(f"{where} has {length}" for where, length in lengths.items())
    stack = " Stack examples that are in a list (jnp.stack)."
    return (
        f"The batch's leading axes differ: {told}. All of them must be the number of examples."
        f"{stack if any(isinstance(argument, list) for argument in batch) else ''}"
    )


def _without_example_axis(x: Array) -> jax.ShapeDtypeStruct:
    if x.shape[0] == 0 or any(jax.typeof(x).sharding.spec):  # on Explicit axes
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    # Indexing keeps the rest of the type, such as the mesh axes it varies along in a shard_map.
    return jax.eval_shape(lambda examples: examples[0], x)


def argument_name(path: tuple[Any, ...]) -> str:
    """Where a leaf stands among the arguments after the model."""
    index, *rest = path
    assert isinstance(index, jax.tree_util.SequenceKey)
    return below(f"batch argument {index.idx}", tuple(rest))


def _split(key: Any, num_examples: int) -> Array:
    """One key an example."""
    try:
        return jax.random.split(key, num_examples)
    except (TypeError, ValueError):
        # JAX's own error would print a seed that is given for a key.
        kind = shown(key) if eqx.is_array(key) else f"a value of type {type(key).__name__}"
        raise ValueError(
            "key must be a single JAX key (jax.random.key(seed)), which is split here, one "
            f"key an example; found {kind}."
        ) from None


def _read_mask(is_padding_example: Any, num_examples: int) -> Array:
    if isinstance(is_padding_example, str | bytes):
        raise ValueError("is_padding_example must be a boolean array; found a text.")
    mask = jnp.asarray(is_padding_example)
    if mask.shape != (num_examples,) or mask.dtype != jnp.bool_:
        raise ValueError(
            f"is_padding_example must be boolean with shape ({num_examples},), one entry an "
            f"example; found {mask.dtype} with shape {mask.shape}."
        )
    return mask
