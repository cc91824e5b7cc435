"""Sharding rules, applied outside of the boundary between a batch and its examples."""

from .axes import axes_of
from .boundary import Argument, agreed, check_context, example_program, on_device, over_devices
from .constraints import constraints_of
from .processes import slots_by_process
from .rules import ShardingRules, checked_rules

__all__ = [
    "Argument",
    "ShardingRules",
    "agreed",
    "axes_of",
    "check_context",
    "checked_rules",
    "constraints_of",
    "example_program",
    "on_device",
    "over_devices",
    "slots_by_process",
]
