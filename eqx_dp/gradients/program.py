"""One example's loss, traced once to a jaxpr: what every method of the engine works on."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, PyTree

from ..paths import below
from ..precision import check_decompositions, inside_engine, matmul_precision
from ..rewrites import with_masked_products, without_ones
from ..sharding import Argument, constraints_of, example_program
from .arguments import Configuration
from .narrow_products import Narrow, narrow_products
from .outputs import check_aux, check_output, drop_axis_of_one, explain_failure

_BATCH_MIXING_ADVICE = (
    "Differentially private training needs every example's gradient to depend on that example "
    "alone. Normalise within the example instead (eqx.nn.GroupNorm, eqx.nn.LayerNorm, "
    "eqx.nn.RMSNorm), or freeze the batch statistics with eqx.nn.inference_mode(model)."
)


class Program(NamedTuple):
    """The loss of one example as a jaxpr.

    Attributes:
        jaxpr: inputs are the trainable leaves, the frozen arrays, one example's leaves and its key
            (where there is one), in that order; outputs are the loss and the leaves of aux.
        aux: the structure of aux.
        narrow: which products are in a narrow dtype; None if none is.
    """

    jaxpr: jex_core.ClosedJaxpr
    aux: Any
    narrow: Narrow | None = None

    def run(self) -> jex_core.ClosedJaxpr:
        """The program to evaluate, with its narrow products."""
        return self.jaxpr if self.narrow is None else self.narrow.program(self.jaxpr)


class Inputs(NamedTuple):
    """What a loss is traced on.

    Attributes:
        params: the trainable leaves, already in the compute dtype.
        frozen: the other arrays of the model, floats already in the compute dtype.
        static: the rest of the model.
        example: shapes and dtypes of one example, without a batch axis.
        key: shape and dtype of one key, or None.
        specs: with sharding rules, where each array of params, frozen and example lives.
    """

    params: PyTree[Array]
    frozen: PyTree[Array]
    static: PyTree[Any]
    example: tuple[PyTree[jax.ShapeDtypeStruct], ...]
    key: jax.ShapeDtypeStruct | None
    specs: list[PartitionSpec] | None

    @property
    def structs(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of all arrays, in the order in which a program takes them."""
        arrays = jax.tree.leaves((self.params, self.frozen, self.example, self.key))
        if self.specs is None:  # unchanged, with the mesh axes that they vary along
            return jax.eval_shape(lambda x: x, arrays)
        types = map(jax.typeof, arrays)
        return [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in types]

    def arguments(self) -> list[Argument]:
        """All arrays, with where they live, and whether they have a batch axis."""
        assert self.specs is not None
        num_shared = len(jax.tree.leaves((self.params, self.frozen)))
        batch = range(num_shared, num_shared + len(jax.tree.leaves(self.example)))
        return [
            Argument(struct, spec, index in batch)
            for index, (struct, spec) in enumerate(zip(self.structs, self.specs, strict=True))
        ]


def trace(fun: Callable[..., Any], options: Configuration, inputs: Inputs) -> Program:
    """Traces the user's loss, `fun(model, *example[, key=...])`, on one example.

    Raises:
        ValueError: the loss is not a real scalar, does not return a pair where `has_aux` says so,
            uses a collective over an axis that is not there, or constrains shardings without
            sharding rules, or in a way that cannot be moved out of the per-example boundary.
    """
    structure = jax.tree.structure((inputs.params, inputs.frozen, inputs.example, inputs.key))
    aux_trees: list[Any] = []

    def loss_of(*flat: Array) -> tuple[Array, list[Any]]:
        if options.augmentations == 1:
            return loss_of_call(*flat)
        *arrays, key = flat
        keys = jax.random.split(key, options.augmentations)
        losses, aux = jax.vmap(lambda key: loss_of_call(*arrays, key))(keys)
        return jnp.mean(losses), aux

    def loss_of_call(*flat: Array) -> tuple[Array, list[Any]]:
        params, frozen, batch, key = structure.unflatten(flat)
        model = eqx.combine(params, frozen, inputs.static)
        if options.policy is not None:
            model = inside_engine(model, options.policy)
        kwargs = {} if key is None else {"key": key}
        loss, aux = check_output(fun(model, *batch, **kwargs), options.has_aux)
        if options.policy is not None:
            loss = options.policy.cast_to_output(loss)
        if options.keep_batch_dim:
            aux = jax.tree.map(drop_axis_of_one, aux)
        check_aux(aux)
        flat_aux, aux_tree = jax.tree.flatten(aux)
        aux_trees.append(aux_tree)
        return loss, flat_aux

    def loss_of_one(*flat: Array) -> tuple[Array, list[Any]]:
        if not options.keep_batch_dim:
            return loss_of(*flat)
        params, frozen, batch, key = structure.unflatten(flat)
        batch = jax.tree.map(lambda x: jnp.expand_dims(x, 0), batch)
        return loss_of(*jax.tree.leaves((params, frozen, batch, key)))

    precision = "default" if options.policy is None else options.policy.matmul_precision
    try:
        with matmul_precision(precision):
            if options.sharding is None:
                jaxpr = jax.make_jaxpr(loss_of_one)(*inputs.structs)
                _refuse_constraints(jaxpr.jaxpr)
            else:
                jaxpr = example_program(
                    loss_of, inputs.arguments(), options.sharding, options.keep_batch_dim
                )
        check_decompositions(jaxpr)
    except Exception as error:
        if isinstance(error, NameError) and "axis name" in str(error):
            raise ValueError(
                f"The loss uses a collective over an axis that does not exist ({error}). A "
                "collective over the batch mixes examples, as eqx.nn.BatchNorm does. "
                f"{_BATCH_MIXING_ADVICE}"
            ) from error
        on_a_batch = options._replace(keep_batch_dim=True)
        retrace = None if options.keep_batch_dim else lambda: trace(fun, on_a_batch, inputs)
        model = eqx.combine(inputs.params, inputs.frozen, inputs.static)
        explain_failure(error, model, inputs.example, options.policy, retrace)
        raise
    return Program(
        without_ones(with_masked_products(jaxpr)), aux_trees[0], narrow_products(options.policy)
    )


def _refuse_constraints(jaxpr: jex_core.Jaxpr) -> None:
    """Refuses sharding constraints where no rules say what is spread over which axes."""
    found = constraints_of(jaxpr)
    if found:
        raise ValueError(
            f"The loss constrains shardings ({found[0]}), and no sharding rules say which axes of "
            "the mesh examples are spread over. Applied to one example, the constraint would shard "
            "a batch of one, and all the work would be on one device. Give the rules: "
            "sharding=dp.ShardingRules(mesh, examples=('data',))."
        )


def refuse_batch_norm(model: PyTree[Any]) -> None:
    """Refuses a model whose batch statistics are still being learned.

    Raises:
        ValueError: an `eqx.nn.BatchNorm` is in training mode.
    """
    is_batch_norm = lambda node: isinstance(node, eqx.nn.BatchNorm)  # noqa: E731
    for path, node in jax.tree_util.tree_leaves_with_path(model, is_leaf=is_batch_norm):
        if is_batch_norm(node) and not node.inference:
            raise ValueError(
                f"{below('model', path)} is an eqx.nn.BatchNorm in training mode, which "
                f"mixes the examples of a batch. {_BATCH_MIXING_ADVICE}"
            )
