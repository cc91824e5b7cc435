"""What a policy makes of a model: the dtypes of every leaf, and the rule that gave them."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..paths import dotted
from ..tables import aligned
from .modules import Governed, rebuild, rules_of
from .pairing import agreed_policy
from .policy import Policy, checked_policy
from .refusals import refusal


class LeafDtypes(NamedTuple):
    """The dtypes of one leaf; all None but `stored` where it is no floating-point array.

    Attributes:
        path: where the leaf stands in the model, dotted.
        stored: the dtype that it has; for a leaf that is no array, its type or name.
        params: the dtype that it should be stored in.
        compute: the dtype that it enters the forward pass in.
        output: the dtype of the model's outputs and of the loss.
        accumulate: the dtype of its gradient's norm and sum.
        noise: the dtype of its noise.
        rule: the pattern of the module rule that gave `compute`; None if the policy itself did.
    """

    path: str
    stored: str
    params: np.dtype[Any] | None = None
    compute: np.dtype[Any] | None = None
    output: np.dtype[Any] | None = None
    accumulate: np.dtype[Any] | None = None
    noise: np.dtype[Any] | None = None
    rule: str | None = None


class Description(NamedTuple):
    """What [`describe`][] returns; `str()` is a table.

    Attributes:
        rows: one for every leaf, in the model's order.
        policy: the policy.
    """

    rows: tuple[LeafDtypes, ...]
    policy: Policy

    def __str__(self) -> str:
        head = ("path", "params", "compute", "output", "accumulate", "noise", "rule")
        table = aligned([head, *map(_cells, self.rows)])
        return "\n".join([*table, f"policy: {self.policy}"])


def _cells(row: LeafDtypes) -> tuple[str, ...]:
    path = row.path or "(root)"
    if row.params is None:
        return (path, row.stored, "-", "-", "-", "-", "not a float array: never cast")
    params = str(row.params)
    if row.stored != params:
        params = f"{params} (stored as {row.stored})"
    dtypes = (row.compute, row.output, row.accumulate, row.noise)
    return (path, params, *map(str, dtypes), row.rule or "policy")


def describe(model: PyTree[Any], policy: Policy | None = None) -> Description:
    """Says which dtypes every leaf of a model has under a policy, and which rule gave them.

    Args:
        model: an `eqx.Module`, paired or not, or any tree; `jax.ShapeDtypeStruct` may stand for
            arrays.
        policy: the policy; a paired model brings its own.

    Returns:
        A table: `rows`, each with `path`, `stored`, `params`, `compute`, `output`, `accumulate`,
        `noise`, `rule`; `str()` prints it.

    Raises:
        ValueError: There is no policy, or there are two that differ; a rule has no effect on the
            model.
    """
    policy = agreed_policy(model, checked_policy(policy))
    if policy is None:
        raise refusal("policy", "None", "an eqx_dp Policy, or a model that is paired with one")
    rows: list[LeafDtypes] = []

    def collect(leaf: Any, governed: Governed) -> Any:
        rows.append(_row(leaf, governed, policy))
        return leaf

    rebuild(model, policy.compute_dtype, rules_of(policy), on_leaf=collect)
    return Description(tuple(rows), policy)


def _row(leaf: Any, governed: Governed, policy: Policy) -> LeafDtypes:
    path = dotted(governed.path)
    if not (eqx.is_array(leaf) or isinstance(leaf, np.ndarray | jax.ShapeDtypeStruct)):
        return LeafDtypes(path, getattr(leaf, "__name__", None) or type(leaf).__name__)
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return LeafDtypes(path, str(leaf.dtype))
    return LeafDtypes(
        path,
        str(leaf.dtype),
        policy.param_dtype,
        governed.compute,
        policy.output_dtype,
        policy.accumulate_dtype,
        policy.noise_dtype,
        None if governed.rule is None else governed.rule.match,
    )
