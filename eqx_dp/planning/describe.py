"""What a policy makes of a model: the dtypes of every leaf, and all that a step holds and sends."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from ..gradients import FilterSpec, split_trainable
from ..precision import (
    LeafDtypes,
    Policy,
    agreed_policy,
    cast_parameters,
    checked_policy,
    leaf_dtypes,
    refusal,
)
from ..sharding import ShardingRules, checked_rules
from ..tables import Part, tabular
from ..trees import PyTree, is_array_or_shape
from ..updates import first_state, wide_parameters
from .parts import bytes_of, copy_bytes, gathered_bytes, is_spread, local_bytes, part_bytes
from .step import specs_of_state


class Declared(NamedTuple):
    """One thing that a step holds, sends or saves.

    Attributes:
        what: in words.
        declared_by: the entry of a policy that gives its dtype.
        dtypes: of its floating-point arrays, in the order of the model's leaves.
        size: bytes, of one device; of a checkpoint, of all. None where they are not known.
    """

    what: str
    declared_by: str
    dtypes: tuple[str, ...]
    size: int | None


@tabular
class Description(NamedTuple):
    """What [`describe`][] returns; `str()` is a table of leaves, and a table of the step.

    Attributes:
        rows: one for every leaf, in the model's order.
        policy: the policy.
        step: one for everything that a step holds, sends or saves.
    """

    rows: tuple[LeafDtypes, ...]
    policy: Policy
    step: tuple[Declared, ...]

    def _parts(self) -> Iterator[Part]:
        head = ("path", "params", "compute", "output", "accumulate", "noise", "rule")
        leaves = [head, *map(_cells_of_leaf, self.rows)]
        if self.policy.matmul is not None:
            products = ["matmul", *map(_product, self.rows)]
            leaves = [(*row[:3], one, *row[3:]) for row, one in zip(leaves, products, strict=True)]
        yield leaves
        yield ""
        head = ("a device holds", "declared by", "dtype", "bytes")
        yield [head, *map(_cells_of_step, self.step)]
        yield ""
        yield f"policy: {self.policy}"


def _cells_of_leaf(row: LeafDtypes) -> tuple[str, ...]:
    path = row.path or "(root)"
    if row.params is None:
        return (path, row.stored, "-", "-", "-", "-", "not a float array: never cast")
    params = str(row.params)
    if row.stored != params:
        params = f"{params} (stored as {row.stored})"
    dtypes = (row.compute, row.output, row.accumulate, row.noise)
    return (path, params, *map(str, dtypes), row.rule or "policy")


def _product(row: LeafDtypes) -> str:
    return "-" if row.params is None else "wide" if row.matmul is None else str(row.matmul)


def _cells_of_step(row: Declared) -> tuple[str, ...]:
    size = "no optimizer given" if row.size is None else f"{row.size:,}"
    return (row.what, row.declared_by, ", ".join(row.dtypes) or "-", size)


def describe(
    model: PyTree[Any],
    policy: Policy | None = None,
    *,
    optimizer: optax.GradientTransformation | None = None,
    sharding: ShardingRules | None = None,
    filter_spec: FilterSpec = eqx.is_inexact_array,
    ema: bool = False,
) -> Description:
    """Says which dtypes every leaf of a model has, and all that a step holds, sends and saves.

    Nothing is allocated. The bytes follow from shapes, of a step as `make_step` makes it:
    `plan_memory` says what a compiled step takes, with examples and activations.

    | row | bytes |
    |---|---|
    | parameters | the model as it is stored, a device's part |
    | parameters, as the loss gets them | copies in another dtype, a device's part |
    | parameters, gathered | what a device gets from others, each time that all are gathered |
    | clipped sum | of all trained leaves, before devices' sums are added |
    | clipped sum, over devices | what a device gives to that sum |
    | noise, largest leaf | what it takes at once |
    | optimizer state, moving average | a device's part |
    | a checkpoint | parameters, optimizer state and moving average, of all devices |

    Of a parameter that is spread over the axes of examples, and of its sum, a device holds a part.
    How much of it is gathered at a time depends on the loss: `plan_memory` counts it.

    Args:
        model: an `eqx.Module`, paired or not, or any tree; `jax.ShapeDtypeStruct` may stand for
            arrays.
        policy: the policy; a paired model brings its own.
        optimizer: an optimizer, to know its state (`optimizer` of a step: with the noise's).
        sharding: the rules, to know what a device holds; without, there is one device.
        filter_spec: what is trained; nothing of an `eqx.nn.State`, as in the engine.
        ema: whether there is a moving average of what is trained.

    Returns:
        Tables: `rows` of leaves, each with `path`, `stored`, `params`, `compute`, `output`,
        `accumulate`, `noise`, `rule`, `matmul`; `step`, each with `what`, `declared_by`, `dtypes`,
        `size`. `str()` prints them.

    Raises:
        ValueError: There is no policy, or there are two that differ; a rule of the policy or of
            `sharding` has no effect on the model; the optimizer keeps state narrower than declared.
    """
    policy = agreed_policy(model, checked_policy(policy))
    if policy is None:
        raise refusal("policy", "None", "an eqx_dp Policy, or a model that is paired with one")
    rows = leaf_dtypes(model, policy)
    arrays, static = eqx.partition(jax.tree.map(_shape_of, model), is_array_or_shape)

    def trained(arrays: PyTree[Any]) -> PyTree[Any]:
        params, _ = split_trainable(eqx.combine(arrays, static), filter_spec)
        return eqx.filter(params, eqx.is_inexact_array)

    shapes = arrays, jax.eval_shape(trained, arrays)
    step = _declared(*shapes, policy, checked_rules(sharding), optimizer, ema)
    return Description(rows, policy, step)


def _shape_of(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else leaf


def _declared(
    arrays: PyTree[Any],
    trained: PyTree[Any],
    policy: Policy,
    rules: ShardingRules | None,
    optimizer: optax.GradientTransformation | None,
    ema: bool,
) -> tuple[Declared, ...]:
    """The rows of a step, for the shapes of a model's arrays, and of those that are trained."""
    specs = None if rules is None else rules.specs(arrays)
    param_specs = (
        None
        if rules is None
        else jax.tree_util.tree_map_with_path(lambda path, x: rules.spec(path, x.shape), trained)
    )
    sum_specs = None if rules is None else rules.accumulator_specs(trained)
    stored = _placed(jax.eval_shape(policy.cast_to_param, arrays), specs, rules)
    given = jax.tree.leaves(jax.eval_shape(lambda x: cast_parameters(x, policy), arrays))
    copies = sum(
        part_bytes(x, copy.dtype) if is_spread(x, rules) else copy_bytes(x, copy.dtype, rules)
        for x, copy in zip(stored, given, strict=True)
    )
    gathered = sum(
        gathered_bytes(x, copy.dtype, rules)
        - local_bytes(x) // x.dtype.itemsize * copy.dtype.itemsize
        for x, copy in zip(stored, given, strict=True)
    )
    in_sums = jax.eval_shape(policy.cast_to_accumulate, trained)
    sums = _placed(in_sums, param_specs, rules)
    whole = [gathered_bytes(x, x.dtype, rules) for x in sums]
    sent = 0 if rules is None or rules.num_shards == 1 else sum(whole)
    is_once = rules is not None and rules.accumulators == "params_once"
    summed = sum(
        local_bytes(x) if is_spread(x, rules) and not is_once else size
        for x, size in zip(sums, whole, strict=True)
    )
    numbers = (local_bytes(x) // x.dtype.itemsize for x in _placed(in_sums, sum_specs, rules))
    rows = [
        Declared("parameters", "params", _dtypes(stored), _local(stored)),
        Declared("parameters, as the loss gets them", "compute", _dtypes(given), copies),
        Declared("parameters, gathered", "compute", _dtypes(given), gathered),
        Declared("clipped sum", "accumulate", _dtypes(sums), summed),
        Declared("clipped sum, over devices", "accumulate", _dtypes(sums), sent),
        Declared(
            "noise, largest leaf",
            "noise",
            (str(policy.noise_dtype),),
            max(numbers, default=0) * policy.noise_dtype.itemsize,
        ),
    ]
    kept = list(stored)
    state = None
    if optimizer is not None:
        shapes = jax.eval_shape(lambda x: first_state(optimizer, x, policy), trained)
        specs = None if sum_specs is None else specs_of_state(shapes, trained, _leaves(sum_specs))
        state = _placed(shapes, specs, rules)
        kept += state
    dtypes = (str(policy.optimizer_dtype),) if state is None else _dtypes(state)
    size = None if state is None else _local(state)
    rows.append(Declared("optimizer state", "optimizer", dtypes, size))
    if ema:
        wide = jax.eval_shape(lambda x: wide_parameters(x, policy), trained)
        mean = _placed(wide, sum_specs, rules)
        kept += mean
        rows.append(Declared("moving average", "accumulate", _dtypes(mean), _local(mean)))
    saved = None if state is None else sum(map(bytes_of, kept))
    rows.append(Declared("a checkpoint", "params, optimizer", _dtypes(kept), saved))
    return tuple(rows)


def _placed(
    tree: PyTree[Any], specs: PyTree[Any] | None, rules: ShardingRules | None
) -> list[jax.ShapeDtypeStruct]:
    """The shapes of a tree, each where it lives."""
    if rules is None:
        return jax.tree.leaves(tree)

    def place(x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(rules.mesh, spec))

    return jax.tree.leaves(jax.tree.map(place, tree, specs))


def _leaves(specs: PyTree[Any]) -> list[PartitionSpec]:
    return jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


def _local(arrays: Iterable[Any]) -> int:
    return sum(map(local_bytes, arrays))


def _dtypes(arrays: Iterable[Any]) -> tuple[str, ...]:
    """Of floats, each once."""
    return tuple(
        dict.fromkeys(str(x.dtype) for x in arrays if jnp.issubdtype(x.dtype, jnp.floating))
    )
