"""What can be said of a loss that raises while it is traced, beyond what it raises."""

import re
from collections.abc import Callable

import jax
from jaxtyping import PyTree, TypeCheckError

from ..precision import Policy
from .examples import argument_name
from .outputs import NoScalar
from .trained import STATE_ADVICE

_MOST_NAMED = 8
_AUTO_AXES = (
    "The mesh has Explicit axes: where JAX cannot tell where a result lives, the model has to say "
    "so, and most layers do not. Make a mesh of Auto axes, where the compiler decides: "
    "jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))."
)


def explain_failure(
    error: Exception,
    example: tuple[PyTree[jax.ShapeDtypeStruct], ...],
    policy: Policy | None,
    on_a_batch_of_one: Callable[[], object] | None,
) -> None:
    """Raises an error that helps more than what the loss raised, or adds a note to that.

    Args:
        error: what the loss of one example raised.
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
            f"The loss cannot be traced on one example ({_told(example)}), but it can be traced on "
            f"a batch of one: it seems to be written for a batch. {todo}; or write it for one "
            "example. "
            f"On one example it raises {type(error).__name__}: {error}"
        ) from error
    if policy is not None and isinstance(error, TypeCheckError):
        error.add_note(_settling(str(error), policy))
    if type(error).__name__ == "ShardingTypeError":  # JAX does not export it
        error.add_note(_AUTO_AXES)
    if on_a_batch_of_one is not None:
        error.add_note(f"The loss was called as fun(model, *example), where {_told(example)}.")


def _todo_for_a_batch(trace: Callable[[], object]) -> str | None:
    """What makes the loss one that works on a batch; None where nothing does."""
    try:
        trace()
    except NoScalar:
        return "Pass keep_batch_dim=True, and let it return the mean over the batch"
    except Exception:  # whatever a loss may raise: the first error is the one to report
        return None
    return "Pass keep_batch_dim=True"


def _told(example: tuple[PyTree[jax.ShapeDtypeStruct], ...]) -> str:
    leaves = jax.tree_util.tree_leaves_with_path(example)
    named = [f"{argument_name(path)} is {_type(leaf)}" for path, leaf in leaves[:_MOST_NAMED]]
    more = len(leaves) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


def _type(leaf: jax.ShapeDtypeStruct) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _settling(told: str, policy: Policy) -> str:
    """What settles a jaxtyping annotation that a policy's dtypes contradict."""
    # A method of a class, or else a function: then no rule is about what it is given.
    where = re.search(r"of (?:[\w.]+\.)?([A-Z]\w*)\.\w+\.$", told.partition("\n")[0])
    expected = re.search(r"(BFloat16|Float16|Float32|Float64)\[", told)
    match = where.group(1) if where else "the module's class or path"
    dtype = expected.group(1).lower() if expected else "the dtype annotated"
    return (
        f"The policy computes in {policy.compute_dtype}: parameters and float inputs enter the "
        f"loss in it. If an annotation asks for another dtype, add a module rule to the policy: "
        f'[[modules]] match = "{match}", compute = "{dtype}" '
        f"(in a policy's text: module:{match}={dtype})."
    )
