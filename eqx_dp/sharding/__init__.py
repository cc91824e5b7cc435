"""Sharding rules, applied outside of the boundary between a batch and its examples."""

from .boundary import Argument, agreed, check_context, example_program, inside, over_devices
from .retrace import constraints_of
from .rules import ShardingRules, axes_of, checked_rules

__all__ = [
    "Argument",
    "ShardingRules",
    "agreed",
    "axes_of",
    "check_context",
    "checked_rules",
    "constraints_of",
    "example_program",
    "inside",
    "over_devices",
]
