"""Which dtype each stage of a private training step uses."""

from .files import available_policies, load_policy
from .policy import (
    LossScale,
    MatmulPrecision,
    ModuleRule,
    Policy,
    checked_policy,
    parse_policy,
)

__all__ = [
    "LossScale",
    "MatmulPrecision",
    "ModuleRule",
    "Policy",
    "available_policies",
    "checked_policy",
    "load_policy",
    "parse_policy",
]
