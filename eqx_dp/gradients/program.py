"""One example's loss, traced once to a jaxpr: what every method of the engine works on."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from numbers import Integral
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from ..precision import Policy

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


def trace(
    fun: Callable[..., Any],
    options: Options,
    params: PyTree[Array],
    frozen_arrays: PyTree[Array],
    static: PyTree[Any],
    example: tuple[PyTree[jax.ShapeDtypeStruct], ...],
    key: jax.ShapeDtypeStruct | None,
) -> Program:
    """Traces the loss of one example.

    Args:
        fun: the user's loss, ``fun(model, *example[, key=...])``.
        options: how it is to be called.
        params: the trainable leaves, already in the compute dtype.
        frozen_arrays: the other arrays of the model, floats already in the compute dtype.
        static: the rest of the model.
        example: shapes and dtypes of one example, without a batch axis.
        key: shape and dtype of one key, or None.

    Raises:
        ValueError: the loss is not a real scalar, does not return a pair where ``has_aux`` says so,
            or needs a collective over examples.
    """
    params_tree, frozen_tree = jax.tree.structure(params), jax.tree.structure(frozen_arrays)
    example_tree = jax.tree.structure((example, key))
    aux_trees: list[Any] = []

    def flat_loss(
        flat_params: list[Array], flat_frozen: list[Array], flat_example: list[Array]
    ) -> tuple[Array, list[Any]]:
        model = eqx.combine(
            params_tree.unflatten(flat_params), frozen_tree.unflatten(flat_frozen), static
        )
        batch_of_one, one_key = example_tree.unflatten(flat_example)
        if options.keep_batch_dim:
            batch_of_one = jax.tree.map(lambda x: jnp.expand_dims(x, 0), batch_of_one)
        kwargs = {} if one_key is None else {"key": one_key}
        loss, aux = _check_output(fun(model, *batch_of_one, **kwargs), options.has_aux)
        if options.policy is not None:
            loss = options.policy.cast_to_output(loss)
        if options.keep_batch_dim:
            aux = jax.tree.map(_drop_axis_of_one, aux)
        _check_aux(aux)
        flat_aux, aux_tree = jax.tree.flatten(aux)
        aux_trees.append(aux_tree)
        return loss, flat_aux

    try:
        with _matmul_precision(options.policy):
            jaxpr = jax.make_jaxpr(flat_loss)(
                jax.tree.leaves(params),
                jax.tree.leaves(frozen_arrays),
                jax.tree.leaves((example, key)),
            )
    except NameError as error:
        if "axis name" not in str(error):
            raise
        raise ValueError(
            f"The loss uses a collective over an axis that is not there ({error}). A collective "
            f"over the batch mixes examples, as eqx.nn.BatchNorm does. {_BATCH_MIXING_ADVICE}"
        ) from error
    _refuse_collectives(jaxpr.jaxpr)
    return Program(jaxpr, aux_trees[-1])


def _matmul_precision(policy: Policy | None) -> AbstractContextManager[None]:
    if policy is None or policy.matmul_precision == "default":
        return nullcontext()
    return jax.default_matmul_precision(policy.matmul_precision)


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


# Asking for one's own position along an axis exchanges nothing.
_NOT_COLLECTIVE = frozenset({"axis_index"})
# Marking a value as varying along an axis exchanges nothing going forward, but a parameter that is
# marked in the loss has its gradient summed over the axis going backward, before it is clipped.
_SUMS_BACKWARD = frozenset({"pvary", "pcast"})


def _refuse_collectives(jaxpr: jex_core.Jaxpr) -> None:
    for name, axes in _collectives(jaxpr, frozenset()):
        over = ", ".join(map(repr, axes))
        if name in _SUMS_BACKWARD:
            raise ValueError(
                f"Inside a shard_map over {over} the model is the same on all devices while "
                f"examples differ ('{name}'): JAX would sum per-example gradients over {over} "
                "before they are clipped. Call the clipped gradient outside of shard_map, or pass "
                "the model, and what the loss closes over, through jax.lax.pcast(..., to='varying')"
                " first, and sum the result over the axis yourself."
            )
        raise ValueError(
            f"The loss of one example uses the collective '{name}' over the axis {over}, which an "
            f"enclosing vmap or shard_map binds: it mixes examples. {_BATCH_MIXING_ADVICE}"
        )


def _collectives(
    jaxpr: jex_core.Jaxpr, bound: frozenset[Any]
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Finds the collectives over axes that the program itself does not bind."""
    for equation in jaxpr.eqns:
        axes = equation.params.get("axes", equation.params.get("axis_name", ()))
        axes = axes if isinstance(axes, tuple) else (axes,)
        named = tuple(a for a in axes if not isinstance(a, Integral) and a not in bound)
        if equation.primitive.name == "custom_vmap_call":
            raise ValueError(
                "The loss holds a function with a batching rule of its own "
                "(jax.custom_batching.custom_vmap), which is free to mix examples. Use the "
                "function without the rule."
            )
        of_constants = all(isinstance(v, jex_core.Literal) for v in equation.invars)
        if named and not of_constants and equation.primitive.name not in _NOT_COLLECTIVE:
            yield equation.primitive.name, named
        inside = bound
        if equation.primitive.name == "shard_map":
            inside = bound | frozenset(equation.params["mesh"].axis_names)
        for sub in jex_core.jaxprs_in_params(equation.params):
            yield from _collectives(sub, inside)
