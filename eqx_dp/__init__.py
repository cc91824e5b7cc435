"""Differentially private training for Equinox models in JAX.

A policy declares what dtype each stage uses, an engine clips the gradient of every example, and a
plan ties sampling, noise and accounting together. See README.md for a tour.
"""

from importlib.metadata import version

from . import audit
from .checks import PrecisionReport, PrivacyReport, check_precision, check_privacy
from .gradients import (
    ClippedGrad,
    Explanation,
    PerExample,
    explain,
    filter_clipped_grad,
    filter_value_and_clipped_grad,
)
from .planning import (
    FlopReport,
    MemoryPlan,
    TransformerShape,
    flop_report,
    plan_memory,
    plan_microbatch,
)
from .precision import (
    Description,
    LossScale,
    ModuleRule,
    Policy,
    apply_policy,
    available_policies,
    describe,
    load_policy,
    parse_policy,
)
from .privacy import (
    NeighboringRelation,
    PoissonSampler,
    PrivacyPlan,
    gaussian_privatizer,
    key_from_secret,
)
from .sharding import ShardingRules
from .training import (
    CheckpointError,
    CheckpointWarning,
    DataError,
    Event,
    Step,
    TensorBoard,
    Trainer,
    TrainState,
    make_step,
)

__version__ = version("eqx-dp")
"""The version of the installed package, as its metadata says."""

__all__ = [
    "CheckpointError",
    "CheckpointWarning",
    "ClippedGrad",
    "DataError",
    "Description",
    "Event",
    "Explanation",
    "FlopReport",
    "LossScale",
    "MemoryPlan",
    "ModuleRule",
    "NeighboringRelation",
    "PerExample",
    "PoissonSampler",
    "Policy",
    "PrecisionReport",
    "PrivacyPlan",
    "PrivacyReport",
    "ShardingRules",
    "Step",
    "TensorBoard",
    "TrainState",
    "Trainer",
    "TransformerShape",
    "apply_policy",
    "audit",
    "available_policies",
    "check_precision",
    "check_privacy",
    "describe",
    "explain",
    "filter_clipped_grad",
    "filter_value_and_clipped_grad",
    "flop_report",
    "gaussian_privatizer",
    "key_from_secret",
    "load_policy",
    "make_step",
    "parse_policy",
    "plan_memory",
    "plan_microbatch",
]
