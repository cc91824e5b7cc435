"""Sharding rules, applied outside of the boundary between a batch and its examples."""

from .axes import axes_of as axes_of
from .boundary import Argument as Argument
from .boundary import agreement as agreement
from .boundary import check_context as check_context
from .boundary import example_program as example_program
from .boundary import on_device as on_device
from .boundary import over_devices as over_devices
from .constraints import constraints_of as constraints_of
from .rules import ShardingRules as ShardingRules
from .rules import check_whole as check_whole
from .rules import checked_rules as checked_rules
from .shards import Cut as Cut
from .shards import Shard as Shard
from .shards import cut_of as cut_of
from .shards import evaluated_whole as evaluated_whole
from .shards import keeps_parts as keeps_parts
from .shards import rearranged as rearranged
from .shards import whole as whole
