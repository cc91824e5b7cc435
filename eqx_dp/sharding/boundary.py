"""The boundary between a batch on a mesh and examples on a device."""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, PyTree

from ..precision import stage
from .axes import only
from .batch_of_two import BatchOfTwo
from .retrace import Retrace
from .rules import ShardingRules
from .shards import Cut, Shard, cut_of, inner_mesh, longer_than_one, over_others


class Argument(NamedTuple):
    """An argument of a loss, for tracing.

    Attributes:
        struct: shape and dtype; of one example, if it has examples.
        spec: where it lives, for the dimensions of `struct`.
        has_examples: whether a loss that is written for a batch sees an axis of examples in front.
    """

    struct: jax.ShapeDtypeStruct
    spec: PartitionSpec
    has_examples: bool = False


@contextmanager
def on_device(rules: ShardingRules | None) -> Generator[None]:
    """Enters the context for tracing a device's part of the work; none without rules."""
    with nullcontext() if rules is None else jax.sharding.use_abstract_mesh(inner_mesh(rules)):
        yield


def example_program(
    loss: Callable[..., Any], arguments: list[Argument], rules: ShardingRules, is_batched: bool
) -> jex_core.ClosedJaxpr:
    """Traces the loss of one example, with its sharding constraints moved inside the boundary.

    A loss that is written for a batch (`is_batched`) gets batches of one.

    Returns:
        A jaxpr that takes the arguments, without an axis of examples, to be evaluated
        [`on_device`][].

    Raises:
        ValueError: a constraint that cannot be moved, or that cannot be traced on a batch of one.
    """
    context = jax.sharding.get_abstract_mesh()

    def trace(length: int) -> jex_core.ClosedJaxpr:
        leading = (length,) if is_batched else ()
        with _outside(rules, context):
            mesh = _mesh_of(rules, 1)
            structs = [_traceable(a, leading, rules, mesh, rules.examples) for a in arguments]
            return jax.make_jaxpr(loss)(*structs)

    if rules.is_explicit:
        _meet_unbound_axes(loss, arguments, rules, is_batched)
    try:
        one = trace(1)
        with on_device(rules):
            batch_of_two = BatchOfTwo(rules.examples)
            batch_of_two.add(one.jaxpr, lambda: [(trace(2) if is_batched else one).jaxpr])
            retrace = Retrace(
                rules, inner_mesh(rules), batch_of_two, lambda: _outside(rules, context)
            )

            def of_one(*values: Any) -> list[Any]:
                values = tuple(
                    jnp.expand_dims(x, 0) if is_batched and a.has_examples else x
                    for x, a in zip(values, arguments, strict=True)
                )
                return retrace.run(one, values)

            return jax.make_jaxpr(of_one)(*(argument.struct for argument in arguments))
    except Exception as error:
        explanation = _explained(error, rules, "a batch of one" if is_batched else "one example")
        if explanation:
            raise ValueError(explanation) from error
        raise


_OF_MESHES = ("evenly divide", "ontext mesh", "Explicit`", "AbstractMesh", "lowering_platforms")
_ON_EXPLICIT_AXES = (
    "While it is traced, the example axes have length one, the others keep theirs. A dimension "
    "that carries examples cannot be spread over an axis that the rules do not name: take the axis "
    "out of the spec, or add it to ShardingRules(examples=...). A sharding of the real mesh cannot "
    "be applied: pass the PartitionSpec alone (jax.sharding.reshard(x, P('data'))). Pass arrays "
    "that live on the mesh with the model or the batch; do not close over them. JAX fails where "
    "the loss computes something at once, as jax.ensure_compile_time_eval does (and so Equinox's "
    "enumerations, and diffrax): there, make the axes Auto, by jax.make_mesh(..., axis_types=...)."
)
_ON_AUTO_AXES = (
    "A jit with in_shardings or out_shardings, or a device_put, needs dimensions that the devices "
    "divide; use jax.lax.with_sharding_constraint instead, which does not."
)


def _explained(error: Exception, rules: ShardingRules, traced_on: str) -> str | None:
    """The meaning of a JAX error about meshes or lengths for a loss; None for other errors."""
    text = str(error)
    is_bare = isinstance(error, AssertionError) and not text  # so JAX says it, under jax.set_mesh
    if rules.is_explicit and (is_bare or any(word in text for word in _OF_MESHES)):
        text, advice = text or "an assertion fails, one of JAX or of the loss.", _ON_EXPLICIT_AXES
    elif "evenly divide" in text:
        advice = _ON_AUTO_AXES
    else:
        return None
    kind = "Explicit" if rules.is_explicit else "Auto"
    return f"On {kind} axes, the loss cannot be traced on {traced_on}: {text} {advice}"


def _meet_unbound_axes(
    loss: Callable[..., Any], arguments: list[Argument], rules: ShardingRules, is_batched: bool
) -> None:
    """Traces a loss and its gradient where a psum over an example axis is an error, as for a batch.

    Where the example axes have length one and types do not speak of them, JAX leaves such a psum
    out, in the loss and in its derivative rules. So each axis gets length two here, with a batch of
    one example a device. The loss's own trace reports all other errors.

    Raises:
        NameError: a collective over an example axis, which no shard_map binds.
    """
    mesh, places = _mesh_of(rules, 2), tuple(range(len(arguments)))
    gradient = jax.grad(loss, places, has_aux=True, allow_int=True)
    # A loss may require a batch of one, which then is not spread over any axis.
    for length, over in ((2 ** len(rules.examples), rules.examples), (1, None)):
        leading = (length,) if is_batched else ()
        structs = [_traceable(argument, leading, rules, mesh, over) for argument in arguments]
        try:
            with _no_mesh(), jax.sharding.use_abstract_mesh(mesh):
                jax.make_jaxpr(gradient)(*structs)
        except NameError:
            raise
        except Exception:
            continue
        return


def check_context(rules: ShardingRules) -> None:
    """Refuses a mesh in context with which the rules cannot be applied.

    Raises:
        ValueError: the context is that of a shard_map, or another mesh is set.
    """
    kinds = dict(zip(rules.mesh.axis_names, rules.mesh.axis_types, strict=True))
    if rules.is_explicit and any(kinds[axis] is AxisType.Auto for axis in rules.examples):
        raise ValueError(
            f"The example axes {rules.examples} are Auto, and others of the mesh are Explicit "
            f"({rules.mesh.axis_types}). Make all of them one or the other: "
            "jax.make_mesh(..., axis_types=...)."
        )
    context = jax.sharding.get_abstract_mesh()
    if context.empty:
        return
    if AxisType.Manual in context.axis_types:
        raise ValueError(
            "Sharding rules were given inside a shard_map: they make a shard_map themselves, over "
            f"{rules.examples}. Call the clipped gradient outside of shard_map, or leave the rules "
            "out and sum over the axes yourself."
        )
    its_own = rules.mesh.abstract_mesh
    if (context.shape_tuple, context.axis_types) != (its_own.shape_tuple, its_own.axis_types):
        raise ValueError(
            f"The mesh in context is {dict(context.shape)} with axes {context.axis_types}; the "
            f"mesh of the sharding rules is {dict(its_own.shape)} with axes {its_own.axis_types}. "
            "Use one mesh for both."
        )


@contextmanager
def _outside(rules: ShardingRules, context: AbstractMesh) -> Generator[None]:
    """Enters the context that a loss is traced in, in which constraints on a batch are valid.

    On Auto axes it is the context of the call. On Explicit axes a dimension has to be a multiple of
    the devices that it is spread over. So the example axes have length one there, and types do not
    name them: otherwise (1 x time), split into a batch of one and time, would be spread over time.
    """
    mesh, is_explicit = _mesh_of(rules, 1) if rules.is_explicit else context, rules.is_explicit
    with (
        _no_mesh(),
        jax.sharding.use_abstract_mesh(mesh),
        jax.remove_size_one_mesh_axis_from_type(is_explicit),
    ):
        yield


def _no_mesh() -> AbstractContextManager[Any]:
    """Leaves the mesh in context: the lengths of its axes may change from none alone."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def _mesh_of(rules: ShardingRules, length: int) -> AbstractMesh:
    """The rules' mesh with another length of the example axes."""
    sizes = {**rules.mesh.shape, **dict.fromkeys(rules.examples, length)}
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=rules.mesh.axis_types)


def _traceable(
    argument: Argument,
    leading: tuple[int, ...],
    rules: ShardingRules,
    mesh: AbstractMesh,
    over: tuple[str, ...] | None,
) -> jax.ShapeDtypeStruct:
    """An argument as a loss sees it, examples along leading axes and these spread over some."""
    struct, spec = argument.struct, argument.spec
    if argument.has_examples and leading:
        struct = struct.update(shape=(*leading, *struct.shape))
        spec = PartitionSpec(over, *spec)
    if not rules.is_explicit:
        return struct
    return struct.update(sharding=NamedSharding(mesh, rules.on_axes(spec, AxisType.Explicit).spec))


def over_devices(
    function: Callable[[list[Array | Shard], list[Array]], tuple[list[Array], PyTree[Array]]],
    rules: ShardingRules,
    shared: list[Array],
    shared_specs: list[PartitionSpec],
    examples: list[Array],
    sum_specs: list[PartitionSpec],
    sum_cuts: Sequence[Cut | None],
    is_wide: bool = False,
) -> tuple[list[Array], PyTree[Array]]:
    """Runs a function on every device's own examples, and sums over devices.

    Guarantee: only the results of `function` on an example leave its device. Sums are reduced in
        their own dtype, or in float64 and rounded once. Those that `function` has not scattered
        take one reduction each, at the end.

    Args:
        function: from the shared arrays and a device's examples to `(sums, per_example)`.
        rules: the sharding rules.
        shared: arrays that every device needs. Of those that are spread over example axes it gets
            its part, a `Shard`.
        shared_specs: where each lives.
        examples: arrays with examples in front.
        sum_specs: where each sum will live.
        sum_cuts: how `function` has scattered sums.
        is_wide: whether sums are reduced in float64.

    Returns:
        The sums over all examples, and the per-example values, examples in front.
    """
    cuts = [cut_of(rules, spec, x.ndim) for x, spec in zip(shared, shared_specs, strict=True)]
    lie = [
        PartitionSpec() if cut is None else only(spec, longer_than_one(rules))
        for cut, spec in zip(cuts, shared_specs, strict=True)
    ]

    def on_device(shared: list[Array], examples: list[Array]) -> tuple[list[Array], PyTree[Array]]:
        kept = [over_others(x, spec, rules) for x, spec in zip(shared, shared_specs, strict=True)]
        there = [x if cut is None else Shard(x, cut) for x, cut in zip(kept, cuts, strict=True)]
        sums, per_example = function(there, examples)
        sums = [over_others(x, spec, rules) for x, spec in zip(sums, sum_specs, strict=True)]
        with stage("devices"):
            return _reduced(sums, sum_specs, sum_cuts, rules, is_wide), per_example

    mapped = jax.shard_map(
        on_device,
        mesh=None if rules.is_explicit else rules.mesh,
        in_specs=(lie, rules.example_spec),
        out_specs=([only(spec, rules.examples) for spec in sum_specs], rules.example_spec),
        axis_names=set(rules.examples),
        check_vma=False,
    )

    def shardings(axis_type: AxisType) -> Any:
        of_sums = [rules.on_axes(spec, axis_type) for spec in sum_specs]
        return of_sums, rules.on_axes(rules.example_spec, axis_type)

    def run(shared: list[Array], examples: list[Array]) -> tuple[list[Array], PyTree[Array]]:
        run_mapped: Any = mapped
        if rules.is_explicit:
            explicit = shardings(AxisType.Explicit)
            run_mapped = jax.sharding.auto_axes(mapped, out_sharding=explicit)
        results = run_mapped(shared, examples)
        if AxisType.Auto in rules.mesh.axis_types:
            results = jax.lax.with_sharding_constraint(results, shardings(AxisType.Auto))
        return results

    return jax.jit(run)(shared, examples)


def agreement(
    rules: ShardingRules | None, is_meeting: bool
) -> Callable[[Int[Array, ""]], Array] | None:
    """How devices agree on the number of microbatches that all of them compute: the largest.

    If devices communicate within a microbatch (they share an example, or each holds a part of a
    parameter), a device that skips a microbatch would block the others forever. Otherwise every
    device uses its own number, and there is nothing to agree on.

    Returns:
        From the number of microbatches that hold a real example here to that of all; or None.
    """
    longer = () if rules is None else longer_than_one(rules)
    is_alone = rules is None or (rules.num_shards == rules.mesh.size and not is_meeting)
    return None if is_alone or not longer else lambda trips: jax.lax.pmax(trips, longer)


def _reduced(
    sums: list[Array],
    specs: list[PartitionSpec],
    cuts: Sequence[Cut | None],
    rules: ShardingRules,
    is_wide: bool,
) -> list[Array]:
    """Sums over the example axes; if a sum is spread over them, each device gets its part."""
    longer, parts, left = longer_than_one(rules), list[Array](), list[tuple[str, ...]]()
    with jax.enable_x64(True):
        for x, spec, done in zip(sums, specs, cuts, strict=True):
            cut, x = cut_of(rules, spec, x.ndim), x.astype("float64") if is_wide else x
            taken = {axis for _, axes in ([] if cut is None else cut.over(x.ndim)) for axis in axes}
            parts.append(x if cut is None or done is not None else cut.scattered(x))
            left.append(tuple(axis for axis in longer if axis not in taken))
        # The remaining axes, with one reduction for all sums that share them.
        for axes in dict.fromkeys(filter(None, left)):
            its = [i for i, own in enumerate(left) if own == axes]
            for i, x in zip(its, jax.lax.psum([parts[i] for i in its], axes), strict=True):
                parts[i] = x
        return [part.astype(x.dtype) for part, x in zip(parts, sums, strict=True)]
