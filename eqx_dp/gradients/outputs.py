"""The result of a loss, split into loss and aux, and checked."""

import re
import traceback
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, TypeCheckError

from ..paths import below, dotted
from ..precision import Policy
from ..shown import shown, some
from ..trees import PyTree

STATE_ADVICE = (
    "Pass the state with the model, grad_fn((model, state), *batch), and let the loss take the "
    "pair as its first argument. Every trace then gets its own state, and its gradients are "
    "None, so that no noise is added to it. optimizer.init(grad_fn.trainable((model, state))) fits "
    "these gradients. eqx.nn.inference_mode(model) makes layers leave their state alone."
)


def is_state(node: Any) -> bool:
    """Whether a node of a tree is an `eqx.nn.State`."""
    return isinstance(node, eqx.nn.State)


def argument_name(path: tuple[Any, ...]) -> str:
    """Where a leaf stands among the arguments after the model."""
    index, *rest = path
    assert isinstance(index, jax.tree_util.SequenceKey)
    return below(f"batch argument {index.idx}", tuple(rest))


_NOT_IF_COMPARED = "(not if it compares rows: then a group of rows is one example)"
_NO_GRADIENT = (
    "If that is its gradient, give the loss itself, before eqx.filter_grad, "
    "eqx.filter_value_and_grad or jax.grad: the clipped gradient takes their place."
)


class NoScalar(ValueError):
    """A loss is an array, not a single number."""


def check_output(output: Any, has_aux: bool) -> tuple[Float[Array, ""], PyTree[Any]]:
    """Splits the user's output into loss and aux.

    Raises:
        ValueError: it is no pair where it should be one, or its loss is no real scalar.
    """
    if has_aux and not (isinstance(output, tuple) and len(output) == 2):
        raise ValueError(
            f"With has_aux=True the loss must return (loss, aux); it returned {shown(output)}."
        )
    pair: tuple[Any, Any] = output if has_aux else (output, None)
    loss, aux = pair
    if eqx.is_array_like(loss) and jnp.shape(loss) == ():
        loss = jnp.asarray(loss)
        if not jnp.issubdtype(loss.dtype, jnp.floating):
            raise ValueError(f"The loss must be a real floating-point number, not {loss.dtype}.")
        return loss, aux
    if not eqx.is_array_like(loss):
        found = "None" if loss is None else f"a {type(loss).__name__}"
        raise ValueError(
            f"The loss must return a scalar array; it returned {found}. (A pair (loss, aux) is for "
            f"dp.filter_clipped_grad(..., has_aux=True).) {_NO_GRADIENT}"
        )
    raise NoScalar(
        f"The loss of one example must be a scalar; its shape is {jnp.shape(loss)}. Reduce it with "
        "jnp.mean or jnp.sum; a loss written for a whole batch needs keep_batch_dim=True "
        f"{_NOT_IF_COMPARED}. {_NO_GRADIENT}"
    )


def check_aux(aux: PyTree[Any]) -> None:
    """Refuses aux that cannot, or must not, be stacked over examples.

    Raises:
        ValueError: aux holds something else than arrays, or an `eqx.nn.State`.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(aux, is_leaf=is_state):
        if is_state(leaf):
            raise ValueError(
                f"{below('aux', path)} is an eqx.nn.State. A state that a private "
                "example has written must not reach the next step. Return the loss alone, and "
                "update the state on public data, outside of the loss."
            )
        if not eqx.is_array_like(leaf):
            raise ValueError(
                f"{below('aux', path)} is a {type(leaf).__name__}: aux is stacked over "
                "examples, so it holds arrays only. Leave it out (eqx.filter(aux, eqx.is_array))."
            )


def drop_axis_of_one(leaf: Any) -> Any:
    """Removes the batch axis of length one from an aux leaf of a loss for batches."""
    return leaf[0] if eqx.is_array(leaf) and leaf.ndim > 0 and leaf.shape[0] == 1 else leaf


_AUTO_AXES = (
    "The mesh has Explicit axes: where JAX cannot tell where a result lives, the model has to say "
    "so, and most layers do not. Make a mesh of Auto axes: jax.make_mesh(shape, names, "
    "axis_types=(jax.sharding.AxisType.Auto,) * len(names))."
)


def explain_failure(
    error: Exception,
    model: PyTree[Any],
    example: tuple[PyTree[jax.ShapeDtypeStruct], ...],
    policy: Policy | None,
    on_a_batch_of_one: Callable[[], object] | None,
) -> None:
    """Raises a more helpful error than that of the loss, or adds a note to it.

    Args:
        error: the error that the loss of one example raised.
        model: the model.
        example: shapes and dtypes of one example.
        policy: of the engine.
        on_a_batch_of_one: traces the loss as one for a batch; None where it has been traced so.

    Raises:
        ValueError: the loss uses an old `eqx.nn.State`; or it is written for a batch.
    """
    if "Attempted to use old state" in str(error):
        raise ValueError(
            "The loss uses an eqx.nn.State that is used up. A layer that writes its state "
            "(state.set) uses up the one that it is given, and the loss is traced more than once, "
            f"so it cannot close over a State that it writes. {STATE_ADVICE}"
        ) from error
    todo = None
    if on_a_batch_of_one is not None and not isinstance(error, NoScalar):
        todo = _todo_for_a_batch(on_a_batch_of_one)
    if todo is not None:
        raise ValueError(
            f"The loss cannot be traced on one example ({_described(example)}), but it can be "
            f"traced on a batch of one: it seems to be written for a batch. {todo}; or write it "
            f"for one example. On one example it raises {type(error).__name__}: {error}"
        ) from error
    about_dtypes = re.search(r"float\d|dtype", str(error), re.IGNORECASE)
    narrow = policy and policy.compute_dtype.itemsize < 4 and about_dtypes
    if policy and (isinstance(error, TypeCheckError) or narrow):
        error.add_note(_advice_on_dtype(error, policy, model))
    if type(error).__name__ == "ShardingTypeError":  # JAX does not export it
        error.add_note(_AUTO_AXES)
    if on_a_batch_of_one is not None:
        error.add_note(
            f"The loss was called as fun(model, *example), where {_described(example)}. The model "
            "comes first; a key and a mask are given by name (key=, is_padding_example=)."
        )


def _todo_for_a_batch(trace: Callable[[], object]) -> str | None:
    """How to make the loss work on a batch; None if that is not the problem."""
    try:
        trace()
    except NoScalar:
        return f"Pass keep_batch_dim=True {_NOT_IF_COMPARED}, and let it return the mean"
    except Exception:  # any error of the loss: the first one is reported
        return None
    return f"Pass keep_batch_dim=True {_NOT_IF_COMPARED}"


def _described(example: tuple[PyTree[jax.ShapeDtypeStruct], ...]) -> str:
    leaves = jax.tree_util.tree_leaves_with_path(example)
    return some([f"{argument_name(path)} is {_type(leaf)}" for path, leaf in leaves], 8)


def _type(leaf: jax.ShapeDtypeStruct) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _advice_on_dtype(error: Exception, policy: Policy, model: PyTree[Any]) -> str:
    """Advice on an annotation, a function or a carry that a policy's compute dtype does not fit."""
    # jaxtyping's error, and that on decompositions, end with a method of a class, or a function.
    where = re.search(r"\b([A-Z]\w*)\.\w+(?:\.<locals>.*)?[.)]$", str(error).partition("\n")[0])
    expected = re.search(r"(BFloat16|Float16|Float32|Float64)\[", str(error))
    holders = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [type(holder).__name__ for holder in holders if isinstance(holder, eqx.Module)]
    match = where.group(1) if where else ("the module's class or path", *names)[-1]
    parts = jax.tree_util.tree_leaves_with_path(model, is_leaf=lambda x: type(x).__name__ == match)
    paths = [dotted(path) for path, part in parts if type(part).__name__ == match]
    match = paths[0] if len(paths) == 1 and paths[0] else match
    dtype = expected.group(1).lower() if expected else "float32"
    return (
        f"The policy computes in {policy.compute_dtype}: parameters and float inputs enter the "
        "loss in it. A carry has to start in it (jnp.zeros(n, x.dtype)). If an annotation asks for "
        "another dtype, or a function of JAX does not take this one (FFT, SVD, eigh), add a module "
        f'rule to the policy: [[modules]] match = "{match}", compute = "{dtype}" (in a policy\'s '
        f'text: module:{match}={dtype}; in Python: dp.ModuleRule("{match}", "{dtype}")). Outside '
        "of modules cast the operand: x.astype(jnp.float32)."
    )
