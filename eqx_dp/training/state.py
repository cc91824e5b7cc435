"""What a run carries from step to step, and where on a mesh it stays."""

import dataclasses
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from ..sharding import ShardingRules, axes_of
from .dispatch import is_gone

Model = TypeVar("Model")
T = TypeVar("T")


class TrainState(eqx.Module, Generic[Model]):
    """All that a run carries from one step to the next.

    Attributes:
        model: the model as it is stored, in the policy's params dtype.
        opt_state: the state of the noise and of the optimizer. **Secret**: it holds the key of the
            noise (checkpoints do not).
        step: how many steps have been taken.
        disclosed: the figures that the last step disclosed of its batch, by name; empty without
            `disclose`. **Not private.**
    """

    model: Model
    opt_state: PyTree[Any]
    step: Int[Array, ""]
    disclosed: dict[str, Float[Array, ""]]


@dataclasses.dataclass
class Unrecorded:
    """How many steps were taken that no directory tells of; all forms of a step share it."""

    steps: int = 0


def copied(tree: T) -> T:
    """The same values, each array in a buffer of its own.

    Optimizers may keep a parameter, or one array twice. A step donates every buffer of its state,
    and the same one cannot be donated twice.
    """
    leaves, structure = jax.tree.flatten(tree)
    del tree  # an array goes as soon as its copy is there
    for index, leaf in enumerate(leaves):
        leaves[index] = jnp.copy(leaf) if eqx.is_array(leaf) else leaf
    return structure.unflatten(leaves)


def refuse_used_up(name: str, tree: PyTree[Any]) -> None:
    """Refuses arrays whose buffers an earlier step has taken.

    Args:
        name: of the argument.
        tree: its value.

    Raises:
        ValueError: the buffer of an array is gone.
    """

    if not any(map(is_gone, jax.tree.leaves(tree))):
        return
    gone = [
        f"{name}{jax.tree_util.keystr(path)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if is_gone(leaf)
    ]
    rest = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
    raise ValueError(
        f"{gone[0]}{rest}: the array is gone. A step uses up the state that it is given: its "
        "buffers are donated to the next state. Go on with the state that the step returned, "
        "state = step(state, ...), and copy beforehand what is needed later, the model too: "
        "jax.tree.map(lambda x: jnp.copy(x) if eqx.is_array(x) else x, state)."
    )


def on_mesh(state: T, rules: ShardingRules) -> T:
    """Puts all of a state on the mesh, in the form in which a step will give it back.

    What no rule has placed (counters, keys) is replicated. Else a step would find it on one device
    the first time and on all of them the second, and be compiled twice; as it would for a spec that
    says the same in other words.
    """

    def place(leaf: Any) -> Any:
        if not eqx.is_array(leaf):
            return leaf
        return jax.device_put(leaf, NamedSharding(rules.mesh, _spec_of(leaf, rules)))

    return jax.tree.map(place, state)


def specs_of(state: PyTree[Any], rules: ShardingRules | None) -> tuple[PartitionSpec | None, ...]:
    """The spec of each array of a state; none without rules.

    None of an array that is being traced on Auto axes: nothing says where it is.
    """
    if rules is None:
        return ()
    return tuple(
        None if isinstance(leaf, Tracer) and not rules.is_explicit else _spec_of(leaf, rules)
        for leaf in jax.tree.leaves(eqx.filter(state, eqx.is_array))
    )


def kept_at(state: T, specs: tuple[PartitionSpec | None, ...], rules: ShardingRules | None) -> T:
    """Under `jit`: constrains a new state's arrays to where the old one's were.

    The compiler would choose for itself on Auto axes, and compile once more for what it chose.
    """
    if rules is None:
        return state
    arrays, static = eqx.partition(state, eqx.is_array)
    leaves, structure = jax.tree.flatten(arrays)
    kept = [
        leaf if spec is None or _is_key(leaf) else rules.place(leaf, spec)
        for leaf, spec in zip(leaves, specs, strict=True)
    ]
    return eqx.combine(structure.unflatten(kept), static)


def _spec_of(leaf: Any, rules: ShardingRules) -> PartitionSpec:
    """Where an array is, as a compiled step would write it.

    Types on Explicit axes have an entry for every dimension; on Auto axes, specs name no axes of
    length one and end with the last dimension that is spread.
    """
    sharding = jax.typeof(leaf).sharding if rules.is_explicit else getattr(leaf, "sharding", None)
    mesh = rules.mesh.abstract_mesh if rules.is_explicit else rules.mesh
    entries: list[Any] = []
    if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
        entries = list(sharding.spec)
    if rules.is_explicit:
        return PartitionSpec(*entries, *[None] * (leaf.ndim - len(entries)))
    entries = [_spreading(entry, rules) for entry in entries]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def _spreading(entry: Any, rules: ShardingRules) -> Any:
    """A dimension's entry without axes of length one."""
    axes = tuple(axis for axis in axes_of(entry) if rules.mesh.shape[axis] > 1)
    return axes if len(axes) > 1 else next(iter(axes), None)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
