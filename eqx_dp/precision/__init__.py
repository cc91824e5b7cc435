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
    parse_policy,
)
from .report import PrecisionReport, check_precision
from .stages import stage

__all__ = [
    "Description",
    "LeafDtypes",
    "LossScale",
    "MatmulPrecision",
    "ModuleRule",
    "Policy",
    "PrecisionReport",
    "agreed_policy",
    "apply_policy",
    "available_policies",
    "cast_parameters",
    "check_precision",
    "checked_policy",
    "describe",
    "inside_engine",
    "load_policy",
    "matmul_precision",
    "parse_policy",
    "stage",
]
