"""Which dtype each stage of a private training step uses."""

from .files import available_policies, load_policy
from .leaf_dtypes import LeafDtypes, leaf_dtypes
from .loss_scale import LossScale
from .matmul import Matmul
from .module_rule import ModuleRule
from .modules import cast_parameters, matched_by, matmul_precision, modules_of
from .pairing import agreed_policy, apply_policy, inside_engine
from .policy import (
    MatmulPrecision,
    Policy,
    checked_policy,
    dtypes_of,
)
from .refusals import refusal, refusals_name
from .schema import schema_text
from .stages import stage
from .text import parse_policy

__all__ = [
    "LeafDtypes",
    "LossScale",
    "Matmul",
    "MatmulPrecision",
    "ModuleRule",
    "Policy",
    "agreed_policy",
    "apply_policy",
    "available_policies",
    "cast_parameters",
    "checked_policy",
    "dtypes_of",
    "inside_engine",
    "leaf_dtypes",
    "load_policy",
    "matched_by",
    "matmul_precision",
    "modules_of",
    "parse_policy",
    "refusal",
    "refusals_name",
    "schema_text",
    "stage",
]
