"""What a policy makes of a model: the dtypes of every leaf, and the rule that gave them."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..paths import dotted
from ..trees import PyTree, is_array_or_shape
from .modules import Governed, rebuild, rules_of
from .pairing import agreed_policy
from .policy import Policy


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
        matmul: what matrix products with it cast it to; None where they leave it in `compute`.
    """

    path: str
    stored: str
    params: np.dtype[Any] | None = None
    compute: np.dtype[Any] | None = None
    output: np.dtype[Any] | None = None
    accumulate: np.dtype[Any] | None = None
    noise: np.dtype[Any] | None = None
    rule: str | None = None
    matmul: np.dtype[Any] | None = None


def leaf_dtypes(model: PyTree[Any], policy: Policy) -> tuple[LeafDtypes, ...]:
    """The dtypes of every leaf of a model under a policy, in the model's order.

    `jax.ShapeDtypeStruct` may stand for arrays.

    Raises:
        ValueError: the model is paired with another policy; a rule has no effect on it.
    """
    agreed_policy(model, policy)
    rows: list[LeafDtypes] = []

    def collect(leaf: Any, governed: Governed) -> Any:
        rows.append(_row(leaf, governed, policy))
        return leaf

    rebuild(model, policy.compute_dtype, rules_of(policy), on_leaf=collect)
    return tuple(rows)


def _row(leaf: Any, governed: Governed, policy: Policy) -> LeafDtypes:
    path = dotted(governed.path)
    if not (is_array_or_shape(leaf) or isinstance(leaf, np.ndarray)):
        return LeafDtypes(path, getattr(leaf, "__name__", None) or type(leaf).__name__)
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return LeafDtypes(path, str(leaf.dtype))
    is_wide = governed.rule is not None and governed.rule.matmul is not None
    return LeafDtypes(
        path,
        str(leaf.dtype),
        policy.param_dtype,
        governed.compute,
        policy.output_dtype,
        policy.accumulate_dtype,
        policy.noise_dtype,
        None if governed.rule is None else governed.rule.match,
        None if policy.matmul is None or is_wide else policy.matmul.forward,
    )
