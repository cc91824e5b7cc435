"""One example's loss, traced once to a jaxpr: what every method of the engine works on."""

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, PyTree, TypeCheckError

from ..precision import Policy, inside_engine, matmul_precision
from ..sharding import Argument, ShardingRules, constraints_of, example_program

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
    """

    jaxpr: jex_core.ClosedJaxpr
    aux: Any

    def with_consts(self, consts: list[Array]) -> "Program":
        """The same program, closed over other arrays."""
        return Program(jex_core.ClosedJaxpr(self.jaxpr.jaxpr, consts), self.aux)

    def __call__(
        self, params: list[Array], frozen: list[Array], example: list[Array]
    ) -> tuple[Array, list[Array]]:
        """Evaluates the loss and the aux leaves of one example."""
        evaluate: Callable[..., list[Array]] = jex_core.jaxpr_as_fun(self.jaxpr)
        loss, *aux = evaluate(*params, *frozen, *example)
        return jnp.asarray(loss), [jnp.asarray(leaf) for leaf in aux]


class Options(NamedTuple):
    """How the user's function is to be called on one example."""

    has_aux: bool
    keep_batch_dim: bool
    policy: Policy | None
    sharding: ShardingRules | None


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
        if self.specs is None:  # as they are, with the mesh axes that they vary along
            return [jax.eval_shape(lambda x: x, x) for x in arrays]
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


def trace(fun: Callable[..., Any], options: Options, inputs: Inputs) -> Program:
    """Traces the loss of one example.

    Args:
        fun: the user's loss, ``fun(model, *example[, key=...])``.
        options: how it is to be called.
        inputs: what on.

    Raises:
        ValueError: the loss is not a real scalar, does not return a pair where ``has_aux`` says so,
            uses a collective over an axis that is not there, or constrains shardings without rules
            to go by, or in a way that cannot be moved out of the per-example boundary.
    """
    structure = jax.tree.structure((inputs.params, inputs.frozen, inputs.example, inputs.key))
    aux_trees: list[Any] = []

    def loss_of(*flat: Array) -> tuple[Array, list[Any]]:
        params, frozen, batch, key = structure.unflatten(flat)
        model = eqx.combine(params, frozen, inputs.static)
        if options.policy is not None:
            model = inside_engine(model, options.policy)
        kwargs = {} if key is None else {"key": key}
        loss, aux = _check_output(fun(model, *batch, **kwargs), options.has_aux)
        if options.policy is not None:
            loss = options.policy.cast_to_output(loss)
        if options.keep_batch_dim:
            aux = jax.tree.map(_drop_axis_of_one, aux)
        _check_aux(aux)
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
    except TypeCheckError as error:
        if options.policy is not None:
            error.add_note(_settling(str(error), options.policy))
        raise
    except NameError as error:
        if "axis name" not in str(error):
            raise
        raise ValueError(
            f"The loss uses a collective over an axis that is not there ({error}). A collective "
            f"over the batch mixes examples, as eqx.nn.BatchNorm does. {_BATCH_MIXING_ADVICE}"
        ) from error
    return Program(jaxpr, aux_trees[0])


def _settling(told: str, policy: Policy) -> str:
    """What settles a jaxtyping annotation that a policy's dtypes contradict."""
    # A method of a class, or else a function: then no rule is about what it is given.
    where = re.search(r"of (?:[\w.]+\.)?([A-Z]\w*)\.\w+\.$", told.partition("\n")[0])
    expected = re.search(r"(BFloat16|Float16|Float32|Float64)\[", told)
    match = where.group(1) if where else "the module's class or path"
    dtype = expected.group(1).lower() if expected else "the dtype annotated"
    return (
        f"The policy computes in {policy.compute_dtype}: parameters and float inputs enter the "
        f"loss in it. Where an annotation asks for another dtype, a rule of the policy settles it: "
        f'[[modules]] match = "{match}", compute = "{dtype}" '
        f"(in a policy's text: module:{match}={dtype})."
    )


def _refuse_constraints(jaxpr: jex_core.Jaxpr) -> None:
    """Refuses sharding constraints where no rules say what is spread over which axes."""
    found = constraints_of(jaxpr)
    if found:
        raise ValueError(
            f"The loss constrains shardings ({found[0]}), and no sharding rules say which axes of "
            "the mesh examples are spread over: example by example the constraint would land on a "
            "batch of one, and its work on one device. Give them: "
            "sharding=dp.ShardingRules(mesh, examples=('data',))."
        )


def _check_output(output: Any, has_aux: bool) -> tuple[Float[Array, ""], PyTree[Any]]:
    """Splits the user's output into loss and aux, and refuses a loss that is no real scalar."""
    if has_aux:
        if not (isinstance(output, tuple) and len(output) == 2):
            raise ValueError(
                "With has_aux=True the loss must return a pair (loss, aux); it returned "
                f"{type(output).__name__}."
            )
        loss, aux = output
    else:
        loss, aux = output, None
    if not eqx.is_array_like(loss):
        hint = "; pass has_aux=True if it returns (loss, aux)" if isinstance(loss, tuple) else ""
        raise ValueError(
            f"The loss must return a scalar array; it returned {type(loss).__name__}{hint}."
        )
    loss = jnp.asarray(loss)
    if loss.shape != ():
        raise ValueError(
            f"The loss of one example must be a scalar; its shape is {loss.shape}. Reduce it with "
            "jnp.mean or jnp.sum; a loss written for a whole batch needs keep_batch_dim=True."
        )
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ValueError(
            f"The loss must be a real floating-point number; its dtype is {loss.dtype}."
        )
    return loss, aux


def _check_aux(aux: PyTree[Any]) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(aux):
        if not eqx.is_array_like(leaf):
            raise ValueError(
                f"aux{jax.tree_util.keystr(path)} is a {type(leaf).__name__}: what a loss returns "
                "beside is stacked over examples, so it holds arrays only. Leave it out "
                "(eqx.filter(aux, eqx.is_array))."
            )


def _drop_axis_of_one(leaf: Any) -> Any:
    """Takes the batch axis of length one off an aux leaf of a loss that is written for a batch."""
    return leaf[0] if eqx.is_array(leaf) and leaf.ndim > 0 and leaf.shape[0] == 1 else leaf


def takes_key(fun: Callable[..., Any], num_positional: int) -> tuple[bool, bool]:
    """Reads from a loss's signature whether it can be given a ``key``, and whether it must be.

    A parameter of that name that the model or the batch already fills is data.
    """
    try:
        parameters = inspect.signature(fun).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return True, False
    named = parameters.get("key")
    if named is not None and named.kind in (named.KEYWORD_ONLY, named.POSITIONAL_OR_KEYWORD):
        if named.kind is not named.KEYWORD_ONLY and list(parameters).index("key") < num_positional:
            return False, False
        return True, named.default is named.empty
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values()), False


def refuse_batch_norm(model: PyTree[Any]) -> None:
    """Refuses a model whose batch statistics are still being learned.

    Raises:
        ValueError: an ``eqx.nn.BatchNorm`` is in training mode.
    """
    is_batch_norm = lambda node: isinstance(node, eqx.nn.BatchNorm)  # noqa: E731
    for path, node in jax.tree_util.tree_leaves_with_path(model, is_leaf=is_batch_norm):
        if is_batch_norm(node) and not node.inference:
            raise ValueError(
                f"model{jax.tree_util.keystr(path)} is an eqx.nn.BatchNorm in training mode, which "
                f"mixes the examples of a batch. {_BATCH_MIXING_ADVICE}"
            )
