"""What one call is given beside the model: a batch, a key, padding."""

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, PyTree

from ..precision import Policy


@dataclasses.dataclass(unsafe_hash=True)
class MaskRule:
    """Whether batches come with padding, so that a call has to say where; a plan says that.

    All copies of a gradient share one, and those that say the same are equal: gradients that are
    made alike share what is compiled for them.
    """

    is_required: bool = False

    def check(self, is_padding_example: object) -> None:
        """Raises a ValueError if a mask is required and there is none."""
        if self.is_required and is_padding_example is None:
            raise ValueError(
                "is_padding_example is missing. Noise was made for this gradient by a plan that "
                "samples, and a sampled batch has padding, whose index is -1: without the mask the "
                "last example would count once a padding slot. Hand on the mask that sampler.take "
                "or sampler.batch gives; for a batch without padding, np.zeros(length, bool)."
            )


class Examples(NamedTuple):
    """A batch, ready to be mapped over.

    Attributes:
        batch: the positional arguments after the model, examples in front of every leaf.
        keys: one key an example, or None.
        is_padding_example: True where a slot holds no real example, or None.
        num_examples: the length of the batch, padding included.
    """

    batch: tuple[PyTree[Array], ...]
    keys: Array | None
    is_padding_example: Array | None
    num_examples: int

    @property
    def leaves(self) -> list[Array]:
        """All arrays that have examples in front."""
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
        ValueError: there is no batch; a leaf is no array or has no example axis; leading axes
            differ; the key is not a single key; the padding mask is no boolean vector of the
            batch's length.
    """
    if not jax.tree.leaves(batch):
        raise ValueError(
            "No batch: give at least one argument after the model, with examples along its "
            "leading axis."
        )
    lengths: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        where = _argument_name(path)
        if not eqx.is_array(leaf) and not isinstance(leaf, np.ndarray):
            raise ValueError(
                f"{where} is a {type(leaf).__name__}, not an array. Every argument after the model "
                "has examples along its leading axis; close over anything else "
                "(functools.partial, a lambda)."
            )
        if leaf.ndim == 0:
            raise ValueError(
                f"{where} is a scalar: it has no leading axis of examples. Close over what all "
                "examples share."
            )
        lengths[where] = leaf.shape[0]
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{where} has {length}" for where, length in lengths.items())
        raise ValueError(f"The batch's leading axes differ: {found}. They all count examples.")

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


def _without_example_axis(x: Array) -> jax.ShapeDtypeStruct:
    if x.shape[0] == 0 or any(jax.typeof(x).sharding.spec):  # on Explicit axes
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    # Indexing keeps the rest of the type, such as the mesh axes it varies along in a shard_map.
    return jax.eval_shape(lambda examples: examples[0], x)


def _argument_name(path: tuple[Any, ...]) -> str:
    index, *rest = path
    assert isinstance(index, jax.tree_util.SequenceKey)
    return f"batch argument {index.idx}{jax.tree_util.keystr(tuple(rest))}"


def _split(key: Any, num_examples: int) -> Array:
    """One key an example."""
    try:
        return jax.random.split(key, num_examples)
    except (TypeError, ValueError):
        # Without JAX's own words, which may show what the key is made of.
        found = f"an array of shape {key.shape}" if eqx.is_array(key) else f"a {type(key).__name__}"
        raise ValueError(
            "key must be a single JAX key (dp.key_from_secret(secret)), which is split here, one "
            f"key an example; found {found}."
        ) from None


def _read_mask(is_padding_example: Any, num_examples: int) -> Array:
    mask = jnp.asarray(is_padding_example)
    if mask.shape != (num_examples,) or mask.dtype != jnp.bool_:
        raise ValueError(
            f"is_padding_example must be boolean with shape ({num_examples},), one entry an "
            f"example; found {mask.dtype} with shape {mask.shape}."
        )
    return mask
