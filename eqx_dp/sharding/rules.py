"""Rules for the places of examples, parameters and accumulators on a mesh of devices."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias, TypeVar, cast, get_args

import equinox as eqx
import jax
import jax.core
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from ..expected import expect
from ..paths import below, dotted, matches
from ..shown import shown, some
from ..trees import PyTree, is_array_or_shape, is_key
from .axes import PathRule, axes_of, axes_text, check_fits, example_axes, only, path_rules
from .processes import local_shards

T = TypeVar("T")

Accumulators: TypeAlias = Literal["params", "examples", "params_once"]


@dataclasses.dataclass(frozen=True, init=False)
class ShardingRules:
    """Declares where a training step's arrays live on a mesh.

    Rules are applied outside of the boundary between a batch and its examples: each device works
    on its own examples, and one reduction for each accumulator and step, in the accumulate dtype,
    sums over devices. Over the other axes of the mesh (model parallelism) the compiler divides the
    work by the parameters' specs and the loss's own constraints.

    A parameter may be spread over example axes (fully sharded: ZeRO, Rajbhandari et al. 2020, stage
    3; FSDP). A device then holds only its part. The rest is gathered, in the compute dtype, where
    the parameter is used: if a scan goes over slices of it (stacked layers), one slice at a time
    inside the scan, and again for the backward pass. Its sum is reduced and scattered there as
    well, in every microbatch. Spread it along another dimension than that of the scan. Each device
    computes as many microbatches as the one with the most examples, because they communicate.

    Rules are static values: they are compared and hashed by value, and hold no arrays.

    ```python
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    rules = dp.ShardingRules(mesh, examples=("data",), params=(
        ("**.attention.output_proj.weight", P(None, "model")),
        ("**.attention.*_proj.weight", P("model", None)),
    ))
    ```

    Args:
        mesh: the devices. Its axes are Auto or Explicit.
        examples: the axes that examples are spread over.
        params: pairs of a path pattern and a `PartitionSpec` for the model's arrays. Paths are
            dotted, `blocks.3.attention.query_proj.weight`; in a pattern `*` stands for
            anything within one part, `**` for any number of parts. The first match wins; an array
            that no pattern matches is replicated.
        accumulators: where sums of gradients live, and with them the returned gradients, the noise,
            and the state of an optimizer for them. `"params"`: where their parameter lives.
            `"examples"`: spread over the example axes as well (ZeRO, stage 2), along the first
            dimension that these axes divide and that is not spread already; where the parameter
            lives if there is no such dimension. `"params_once"`: as `"params"`, but the sum of a
            parameter that is spread over example axes stays whole on a device until its last
            microbatch: one reduction a step instead of one a microbatch, for the memory of the
            whole sums.

    Raises:
        ValueError: an axis does not exist in the mesh, or is named twice; there are no example
            axes; an argument is not a mesh, a pattern or a `PartitionSpec`; the mesh has Manual
            axes; a dimension is spread over Auto and Explicit axes together.
    """

    mesh: Mesh
    examples: tuple[str, ...]
    params: tuple[PathRule, ...]
    accumulators: Accumulators

    def __init__(
        self,
        mesh: Mesh,
        examples: str | Sequence[str] = ("data",),
        params: Iterable[PathRule] = (),
        accumulators: Accumulators = "params",
    ):
        expect("mesh", mesh, Mesh, "a jax.sharding.Mesh (jax.make_mesh(shape, names))")
        if accumulators not in get_args(Accumulators):
            allowed = ", ".join(map(repr, get_args(Accumulators)))
            raise ValueError(f"accumulators must be one of {allowed}, found {shown(accumulators)}.")
        if AxisType.Manual in mesh.axis_types:
            raise ValueError(
                f"mesh has Manual axes ({mesh}); axes must be Auto or Explicit. The clipped "
                "gradient makes the shard_map over the example axes itself."
            )
        vars(self).update(mesh=mesh, examples=example_axes(mesh, examples))
        vars(self).update(params=path_rules(mesh, params), accumulators=accumulators)

    @property
    def num_shards(self) -> int:
        """How many parts the examples are divided into."""
        return math.prod(self.mesh.shape[axis] for axis in self.examples)

    @property
    def example_spec(self) -> PartitionSpec:
        """Spec of an array with examples along its leading axis."""
        return PartitionSpec(self.examples)

    @property
    def is_explicit(self) -> bool:
        """Whether an axis of the mesh is Explicit: array types then include the sharding."""
        return AxisType.Explicit in self.mesh.axis_types

    def specs(self, model: PyTree[Any]) -> PyTree[PartitionSpec | None]:
        """The spec of every array of a model, by the rules for parameters.

        Args:
            model: a tree; its arrays, or shapes of arrays, have paths.

        Returns:
            A tree of `PartitionSpec`, None where the model has no array.

        Raises:
            ValueError: a pattern matches nothing; a spec is longer than an array's rank, or spreads
                a dimension over axes that do not divide it.
        """
        leaves = jax.tree_util.tree_leaves_with_path(model)
        names = [dotted(path) for path, leaf in leaves if is_array_or_shape(leaf)]
        patterns = [pattern for pattern, _ in self.params]
        unmatched = [one for one in patterns if not any(matches(one, name) for name in names)]
        if unmatched:
            raise ValueError(
                f"ShardingRules.params: {', '.join(map(repr, unmatched))}: no array of the model "
                f"matches; its arrays are {some(list(map(repr, names)), 8) or 'none'}. "
                "A pattern describes the whole path, and '**', between dots, stands for any number "
                "of parts."
            )
        return _specs_of(self.spec, model)

    def spec(self, path: tuple[Any, ...], shape: tuple[int, ...]) -> PartitionSpec:
        """The spec of one array.

        Args:
            path: where it stands in the model, as `jax.tree_util.tree_leaves_with_path` says.
            shape: its shape.

        Raises:
            ValueError: the spec is longer than the array's rank, or spreads a dimension over axes
                that do not divide it.
        """
        name = dotted(path)
        for pattern, spec in self.params:
            if matches(pattern, name):
                check_fits(self.mesh, pattern, spec, name, shape)
                return spec
        return PartitionSpec()

    def accumulator_spec(self, spec: PartitionSpec, shape: tuple[int, ...]) -> PartitionSpec:
        """Where the sum of gradients of a parameter lives.

        Args:
            spec: where the parameter lives.
            shape: its shape.
        """
        entries = [*spec, *[None] * (len(shape) - len(spec))]
        taken = {axis for entry in entries for axis in axes_of(entry)}
        if self.accumulators != "examples" or taken & set(self.examples):
            return spec
        for dimension, entry in enumerate(entries):
            is_free = not axes_of(entry) and entry is not PartitionSpec.UNCONSTRAINED
            if is_free and shape[dimension] > 0 and shape[dimension] % self.num_shards == 0:
                entries[dimension] = self.examples
                return PartitionSpec(*entries)
        return spec

    def accumulator_specs(self, gradients: PyTree[Any]) -> PyTree[PartitionSpec | None]:
        """Where the gradients of a model live.

        Args:
            gradients: a tree like the model, None where it is not trained. A pattern may match
                nothing here.

        Raises:
            ValueError: as [`spec`][].
        """
        return _specs_of(
            lambda path, shape: self.accumulator_spec(self.spec(path, shape), shape), gradients
        )

    def shard(self, model: T) -> T:
        """Places a model's arrays as the rules for parameters say.

        Under `jit` it constrains them, so that an updated model stays where it was. With several
        processes, every process passes the whole array, with the same values.

        Args:
            model: any tree; leaves that are no arrays stay as they are.

        Raises:
            ValueError: as [`specs`][].
        """
        return cast(T, self._place(model, self.specs(model)))

    def shard_accumulators(self, params: T) -> T:
        """Places a copy of a model's arrays as accumulators live.

        `optimizer.init(rules.shard_accumulators(params))` makes an optimizer's state that lives
        where gradients live, which matters with `accumulators="examples"`. Do not call it under
        `jit`: there, `zeros_like` on Auto axes does not keep the sharding of its argument.

        Args:
            params: the trained part, `grad_fn.trainable(model)`.

        Raises:
            ValueError: as [`spec`][].
        """
        return cast(T, self._place(params, self.accumulator_specs(params)))

    def shard_batch(self, batch: T, *, stacked: bool = False) -> T:
        """Spreads a batch over the example axes, along the leading axis of every array.

        With several processes, every process passes its own part of the batch; all parts have one
        length. Each gets the whole batch as one array, and holds its part of it.

        Args:
            batch: a tree of arrays with examples along their leading axes.
            stacked: whether several batches are stacked: examples then lie along the second axes.

        Raises:
            ValueError: a leaf is not an array or has no such axis; the devices do not divide
                the number of examples (the message names a `pad_to` that works).
        """
        axis, which = (1, "second") if stacked else (0, "leading")
        spec = PartitionSpec(*[None] * axis, *self.example_spec)

        def spread(path: tuple[Any, ...], leaf: Any) -> Any:
            name = below("batch", path)
            is_text = getattr(getattr(leaf, "dtype", None), "kind", None) in list("OSUMm")
            if not eqx.is_array(leaf) or is_text or leaf.ndim <= axis:
                found = shown(leaf) if eqx.is_array(leaf) else f"of type {type(leaf).__name__}"
                raise ValueError(
                    f"{name} is {found}: everything in a batch is an array of numbers with "
                    f"examples along its {which} axis. Close over everything else in the loss."
                )
            is_whole = _is_whole(leaf)
            parts = self.num_shards if is_whole else self.local_shards()
            self._check_divides(leaf.shape[axis], parts, name)
            return self.place(leaf, spec) if is_whole else self._joined(leaf, spec)

        return cast(T, jax.tree_util.tree_map_with_path(spread, batch))

    def check_examples(self, num_examples: int, batch: PyTree[Any] = ()) -> None:
        """Refuses a batch that is not one whole, or that the example axes do not divide.

        Args:
            num_examples: how many examples it has.
            batch: its arrays, the mask among them.

        Raises:
            ValueError: the axes do not divide it, and the message names a `pad_to` that works; or
                an array is one process's own, and the mesh has devices of several.
        """
        check_whole(self.mesh, batch)
        self._check_divides(num_examples, self.num_shards, "The batch")

    def _check_divides(self, num_examples: int, parts: int, name: str) -> None:
        if num_examples % parts:
            raise ValueError(
                f"{name} has {num_examples} examples, which do not divide over the {parts} devices "
                f"of {axes_text(self.examples, 'example ')}. Pad it: plan.sampler(..., pad_to="
                f"{parts}) gives a multiple, here {-(-num_examples // parts) * parts}, and "
                "is_padding_example marks the slots that were added. (Several processes put the "
                "parts of a batch together by rules.shard_batch, before the step.)"
            )

    def local_shards(self) -> int:
        """How many parts of the examples this process holds; refuses parts that several hold."""
        return local_shards(self.mesh, self.examples)

    def _place(self, tree: PyTree[Any], specs: PyTree[PartitionSpec | None]) -> PyTree[Any]:
        def of_leaf(spec: PartitionSpec | None, leaf: Any) -> Any:
            return leaf if spec is None or not eqx.is_array(leaf) else self.place(leaf, spec)

        return jax.tree.map(of_leaf, specs, tree, is_leaf=lambda spec: spec is None)

    def place(self, leaf: Any, spec: PartitionSpec) -> Array:
        """Places one array; under `jit` this constrains it.

        Args:
            leaf: the array.
            spec: where it is to live.
        """
        if not isinstance(leaf, jax.core.Tracer):
            leaf = jax.device_put(leaf, NamedSharding(self.mesh, spec))
        if not isinstance(leaf, jax.core.Tracer):  # otherwise a constant, under jit
            return leaf
        if self.is_explicit:
            leaf = jax.sharding.reshard(leaf, self.on_axes(spec, AxisType.Explicit))
        if AxisType.Auto in self.mesh.axis_types:
            leaf = jax.lax.with_sharding_constraint(leaf, self.on_axes(spec, AxisType.Auto))
        return leaf

    def on_axes(self, spec: PartitionSpec, axis_type: AxisType) -> NamedSharding:
        """The sharding that a spec describes over the mesh's axes of one type.

        Args:
            spec: over axes of any type.
            axis_type: the type.
        """
        types = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
        axes = [name for name, its in types if its is axis_type]
        return NamedSharding(self.mesh, only(spec, axes))

    def _joined(self, part: Any, spec: PartitionSpec) -> Array:
        """The whole array, from the parts of all processes."""
        if is_key(part):
            data = self._joined(jax.random.key_data(part), spec)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(part))
        sharding = NamedSharding(self.mesh, spec)
        return jax.make_array_from_process_local_data(sharding, np.asarray(part))


def checked_rules(sharding: Any) -> ShardingRules | None:
    """Returns rules or None as they are.

    Raises:
        ValueError: `sharding` is neither.
    """
    allowed = "a dp.ShardingRules(mesh, examples=('data',)), or None"
    expect("sharding", sharding, (ShardingRules, type(None)), allowed)
    return sharding


def _specs_of(
    spec: Callable[[tuple[Any, ...], tuple[int, ...]], PartitionSpec], tree: PyTree[Any]
) -> PyTree[PartitionSpec | None]:
    """A tree of the specs of arrays, by path and shape; None where there is no array."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: spec(path, leaf.shape) if is_array_or_shape(leaf) else None, tree
    )


def _spans(leaf: Any) -> bool:
    """Whether an array is known to be on several processes."""
    is_known = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    return is_known and not leaf.is_fully_addressable


def _is_whole(leaf: Any) -> bool:
    """Whether an array is not one process's part."""
    is_shape = isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct)
    return jax.process_count() == 1 or is_shape or _spans(leaf)


def check_whole(mesh: Mesh, batch: PyTree[Any], beside: PyTree[Any] = ()) -> None:
    """Refuses arrays of one process alone, if the mesh, or an array beside them, is on several.

    JAX takes such an array for the same on all processes, and each device computes its slice of
    it: with two processes, half of the examples of each would enter.

    Raises:
        ValueError: there is such an array in the batch.
    """
    # The one device of an empty mesh is None.
    processes = {device and device.process_index for device in mesh.devices.flat}
    is_spread = len(processes) > 1 or any(map(_spans, jax.tree.leaves(beside)))
    if is_spread and not all(map(_is_whole, jax.tree.leaves(batch))):
        raise ValueError(
            "The batch is this process's own, and the step runs on devices of several: only a part "
            "of each one's examples would enter. Put all parts together, the mask as well: "
            "rules.shard_batch((x, y, is_padding_example))."
        )
