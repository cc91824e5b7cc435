"""Differentially private training for Equinox models in JAX.

A policy declares what dtype each stage uses, an engine clips the gradient of every example, and a
plan ties sampling, noise and accounting together. See README.md for a tour.
"""

from .gradients import (
    ClippedGrad,
    Explanation,
    PerExample,
    explain,
    filter_clipped_grad,
    filter_value_and_clipped_grad,
)
from .precision import (
    LossScale,
    ModuleRule,
    Policy,
    available_policies,
    load_policy,
    parse_policy,
)
from .privacy import (
    NeighboringRelation,
    PoissonSampler,
    PrivacyPlan,
    gaussian_privatizer,
)
from .sharding import ShardingRules

__all__ = [
    "ClippedGrad",
    "Explanation",
    "LossScale",
    "ModuleRule",
    "NeighboringRelation",
    "PerExample",
    "PoissonSampler",
    "Policy",
    "PrivacyPlan",
    "ShardingRules",
    "available_policies",
    "explain",
    "filter_clipped_grad",
    "filter_value_and_clipped_grad",
    "gaussian_privatizer",
    "load_policy",
    "parse_policy",
]
