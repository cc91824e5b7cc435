"""Sharding rules, applied outside of the boundary between a batch and its examples."""

from .axes import axes_of
from .boundary import Argument, agreement, check_context, example_program, on_device, over_devices
from .constraints import constraints_of
from .processes import slots_by_process
from .rules import ShardingRules, checked_rules
from .shards import Cut, Shard, cut_of, evaluated_whole, keeps_parts, rearranged, whole
from .uneven import warn_of_uneven

__all__ = [
    "Argument",
    "Cut",
    "Shard",
    "ShardingRules",
    "agreement",
    "axes_of",
    "check_context",
    "checked_rules",
    "constraints_of",
    "cut_of",
    "evaluated_whole",
    "example_program",
    "keeps_parts",
    "on_device",
    "over_devices",
    "rearranged",
    "slots_by_process",
    "warn_of_uneven",
    "whole",
]
