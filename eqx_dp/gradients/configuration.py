"""What `filter_clipped_grad` is told beside the loss, and what of it is checked without a model."""

from typing import Any, NamedTuple

import equinox as eqx
import jax.core
import numpy as np

from ..expected import flag
from ..precision import Policy, checked_policy
from ..sharding import ShardingRules, checked_rules
from ..shown import shown
from ..trees import PyTree
from .clip import Clipping, parse_clip_norm
from .methods import METHODS


class Configuration(NamedTuple):
    """The options of a clipped gradient, as `filter_clipped_grad` explains them."""

    clipping: Clipping
    policy: Policy | None
    sharding: ShardingRules | None
    has_aux: bool
    keep_batch_dim: bool
    normalize_by: float
    microbatch_size: int | None
    method: str

    def variant(self, method: str | None, microbatch_size: int | None) -> "Configuration":
        """The same with another method or microbatch; None leaves it as it is."""
        method = self.method if method is None else _checked_method(method)
        size = _checked_microbatch_size(microbatch_size) or self.microbatch_size
        return self._replace(method=method, microbatch_size=size)


def checked_configuration(
    l2_clip_norm: PyTree[Any],
    rescale_to_unit_norm: bool,
    policy: Policy | None,
    sharding: ShardingRules | None,
    has_aux: bool,
    keep_batch_dim: bool,
    normalize_by: Any,
    microbatch_size: Any,
    method: object,
) -> Configuration:
    """The options as the user gave them.

    Raises:
        ValueError: one of them is out of its range.
    """
    policy, sharding = checked_policy(policy), checked_rules(sharding)
    if isinstance(normalize_by, jax.core.Tracer):
        raise ValueError(
            "normalize_by is a traced value. It enters the sensitivity, so it has to be a known, "
            "public number: pass a Python float."
        )
    is_number = eqx.is_array_like(normalize_by) and np.ndim(normalize_by) == 0
    if not is_number or isinstance(normalize_by, bool) or not 1e-30 <= float(normalize_by) <= 1e30:
        raise ValueError(
            f"normalize_by must be a number > 0 (from 1e-30 to 1e30), found {shown(normalize_by)}."
        )
    return Configuration(
        parse_clip_norm(l2_clip_norm, flag("rescale_to_unit_norm", rescale_to_unit_norm)),
        policy,
        sharding,
        flag("has_aux", has_aux),
        flag("keep_batch_dim", keep_batch_dim),
        float(normalize_by),
        _checked_microbatch_size(microbatch_size),
        _checked_method(method),
    )


def _checked_method(method: object) -> str:
    if not isinstance(method, str) or method not in ("auto", *METHODS):
        allowed = ", ".join(map(repr, ("auto", *METHODS)))
        raise ValueError(f"method must be one of {allowed}, found {shown(method)}.")
    return method


def _checked_microbatch_size(size: object) -> int | None:
    if size is None:
        return None
    if not isinstance(size, int | np.integer) or isinstance(size, bool) or size < 1:
        raise ValueError(
            f"microbatch_size must be an integer >= 1, or None for the whole batch at once; found "
            f"{shown(size)}."
        )
    return int(size)
