"""Which dtype each stage of a private training step uses."""

from .describe import Description, LeafDtypes, describe
from .files import available_policies, load_policy
from .modules import cast_parameters, matmul_precision
from .pairing import agreed_policy, apply_policy, inside_engine
from .policy import (
    LossScale,
    MatmulPrecision,
    ModuleRule,
    Policy,
    checked_policy,
    dtypes_of,
)
from .stages import stage
from .text import parse_policy

__all__ = [
    "Description",
    "LeafDtypes",
    "LossScale",
    "MatmulPrecision",
    "ModuleRule",
    "Policy",
    "agreed_policy",
    "apply_policy",
    "available_policies",
    "cast_parameters",
    "checked_policy",
    "describe",
    "dtypes_of",
    "inside_engine",
    "load_policy",
    "matmul_precision",
    "parse_policy",
    "stage",
]
